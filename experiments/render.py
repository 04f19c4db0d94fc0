"""Write RESULTS.md from the stored rows, or run the commands that measure them.

    python -m experiments.render             # write RESULTS.md from the stored rows
    python -m experiments.render all speed   # run these sections' commands first, and store their rows
    python -m experiments.render --check     # fail if RESULTS.md differs from the stored rows
"""
from datetime import date
from importlib import import_module
from importlib.metadata import version
import json
from math import log
import os
from pathlib import Path
import platform
import re
import shlex
from statistics import fmean
import subprocess
import sys
import tempfile
import time

from nanollm import SHIPPED
from nanollm.commands import table
from nanollm.commands.text_table import text_table
from nanollm.measure.benchmark import paired

ROOT = Path(__file__).parents[1]
HERE = ROOT / "experiments" / "stored"
TARGET = ROOT / "RESULTS.md"

# sections.md has the words before the tables; SECTIONS: title, command and words by name
HEAD, *PARTS, FOOT = (ROOT / "experiments" / "sections.md").read_text().strip().split("\n\n## ")
SECTION = re.compile(r"(\w+) · (.+)\n`(.+)`\n\n((?s:.+))")
SECTIONS = {name: words for name, *words in (SECTION.fullmatch(part).groups() for part in PARTS)}
FIGURES = {"all": "notebooks/compare.png", "growth": "notebooks/growth.png",
           "harder": "notebooks/harder.png"}  # what --figure writes
COMPARED = "short", "all", "learned", "additions"  # sections of python -m nanollm; their rows are shortened


# ---- stored rows ---

def rows(name: str) -> list[dict]:
    """Return the stored rows of a section."""
    return json.loads((HERE / f"{name}.json").read_text())["rows"]


def by_method(name: str) -> dict[tuple[str, float | None], dict]:
    """Return the rows of a section of `python -m nanollm`, by method and keep ratio."""
    return {(row["method"], row["keep_ratio"]): row for row in rows(name)}


def shortened(rows: list[dict]) -> list[dict]:
    """Return rows of `python -m nanollm` without the numbers of each document, which take megabytes.

    The row of an addition gets `changes` against the row without it: [mean, standard error].
    """
    for base in rows:
        for row in table.on_top(base, rows):
            row["changes"] = {name: paired(row, base, keys) for name, keys in table.MEASURES.items()}
    dropped = "each", "l1", "model"  # model is a path
    return [{key: x for key, x in row.items() if key not in dropped} for row in rows]


def run(name: str, scratch: Path):
    """Run a section's command and store its rows, with command, date and machine.

    CalledProcessError, and nothing is stored, if the command fails.
    """
    _, command, _ = SECTIONS[name]
    file, words = scratch / "rows.json", shlex.split(command)[1:]
    if name in (*FIGURES, *COMPARED):
        words += ["--figure", FIGURES.get(name, str(scratch / "figure.png"))]
    began = time.time()
    subprocess.run([sys.executable, *words, "--json", str(file)], cwd=ROOT, check=True)
    machine = f"{hardware()}, {(time.time() - began) / 60:.1f} minutes"
    measured = json.loads(file.read_text())
    write(name, command, machine, str(date.today()), shortened(measured) if name in COMPARED else measured)


