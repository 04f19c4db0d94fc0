"""Write RESULTS.md from the stored rows, or run the commands that measure them.

    python -m lab.render_results             # write RESULTS.md from the stored rows
    python -m lab.render_results all speed   # first run these sections' commands, and store rows
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
from nanollm import SHIPPED

ROOT = Path(__file__).parents[1]
STORED = ROOT / "lab" / "stored"
TARGET = ROOT / "RESULTS.md"
COMPARISON = re.compile(r"python -m nanollm(?! claims)")
# by the beginning of any other command: what lays out its rows
RENDERERS = {
    "python -m nanollm claims": claims_renderer,
    "python -m lab.kernel_bench": kernel_bench,
    "python -m lab.speed": speed,
}

# sections.md has the words before the tables; SECTIONS: title, command and words by name
HEAD, *PARTS, FOOT = (ROOT / "lab" / "sections.md").read_text().strip().split("\n\n## ")
SECTION = re.compile(r"(\w+) · (.+)\n`(.+)`\n\n((?s:.+))")
MATCHES = [SECTION.fullmatch(part).groups() for part in PARTS]
SECTIONS = {name: about for name, *about in MATCHES}


def rows(name: str) -> list[dict]:
    """Return the stored rows of a section."""
    return json.loads((STORED / f"{name}.json").read_text())["rows"]


def by_method(name: str) -> dict[tuple[str, float | None], dict]:
    """Return the rows of a section of `python -m nanollm`, by method and keep ratio."""
    return {(row["method"], row["keep_ratio"]): row for row in rows(name)}


def run(name: str):
    """Run a section's commands and store their rows. CalledProcessError if one fails."""
    _, commands, _ = SECTIONS[name]
    system = f"{platform.machine()}, {platform.system()}"
    machine = f"{system}, Python {platform.python_version()}"
    measured = []
    parts = []
    for i, command in enumerate(commands.split(" && ")):
        part = STORED / f"{name}.{i}.part"
        parts.append(part)
        words = [*shlex.split(command)[1:], "--json", str(part)]
        if COMPARISON.match(command):
            words.append("--resume")
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        new = json.loads(part.read_text())
        if isinstance(new, dict):
            machine = new["machine"]
            new = new["rows"]
        # claims repeats what it stored first
        measured = [row for row in measured if row not in new] + new
        write(name, commands, machine, str(date.today()), measured)
    for part in parts:
        part.unlink()
    if name == "all":
        plot.comparison(rows(name), ROOT / "notebooks" / "compare.png")


def write(name: str, command: str, machine: str, date: str, rows: list[dict]):
    """Store rows as JSON, one per line.

    Those of the comparison lose the numbers of each document, which take megabytes.
    """
    about = dict(command=command, machine=machine, date=date)
    head = json.dumps(about, indent=1, ensure_ascii=False)
    lines = []
    for row in rows:
        if "keep_ratio" in row:
            row = {key: x for key, x in row.items() if key not in ("each", "model")}
        lines.append(json.dumps(row, ensure_ascii=False))
    body = ",\n".join(lines)
    (STORED / f"{name}.json").write_text(f'{head[:-2]},\n "rows": [\n{body}\n]}}\n')


def shown(command: str, rows: list[dict]) -> str:
    """Return the rows of a command as text. SystemExit if RENDERERS lacks the command."""
    if "keep_ratio" in rows[0]:  # the comparison; the file has all keep ratios
        quarter = [row for row in rows if row["keep_ratio"] in (None, 0.25)]
        lines = [table.show(row, short=True) for row in quarter]
        return "\n".join([table.header(quarter[0], short=True), *lines])
    for beginning, renderer in RENDERERS.items():
        if command.startswith(beginning):
            return renderer.show(rows)
    raise SystemExit(
        f"error: nothing lays out the rows of `{command}`; add its module to RENDERERS"
    )


def section(name: str) -> str:
    """Return a section of RESULTS.md. SystemExit if its rows come from another command."""
    title, command, words = SECTIONS[name]
    stored = json.loads((STORED / f"{name}.json").read_text())
    if stored["command"] != command:
        raise SystemExit(
            f"error: stored/{name}.json is of `{stored['command']}`, not of `{command}`; "
            f"run python -m lab.render_results {name}"
        )
    text = shown(command, stored["rows"]).strip("\n")
    source = f"`{command}` ({stored['date']}, {stored['machine']})"
    return f"## {title}\n\n{words}\n\n{source}:\n\n```\n{text}\n```"


def trained() -> str:
    """Return a table with a column for each shipped decoder, from the reports of its training."""
    reports = [folder / "train.json" for folder in SHIPPED.values()]
    runs = [json.loads(report.read_text()) for report in reports]
    cells = [
        ["", *SHIPPED],
        ["---"] * (1 + len(runs)),
        ["command", *(f"`{run['command']}`" for run in runs)],
        ["minutes", *(f"{run['minutes']:.0f}" for run in runs)],
        ["training tokens", *(f"{run['training_tokens'] / 1e6:.1f} M" for run in runs)],
        ["parameters", *(f"{run['parameters'] / 1e6:.2f} M" for run in runs)],
        ["documents a task", *(f"{run['documents_per_figure']}" for run in runs)],
    ]
    for task in dict.fromkeys(task for run in runs for task in run["exact_match"]):
        accuracies = [percent(run["exact_match"].get(task)) for run in runs]
        cells.append([task.replace("_", " "), *accuracies])
    bits = [f"{run['bits_per_byte']['model']:.2f}" for run in runs]
    cells.append(["bits per byte of text", *bits])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def percent(accuracy: dict | None) -> str:
    if accuracy is None:
        return "–"
    return f"{100 * accuracy['value']:.1f} ± {100 * accuracy['standard_error']:.1f} %"


def rendered() -> str:
    """Return the text of RESULTS.md."""
    parts = [
        HEAD,
        "Columns of the tables of `python -m nanollm`:",
        f"```\n{table.terms()}\n```",
        *map(section, SECTIONS),
        f"## {FOOT}",
        trained(),
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]):
    if argv == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != rendered():
            raise SystemExit(
                "error: RESULTS.md differs from the stored rows; run lab.render_results"
            )
        return
    for name in argv:
        if name not in SECTIONS:
            raise SystemExit(
                f"error: unknown section {name!r}; known are {', '.join(SECTIONS)}"
            )
    for name in argv:
        run(name)
    TARGET.write_text(rendered())


if __name__ == "__main__":
    main(sys.argv[1:])
