"""The course: copies, points, messages; its tests accept our solutions and catch mistakes."""

from collections import defaultdict
import csv
import json
import re
import shutil
import tomllib

from pytest import approx, fixture, mark, raises
from torch import tensor

from course import command, expect
from course.assignments import ASSIGNMENTS, PROBLEMS
from course.expect import Wrong, same
from course.functions import emptied, imported, place, spliced
from course.grader import cases, failure, handed_in
from course.make import COMMAND_LIST, make
from planted import (
    ROOT,
    direct,
    packed_faster,
    planted,
    with_mistake,
    without_solution,
)


@fixture(scope="module")
def handed_out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course") / "copy"
    make(folder, ["cache"])
    return folder


FAULTY = {
    # what the grader says of a function, and the function
    "grid": ("more than 2 s", "import os, time; os.fork(); time.sleep(999)"),
    "chunk_scores": ("the process ended", "import os; os._exit(0)"),
    "ranking": ("in place", "order = score.argsort(-1); score.zero_(); return order"),
    "cut_to": (
        "ValueError: []",
        "import sys; tests = [x for x in sys.modules if x.endswith(('hidden', 'public'))]; "
        "print('passed'); raise ValueError(f'{tests}\\x1b[2J' + 10 ** 6 * 'x')",
    ),
    "fit": ("other than", "return torch.nn.Linear"),
    "reuse": ("allocate", "return torch.ones(10 ** 11, dtype=torch.uint8)"),
}


@fixture(scope="module")
def graded(handed_out):
    """Return the tests of each problem, and the points, of one submission.

    Its functions are as handed out (`cache`), faulty (`chunks`) or right (`tokens`).
    """
    for name in "chunks", "tokens":
        for problem in ASSIGNMENTS[name].problems:
            file = handed_out / problem.file
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / problem.file, file)
    file = handed_out / "methods/chunk_kv.py"
    for name, (_, text) in FAULTY.items():
        empty = emptied(file.read_text(), [PROBLEMS[f"chunks.{name}"].function])
        file.write_text(empty.replace("raise NotImplementedError", text))
    results = handed_out.parent / "results.json"
    points = handed_out.parent / "points.csv"
    options = f"--only cache chunks tokens --json {results} --csv {points}"
    command.main(f"grade {handed_out} --seconds 2 {options}".split())
    by_problem = defaultdict(list)
    for test in json.loads(results.read_text())["tests"]:
        by_problem[test["extra_data"]["problem"]].append(test)
    return by_problem, [*csv.reader(points.open())]


def test_a_function_as_handed_out_has_no_points(graded, handed_out):
    """Grade `cache` as handed out: every test fails, and says which line to write."""
    tests, (header, row) = graded
    assert header == ["submission", *tests, "total"]
    assert row[0] == "copy"
    for problem in ASSIGNMENTS["cache"].problems:
        source = (handed_out / problem.file).read_text()
        function = source.split("\n")[place(source, problem.function)]
        (line,) = [i for i, text in enumerate(function, 1) if "raise NotImpl" in text]
        name = f"cache.{problem.name}"
        for test in tests[name]:
            assert test["status"] == "failed" and test["score"] == 0, test["name"]
            assert f"NotImplementedError (line {line} of " in test["output"], test
        assert row[header.index(name)] == "0.00"


def test_a_fault_costs_its_own_problem_only(graded):
    """Grade faulty functions of `chunks` beside right ones of `tokens`."""
    tests, _ = graded
    for name, each in tests.items():
        right = name.startswith("tokens")
        most = PROBLEMS[name].points
        assert sum(test["score"] for test in each) == approx(right * most), each
        assert sum(test["max_score"] for test in each) == approx(most)
        assert {test["visibility"] for test in each} == {"visible", "after_published"}
        for test in each:
            assert not right or (test["status"], test["output"]) == ("passed", "")
    for name, (says, _) in FAULTY.items():
        for test in tests[f"chunks.{name}"]:
            assert says in test["output"]
    # one call was stopped, and no other begun
    assert len({test["output"] for test in tests["chunks.grid"]}) == 2
    for test in tests["chunks.cut_to"]:
        text = test["output"]
        assert len(text) <= 5000 and text.replace("\n", "").isprintable()
        assert ('File "methods/chunk_kv.py' in text) == test["extra_data"]["public"]


