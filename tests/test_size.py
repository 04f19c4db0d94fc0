"""How much code there is, and how dense: no layout pays, and a line may not be a riddle.

A token is what Python's tokenizer returns, without comments, docstrings, line ends and indents. A
code line is one on which a token begins that is more than a closing bracket.
"""

import ast
import io
from pathlib import Path
import tokenize

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
    ("tests",): 125_000,
}
LAYOUT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "ENDMARKER")}
LAYOUT |= {tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
CLOSING = {")", "]", "}", ","}
# an f-string is one token, whatever the version of Python
START, END = (getattr(tokenize, f"FSTRING_{x}", None) for x in ("START", "END"))


def files_of(pattern) -> list[Path]:
    return sorted(ROOT.glob(pattern))


def docstring_lines(source) -> set[int]:
    lines = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines |= {*range(value.lineno, value.end_lineno + 1)}
    return lines


def size(file) -> tuple[int, int]:
    """Return the number of tokens and of code lines."""
    source = file.read_text()
    skipped = docstring_lines(source)
    tokens = 0
    lines = set()
    inside = 0  # f-strings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row = token.start[0]
        if token.type not in LAYOUT and row not in skipped and not inside:
            tokens += 1
            if token.string not in CLOSING:
                lines.add(row)
        if START is not None:
            inside += (token.type == START) - (token.type == END)
    return tokens, len(lines)


def test_no_file_is_dense():
    dense = {}
    known = set()
    for pattern, most in AIR.items():
        for file in files_of(pattern):
            tokens, lines = size(file)
            if file not in known and tokens > most * lines:
                dense[str(file.relative_to(ROOT))] = round(tokens / lines, 1), most
            known.add(file)
    assert not dense


@pytest.mark.parametrize("folders, most", TOKENS.items(), ids=map(" ".join, TOKENS))
def test_no_part_is_large(folders, most):
    files = [file for folder in folders for file in files_of(f"{folder}/**/*.py")]
    assert sum(size(file)[0] for file in files) <= most


def test_lines_have_at_most_100_columns():
    wide = []
    for pattern in AIR:
        for file in files_of(pattern):
            for i, line in enumerate(file.read_text().splitlines(), 1):
                if len(line) > 100:
                    wide.append(f"{file.relative_to(ROOT)}:{i}")
    assert not wide


@pytest.mark.parametrize("folder", ["nanollm", "methods"])
def test_there_is_no_walrus(folder):
    found = []
    for file in files_of(f"{folder}/**/*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        if any(isinstance(node, ast.NamedExpr) for node in nodes):
            found.append(file.name)
    assert not found


NAMES = {"watch", "entry", "store", "observe", "compress", "evict"}


def overridden(kind) -> set[str]:
    """Return which names of the interface a method gives; `score` stands for the last two."""
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
    assert len(many) > 20
    assert not {name: x for name, x in many.items() if len(x) > 5}
