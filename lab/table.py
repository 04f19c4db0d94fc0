"""Tables of python -m nanollm, and sentences under the short table. Its columns are the tasks of
its rows."""

from statistics import fmean
from textwrap import fill

from lab.text_table import text_table

# The short table: one method of each family, all at one keep ratio.
SHOWN = (
    "full",
    "snap_kv",
    "snap_kv+critical",
    "chunk_kv",
    "scissorhands",
    "kv_reviver_shrunk",
    "kvzip",
    "worst_query",
    "quantized_2",
    "h2o",
    "random",
)
TERMS = """\
keep      keep ratio: the budget of each head, as a percentage of the prompt's tokens; "all" if every token
          stays; in brackets the percentage that a method without a budget kept
KiB       size of one text's cache after the last token, with 16-bit numbers; quantized entries as stored
{tasks}
aware     accuracy if the question is part of the prompt that is compressed
agnostic  accuracy if the question comes after the compression
KL        KL divergence between the full cache's predictions of real text and these, in nats per token"""
STANDARD_TERMS = """\
needle    task: four facts are hidden in real text, and the question asks for one of them
pairs     task: key-value retrieval; the prompt lists 16 pairs, and the question asks for one value
few-shot  task: the prompt lists labelled lines, and the answer is the label of a new line"""
HARD_TERMS = """\
turns     task: six facts in real text, and four questions, one after another; aware sees only the first
latest    task: two of four facts are stated again with a new value, which is asked for
hops      task: the answer writes out a chain of three facts, each of which names the next one's key
list      task: all four numbers of a kind, in order; each counts
count     task: which of three labels has the most of twelve votes
rule      task: two rules before the text say how to answer, and which word must not be said
paraphr.  task: needle, asked in other words than the fact's"""
PERPLEXITY = "perplexity of real text after a compressed prompt"
L1 = """\
L1        change of a head's output by the compression of its own layer alone: the sum of absolute
          differences, mean over heads and tokens"""
# a method that loses at most this much mean accuracy counts as nearly lossless
NEARLY = 0.1
SETTINGS = "aware", "agnostic"
KEYS = {
    *SETTINGS,
    "method",
    "keep_ratio",
    "tokens",
    "documents",
    "seed",
    "prompt",
    "live_16",
    "kl",
    "perplexity",
    "slots",
    "slots_end",
}  # of each row


def row_of(
    name: str, keep_ratio: float | None, T: int, settings: dict, measured: dict
) -> dict:
    """Return a row: method, settings, measurements (bytes per text), and means over the tasks."""
    row = dict(method=name, keep_ratio=keep_ratio, tokens=T) | settings | measured
    row |= {
        key: row[key] // len(row["each"]["kl"])
        for key in ("live", "live_16", "allocated")
    }
    return row | {
        setting: fmean(row[f"{task}_{setting}"] for task in tasks_of(row))
        for setting in SETTINGS
    }


def tasks_of(row: dict) -> list[str]:
    """Return the names of the tasks that a row measures."""
    return [key.removesuffix("_aware") for key in row if key.endswith("_aware")]


def label(name: str, keep_ratio: float | None) -> str:
    """Return "h2o at 25 %"; only the name if there is no budget."""
    return name if keep_ratio is None else f"{name} at {100 * keep_ratio:g} %"


# ---- rows as text; a task's column holds both accuracies, aware and agnostic ---


def terms(short: bool = False, hard: bool = False, l1: bool = True) -> str:
    """Return a line on each column of the table."""
    said = [TERMS.format(tasks=HARD_TERMS if hard else STANDARD_TERMS)]
    return "\n".join(said + [PERPLEXITY] * (not short) + [L1] * (l1 and not short))


def widths(row: dict, short: bool) -> list[int]:
    """Return the least widths of the columns, from method to KL or, if it was measured, to L1."""
    return [26, 6, 6, *[14] * len(tasks_of(row)), *([6] if short else [10, 5, 6])]