def test_a_submission_costs_no_other_its_points(tmp_path):
    """One kills its grader, one leaves a message unfinished; a third is right."""
    half = "import os, time; [os.write(n, b'00') for n in range(3, 30) if pipe(n)]; "
    half += "time.sleep(99)"
    attacks = dict(
        kills="import os; os.kill(os.getppid(), 9)", unfinished=half, right=""
    )
    file = PROBLEMS["cache.visible"].file
    for name, attack in attacks.items():
        folder = tmp_path / name
        (folder / file).parent.mkdir(parents=True)
        text = (ROOT / file).read_text()
        if attack:
            text = emptied(text, [PROBLEMS["cache.visible"].function])
            text = text.replace("raise NotImplementedError", attack)
            text += "\n\ndef pipe(n):\n    import os, stat\n    try:\n"
            text += "        return stat.S_ISSOCK(os.fstat(n).st_mode)\n"
            text += "    except OSError:\n        return False\n"
        (folder / file).write_text(text)
    points = tmp_path / "points.csv"
    folders = " ".join(str(tmp_path / name) for name in attacks)
    command.main(f"grade {folders} --only visible --seconds 2 --csv {points}".split())
    scored = {row[0]: float(row[-1]) for row in [*csv.reader(points.open())][1:]}
    most = PROBLEMS["cache.visible"].points
    assert scored == dict(kills=0, unfinished=0, right=most)


@mark.slow
@mark.parametrize("name", ASSIGNMENTS)
def test_right_solutions_pass_and_wrong_ones_are_caught(name, monkeypatch):
    """Hidden tests catch all mistakes; public tests some of each problem, not all of an assignment.

    Every test refuses the function that students get.
    """
    packed_faster(monkeypatch)
    run, everywhere = direct(name), []
    wrong = tomllib.loads((ROOT / f"tests/helpers/wrong/{name}.toml").read_text())
    problems = {problem.name: problem for problem in ASSIGNMENTS[name].problems}
    assert wrong.keys() == problems.keys()
    for problem, each in problems.items():
        public, hidden = (
            [*cases(f"{name}.{problem}", file).values()]
            for file in ("public", "hidden")
        )
        assert public and len(hidden) > (problem == "grid")  # a case for each row
        assert not any(failure(test, run) for test in public + hidden), problem
        with planted(each, without_solution(each)):
            for test in public + hidden:
                assert "NotImplementedError" in str(failure(test, run)), problem
        by_public = []
        for x in wrong[problem]:
            with planted(each, with_mistake(each, x["old"], x["new"])):
                by_public.append(any(failure(test, run) for test in public))
                assert any(failure(test, run) for test in hidden), (problem, x)
        assert any(by_public) and len(by_public) >= 3, problem
        everywhere += by_public
    assert not all(everywhere)


def test_a_number_and_an_error_of_another_kind_are_wrong():
    def fails(call):
        raise Wrong("KeyError: 'ValueError'")

    with raises(Wrong, match="the count: expected 3, got 3.0"):
        same(3.0, 3, "the count")
    with raises(Wrong, match="the sum: expected 1000"):
        same(tensor(1000.005), tensor(1000.0), "the sum", atol=1e-4)
    with raises(Wrong, match="expected a ValueError, got KeyError"):
        expect.raises(fails, "drop()")
    with raises(Wrong):
        same(tensor(9.0), tensor(7.0), "no share of 7", atol=0.5)


def test_points_by_hand(monkeypatch, capsys, tmp_path):
    def tested(folder, problems, files, seconds):
        rows = (
            ("chunks.grid", True, True, 0.5),
            ("chunks.grid", False, False, 0.5),
            ("chunks.cut_to", folder == ROOT, True, 4),
        )
        keys = "problem", "passed", "public", "worth"
        return [dict(zip(keys, row), says="a", why="x\ny") for row in rows]

    monkeypatch.setattr(command, "tested", tested)
    file = tmp_path / "points.csv"
    command.main(f"grade {ROOT} {tmp_path} --only chunks --csv {file}".split())
    rows = [(row[1], row[4], row[-1]) for row in csv.reader(file.open())]
    assert rows == [
        ("chunks.grid", "chunks.cut_to", "total"),
        ("0.50", "4.00", "4.50"),
        ("0.50", "0.00", "0.50"),
    ]
    tests = tested(ROOT, None, None, None)
    table = " / ".join(
        " ".join(x.split()[:4]) for x in command.table(tests).splitlines()
    )
    lines = "chunks 4.5 of 5 / grid 0.5 of 1 / ✗ a (hidden) / x / y / cut_to 4 of 4"
    assert table == lines
    capsys.readouterr()
    with raises(SystemExit) as done:
        command.main(["check", "--only", "chunks"])
    assert done.value.code == 1 and "2 of 3 public" in capsys.readouterr().out


