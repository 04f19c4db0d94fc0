"""The tables of python -m nanollm: rows, what additions change, and sentences on the short table."""
from numbers import Real
from statistics import fmean
from textwrap import fill

from nanollm.commands.text_table import text_table
from nanollm.measure.benchmark import TASKS, paired

# The short table: a row a family, all at one budget.
SHOWN = ("full", "snap_kv", "snap_kv+critical", "chunk_kv", "scissorhands", "kv_reviver_shrunk", "h2o",
         "streaming_llm", "random", "kvzip", "quantized_2")
TERMS = """\
keep      the keep ratio: the budget of each head, as a percentage of the prompt's tokens. "all": every token
          stays. In brackets: what a method without a budget kept
KiB       the size of one text's cache with 16-bit numbers; quantized entries count as stored
needle    four facts are hidden in real text, and the question asks for one of them
pairs     key-value retrieval: the prompt lists 16 pairs, and the question asks for one value
few-shot  labelled lines, then a new line: the answer is its label
aware     accuracy if the question is part of the prompt that is compressed
agnostic  accuracy if the question comes after the compression
KL        how far predictions of real text move from the full cache's, in nats"""
NEARLY = 0.1  # a loss of mean accuracy, at most, that counts as nearly none

# ---- the keys of a row, and what each holds ----

SETTINGS = "aware", "agnostic"
ACCURACIES = tuple(f"{task}_{setting}" for task in TASKS for setting in SETTINGS)
HOLDS = dict(method=str, each=dict, l1_alone=list[list[Real]], keeps_all=bool, evicts=bool) | dict.fromkeys(
    (*ACCURACIES, *SETTINGS, "tokens", "prompt", "live_16", "kl", "perplexity", "tokens_per_s"),
    Real) | dict.fromkeys(("keep_ratio", "device", "slots", "slots_end"), Real | None)
EACH = dict.fromkeys((*ACCURACIES, "nll", "kl", "l1_alone"), list[Real])  # of row["each"], by document


def row_of(name: str, keep_ratio: float | None, T: int, settings: dict, measured: dict) -> dict:
    """Return a row: what was run, what `Benchmark.run` measured, bytes per text, means over the tasks."""
    row = dict(method=name, keep_ratio=keep_ratio, tokens=T) | settings | measured
    for key in ("live", "live_16", "allocated", "peak", "device"):
        row[key] = row[key] and row[key] // len(row["each"]["kl"])
    for setting in SETTINGS:
        row[setting] = sum(row[f"{task}_{setting}"] for task in TASKS) / len(TASKS)
    return row


def label(name: str, keep_ratio: float | None) -> str:
    return name if keep_ratio is None else f"{name} at {100 * keep_ratio:g} %"


# ---- rows as text: a column per task holds both settings ----

SHORT = (26, 6, 6, 14, 14, 14, 6)             # least widths of the columns, to KL
LONG = (26, 6, 6, 14, 14, 14, 7, 5, 6, 8, 8)  # to the GPU's KiB


def header(T: int, documents: int, seed: int, short: bool = False, gpu: bool = False) -> str:
    """Return what stands above the rows: documents, an accuracy's standard error, names of the columns.

    gpu: a column of the bytes that the GPU's allocator has given out, beside those that the caches know of.
    """
    error = 0.5 / (documents - 1) ** 0.5  # of as many ones as zeros, which is the largest
    above = ["", "", "16-bit", *(task.replace("_", "-") for task in TASKS)]
    names = ["method", "keep", "KiB", *["aware agnostic"] * len(TASKS)]
    above += [""] if short else ["", "", "", "batch"] + [""] * gpu
    names += ["KL"] if short else ["perpl.", "KL", "L1", "tokens/s"] + ["GPU, KiB"] * gpu
    return (f"\n{documents} documents per task, {T} tokens each; seed {seed}; standard error of an accuracy: "
            f"at most {error:.2f}\n\n" + text_table([above, names], SHORT if short else LONG))


def show(row: dict, short: bool = False) -> str:
    """Return a row as a line of the table."""
    cells = [row["method"], budget(row), f"{row['live_16'] / 1024:.0f}"]
    cells += [f"{row[f'{task}_aware']:5.2f} {row[f'{task}_agnostic']:8.2f}" for task in TASKS]
    kl = f"{max(row['kl'], 0):.3f}"
    if short:
        return text_table([[*cells, kl]], SHORT)
    perplexity = f"{row['perplexity']:.2f}" if row["perplexity"] < 1e4 else f"{row['perplexity']:.1e}"
    l1 = fmean(x for layer in row["l1_alone"] for x in layer)
    cells += [perplexity, kl, f"{l1:.2f}", f"{row['tokens_per_s']:.0f}"]
    return text_table([cells if row["device"] is None else [*cells, f"{row['device'] / 1024:.0f}"]], LONG)