def header(row: dict, short: bool = False) -> str:
    """Return the lines above the rows: documents, largest standard error, names of the columns."""
    # largest if half of them are right
    tasks, error = tasks_of(row), 0.5 / (row["documents"] - 1) ** 0.5
    above = ["", "", "16-bit", *(task.replace("_", "-") for task in tasks)]
    names = ["method", "keep", "KiB", *["aware agnostic"] * len(tasks)]
    names += ["KL"] if short else ["perplexity", "KL", "L1"][: 2 + ("l1_alone" in row)]
    above += [""] * (len(names) - len(above))
    return (
        f"{row['documents']} documents per task, {row['tokens']} tokens each; seed {row['seed']}; "
        f"standard error of an accuracy: at most {error:.2f}\n\n"
        + text_table([above, names], widths(row, short))
    )


def show(row: dict, short: bool = False) -> str:
    """Return a row as a line of the table."""
    cells = [row["method"], budget(row), f"{row['live_16'] / 1024:.0f}"]
    cells += [
        f"{row[f'{task}_aware']:5.2f} {row[f'{task}_agnostic']:8.2f}"
        for task in tasks_of(row)
    ]
    kl = f"{max(row['kl'], 0):.3f}"
    if short:
        return text_table([[*cells, kl]], widths(row, short))
    perplexity = (
        f"{row['perplexity']:.2f}"
        if row["perplexity"] < 1e4
        else f"{row['perplexity']:.1e}"
    )
    cells += [perplexity, kl]
    if "l1_alone" in row:
        cells.append(f"{fmean(x for layer in row['l1_alone'] for x in layer):.2f}")
    return text_table([cells], widths(row, short))


def budget(row: dict) -> str:
    """Return the keep ratio of a row: "25 %"; without a budget "all" or, in brackets, how much was kept."""
    if row["keep_ratio"] is not None:
        return f"{100 * row['keep_ratio']:g} %"
    if row["slots"] == row["prompt"]:
        return "all"
    return f"({100 * row['slots'] / row['prompt']:.0f} %)"


# ---- sentences about the rows ---


def split(rows: list[dict]) -> tuple[dict | None, list[dict]]:
    """Return the full cache's row, or None, and the other rows."""
    full = next((row for row in rows if row["method"] == "full"), None)
    return full, [row for row in rows if row["method"] != "full"]


def judges(full: dict, task: str) -> bool:
    """Return whether a task can compare methods: the full cache answers at least half of its questions."""
    return full[f"{task}_aware"] >= 0.5


def unfit(rows: list[dict]) -> str:
    """Return a line for each task at which the full cache itself fails; "" if there is none."""
    full, _ = split(rows)
    return "\n".join(
        f"The full cache answers only {full[f'{task}_aware']:.2f} of {task.replace('_', '-')}: "
        "with this model, the task cannot compare methods."
        for task in (tasks_of(full) if full else [])
        if not judges(full, task)
    )


def findings(rows: list[dict]) -> str:
    """Return sentences on rows of one keep ratio: which methods keep the answers, and the bytes and KL.

    "" unless there are a row of the full cache and another row.
    """
    full, others = split(rows)
    if not full or not others:
        return ""
    tasks, paragraphs = [task for task in tasks_of(full) if judges(full, task)], []
    within = f"within {NEARLY:g} of the full cache's accuracy (mean over the tasks)"
    for setting in SETTINGS if tasks else ():
        mean = {
            row["method"]: fmean(row[f"{task}_{setting}"] for task in tasks)
            for row in rows
        }
        near = [
            row["method"]
            for row in others
            if mean[row["method"]] >= mean["full"] - NEARLY
        ]
        paragraphs.append(
            f"{setting.title()}: {len(near) or 'none'} of {len(others)} methods "
            f"{'stay' if len(near) > 1 else 'stays'} {within}"
            + (f": {', '.join(near)}." if near else ".")
        )
    least = min(others, key=lambda row: row["live_16"])
    closest, farthest = (end(others, key=lambda row: row["kl"]) for end in (min, max))
    paragraphs.append(
        f"Cost: {least['method']} holds the fewest bytes, "
        f"{100 * least['live_16'] / full['live_16']:.0f} % of a full 16-bit "
        f"cache. The predictions change least with {closest['method']} "
        f"(KL {max(closest['kl'], 0):.3f}) "
        f"and most with {farthest['method']} (KL {farthest['kl']:.3f})."
    )
    return "\n".join(fill(paragraph, 100) for paragraph in paragraphs)
