"""A student's copy of the repository: what is asked for is emptied, what would tell it is left out."""
from pathlib import Path
import shutil

import jupytext
import nbformat

from course.assignments import ASSIGNMENTS, Assignment
from course.source import emptied, needed

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "LICENSE", "requirements.txt", "nanollm/held_out", "nanollm/tiny"
COURSE = ("__init__.py", "assignments.py", "command.py", "expect.py", "lock.py", "plugin.py", "pytest.ini",
          "source.py", "wire.py", "worker.py")


def make(folder: Path, chosen: dict[str, Assignment]):
    """Write the copy to `folder`, which must not be there or be empty.

    Of methods/ it has what is asked for, what that imports, and what the written questions compare it with.
    Kernels, other tests, notebooks and results stay behind.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a new folder")

    asked = [problem.file for each in chosen.values() for problem in each.problems]
    beside = ["methods/snap_kv.py", *(file for each in chosen.values() for file in each.beside)]
    sources = [*(ROOT / "nanollm").rglob("*.py"), *(ROOT / file for file in needed(ROOT, asked + beside))]
    for source in sources:
        put(source, folder)
    for name in WHOLE:
        for source in [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).iterdir():
            put(source, folder)
    for name in COURSE:
        put(ROOT / "course" / name, folder)

    for name, each in chosen.items():
        for file in ("adapter.py", "public.py"):
            put(ROOT / "course" / name / file, folder)
        for file in dict.fromkeys(problem.file for problem in each.problems):
            functions = [problem.function for problem in each.problems if problem.file == file]
            (folder / file).write_text(emptied((folder / file).read_text(), functions))
        nbformat.write(handout(name), folder / f"{number(name)}_{name}.ipynb")
    (folder / "README.md").write_text(readme(chosen))


def put(source: Path, folder: Path):
    to = folder / source.relative_to(ROOT)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, to)


def number(name: str) -> int:
    return 1 + list(ASSIGNMENTS).index(name)


def handout(name: str):
    """The notebook of an assignment, not yet run."""
    book = jupytext.read(ROOT / "course" / name / "handout.py")
    book.metadata = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
    for i, cell in enumerate(book.cells):
        cell.id, cell.metadata = f"{name}-{i}", {}
    return book


def readme(chosen: dict[str, Assignment]) -> str:
    rows = "\n".join(f"| {number(name)}_{name}.ipynb | {each.title} | {each.hours} | "
                     f"{sum(problem.points for problem in each.problems)} | "
                     f"{', '.join(dict.fromkeys(problem.file for problem in each.problems))} |"
                     for name, each in chosen.items())
    return f"""# KV-cache compression: assignments

| handout | what | time | points | files to hand in |
|---|---|---|---|---|
{rows}

Python 3.11 or newer, Linux or macOS, no GPU. In this folder:

```
pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu    # on Linux: saves gigabytes
pip install -r requirements.txt
jupyter lab                          # open the first handout
python -m nanollm course check       # the public tests of all, or --only {next(iter(chosen))}
```

Write where `raise NotImplementedError` stands. Signatures stay as they are. Helpers and imports go into the
same file. When it is graded, each problem is tried with the rest being right: a mistake in one does not cost
another. The check here runs your own files, so a problem that calls an earlier one needs that first.
"""


