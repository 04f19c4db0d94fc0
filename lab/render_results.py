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

from lab import kernel_bench, plot, question_table, speed, table
from lab.claims import claims_renderer

ROOT = Path(__file__).parents[1]
STORED = ROOT / "lab" / "stored"
TARGET = ROOT / "RESULTS.md"
# what lays out the rows of commands that begin so; `shown` knows the others
RENDERERS = {
    "python -m nanollm claims": claims_renderer,
    "python -m lab.kernel_bench": kernel_bench,
    "python -m lab.speed": speed,
}

# of the figure of RULER
DRAWN = (
    "full snap_kv ada_kv chunk_kv compactor kvzip kvzip_fast question_gates question_gates@4 "
    "full@4 random"
).split()

# sections.md has the words before the tables; SECTIONS: title, command and words by name
HEAD, *PARTS = (ROOT / "lab" / "sections.md").read_text().strip().split("\n\n## ")
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
        words = shlex.split(command)[1:]
        if "--out" in words:  # writes questions, not rows
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
            continue
        words += ["--json", str(part)]
        if command.startswith("python -m nanollm") and "claims" not in words:
            words.append("--resume")
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        new = json.loads(part.read_text())
        if "records" in new:
            frame = question_table.frame_of(new["records"])
            new = question_table.without(question_table.rows_of(frame), measured)
        elif isinstance(new, dict):
            machine = new["machine"]
            new = new["rows"]
        # claims repeats what it stored first
        measured = [row for row in measured if row not in new] + new
        write(name, commands, machine, str(date.today()), measured)
    for part in parts:
        part.unlink(missing_ok=True)
    if name == "ruler":
        draw_ruler()
    if name == "all":
        plot.comparison(rows(name), ROOT / "notebooks" / "compare.png")


def draw_ruler():
    """Draw README's figure of RULER: the mean score of the stored rows over the bytes."""
    frame = question_table.frame_of_rows(rows("ruler"))
    frame = frame[(frame.setting == "agnostic") & frame.method.isin(DRAWN)]
    documents = frame.groupby("task").line.nunique().max()
    title = f"RULER on SmolLM2-135M, 1,024 tokens, {documents} documents a task"
    plot.questions(question_table.points(frame), title, ROOT / "notebooks/ruler.png")


def write(name: str, command: str, machine: str, date: str, rows: list[dict]):
    """Store rows as JSON, one per line; numbers of single documents have four decimals."""
    about = dict(command=command, machine=machine, date=date)
    head = json.dumps(about, indent=1, ensure_ascii=False)
    lines = []
    for row in rows:
        if "each" in row:
            each = row["each"].items()
            row = row | dict(
                each={name: [round(x, 4) for x in xs] for name, xs in each}
            )
            del row["model"]
        lines.append(json.dumps(row, ensure_ascii=False))
    body = ",\n".join(lines)
    (STORED / f"{name}.json").write_text(f'{head[:-2]},\n "rows": [\n{body}\n]}}\n')


def shown(command: str, found: list[dict]) -> str:
    """Return the rows of a command as text. SystemExit if nothing lays them out."""
    for beginning, renderer in RENDERERS.items():
        if command.startswith(beginning):
            return renderer.show(found)
    if "score" in found[0]:
        frame = question_table.frame_of_rows(found)
        if "kvpress" in command:
            ours = question_table.frame_of_rows(rows("ruler"))
            frame = question_table.beside(ours, frame)
        return question_table.show(frame, short=True)
    if "keep_ratio" in found[0]:  # the comparison; the file has all keep ratios
        quarter = [row for row in found if row["keep_ratio"] in (None, 0.25)]
        lines = [table.show(row) for row in quarter]
        return "\n".join([table.header(quarter[0]), *lines])
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


def rendered() -> str:
    """Return the text of RESULTS.md."""
    parts = [
        HEAD,
        "Columns of the tables of `python -m nanollm`, and then of those with `--questions`:",
        f"```\n{table.TERMS}\n\n{question_table.TERMS}\n```",
        *map(section, SECTIONS),
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
