"""CLAIMS.md fits the files of claims, the rules, the stored findings and the tests."""

import json
from pathlib import Path
import re

import claims_page
from claims_page import PLACEHOLDER, page, write_or_compare
import pytest

from lab.claims.claims_command import STORED
from lab.claims.claims_renderer import curve, listed, texts
from lab.claims.subject import HOLDS, KEEP, NOT, OPEN, UNFIT

ROOT = Path(__file__).parents[3]
ROWS = json.loads(STORED.read_text())["rows"]


@pytest.fixture
def recorded():
    """Return the records of a run of all tests, with made-up numbers."""
    records = []
    for name in listed():
        records.append((f"tests/test_{name[0]}.py::test_{name}[1]", "claim", name))
    stored = {f"{row['claim']}.{name}" for row in ROWS for name in row["numbers"]}
    for name, _ in PLACEHOLDER.findall(texts()):
        if re.sub(r" at (50|12\.5|6\.25)| @\w+| ±", "", name) not in stored:
            records.append(("tests/test_P.py::test_P1", name, -0.126))
    return records


@pytest.mark.parametrize(
    "by_keep, word",
    [
        ([HOLDS, HOLDS, HOLDS, HOLDS], HOLDS),
        ([HOLDS, HOLDS, HOLDS, UNFIT], HOLDS),
        ([OPEN, HOLDS, UNFIT, HOLDS], "holds at 25 and 6.25 %"),
        ([HOLDS, HOLDS, NOT, HOLDS], "holds at 50, 25 and 6.25 %"),
        ([OPEN, OPEN, NOT, UNFIT], NOT),
        ([OPEN, UNFIT, OPEN, OPEN], OPEN),
    ],
)
def test_a_verdict_says_where_a_claim_holds(by_keep, word):
    rows = [dict(keep_ratio=x, verdict=y) for x, y in zip(KEEP, by_keep)]
    assert curve(rows) == word


def test_a_claim_has_its_sentence_verdicts_number_rule_and_tests(recorded):
    by_keep = dict(zip(KEEP, (HOLDS, NOT, OPEN, UNFIT)))
    rows = []
    for row in ROWS:
        verdict = NOT if row["model"] == "built" else by_keep.get(row["keep_ratio"])
        rows.append(row | dict(verdict=verdict or HOLDS))
    text = page(recorded, rows)
    (p12,) = [part for part in text.split("\n\n### ") if part.startswith("P12\n")]
    assert listed()["P12"].rule in p12
    assert "[test_P](tests/test_P.py)" in p12

    wanted = "P12", "smollm2", 0.25
    keys = "claim", "model", "keep_ratio"
    (row,) = [row for row in rows if tuple(row[key] for key in keys) == wanted]
    numbers = row["numbers"]["change by the paper's rule"]
    mean, error = (f"{x:.3f}".replace("-", "−") for x in numbers)
    line = f"holds at 50 % | ✓✗?– | ✗✗✗✗ | ✓✗?– | The paper's rule changes the KL by {mean}"
    assert f"{line} ± {error}" in text
    assert "| measured at 135 M | ✓✗?– |" in text
    assert "L is −0.126 if kept" in text  # as the test recorded it


UNKNOWN = ("a.py::test_a", "claim", "T99")
OTHER = ("a.py::test_a", "P1.sink_kept", 0.5)


@pytest.mark.parametrize(
    "without, more, changed, message",
    [
        (("claim", "T1"), [], "", "claims without a test: T1$"),
        (None, [UNKNOWN], "", "markers of unknown claims: T99$"),
        (("P1.sink_kept", -0.126), [], "", "nobody recorded: P1.sink_kept$"),
        (None, [OTHER], "", "P1.sink_kept is -0.126 in .* and 0.5 in a.py:"),
        (None, [], "rule", "claims without a row in .*/claims.json, or .*: C1$"),
        (None, [], "model", "or with another rule or model there: C1$"),
        (None, [], "claim", "or with another rule or model there: C1, other$"),
    ],
)
def test_what_is_missing_unknown_or_of_another_rule_is_refused(
    without, more, changed, message, recorded
):
    stored = []
    for row in ROWS:
        if changed and row["claim"] == "C1":
            row = row | {changed: "other"}
        stored.append(row)
    records = [record for record in recorded if record[1:] != without]
    with pytest.raises(ValueError, match=message):
        page(records + more, stored)


RULE = "Rule: L and KL have a positive rank correlation over 13 methods.\n"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("## T1 · holds", "## T1 · hold", "'## T1 · hold' must"),
        ("Rule: L and", "L and", "'## P10 · "),
        (RULE, "", "only in code: P10;"),
    ],
)
def test_a_file_of_claims_with_a_slip_is_refused(
    old, new, message, recorded, monkeypatch
):
    changed = texts().replace(old, new)
    monkeypatch.setattr(claims_page, "texts", lambda: changed)
    with pytest.raises(ValueError, match=message):
        page(recorded, ROWS)


def test_a_stale_number_is_refused(recorded, tmp_path):
    file = tmp_path / "CLAIMS.md"
    write_or_compare(recorded, True, file)
    write_or_compare(recorded, False, file)
    other = []
    for node, name, x in recorded:
        other.append((node, name, 0.5 if name == "S5.n" else x))
    message = "CLAIMS.md is stale: these tests would write another text"
    with pytest.raises(ValueError, match=message):
        write_or_compare(other, False, file)


NOTING = """import numpy, pytest

@pytest.mark.claim('T99')
def test_a(note):
    note('S5', n=numpy.int64(5))
"""


def test_a_run_of_all_tests_fails_where_they_and_the_claims_disagree(typed, tmp_path):
    settings = f"testpaths = tests\npythonpath = {ROOT} {ROOT}/tests/helpers\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(
        "pytest_plugins = ['claims_plugin']"
    )
    (tmp_path / "tests" / "test_a.py").write_text(NOTING)
    options = "-q --disable-plugin-autoload -p xdist -n 1".split()
    done = typed("python", "-m", "pytest", *options, cwd=tmp_path)
    out = done.stdout
    assert done.returncode == 1
    assert "1 passed" in out
    assert "S5.printed_above" in out
    assert "markers of unknown claims: T99" in out
    assert "S5.n," not in out
