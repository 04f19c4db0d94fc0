"""A row for every batch and method, and what cannot be timed."""

import json
import runpy
import sys

import pytest

from lab import speed


def test_a_row_for_every_batch_and_method(checkpoint, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(speed, "SHORT", 0)
    monkeypatch.setattr(speed, "bandwidth", lambda: 1)
    file = tmp_path / "rows.json"
    options = "--methods snap_kv full@2 --lengths 140 --batches 1 2 --rounds 1"
    words = f"--model {checkpoint} {options} --json {file}"
    speed.main(words.split())
    rows = json.loads(file.read_text())
    assert capsys.readouterr().out == speed.show(rows) + "\n"
    measured = [(row["batch"], row["method"]) for row in rows]
    names = "full", "snap_kv", "full@2"
    floors = [(B, "floor") for B in (1, 2)]
    assert measured == [(B, name) for B in (1, 2) for name in names] + floors
    *rows, one, two = rows
    assert two["step"] - one["step"] == 2 * 2 * 140 * 2 * 8 * 4  # of one prompt
    assert all(row["end"] > 0 and row["step"] > 0 for row in rows)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--lengths 64", "budget 16 must exceed the window"),
        ("--lengths 800", "length 800 must be a whole number from 1 to 704"),
        ("--json config.json", "config.json holds something"),
    ],
)
def test_what_cannot_be_timed_is_one_line(
    wrong, message, checkpoint, monkeypatch, capsys
):
    monkeypatch.chdir(checkpoint)
    monkeypatch.setattr(sys, "argv", ["speed", "--model", ".", *wrong.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(speed.__file__, run_name="__main__")
    out, error = capsys.readouterr()
    assert error.startswith(f"error: {message}") and out == ""
