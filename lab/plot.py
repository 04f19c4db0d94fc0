"""Draw figures.

A method has the same colour, marker and dash in all of them. Families of similar grey have
different markers.
"""

from io import BytesIO
from itertools import groupby
from pathlib import Path
import re
from textwrap import fill
from zlib import crc32

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator
import numpy as np

from lab.command_line import replace
from lab.kept import held

# metadata of our files; only such files are replaced
TITLE = "Figure of python -m nanollm"
FACT = "#b03a00"  # colour of marked tokens
MOST = 10  # methods in a figure; more cannot be told apart

# a family's colour and marker
FAMILIES = {
    "full": ("#000000", "."),
    "snap_kv": ("#0072b2", "o"),
    "chunk_kv": ("#d55e00", "D"),
    "kvzip": ("#6a3d9a", "d"),
    "scissorhands": ("#117733", "v"),
    "kv_reviver": ("#882255", "P"),
    "h2o": ("#e69f00", "X"),
    "full@": ("#00a087", "*"),  # the full cache in few bits
    "question_gates": ("#c77cba", "p"),
    "streaming_llm": ("#888888", "h"),
    "ada_kv": ("#56b4e9", "s"),
    "pyramid_kv": ("#1a3a6e", "^"),
    "random": ("#bbbbbb", ">"),
    "key_diff": ("#55601c", "2"),
    "compactor": ("#f0027f", "4"),
}
OTHERS = (
    ("#a05a2c", "8"),
    ("#e31a1c", "H"),
    ("#3f7f93", "1"),
)

# A variant has its family's colour and marker. The rest of its name selects the dash, "--" by
# default.
DASHES = {
    "": "-",
    "chunk": (0, (8, 2)),
    "mean": ":",
    "recent": "-.",
    "no pool": (0, (1, 1)),
    "2": "-",
    "4": ":",
    "@4": ":",
}


def style(name: str) -> dict:
    """Return a method's color, marker and linestyle by its name: plot(**style("h2o")).

    "ada_kv+critical" and "ada_kv@4" look like "ada_kv" except for their dash. A hash of an unknown
    name selects its look.
    """
    base, _, addition = name.partition("+")
    family = family_of(name)
    color, marker = FAMILIES.get(family) or OTHERS[crc32(base.encode()) % len(OTHERS)]
    variant = addition or base.removeprefix(family).strip("_")
    return dict(color=color, marker=marker, linestyle=DASHES.get(variant, "--"))


def family_of(name: str) -> str:
    """Return the member of FAMILIES that a name begins with, or else its part before a +."""
    if name.startswith("full@"):
        return "full@"
    base = name.replace("@", "_").partition("+")[0]
    return next((x for x in FAMILIES if f"{base}_".startswith(f"{x}_")), base)


def save(figure, file: Path):
    """Write a figure, with a title in its metadata that `is_ours` recognises."""
    data = BytesIO()
    kind = file.suffix[1:] or "png"
    figure.savefig(data, format=kind, dpi=110, metadata={"Title": TITLE})
    plt.close(figure)
    replace(file, data.getvalue())


def is_ours(data: bytes) -> bool:
    """Return whether data is a PNG, PDF or SVG file that `save` wrote."""
    marks = f"Title\0{TITLE}", f"({TITLE})", f"<dc:title>{TITLE}</dc:title>"
    return any(mark.encode() in data for mark in marks)


# ---- the comparison ----


def comparison(rows: list[dict], file: Path):
    """Draw both accuracies and KL over bytes. All rows are of documents of one length."""
    labels = dict(
        agnostic="accuracy, question after the compression",
        aware="accuracy, question in the prompt",
        kl="KL(full ‖ compressed) per token, nats",
    )
    model = Path(rows[0].get("model", "")).name
    size = "{documents} documents of {tokens} tokens a task".format(**rows[0])
    panels(rows, labels, f"{model}, {size}" if model else size, file)


