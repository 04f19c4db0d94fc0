"""python -m nanollm course: make a student's copy, check it, grade it.

    python -m nanollm course make FOLDER                 # a copy without the answers, with handouts
    python -m nanollm course check                       # in that copy: the public tests
    python -m nanollm course grade FOLDER ...            # public and hidden tests: points, results.json, a CSV
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

import nanollm
from course.assignments import ASSIGNMENTS, chosen

ROOT = Path(__file__).resolve().parents[1]


def results(folder: Path, names: list[str], files: tuple[str, ...], seconds: float, only: list[str]) -> list[dict]:
    """The tests of Gradescope's results.json of one submission, from a pytest of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "results.json"
        tests = [f"course/{name}/{each}" for name in names for each in files]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-c", "course/pytest.ini", "-p", "course.plugin", "--submission",
             folder.resolve(), "--results", file, "--seconds", str(seconds), *(f"--only={each}" for each in only),
             *tests],
            cwd=ROOT, env=os.environ | dict(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
        if done.returncode not in (0, 1, 5):  # all passed, some failed, or there is none
            raise RuntimeError(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return json.loads(file.read_text())["tests"]


def points(tests: list[dict], problem: str) -> tuple[float, float]:
    of = [test for test in tests if test["extra_data"]["problem"] == problem]
    return sum(test["score"] for test in of), sum(test["max_score"] for test in of)


def table(tests: list[dict], names: list[str]) -> str:
    """Points, and below a problem each test that failed."""
    lines = []
    for name in names:
        each = ASSIGNMENTS[name]
        both = [points(tests, f"{name}.{problem.name}") for problem in each.problems]
        lines.append(f"{name:<28}{sum(x for x, _ in both):6.2f} of {sum(x for _, x in both):.0f}")
        for problem, (got, most) in zip(each.problems, both):
            if not most:  # it was not asked for
                continue
            lines.append(f"  {problem.name:<26}{got:6.2f} of {most:.0f}    {problem.file}: {problem.function}")
            for test in tests:
                if test["extra_data"]["problem"] == f"{name}.{problem.name}" and test["status"] == "failed":
                    kind = "" if test["extra_data"]["public"] else " (hidden)"
                    lines.append(f"      ✗ {test['name'].partition(': ')[2]}{kind}")
                    lines += [f"          {line}" for line in test["output"].splitlines()]
    return "\n".join(lines)


def is_ours(data: bytes) -> bool:
    held = nanollm.read_json(data)
    return isinstance(held, dict) and "tests" in held


def make(args):
    from course.make import make
    make(args.folder, chosen(args.only))
    print(f"{args.folder}: {', '.join(chosen(args.only))}. Hand out this folder; README.md there says what to do.")


def check(args):
    there = [name for name in chosen(args.only) if (ROOT / "course" / name / "public.py").exists()]
    tests = results(ROOT, there, ("public.py",), args.seconds, args.only or [])
    print(table(tests, there))
    failed = sum(test["status"] == "failed" for test in tests)
    print(f"\n{len(tests) - failed} of {len(tests)} public tests pass." + ("" if failed else
          " The hidden ones also try other sizes, ties and corner cases of the specification."))
    sys.exit(1 if failed else 0)


def grade(args):
    names = [*chosen(args.only)]
    if not all((ROOT / "course" / name / "hidden.py").exists() for name in names):
        raise ValueError("this copy has no hidden tests; grade with the repository that the copy was made from")
    if args.json and len(args.folders) > 1:
        raise ValueError(f"results.json is of one submission, and {len(args.folders)} are named; use --csv")
    for folder in args.folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; name that of a submission")
    if args.json:
        nanollm.check_output(args.json, "results", is_ours)
    header = ["submission", *(f"{name}.{problem.name}" for name in names for problem in ASSIGNMENTS[name].problems),
              "total"]
    if args.csv:
        nanollm.check_output(args.csv, "table of points", lambda data: data.decode().startswith(",".join(header)))

    rows, files = [header], ("public.py", "hidden.py")
    with ThreadPoolExecutor(args.jobs or os.cpu_count()) as pool:
        graded = pool.map(lambda folder: results(folder, names, files, args.seconds, args.only or []), args.folders)
        for folder, tests in zip(args.folders, tqdm(graded, total=len(args.folders), leave=False, unit="submission",
                                              disable=len(args.folders) == 1)):
            of_each = [points(tests, problem)[0] for problem in header[1:-1]]
            rows.append([folder.resolve().name, *(f"{x:.2f}" for x in of_each), f"{sum(of_each):.2f}"])
            most = sum(test["max_score"] for test in tests)
            tqdm.write(f"{table(tests, names)}\ntotal{sum(of_each):29.2f} of {most:.0f}" if len(args.folders) == 1
                       else f"{folder.resolve().name:<40}{sum(of_each):8.2f} of {most:.0f}")
            if args.json:
                nanollm.replace(args.json, json.dumps(dict(tests=tests), indent=1).encode())
    if args.csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        nanollm.replace(args.csv, text.getvalue().encode())


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm course", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="make | check | grade")
    for run, what in ((make, "a student's copy"), (check, "the public tests, in a student's copy"),
                      (grade, "submissions: all tests, and points")):
        command = commands.add_parser(run.__name__, help=what, description=what)
        command.set_defaults(run=run)
        command.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(ASSIGNMENTS)}, "
                             "or a problem as in chunks.cut; default all")
        if run is make:
            command.add_argument("folder", type=Path, help="a new folder")
            continue
        command.add_argument("--seconds", type=float, default=10.0, help="that a call may take; default 10")
        if run is grade:
            command.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a submission each")
            command.add_argument("--json", type=Path, help="write Gradescope's results.json here (one submission)")
            command.add_argument("--csv", type=Path, help="write the points of all, a row a submission")
            command.add_argument("--jobs", type=int, default=0, help="at once; default: as many as cores")
    args = parser.parse_args(argv)
    args.run(args)
