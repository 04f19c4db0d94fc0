"""The tables of python -m nanollm: rows, what additions change, and sentences on the short table."""
from numbers import Real
from textwrap import fill

from nanollm.measure.benchmark import TASKS, paired

# The short table: a row a family, all at one budget.
SHOWN = ("full", "snap_kv", "snap_kv+critical", "chunk_kv", "scissorhands", "kv_reviver_shrunk", "h2o",
         "streaming_llm", "random", "kvzip", "quantized_2")
TERMS = """\
budget  the share of the prompt's tokens that each head may keep; "all": the method keeps every token;
        in brackets: what a method without a budget kept
aware   the question is part of the prompt that is compressed, so attention knows what will be asked
blind   the prompt is compressed first and the question comes afterwards
needle  one of 4 facts hidden in real text is asked for; recall: one of 16 pairs; few-shot: a line's label
KL      how far predictions of real text move from the full cache's, in nats
KiB     what the cache of a text holds if the model's numbers have 16 bits; fewer bits count as stored"""
NEARLY = 0.1  # of the answers, mean over the tasks: who loses no more answers nearly all

SETTINGS = "aware", "blind"
ACCURACIES = tuple(f"{task}_{setting}" for task in TASKS for setting in SETTINGS)
# what is read of a row, and of its "each"
HOLDS = dict(method=str, each=dict, l1_alone=list[list[Real]], keeps_all=bool, evicts=bool) | dict.fromkeys(
    (*ACCURACIES, *SETTINGS, "tokens", "prompt", "live_16", "kl", "perplexity", "tokens_per_s"), Real)
HOLDS |= dict.fromkeys(("fraction", "device", "slots", "slots_end"), Real | None)
EACH = dict.fromkeys((*ACCURACIES, "nll", "kl", "l1_alone"), list[Real])
FIRST = ("{:<27}", "{:>7}", "{:>7}", "{:>6}", "{:>6}", "{:>8}", "{:>6}", "{:>8}", "{:>6}")  # few-shot, blind
LONG = (*FIRST, "{:>8}", "{:>7}", "{:>6}", "{:>9}")  # perpl., KL, L1, tokens/s
SHORT = (*FIRST, "{:>8}")                            # KL


def line(forms: tuple[str, ...], *cells) -> str:
    return "".join(form.format(cell) for form, cell in zip(forms, cells, strict=True))


def header(T: int, documents: int, seed: int, short: bool = False, gpu: bool = False) -> str:
    """What stands above the rows: how many documents, how sure an accuracy is, the names of the columns.

    gpu: beside the bytes that caches know of, those that the GPU's allocator has given out for them.
    """
    error = 0.5 / (documents - 1) ** 0.5  # that of as many ones as zeros, the largest
    needle, *others = (task.replace("_", "-") for task in TASKS)
    above = f"{'':<34}{'16-bit':>7}{needle:>12}" + "".join(f"{task:>14}" for task in others)
    names = "method", "budget", "KiB", *SETTINGS * len(TASKS)

    if short:
        below = line(SHORT, *names, "KL")
    else:
        above += f"{'':>21}{'batch':>9}"
        below = line(LONG, *names, "perpl.", "KL", "L1", "tokens/s") + "   GPU, KiB" * gpu
    return (f"\n{documents} documents per task, {T} tokens each; seed {seed}; "
            f"standard error of an accuracy: at most {error:.2f}\n\n{above}\n{below}")


def show(row: dict, short: bool = False) -> str:
    """A row as a line of the table."""
    accuracies = (f"{row[key]:.2f}" for key in ACCURACIES)
    first = row["method"], budget(row), f"{row['live_16'] / 1024:.0f}", *accuracies
    kl = f"{max(row['kl'], 0):.3f}"
    if short:
        return line(SHORT, *first, kl)
    perplexity = f"{row['perplexity']:.2f}" if row["perplexity"] < 1e4 else f"{row['perplexity']:.1e}"
    l1, speed = f"{mean_l1(row):.2f}", f"{row['tokens_per_s']:.0f}"
    gpu = "" if row["device"] is None else f"{row['device'] / 1024:>11.0f}"
    return line(LONG, *first, perplexity, kl, l1, speed) + gpu


def budget(row: dict) -> str:
    """The budget asked for. Of a method that has none, whether it kept all, or how much in brackets."""
    if row["fraction"] is not None:
        return f"{100 * row['fraction']:g} %"
    if row["keeps_all"] or row["slots"] is None or row["slots"] == row["prompt"]:
        return "all"
    return f"({100 * row['slots'] / row['prompt']:.0f} %)"


def mean_l1(row: dict) -> float:
    """Over layers and heads, each layer alone."""
    return sum(map(sum, row["l1_alone"])) / sum(map(len, row["l1_alone"]))


