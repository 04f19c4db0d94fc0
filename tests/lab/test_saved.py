"""A loaded cache answers bit for bit as the saved one; a file that does not fit is refused."""

from copy import deepcopy
from types import SimpleNamespace

from pytest import fixture, mark, raises
from safetensors.torch import save_file
import torch

from commands import refused
from common import ENCODING, caches_of, decoder, tasks
from nanollm import LEARNED, TINY
from nanollm.__main__ import main
from nanollm.bridge import attach
from nanollm.cache import Method, compress, crop, make_cache
from nanollm.checkpoint import from_hf, hf_model
from nanollm.generate import prefill
from lab.saved import header, load, save
from lab import ask
from methods.baselines.snap_kv import SnapKV
from lab.one_page import PAGE
from lab.methods_by_name import Variant, pick

METHODS = pick([]) | pick(["snap_kv@3", "snap_kv@4"])


@fixture(scope="module")
def model():
    return from_hf(TINY)


@torch.no_grad()
def read(model, variant):
    """Return caches after a prompt, and the tokens that follow it."""
    tokens = torch.from_numpy(tasks("test").batch("plain", 0, 2, 128).tokens)
    caches = caches_of(model, variant, budget=40, window_size=8)
    prefill(model, tokens[:, :120], caches, 64)
    compress(model, tokens[:, :120], caches)
    return caches, tokens[:, 120:]


@torch.no_grad()
def answers(model, caches, after, sizes=(1, 1, 4, 1, 1)):
    """Return logits (B, 8, V): of two tokens one by one, of four at once, and of two one by one."""
    return torch.cat([model(part, caches) for part in after.split(sizes, 1)], 1)


@mark.parametrize("name", METHODS)
def test_a_loaded_cache_answers_to_the_last_bit_as_the_saved_one(name, tmp_path):
    model = decoder(vocab_size=2048, max_len=256)
    caches, after = read(model, METHODS[name])
    file = tmp_path / "page.cache"
    save(caches, file, method=name)
    fresh = caches_of(model, METHODS[name], **header(file)["options"])
    load(file, fresh)
    assert header(file)["note"] == dict(method=name)
    assert torch.equal(answers(model, caches, after), answers(model, fresh, after))
    for one, other in zip(fresh, caches):
        assert one.bytes()[0] == other.bytes()[0]  # live


class Odd(Method):
    """Full attention with a state that a file cannot hold."""

    def evict(self, layer):
        layer.state["factor"] = object()


def test_a_state_that_a_file_cannot_hold_is_named(model, tmp_path):
    with raises(ValueError, match="Odd .* state.factor is a object"):
        save(read(model, Variant(Odd, {}))[0], tmp_path / "page.cache")
    caches = make_cache(model)
    prefill(model, torch.arange(20)[None], caches)
    with raises(ValueError, match="the prompt has not ended"):
        save(caches, tmp_path / "page.cache")
    assert not any(tmp_path.iterdir())


