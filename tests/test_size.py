"""How much code there is, how dense it is, and how many names a method overrides.

A token is what Python's tokenizer returns, without comments, docstrings, line ends and indents; an
f-string is one. A code line is one on which a token begins that is more than a closing bracket or a
comma.
"""

import ast
import io
from pathlib import Path
from tokenize import (
    COMMENT,
    DEDENT,
    ENDMARKER,
    INDENT,
    NEWLINE,
    NL,
    generate_tokens,
    tok_name,
)

import pytest

from lab.methods_by_name import known_names
from nanollm.cache import Method, Scored

ROOT = Path(__file__).parents[1]
# tokens a code line, the mean of a file; the first pattern that fits decides
AIR = {
    "nano.py": 10,
    "nanollm/**/*.py": 10,
    "methods/*.py": 10,
    "methods/**/*.py": 11,
    "kernels/**/*.py": 11,
    "lab/**/*.py": 11,
    "tests/**/*.py": 12,
}
TOKENS = {  # folders, together
    ("nanollm",): 24_000,
    ("nanollm", "methods", "kernels", "lab"): 100_000,
    ("course",): 50_000,
    ("tests",): 118_000,
}
LAYOUT = {COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER}
CLOSING = {")", "]", "}", ","}


def docstring_lines(source) -> set[int]:
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines |= {*range(node.lineno, node.end_lineno + 1)}
    return lines


def size(file) -> tuple[int, int]:
    """Return the number of tokens and of code lines."""
    source = file.read_text()
    skipped = docstring_lines(source)
    tokens = 0
    lines = set()
    inside = 0  # f-strings, which are one token, whatever the version of Python
    for token in generate_tokens(io.StringIO(source).readline):
        row = token.start[0]
        kind = tok_name[token.type]
        if token.type not in LAYOUT and row not in skipped and not inside:
            tokens += 1
            if token.string not in CLOSING:
                lines.add(row)
        inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return tokens, len(lines)


def test_no_file_is_dense():
    dense = {}
    known = set()
    for pattern, most in AIR.items():
        for file in ROOT.glob(pattern):
            tokens, lines = size(file)
            if file not in known and tokens > most * lines:
                dense[str(file.relative_to(ROOT))] = round(tokens / lines, 1), most
            known.add(file)
    assert not dense


@pytest.mark.parametrize("folders, most", TOKENS.items(), ids=map(" ".join, TOKENS))
def test_no_part_is_large(folders, most):
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")]
    assert sum(size(file)[0] for file in files) <= most


@pytest.mark.parametrize("folder", ["nanollm", "methods"])
def test_there_is_no_walrus(folder):
    for file in ROOT.glob(f"{folder}/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.NamedExpr), (file.name, node.lineno)


NAMES = {"watch", "entry", "store", "observe", "compress", "evict"}


def overridden(kind) -> set[str]:
    """Return which names of the interface a method gives; `score` stands for two."""
    own = set()
    for base in kind.__mro__:
        if base in (Scored, Method):
            break
        own |= vars(base).keys()
    return own & NAMES | ({"compress", "evict"} if "score" in own else set())


def test_a_method_overrides_at_most_five_names():
    variants, *_ = known_names()
    kinds = {variant.kind for variant in variants.values()}
    many = {kind.__name__: overridden(kind) for kind in kinds}
    assert len(many) >= 15
    assert not {name: x for name, x in many.items() if len(x) > 5}