def budget(row: dict) -> str:
    """Return the budget asked for. Without one: "all", or in brackets how much the method kept."""
    if row["keep_ratio"] is not None:
        return f"{100 * row['keep_ratio']:g} %"
    if row["keeps_all"] or row["slots"] is None or row["slots"] == row["prompt"]:
        return "all"
    return f"({100 * row['slots'] / row['prompt']:.0f} %)"


# ---- what the rows say ----

def split(rows: list[dict]) -> tuple[dict | None, list[dict]]:
    """Return the full cache's row, if there is one, and the others."""
    full = next((row for row in rows if row["method"] == "full"), None)
    return full, [row for row in rows if row["method"] != "full"]


def judges(full: dict, task: str) -> bool:
    """Return whether a task tells methods apart: the full cache answers at least half of its questions."""
    return full[f"{task}_aware"] >= 0.5


def unfit(rows: list[dict]) -> str:
    """Return a line for each task at which the full cache itself fails; "" if there is none."""
    full, _ = split(rows)
    return "\n".join(f"The full cache answers {full[f'{task}_aware']:.2f} of {task.replace('_', '-')}: "
                     "this task cannot judge this model."
                     for task in TASKS if full and not judges(full, task))


def findings(rows: list[dict]) -> str:
    """Return sentences on rows of one budget: what survived aware, what survived agnostic, what it cost.

    "" if there is no row of the full cache, or no other.
    """
    full, others = split(rows)
    if not full or not others:
        return ""
    tasks, said = [task for task in TASKS if judges(full, task)], []
    most = f"at most {NEARLY:g} of the full cache's accuracy, mean over the tasks"
    for setting in SETTINGS if tasks else ():
        mean = {row["method"]: sum(row[f"{task}_{setting}"] for task in tasks) / len(tasks) for row in rows}
        near = [row["method"] for row in others if mean[row["method"]] >= mean["full"] - NEARLY]
        said.append(f"{setting.title()}, {len(near) or 'none'} of {len(others)} methods "
                    f"{'lose' if len(near) > 1 else 'loses'} {most if setting == 'aware' else 'no more'}")
        said[-1] += f": {', '.join(near)}" if near else ""
        lost = [row for row in others if row["method"] not in near]
    if tasks and lost:  # these are of the last setting, agnostic
        best = max(lost, key=lambda row: row["needle_agnostic"])
        said[-1] += f"; of the others {best['method']} finds most needles, {best['needle_agnostic']:.2f}"

    least = min(others, key=lambda row: row["live_16"])
    closest, farthest = (end(others, key=lambda row: row["kl"]) for end in (min, max))
    said.append(f"Cost: {least['method']} holds least, {100 * least['live_16'] / full['live_16']:.0f} % of a "
                f"full 16-bit cache; predictions move least with {closest['method']} (KL "
                f"{max(closest['kl'], 0):.3f}) and most with {farthest['method']} ({farthest['kl']:.3f})")
    return "\n".join(fill(f"{sentence}.", 100) for sentence in said)


# ---- what an addition changes ----

MEASURES = {setting: [f"{task}_{setting}" for task in TASKS] for setting in SETTINGS} | {
    "nll": ["nll"], "KL": ["kl"], "L1": ["l1_alone"]}


def on_top(base: dict, rows: list[dict]) -> list[dict]:
    """Return the rows of base's method with one addition, at the same budget and length."""
    return [row for row in rows if row["method"].rpartition("+")[0] == base["method"]
            and (row["keep_ratio"], row["tokens"]) == (base["keep_ratio"], base["tokens"])]


def additions_table(rows: list[dict]) -> str:
    """Return what each addition changes, paired by document, under the means without it; "" if none."""
    under_number = " " * len(" ±0.000")  # where a mean and a name have no standard error
    lines = [["changes by additions", "keep", *(name + under_number for name in MEASURES)]]
    for base in rows:
        more = on_top(base, rows)
        means = (fmean(x for key in keys for x in base["each"][key]) for keys in MEASURES.values())
        if more:
            lines += [[""] * len(lines[0]),
                      [base["method"], budget(base), *(f"{mean:.3f}{under_number}" for mean in means)]]
        for row in more:
            changes = (paired(row, base, keys) for keys in MEASURES.values())
            cells = [f"{mean:+.3f} ±{error:.3f}" for mean, error in changes]
            lines.append([row["method"], budget(row), *cells])
    return "\n" + text_table(lines, SHORT[:2]) if len(lines) > 1 else ""
