"""python -m nanollm course: make a student's copy, check it, grade it.

    python -m nanollm course make FOLDER         # a copy without the answers, with handouts
    python -m nanollm course check               # in that copy: the public tests
    python -m nanollm course grade FOLDER ...    # public and hidden tests: points, results.json, a CSV
"""
import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
import csv
import io
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile

from tqdm import tqdm

from course.assignments import ASSIGNMENTS, PROBLEMS, assignment_of, chosen
from course.sandbox import SYSTEM, below, libraries
from nanollm.check import whole
from nanollm.commands import shell

ROOT = Path(__file__).resolve().parents[1]


def make(args):
    if not (ROOT / "course" / "make.py").exists():
        raise ValueError("this is a student's copy; make others from the repository itself")
    from course.make import make
    assignments = {assignment_of(problem): None for problem in chosen(args.only)}
    make(args.folder, [*assignments])
    print(f"{args.folder}: {', '.join(assignments)}. README.md in it says what to do.")


def check(args):
    problems = [problem for problem in chosen(args.only)
                if (ROOT / "course" / assignment_of(problem) / "public.py").exists()]
    if not problems:
        raise ValueError(f"this copy has nothing of {', '.join(args.only)}; leave --only out")
    tests = [test | dict(worth=1) for test in tested(ROOT, problems, ["public"], args.seconds)]
    failed = sum(not test["passed"] for test in tests)
    print(f"{'':<28}   tests\n{table(tests)}\n")
    print(f"{len(tests) - failed} of {len(tests)} public tests pass."
          + ("" if failed else " The hidden ones try other sizes, ties, and the edges of what is specified."))
    sys.exit(1 if failed else 0)


def grade(args):
    folders, asked = args.folders, chosen(args.only)
    names = {assignment_of(problem) for problem in asked}
    problems = [problem for problem in PROBLEMS if assignment_of(problem) in names]
    header = ["submission", *problems, "total"]
    if not all((ROOT / "course" / name / "hidden.py").exists() for name in names):
        raise ValueError("this copy has no hidden tests; grade where the copy was made")
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; name that of a submission")
    if args.json:
        if len(folders) > 1:
            raise ValueError(f"results.json is of one submission, not of {len(folders)}; use --csv")
        shell.check_output(args.json, "results", is_results)
        if args.csv and os.path.realpath(args.csv) == os.path.realpath(args.json):
            raise ValueError(f"results and points cannot both go to {args.csv}; name two files")
    if args.csv:
        ours = ",".join(header).encode() + b"\n"  # a teacher may have added a column
        shell.check_output(args.csv, "table of points", lambda data: data.startswith(ours))

    rows = [header]
    with ThreadPoolExecutor(args.jobs or os.cpu_count()) as pool:
        graded = pool.map(lambda folder: tested(folder, asked, ["public", "hidden"], args.seconds), folders)
        bar = tqdm(graded, total=len(folders), leave=False, unit="submission",
                   disable=len(folders) == 1 or None)  # None: unless a terminal shows it
        for folder, tests in zip(folders, bar):
            own = os.fsencode(folder.resolve().name).decode(errors="replace")  # "." has a name as well
            each = [points(test for test in tests if test["problem"] == problem)[0] for problem in problems]
            rows.append([own, *(f"{x:.2f}" for x in (*each, sum(each)))])
            if len(folders) == 1:
                print(table(tests), line("total", tests), sep="\n")
            else:
                tqdm.write(line(f"{own:<40}", tests))
            if args.json:
                shell.replace(args.json, json.dumps(gradescope(tests), indent=1).encode())
    if args.csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        shell.replace(args.csv, text.getvalue().encode())


