"""A student's copy of the repository: what is asked for is emptied, what would tell it is left out."""
from pathlib import Path
import shutil

import jupytext
import nbformat

from course.assignments import ASSIGNMENTS, COMPARE, Assignment
from course.functions import emptied, needed

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "LICENSE", "requirements.txt", "nanollm/held_out", "nanollm/tiny"
COMMANDS = ("nanollm/__main__.py", COMPARE, "methods/snap_kv.py",
            "course/command.py", "course/grader.py", "course/submission.py")


def make(folder: Path, assignments: list[str]):
    """Write the copy to `folder`, which must not be there or be empty.

    It has what is asked for, what the handouts and tests import, and what the written questions compare it
    with. Kernels, other tests, notebooks and results stay behind.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a new folder")

    roots = [*COMMANDS]
    for name in assignments:
        roots += [*ASSIGNMENTS[name].beside, *(problem.file for problem in ASSIGNMENTS[name].problems),
                  *(f"course/{name}/{file}.py" for file in ("adapter", "public", "handout"))]
    files = {ROOT / file for file in needed(ROOT, roots) if Path(file).name not in ("make.py", "handout.py")}
    for source in files.union(*([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).iterdir()
                                for name in WHOLE)):
        to = folder / source.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to)

    for name in assignments:
        problems = ASSIGNMENTS[name].problems
        for file in {problem.file for problem in problems}:
            functions = [problem.function for problem in problems if problem.file == file]
            (folder / file).write_text(emptied((folder / file).read_text(), functions))
        nbformat.write(handout(name), folder / f"{number(name)}_{name}.ipynb")
    (folder / "README.md").write_text(readme({name: ASSIGNMENTS[name] for name in assignments}))


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


