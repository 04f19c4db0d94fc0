"""Wrong solutions planted into the functions of this process, and the course's tests on them."""
from contextlib import contextmanager
from importlib import import_module
import inspect
from pathlib import Path

import pytest

from course.assignments import ASSIGNMENTS
from course.source import place
from course.wire import packed, unpacked

ROOT = Path(__file__).parents[2]


def lines_of(problem) -> str:
    source = (ROOT / problem.file).read_text()
    return "\n".join(source.splitlines()[slice(*place(source, problem.function))])


@contextmanager
def planted(problem, old: str, new: str):
    """The function's code is another while this lasts, wherever it was imported."""
    source, body = (ROOT / problem.file).read_text(), lines_of(problem)
    assert body.count(old) >= 1, f"{problem.name}: {old!r} is not in {problem.function}"
    changed = source.replace(body, body.replace(old, new))
    module = import_module(problem.file.removesuffix(".py").replace("/", "."))
    function = module
    for part in problem.function.split("."):
        function = inspect.getattr_static(function, part)
    function = inspect.unwrap(getattr(function, "fget", None) or getattr(function, "__func__", function))
    code = compile(changed, str(ROOT / problem.file), "exec")
    for part in problem.function.split("."):
        code = next(x for x in code.co_consts if getattr(x, "co_name", None) == part)
    right, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = right


def direct(assignment: str):
    """The fixture `run` without a process of its own, with all that it checks."""
    adapter = import_module(f"course.{assignment}.adapter")

    def run(call: str, may_change: tuple[str, ...] = (), **args):
        sent, before = packed(args), unpacked(packed(args))
        args = unpacked(sent)
        try:
            value = getattr(adapter, call)(**args)
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}", pytrace=False)
        if any(packed(args[name]) != packed(before[name]) for name in args if name not in may_change):
            pytest.fail("changed in place", pytrace=False)
        return unpacked(packed(value))
    return run


def cases(assignment: str, file: str) -> dict[str, list]:
    """The tests of each problem, a call each, by problem."""
    found = {problem.name: [] for problem in ASSIGNMENTS[assignment].problems}
    for test in vars(import_module(f"course.{assignment}.{file}")).values():
        marks = getattr(test, "pytestmark", [])
        if not any(mark.name == "problem" for mark in marks):
            continue
        each = [{}]
        for mark in marks:
            if mark.name == "parametrize":
                names = mark.args[0].replace(" ", "").split(",")
                values = [x if len(names) > 1 else (x,) for x in mark.args[1]]
                each = [one | dict(zip(names, value)) for one in each for value in values]
        name = next(mark.args[0] for mark in marks if mark.name == "problem")
        found[name] += [(test, one) for one in each]
    return found


def caught(tests: list, run) -> bool:
    for test, arguments in tests:
        try:
            test(run, **arguments)
        except (pytest.fail.Exception, AssertionError):
            return True
    return False
