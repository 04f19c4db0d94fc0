"""Plant wrong solutions into the functions of this process, and run the course's tests on them.

A mistake names a piece of the function's code and what replaces it. The function is first written
anew by ast.unparse, and the piece is then looked up word by word. So the function's spaces, line
breaks, comments and superfluous parentheses do not matter.
"""

import ast
from contextlib import contextmanager
from importlib import import_module
import inspect
from pathlib import Path
import pickle
import re

from course import grader, submission
from course.functions import emptied, find, place

ROOT = Path(__file__).parents[2]
WORD = re.compile(r"\w+|[^\w\s]")


def replaced(text: str, old: str, new: str) -> str:
    """Replace `old` in `text`, word by word, so that spaces and line breaks may differ."""
    here = [*WORD.finditer(text)]
    all_words = [word[0] for word in here]
    for piece in (old.replace('"', "'"), rewritten(old)):
        words = WORD.findall(piece)
        n = len(words)
        starts = [i for i in range(len(here)) if all_words[i : i + n] == words]
        if starts:
            for i in reversed(starts):
                text = text[: here[i].start()] + new + text[here[i + n - 1].end() :]
            return text
    raise ValueError(f"{old!r} is not in\n{text}")


def rewritten(piece: str) -> str:
    """Return a piece of code as ast.unparse writes it, if it is an expression or a statement.

    Example: `D**-0.5` becomes `D ** (-0.5)`.
    """
    try:
        return ast.unparse(ast.parse(piece))
    except SyntaxError:
        return piece


def with_mistake(problem, old: str, new: str) -> str:
    """Return the source of the problem's file, with a piece of its function's code replaced."""
    tree = ast.parse((ROOT / problem.file).read_text())
    function = find(tree, problem.function)
    if ast.get_docstring(function) is not None:
        del function.body[0]
    lines = ast.unparse(tree).split("\n")
    here = place("\n".join(lines), problem.function)
    lines[here] = replaced("\n".join(lines[here]), old, new).split("\n")
    return "\n".join(lines)


def without_solution(problem) -> str:
    """Return the source of the problem's file, with its function as students get it."""
    right = (ROOT / problem.file).read_text()
    lines = emptied(right, [problem.function]).split("\n")
    end = place("\n".join(lines), problem.function).stop
    if any(
        "super()" in line for line in right.split("\n")[place(right, problem.function)]
    ):
        lines.insert(
            end, "        super()"
        )  # never run; keeps the code's free variable
    return "\n".join(lines)


@contextmanager
def planted(problem, source: str):
    """Let the function have the code that it has in `source`, wherever it was imported."""
    function = import_module(problem.file.removesuffix(".py").replace("/", "."))
    for part in problem.function.split("."):
        function = inspect.getattr_static(function, part)
    function = inspect.unwrap(function)
    code = compile(source, str(ROOT / problem.file), "exec")
    for part in problem.function.split("."):
        code = next(x for x in code.co_consts if getattr(x, "co_name", None) == part)
    right, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = right


def direct(assignment: str):
    """Return the tests' `run` without a separate process."""
    adapter = f"course.{assignment}.adapter"
    return grader.runner(
        lambda call, args: pickle.loads(submission.answer(adapter, call, args)),
        trace=False,
    )


def packed_faster(monkeypatch):
    """Let calls go through pickle, which is faster than torch.save. No data come from outside."""
    monkeypatch.setattr(grader, "packed", pickle.dumps)
    monkeypatch.setattr(submission, "packed", pickle.dumps)
    monkeypatch.setattr(submission, "unpacked", pickle.loads)
