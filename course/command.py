"""Make a student's copy of the course, check it, grade it.

    python -m course make FOLDER         # write a copy with handouts and without solutions
    python -m course check               # in that copy: run the public tests
    python -m course grade FOLDER ...    # run public and hidden tests; print or write the points

Grading runs submissions in separate processes with limits of time and memory, but they may read and write
files. Run it in a container for submissions that you do not trust.
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

from tqdm import tqdm

from course.assignments import ASSIGNMENTS, PROBLEMS, assignment_of, chosen
from lab import command_line
from nanollm.check import whole

ROOT = Path(__file__).resolve().parents[1]


def make(args):
    if not (ROOT / "course" / "make.py").exists():
        raise ValueError("this is a student's copy; run `course make` in the repository itself")
    from course.make import make
    assignments = {assignment_of(problem): None for problem in chosen(args.only)}
    make(args.folder, [*assignments])
    print(f"wrote {args.folder} with {', '.join(assignments)}; its README.md says what to do")


def check(args):
    problems = [problem for problem in chosen(args.only)
                if (ROOT / "course" / assignment_of(problem) / "public.py").exists()]
    if not problems:
        if not args.only:
            raise ValueError("this copy has no tests; take the folder that your teacher made")
        raise ValueError(f"this copy has no tests of {', '.join(args.only)}; leave out --only")
    tests = [test | dict(worth=1) for test in tested(ROOT, problems, ["public"], args.seconds)]
    failed = sum(not test["passed"] for test in tests)
    print(f"{'':<28}   tests\n{table(tests)}\n")
    print(f"{len(tests) - failed} of {len(tests)} public tests pass."
          + ("" if failed else " The hidden tests try other sizes, ties and edge cases."))
    sys.exit(1 if failed else 0)


def grade(args):
    whole("jobs", args.jobs, 0)
    folders, asked = args.folders, chosen(args.only)
    names = {assignment_of(problem) for problem in asked}
    problems = [problem for problem in PROBLEMS if assignment_of(problem) in names]
    header = ["submission", *problems, "total"]
    if not all((ROOT / "course" / name / "hidden.py").exists() for name in names):
        raise ValueError("this copy has no hidden tests; grade in the repository that made it")
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; name the folder of a submission")
    if args.json:
        if len(folders) > 1:
            raise ValueError(f"--json takes one submission, not {len(folders)}; use --csv")
        command_line.check_output(args.json, "results", is_results)
        if args.csv and os.path.realpath(args.csv) == os.path.realpath(args.json):
            raise ValueError(f"--json and --csv cannot both write {args.csv}; name two files")
    if args.csv:
        ours = ",".join(header).encode() + b"\n"  # a teacher may have added a column
        command_line.check_output(args.csv, "table of points", lambda data: data.startswith(ours))

    rows = [header]
    code = {file: file.read_bytes() for part in ("course", "nanollm", "methods", "lab")
            for file in (ROOT / part).rglob("*.py")}
    with ThreadPoolExecutor(args.jobs or os.cpu_count()) as pool:
        graded = pool.map(lambda folder: tested_safely(folder, asked, args.seconds, code), folders)
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
                command_line.replace(args.json, json.dumps(gradescope(tests), indent=1).encode())
            if args.csv:  # as they come
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows(rows)
                command_line.replace(args.csv, text.getvalue().encode())


def tested_safely(folder: Path, problems: list[str], seconds: float, code: dict[Path, bytes]) -> list[dict]:
    """Return `tested`, or no points, with the reason, if the grader did not end as it should.

    code: our files, which are restored if the submission has changed them.
    """
    try:
        return tested(folder, problems, ["public", "hidden"], seconds)
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        why = f"the grader was ended, or its output spoiled, while it ran this submission: {str(error)[:300]}"
        return [dict(problem=problem, says="The tests run.", passed=False, why=why, public=True,
                     worth=PROBLEMS[problem].points) for problem in problems]
    finally:
        for file, content in code.items():
            if not file.exists() or file.read_bytes() != content:
                file.write_bytes(content)


def tested(folder: Path, problems: list[str], files: list[str], seconds: float) -> list[dict]:
    """Return the result of each test of one submission, and the points it is worth.

    The tests run in a separate process (grader.py). The tests of a problem share its points equally.
    """
    order = dict(folder=str(folder.resolve()), problems=problems, files=files, seconds=seconds)
    # -E ignores PYTHONOPTIMIZE, PYTHONPATH, … : the grader's shell must not change the points
    done = subprocess.run([sys.executable, "-E", "-m", "course.grader", json.dumps(order)], cwd=ROOT,
                          env=os.environ | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True,
                          timeout=600 + 60 * seconds)
    if done.returncode:
        raise RuntimeError(f"the tests did not run:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout)
    count = Counter(test["problem"] for test in found)
    return [test | dict(worth=PROBLEMS[test["problem"]].points / count[test["problem"]]) for test in found]


def points(tests: Iterable[dict]) -> tuple[float, float]:
    """Return the points scored, and the maximum."""
    each = [(test["worth"] * test["passed"], test["worth"]) for test in tests]
    return sum(scored for scored, _ in each), sum(most for _, most in each)


def line(name: str, tests: list[dict]) -> str:
    scored, most = points(tests)
    return f"{name:<28}{round(scored, 2):6g} of {round(most, 2):g}"


def table(tests: list[dict]) -> str:
    """Return a table of points; below each problem, the tests that failed, and why."""
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
    """Return Gradescope's results.json. Students see hidden tests when the grades are published."""
    return dict(tests=[dict(
        name=f"{test['problem']}: {test['says']}", score=test["worth"] * test["passed"],
        max_score=test["worth"], status="passed" if test["passed"] else "failed", output=test["why"],
        visibility="visible" if test["public"] else "after_published",
        extra_data=dict(problem=test["problem"], public=test["public"])) for test in tests])


