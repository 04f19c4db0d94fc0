"""docs/index.html holds what Python writes, keeps and answers. No test runs its scripts."""

from base64 import b64decode
import json
import re

import pytest
import torch

from commands import refused
from lab import explore
from lab.loading import load
from lab.methods_by_name import pick
from lab.one_page import PAGE, QUESTION, pieces, prompt
from nanollm import TINY

FILE = explore.ROOT / "docs/index.html"


def part(text, name) -> str:
    """Return what the page holds under a name."""
    return re.search(f'id="{name}">(.*?)</script>', text, re.S)[1]


def data_of(file) -> dict:
    return json.loads(part(file.read_text(), "data"))


@pytest.fixture(scope="module")
def data():
    return data_of(FILE)


def test_the_file_is_what_the_command_writes(data):
    text = FILE.read_text()
    model, encoding = load(TINY, "cpu")
    for file in explore.PARTS.iterdir():
        for piece in re.split(r"/\*[A-Z]+\*/", file.read_text()):
            assert piece in text, (
                f"{file.name} has changed; run python -m nanollm explore --beside smollm2"
            )
    sizes, weights = explore.packed(model, encoding)
    assert b64decode(part(text, "weights")) == weights
    sizes["methods"] = list(explore.LIVE)
    assert data["model"] == json.loads(json.dumps(sizes))
    assert data["curve"] == explore.curve()
    assert data["text"] == PAGE
    assert data["beside"]["name"] == "smollm2"
    assert data["beside"]["views"].keys() == data["views"].keys()
    assert FILE.stat().st_size < 6e6


def test_an_8_bit_weight_is_off_by_half_a_step():
    weight = torch.randn(5, 64)
    codes, scales = explore.rounded(weight)
    assert codes.dtype == torch.int8
    assert (
        (codes * scales[:, None] - weight).abs() <= scales[:, None] / 2 + 1e-7
    ).all()


def test_the_stored_views_are_what_python_keeps_and_answers(data):
    model, encoding = load(TINY, "cpu")
    tokens, _ = prompt(model, encoding, PAGE, QUESTION)
    assert data["tokens"] == pieces(encoding, tokens[0].tolist())
    found = explore.rounded_model(model), encoding
    for name, variant in pick([*explore.LIVE]).items():
        own = explore.view(*found, variant, 25, "agnostic", PAGE, QUESTION)
        assert own == data["views"][f"{name} 25 agnostic"], name


def test_a_page_of_ones_own_text_stores_what_methods_keep(
    checkpoint, tmp_path, monkeypatch
):
    text = tmp_path / "text"
    out = tmp_path / "page.html"
    text.write_text(PAGE[:500])
    names = ["full", "chunk_kv", "full@4"]
    monkeypatch.setattr(explore, "pick", lambda _: pick(names))
    words = f"--model {checkpoint} --out {out} --text {text}"
    explore.main(words.split())
    data = data_of(out)
    assert [name for name, *_ in data["methods"]] == names
    assert data["text"] == PAGE[:500]
    assert "full 75 aware" in data["views"]
    # a budget below its window is refused
    assert "chunk_kv 25 agnostic" in data["views"]
    assert "chunk_kv 3.125 agnostic" not in data["views"]


def test_bad_input(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("word " * 9000)
    refused(capsys, ["explore", "--out", str(file)], "holds something else")
    out = tmp_path / "out"
    words = ["explore", "--out", str(out), "--text", str(file)]
    refused(capsys, words, "at most")
    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text() == "word " * 9000
