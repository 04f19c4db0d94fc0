"""CLAIMS.md is the templates' words and the tests' numbers, and pytest says when something is missing."""
import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from claims.findings import MODELS, ClaimError, by_claim, read, rules
from claims.render import parse, render
from experiments import claims_command as command
from nanollm import SHIPPED

TESTS = Path(__file__).parents[1]
PAPER = """# A paper

Read: version 2.

## T1 · holds · notebooks 00, 03
Theorem 1: a | b,
on two lines.
> {T1.n} draws,
> at least {T1.low:.2f}.

Why {x} is so: {T1.low:+.0e}.

- a list

## T2 · not testable here
Theorem 2.
> Models of 7B.
"""
RECORDED = [("tests/test_a.py::test_one[1]", [("claim", "T1"), ("T1.n", 5), ("T1.low", -0.126), ("time", 3)]),
            ("tests/test_a.py::test_one[2]", [("claim", "T1"), ("T1.n", 5)]),
            ("tests/theory/test_b.py::test_two", [("claim", "T1")]), ("tests/test_c.py::test_three", [])]
SOURCE = '''
def T1(on: Subject) -> Finding:
    """Theorem 1: a | b,
    on two lines.

    Rule: a number
    is large.
    """
'''
BOOKS = {"00": "notebooks/00_a.ipynb", "03": "notebooks/03_b.ipynb"}


def test_a_claim_has_a_row_and_its_details():
    text = render([parse(PAPER, "a.md")], RECORDED, BOOKS, {})
    files = "[test_a](tests/test_a.py), [test_b](tests/theory/test_b.py)"
    books = "[00](notebooks/00_a.ipynb), [03](notebooks/03_b.ipynb)"
    row, other, first, second = (line for line in text.splitlines() if line.startswith(("| [T", "- [tests")))
    assert row == (f"| [T1](#t1) Theorem 1: a \\| b, on two lines. | holds | – | – | "
                   f"5 draws, at least −0.13. | {files} | {books} |")
    assert other == "| [T2](#t2) Theorem 2. | not testable here | – | – | Models of 7B. |  |  |"
    assert first == "- [tests/test_a.py](tests/test_a.py): `test_one`"
    assert second == "- [tests/theory/test_b.py](tests/theory/test_b.py): `test_two`"
    assert "\n\n## A paper\n\nRead: version 2.\n\n### T1\n\nTheorem 1: a | b, on two lines.\n\n" in text
    assert "\n\n**Holds.** 5 draws, at least −0.13.\n\n" in text
    assert "\n\nWhy {x} is so: −1e−01.\n\n- a list\n\n" in text and "\n- [notebooks/00_a.ipynb](" in text
    assert text.endswith("### T2\n\nTheorem 2.\n\n**Not testable here.** Models of 7B.\n")


@pytest.mark.parametrize("old, new, message", [
    ("# A paper", "", "a.md must begin"),
    ("## T1 · holds ·", "## T1 · hold ·", "'## T1 · hold · notebooks 00, 03' must be"),
    ("## T1", "## one", "must be '## ID"),
    ("> {T1.n} draws,\n> at", "at", "T1 needs its claim in a paragraph, then '> "),
    ("notebooks 00, 03", "notebooks 00, 07", "notebooks that are not there: 07$"),
    ("## T2 · not testable here", "## T2 · does not hold", "claims without a test: T2$"),
    ("## T2", "## T1", "there twice: T1$"),
    ("## T1", "## T3", "claims without a test: T3; markers without a claim in tests/helpers/claims/: T1$"),
    ("T1.n}", "T1.m}", "values that no test recorded: T1.m$"),
    ("{T1.low:.2f}", "{T1.low:d}", "T1.low:d., recorded as -0.126: Unknown format code 'd'"),
])
def test_what_is_wrong_is_named(old, new, message):
    with pytest.raises(ClaimError, match=message):
        render([parse(PAPER.replace(old, new), "a.md")], RECORDED, BOOKS, {})


def test_a_value_recorded_twice_is_the_same_both_times():
    with pytest.raises(ClaimError, match="T1.n is 5 in one test and 6 in .*four"):
        render([parse(PAPER, "a.md")], [*RECORDED, ("tests/test_a.py::test_four", [("T1.n", 6)])], BOOKS, {})


# ---- what python -m nanollm claims found on the two decoders ---


def findings(built="holds", learned="holds", **changed) -> str:
    """Made-up findings on T1, as they are stored."""
    return json.dumps([dict(
        claim="T1", **rules(SOURCE)["T1"], model=model, documents=3, tokens=9, seed=0, verdict=verdict,
        numbers=numbers, why=why) | changed for model, verdict, numbers, why in (
            ("built", built, {"a-b": (-0.1234, 0.05), "c": (2e-6, 0.0)}, ""),
            ("learned", learned, {"a-b": (0.5, 0.0)}, "a | b"))])