def write(name: str, command: str, machine: str, date: str, rows: list[dict]):
    """Store rows as JSON, one per line."""
    head = json.dumps(dict(command=command, machine=machine, date=date), indent=1, ensure_ascii=False)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (HERE / f"{name}.json").write_text(f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n')


def hardware() -> str:
    """Return a line on this machine."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(": ")[1] for line in info.splitlines() if line.startswith("model name")]
    return (f"{os.cpu_count()} cores of an {names[0] if names else platform.processor()}, "
            f"{platform.system()}, Python {platform.python_version()}, torch {version('torch')}")


# ---- RESULTS.md ---

def compared(rows: list[dict], short: bool = False) -> str:
    """Return the tables that `python -m nanollm` prints for these rows, without the glossary."""
    first = rows[0]
    lines = [table.header(first["tokens"], first["documents"], first["seed"], short),
             *(table.show(row, short) for row in rows)]
    below = table.findings(rows) if short else f"{table.ADDITIONS_TERMS}\n\n{additions(rows)}"
    return "\n".join([*lines, "", below])


def additions(rows: list[dict]) -> str:
    """Return a table of each method's means and, below them, the changes by its additions."""
    cells = [["method", "keep", *table.MEASURES]]
    for base in rows:
        if more := table.on_top(base, rows):
            l1 = fmean(x for layer in base["l1_alone"] for x in layer)
            means = base["aware"], base["agnostic"], log(base["perplexity"]), base["kl"], l1
            cells += [[""] * 7, [base["method"], table.budget(base), *(f"{x:.3f}" for x in means)]]
        for row in more:
            changes = (f"{mean:+.3f} ±{error:.3f}" for mean, error in row["changes"].values())
            cells.append([row["method"], table.budget(row), *changes])
    return text_table(cells)


def text(name: str) -> str:
    """Return a section's rows as text, made by `show` of the module that its command runs."""
    if name in COMPARED:
        return additions(rows(name)) if name == "additions" else compared(rows(name), name == "short")
    module = "experiments.claims.claims_renderer" if name == "claims" else SECTIONS[name][1].split()[2]
    return import_module(module).show(rows(name))


def section(name: str) -> str:
    """Return a section of RESULTS.md. SystemExit if its rows come from another command."""
    title, command, words = SECTIONS[name]
    stored = json.loads((HERE / f"{name}.json").read_text())
    if stored["command"] != command:
        raise SystemExit(f"error: stored/{name}.json is of `{stored['command']}`, not of `{command}`; "
                         f"run python -m experiments.render {name}")
    source = f"`{command}` ({stored['date']}, {stored['machine']})"
    return f"## {title}\n\n{words}\n\n{source}:\n\n```\n{text(name).strip(chr(10))}\n```"


def training(runs: dict[str, dict]) -> str:
    """Return a table with a column for each run, from the reports that `python -m nanollm train` writes."""
    names, runs = list(runs), list(runs.values())
    percent = lambda x: f"{100 * x['value']:.1f} ± {100 * x['standard_error']:.1f} %"
    cells = [["", *names], ["---"] * (1 + len(runs)), ["command", *(f"`{run['command']}`" for run in runs)],
             ["hardware", *(run["hardware"] for run in runs)],
             ["minutes", *(f"{run['minutes']:.0f}" for run in runs)],
             ["training tokens", *(f"{run['training_tokens'] / 1e6:.1f} M" for run in runs)],
             ["parameters", *(f"{run['parameters'] / 1e6:.2f} M" for run in runs)],
             ["documents a task", *(str(run["documents_per_figure"]) for run in runs)]]
    for name in dict.fromkeys(name for run in runs for name in run["exact_match"]):
        found = [run["exact_match"].get(name) for run in runs]
        cells.append([name.replace("_", " "), *(percent(x) if x else "–" for x in found)])
    cells.append(["copy 512, by token", *(f"{100 * run['copy_512_by_token']:.1f} %" for run in runs)])
    cells += [[f"bits per byte of held-out text, {name}",
               *(f"{run['bits_per_byte'][name]:.2f}" for run in runs)] for name in runs[0]["bits_per_byte"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def shipped() -> str:
    """Return the section on the shipped decoders, and on a larger one."""
    runs = {name: json.loads((folder / "train.json").read_text()) for name, folder in SHIPPED.items()}
    trial = json.loads((ROOT / "experiments" / "stored" / "trial.json").read_text())
    notes = [f"{name}: {run['note']}" for name, run in runs.items() if "note" in run]
    return "## " + FOOT.format(shipped="\n\n".join((training(runs), *notes)), trial=training(trial))


def rendered() -> str:
    """Return the text of RESULTS.md."""
    anchor = lambda title: "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")
    glossary = (f"Columns and terms in many tables:\n\n```\n{table.terms()}\n"
                "built     decoder whose initial weights contained retrieval heads (nanollm/tiny)\n"
                "learned   decoder of the same shape that learned its own (nanollm/tiny_learned)\n```")
    contents = "\n".join(f"- [{title}](#{anchor(title)}): `{name}`"
                         for name, (title, _, _) in SECTIONS.items())
    return "\n\n".join((HEAD, contents, glossary, *map(section, SECTIONS), shipped())) + "\n"


def main(argv: list[str]):
    if argv == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != rendered():
            raise SystemExit("error: RESULTS.md differs from the stored rows; run experiments.render")
        return
    if unknown := [name for name in argv if name not in SECTIONS]:
        raise SystemExit(f"error: unknown section {unknown[0]!r}; known are {', '.join(SECTIONS)}")
    failed = []
    for name in argv:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                run(name, Path(scratch))
            except subprocess.CalledProcessError:
                failed.append(name)
    TARGET.write_text(rendered())
    if failed:
        raise SystemExit(f"error: {', '.join(failed)} failed; the old rows stay in RESULTS.md")


if __name__ == "__main__":
    main(sys.argv[1:])