def row_of(name: str, fraction: float | None, T: int, settings: dict, measured: dict) -> dict:
    """A row: what was run, what `Benchmark.run` measured, bytes now of one text, means over the tasks."""
    row = dict(method=name, fraction=fraction, tokens=T) | settings | measured
    for key in ("live", "live_16", "allocated", "peak", "device"):
        row[key] = row[key] and row[key] // len(row["each"]["kl"])
    for setting in SETTINGS:
        row[setting] = sum(row[f"{task}_{setting}"] for task in TASKS) / len(TASKS)
    return row


def label(name: str, fraction: float | None) -> str:
    return name if fraction is None else f"{name} at {100 * fraction:g} %"


# ---- what the rows say ---

def findings(rows: list[dict]) -> str:
    """Three sentences on rows of one budget: what survived aware, what survived blind, what it cost; "" if
    there is no row of the full cache, or no other.
    """
    full = next((row for row in rows if row["method"] == "full"), None)
    others = [row for row in rows if row["method"] != "full"]
    if not full or not others:
        return ""

    tasks = [task for task in TASKS if judges(full, task)]
    cost = costs(full, others)
    if not tasks:
        return cost
    mean = lambda row, setting: sum(row[f"{task}_{setting}"] for task in tasks) / len(tasks)
    near = {key: [row["method"] for row in others if mean(row, key) >= mean(full, key) - NEARLY]
            for key in SETTINGS}
    lost = [row for row in others if row["method"] not in near["blind"]]
    best = max(lost, key=lambda row: row["needle_blind"], default=None)
    aware = (f"Aware, {counted(near['aware'], len(others))} at most {NEARLY:g} of the full cache's accuracy, "
             f"mean over the tasks{named(near['aware'])}.")
    blind = f"Blind, {counted(near['blind'], len(others))} no more{named(near['blind'])}"
    if best:
        blind += f"; of the others {best['method']} finds most needles, {best['needle_blind']:.2f}"
    return "\n".join((fill(aware, 100), fill(f"{blind}.", 100), cost))


def costs(full: dict, others: list[dict]) -> str:
    """A sentence on the fewest bytes, and on where predictions moved least and most."""
    least = min(others, key=lambda row: row["live_16"])
    closest, farthest = (pick(others, key=lambda row: row["kl"]) for pick in (min, max))
    share = 100 * least["live_16"] / full["live_16"]
    return fill(f"Cost: {least['method']} holds least, {share:.0f} % of a full 16-bit cache; predictions "
                f"move least with {closest['method']} (KL {max(closest['kl'], 0):.3f}) and most with "
                f"{farthest['method']} ({farthest['kl']:.3f}).", 100)


def judges(full: dict, task: str) -> bool:
    """Whether a task tells methods apart: the full cache does it, more often than not."""
    return full[f"{task}_aware"] >= 0.5


def unfit(rows: list[dict]) -> str:
    """A line for each task at which the full cache itself fails; "" if there is none."""
    full = next((row for row in rows if row["method"] == "full"), None)
    failed = [task for task in TASKS if full and not judges(full, task)]
    return "\n".join(f"The full cache answers {full[f'{task}_aware']:.2f} of {task.replace('_', '-')}: "
                     "this task cannot judge this model." for task in failed)


def counted(names: list[str], of: int) -> str:
    return f"{len(names) or 'none'} of {of} methods lose{'s' * (len(names) < 2)}"


def named(names: list[str]) -> str:
    return f": {', '.join(names)}" if names else ""


# ---- what an addition changes ---

MEASURES = {setting: [f"{task}_{setting}" for task in TASKS] for setting in SETTINGS} | {
    "nll": ["nll"], "KL": ["kl"], "L1": ["l1_alone"]}


def additions_table(rows: list[dict]) -> str:
    """What each addition changes, paired by document, under the means of the method without it; "" if there
    is none.
    """
    lines = []
    for base in rows:
        more = [row for row in rows if adds_to(row, base)]
        if not more:
            continue
        each = ([x for key in keys for x in base["each"][key]] for keys in MEASURES.values())
        lines += ["", changes(base, (f"{sum(x) / len(x):9.3f}" for x in each))]
        for row in more:
            lines.append(changes(row, ("   {:+.3f} ±{:.3f}".format(*paired(row, base, keys))
                                       for keys in MEASURES.values())))

    names = "".join(f"{name:>9}{'':7}" for name in MEASURES).rstrip()
    return "\n".join((f"\n{'changes by additions':<27}{'budget':>7}{names}", *lines)) if lines else ""


def adds_to(row: dict, base: dict) -> bool:
    """Whether this row is of the other's method with one addition on top, at the same budget and length."""
    same = (row["fraction"], row["tokens"]) == (base["fraction"], base["tokens"])
    return same and row["method"].rpartition("+")[0] == base["method"]


def changes(row: dict, cells) -> str:
    cells = "".join(f"{cell:<16}" for cell in cells).rstrip()
    return f"{row['method']:<27}{100 * row['fraction']:>5g} %{cells}"
