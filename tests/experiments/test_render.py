"""experiments/render.py stores the rows that commands measure, and loses nothing where one fails."""
import json

import pytest

from experiments import render
from nanollm.commands.table import ACCURACIES

SCRIPT = """
import sys
def show(rows):
    return rows[0]["text"]
if __name__ == "__main__":
    open(sys.argv[sys.argv.index("--json") + 1], "w").write('[{{"text": "new"}}]')
    sys.exit({code})
"""


def test_of_a_failed_command_the_stored_rows_stay(monkeypatch, tmp_path):
    codes = dict(first=0, second=2, third=0, unasked=0)
    monkeypatch.setattr(render, "HERE", tmp_path)
    monkeypatch.setattr(render, "TARGET", tmp_path / "RESULTS.md")
    monkeypatch.setattr(render, "SECTIONS", {
        name: (name.title(), f"python -m made_{name}", "What to see.") for name in codes})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, code in codes.items():
        (tmp_path / f"made_{name}.py").write_text(SCRIPT.format(code=code))
        render.write(name, f"python -m made_{name}", "a machine", "today", [{"text": "old"}])
    with pytest.raises(SystemExit, match="^error: second failed"):
        render.main(["first", "second", "third"])
    for name in codes:
        new = name in ("first", "third")
        assert render.rows(name) == [{"text": "new" if new else "old"}]
        assert f"## {name.title()}\n\nWhat to see.\n\n`python -m made_{name}` (" in render.TARGET.read_text()
        assert ("a machine" in (tmp_path / f"{name}.json").read_text()) != new
    assert render.TARGET.read_text().count("```\nnew\n```") == 2

    render.main(["--check"])
    render.TARGET.write_text(render.TARGET.read_text().replace("old", "odd"))
    with pytest.raises(SystemExit, match="RESULTS.md differs from"):
        render.main(["--check"])
    with pytest.raises(SystemExit, match="unknown section 'nope'"):
        render.main(["first", "nope"])
    render.write("first", "another command", "a machine", "today", [])
    with pytest.raises(SystemExit, match="first.json is of `another command`"):
        render.main([])


def test_an_addition_keeps_what_it_changes_and_no_numbers_of_documents():
    each = dict.fromkeys(ACCURACIES, [1.0, 0.0]) | dict(nll=[1.0, 2.0], kl=[0.5, 0.7], l1_alone=[3.0, 4.0])
    base = dict(method="a", keep_ratio=0.25, tokens=9, each=each, l1=[[1.0]], aware=0.5, agnostic=0.5,
                perplexity=4.4817, kl=0.6, l1_alone=[[3.5]])
    more = base | dict(method="a+b", each=each | dict(nll=[1.5, 3.5]))
    other = base | dict(method="a+b", keep_ratio=0.5)
    rows = json.loads(json.dumps(render.shortened([base, more, other])))
    assert not any({"each", "l1"} & row.keys() for row in rows)
    assert rows[1]["changes"]["nll"] == [1, 0.5] and rows[1]["changes"]["L1"] == [0, 0]
    assert ["changes" in row for row in rows] == [False, True, False]
    text = render.additions(rows)
    assert "1.500" in text and "+1.000 ±0.500" in text and text.count("a+b") == 1


@pytest.mark.parametrize("name", ["all", "learned"])
def test_stored_rows_have_every_method_at_its_budgets(name):
    stored = render.by_method(name)
    assert len(stored) == len(render.rows(name)) > 80
    assert {share for method, share in stored if method in ("full", "quantized_2")} == {None}
    assert [share for method, share in stored if method == "h2o"] == [0.5, 0.25, 0.125, 0.0625]
    assert all(0 <= row[key] <= 1 for row in stored.values() for key in ACCURACIES)
