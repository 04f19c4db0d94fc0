"""The course's commands: copies, points, error messages; submissions that are empty, broken or hostile."""
import csv
import json
import os
from pathlib import Path
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv

import pytest

from course import command
from course.assignments import ASSIGNMENTS, PROBLEMS
from course.functions import emptied, imported, place, spliced
from course.grader import copy, handed_in
from course.make import make
from course.sandbox import LIMITS
from forks import Forks
from wrong.attacks import ATTACKS, HELPERS

ROOT = Path(__file__).parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="without Landlock only the audit hook protects us")


@pytest.fixture(scope="module")
def course():
    """Return course(*words), which runs `python -m nanollm`: exit code, stdout, stderr."""
    with Forks(OMP_NUM_THREADS="1") as forks:
        def course(*args, cwd=ROOT):
            done = forks.run("python", "-m", "nanollm", *args, cwd=cwd)
            return done.returncode, done.stdout, done.stderr
        yield course


@pytest.fixture(scope="module")
def graded(course):
    """Return graded(folder, file), which grades a submission: the tests in results.json, by problem."""
    def graded(folder, file, *args) -> dict[str, list[dict]]:
        code, _, error = course("course", "grade", folder, "--json", file, *args)
        assert code == 0, error
        tests = json.loads(file.read_text())["tests"]
        return {name: [test for test in tests if test["extra_data"]["problem"] == name] for name in
                dict.fromkeys(test["extra_data"]["problem"] for test in tests)}
    return graded


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory, course):
    folder = tmp_path_factory.mktemp("course") / "copy"
    assert course("course", "make", folder)[0] == 0
    return folder


def test_an_untouched_copy_has_no_points(graded, handed_out, tmp_path):
    """Of one assignment. In test_course_wrong.py every test refuses an empty function."""
    own = {name: problem for name, problem in PROBLEMS.items() if name.startswith("cache.")}
    tests = graded(handed_out, tmp_path / "results.json", "--csv", tmp_path / "points.csv", "--only", "cache")
    assert tests.keys() == own.keys()
    for name, problem in own.items():
        source = (handed_out / problem.file).read_text()
        function = source.split("\n")[slice(*place(source, problem.function))]
        line = 1 + next(i for i, text in enumerate(function) if "raise NotImplementedError" in text)
        for test in tests[name]:
            assert test["status"] == "failed" and test["score"] == 0, test["name"]
            assert f"NotImplementedError (line {line} of " in test["output"], test
    header, row = csv.reader((tmp_path / "points.csv").open())
    assert header == ["submission", *own, "total"] and row == ["copy", *["0.00"] * (len(own) + 1)]


def test_the_repository_has_all_points(graded, tmp_path):
    tests = graded(ROOT, tmp_path / "results.json")
    for name, problem in PROBLEMS.items():
        assert sum(test["score"] for test in tests[name]) == pytest.approx(problem.points), name
        assert sum(test["max_score"] for test in tests[name]) == pytest.approx(problem.points)
        assert {test["visibility"] for test in tests[name]} == {"visible", "after_published"}
        assert all(test["status"] == "passed" and test["output"] == "" for test in tests[name])


def attacked(folder, sentinel):
    """Write a submission: the repository's files with the attacks as bodies."""
    for name, body in ATTACKS.items():
        problem, empty = PROBLEMS[name], r"^( +)raise NotImplementedError$"
        file = folder / problem.file
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            paths = f"ROOT, SENTINEL, SUBMISSION = {str(ROOT)!r}, {str(sentinel)!r}, {str(folder)!r}\n"
            file.write_text((ROOT / problem.file).read_text() + HELPERS + paths)
        file.write_text(re.sub(empty, lambda found: textwrap.indent(textwrap.dedent(body), found[1]),
                               emptied(file.read_text(), [problem.function]), flags=re.M))


@LINUX
def test_attacks_cost_their_own_problem_only(graded, tmp_path):
    sentinel, folder = ROOT / "course" / f"sentinel-{os.getpid()}", tmp_path / "attacker"
    sentinel.write_text("here")
    try:
        attacked(folder, sentinel)
        before = {path: path.stat().st_mtime_ns for path in [sentinel, *folder.rglob("*")]}
        tests = graded(folder, tmp_path / "results.json", "--only", "chunks", "sketch", "--seconds", "2")
        assert {path: path.stat().st_mtime_ns for path in before} == before
        assert sentinel.read_text() == "here"
    finally:
        sentinel.unlink()
    for name, each in tests.items():
        points = sum(test["score"] for test in each)
        assert points == pytest.approx(0 if name in ATTACKS else PROBLEMS[name].points), (name, each)
    output = {name: {test["output"] for test in each} for name, each in tests.items()}
    assert all("went through: []" in text for text in output["chunks.grid"]), output["chunks.grid"]
    assert all(('File "' in test["output"]) == test["extra_data"]["public"] for test in tests["chunks.grid"])
    assert all("in place" in text for text in output["chunks.ranking"])
    assert all(re.search(r"\(line \d+ of insert\)", text) for text in output["sketch.insert"])
    assert len(output["chunks.cut_to"]) == 2  # one call was stopped, and no other begun
    assert all("more than 2 s" in text for name in ("chunks.cut_to", "chunks.fit") for text in output[name])
    assert all(c.isprintable() or c == "\n" for each in output.values() for text in each for c in text)
    assert max(len(text) for each in output.values() for text in each) <= 5000