def test_both_decoders_have_a_column_and_their_numbers_a_table():
    text = render([parse(PAPER, "a.md")], RECORDED, BOOKS, by_claim(findings(), rules(SOURCE)))
    assert "\n| claim | verdict | built | learned | number | tests | notebook |\n|---|" in text
    assert "on two lines. | holds | holds | holds | 5 draws," in text and "disagree" not in text
    assert "\n\n**Holds.** 5 draws" in text and "| [T2](#t2) Theorem 2. | not testable here | – | – |" in text
    assert """

- a list

Rule: a number is large.

| 3 documents of 9 tokens | built | learned |
|---|---|---|
| by the rule | holds | holds |
| a-b | −0.123 ± 0.05 | 0.5 ± 0 |
| c | 2e−06 ± 0 |  |
| why |  | a \\| b |

- [tests/test_a.py]""" in text


@pytest.mark.parametrize("paper, built, learned, verdict", [
    ("holds", "holds", "undecided", "holds (built); undecided (learned)"),
    ("holds after a fix", "does not hold", "holds", "holds after a fix (built); holds (learned)"),
    ("holds after a fix", "does not hold", "does not hold", "holds after a fix")])
def test_a_verdict_names_the_decoders_where_they_disagree(paper, built, learned, verdict):
    template, found = PAPER.replace("T1 · holds", f"T1 · {paper}"), findings(built, learned)
    text = render([parse(template, "a.md")], RECORDED, BOOKS, by_claim(found, rules(SOURCE)))
    assert f"on two lines. | {verdict} | {built} | {learned} | 5 draws," in text
    assert f"\n\n**{verdict.capitalize()}.** 5 draws" in text
    line = f"\n\nThe two decoders disagree: {built} (built), {learned} (learned).\n\n- [tests/test_a.py]"
    assert (line in text) == ("disagree" in text) == (built != learned)


@pytest.mark.parametrize("stored, source, message", [
    (None, SOURCE, "is not there"), ("[{", SOURCE, "is damaged"), ('["T1"]', SOURCE, "is damaged"),
    (findings(model="built"), SOURCE, "has no verdict on T1 of the decoder learned"),
    (findings(), SOURCE + SOURCE.replace("T1", "T2"), "has no verdict on T2 of the decoder built"),
    (findings(), SOURCE.replace("T1", "T2"), "has no verdict on T2 of the decoder built"),
    (findings()[:-1] + "," + findings(claim="T3")[1:], SOURCE, "judges T3, which is no claim that a"),
    (findings()[:-1] + "," + findings(model="mine")[1:], SOURCE, "judges T1 on mine, which does not ship"),
    (findings(), SOURCE.replace("large", "small"), "was made when T1 had other words or another rule"),
    (findings(), SOURCE.replace("Theorem 1", "Lemma 1"), "was made when T1 had other words")])
def test_findings_of_other_claims_or_models_are_refused(stored, source, message, tmp_path):
    for name, text in ("experiments/claims.py", source), ("experiments/stored/claims.json", stored):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if text:
            (tmp_path / name).write_text(text)
    with pytest.raises(ClaimError, match=f"{message}.*; python -m experiments.render claims$"):
        read(tmp_path)


def test_a_claim_that_a_model_decides_has_a_template():
    with pytest.raises(ClaimError, match="findings without a claim in tests/helpers/claims/: T3$"):
        render([parse(PAPER, "a.md")], RECORDED, BOOKS, {"T3": {}})


def test_the_command_s_claims_and_decoders_are_those_read_here():
    from experiments.claims import CLAIMS
    source = (TESTS.parent / "experiments/claims.py").read_text()
    assert rules(source) == {name: command.worded(claim) for name, claim in CLAIMS.items()}
    assert MODELS == (*SHIPPED,)


MODULE = """
import numpy, pytest

@pytest.mark.claim("T1")
def test_one(note):
    note("T1", n=numpy.int64(5))

def test_two(note):
    note("T1", low=0.5)
"""


def test_pytest_writes_the_claims_and_fails_where_they_are_stale(tmp_path):
    def run(*options):
        env = dict(os.environ, PYTHONPATH=str(TESTS / "helpers"), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "claims.plugin", *options]
        done = subprocess.run(command, cwd=tmp_path, env=env, timeout=100, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    (tmp_path / "tests/helpers/claims").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests/helpers/claims/a.md").write_text(PAPER.replace(" · notebooks 00, 03", ""))
    (tmp_path / "tests/test_a.py").write_text(MODULE)
    written = tmp_path / "CLAIMS.md"
    found = findings(learned="undecided")
    for name, text in ("experiments/claims.py", SOURCE), ("experiments/stored/claims.json", found):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    code, out = run()
    assert code == 1 and "CLAIMS.md is not what these tests would write; pytest --write-claims" in out
    for some in (["-k", "one"], ["--deselect", "tests/test_a.py::test_two"]):
        assert run("--write-claims", *some)[0] == 4 and not written.exists()
    assert run("-n", "2", "--write-claims")[0] == 0 and "5 draws, at least 0.50." in written.read_text()
    assert "| holds (built); undecided (learned) | holds | undecided | 5" in written.read_text()
    (tmp_path / "tests/test_a.py").write_text(MODULE.replace("0.5)", "0.7); assert 0"))
    code, out = run("--write-claims")
    assert code == 1 and "not written, as not all tests passed" in out and "least 0.50" in written.read_text()
