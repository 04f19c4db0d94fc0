"""python -m nanollm generate: a text is continued as the library continues it."""

import json
from pathlib import Path
import shutil

import pytest
import torch

from commands import refused
from common import ENCODING
from lab.generate import MARK, decoded
from nanollm import TINY
from nanollm.__main__ import main
from nanollm.checkpoint import from_hf
from nanollm.generate import generate


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_a_text_is_continued_as_options_say(checkpoint, capsys):
    prompt = "The import system é"
    Path("text.txt").write_text(prompt, encoding="utf8")
    ids = ENCODING.encode(prompt)
    sampling = dict(temperature=2.0, top_k=40, seed=3)
    for words, options in (
        (["--file", "text.txt"], {}),
        ([*"--temperature 2 --top-k 40 --seed 3".split(), prompt], sampling),
    ):
        main(["generate", "--model", str(checkpoint), "--tokens", "12", *words])
        text, tail = capsys.readouterr().out.split("\n\n[")
        new = generate(from_hf(checkpoint), torch.tensor([ids]), 12, **options)
        # a last letter of which some bytes are missing is left out
        said = ENCODING.decode(new[0].tolist()).rstrip("\ufffd")
        assert text == f"{prompt}{MARK}{said}"
        assert tail.startswith(f"{len(ids) + 11} tokens seen; ")


def test_a_text_ends_at_a_special_token():
    tokens = [*ENCODING.encode("one two"), 2047, 5]
    assert "".join(decoded(ENCODING, map(torch.tensor, tokens), {2047})) == "one two"


@pytest.fixture
def written(checkpoint, capsys):
    """Return a function that returns what the command writes with some options."""

    def run(options):
        words = f"--method {options} --tokens 9".split()
        main(["generate", "--model", str(checkpoint), *words, "A longer prompt " * 9])
        return capsys.readouterr().out

    return run


def test_what_the_cache_holds_is_told(written):
    live = 2 * 2 * 6 * (2 * 8 * 4 + 8) / 1024
    words = f"a head of layer 0 keeps at most 6; the cache holds {live:.0f} KiB"
    assert words in written("h2o --budget 6 --figure own.png")
    assert Path("own.png").exists()
    # what ends its chunks it finds out by itself
    assert "a head of layer 0 keeps" in written("chunk_kv_semantic --budget 12")


@pytest.mark.parametrize("name", ["full@4", "full@1"])
def test_it_is_compared_with_the_full_cache(written, name):
    full = written("full").partition(MARK)[2].partition("\n\n[")[0]
    own, _, tail = written(name).partition(MARK)[2].partition("\n\n[")
    if own == full:
        assert "[the full cache writes the same]" in tail
    else:
        assert f"[the full cache writes:]\n{full}" in tail


def test_a_text_begins_with_bos_if_the_checkpoint_s_texts_do(capsys):
    shutil.copytree(TINY, "begun")
    config = json.loads(Path("begun/config.json").read_text())
    config["bos_token_id"] = 2047
    Path("begun/config.json").write_text(json.dumps(config))
    main(["generate", "--model", "begun", "--tokens", "5", "The import system"])
    tokens = torch.tensor([[2047, *ENCODING.encode("The import system")]])
    new = generate(from_hf(TINY), tokens, 5)[0].tolist()
    expected = f"The import system{MARK}{ENCODING.decode(new)}\n\n"
    assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--seed -1 x", "seed -1 must"),
        ("--method snap_kv@0 x", "'0' is no number of bits"),
        (
            "--method h2o x",
            "h2o needs --budget: how many entries each key/value head may",
        ),
        ("--method h2o --budget 0 x", "budget 0 must"),
        ("--method snap_kv --budget 9 --window 9 x", "must exceed the window"),
        ("--method full@2 --budget 5 x", "full@2 has no budget; leave --budget"),
        ("--file text.txt x", "give the text or --file text.txt, not both"),
        ("--file text.txt", "No such file"),
        ("--figure x.txt", "must end in .png"),
        ("--tokens 800 x", "800 new ones exceed"),
    ],
)
def test_a_mistake_is_one_line(checkpoint, capsys, options, message):
    words = ["generate", *options.split(), "--model", str(checkpoint)]
    assert not refused(capsys, words, message).startswith("x")  # nor is a text echoed


def test_a_checkpoint_that_cannot_be_read_is_one_line(checkpoint, capsys):
    shutil.copytree(checkpoint, "copy", ignore=shutil.ignore_patterns("tokenizer*"))
    refused(capsys, ["generate", "--model", "copy", "x"], "copy has no tokenizer")
    empty = ["generate", "--model", str(checkpoint), ""]
    assert refused(capsys, empty, "prompt has no tokens") == ""
