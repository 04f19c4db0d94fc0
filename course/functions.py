"""Find functions in a source file by name ("Chunks.cut"), empty them for students, swap them for grading."""
import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

parsed = cache(ast.parse)  # the grader asks for every function of a file


def find(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    node = tree
    for part in name.split("."):
        node = next((x for x in getattr(node, "body", []) if getattr(x, "name", None) == part), None)
    return node if isinstance(node, ast.FunctionDef) else None


def place(source: str, name: str) -> slice:
    """Return a function's lines, decorators included, in source.split("\n"). ValueError if it is missing."""
    node = find(parsed(source), name)
    if node is None:
        raise ValueError(f"the file has no function {name}; write it under this name")
    return slice(min([node.lineno, *(x.lineno for x in node.decorator_list)]) - 1, node.end_lineno)


def needed(root: Path, files: Iterable[str], leaves: Iterable[str] = ()) -> set[str]:
    """Return these files below `root` and all files below it that they import, directly or indirectly.

    The imports of `leaves` do not count.
    """
    all_files, left = set(), [*files]
    while left:
        file = left.pop()
        if file not in all_files and (root / file).is_file():
            all_files.add(file)
            left += [] if file in leaves else imported((root / file).read_text())
    return all_files


@cache
def imported(source: str) -> list[str]:
    """Return the files that the imports of the source may name.

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

    So only the function `mine` is graded. ValueError if the file is not valid Python, or lacks one of
    them.
    """
    try:
        parsed(theirs)
    except SyntaxError as error:
        raise ValueError(f"the file is not valid Python: {error.msg} (line {error.lineno})") from error
    places = {name: place(theirs, name) for name in (mine, *others)}
    lines, our_lines = theirs.split("\n"), ours.split("\n")
    for name in sorted(others, key=lambda name: -places[name].start):
        lines[places[name]] = our_lines[place(ours, name)]
    return "\n".join(lines)
