"""Run the tests of assignments on one submission.

    python -E -m course.grader ORDER    # ORDER: the arguments of `results` as JSON; prints JSON

A test calls `run("grid", place=x, size=3)`. This calls `grid` of course/ASSIGNMENT/adapter.py in another
process (submission.py, one per problem) and returns its result. The expected values are in this process, and
no code of a submission runs here.
"""
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
import json
from multiprocessing import get_context
import os
from pathlib import Path
import signal
import sys
from threading import Event, Lock, Timer

import psutil

from course.assignments import PROBLEMS, asked, assignment_of
from course.expect import Wrong, wrong
from course.functions import spliced
from course.submission import ROOT, packed, serve, unpacked

FORK = get_context("fork")  # a new Python would import torch again, which takes seconds


def results(folder: str, problems: list[str], files: list[str], seconds: float) -> list[dict]:
    """Return the result of each test of these problems.

    files: "public" and "hidden", or one of them; seconds: the time limit of one call.
    """
    if "pairs.factored" in problems:  # its adapter would import this, seconds of the first call's time
        import_module("torch._dynamo")
    # All processes start before a test is imported, so that none holds expected values. No submitted code
    # runs before all tests are imported, so that none can change their files.
    each = {problem: Submission(Path(folder), problem, seconds) for problem in problems}
    to_run = {(problem, file): cases(problem, file) for problem in problems for file in files}
    tests = []
    for problem, submission in each.items():
        for file in files:
            run = runner(submission.call, trace=file == "public")
            for says, test in to_run[problem, file].items():
                why = failure(test, run)
                tests.append(dict(problem=problem, says=says, passed=why is None, why=plain(why or ""),
                                  public=file == "public"))
        submission.end()
    return tests


def cases(problem: str, file: str) -> dict[str, Callable]:
    """Return the tests of a problem in course/ASSIGNMENT/FILE.py, by docstring and parameters."""
    assignment, _, name = problem.partition(".")
    found = {}
    for test in vars(import_module(f"course.{assignment}.{file}")).values():
        if getattr(test, "problem", None) == name:
            each = [{}]
            for mark in getattr(test, "pytestmark", []):
                names = mark.args[0].split(", ")
                rows = [x if len(names) > 1 else [x] for x in mark.args[1]]
                each = [given | dict(zip(names, row)) for given in each for row in rows]
            for given in each:
                shown = ", ".join(f"{name}={x}" for name, x in given.items())
                says = f"{test.__doc__} [{shown}]" if given else test.__doc__
                found[" ".join(says.split())] = partial(test, **given)
    return found


def failure(test: Callable, run: Callable) -> str | None:
    """Run a test and return why it fails, or None if it passes."""
    try:
        test(run)
    except Wrong as error:
        return str(error)
    except Exception as error:  # an answer that cannot even be compared
        return f"{type(error).__name__}: {error}"
    return None


def runner(send: Callable[[str, bytes], dict], trace: bool) -> Callable:
    """Return run(call, **args), which sends the call and returns its result.

    run raises Wrong if the call fails, or changes an argument, a tensor, that `may_change` does not name.
    trace: add the traceback to the message.
    """
    def run(call: str, may_change: tuple[str, ...] = (), **args):
        answer = send(call, packed(args))
        if raised := answer.get("raised"):
            says = f": {raised['message']}" if raised["message"] else ""
            place = f" ({raised['place']})" if raised["place"] else ""
            if raised["kind"] == "NotImplementedError" and not says:
                wrong(f"NotImplementedError{place}: write this function first")
            wrong(f"{raised['kind']}{says}{place}" + (f"\n{raised['trace']}" if trace else ""))
        for changed in answer["changed"]:
            if changed not in may_change:
                wrong(f"your function changed its argument {changed} in place; work on a copy")
        return answer["value"]
    return run


def plain(text: str) -> str:
    """Return at most 5000 characters, printable or line ends: no terminal's control codes."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}"
                   for c in text.strip()[:5000])


class Submission:
    """One problem of a submission, and the process that runs its function."""

    def __init__(self, folder: Path, problem: str, seconds: float):
        self.seconds, self.process, self.why = seconds, None, None
        self.ending = Lock()
        file, function = PROBLEMS[problem].file, PROBLEMS[problem].function
        try:
            others = [other for other in asked(file) if other != function]
            source = spliced((ROOT / file).read_text(), handed_in(folder, file), function, others)
        except ValueError as error:
            self.why = str(error)
            return
        except (RecursionError, MemoryError):
            self.why = f"{file} is nested too deeply to be read"
            return
        self.connection, theirs = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(theirs, assignment_of(problem), file, source),
                                    daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str, args: bytes) -> dict:
        """Return the answer of the process. Raise Wrong with the reason if there is none."""
        if self.why:
            wrong(self.why)
        late = Event()
        # the half of a message would be waited for without end
        timer = Timer(self.seconds, lambda: (late.set(), self.end()))
        timer.start()
        try:
            self.connection.send_bytes(packed([name, args]))
            data = self.connection.recv_bytes()
        except (EOFError, OSError):
            if late.is_set():
                self.give_up(f"your function ran for more than {self.seconds:g} s")
            self.give_up("the process ended before your function returned")
        finally:
            timer.cancel()
        try:
            return unpacked(data)
        except Exception:
            wrong("your function returned something other than tensors and numbers")

    def give_up(self, why: str):
        """End the process; the tests that are left are not run."""
        self.end()
        self.why = f"not run: in an earlier test {why}"
        wrong(why)

    def end(self):
        """End the process, its group and its descendants. The timer may call this as well."""
        with self.ending:
            process, self.process = self.process, None
            if not process:
                return
            others = []
            with suppress(psutil.NoSuchProcess):
                others = psutil.Process(process.pid).children(recursive=True)
            with suppress(ProcessLookupError):  # the group outlives its first process, or is not yet there
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            for other in others:  # that may have left the group
                with suppress(psutil.NoSuchProcess):
                    other.kill()
            process.join()


def handed_in(folder: Path, file: str) -> str:
    """Return the text of a submitted file, or raise ValueError with the reason."""
    if not (folder / file).is_file():
        raise ValueError(f"{file} was not handed in; put it into the submitted folder under this path")
    try:
        return (folder / file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text; save it as UTF-8") from error


if __name__ == "__main__":
    print(json.dumps(results(**json.loads(sys.argv[1]))))
