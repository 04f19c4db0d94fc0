"""A loaded cache answers bit for bit as the saved one; a file that does not fit is refused."""
from dataclasses import dataclass
import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch
from torch import Tensor

from common import ENCODING, tasks
from nanollm import LEARNED, TINY
from nanollm.__main__ import main
from nanollm.cache import LayerCache, make_cache
from nanollm.commands.ask import answer
from nanollm.commands.demo import PAGE
from nanollm.commands.registry import given, pick
from nanollm.generate import end_prompt, prefill, tell_chunk_ends
from nanollm.hf.bridge import attach
from nanollm.hf.checkpoint import from_hf, hf_model
from nanollm.saved import from_bytes, header, header_of, in_16_bits, load, save, to_bytes
from nanollm.tokenizer import boundaries

CALIBRATED = "duo_attention", "duo_attention_kvzip", "kvzip_fast"  # their options take seconds
METHODS = {name: Method for name, Method in pick([]).items() if name not in CALIBRATED}
REFUSED = {"cam": "generator", "random": "generator", "random_ends": "generator", "kv_reviver": "sketch",
           "kv_reviver_mean": "sketch", "kv_reviver_shrunk": "sketch"}


@pytest.fixture(scope="module")
def model():
    return from_hf(TINY)


@torch.no_grad()
def read(model, Method, B=2, T=150, **options):
    """Return caches after a prompt, and the tokens that follow it."""
    tokens = torch.from_numpy(tasks("test").batch("plain", 0, B, T + 30).tokens)
    caches = make_cache(model, Method, **given(Method, budget=40, window_size=8) | options)
    tell_chunk_ends(caches, boundaries(ENCODING, 2048)[tokens[:, :T]])
    prefill(model, tokens[:, :T], caches, 64)
    end_prompt(model, tokens[:, :T], caches)
    return caches, tokens[:, T:]


@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
def test_a_loaded_cache_answers_to_the_last_bit_as_the_saved_one(model, name, tmp_path):
    caches, after = read(model, METHODS[name])
    file = tmp_path / "page.cache"
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"cannot be saved: its {REFUSED[name]} is a "):
            save(caches, file)
        assert not file.exists()
        return
    save(caches, file, method=name)
    fresh = make_cache(model, METHODS[name], **header(file)["options"])
    load(file, fresh)
    assert header(file)["note"] == dict(method=name)
    for part in (*after[:, :12].split(1, 1), after[:, 12:20], *after[:, 20:].split(1, 1)):
        assert torch.equal(model(part, caches), model(part, fresh))
    assert [cache.bytes() for cache in fresh] == [cache.bytes() for cache in caches]


@dataclass(eq=False)
class Measured(LayerCache):
    """Full attention with an option that a file leaves out: it acts only at the prompt's end."""
    bases: Tensor | None = None


@torch.no_grad()
def test_a_file_is_loaded_without_what_its_method_measured_beforehand(model, tmp_path):
    caches, after = read(model, Measured, bases=torch.ones(2))
    save(caches, tmp_path / "page.cache")
    fresh = make_cache(model, Measured, **header(tmp_path / "page.cache")["options"])
    load(tmp_path / "page.cache", fresh)
    assert torch.equal(model(after, caches), model(after, fresh))


def like(model, file, name="snap_kv", **changed):
    """Return fresh caches with a file's options."""
    return make_cache(model, METHODS[name], **header(file)["options"] | changed)


@torch.no_grad()
def test_a_file_in_16_bits_has_half_the_bytes_and_the_same_whole_numbers(model):
    caches, _ = read(model, METHODS["kvzip"])
    exact, half = to_bytes(caches), to_bytes(caches, half=True)
    assert len(half) < 0.6 * len(exact)
    fresh = make_cache(model, METHODS["kvzip"], **header_of(half)["options"])
    from_bytes(half, fresh)
    for old, new in zip(caches, fresh):
        assert (old.pos == new.pos).all() and old.k.dtype == new.k.dtype and old.pos.dtype == new.pos.dtype
        assert (old.k.half().float() == new.k).all() and (old.v.half().float() == new.v).all()
    numbers = torch.tensor([1e5, 1.0])
    assert in_16_bits(numbers) is numbers and in_16_bits(numbers[1:]).dtype == torch.float16
    assert in_16_bits(torch.tensor([40000])).dtype == torch.int64


