"""The course's commands hold what they promise, to who writes nothing, to mistakes, and to attackers."""
import csv
import json
import os
from pathlib import Path
import re
import sys
import textwrap

import pytest

from course import command
from course.assignments import ASSIGNMENTS
from course.plugin import handed_in
from course.source import place, spliced
from forks import Forks
from wrong.attacks import ATTACKS, HELPERS

ROOT = Path(__file__).parents[1]
PROBLEMS = {f"{name}.{x.name}": x for name, each in ASSIGNMENTS.items() for x in each.problems}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """course(*arguments): exit code, stdout and stderr, as a user types it."""
    with Forks(OMP_NUM_THREADS="1") as forks:
        def course(*args, cwd=ROOT):
            words = ["python", "-m", "nanollm", "course", *map(str, args)]
            done = forks.run(words, tmp_path_factory.mktemp("streams"), cwd)
            return done.returncode, done.stdout, done.stderr
        yield course


@pytest.fixture(scope="module")
def graded(course):
    """graded(folder, file): the tests in results.json, by problem."""
    def graded(folder, file, *args) -> dict[str, list[dict]]:
        code, _, error = course("grade", folder, "--json", file, *args)
        assert code == 0, error
        tests = json.loads(file.read_text())["tests"]
        return {name: [test for test in tests if test["extra_data"]["problem"] == name] for name in
                dict.fromkeys(test["extra_data"]["problem"] for test in tests)}
    return graded


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory, course):
    folder = tmp_path_factory.mktemp("course") / "copy"
    assert course("make", folder)[0] == 0
    return folder


def test_an_untouched_copy_has_no_points(graded, handed_out, tmp_path):
    tests = graded(handed_out, tmp_path / "results.json", "--csv", tmp_path / "points.csv")
    assert tests.keys() == PROBLEMS.keys()
    for test in sum(tests.values(), []):
        assert test["status"] == "failed" and test["score"] == 0, test["name"]
        assert test["output"].startswith("NotImplementedError (line "), test
    header, row = csv.reader((tmp_path / "points.csv").open())
    assert header == ["submission", *PROBLEMS, "total"] and row == ["copy", *["0.00"] * (len(PROBLEMS) + 1)]


def test_the_repository_has_all_points(graded, tmp_path):
    tests = graded(ROOT, tmp_path / "results.json")
    for name, problem in PROBLEMS.items():
        assert sum(test["score"] for test in tests[name]) == pytest.approx(problem.points), name
        assert sum(test["max_score"] for test in tests[name]) == pytest.approx(problem.points)
        assert {test["visibility"] for test in tests[name]} == {"visible", "after_published"}
        assert all(test["status"] == "passed" and test["output"] == "" for test in tests[name])


def attacked(folder, sentinel):
    """A submission: the repository's files with these bodies."""
    for file in dict.fromkeys(PROBLEMS[name].file for name in ATTACKS):
        lines = (ROOT / file).read_text().split("\n")
        bodies = {place("\n".join(lines), PROBLEMS[name].function): body for name, body in ATTACKS.items()
                  if PROBLEMS[name].file == file}
        for (start, end), body in sorted(bodies.items(), reverse=True):
            first = next(i for i in range(start, end) if lines[i].endswith(":")) + 1
            indent = " " * (4 + len(lines[start]) - len(lines[start].lstrip()))
            lines[first:end] = textwrap.indent(textwrap.dedent(body), indent).split("\n")
        names = f"ROOT, SENTINEL, SUBMISSION = {str(ROOT)!r}, {str(sentinel)!r}, {str(folder)!r}\n"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("\n".join(lines) + HELPERS + names)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Python's audit hook stands alone")
def test_attacks_cost_their_own_problem_only(graded, tmp_path):
    sentinel, folder = ROOT / "course" / f"sentinel-{os.getpid()}", tmp_path / "attacker"
    sentinel.write_text("here")
    try:
        attacked(folder, sentinel)
        before = {path: path.stat().st_mtime_ns for path in [sentinel, *folder.rglob("*")]}
        tests = graded(folder, tmp_path / "results.json", "--only", "chunks", "sketch", "--seconds", "4")
        assert {path: path.stat().st_mtime_ns for path in before} == before
        assert sentinel.read_text() == "here"
    finally:
        sentinel.unlink()
    for name, each in tests.items():
        points = sum(test["score"] for test in each)
        assert points == pytest.approx(0 if name in ATTACKS else PROBLEMS[name].points), (name, each)
    output = {name: {test["output"] for test in each} for name, each in tests.items()}
    assert all("went through: []" in text for text in output["chunks.grid"]), output["chunks.grid"]
    assert all("more than 4 s" in text for name in ("chunks.cut_to", "chunks.fit") for text in output[name])
    assert all(c.isprintable() or c == "\n" for each in output.values() for text in each for c in text)
    assert max(len(text) for each in output.values() for text in each) <= 5000


def test_files_that_cannot_be_read(tmp_path):
    file, secret = "methods/theory/kv_reviver.py", tmp_path / "secret.py"
    at = tmp_path / file
    at.parent.mkdir(parents=True)
    secret.write_text("x = 1")
    for says, spoil in {"was not handed in": lambda: None, "is a link": lambda: at.symlink_to(secret),
                        "UTF-8": lambda: at.write_bytes(b"'\xff'"), "not handed in": lambda: os.mkfifo(at),
                        "megabyte": lambda: at.write_bytes(b"#" * 2 ** 21)}.items():
        spoil()
        with pytest.raises(ValueError, match=says):
            handed_in(tmp_path, file)
        at.unlink(missing_ok=True)
    at.write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    assert handed_in(tmp_path, file) == "x = 1\n"


@pytest.mark.parametrize("f", ["def f():\n    return (\n\n", "# \f\u2028\n\ndef f():\n    return 9\n\n"])
def test_one_function_of_a_file_that_is_broken_or_has_odd_line_ends(f):
    ours, found = "def f():\n    return 1\n\ndef g():\n    return 0\n", {}
    exec(spliced(ours, f + "def g():\n    return 2\n", "g", ["f"]), found)
    assert (found["f"](), found["g"]()) == (1, 2)


def test_bad_input_is_one_line(course, handed_out, tmp_path):
    for says, args in {"none is no folder": ["grade", tmp_path / "none"],
                       "'chunk'": ["check", "--only", "chunk"],
                       "there already": ["make", handed_out], "--seconds": ["grade", ROOT, "--seconds", "0"],
                       "one submission": ["grade", ROOT, ROOT, "--json", tmp_path / "x"],
                       "chunks.grid": ["grade", ROOT, "--only", "chunks.none"]}.items():
        with pytest.raises(ValueError, match=says) as error:
            command.main([str(x) for x in args])
        assert "\n" not in str(error.value)
    code, out, error = course("grade", tmp_path / "none")
    assert (code, out, error.count("\n")) == (2, "", 1)
    for says, args in ("no hidden tests", ["grade", "."]), ("a student's copy", ["make", tmp_path / "copy"]):
        code, out, error = course(*args, cwd=handed_out)
        assert (code, out, error.count("\n")) == (2, "", 1) and says in error


def test_the_readme_counts_the_functions():
    (told,) = re.findall(r"(\d+) functions of this repository", (ROOT / "README.md").read_text())
    assert int(told) == len(PROBLEMS) and len(ASSIGNMENTS) == 6
