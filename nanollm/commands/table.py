"""Tables of python -m nanollm: the rows, the changes by additions, and sentences under the short table."""
from statistics import fmean
from textwrap import fill

from nanollm.commands.text_table import text_table
from nanollm.measure.benchmark import TASKS, paired

# The short table: one method of each family, all at one keep ratio.
SHOWN = ("full", "snap_kv", "snap_kv+critical", "chunk_kv", "scissorhands", "kv_reviver_shrunk", "h2o",
         "streaming_llm", "random", "worst_query", "kvzip", "quantized_2")
TERMS = """\
keep      keep ratio: the budget of each head, as a percentage of the prompt's tokens; "all" if every token
          stays; in brackets the percentage that a method without a budget kept
KiB       size of one text's cache after the last token, with 16-bit numbers; quantized entries as stored
needle    task: four facts are hidden in real text, and the question asks for one of them
pairs     task: key-value retrieval; the prompt lists 16 pairs, and the question asks for one value
few-shot  task: the prompt lists labelled lines, and the answer is the label of a new line
aware     accuracy if the question is part of the prompt that is compressed
agnostic  accuracy if the question comes after the compression
KL        KL divergence between the full cache's predictions of real text and these, in nats per token"""
MORE_TERMS = """\
perplexity of real text after a compressed prompt
L1        change of a head's output by the compression of its own layer alone: the sum of absolute
          differences, mean over heads and tokens
tokens/s  decoding speed of all texts together"""
GPU_TERMS = "GPU, KiB  size of one text's cache after the compression, as the GPU's allocator counts it"
NEARLY = 0.1  # a method that loses at most this much mean accuracy counts as nearly lossless

# ---- the keys of a row that tables and figures show ----

SETTINGS = "aware", "agnostic"
ACCURACIES = tuple(f"{task}_{setting}" for task in TASKS for setting in SETTINGS)
EACH = {*ACCURACIES, "nll", "kl", "l1_alone"}  # the keys of row["each"], lists with a value per document
KEYS = {*ACCURACIES, *SETTINGS, "method", "keep_ratio", "tokens", "prompt", "live_16", "kl", "perplexity",
        "l1_alone", "tokens_per_s", "device", "slots", "slots_end", "keeps_all", "evicts"}


def row_of(name: str, keep_ratio: float | None, T: int, settings: dict, measured: dict) -> dict:
    """Return a row: method, settings, measurements (bytes per text), and means over the tasks."""
    row = dict(method=name, keep_ratio=keep_ratio, tokens=T) | settings | measured
    for key in ("live", "live_16", "allocated", "peak", "device"):
        row[key] = row[key] and row[key] // len(row["each"]["kl"])
    for setting in SETTINGS:
        row[setting] = sum(row[f"{task}_{setting}"] for task in TASKS) / len(TASKS)
    return row


def label(name: str, keep_ratio: float | None) -> str:
    """Return "h2o at 25 %"; only the name if there is no budget."""
    return name if keep_ratio is None else f"{name} at {100 * keep_ratio:g} %"


# ---- rows as text; a task's column holds both accuracies, aware and agnostic ----

SHORT = (26, 6, 6, 14, 14, 14, 6)              # least widths of the columns, from method to KL
LONG = (26, 6, 6, 14, 14, 14, 10, 5, 6, 8, 8)  # from method to the GPU's KiB


def header(T: int, documents: int, seed: int, short: bool = False, gpu: bool = False) -> str:
    """Return the lines above the rows: documents, largest standard error, names of the columns."""
    error = 0.5 / (documents - 1) ** 0.5  # largest if half of the answers are right
    above = ["", "", "16-bit", *(task.replace("_", "-") for task in TASKS)]
    names = ["method", "keep", "KiB", *["aware agnostic"] * len(TASKS)]
    above += [""] if short else ["", "", "", "batch"] + [""] * gpu
    names += ["KL"] if short else ["perplexity", "KL", "L1", "tokens/s"] + ["GPU, KiB"] * gpu
    return (f"\n{documents} documents per task, {T} tokens each; seed {seed}; standard error of an accuracy: "
            f"at most {error:.2f}\n\n" + text_table([above, names], SHORT if short else LONG))