def tested(folder: Path, problems: list[str], files: list[str], seconds: float) -> list[dict]:
    """What came of each test of one submission, in a process of its own (grader.py), and what it is worth: a
    problem's points are shared out evenly over its tests.
    """
    order = dict(folder=str(folder.resolve()), problems=problems, files=files, seconds=seconds)
    with tempfile.TemporaryDirectory() as scratch:
        # points depend on no variable of whoever grades (-E: PYTHONOPTIMIZE, PYTHONPATH, PYTHONWARNINGS …)
        done = subprocess.run([sys.executable, "-E", "-m", "course.grader", json.dumps(order)], cwd=ROOT,
                              env=os.environ | dict(TMPDIR=scratch), capture_output=True, text=True)
    if done.returncode == os.EX_IOERR:
        raise OSError(f"a copy of {folder} cannot be written to {tempfile.gettempdir()}; "
                      "make room there, or set TMPDIR to another folder")
    if done.returncode:
        raise RuntimeError(f"the tests did not run:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout)
    count = Counter(test["problem"] for test in found)
    return [test | dict(worth=PROBLEMS[test["problem"]].points / count[test["problem"]]) for test in found]


def points(tests: Iterable[dict]) -> tuple[float, float]:
    """Those that were got, and the most."""
    each = [(test["worth"] * test["passed"], test["worth"]) for test in tests]
    return sum(got for got, _ in each), sum(most for _, most in each)


def line(name: str, tests: list[dict]) -> str:
    got, most = points(tests)
    return f"{name:<28}{round(got, 2):6g} of {round(most, 2):g}"


def table(tests: list[dict]) -> str:
    """Points, and below a problem each test that failed."""
    lines, named = [], ""
    for key in dict.fromkeys(test["problem"] for test in tests):
        if assignment_of(key) != named:
            named = assignment_of(key)
            lines.append(line(named, [test for test in tests if assignment_of(test["problem"]) == named]))
        problem, its_tests = PROBLEMS[key], [test for test in tests if test["problem"] == key]
        lines.append(line(f"  {problem.name}", its_tests) + f"    {problem.file}: {problem.function}")
        for test in its_tests:
            if not test["passed"]:
                lines.append(f"      ✗ {test['says']}{'' if test['public'] else ' (hidden)'}")
                lines += [f"          {text}" for text in test["why"].splitlines()]
    return "\n".join(lines)


def gradescope(tests: list[dict]) -> dict:
    """Gradescope's results.json; students see the hidden tests when the grades are published."""
    return dict(tests=[dict(
        name=f"{test['problem']}: {test['says']}", score=test["worth"] * test["passed"],
        max_score=test["worth"], status="passed" if test["passed"] else "failed", output=test["why"],
        visibility="visible" if test["public"] else "after_published",
        extra_data=dict(problem=test["problem"], public=test["public"])) for test in tests])


def checker(assignment: str) -> Callable:
    """check("grid"), for a handout: the public tests of that problem, as the command shows them."""
    def check(problem: str):
        only = ["--only", f"{assignment}.{problem}"]
        subprocess.run([sys.executable, "-m", "nanollm", "course", "check", *only])
    return check


def is_results(data: bytes) -> bool:
    held = shell.read_json(data)
    tests = held["tests"] if isinstance(held, dict) and held.keys() == {"tests"} else None
    keys = {"name", "score", "max_score", "status", "output", "visibility", "extra_data"}
    return isinstance(tests, list) and tests != [] and all(
        isinstance(test, dict) and test.keys() == keys for test in tests)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm course", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="make | check | grade")
    for run, what in ((make, "a student's copy"), (check, "the public tests, in a student's copy"),
                      (grade, "all tests of submissions, and their points")):
        command = commands.add_parser(run.__name__, help=what, description=what)
        command.set_defaults(run=run, seconds=10.0)
        command.add_argument("--only", nargs="+", metavar="NAME", help="assignments: "
                             f"{', '.join(ASSIGNMENTS)}; or a problem, as in chunks.grid; default all")
        if run is make:
            command.add_argument("folder", type=Path, help="a new folder")
        else:
            command.add_argument("--seconds", type=float, help="that one call may take; default 10")
        if run is grade:
            command.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a submission each")
            command.add_argument("--json", type=Path, help="write Gradescope's results.json of one")
            command.add_argument("--csv", type=Path, help="write the points, a row a submission")
            command.add_argument("--jobs", type=int, default=0, help="at once; default: as many as cores")
    args = parser.parse_args(argv)
    if args.run is grade:
        whole("jobs", args.jobs, 0)
    if not 0 < args.seconds <= 3600:
        raise ValueError(f"--seconds {args.seconds} must lie above 0 and be at most 3600")
    if args.run is not make and (seen := [x for x in (*SYSTEM, *libraries()) if below(ROOT, [x])]):
        raise ValueError(f"{ROOT} lies below {seen[0]}, which a submission may read; move it")
    args.run(args)
