"""Annotated source: the words of a Python file beside the code that they describe.

    python docs/annotate.py nano.py    # prints the page as Markdown

A row of the page has words on the left and code on the right. A new row begins at a class, at a
function that is in no other, behind one, and at a comment that has lines of its own. Comments
behind code stay there.
"""

import ast
from html import escape
import io
from pathlib import Path
import re
import sys
import tokenize

FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef
FENCE = "{.python data-search-exclude=1}"  # search finds names and words
RULE = re.compile(r"-{3,} (.*?) -{3,}")  # "---- the methods ----" is a heading


def definitions(node, prefix=""):
    """Yield (name, node) for each class, function and method; not for those in functions."""
    for child in node.body:
        if isinstance(child, (ast.ClassDef, *FUNCTION)):
            yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from definitions(child, f"{prefix}{child.name}.")


def docstring_lines(node, lines: list[str]) -> range:
    """Return the numbers of a docstring's lines and of the empty lines below it."""
    if ast.get_docstring(node) is None:
        return range(0)
    first = node.body[0]
    end = first.end_lineno + 1
    while end <= len(lines) and not lines[end - 1].strip():
        end += 1
    return range(first.lineno, end)


def comments(source: str) -> list[tuple[int, list[str]]]:
    """Return the comments that have lines of their own: first line, and the lines' texts."""
    blocks = []
    end = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip() == token.string:
            number = token.start[0]
            if number != end:
                blocks.append((number, []))
            blocks[-1][1].append(token.string.removeprefix("#").removeprefix(" "))
            end = number + 1
    return blocks


def markdown(lines: list[str]) -> str:
    """Return words as Markdown: RULE makes headings, and HTML and underscores do not act."""
    result = []
    for line in lines:
        if not line.startswith("    "):
            line = RULE.sub(r"## \1\n", line)
            parts = line.split("`")
            for i in range(0, len(parts), 2):
                parts[i] = escape(parts[i], quote=False).replace("_", r"\_")
            line = "`".join(parts)
        result.append(line)
    return "\n".join(result)


def rows(source: str) -> list[dict]:
    """Return the rows: name of what is defined, words (Markdown), code. The first is the file's.

    above: words that stand before the name.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    starts = {}  # number of a row's first line → the row
    gone = set()  # numbers of the lines that are words

    def docstring(node):
        gone.update(docstring_lines(node, lines))
        text = ast.get_docstring(node) or ""
        return [markdown(text.splitlines())]

    starts[1] = {"name": "", "words": docstring(tree)}
    for name, node in definitions(tree):
        first = min([node.lineno] + [x.lineno for x in node.decorator_list])
        starts[first] = {"name": name, "words": docstring(node)}
    for number, block in comments(source):
        gone.update(range(number, number + len(block)))
        row = starts.setdefault(number, {"name": "", "words": []})
        row["words"].append(markdown(block))
    for _, node in definitions(tree):
        starts.setdefault(node.end_lineno + 1, {"name": "", "words": []})

    result = []
    order = sorted(starts)
    for first, end in zip(order, [*order[1:], len(lines) + 1]):
        row = starts[first]
        code = "\n".join(lines[i - 1] for i in range(first, end) if i not in gone)
        row["code"] = re.sub(r"\A(\s*\n)+", "", code).rstrip()
        # words without code belong to what comes next, but for the file's own
        if len(result) > 1 and not result[-1]["code"]:
            row["above"] = result.pop()["words"]
        if row["words"] or row["code"]:
            result.append(row)
    return result


def page(path: str, source: str) -> str:
    """Return the page of a file as Markdown, for md_in_html and superfences."""
    parts = ["---\nhide: [toc]\n---", f"# {path}", '<div class="source" markdown>']
    for row in rows(source):
        kind = "row definition" if row["name"] else "row"
        parts.append(f'<div class="{kind}" markdown>\n<div class="words" markdown>')
        parts += row.get("above", [])
        if row["name"]:
            parts.append(f"### `{row['name']}`")
        parts += [*row["words"], "</div>"]
        if row["code"]:
            parts.append(f"````{FENCE}\n{row['code']}\n````")
        parts.append("</div>")
    return "\n\n".join([*parts, "</div>"]) + "\n"


if __name__ == "__main__":
    print(page(sys.argv[1], Path(sys.argv[1]).read_text()))