def checker(assignment: str) -> Callable:
    """Return check(problem), which runs a problem's public tests from a handout."""
    def check(problem: str):
        only = ["--only", f"{assignment}.{problem}"]
        subprocess.run([sys.executable, "-m", "course", "check", *only])
    return check


def is_results(data: bytes) -> bool:
    results = command_line.read_json(data)
    tests = results["tests"] if isinstance(results, dict) and results.keys() == {"tests"} else None
    keys = {"name", "score", "max_score", "status", "output", "visibility", "extra_data"}
    return isinstance(tests, list) and tests != [] and all(
        isinstance(test, dict) and test.keys() == keys for test in tests)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m course", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="make | check | grade")
    for run, what in ((make, "Write a student's copy: handouts, public tests, and functions to fill in."),
                      (check, "Run the public tests on this copy."),
                      (grade, "Run public and hidden tests on submissions, and count points.")):
        command = commands.add_parser(run.__name__, help=what, description=what)
        command.set_defaults(run=run, seconds=10.0)
        command.add_argument("--only", nargs="+", metavar="NAME", help="assignments ("
                             f"{', '.join(ASSIGNMENTS)}) or problems (such as chunks.grid); default: all")
        if run is make:
            command.add_argument("folder", type=Path, metavar="FOLDER",
                                 help="the folder to write; it must not exist, or be empty")
        else:
            command.add_argument("--seconds", type=float, metavar="SECONDS",
                                 help="stop a call that takes longer; default: 10")
        if run is grade:
            command.add_argument("folders", type=Path, nargs="+", metavar="FOLDER",
                                 help="one folder per submission")
            command.add_argument("--json", type=Path, metavar="FILE",
                                 help="write Gradescope's results.json here; for one submission")
            command.add_argument("--csv", type=Path, metavar="FILE",
                                 help="write the points here, one row per submission")
            command.add_argument("--jobs", type=int, default=0, metavar="N",
                                 help="grade N submissions at a time; default: one per core")
    args = parser.parse_args(argv)
    if not 0 < args.seconds <= 3600:
        raise ValueError(f"--seconds is {args.seconds}; it must be above 0 and at most 3600")
    args.run(args)