def terms(short: bool = False, gpu: bool = False) -> str:
    """Return a line on each column of the table."""
    return "\n".join([TERMS, *([] if short else [MORE_TERMS]), *([GPU_TERMS] if gpu else [])])


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
    """Return the keep ratio of a row: "25 %"; without a budget "all" or, in brackets, how much was kept."""
    if row["keep_ratio"] is not None:
        return f"{100 * row['keep_ratio']:g} %"
    if row["keeps_all"] or row["slots"] is None or row["slots"] == row["prompt"]:
        return "all"
    return f"({100 * row['slots'] / row['prompt']:.0f} %)"


# ---- sentences about the rows ----

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
    return "\n".join(f"The full cache answers only {full[f'{task}_aware']:.2f} of {task.replace('_', '-')}: "
                     "with this model, the task cannot compare methods."
                     for task in TASKS if full and not judges(full, task))


def findings(rows: list[dict]) -> str:
    """Return sentences on rows of one keep ratio: which methods keep the answers, and the bytes and KL.

    "" unless there are a row of the full cache and another row.
    """
    full, others = split(rows)
    if not full or not others:
        return ""
    tasks, paragraphs = [task for task in TASKS if judges(full, task)], []
    within = f"within {NEARLY:g} of the full cache's accuracy (mean over the tasks)"
    for setting in SETTINGS if tasks else ():
        mean = {row["method"]: sum(row[f"{task}_{setting}"] for task in tasks) / len(tasks) for row in rows}
        near = [row["method"] for row in others if mean[row["method"]] >= mean["full"] - NEARLY]
        paragraphs.append(f"{setting.title()}: {len(near) or 'none'} of {len(others)} methods "
                          f"{'stay' if len(near) > 1 else 'stays'} {within}"
                          + (f": {', '.join(near)}." if near else "."))
        lossy = [row for row in others if row["method"] not in near]
    if tasks and lossy:  # of the last setting, agnostic
        best = max(lossy, key=lambda row: row["needle_agnostic"])
        paragraphs[-1] += (f" Among the other methods, {best['method']} finds the most needles: "
                           f"{best['needle_agnostic']:.2f}.")

    least = min(others, key=lambda row: row["live_16"])
    closest, farthest = (end(others, key=lambda row: row["kl"]) for end in (min, max))
    paragraphs.append(f"Cost: {least['method']} holds the fewest bytes, "
                      f"{100 * least['live_16'] / full['live_16']:.0f} % of a full 16-bit "
                      f"cache. The predictions change least with {closest['method']} "
                      f"(KL {max(closest['kl'], 0):.3f}) "
                      f"and most with {farthest['method']} (KL {farthest['kl']:.3f}).")
    return "\n".join(fill(paragraph, 100) for paragraph in paragraphs)


# ---- the changes by additions ----

ADDITIONS_TERMS = """\
Changes by additions: the means of each method, then the change by each addition, ± one standard error,
paired by document. aware and agnostic: accuracy, mean over the tasks. nll: −log p of the true next token.
More is better for aware and agnostic; less is better for nll, KL and L1."""

MEASURES = {setting: [f"{task}_{setting}" for task in TASKS] for setting in SETTINGS} | {
    "nll": ["nll"], "KL": ["kl"], "L1": ["l1_alone"]}


def on_top(base: dict, rows: list[dict]) -> list[dict]:
    """Return the rows of base's method with one more addition, at the same keep ratio and length."""
    return [row for row in rows if row["method"].rpartition("+")[0] == base["method"]
            and (row["keep_ratio"], row["tokens"]) == (base["keep_ratio"], base["tokens"])]


def additions_table(rows: list[dict]) -> str:
    """Return a table of each method's means and its changes by additions; "" if no row has an addition."""
    under_number = " " * len(" ±0.000")  # as wide as a standard error, which means and names lack
    lines = [["method", "keep", *(name + under_number for name in MEASURES)]]
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
    return f"\n{ADDITIONS_TERMS}\n\n" + text_table(lines, SHORT[:2]) if len(lines) > 1 else ""