def test_points_by_hand(monkeypatch, capsys, tmp_path):
    def tested(folder, problems, files, seconds):
        return [dict(problem=f"chunks.{name}", says="a", passed=right, why="x\ny", public=public, worth=worth)
                for name, right, public, worth in (("grid", True, True, 0.5), ("grid", False, False, 0.5),
                                                   ("cut_to", folder == ROOT, True, 4))]

    monkeypatch.setattr(command, "tested", tested)
    command.main(f"grade {ROOT} {tmp_path} --only chunks --csv {tmp_path}/points.csv".split())
    assert [row[1:2] + row[4:5] + row[-1:] for row in csv.reader((tmp_path / "points.csv").open())] == [
        ["chunks.grid", "chunks.cut_to", "total"], ["0.50", "4.00", "4.50"], ["0.50", "0.00", "0.50"]]
    tests = tested(ROOT, None, None, None)
    assert [line.split()[:4] for line in command.table(tests).splitlines()] == [
        ["chunks", "4.5", "of", "5"], ["grid", "0.5", "of", "1"], ["✗", "a", "(hidden)"], ["x"], ["y"],
        ["cut_to", "4", "of", "4"]]
    results = command.gradescope(tests)
    assert command.is_results(json.dumps(results).encode())
    assert [test["visibility"] for test in results["tests"]] == ["visible", "after_published", "visible"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        command.main(["check", "--only", "chunks"])
    assert done.value.code == 1 and "2 of 3 public" in capsys.readouterr().out


def submission(folder: Path, more: str = "") -> Path:
    (folder / "methods").mkdir(parents=True)
    (folder / "methods" / "chunk_kv.py").write_text((ROOT / "methods" / "chunk_kv.py").read_text() + more)
    return folder


@pytest.fixture
def points(tmp_path):
    """Return points(folder), which grades chunks.grid: the row of the CSV."""
    def points(folder):
        command.main(["grade", str(folder), "--only", "chunks.grid", "--csv", str(tmp_path / "points.csv")])
        _, row = csv.reader((tmp_path / "points.csv").open())
        return row
    return points


NOSY = """
right = grid
def grid(place, size):
    for file in FILES:
        try:
            open(file)
        except OSError:
            continue
        raise RuntimeError(file)
    return right(place, size)
"""


@LINUX
def test_neither_the_shell_nor_an_editable_install_changes_points(monkeypatch, tmp_path, points):
    """Points do not depend on PYTHONPATH, and a submission opens no hidden tests."""
    (tmp_path / "safetensors.py").write_text("")  # would shadow the library
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = tmp_path / "other"
    shutil.copytree(ROOT / "course", other / "course")
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "editable.pth").write_text(f"{sysconfig.get_path('purelib')}\n{other}\n{ROOT}\n")
    files = [str(root / "course" / "chunks" / "hidden.py") for root in (ROOT, other)]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.chdir(submission(tmp_path / os.fsdecode(b"n\xff"), f"{NOSY}FILES = {files}\n"))
    assert points(".") == ["n\N{REPLACEMENT CHARACTER}", "1.00", *["0.00"] * 5, "1.00"]


