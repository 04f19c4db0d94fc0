"""Find functions in a source file by name ("Chunks.cut"), empty them for students, swap them for grading."""
import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path
import re


@cache  # the grader calls this for every function of a file
def parsed(source: str) -> ast.Module | None:
    """Return the syntax tree, or None if the source is not valid Python."""
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
    """Return the lines of a function as a slice of source.split("\n"), decorators included; None if missing.

    If the file is not valid Python, the function is the block indented below its `def`.
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
    """Return these files below `root` and all files below it that they import, directly or indirectly."""
    all_files, left = set(), [*files]
    while left:
        file = left.pop()
        if file not in all_files and (root / file).is_file():
            all_files.add(file)
            left += imported((root / file).read_text())
    return all_files


@cache
def imported(source: str) -> list[str]:
    """Return the files that its imports may name.

    `from a.b import c` may name a/__init__.py, a/b.py and a/b/c.py.
    """
    modules = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
    return [file for module in modules for file in (f"{module.partition('.')[0]}/__init__.py",
                                                    f"{module.replace('.', '/')}.py")]


def emptied(source: str, names: list[str]) -> str:
    """Return the source with the bodies of these functions removed; signature and docstring stay."""
    lines, tree = source.split("\n"), parsed(source)
    for node in sorted((find(tree, name) for name in names), key=lambda node: -node.lineno):
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            start = first.end_lineno
        else:  # also remove comments above the first statement: they may give the answer
            start = first.lineno - 1
            while lines[start - 1].lstrip().startswith("#"):
                start -= 1
        lines[start:node.end_lineno] = [" " * first.col_offset + "raise NotImplementedError"]
    return "\n".join(lines)


def spliced(ours: str, theirs: str, mine: str, others: list[str]) -> str:
    """Return the submitted file, helpers included, with our version of the `others`.

    So only the function `mine` is graded, and no mistake costs twice. If their file is not valid Python, or
    lacks one of the others, return our file with their function. Raise ValueError if it lacks `mine`.
    """
    if place(theirs, mine) is None:
        raise ValueError(f"the file has no function {mine}; write it under this name")
    into, put, taken = ours, theirs, [mine]
    if parsed(theirs) and all(place(theirs, name) for name in others):
        into, put, taken = theirs, ours, others
    lines, source = into.split("\n"), put.split("\n")
    for name in sorted(taken, key=lambda name: -place(into, name)[0]):
        lines[slice(*place(into, name))] = source[slice(*place(put, name))]
    return "\n".join(lines)