def questions(rows: list[dict], title: str, file: Path):
    """Draw the mean scores of question_table.points over bytes, by setting."""
    labels = dict(
        agnostic="mean score, question after the compression",
        aware="mean score, question in the prompt",
    )
    settings = {key for row in rows for key in row}
    some = {key: label for key, label in labels.items() if key in settings}
    panels(rows, some, title, file)


def panels(rows: list[dict], labels: dict[str, str], title: str, file: Path):
    """Draw row[key] over bytes, a panel for each key of `labels`.

    The figure names the methods beyond MOST, which it does not draw.
    """
    shown, left_out = drawn([row["method"] for row in rows])
    size = (17, 5.5) if len(labels) > 1 else (8.5, 5.5)
    figure, axes = plt.subplots(1, len(labels), figsize=size, squeeze=False)
    figure.set_layout_engine("constrained")
    for axis, (key, label) in zip(axes[0], labels.items()):
        points = {name: [] for name in ("full", *shown)}
        for row in sorted(rows, key=lambda row: row["live_16"]):
            if key in row and row["method"] in points:
                points[row["method"]].append(row)
        over_bytes(axis, points, key, label)
    figure.suptitle(f"{title}; bars: ± 1 standard error of scores")
    if left_out:
        words = fill("Not drawn: " + ", ".join(left_out), 14 * round(size[0]))
        figure.supxlabel(words, fontsize=8, color="0.4")
    save(figure, file)


