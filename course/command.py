"""python -m nanollm course: make a student's copy, check it, grade it.

    python -m nanollm course make FOLDER         # a copy without the answers, with handouts
    python -m nanollm course check               # in that copy: the public tests
    python -m nanollm course grade FOLDER ...    # public and hidden tests: points, results.json, a CSV
"""
import argparse
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

from course.assignments import ASSIGNMENTS, chosen
from course.lock import SYSTEM, below, libraries
from nanollm.check import whole
from nanollm.commands import shell

ROOT = Path(__file__).resolve().parents[1]


def make(args):
    if not (ROOT / "course" / "make.py").exists():
        raise ValueError("this is a student's copy; make others from the repository itself")
    from course.make import make
    assignments = chosen(args.only)
    make(args.folder, assignments)
    print(f"{args.folder}: {', '.join(assignments)}. README.md in it says what to do.")


def check(args):
    names = [name for name in chosen(args.only) if (ROOT / "course" / name / "public.py").exists()]
    if not names:
        raise ValueError(f"this copy has nothing of {', '.join(args.only)}; leave --only out")
    tests = [test | dict(score=int(test["status"] == "passed"), max_score=1)  # counts, for want of points
             for test in tested(ROOT, names, ["public.py"], args)]
    failed = sum(test["status"] == "failed" for test in tests)
    print(f"{'':<28}   tests\n{table(tests, names)}\n")
    print(f"{len(tests) - failed} of {len(tests)} public tests pass."
          + ("" if failed else " The hidden ones try other sizes, ties, and the edges of what is specified."))
    sys.exit(1 if failed else 0)


def grade(args):
    names, folders = [*chosen(args.only)], args.folders
    problems = [f"{name}.{problem.name}" for name in names for problem in ASSIGNMENTS[name].problems]
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
        graded = pool.map(lambda folder: tested(folder, names, ["public.py", "hidden.py"], args), folders)
        bar = tqdm(graded, total=len(folders), leave=False, unit="submission",
                   disable=len(folders) == 1 or None)  # None: unless a terminal shows it
        for folder, tests in zip(folders, bar):
            own = os.fsencode(folder.resolve().name).decode(errors="replace")  # "." has a name as well
            (got, most), each = points(tests), [points(tests, problem)[0] for problem in problems]
            rows.append([own, *(f"{x:.2f}" for x in each), f"{got:.2f}"])
            if len(folders) == 1:
                print(f"{table(tests, names)}\n{'total':<28}{round(got, 2):6g} of {round(most, 2):g}")
            else:
                tqdm.write(f"{own:<40}{got:8.2f} of {most:g}")
            if args.json:
                shell.replace(args.json, json.dumps(dict(tests=tests), indent=1).encode())
    if args.csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        shell.replace(args.csv, text.getvalue().encode())


def tested(folder: Path, names: list[str], files: list[str], args) -> list[dict]:
    """The tests of Gradescope's results.json of one submission, from a pytest of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "results.json"
        options = ["-c", "course/pytest.ini", "-p", "course.plugin", f"--submission={folder.resolve()}",
                   f"--results={file}", f"--seconds={args.seconds}",
                   *(f"--only={x}" for x in args.only or [])]
        tests = [f"course/{name}/{each}" for name in names for each in files]
        # points depend on no variable and no plugin of whoever grades (-E: PYTHONOPTIMIZE, PYTHONWARNINGS …)
        environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run([sys.executable, "-E", "-m", "pytest", *options, *tests], cwd=ROOT,
                              env=environment | dict(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TMPDIR=scratch),
                              capture_output=True, text=True, errors="replace")  # it may print anything
        if done.returncode == os.EX_IOERR:
            raise OSError(f"a copy of {folder} cannot be written to {tempfile.gettempdir()}; "
                          "make room there, or set TMPDIR to another folder")
        if done.returncode not in (0, 1):  # all passed, or some failed
            raise RuntimeError(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return json.loads(file.read_bytes())["tests"]


def points(tests: list[dict], problem: str | None = None) -> tuple[float, float]:
    """Of a problem, or of all: those that were got, and the most."""
    of = [test for test in tests if problem in (None, test["extra_data"]["problem"])]
    return sum(test["score"] for test in of), sum(test["max_score"] for test in of)


def table(tests: list[dict], names: list[str]) -> str:
    """Points, and below a problem each test that failed."""
    lines = []
    for name in names:
        got, most = points([test for test in tests if test["extra_data"]["problem"].startswith(f"{name}.")])
        lines.append(f"{name:<28}{round(got, 2):6g} of {round(most, 2):g}")
        for problem in ASSIGNMENTS[name].problems:
            of = [test for test in tests if test["extra_data"]["problem"] == f"{name}.{problem.name}"]
            if not of:  # it was not asked for
                continue
            got, most = points(of)
            worth = f"{round(got, 2):6g} of {round(most, 2):g}"
            lines.append(f"  {problem.name:<26}{worth}    {problem.file}: {problem.function}")
            for test in of:
                if test["status"] == "failed":
                    hidden = "" if test["extra_data"]["public"] else " (hidden)"
                    lines.append(f"      ✗ {test['name'].partition(': ')[2]}{hidden}")
                    lines += [f"          {line}" for line in test["output"].splitlines()]
    return "\n".join(lines)


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