def test_no_room_for_a_copy_costs_no_points():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))  # cache.py is larger, results are not
    try:
        with pytest.raises(OSError, match="cannot be written to /.*set TMPDIR"):
            command.main(["grade", str(ROOT), "--only", "chunks.ranking"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_a_copy_has_all_imports_and_no_solutions(name, tmp_path):
    each, handout = ASSIGNMENTS[name], (ROOT / "course" / name / "handout.py").read_text()
    make(tmp_path / "copy", [name])
    files = {str(path.relative_to(tmp_path / "copy")): path for path in (tmp_path / "copy").rglob("*.*")}
    used = {file for source in (handout, *(path.read_text() for file, path in files.items() if ".py" in file))
            for file in imported(source) if (ROOT / file).exists()} - {"course/make.py"}
    assert used | {"methods/snap_kv.py", *each.beside, f"course/{name}/public.py"} <= files.keys()
    assert not [file for file in files if re.search(r"hidden\.py|answers|make|^kernels|^tests|stored", file)]
    assert [int(x) for x in re.findall(r"^# ## \d+\. `.*\((\d+) points?\b", handout, re.M)] == [
        problem.points for problem in each.problems]
    (total,) = re.findall(r"; (\d+) points by tests", handout)
    assert int(total) == sum(problem.points for problem in each.problems)
    (row,) = re.findall(r"^\| (\d_\w+\.ipynb) .*? \| (\d+) \|", files["README.md"].read_text(), re.M)
    assert row == (f"{[*ASSIGNMENTS].index(name) + 1}_{name}.ipynb", total) and row[0] in files


@pytest.mark.parametrize("above", ["", '    """Two\n    lines."""\n'])
def test_emptied_removes_everything_below_the_docstring(above):
    head, rest = f"def f(\n        x):\n{above}", "\n# of g\ndef g():\n    return 0\n"
    answer = "    # the answer,\n    # in words\n    y = x\n\n    return y\n"
    assert emptied(head + answer + rest, ["f"]) == head + "    raise NotImplementedError\n" + rest


def test_the_submission_process_gets_no_tests(tmp_path):
    copy(tmp_path, "chunks")
    assert [*(tmp_path / "course").rglob("*.py")] == [tmp_path / "course" / "chunks" / "adapter.py"]


def test_files_that_cannot_be_read(tmp_path):
    file, secret = "methods/theory/sketch_error.py", tmp_path / "secret.py"
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    secret.write_text("x = 1")
    for says, spoil in {"was not handed in": lambda: None, "is a link": lambda: path.symlink_to(secret),
                        "UTF-8": lambda: path.write_bytes(b"'\xff'"),
                        "not handed in": lambda: os.mkfifo(path),
                        "megabyte": lambda: path.write_bytes(b"#" * 2 ** 21)}.items():
        spoil()
        with pytest.raises(ValueError, match=says):
            handed_in(tmp_path, file)
        path.unlink(missing_ok=True)
    path.write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    assert handed_in(tmp_path, file) == "x = 1\n"


def test_a_submission_has_the_stated_limits(tmp_path):
    script = ("import resource, sys; from course import sandbox;"
              "sandbox.landlock = lambda: 0; sandbox.lock_in(sys.argv[1]);"  # which would refuse the question
              "print(*resource.getrlimit(resource.RLIMIT_CPU), *resource.getrlimit(resource.RLIMIT_NOFILE))")
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True)
    seconds, files = LIMITS["seconds"], LIMITS["files"]
    assert done.stdout.split() == [*map(str, (seconds, seconds, files, files))], done.stderr


TWO = "def f():\n    return {}\n\nclass A:\n    def g(self):\n        return {}\n"


@pytest.mark.parametrize("theirs", [
    "def f():\n    return (\n\nclass A:\n    def g(self,\n    ):\n        return 2\n",
    "# \f\u2028\n" + TWO.format(9, 2), TWO.format(9, 2).replace("def f", "def h")])
def test_one_function_of_a_file_that_is_broken_or_odd(theirs):
    found = {}
    exec(spliced(TWO.format(1, 0), theirs, "A.g", ["f"]), found)
    assert (found["f"](), found["A"]().g()) == (1, 2)


def test_a_function_keeps_its_own_decorators():
    theirs = "@nowhere\n" + TWO.format(9, 2).replace("    def g", "    @property\n    def g")
    found = {}
    exec(spliced(TWO.format(1, 0), theirs, "A.g", ["f"]), found)
    assert (found["f"](), found["A"]().g) == (1, 2)


def test_bad_input_is_one_line(course, handed_out, tmp_path, monkeypatch):
    header = ",".join(["submission", *(name for name in PROBLEMS if "chunks" in name), "total,written\n"])
    foreign = {tmp_path / "tests.json": '{"tests": [{"name": "grid"}]}', tmp_path / "points.csv": header}
    for file, text in foreign.items():
        file.write_text(text)
    for says, line in {"none is not a folder": "grade TMP/none", "'chunk'": "check --only chunk",
                       "exists already": "make TMP", "--seconds": "grade . --seconds 0",
                       "one submission": "grade . . --json TMP/x",
                       "choose from .*chunks.grid": "grade . --only chunks.none",
                       "tests.json holds": "grade . --json TMP/tests.json",
                       "points.csv holds": "grade . --csv TMP/points.csv --only chunks",
                       "cannot both": "grade . --json TMP/x --csv TMP/./x"}.items():
        with pytest.raises(ValueError, match=says):
            command.main(line.replace("TMP", str(tmp_path)).split())
    assert {file: file.read_text() for file in foreign} == foreign
    for root, says, line in ((Path(sys.prefix) / "copy", "lies in .*; move the", f"grade {ROOT}"),
                             (tmp_path, "no tests of cache", "check --only cache")):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=says):
            patch.setattr(command, "ROOT", root)
            command.main(line.split())
    for says, line in {"no hidden tests": "course grade .", "known are compare, course": "train",
                       "a student's copy": f"course make {tmp_path}/copy"}.items():
        code, out, error = course(*line.split(), cwd=handed_out)
        assert (code, out, error.count("\n")) == (2, "", 1) and says in error
