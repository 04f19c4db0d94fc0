"""Lay out tables as text; the tables of python -m nanollm, and sentences about their rows.

Each task of the rows has a column.
"""

from itertools import chain, repeat
from statistics import fmean

# The short table: the main methods; those with a budget at one keep ratio.
SHOWN = (
    "full snap_kv snap_kv+critical chunk_kv scissorhands kv_reviver_shrunk kvzip question_gates "
    "full@2 h2o random"
).split()

TERMS = """\
keep      keep ratio: a head's mean budget, in percent of the prompt without its question; "all" if
          every token stays; in brackets the percentage that a method without a budget kept
KiB       size of one text's cache after the last token, with 16-bit numbers; quantized entries as
          stored; most methods evict at the prompt's end alone, and append later tokens
needle    task: four facts are hidden in real text, and the question asks for one of them
pairs     task: key-value retrieval; the prompt lists 16 pairs, and the question asks for one value
few-shot  task: the prompt lists labelled lines, and the answer is the label of a new line
aware     accuracy ± its standard error if the question is part of the prompt that is compressed
agnostic  accuracy if the question comes after the compression
KL        KL divergence between the full cache's predictions of text and these, in nats a token"""
SETTINGS = "aware", "agnostic"


def text_table(rows: list[list[str]], widths: list[int] = ()) -> str:
    """Return rows of cells as lines: column 0 aligned left, the others right.

    The first row is the header. widths: least width of each column, so that a table can be printed
    row by row.
    """
    columns = zip(zip(*rows), chain(widths, repeat(0)))
    wide = [max(least, *map(len, column)) for column, least in columns]
    lines = []
    for row in rows:
        cells = [cell.rjust(n) for cell, n in zip(row, wide)]
        cells[0] = row[0].ljust(wide[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def row_of(
    name: str, keep_ratio: float | None, T: int, settings: dict, measured: dict
) -> dict:
    """Return a row: method, settings, measurements (bytes per text), and means over the tasks."""
    row = dict(method=name, keep_ratio=keep_ratio, tokens=T) | settings | measured
    for size in "live", "live_16", "allocated":
        row[size] //= len(row["each"]["kl"])
    for setting in SETTINGS:
        row[setting] = fmean(row[f"{task}_{setting}"] for task in tasks_of(row))
    return row


def tasks_of(row: dict) -> list[str]:
    """Return the names of the tasks that a row measures."""
    return [key.removesuffix("_aware") for key in row if key.endswith("_aware")]


def label(name: str, keep_ratio: float | None) -> str:
    """Return "h2o at 25 %"; only the name if there is no budget."""
    return name if keep_ratio is None else f"{name} at {100 * keep_ratio:g} %"


# ---- rows as text; a task's column holds both accuracies, aware and agnostic ---


def widths(row: dict) -> list[int]:
    """Return the least widths of the columns, from method to KL."""
    return [22, 6, 6] + [17] * len(tasks_of(row)) + [6]


def header(row: dict) -> str:
    """Return the lines above the rows: documents, and names of the columns."""
    tasks = tasks_of(row)
    above = ["", "", "16-bit", *(task.replace("_", "-") for task in tasks)]
    names = ["method", "keep", "KiB"] + ["aware agnostic"] * len(tasks)
    names.append("KL")
    above += [""] * (len(names) - len(above))
    return (
        f"{row['documents']} documents per task, {row['tokens']} tokens each; "
        f"seed {row['seed']}\n\n" + text_table([above, names], widths(row))
    )


def show(row: dict) -> str:
    """Return a row as a line of the table."""

    def number(key: str) -> str:
        error = f"{row[f'{key}_se']:.2f}"
        return f"{row[key]:.2f}±{error[1:]}"

    cells = [row["method"], budget(row), f"{row['live_16'] / 1024:.0f}"]
    for task in tasks_of(row):
        cells.append(f"{number(f'{task}_aware')} {number(f'{task}_agnostic'):>8}")
    cells.append(f"{max(row['kl'], 0):.3f}")
    return text_table([cells], widths(row))


def budget(row: dict) -> str:
    """Return a row's keep ratio: "25 %", or without a budget "all" or "(31 %)", what it kept."""
    if row["keep_ratio"] is not None:
        return f"{100 * row['keep_ratio']:g} %"
    if row["slots"] == row["prompt"]:
        return "all"
    return f"({100 * row['slots'] / row['prompt']:.0f} %)"


# ---- what the full cache cannot do ---


def judges(full: dict, task: str) -> bool:
    """Return whether the full cache answers half of a task, aware; it can then compare methods."""
    return full[f"{task}_aware"] >= 0.5


def unfit(rows: list[dict]) -> str:
    """Return a line for each task at which the full cache itself fails; "" if there is none."""
    full = next((row for row in rows if row["method"] == "full"), None)
    lines = []
    for task in tasks_of(full) if full else ():
        if not judges(full, task):
            lines.append(
                f"The full cache answers only {full[f'{task}_aware']:.2f} of "
                f"{task.replace('_', '-')}: with this model, the task cannot compare methods."
            )
    return "\n".join(lines)
