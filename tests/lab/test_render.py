"""lab/render_results.py stores the rows that commands measure, and loses nothing where one fails."""

import json
from subprocess import CalledProcessError

import pytest

from lab import render_results
from lab.registry import pick

SCRIPT = """
import sys
open(sys.argv[sys.argv.index("--json") + 1], "w").write('[{{"text": "new"}}]')
sys.exit({code})
"""


def test_of_a_failed_command_the_stored_rows_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(render_results, "STORED", tmp_path)
    monkeypatch.setattr(render_results, "TARGET", tmp_path / "RESULTS.md")
    monkeypatch.setattr(
        render_results,
        "SECTIONS",
        {
            name: (name.title(), f"python -m made_{name}", "What to see.")
            for name in ("first", "second")
        },
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, code in dict(first=0, second=2).items():
        (tmp_path / f"made_{name}.py").write_text(SCRIPT.format(code=code))
        render_results.write(
            name, f"python -m made_{name}", "a machine", "today", [{"text": "old"}]
        )
    with pytest.raises(CalledProcessError):
        render_results.main(["first", "second"])
    render_results.main([])
    text = render_results.TARGET.read_text()
    for name, words in dict(first="new", second="old").items():
        assert render_results.rows(name) == [{"text": words}]
        assert f"## {name.title()}\n\nWhat to see.\n\n`python -m made_{name}` (" in text
        assert f"```\ntext\n{words}\n```" in text

    render_results.main(["--check"])
    render_results.TARGET.write_text(text.replace("old", "odd"))
    with pytest.raises(SystemExit, match="RESULTS.md differs from"):
        render_results.main(["--check"])
    with pytest.raises(SystemExit, match="unknown section 'nope'"):
        render_results.main(["first", "nope"])
    render_results.write("first", "another command", "a machine", "today", [])
    with pytest.raises(SystemExit, match="first.json is of `another command`"):
        render_results.main([])


def test_rows_of_the_comparison_are_stored_without_the_numbers_of_documents(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(render_results, "STORED", tmp_path)
    render_results.write(
        "all",
        "x",
        "y",
        "z",
        [dict(method="h2o", kl=1, each=dict(kl=[1]), model="/a/path")],
    )
    assert json.loads((tmp_path / "all.json").read_text())["rows"] == [
        dict(method="h2o", kl=1)
    ]


@pytest.mark.parametrize("name", ["all", "learned"])
def test_stored_rows_have_every_method_at_its_budgets(name):
    stored = render_results.by_method(name)
    assert len(stored) == len(render_results.rows(name))
    assert {method for method, _ in stored} == pick([]).keys()
    assert {share for method, share in stored if method in ("full", "quantized_2")} == {
        None
    }
    assert [share for method, share in stored if method == "h2o"] == [
        0.5,
        0.25,
        0.125,
        0.0625,
    ]
    assert all(
        0 <= row[key] <= 1
        for row in stored.values()
        for key in row
        if key.endswith("aware")
    )
