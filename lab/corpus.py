"""Real text, split into a training side and a held-out side. Nothing is downloaded.

The text is Python's language reference (`pydoc_data.topics`), the standard library's source and
NumPy's docstrings, 11 to 12 MB. A paragraph ends at a blank line that an unindented line follows,
so that most functions and classes stay whole. A hash of a paragraph decides whether it is held out.

Training uses the text of the installed Python and NumPy. The held-out side is stored in
`nanollm/held_out/text.json`, so that it does not depend on their versions.
`python -m lab.corpus` wrote it.
"""

from collections import Counter
from functools import cache
from importlib.metadata import version
import importlib.util
import json
import os
from pathlib import Path
import platform
import re
import sysconfig
import zlib

HELD_OUT = Path(__file__).parents[1] / "nanollm/held_out/text.json"
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "__pycache__",
}


def held_out(text: str, one_in: int = 20) -> bool:
    """Return whether this piece of text is held out for evaluation."""
    return zlib.crc32(text.encode()) % one_in == 0


@cache
def documents() -> list[str]:
    """Return all text in a fixed order. A document is a topic, a source file or a NumPy module."""
    from pydoc_data import topics

    docs = [topics.topics[name] for name in sorted(topics.topics)]
    library = Path(sysconfig.get_paths()["stdlib"])
    docs += [file.read_text("utf8", "ignore") for file in sorted(sources(library))]
    package = Path(importlib.util.find_spec("numpy").origin).parent
    for file in sorted(package.rglob("*.py")):
        source = file.read_text("utf8", "ignore")
        docs.append("\n\n".join(re.findall(r'"""(.+?)"""', source, re.S)))
    return [doc for doc in docs if doc.strip()]


def sources(folder: Path) -> list[Path]:
    """Return the Python files below a folder, without those in folders of LEFT_OUT."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = {*folders} - LEFT_OUT
        files += [Path(parent, name) for name in names if name.endswith(".py")]
    return files


@cache
def text(split: str) -> list[str]:
    """Return the documents of a split, "train" or "test": only the paragraphs on that side."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is unknown; use 'train' or 'test'")
    return kept()["documents"] if split == "test" else one_side(documents(), test=False)


@cache
def words(split: str) -> list[str]:
    """Return a split's words of 4 to 9 letters that occur five times or more, sorted."""
    return kept()["words"] if split == "test" else words_of(documents(), test=False)


def one_side(docs: list[str], test: bool) -> list[str]:
    """Return each document's held-out paragraphs if `test`, else its other paragraphs."""
    sides = []
    for doc in docs:
        paragraphs = re.split(r"\n\s*\n(?=\S)", doc)
        side = [x for x in paragraphs if held_out(x) == test]
        if side:
            sides.append("\n\n".join(side) + "\n")
    return sides


def words_of(docs: list[str], test: bool) -> list[str]:
    counts = Counter(re.findall(r"(?<= )[a-z]{4,9}(?=[ ,.])", "\n".join(docs)))
    common = [word for word, n in counts.items() if n >= 5]
    return sorted(word for word in common if held_out(word, 5) == test)


@cache
def kept() -> dict:
    """Return the stored held-out text and words."""
    return json.loads(HELD_OUT.read_text(encoding="utf8"))


if __name__ == "__main__":  # store those of the installed Python
    side = {
        "from": f"Python {platform.python_version()}, NumPy {version('numpy')}; see LICENSE.txt",
        "documents": one_side(documents(), test=True),
        "words": words_of(documents(), test=True),
    }
    stored = json.dumps(side, ensure_ascii=False, indent=0)
    HELD_OUT.write_text(f"{stored}\n", encoding="utf8")
