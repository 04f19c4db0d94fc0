"""The course: copies, points, messages; its tests accept our solutions and catch mistakes."""

import csv
from importlib import import_module
import json
import re

import pytest

from course import command
from course.assignments import ASSIGNMENTS, PROBLEMS
from course.functions import emptied, imported, place, spliced
from course.grader import cases, failure, handed_in
from course.make import COMMAND_LIST, make
from planted import (
    ROOT,
    direct,
    packed_faster,
    planted,
    replaced,
    with_mistake,
    without_solution,
)


def graded(folder, file, *words) -> dict[str, list[dict]]:
    """Grade a submission and return the tests in results.json, by problem."""
    command.main(["grade", str(folder), "--json", str(file), *words])
    tests = json.loads(file.read_text())["tests"]
    return {
        name: [test for test in tests if test["extra_data"]["problem"] == name]
        for name in dict.fromkeys(test["extra_data"]["problem"] for test in tests)
    }


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course") / "copy"
    make(folder, ["cache"])
    return folder


def test_an_untouched_copy_has_no_points(handed_out, tmp_path):
    """Of one assignment. In another test below every test refuses an empty function."""
    own = {
        name: problem for name, problem in PROBLEMS.items() if name.startswith("cache.")
    }
    points = tmp_path / "points.csv"
    tests = graded(
        handed_out, tmp_path / "results.json", "--csv", str(points), "--only", "cache"
    )
    assert tests.keys() == own.keys()
    for name, problem in own.items():
        source = (handed_out / problem.file).read_text()
        function = source.split("\n")[place(source, problem.function)]
        line = 1 + next(
            i for i, text in enumerate(function) if "raise NotImplementedError" in text
        )
        for test in tests[name]:
            assert test["status"] == "failed" and test["score"] == 0, test["name"]
            assert f"NotImplementedError (line {line} of " in test["output"], test
    header, row = csv.reader(points.open())
    assert header == ["submission", *own, "total"] and row == [
        "copy",
        *["0.00"] * (len(own) + 1),
    ]


FAULTY = {
    "grid": "while True: pass",
    "chunk_scores": "import os; os._exit(0)",
    "ranking": "order = score.argsort(-1); score.zero_(); return order",
    "cut_to": "import sys; tests = [x for x in sys.modules if x.endswith(('hidden', 'public'))]; "
    "print('passed'); raise ValueError(f'{tests}\\x1b[2J' + 10 ** 6 * 'x')",
    "fit": "return torch.nn.Linear",
    "reuse": "return torch.ones(10 ** 11, dtype=torch.uint8)",
}


def test_a_fault_costs_its_own_problem_only(tmp_path):
    """Functions that never end, end the process, or return oddities, beside right ones of `tokens`."""
    for name, problem in PROBLEMS.items():
        if name.startswith(("chunks", "tokens")):
            (tmp_path / problem.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / problem.file).write_text((ROOT / problem.file).read_text())
    file = tmp_path / "methods/chunk_kv.py"
    for name, text in FAULTY.items():
        empty = emptied(file.read_text(), [PROBLEMS[f"chunks.{name}"].function])
        file.write_text(empty.replace("raise NotImplementedError", text))
    tests = graded(
        tmp_path,
        tmp_path / "results.json",
        "--only",
        "chunks",
        "tokens",
        "--seconds",
        "2",
    )
    for name, each in tests.items():
        points, most = (
            sum(test[key] for test in each) for key in ("score", "max_score")
        )
        assert points == pytest.approx(
            0 if "chunks" in name else PROBLEMS[name].points
        ), (name, each)
        assert most == pytest.approx(PROBLEMS[name].points)
        assert {test["visibility"] for test in each} == {"visible", "after_published"}
        assert "chunks" in name or {(x["status"], x["output"]) for x in each} == {
            ("passed", "")
        }, each
    output = {
        name: [test["output"] for test in tests[f"chunks.{name}"]] for name in FAULTY
    }
    for name, says in dict(
        grid="more than 2 s",
        chunk_scores="the process ended",
        ranking="in place",
        cut_to="ValueError: []",
        fit="other than",
        reuse="allocate",
    ).items():
        assert all(says in text for text in output[name]), output[name]
    assert len({*output["grid"]}) == 2  # one call was stopped, and no other begun
    for test in tests["chunks.cut_to"]:
        assert len(test["output"]) <= 5000 and all(
            c.isprintable() or c == "\n" for c in test["output"]
        )
        assert ('File "methods/chunk_kv.py' in test["output"]) == test["extra_data"][
            "public"
        ]


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_right_solutions_pass_and_wrong_ones_are_caught(name, monkeypatch):
    """Hidden tests catch every mistake; public tests catch some of each problem, but not all.

    Every test refuses the function that students get.
    """
    packed_faster(monkeypatch)
    run, wrong, only_hidden = direct(name), import_module(f"wrong.{name}").WRONG, []
    problems = {problem.name: problem for problem in ASSIGNMENTS[name].problems}
    assert {problem for problem, *_ in wrong} == problems.keys()
    for problem, each in problems.items():
        public, hidden = (
            [*cases(f"{name}.{problem}", file).values()]
            for file in ("public", "hidden")
        )
        assert public and hidden
        assert not any(failure(test, run) for test in public + hidden), problem
        with planted(each, without_solution(each)):
            assert all(
                "NotImplementedError" in str(failure(test, run))
                for test in public + hidden
            ), problem
        by_public = []
        for _, mistake, old, new in (x for x in wrong if x[0] == problem):
            with planted(each, with_mistake(each, old, new)):
                by_public.append(any(failure(test, run) for test in public))
                assert any(failure(test, run) for test in hidden), (problem, mistake)
        assert any(by_public) and len(by_public) >= 3, problem
        only_hidden += [caught for caught in by_public if not caught]
    assert only_hidden


