"""Rows that commands measure are stored, rendered, and not lost where a command fails."""

from subprocess import CalledProcessError

import pytest

from lab import render_results
from lab.methods_by_name import pick

SCRIPT = """
import sys
open(sys.argv[sys.argv.index("--json") + 1], "w").write('[{{"text": "new"}}]')
sys.exit({code})
"""


@pytest.fixture
def stored(monkeypatch, tmp_path):
    monkeypatch.setattr(render_results, "STORED", tmp_path)
    monkeypatch.setattr(render_results, "TARGET", tmp_path / "RESULTS.md")
    return tmp_path


def test_of_a_failed_command_the_stored_rows_stay(monkeypatch, stored):
    sections = {}
    monkeypatch.setattr(render_results, "SECTIONS", sections)
    monkeypatch.setattr(render_results, "shown", lambda _, rows: rows[0]["text"])
    for name, code in dict(first=0, second=2).items():
        (stored / f"made_{name}.py").write_text(SCRIPT.format(code=code))
        command = f"python {stored}/made_{name}.py"
        sections[name] = name, command, "What to see."
        render_results.write(name, command, "a machine", "today", [{"text": "old"}])
    with pytest.raises(CalledProcessError):
        render_results.main(["first", "second"])
    render_results.main([])
    text = render_results.TARGET.read_text()
    for name, words in dict(first="new", second="old").items():
        assert render_results.rows(name) == [{"text": words}]
        assert (
            f"## {name}\n\nWhat to see.\n\n`python {stored}/made_{name}.py` (" in text
        )
        assert f"```\n{words}\n```" in text

    render_results.main(["--check"])
    render_results.TARGET.write_text(text.replace("old", "odd"))
    with pytest.raises(SystemExit, match="RESULTS.md differs from"):
        render_results.main(["--check"])
    with pytest.raises(SystemExit, match="unknown section 'nope'"):
        render_results.main(["first", "nope"])
    sections["first"] = "first", "python", "What to see."
    with pytest.raises(SystemExit, match="first.json is of .* not of `python`"):
        render_results.main([])


def test_rows_of_the_comparison_are_stored_with_the_values_of_documents(stored):
    row = dict(method="h2o", keep_ratio=0.5, kl=1)
    each = dict(kl=[0.12344, 2.0])
    render_results.write("all", "x", "y", "z", [row | dict(each=each, model="/a")])
    assert render_results.rows("all") == [row | dict(each=dict(kl=[0.1234, 2.0]))]


def test_records_of_questions_are_stored_as_rows_and_shown_beside_a_peer_s(
    monkeypatch, stored
):
    records = []
    for name, ratio, scores in ("full", None, (1, 1)), ("h2o", 0.25, (1, 0)):
        for line, score in enumerate(scores):
            place = dict(setting="agnostic", task="a", context=line, line=line)
            numbers = dict(score=score, surprise=1.5, kib=8)
            records.append(dict(method=name, keep_ratio=ratio) | place | numbers)
    script = f"""
import json, sys
print(json.dump(dict(settings={{}}, records={records}), open(sys.argv[-1], "w")))
"""
    peer = script.replace("h2o", "kvpress h2o").replace("'full'", "'other'")
    sections = {}
    monkeypatch.setattr(render_results, "SECTIONS", sections)
    monkeypatch.setattr(render_results, "draw_ruler", lambda: None)
    for name, code in ("ruler", script), ("kvpress", peer):
        (stored / f"{name}.py").write_text(code)
        command = f"python {stored}/{name}.py"
        sections[name] = name, f"{command} && {command}", "What to see."
        render_results.run(name)
    rows = render_results.rows("ruler")
    assert [row["score"] for row in rows] == [[1, 1], [1, 0]]
    text = render_results.rendered()
    first, second = text.split("## kvpress\n")
    assert "50 ±" in first and "kvpress h2o" not in first
    lines = [line.split()[0] for line in second.splitlines() if "±" in line]
    assert {"full", "h2o", "kvpress"} <= {*lines}


def test_the_figure_of_ruler_counts_the_documents_of_a_task(monkeypatch):
    titles = []
    note = lambda points, title, file: titles.append(title)
    monkeypatch.setattr("lab.plot.questions", note)
    render_results.draw_ruler()
    rows = render_results.rows("ruler")
    documents = max(len(row["score"]) for row in rows if row["method"] == "full")
    assert f", {documents} documents a task" in titles[0]


@pytest.mark.parametrize("name", ["all", "learned"])
def test_stored_rows_have_every_method_at_its_budgets(name):
    ratios = {}
    for row in render_results.rows(name):
        ratios.setdefault(row["method"], []).append(row["keep_ratio"])
    assert ratios.keys() == pick([]).keys()
    assert ratios["full"] == ratios["full@2"] == [None]
    assert ratios["h2o"] == [0.5, 0.25, 0.125, 0.0625]