@mark.parametrize("name", ASSIGNMENTS)
def test_a_copy_has_all_imports_and_no_solutions(name, tmp_path):
    each = ASSIGNMENTS[name]
    handout = (ROOT / "course" / name / "handout.py").read_text()
    make(tmp_path, [name])
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    used = {*imported(handout)}
    for file in files - {COMMAND_LIST}:
        if ".py" in file:
            used |= {*imported((tmp_path / file).read_text())}
    used = {file for file in used if (ROOT / file).exists()}
    more = {
        "lab/compare.py",
        "methods/baselines/snap_kv.py",
        *each.beside,
        f"course/{name}/public.py",
    }
    assert used - {"course/make.py"} | more <= files
    for file in files:
        assert not re.search(r"hidden\.py|answers|make|^kernels|^tests|stored", file)
    said = re.findall(r"^# ## \d+\. `.*\((\d+) points?\b", handout, re.M)
    assert [*map(int, said)] == [problem.points for problem in each.problems]
    assert f"{[*ASSIGNMENTS].index(name) + 1}_{name}.ipynb" in files


def test_both_assignments_of_a_file_are_empty(tmp_path):
    make(tmp_path, ["cache", "tokens"])
    assert (tmp_path / "nanollm/ranking.py").read_text().count("raise NotImpl") == 2


@mark.parametrize("above", ["", '    """Two\n    lines."""\n'])
def test_emptied_removes_everything_below_the_docstring(above):
    head, rest = f"def f(\n        x):\n{above}", "\n# of g\ndef g():\n    return 0\n"
    answer = "    # the answer,\n    # in words\n    y = x\n\n    return y\n"
    expected = head + "    raise NotImplementedError\n" + rest
    assert emptied(head + answer + rest, ["f"]) == expected


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "load.py"
    for says, data in (("was not handed in", None), ("UTF-8", b"'\xff'")):
        if data:
            path.write_bytes(data)
        with raises(ValueError, match=says):
            handed_in(tmp_path, "load.py")
    path.write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    assert handed_in(tmp_path, "load.py") == "x = 1\n"


TWO = "def f():\n    return {}\n\nclass A:\n    def g(self):\n        return {}\n"


def test_one_function_of_a_file():
    """Their A.g with its decorator and helper, and our f without the decorator of theirs."""
    theirs = "# \f\u2028\nh = 2\n@nowhere\n" + TWO.format(9, "h").replace(
        "    def", "    @property\n    def"
    )
    found = {}
    exec(spliced(TWO.format(1, 0), theirs, "A.g", ["f"]), found)
    assert (found["f"](), found["A"]().g) == (1, 2)
    for theirs, says in (
        (TWO.format("(", 2), "not valid Python.*line 2"),
        (TWO[:18], "no function A.g"),
    ):
        with raises(ValueError, match=says):
            spliced(TWO.format(1, 0), theirs, "A.g", ["f"])


def test_bad_input_is_one_line(typed, handed_out, tmp_path, monkeypatch):
    foreign = {"tests.json": '{"tests": [{"name": "grid"}]}', "points.csv": "points\n"}
    for file, text in foreign.items():
        (tmp_path / file).write_text(text)
    for says, line in {
        "none is not a folder": "grade TMP/none",
        "'chunk'": "check --only chunk",
        "exists already": "make TMP",
        "--seconds": "grade . --seconds 0",
        "one submission": "grade . . --json TMP/x",
        "choose from .*chunks.grid": "grade . --only chunks.none",
        "tests.json holds": "grade . --json TMP/tests.json",
        "points.csv holds": "grade . --csv TMP/points.csv --only chunks",
        "cannot both": "grade . --json TMP/x --csv TMP/./x",
    }.items():
        with raises(ValueError, match=says):
            command.main(line.replace("TMP", str(tmp_path)).split())
    assert {file: (tmp_path / file).read_text() for file in foreign} == foreign
    monkeypatch.setattr(command, "ROOT", tmp_path)
    with raises(ValueError, match="no tests of cache"):
        command.main(["check", "--only", "cache"])
    for says, line in {
        "no hidden tests": "course grade .",
        "no command 'claims'": "nanollm claims",
    }.items():
        done = typed("python", "-m", *line.split(), cwd=handed_out)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert says in done.stderr