@torch.no_grad()
def test_a_file_is_refused_that_is_damaged_or_does_not_fit(model, tmp_path):
    caches, _ = read(model, METHODS["snap_kv"])
    file = tmp_path / "page.cache"
    save(caches, file, version=7)  # a note does not change the header
    turned, narrow = from_hf(TINY), from_hf(TINY, torch.bfloat16)
    turned.config.rope_theta = 1e4  # the same weights
    for fresh, message in ((like(from_hf(LEARNED), file), "was written by another decoder"),
                           (like(turned, file), "was written by another decoder"),
                           (like(narrow, file), "was written in float32, and this decoder has bfloat16"),
                           (like(model, file, "snap_kv_4"), "is of SnapKV with"),
                           (like(model, file, budget=41), "and these caches are SnapKV with .*41"),
                           (caches, "have seen 150 tokens")):
        with pytest.raises(ValueError, match=message):
            load(file, fresh)

    with safe_open(file, "pt") as opened:
        head = json.loads(opened.metadata()["cache"])
    tensors = load_file(file)
    write = lambda name, **changed: save_file(tensors, tmp_path / name,
                                              metadata=dict(cache=json.dumps(head | changed)))
    write("later", version=3)
    save_file(tensors, tmp_path / "weights")
    (tmp_path / "cut").write_bytes(file.read_bytes()[:500])
    for name, message in (("later", "has version 3; this program reads version 2"),
                          ("weights", "is not a saved cache"), ("cut", "is not a saved cache")):
        with pytest.raises(ValueError, match=message):
            header(tmp_path / name)
    tensors["3.slots.v"][0, 0, 5, 2] += 1
    write("changed")
    with pytest.raises(ValueError, match="is damaged: its numbers are not those that were saved"):
        load(tmp_path / "changed", like(model, file))


@torch.no_grad()
def test_a_memory_of_the_bridge_is_saved_and_loaded(tmp_path):
    bridged, file = hf_model(TINY), tmp_path / "page.cache"
    tokens = torch.from_numpy(tasks("test").batch("plain", 0, 2, 90).tokens)
    memory = attach(bridged, METHODS["snap_kv"], budget=40, window_size=8)
    bridged(tokens[:, :80], past_key_values=memory)
    memory.end_prompt()
    save(memory, file)
    fresh = attach(bridged, METHODS["snap_kv"], **header(file)["options"])
    load(file, fresh)
    assert fresh.texts == 2
    logits = [bridged(tokens[:, 80:], past_key_values=x).logits for x in (memory, fresh)]
    assert torch.equal(*logits)


def test_a_prompt_that_has_not_ended_is_not_saved(model, tmp_path):
    caches = make_cache(model)
    prefill(model, torch.arange(20)[None], caches)
    with pytest.raises(ValueError, match="the prompt has not ended"):
        save(caches, tmp_path / "page.cache")


@pytest.mark.parametrize("folder", [TINY, LEARNED])
def test_a_page_is_compressed_once_and_asked_later(folder, tmp_path, capsys):
    page, file = tmp_path / "page.txt", tmp_path / "page.cache"
    page.write_text(PAGE)
    main(["compress", "--file", str(page), "--out", str(file), "--model", str(folder), "--keep", "25"])
    output = capsys.readouterr().out
    assert f"{file.stat().st_size:,} bytes" in output and "tokens read and compressed" in output
    page.unlink()
    main(["ask", str(file), "The code of table is", " The code of star is "])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   [")[0] for line in lines] == ["The code of table is ▸ 2356.",
                                                         "The code of star is ▸ 6098."]


@pytest.mark.parametrize("words, message", [
    ("compress --file PAGE --out page.cache --keep 0", "--keep is 0 %"),
    ("compress --file PAGE --out page.cache --method all", "name one method"),
    ("compress --file PAGE --out page.cache --method quantized_2 --keep 25", "quantized_2 has no budget"),
    ("compress --file PAGE --out PAGE", "holds something else than the cache"),
    ("compress --file PAGE --out page.cache --method random", "random|RandomEviction cannot be saved"),
    ("compress --file EMPTY --out page.cache", "empty.txt is empty"),
    ("ask PAGE question", "is not a saved cache, or is damaged"),
    ("ask CACHE question", "was not written by python -m nanollm compress"),
    ("ask nowhere question", "nowhere")])
def test_bad_input_is_one_line_and_nothing_is_written(model, words, message, tmp_path, capsys, monkeypatch):
    page, empty, cache = (tmp_path / name for name in ("page.txt", "empty.txt", "in_python.cache"))
    page.write_text(PAGE)
    empty.write_text("")
    save(read(model, METHODS["snap_kv"])[0], cache)
    files = dict(PAGE=page, EMPTY=empty, CACHE=cache)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([str(files.get(word, word)) for word in words.split()])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message.split("|")[0] in error or message.split("|")[-1] in error
    assert {*tmp_path.iterdir()} == {*files.values()} and page.read_text() == PAGE


def test_an_answer_ends_where_the_decoder_ends(model):
    """The last answer has fewer tokens; a question that does not fit is refused."""
    caches = make_cache(model)
    prefill(model, torch.arange(3060)[None] % 2000, caches)
    end_prompt(model, torch.arange(3060)[None] % 2000, caches)
    question = "\nQ: The code of"
    n = len(ENCODING.encode(question))
    assert answer(model, ENCODING, caches, question, 24) and caches[0].seen <= 3072
    with pytest.raises(ValueError, match=f"the question has {n} tokens, .* reads at most"):
        answer(model, ENCODING, caches, question, 24)
