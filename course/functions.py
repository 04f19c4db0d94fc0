"""Functions of a source file by name ("Chunks.cut"): emptied for a student, and put back for grading."""
import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path
import re


@cache  # a grader asks for every function of a file, one by one
def parsed(source: str) -> ast.Module | None:
    """None if it is no Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def find(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    node = tree
    for part in name.split("."):
        node = next((x for x in getattr(node, "body", []) if getattr(x, "name", None) == part), None)
    return node if isinstance(node, ast.FunctionDef) else None


def place(source: str, name: str) -> tuple[int, int] | None:
    """The lines of a function, decorators included, as a slice of source.split("\n"); None if there is none.

    A file that is no Python is read line by line: the function is then what is indented below its `def`.
    """
    if tree := parsed(source):
        node = find(tree, name)
        return node and (min([node.lineno, *(x.lineno for x in node.decorator_list)]) - 1, node.end_lineno)
    lines, (*within, last), start, indent = source.split("\n"), name.split("."), 0, 0
    for kind, word in [*(("class", each) for each in within), ("def", last)]:
        pattern = re.compile(rf" {{{indent}}}{kind} {word}\b")
        start = next((i for i in range(start, len(lines)) if pattern.match(lines[i])), None)
        if start is None:
            return None
        indent += 4
    inner = re.compile(rf" {{{indent}}}|\s*$| {{{indent - 4}}}\)")  # or a signature's end
    end = next((i for i in range(start + 1, len(lines)) if not inner.match(lines[i])), len(lines))
    while not lines[end - 1].strip():
        end -= 1
    return start, end


def needed(root: Path, files: Iterable[str]) -> set[str]:
    """These files below `root`, with all below it that they import, and what that imports."""
    found, left = set(), [*files]
    while left:
        file = left.pop()
        if file not in found and (root / file).is_file():
            found.add(file)
            left += imported((root / file).read_text())
    return found


@cache
def imported(source: str) -> list[str]:
    """The files that its imports may mean: `from a.b import c` is a/__init__.py, a/b.py, or a/b/c.py."""
    modules = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
    return [file for module in modules for file in (f"{module.partition('.')[0]}/__init__.py",
                                                    f"{module.replace('.', '/')}.py")]


def emptied(source: str, names: list[str]) -> str:
    """The same file, its functions of these names without a body: signature and docstring stay."""
    lines, tree = source.split("\n"), parsed(source)
    for node in sorted((find(tree, name) for name in names), key=lambda node: -node.lineno):
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            start = first.end_lineno
        else:  # comments above the first statement go as well
            start = first.lineno - 1
            while lines[start - 1].lstrip().startswith("#"):
                start -= 1
        lines[start:node.end_lineno] = [" " * first.col_offset + "raise NotImplementedError"]
    return "\n".join(lines)


def spliced(ours: str, theirs: str, mine: str, others: list[str]) -> str:
    """A submitted file in which one function is theirs to answer for, with whatever helpers it has there.

    All other functions that are asked for are ours, so that no mistake costs twice. Where their file is no
    Python, or has lost one of these, it is our file with their function. ValueError if that is not there.
    """
    if place(theirs, mine) is None:
        raise ValueError(f"there is no function {mine}")
    into, put, taken = ours, theirs, [mine]
    if parsed(theirs) and all(place(theirs, name) for name in others):
        into, put, taken = theirs, ours, others
    lines, source = into.split("\n"), put.split("\n")
    for name in sorted(taken, key=lambda name: -place(into, name)[0]):
        lines[slice(*place(into, name))] = source[slice(*place(put, name))]
    return "\n".join(lines)
