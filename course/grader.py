"""Run the tests of assignments on one submission.

    python -E -m course.grader ORDER    # ORDER: the arguments of `results` as JSON; prints JSON

A test calls `run("grid", place=x, size=3)`. This calls `grid` of course/ASSIGNMENT/adapter.py in another
process (submission.py, one per problem) and returns its result. The expected values are in this process, and
no code of a submission runs here.
"""
from collections.abc import Callable
from functools import partial
from importlib import import_module
import json
from multiprocessing.connection import Connection
import os
from pathlib import Path
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import psutil

from course.assignments import ASSIGNMENTS, COMPARE, PROBLEMS, asked
from course.expect import Wrong, wrong
from course.functions import needed, spliced
from course.messages import packed, unpacked

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 2 ** 26  # bytes that one answer may have


def results(folder: str, problems: list[str], files: list[str], seconds: float) -> list[dict]:
    """Return the result of each test of these problems.

    files: "public" and "hidden", or one of them; seconds: the time limit of one call.
    """
    tests = []
    with Forks() as forks:
        for problem in problems:
            function = Submitted(forks, Path(folder), problem, seconds)
            for file in files:
                run = runner(function, trace=file == "public")
                for says, test in cases(problem, file).items():
                    why = failure(test, run)
                    tests.append(dict(problem=problem, says=says, passed=why is None, why=plain(why or ""),
                                      public=file == "public"))
            function.stop()
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


def runner(function: "Submitted", trace: bool) -> Callable:
    """Return run(call, **args), which calls the submission and returns its result.

    run raises Wrong if the call fails, or changes a tensor of args that `may_change` does not name.
    trace: add the traceback to the message.
    """
    def run(call: str, may_change: tuple[str, ...] = (), **args):
        answer = function.call(call, args)
        if raised := answer.get("raised"):
            says = f": {raised['message']}" if raised["message"] else ""
            where = f" ({raised['where']})" if raised["where"] else ""
            if raised["kind"] == "NotImplementedError" and not says:
                wrong(f"NotImplementedError{where}: write this function first")
            wrong(f"{raised['kind']}{says}{where}" + (f"\n{raised['trace']}" if trace else ""))
        for changed in answer["changed"]:
            if changed not in may_change:
                wrong(f"your function changed its argument {changed} in place; work on a copy")
        return answer["value"]
    return run


def plain(text: str) -> str:
    """Return at most 5000 characters, all printable: none can move a terminal's cursor."""
    text = text.strip()[:5000]
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Forks:
    """A process that imports torch once and forks for each problem."""

    def __init__(self):
        self.control, theirs = socket.socketpair()
        script = [sys.executable, str(Path(__file__).with_name("submission.py")), str(theirs.fileno())]
        environment = dict(OMP_NUM_THREADS="1", PATH=os.environ["PATH"], PYTHONDONTWRITEBYTECODE="1")
        self.process = subprocess.Popen(script, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.control.close()
        self.process.wait()

    def fork(self, folder: Path, package: str) -> Connection:
        """Fork a process that answers calls of the package's adapter; return the connection to it."""
        ours, theirs = socket.socketpair()
        order = json.dumps(dict(folder=str(folder), package=package)).encode()
        socket.send_fds(self.control, [order], [theirs.fileno()])
        theirs.close()
        self.control.recv(32)
        return Connection(ours.detach())

    def kill(self):
        """Kill all forked processes and their children; only one problem's process runs at a time."""
        while family := psutil.Process(self.process.pid).children(recursive=True):
            for process in family:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(family, timeout=1)


class Submitted:
    """One problem of a submission: a copy of our repository with the submitted function, and its process."""

    def __init__(self, forks: Forks, folder: Path, problem: str, seconds: float):
        self.forks, self.seconds, self.assignment = forks, seconds, problem.partition(".")[0]
        self.folder, self.connection, self.why = Path(tempfile.mkdtemp()).resolve(), None, None
        problem = PROBLEMS[problem]
        try:
            theirs = handed_in(folder, problem.file)
            others = [other for other in asked(problem.file) if other != problem.function]
            source = spliced((ROOT / problem.file).read_text(), theirs, problem.function, others)
        except (ValueError, OSError) as error:
            self.why = str(error)
            return
        copy(self.folder, self.assignment)
        (self.folder / problem.file).write_text(source)

    def call(self, name: str, args: dict) -> dict:
        """Return the answer of the submission's process, or raise Wrong with the reason."""
        if self.why:
            wrong(self.why)
        if self.connection is None:
            self.connection = self.forks.fork(self.folder, self.assignment)
        failed, clock = None, threading.Timer(self.seconds, self.late)
        clock.start()
        try:
            self.connection.send_bytes(packed(dict(call=name, args=args)))
            answer = unpacked(self.connection.recv_bytes(LARGEST))
            if not is_answer(answer):
                raise ValueError("no answer")
        except (EOFError, ConnectionError):
            failed = "the process ended before your function returned"
        except Exception:  # an attacker may send anything
            failed = "the process sent something other than the result of your function"
        finally:
            clock.cancel()
            clock.join()
        if self.why:
            failed = f"stopped: your function ran for more than {self.seconds:g} s"
        if failed:
            self.stop()
            wrong(failed)
        return answer

    def late(self):
        """Stop the running call, even while it sends its answer."""
        self.why = f"not run: an earlier call took more than {self.seconds:g} s"
        self.forks.kill()

    def stop(self):
        """End the process and its children."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
            self.forks.kill()


def is_answer(x) -> bool:
    match x:
        case {"value": _, "changed": list()}:
            return True
        case {"raised": {"kind": str(), "message": str(), "where": str(), "trace": str()}}:
            return True
    return False


def handed_in(folder: Path, file: str) -> str:
    """Return the text of a submitted file, or raise ValueError with the reason."""
    path = folder / file
    if any(each.is_symlink() for each in [path, *path.parents][:len(Path(file).parts)]):
        raise ValueError(f"{file} is a link; hand in the file itself")
    if not path.is_file():
        raise ValueError(f"{file} was not handed in; put it into the submitted folder under this path")
    if path.stat().st_size > 2 ** 20:
        raise ValueError(f"{file} is larger than a megabyte; remove data from it")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text; save it as UTF-8") from error


def copy(folder: Path, assignment: str):
    """Copy what a submission may import: the adapter, the students' files, the decoder, and their imports."""
    files = [f"course/{assignment}/adapter.py", *(each.file for each in ASSIGNMENTS[assignment].problems)]
    for file in needed(ROOT, [*files, COMPARE]):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)


if __name__ == "__main__":
    try:
        print(json.dumps(results(**json.loads(sys.argv[1]))))
    except OSError as error:  # not the submission's fault, so it must not cost points
        print(error, file=sys.stderr)
        sys.exit(os.EX_IOERR)
