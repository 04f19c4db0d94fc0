"""python -m nanollm claims: a column for each model, and a row for each claim."""

import json
from pathlib import Path

import pytest

from commands import refused
from foreign import foreign_checkpoint
from lab import corpus
from lab.claims import claims_command, rules
from lab.claims.claims_command import STORED
from lab.claims.rules import CLAIMS
from lab.claims.subject import UNFIT
from nanollm.__main__ import main

ROWS = json.loads(STORED.read_text())["rows"]


def run(folder, *options):
    file = folder / "found.json"
    main(["claims", *map(str, options), "--json", str(file)])
    return json.loads(file.read_text())


@pytest.mark.slow
def test_every_claim_has_a_row_on_a_foreign_checkpoint(tmp_path, monkeypatch, capsys):
    folder = foreign_checkpoint(tmp_path / "model")
    some = corpus.text("test")[::8]  # its tokenizer takes seconds for all
    monkeypatch.setattr(corpus, "text", lambda split: some)
    monkeypatch.setattr(claims_command, "SHIPPED", {})
    monkeypatch.setattr(rules, "COMPARED", ["SnapKV", "AdaKV", "PyramidKV"])
    found = run(tmp_path, "--model", folder, "--documents", 2, "--length", 128)
    assert [row["claim"] for row in found] == [*CLAIMS]
    assert {row["model"] for row in found} == {f"{folder}/"}
    why = {row["claim"]: row["why"] for row in found if row["verdict"] == UNFIT}
    # it answers nothing, and the texts are too short
    assert [*why] == "P5 P8 C1 C2 R9 R10 R11 R12 R13 S8".split()
    assert "the full cache answers 0.00 of needle" in why["R10"]
    assert all(row["numbers"] for row in found if row["verdict"] != UNFIT)
    out = capsys.readouterr().out
    assert out.count(UNFIT) == 10
    assert all(f"\n{name}  " in out for name in CLAIMS)


def test_beside_another_model_the_shipped_columns_are_the_stored_ones(
    checkpoint, tmp_path
):
    found = run(tmp_path, "--claims", "P2", "--model", checkpoint)
    assert found[:3] == [row for row in ROWS if row["claim"] == "P2"]
    assert len(found) == 4


@pytest.mark.parametrize(
    "options, message",
    [
        (
            "--claims P6 P1",
            "claim 'P1' cannot be tested on a model; choose from P2, P3",
        ),
        ("--length 16", "length 16 must be"),
        ("--seed -1", "seed -1"),
        ("--json foreign.json", "foreign.json holds something else"),
    ],
)
def test_what_is_wrong_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("foreign.json").write_text('[{"verdict": "guilty"}]')
    refused(capsys, ["claims", *options.split()], message)
