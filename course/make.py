"""Make a student's copy of the repository, in which the functions of its assignments are empty."""
from pathlib import Path
import shutil

from course.assignments import ASSIGNMENTS, Assignment
from course.functions import emptied, needed

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "LICENSE", "requirements.txt", "nanollm/held_out", "nanollm/tiny"
COMMAND_LIST = "nanollm/__main__.py"  # imports every command; a copy has compare, and its import ask
COMMANDS = (COMMAND_LIST, "lab/compare.py", "methods/baselines/snap_kv.py", "course/__main__.py",
            "course/grader.py")


def make(folder: Path, assignments: list[str]):
    """Write the copy to `folder`, which must not exist or must be empty.

    The copy holds the emptied functions, the imports of handouts and public tests, and the methods that the
    written questions compare. It leaves out kernels, other tests, other notebooks and results.
    """
    import nbformat  # here, because it and jupytext take seconds to import
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; name a new folder")

    roots = [*COMMANDS]
    for name in assignments:
        roots += [*ASSIGNMENTS[name].beside, *(problem.file for problem in ASSIGNMENTS[name].problems),
                  *(f"course/{name}/{file}.py" for file in ("adapter", "public", "handout"))]
    files = {ROOT / file for file in needed(ROOT, roots, leaves=[COMMAND_LIST])
             if Path(file).name not in ("make.py", "handout.py")}
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
    """Return the notebook of an assignment, not yet run."""
    import jupytext
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
    first = next(iter(chosen))
    example = f"{first}, --only {chosen[first].problems[-1].name}"
    return f"""# KV-cache compression: assignments

A language model keeps a key and a value of every token it reads, in a cache. You write functions of smaller
caches, and measure how well they work.

| handout | title | time | points by tests | files to hand in |
|---|---|---|---|---|
{rows}

Python 3.11 or newer, Linux or macOS, no GPU. In this folder:

```
pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu    # Linux only: saves gigabytes
pip install -r requirements.txt
jupyter lab                          # open the first handout and read it
python -m course check       # run all public tests; one assignment or problem: --only {example}
```

1. Read a problem in the handout. It names a function and its file.
2. In that file, replace `raise NotImplementedError` by your code. Keep the signature. Put helpers and imports
   into the same file.
3. Run the problem's `check` cell. Until you have written the function, its tests say so.

The check and the experiments run your own files, so do assignments in order: later ones call functions of
earlier ones. The grader runs each problem's function with our solutions of the others. So a wrong function
costs only its own problem.
"""