def drawn(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the names to draw, without the full cache, and those left out.

    Families that are not in FAMILIES come first, such as your own, then the others in its order,
    then their variants.
    """

    def rank(name: str):
        family = family_of(name)
        variant = style(name)["linestyle"] != "-"
        return family in FAMILIES, variant, [*FAMILIES, family].index(family), name

    ranked = sorted({*names} - {"full"}, key=rank)
    return ranked[:MOST], ranked[MOST:]


def over_bytes(axis, points: dict, key: str, label: str):
    """Draw row[key] of each method's rows over its cache's KiB, and its name at the right edge.

    Later markers are smaller, so equal points stay visible. Names are in the order of their lines'
    ends. A horizontal line goes through the full cache's point.
    """
    axis.set_xscale("log", base=2)
    if key == "kl":
        axis.set_yscale("symlog", linthresh=0.01)
        axis.yaxis.set_major_formatter("{x:g}")
        largest = max([0, *(row["kl"] for mine in points.values() for row in mine)])
        axis.set_ylim(-0.001, 2 * largest + 0.01)
    else:
        axis.set_ylim(-0.02, 1.05)
    ends = []
    for i, (name, mine) in enumerate(points.items()):
        if not mine:
            continue
        x = [row["live_16"] / 1024 for row in mine]
        y = [row[key] for row in mine]
        look = style(name) | dict(markersize=11 - 7 * i / len(points), linewidth=1.2)
        axis.errorbar(x, y, [error_of(row, key) for row in mine], label=name, **look)
        if name == "full":
            axis.axhline(*y, color="black")
        ends.append((y[-1], x[-1], name))
    for i, (y, x, name) in enumerate(sorted(ends)):
        axis.annotate(
            name,
            (x, y),
            xytext=(1.03, (i + 0.5) / len(ends)),
            textcoords="axes fraction",
            va="center",
            color=style(name)["color"],
            arrowprops=dict(arrowstyle="-", alpha=0.2),
        )
    axis.set(xlabel="KiB of a text's cache, with 16-bit numbers", ylabel=label)
    axis.xaxis.set_major_locator(LogLocator(2, numticks=6))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)


def error_of(row: dict, key: str) -> float:
    """Return the standard error of a mean over tasks; 0 if a row has none."""
    errors = [x for name, x in row.items() if name.endswith(f"_{key}_se")]
    return sum(x * x for x in errors) ** 0.5 / max(len(errors), 1)


# ---- a text, heads ----


def kept(caches: list, tokens: int) -> np.ndarray:
    """Return which of row 0's first `tokens` tokens each head holds, (L, H, tokens) of bool."""
    return held(caches, tokens)[0].cpu().numpy()


def text(
    pieces: list[str],
    panels: dict,
    marked=None,
    low: str = "dropped",
    high: str = "kept by every head",
    mark: str = "fact",
    columns: int = 1,
    width: int = 110,
):
    """Draw a text once per panel: larger weights have a darker ground; at 0 text is grey or red.

    pieces: the tokens' strings; line breaks and runs of spaces are drawn as one space. panels:
    title → weights (T,) in [0, 1]. marked: (T,) bool, the underlined tokens. low, high, mark: words
    in the key below the text. width: characters per line.
    """
    pieces = [re.sub(r"\s+", " ", piece) for piece in pieces]
    marked = np.zeros(len(pieces)) if marked is None else marked
    places = []  # column and line of each character
    x = 0
    y = 0
    for word in re.findall(r" |[^ ]+", "".join(pieces)):
        if word != " " and x + len(word) > width:
            x = 0
            y += 1
        places += [(x + i, y) for i in range(len(word))]
        x += len(word)
    panel_width = width + 4
    panel_height = y + 3
    across = columns * panel_width - 4
    down = -(-len(panels) // columns) * panel_height
    inch = 1100 // across / 100  # width of a character; whole pixels at 100 dpi
    size = 72 * inch / 0.602  # DejaVu Sans Mono is 0.602 em wide
    figure = plt.figure(figsize=(across * inch, 2.1 * inch * (down + 1.2)))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, across), ylim=(down + 1, -0.2))
    axis.axis("off")

    def write(x, y, words, weight, marked=False):
        n = len(words)
        if weight > 0.01:
            ground = plt.cm.Blues(0.7 * weight)
            axis.add_patch(plt.Rectangle((x, y), n, 1, color=ground, linewidth=0))
        if marked:
            axis.hlines(y + 0.95, x, x + n, color=FACT, linewidth=0.2 * size)
        axis.text(
            x,
            y + 0.5,
            words,
            va="center_baseline",
            family="DejaVu Sans Mono",
            fontsize=size,
            color="black" if weight else FACT if marked else "0.45",
            weight="bold" if marked and weight else "normal",
            parse_math=False,
        )

    for i, (title, weights) in enumerate(panels.items()):
        left = i % columns * panel_width
        top = i // columns * panel_height
        axis.text(left, top + 0.5, title, va="center", fontsize=max(1.1 * size, 9))
        each = iter(places)
        for piece, *look in zip(pieces, weights, marked, strict=True):
            for y, part in groupby(zip(piece, each), lambda item: item[1][1]):
                letters, where = zip(*part)
                write(left + where[0][0], top + 1.2 + y, "".join(letters), *look)
    x = 0
    for word, weight in ((low, 0), ("  ", 0.25), ("  ", 0.5), ("  ", 0.75), (high, 1)):
        write(x, down, word, weight)
        x += len(word) + 1
    if any(marked):
        write(x + 3, down, mark, weight=1e-9, marked=True)
    return figure


def heads(
    axis,
    values,
    title: str,
    form: str = "{:.2f}",
    diverging: bool = False,
    most: float | None = None,
):
    """Write values (L, heads) as a table; a larger number has a darker ground.

    most: the value of the darkest ground. diverging: purple below 0, orange above.
    """
    values = np.asarray(values)
    # keeps the ground light enough for black digits
    limit = 1.4 * (most or np.abs(values).max())
    axis.imshow(
        values,
        cmap="PuOr_r" if diverging else "Blues",
        vmin=-limit if diverging else 0,
        vmax=limit,
    )
    for (layer, head), value in np.ndenumerate(values):
        axis.text(head, layer, form.format(value), ha="center", va="center", fontsize=8)
    axis.set(
        title=title,
        xlabel="head",
        ylabel="layer",
        xticks=range(values.shape[1]),
        yticks=range(values.shape[0]),
    )
