"""Write RESULTS.md from the stored rows, or run the commands that measure them.

    python -m lab.render_results             # write RESULTS.md from the stored rows
    python -m lab.render_results all speed   # run these sections' commands first, and store their rows
    python -m lab.render_results --check     # fail if RESULTS.md differs from the stored rows

A comparison that was interrupted goes on: its rows are in lab/stored/NAME.0.part and so on.
"""

from datetime import date
import json
from pathlib import Path
import platform
import re
import shlex
import subprocess
import sys

from lab import kernel_bench, plot, speed, table
from lab.claims import claims_renderer
from lab.table import text_table
from nanollm import SHIPPED

ROOT = Path(__file__).parents[1]
STORED = ROOT / "lab" / "stored"
TARGET = ROOT / "RESULTS.md"
COMPARED = (
    "smollm2",
    "window",
    "window_built",
    "window_learned",
    "long",
    "long_built",
    "long_learned",
    # the sections of python -m nanollm
    "hard",
    "news",
    "news_built",
    "short",
    "all",
    "learned",
)

# sections.md has the words before the tables; SECTIONS: title, command and words by name
HEAD, *PARTS, FOOT = (ROOT / "lab" / "sections.md").read_text().strip().split("\n\n## ")
SECTION = re.compile(r"(\w+) · (.+)\n`(.+)`\n\n((?s:.+))")
SECTIONS = {
    name: words for name, *words in (SECTION.fullmatch(part).groups() for part in PARTS)
}


def rows(name: str) -> list[dict]:
    """Return the stored rows of a section."""
    return json.loads((STORED / f"{name}.json").read_text())["rows"]


def by_method(name: str) -> dict[tuple[str, float | None], dict]:
    """Return the rows of a section of `python -m nanollm`, by method and keep ratio."""
    return {(row["method"], row["keep_ratio"]): row for row in rows(name)}


def run(name: str):
    """Run a section's commands and store their rows. CalledProcessError if one fails."""
    _, commands, _ = SECTIONS[name]
    machine = (
        f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    )
    measured, parts = [], []
    for i, command in enumerate(commands.split(" && ")):
        parts.append(STORED / f"{name}.{i}.part")
        words = [*shlex.split(command)[1:], "--json", str(parts[-1])]
        subprocess.run(
            [sys.executable, *words, *(["--resume"] if name in COMPARED else [])],
            cwd=ROOT,
            check=True,
        )
        new = json.loads(parts[-1].read_text())
        if isinstance(new, dict):
            new, machine = new["rows"], new["machine"]
        # claims repeats what it stored first
        measured = [row for row in measured if row not in new] + new
        write(name, commands, machine, str(date.today()), measured)
    for part in parts:
        part.unlink()
    if name == "all":
        plot.comparison(rows(name), ROOT / "notebooks" / "compare.png")


def write(name: str, command: str, machine: str, date: str, rows: list[dict]):
    """Store rows as JSON, one per line, without the numbers of each document, which take megabytes."""
    head = json.dumps(
        dict(command=command, machine=machine, date=date), indent=1, ensure_ascii=False
    )
    lines = ",\n".join(
        json.dumps(
            {key: x for key, x in row.items() if key not in ("each", "model")}
            if name in COMPARED
            else row,
            ensure_ascii=False,
        )
        for row in rows
    )
    (STORED / f"{name}.json").write_text(f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n')


def plain(rows: list[dict]) -> str:
    """Return rows with the same keys as a text table."""
    cell = lambda x: "" if x is None else f"{x:.2f}" if isinstance(x, float) else str(x)
    return text_table([[*rows[0]], *([*map(cell, row.values())] for row in rows)])


def section(name: str) -> str:
    """Return a section of RESULTS.md. SystemExit if its rows come from another command."""
    title, command, words = SECTIONS[name]
    stored = json.loads((STORED / f"{name}.json").read_text())
    if stored["command"] != command:
        raise SystemExit(
            f"error: stored/{name}.json is of `{stored['command']}`, not of `{command}`; "
            f"run python -m lab.render_results {name}"
        )
    if name in COMPARED:
        # the file has all
        shown = [row for row in stored["rows"] if row["keep_ratio"] in (None, 0.25)]
        lines = [
            table.header(shown[0], short=True),
            *(table.show(row, short=True) for row in shown),
        ]
        text = "\n".join(lines)
    else:
        others = dict(
            claims=claims_renderer,
            claims_news=claims_renderer,
            kernels=kernel_bench,
            decoding=kernel_bench,
            speed=speed,
            cost=speed,
        )
        text = (
            others[name].show(stored["rows"])
            if name in others
            else plain(stored["rows"])
        )
    source = f"`{command}` ({stored['date']}, {stored['machine']})"
    return f"## {title}\n\n{words}\n\n{source}:\n\n```\n{text.strip(chr(10))}\n```"


def trained() -> str:
    """Return a table with a column for each shipped decoder, from the reports of its training."""
    runs = [
        json.loads((folder / "train.json").read_text()) for folder in SHIPPED.values()
    ]
    percent = lambda x: (
        f"{100 * x['value']:.1f} ± {100 * x['standard_error']:.1f} %" if x else "–"
    )
    cells = [
        ["", *SHIPPED],
        ["---"] * (1 + len(runs)),
        ["command", *(f"`{run['command']}`" for run in runs)],
        ["minutes", *(f"{run['minutes']:.0f}" for run in runs)],
        ["training tokens", *(f"{run['training_tokens'] / 1e6:.1f} M" for run in runs)],
        ["parameters", *(f"{run['parameters'] / 1e6:.2f} M" for run in runs)],
        ["documents a task", *(str(run["documents_per_figure"]) for run in runs)],
    ]
    cells += [
        [
            name.replace("_", " "),
            *(percent(run["exact_match"].get(name)) for run in runs),
        ]
        for name in dict.fromkeys(name for run in runs for name in run["exact_match"])
    ]
    cells.append(
        [
            "bits per byte of text",
            *(f"{run['bits_per_byte']['model']:.2f}" for run in runs),
        ]
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def rendered() -> str:
    """Return the text of RESULTS.md."""
    terms = (
        f"Columns of the tables of `python -m nanollm`:\n\n```\n{table.terms()}\n```"
    )
    return (
        "\n\n".join((HEAD, terms, *map(section, SECTIONS), f"## {FOOT}\n\n{trained()}"))
        + "\n"
    )


def main(argv: list[str]):
    if argv == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != rendered():
            raise SystemExit(
                "error: RESULTS.md differs from the stored rows; run lab.render_results"
            )
        return
    if unknown := [name for name in argv if name not in SECTIONS]:
        raise SystemExit(
            f"error: unknown section {unknown[0]!r}; known are {', '.join(SECTIONS)}"
        )
    for name in argv:
        run(name)
    TARGET.write_text(rendered())


if __name__ == "__main__":
    main(sys.argv[1:])
