"""Write RESULTS.md from the stored rows, or run the commands that measure them.

    python -m lab.render_results             # write RESULTS.md from the stored rows
    python -m lab.render_results all speed   # run these sections' commands first, and store their rows
    python -m lab.render_results --check     # fail if RESULTS.md differs from the stored rows
"""
from datetime import date
import json
from pathlib import Path
import platform
import re
import shlex
import subprocess
import sys
import tempfile

from lab import speed, table
from lab.claims import claims_renderer
from nanollm import SHIPPED

ROOT = Path(__file__).parents[1]
STORED = ROOT / "lab" / "stored"
TARGET = ROOT / "RESULTS.md"
COMPARED = "smollm2", "short", "all", "learned"  # sections of python -m nanollm

# sections.md has the words before the tables; SECTIONS: title, command and words by name
HEAD, *PARTS, FOOT = (ROOT / "lab" / "sections.md").read_text().strip().split("\n\n## ")
SECTION = re.compile(r"(\w+) · (.+)\n`(.+)`\n\n((?s:.+))")
SECTIONS = {name: words for name, *words in (SECTION.fullmatch(part).groups() for part in PARTS)}


def rows(name: str) -> list[dict]:
    """Return the stored rows of a section."""
    return json.loads((STORED / f"{name}.json").read_text())["rows"]


def by_method(name: str) -> dict[tuple[str, float | None], dict]:
    """Return the rows of a section of `python -m nanollm`, by method and keep ratio."""
    return {(row["method"], row["keep_ratio"]): row for row in rows(name)}


def run(name: str):
    """Run a section's command and store its rows. CalledProcessError, and nothing is stored, if it fails."""
    _, command, _ = SECTIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        words = [*shlex.split(command)[1:], "--json", f"{folder}/rows.json"]
        if name in COMPARED:
            words += ["--figure", "notebooks/compare.png" if name == "all" else f"{folder}/figure.png"]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        measured = json.loads(Path(folder, "rows.json").read_text())
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    write(name, command, machine, str(date.today()), measured)


def write(name: str, command: str, machine: str, date: str, rows: list[dict]):
    """Store rows as JSON, one per line, without the numbers of each document, which take megabytes."""
    head = json.dumps(dict(command=command, machine=machine, date=date), indent=1, ensure_ascii=False)
    lines = ",\n".join(json.dumps({key: x for key, x in row.items() if key not in ("each", "model")}
                                  if name in COMPARED else row, ensure_ascii=False) for row in rows)
    (STORED / f"{name}.json").write_text(f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n')


def section(name: str) -> str:
    """Return a section of RESULTS.md. SystemExit if its rows come from another command."""
    title, command, words = SECTIONS[name]
    stored = json.loads((STORED / f"{name}.json").read_text())
    if stored["command"] != command:
        raise SystemExit(f"error: stored/{name}.json is of `{stored['command']}`, not of `{command}`; "
                         f"run python -m lab.render_results {name}")
    if name in COMPARED:
        short, measured = name in ("smollm2", "short"), stored["rows"]
        lines = [table.header(measured[0], short), *(table.show(row, short) for row in measured)]
        text = "\n".join([*lines, "", table.findings(measured)] if short else lines)
    else:
        text = (claims_renderer if name == "claims" else speed).show(stored["rows"])
    source = f"`{command}` ({stored['date']}, {stored['machine']})"
    return f"## {title}\n\n{words}\n\n{source}:\n\n```\n{text.strip(chr(10))}\n```"


def trained() -> str:
    """Return a table with a column for each shipped decoder, from the reports of its training."""
    runs = [json.loads((folder / "train.json").read_text()) for folder in SHIPPED.values()]
    percent = lambda x: f"{100 * x['value']:.1f} ± {100 * x['standard_error']:.1f} %" if x else "–"
    cells = [["", *SHIPPED], ["---"] * (1 + len(runs)),
             ["command", *(f"`{run['command']}`" for run in runs)],
             ["minutes", *(f"{run['minutes']:.0f}" for run in runs)],
             ["training tokens", *(f"{run['training_tokens'] / 1e6:.1f} M" for run in runs)],
             ["parameters", *(f"{run['parameters'] / 1e6:.2f} M" for run in runs)],
             ["documents a task", *(str(run["documents_per_figure"]) for run in runs)]]
    cells += [[name.replace("_", " "), *(percent(run["exact_match"].get(name)) for run in runs)]
              for name in dict.fromkeys(name for run in runs for name in run["exact_match"])]
    cells.append(["bits per byte of text", *(f"{run['bits_per_byte']['model']:.2f}" for run in runs)])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def rendered() -> str:
    """Return the text of RESULTS.md."""
    terms = f"Columns of the tables of `python -m nanollm`:\n\n```\n{table.terms()}\n```"
    return "\n\n".join((HEAD, terms, *map(section, SECTIONS), f"## {FOOT}\n\n{trained()}")) + "\n"


def main(argv: list[str]):
    if argv == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != rendered():
            raise SystemExit("error: RESULTS.md differs from the stored rows; run lab.render_results")
        return
    if unknown := [name for name in argv if name not in SECTIONS]:
        raise SystemExit(f"error: unknown section {unknown[0]!r}; known are {', '.join(SECTIONS)}")
    for name in argv:
        run(name)
    TARGET.write_text(rendered())


if __name__ == "__main__":
    main(sys.argv[1:])
