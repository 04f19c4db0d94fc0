"""python -m nanollm claims: a column for each model, and a row for each claim."""

from argparse import Namespace
import json
from pathlib import Path

import numpy as np
import pytest

from commands import refused
from foreign import foreign_checkpoint
from lab import corpus
from lab.claims import claims_command, rules
from lab.claims.claims_command import STORED, stored_rows
from lab.claims.rules import CLAIMS
from lab.claims.subject import UNFIT
from nanollm.__main__ import main

ROWS = json.loads(STORED.read_text())["rows"]


def run(folder, *options):
    file = folder / "found.json"
    main(["claims", *map(str, options), "--json", str(file)])
    return json.loads(file.read_text())


WINDOWED = dict(
    num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "full_attention"],
    use_sliding_window=True,
    sliding_window=32,
)


@pytest.mark.slow
def test_every_claim_has_a_row_on_a_foreign_checkpoint(tmp_path, monkeypatch, capsys):
    folder = foreign_checkpoint(tmp_path / "model", **WINDOWED)
    some = corpus.text("test")[::8]  # its tokenizer takes seconds for all
    monkeypatch.setattr(corpus, "text", lambda split: some)
    monkeypatch.setattr(claims_command, "SHIPPED", {})
    monkeypatch.setattr(rules, "COMPARED", ["SnapKV", "AdaKV", "PyramidKV"])
    size = "--documents", 2, "--length", 160, "--keep", 25
    found = run(tmp_path, "--model", folder, *size)
    assert [row["claim"] for row in found] == [*CLAIMS]
    assert {row["model"] for row in found} == {f"{folder}/"}
    assert {row["keep_ratio"] for row in found} == {0.25, None}
    why = {row["claim"]: row["why"] for row in found if row["verdict"] == UNFIT}
    # it answers nothing, and the texts are too short
    assert [*why] == "P5 P8 C1 C2 R9 R10 R12 R13 S8".split()
    assert "the full cache answers 0.00 of needle" in why["R10"]
    for row in found:
        assert np.isfinite([*row["numbers"].values()]).all()
        assert row["numbers"] or row["why"]
    out = capsys.readouterr().out
    assert out.count(f"{folder}/: ") == 9
    assert all(f"\n{name}  " in out for name in CLAIMS)


def test_beside_another_model_the_shipped_columns_are_the_stored_ones(
    checkpoint, tmp_path
):
    found = run(tmp_path, "--claims", "R6", "--model", checkpoint)
    assert found[:12] == [row for row in ROWS if row["claim"] == "R6"]
    assert [row["keep_ratio"] for row in found[12:]] == [0.5, 0.25, 0.125, 0.0625]
    text = tmp_path / "text"
    text.write_text("\n".join(corpus.text("test")[::9]))
    options = "--claims", "R6", "--keep", 25, "--text", text, "--documents", 4
    models = [row["model"] for row in run(tmp_path, *options, "--model", checkpoint)]
    assert models == ["built", "learned", f"{checkpoint}/"]


def test_stored_columns_are_of_the_same_size_and_seed():
    size = dict(documents=24, length=256, seed=0, keep=[25])
    assert stored_rows(Namespace(**size), "own")
    for changed in dict(documents=23), dict(length=255), dict(seed=1):
        assert not stored_rows(Namespace(**size | changed), "own")


@pytest.mark.parametrize(
    "options, message",
    [
        (
            "--claims P6 P1",
            "claim 'P1' cannot be tested on a model; choose from P5, P6",
        ),
        ("--length 16", "length 16 must be"),
        ("--seed -1", "seed -1"),
        ("--keep 0", "--keep is 0 %"),
        ("--json foreign.json", "foreign.json holds something else"),
    ],
)
def test_what_is_wrong_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("foreign.json").write_text('[{"verdict": "guilty"}]')
    refused(capsys, ["claims", *options.split()], message)
