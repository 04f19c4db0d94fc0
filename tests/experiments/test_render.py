"""experiments/render.py stores what commands print, and loses nothing where one fails."""
import shlex

import pytest

from experiments import render as results

CODE = "print('{{scratch}}/new'); open('{{scratch}}/{name}.json', 'w').write('new'); exit({code})"


def test_no_command_writes_what_is_stored():
    assert not [command for _, command, _ in results.SECTIONS.values() if " results/" in command]


def test_of_a_failed_command_the_stored_output_stays(monkeypatch, tmp_path):
    codes = dict(first=0, second=2, third=0, unasked=0)
    sections = {name: (name.title(), f"python -c {shlex.quote(CODE.format(name=name, code=code))}",
                       "What to see.") for name, code in codes.items()}
    for name, (_, command, _) in sections.items():
        (tmp_path / f"{name}.txt").write_text(f"{command}\na machine\nold\n")
        (tmp_path / f"{name}.json").write_text("old")
    monkeypatch.setattr(results, "SECTIONS", sections)
    monkeypatch.setattr(results, "HERE", tmp_path)
    monkeypatch.setattr(results, "TARGET", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results, "hardware", lambda: "this machine")
    with pytest.raises(SystemExit, match="^error: second failed"):
        results.main(["first", "second", "third"])
    text = (tmp_path / "RESULTS.md").read_text()
    for name, (title, command, _) in sections.items():
        age, machine = ("new", "this") if name in ("first", "third") else ("old", "a")
        assert (tmp_path / f"{name}.txt").read_text() == f"{command}\n{machine} machine\n{age}\n"
        assert (tmp_path / f"{name}.json").read_text() == age
        assert f"## {title}\n\nWhat to see.\n\n`{command}` ({machine} machine):\n\n```\n{age}\n```" in text
    results.main(["--check"])
    (tmp_path / "RESULTS.md").write_text(text.replace("old", "odd"))
    with pytest.raises(SystemExit, match="RESULTS.md is not what"):
        results.main(["--check"])
    (tmp_path / "first.txt").write_text("another command\na machine\nold\n")
    with pytest.raises(SystemExit, match="first.txt is of `another command`"):
        results.main([])
