"""pytest, with the functions of a submission behind a fixture.

A test asks `run("grid", place=x, size=3)` and gets what the function `grid` of course/ASSIGNMENT/adapter.py
returns in a process of the submission (worker.py), one for each problem. Nothing of a submission ever runs in
this process, where the expected values are.
"""
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
import pytest

from course.assignments import ASSIGNMENTS, asked
from course.source import needed, spliced
from course.wire import packed, unpacked

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 2 ** 26  # bytes of an answer
SEEN = "visible", "after_published"  # Gradescope's words: of public tests, of hidden ones


def pytest_addoption(parser):
    parser.addoption("--submission", type=Path, help="folder of a student's copy")
    parser.addoption("--results", type=Path, help="write Gradescope's results.json here")
    parser.addoption("--seconds", type=float, default=10.0, help="that one call may take")
    parser.addoption("--only", action="append", default=[], help="an assignment, or a problem: chunks.grid")


def pytest_configure(config):
    config.addinivalue_line("markers", "problem(name): the problem that a test belongs to")
    config.stash[FORKS], config.stash[PROBLEMS] = Forks(), {}


def pytest_unconfigure(config):
    for each in config.stash[PROBLEMS].values():
        each.close()
    config.stash[FORKS].close()


class Forks:
    """A process that has imported torch, and forks."""

    def __init__(self):
        self.control, theirs = socket.socketpair()
        script = [sys.executable, str(Path(__file__).with_name("worker.py")), str(theirs.fileno())]
        environment = dict(OMP_NUM_THREADS="1", PATH=os.environ["PATH"], PYTHONDONTWRITEBYTECODE="1")
        self.process = subprocess.Popen(script, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    def fork(self, folder: Path, package: str) -> Connection:
        """The way to a new process that answers calls of a package's adapter."""
        ours, theirs = socket.socketpair()
        order = json.dumps(dict(folder=str(folder), package=package)).encode()
        socket.send_fds(self.control, [order], [theirs.fileno()])
        theirs.close()
        self.control.recv(32)
        return Connection(ours.detach())

    def kill(self):
        """All that was forked, and whatever came of it: one problem's process lives at a time."""
        while family := psutil.Process(self.process.pid).children(recursive=True):
            for process in family:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(family, timeout=1)

    def close(self):
        self.control.close()
        self.process.wait()


class Submitted:
    """One problem of a submission: a copy of the repository with one function of theirs, and a process."""

    def __init__(self, forks: Forks, folder: Path, assignment: str, name: str, seconds: float):
        self.forks, self.assignment, self.seconds = forks, assignment, seconds
        self.folder, self.connection, self.why = Path(tempfile.mkdtemp()).resolve(), None, None
        problem = next(each for each in ASSIGNMENTS[assignment].problems if each.name == name)
        try:
            theirs = handed_in(folder, problem.file)
            others = [other for other in asked(problem.file) if other != problem.function]
            source = spliced((ROOT / problem.file).read_text(), theirs, problem.function, others)
        except (ValueError, OSError) as error:
            self.why = str(error)
            return
        copy(self.folder, assignment)
        (self.folder / problem.file).write_text(source)

    def call(self, name: str, args: dict) -> dict:
        """The answer of the submission's process, or why there is none."""
        if self.why:
            return dict(failed=self.why)
        late = threading.Event()

        def stop():  # also in the middle of an answer
            late.set()
            self.forks.kill()

        clock = threading.Timer(self.seconds, stop)
        clock.start()
        try:
            if self.connection is None:
                self.connection = self.forks.fork(self.folder, self.assignment)
            self.connection.send_bytes(packed(dict(call=name, args=args)))
            answer = unpacked(self.connection.recv_bytes(LARGEST))
            if not is_answer(answer):
                raise ValueError("no answer")
            return answer
        except Exception as error:  # whatever a stranger may send
            self.stop()
            if late.is_set():
                self.why = f"not run: an earlier call took more than {self.seconds:g} s"
                return dict(failed=f"it ran for more than {self.seconds:g} s, and was stopped")
            ended = isinstance(error, (EOFError, ConnectionError))
            return dict(failed="its process ended before it gave an answer" if ended else
                        "its process sent something that is no answer")
        finally:
            clock.cancel()
            clock.join()

    def stop(self):
        """End its process and all that came of it."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
            self.forks.kill()

    def close(self):
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def is_answer(x) -> bool:
    match x:
        case {"value": _, "changed": list()}:
            return True
        case {"raised": {"kind": str(), "message": str(), "where": str(), "trace": str()}}:
            return True
    return False


def handed_in(folder: Path, file: str) -> str:
    """The text of a submitted file. ValueError where there is none to be read."""
    path = folder / file
    if any(each.is_symlink() for each in [path, *path.parents][:len(Path(file).parts)]):
        raise ValueError(f"{file} is a link; hand in the file itself")
    if not path.is_file():
        raise ValueError(f"{file} was not handed in")
    if path.stat().st_size > 2 ** 20:
        raise ValueError(f"{file} has more than a megabyte")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8") from error


def copy(folder: Path, assignment: str):
    """What a submission may import: the adapter, what is asked for, what these import, and the decoder."""
    files = [f"course/{assignment}/adapter.py", *(each.file for each in ASSIGNMENTS[assignment].problems)]
    decoder = [str(file.relative_to(ROOT)) for file in (ROOT / "nanollm").rglob("*.py")]
    for file in needed(ROOT, files) | {*decoder}:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)


FORKS, PROBLEMS, RESULTS = pytest.StashKey[Forks](), pytest.StashKey[dict](), []


@pytest.fixture
def run(request):
    """run(call, **args): what the submission's function returns; the test fails, in words, where it fails.

    Tensors that were given must be as they were, unless they are named in `may_change`.
    """
    name, assignment = problem_of(request.node)
    problems = request.config.stash[PROBLEMS]
    if (assignment, name) not in problems:
        for other in problems.values():  # a problem's tests stand together
            other.stop()
        options = request.config.option
        try:
            problems[assignment, name] = Submitted(
                request.config.stash[FORKS], options.submission, assignment, name, options.seconds)
        except OSError as error:  # no fault of the submission, so it costs no points
            pytest.exit(str(error), os.EX_IOERR)
    submitted = problems[assignment, name]

    def run(call: str, may_change: tuple[str, ...] = (), **args):
        answer = submitted.call(call, args)
        if "failed" in answer:
            pytest.fail(answer["failed"], pytrace=False)
        if raised := answer.get("raised"):
            says = f": {raised['message']}" if raised["message"] else ""
            where = f" ({raised['where']})" if raised["where"] else ""
            trace = f"\n{raised['trace']}" if is_public(request.node) else ""
            pytest.fail(f"{raised['kind']}{says}{where}{trace}", pytrace=False)
        for changed in answer["changed"]:
            if changed not in may_change:
                pytest.fail(f"{changed} was changed in place; leave it as it is given", pytrace=False)
        return answer["value"]
    return run


def problem_of(node) -> tuple[str, str]:
    return node.get_closest_marker("problem").args[0], node.path.parent.name


def is_public(node) -> bool:
    return node.path.stem == "public"


def pytest_collection_modifyitems(config, items):
    """Those that are asked for, problem by problem, as the table has them, the public tests first."""
    only = config.option.only
    asked = [{problem_of(node)[1], ".".join(problem_of(node)[::-1])} for node in items]
    items[:] = [node for node, names in zip(items, asked) if not only or {*only} & names]
    place = {(assignment, problem.name): i for i, (assignment, problem) in enumerate(
        (name, problem) for name, each in ASSIGNMENTS.items() for problem in each.problems)}
    items.sort(key=lambda node: (place[problem_of(node)[::-1]], not is_public(node)))


def plain(text: str) -> str:
    """Without what would move a terminal's cursor, or cannot be printed."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" or report.failed:
        name, assignment = problem_of(item)
        says = " ".join((item.obj.__doc__ or item.name).split())
        says += f" [{item.callspec.id}]" if hasattr(item, "callspec") else ""
        why = "" if report.passed else plain(str(report.longrepr).strip()[:5000])
        RESULTS.append(dict(problem=f"{assignment}.{name}", says=says, passed=report.passed, why=why,
                            public=is_public(item)))


def pytest_sessionfinish(session):
    if file := session.config.option.results:
        try:
            file.write_text(json.dumps(gradescope(RESULTS), indent=1))
        except OSError as error:
            pytest.exit(str(error), os.EX_IOERR)


def gradescope(results: list[dict]) -> dict:
    """Gradescope's results.json: a problem's points are shared out evenly over its tests."""
    points = {f"{name}.{problem.name}": problem.points
              for name, each in ASSIGNMENTS.items() for problem in each.problems}
    tests = []
    for each in results:
        worth = points[each["problem"]] / sum(other["problem"] == each["problem"] for other in results)
        tests.append(dict(name=f"{each['problem']}: {each['says']}",
                          score=worth * each["passed"], max_score=worth,
                          status="passed" if each["passed"] else "failed", output=each["why"],
                          visibility=SEEN[0 if each["public"] else 1],
                          extra_data=dict(problem=each["problem"], public=each["public"])))
    return dict(tests=tests)