def test_a_file_is_refused_that_is_damaged_or_does_not_fit(model, tmp_path):
    used, _ = read(model, METHODS["snap_kv@4"])
    file, turned, other = tmp_path / "page.cache", from_hf(TINY), from_hf(TINY)
    save(used, file, version=7)  # a note does not change the header
    turned.config.rope_theta = 1e4  # the same weights
    other.embed.weight.data[0] += 1
    whole, options = file.read_bytes(), header(file)["options"]

    def fresh(model, name="snap_kv@4", **changed):
        return caches_of(model, METHODS[name], **options | changed)

    save_file(dict(x=torch.ones(2)), tmp_path / "weights")
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    for caches, data, message in (
        (fresh(other), whole, "another decoder"),
        (fresh(turned), whole, "another decoder"),
        (fresh(from_hf(TINY, torch.float16)), whole, "in float32"),
        (fresh(model, "ada_kv"), whole, "is of SnapKV with"),
        (fresh(model, budget=41), whole, "these caches are SnapKV with .*41"),
        (fresh(model, "snap_kv+critical"), whole, "caches are SnapKV with .*Critical"),
        (fresh(model, "snap_kv@3"), whole, "Slots', 'bits': 4}, and .* 3}"),
        (used, whole, "have seen 120 tokens"),
        (None, (tmp_path / "weights").read_bytes(), "page.cache is not a saved cache"),
        (None, whole[:500], "page.cache is not a saved cache"),
        (None, whole.replace(b'n\\": 7', b'n\\": 5'), "version 5, .* version 7"),
        (fresh(model), whole[: len(whole) * 3 // 4], "cut off or damaged"),
        (fresh(model), flipped, "cut off or damaged"),
    ):
        file.write_bytes(data)
        with raises(ValueError, match=message):
            load(file, caches)


def test_a_file_of_other_gates_is_refused(model, tmp_path):
    caches, _ = read(model, METHODS["question_gates"])
    save(caches, tmp_path / "page.cache")
    fresh, _ = read(model, METHODS["question_gates"])
    fresh[0].method.gates += 1
    with raises(ValueError, match="these caches are QuestionGates"):
        load(tmp_path / "page.cache", fresh)


def test_caches_are_compressed_for_the_text_that_they_have_read(model):
    tokens = torch.arange(40)[None]
    caches = make_cache(model)
    prefill(model, tokens, caches, 16)
    crop(caches, 30)
    prefill(model, tokens[:, 30:35], caches)
    with raises(ValueError, match="another text"):
        compress(model, tokens[:, 5:], caches)
    compress(model, tokens[:, :35], caches)


@torch.no_grad()
def test_a_memory_of_the_bridge_is_saved_and_loaded(tmp_path):
    bridged, file = hf_model(TINY), tmp_path / "page.cache"
    tokens = torch.from_numpy(tasks("test").batch("plain", 0, 1, 90).tokens)
    memory = attach(bridged, SnapKV, budget=40, window_size=8)
    bridged(tokens[:, :80], past_key_values=memory)
    memory.compress(tokens[:, :80])
    save(memory, file)
    fresh = attach(bridged, SnapKV, **header(file)["options"])
    load(file, fresh)
    again = deepcopy(fresh)
    one, other = (bridged(tokens[:, 79:], past_key_values=x) for x in (memory, fresh))
    assert torch.equal(one.logits, other.logits) and fresh.get_seq_length() == 90
    with raises(ValueError, match="another text than the prompt"):
        bridged.generate(tokens.roll(1), past_key_values=again, max_new_tokens=2)


def test_a_question_in_own_words_ends_a_turn_and_the_answer_streams(monkeypatch):
    fed, pieces = [], {7: " T", 8: "é", 9: "!", 10: "\nmore", 4: "<end>"}

    def prefill(model, ids, caches):
        fed.append(ids[0].tolist())
        return torch.nn.functional.one_hot(torch.tensor([next(script)]), 20)

    def decode(ids):  # half of an é at the end is no letter
        text = "".join(pieces[i] for i in ids)
        return text[:-1] + "\ufffd" if ids[-1] == 8 else text

    both = dict(encode_ordinary=lambda x: [len(x)], decode=decode)
    chat = SimpleNamespace(turn=lambda: ([1, 2], [4, 5]), special={11}, **both)
    plain = SimpleNamespace(bos=None, n_vocab=20, **both)
    config = SimpleNamespace(max_len=99, bos=None)
    model = SimpleNamespace(config=config, embed=SimpleNamespace(weight=torch.empty(1)))
    monkeypatch.setattr(ask, "prefill", prefill)
    for encoding, question, tokens, first, answer in (
        (chat, "Who?", (7, 8, 9, 4), [6, 4, 5], ["T", "", "é!"]),
        (chat, "Who", (7, 11), [7], ["T"]),
        (plain, "Who?", (7, 9, 10), [8], ["T", "!", ""]),
    ):
        script, fed[:] = iter(tokens), []
        assert [
            *ask.answer(model, encoding, [SimpleNamespace(seen=3)], question, 9)
        ] == answer
        assert fed == [first, *([x] for x in tokens[:-1])]
    assert ask.around(chat, config) == ([1, 2], [4, 5])


@mark.parametrize("folder, name", [(TINY, "question_gates"), (LEARNED, "kvzip@4")])
def test_a_page_is_compressed_once_and_asked_later(
    folder, name, tmp_path, capsys, monkeypatch
):
    seen = []

    def noted(model, fed, caches):
        seen.append(caches[0].seen)
        return prefill(model, fed, caches)

    page, file = tmp_path / "page.txt", tmp_path / "page.cache"
    page.write_text(PAGE)
    options = f"--file {page} --out {file} --model {folder} --method {name} --keep 25"
    main(["compress", *options.split()])
    output = capsys.readouterr().out
    assert f"{file.stat().st_size:,} bytes" in output
    tokens = int(output.split()[0])
    assert header(file)["options"]["budget"] == round(tokens / 4)
    full = tokens * 6 * 3 * (2 * 32 * 4 + 4)
    assert f"bytes, {100 * file.stat().st_size / full:.1f} % of a full" in output
    assert "tokens read and compressed" in output
    page.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(ask, "prefill", noted)
        main(["ask", str(file), "The code of table is", " The code of star is "])
    assert seen.count(tokens) == 2  # no question sees the one before
    main(["ask", str(file), "The code of table is", "--compare"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   [")[0] for line in lines] == [
        "The code of table is ▸ 2356.",
        "The code of star is ▸ 6098.",
        "The code of table is ▸ 2356.",
        "   the full cache ▸ 2356.",
    ]


def test_options_of_compress_and_ask_do_what_they_say(tmp_path, capsys):
    page, file = tmp_path / "page.txt", tmp_path / "page.cache"
    page.write_text(PAGE * 3)
    words = f"compress --file {page} --out {file} --method snap_kv".split()
    written = []
    for more in [], [], ["--evict-early"]:
        main(words + more)
        written.append(file.read_bytes())
    assert written[0] == written[1] != written[2]
    asked = ["ask", str(file), "The code of table is"]
    main([*asked, "--tokens", "1"])
    answer = capsys.readouterr().out.rpartition("▸")[2].partition("   [")[0]
    assert len(ENCODING.encode(answer)) == 1
    refused(capsys, [*asked, "--model", str(LEARNED)], "another decoder")


def test_what_cannot_be_asked_is_one_line(model, tmp_path, capsys):
    save(read(model, METHODS["snap_kv"])[0], tmp_path / "in_python.cache")
    for name, message in (
        ("in_python.cache", "was not written by"),
        ("nowhere", "nowhere"),
    ):
        refused(capsys, ["ask", str(tmp_path / name), "The code of table is"], message)