@pytest.mark.parametrize(
    "old, changed",
    [
        ("f( a,b )", "y = NEW ** (-1)"),
        ("f(a,\n  b)", "y = NEW ** (-1)"),
        ("f(a, b)**-1", "y = NEW"),
        ("y =", "NEW f(a, b) ** (-1)"),
        ("f(a)", None),
    ],
)
def test_a_mistake_is_found_whatever_the_layout(old, changed):
    text = "y = f(a, b) ** (-1)"
    if changed is None:
        with pytest.raises(ValueError, match="is not in"):
            replaced(text, old, "NEW")
    else:
        assert replaced(text, old, "NEW") == changed


def test_points_by_hand(monkeypatch, capsys, tmp_path):
    def tested(folder, problems, files, seconds):
        return [
            dict(
                problem=f"chunks.{name}",
                says="a",
                passed=right,
                why="x\ny",
                public=public,
                worth=worth,
            )
            for name, right, public, worth in (
                ("grid", True, True, 0.5),
                ("grid", False, False, 0.5),
                ("cut_to", folder == ROOT, True, 4),
            )
        ]

    monkeypatch.setattr(command, "tested", tested)
    command.main(
        f"grade {ROOT} {tmp_path} --only chunks --csv {tmp_path}/points.csv".split()
    )
    assert [
        row[1:2] + row[4:5] + row[-1:]
        for row in csv.reader((tmp_path / "points.csv").open())
    ] == [
        ["chunks.grid", "chunks.cut_to", "total"],
        ["0.50", "4.00", "4.50"],
        ["0.50", "0.00", "0.50"],
    ]
    tests = tested(ROOT, None, None, None)
    assert [line.split()[:4] for line in command.table(tests).splitlines()] == [
        ["chunks", "4.5", "of", "5"],
        ["grid", "0.5", "of", "1"],
        ["✗", "a", "(hidden)"],
        ["x"],
        ["y"],
        ["cut_to", "4", "of", "4"],
    ]
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        command.main(["check", "--only", "chunks"])
    assert done.value.code == 1 and "2 of 3 public" in capsys.readouterr().out


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_a_copy_has_all_imports_and_no_solutions(name, tmp_path):
    each, handout = (
        ASSIGNMENTS[name],
        (ROOT / "course" / name / "handout.py").read_text(),
    )
    make(tmp_path / "copy", [name])
    files = {
        str(path.relative_to(tmp_path / "copy")): path
        for path in (tmp_path / "copy").rglob("*.*")
    }
    sources = [
        path.read_text()
        for file, path in files.items()
        if ".py" in file and file != COMMAND_LIST
    ]
    used = {
        file
        for source in (handout, *sources)
        for file in imported(source)
        if (ROOT / file).exists()
    }
    more = {
        "lab/compare.py",
        "methods/baselines/snap_kv.py",
        *each.beside,
        f"course/{name}/public.py",
    }
    assert used - {"course/make.py"} | more <= files.keys()
    assert not [
        file
        for file in files
        if re.search(r"hidden\.py|answers|make|^kernels|^tests|stored", file)
    ]
    assert [
        int(x) for x in re.findall(r"^# ## \d+\. `.*\((\d+) points?\b", handout, re.M)
    ] == [problem.points for problem in each.problems]
    (total,) = re.findall(r"; (\d+) points by tests", handout)
    assert int(total) == sum(problem.points for problem in each.problems)
    (row,) = re.findall(
        r"^\| (\d_\w+\.ipynb) .*? \| (\d+) \|", files["README.md"].read_text(), re.M
    )
    assert (
        row == (f"{[*ASSIGNMENTS].index(name) + 1}_{name}.ipynb", total)
        and row[0] in files
    )


@pytest.mark.parametrize("above", ["", '    """Two\n    lines."""\n'])
def test_emptied_removes_everything_below_the_docstring(above):
    head, rest = f"def f(\n        x):\n{above}", "\n# of g\ndef g():\n    return 0\n"
    answer = "    # the answer,\n    # in words\n    y = x\n\n    return y\n"
    assert (
        emptied(head + answer + rest, ["f"])
        == head + "    raise NotImplementedError\n" + rest
    )


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "load.py"
    for says, data in (("was not handed in", None), ("UTF-8", b"'\xff'")):
        if data:
            path.write_bytes(data)
        with pytest.raises(ValueError, match=says):
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
        with pytest.raises(ValueError, match=says):
            spliced(TWO.format(1, 0), theirs, "A.g", ["f"])


def test_bad_input_is_one_line(typed, handed_out, tmp_path, monkeypatch):
    foreign = {
        tmp_path / "tests.json": '{"tests": [{"name": "grid"}]}',
        tmp_path / "points.csv": "points\n",
    }
    for file, text in foreign.items():
        file.write_text(text)
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
        with pytest.raises(ValueError, match=says):
            command.main(line.replace("TMP", str(tmp_path)).split())
    assert {file: file.read_text() for file in foreign} == foreign
    monkeypatch.setattr(command, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="no tests of cache"):
        command.main(["check", "--only", "cache"])
    for says, line in {
        "no hidden tests": "course grade .",
        "no command 'claims'": "nanollm claims",
    }.items():
        done = typed("python", "-m", *line.split(), cwd=handed_out)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (
            2,
            "",
            1,
        ) and says in done.stderr
