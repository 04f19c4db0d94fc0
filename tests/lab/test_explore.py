"""docs/index.html holds, and its decoder computes, what Python writes, keeps and answers."""

from base64 import b64decode
import json
import re
import shutil
from subprocess import run

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


# what the page's decoder computes in the same settings as Python
SCRIPT = """
const text = require("fs").readFileSync(0, "utf8"), {runInThisContext: run} = require("vm");
const part = name => text.split(`id="${name}">`)[1].split("</script>")[0];
Object.assign(globalThis, {postMessage() {}, onmessage: 0});
run(part("worker"));
const {load, read, compress} = run("tasks"), {model, question, ...data} = JSON.parse(part("data"));
load({model, weights: Uint8Array.from(Buffer.from(part("weights"), "base64")).buffer});
read({text: data.text, question: "\\n" + question});
const views = {};
for (const method of model.methods) for (const keep of [25, 6.25])
for (const aware of [true, false]) {
  const {kept, n, bytes, written} = compress({method, keep, aware}, () => {});
  const bits = new Uint8Array(Math.ceil(kept.length / 8));
  kept.forEach((x, i) => bits[i >> 3] |= x << (i & 7));
  views[`${method} ${keep} ${aware ? "aware" : "agnostic"}`] =
    {kept: Buffer.from(bits).toString("base64"), n, bytes, written};
}
console.log(JSON.stringify(views));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node runs the page's scripts")
def test_the_decoder_in_the_page_keeps_and_answers_what_python_does(data):
    done = run(["node", "-e", SCRIPT], input=FILE.read_bytes(), capture_output=True)
    views = json.loads(done.stdout)
    assert len(views) == 4 * len(explore.LIVE)
    for name, view in views.items():
        assert view.items() <= data["views"][name].items(), name


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
        for setting in "aware", "agnostic":
            own = explore.view(*found, variant, 25, setting, PAGE, QUESTION)
            assert own == data["views"][f"{name} 25 {setting}"], name


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
