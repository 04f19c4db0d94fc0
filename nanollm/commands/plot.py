"""Figures. One method, one colour, marker and dash, in every figure, told apart also in grey."""
from io import BytesIO
from pathlib import Path
import re
from zlib import crc32

import matplotlib.pyplot as plt
from matplotlib.colors import PowerNorm
import numpy as np

from nanollm.commands.shell import replace
from nanollm.measure.evaluate import held

TITLE = "Figure of python -m nanollm"  # written into the file, so that no other is taken for one of ours
MOST = 8                               # lines that can be told apart

# A family's colour and marker. In grey neighbours differ, too; where two are alike, their markers are not.
FAMILIES = {
    "full": ("#000000", "."), "snap_kv": ("#0072b2", "o"), "chunk_kv": ("#d55e00", "D"),
    "kvzip": ("#6a3d9a", "d"),
    "scissorhands": ("#117733", "v"), "kv_reviver": ("#882255", "P"), "h2o": ("#e69f00", "X"),
    "quantized": ("#00a087", "*"), "duo_attention": ("#c77cba", "p"), "streaming_llm": ("#888888", "h"),
    "ada_kv": ("#56b4e9", "s"), "pyramid_kv": ("#1a3a6e", "^"), "cam": ("#b0a000", "<"),
    "random": ("#bbbbbb", ">")}
OTHERS = (("#a05a2c", "8"), ("#e31a1c", "H"), ("#3f7f93", "1"), ("#55601c", "2"),
          ("#f0027f", "4"))

# A variant keeps its family's colour and marker; its dash is its own, by what its name adds.
DASHES = {"critical": "--", "critical_code": (0, (5, 1, 1, 1, 1, 1)), "theta": "-.", "residual": ":",
          "chunk": (0, (8, 2)), "semantic": (0, (3, 1, 1, 1)), "reuse": "--", "weight": "--", "shrunk": "--",
          "mean": ":", "absolute": "--", "fast": "--", "recent": "-.",
          "no pool": (0, (1, 1)), "2": "-", "3": "--", "4": ":"}


def family_of(name: str) -> str | None:
    """The family of a method's name: "chunk_kv" of "chunk_kv_reuse", "ada_kv" of "ada_kv+critical"."""
    base = name.partition("+")[0]
    return next((family for family in FAMILIES if base == family or base.startswith(f"{family}_")), None)


def style(name: str) -> dict:
    """How a method is drawn, by its command-line name: color, marker, linestyle, as in plot(**style("h2o")).

    "ada_kv+critical" looks like "ada_kv" but for its dash. An unknown name gets the look of its spelling.
    """
    base, _, addition = name.partition("+")
    family = family_of(name)
    color, marker = FAMILIES[family] if family else OTHERS[crc32(base.encode()) % len(OTHERS)]

    variant = addition or base.removeprefix(family or base).strip("_")
    dashes = [*DASHES.values()]
    dash = DASHES.get(variant, dashes[crc32(variant.encode()) % len(dashes)]) if variant else "-"
    return dict(color=color, marker=marker, linestyle=dash)


def comparison(rows: list[dict], file: Path):
    """The figure of a comparison, at most eight methods and the full cache, each named where its line ends.

    Of one budget: each method's accuracy, mean over the tasks, aware and blind, and its KL over its bytes. Of
    several: all three over the bytes.
    """
    if not rows:
        raise ValueError("there are no rows to draw")
    full = next((row for row in rows if row["method"] == "full"), None)
    points = {name: sorted((row for row in rows if row["method"] == name), key=lambda row: row["live_16"])
              for name in drawn([row["method"] for row in rows])}

    if all(len(mine) == 1 for mine in points.values()):
        figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
        slopes(axes[0], points, full)
    else:
        figure, axes = plt.subplots(1, 3, figsize=(17, 5), layout="constrained")
        over_bytes(axes[0], points, full, "aware", "accuracy, question in the prompt")
        over_bytes(axes[1], points, full, "blind", "accuracy, question after compression")
    over_bytes(axes[-1], points, full, "kl", "KL(full ‖ compressed) per token, nats")

    save(figure, file)


def save(figure, file: Path, title: str = TITLE):
    """Write a figure under a title that marks it as ours, so that a later run may replace it."""
    drawn = BytesIO()
    figure.savefig(drawn, format=file.suffix[1:] or "png", dpi=110, metadata={"Title": title})
    plt.close(figure)
    replace(file, drawn.getvalue())


def is_ours(data: bytes, title: str = TITLE) -> bool:
    """Whether a file holds what `save` wrote: a figure of which `title` is the whole title."""
    marks = {b"\x89PNG": b"%ctEXtTitle\0%b" % (6 + len(title), title.encode()),
             b"%PDF": f"({title})".encode(), b"<?xml": f"<dc:title>{title}</dc:title>".encode()}
    return any(data.startswith(kind) and mark in data for kind, mark in marks.items())


def drawn(names: list[str]) -> list[str]:
    """Which methods a figure shows: all but the full cache; of more than eight a family's own first."""
    names = [name for name in dict.fromkeys(names) if name != "full"]
    if len(names) <= MOST:
        return names
    families = [*FAMILIES]

    def order(name):
        family = family_of(name)
        return style(name)["linestyle"] != "-", families.index(family) if family else len(families)

    first = sorted(names, key=order)[:MOST]
    return [name for name in names if name in first]


def slopes(axis, points: dict, full: dict | None):
    """A line a method from its accuracy aware to that blind."""
    ends = {name: row for name, (row,) in points.items()} | ({"full": full} if full else {})
    for name, row in ends.items():
        axis.plot([0, 1], [row["aware"], row["blind"]], label=name, markersize=7, **style(name))
    axis.set(xlim=(-0.08, 1.08), ylim=(-0.02, 1.05), xticks=[0, 1], ylabel="accuracy, mean over the tasks",
             xticklabels=["aware:\nquestion in the prompt", "blind:\nquestion after compression"])
    axis.grid(alpha=0.3)
    name_ends(axis, {name: (1, row["blind"]) for name, row in ends.items()})


def over_bytes(axis, points: dict, full: dict | None, key: str, label: str):
    """A line a method over the bytes of its cache; the full cache's value is a level."""
    kib = {name: [row["live_16"] / 1024 for row in mine] for name, mine in points.items()}
    for name, mine in points.items():
        axis.plot(kib[name], [row[key] for row in mine], label=name, markersize=7, **style(name))
    if full:
        axis.axhline(full[key], color="black", linewidth=1)
        axis.text(0.02, full[key], "full cache", transform=axis.get_yaxis_transform(), va="bottom")
    axis.set_xlabel("cache after the text, KiB per sequence (numbers of 16 bits)")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)

    # octaves around all points; a logarithmic axis has no place for a cache of no bytes
    live = [x for mine in kib.values() for x in mine] or [full["live_16"] / 1024]
    if min(live) > 0:
        axis.set_xscale("log", base=2)
        low, high = np.floor(np.log2(min(live)) + 0.01), np.ceil(np.log2(max(live)))
        axis.set_xticks(2.0 ** np.arange(low, high + 1))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")

    if key == "kl":
        axis.set_yscale("symlog", linthresh=0.01)
        axis.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
        shown = [row[key] for mine in points.values() for row in mine] + ([full[key]] if full else [])
        axis.set_ylim(-0.001, 2 * max(shown) + 0.01)
    else:
        axis.set_ylim(-0.02, 1.05)
    name_ends(axis, {name: (kib[name][-1], mine[-1][key]) for name, mine in points.items()})


def name_ends(axis, ends: dict[str, tuple[float, float]]):
    """Each name at the right edge, as high as its line's last point (x, y), or apart where names would
    overlap.
    """
    place = axis.transScale + axis.transLimits
    heights = apart([place.transform(end)[1] for end in ends.values()], 0.045)
    for (name, end), height in zip(ends.items(), heights):
        leader = dict(arrowstyle="-", color=style(name)["color"], linewidth=0.6, alpha=0.6)
        axis.annotate(name, end, (1.03, height), textcoords="axes fraction", va="center", fontsize=9,
                      annotation_clip=False, arrowprops=leader)


def apart(heights: list[float], gap: float) -> list[float]:
    """Heights of labels, in the same order, at least `gap` from each other and, if they fit, none above 1."""
    order, moved = np.argsort(heights, kind="stable"), np.array(heights, dtype=float)
    for below, above in zip(order, order[1:]):
        moved[above] = max(moved[above], moved[below] + gap)
    if len(order):
        moved[order[-1]] = min(moved[order[-1]], 1)
    for below, above in zip(order[-2::-1], order[:0:-1]):
        moved[below] = min(moved[below], moved[above] - gap)
    return moved.tolist()


def kept(caches: list, tokens: int) -> np.ndarray:
    """Which of the first `tokens` tokens every head still holds, (L, H, tokens) of bool; of a batch, the
    first row.
    """
    return held(caches, tokens)[0].cpu().numpy()


def text(pieces: list[str], panels: dict, marked=None, low: str = "dropped", high: str = "kept by every head",
         mark: str = "fact", columns: int = 1, width: int = 110):
    """The figure of a text, once per panel, each token on a ground as dark as its weight; one of weight 0 is
    grey.

    pieces: the tokens' strings; line breaks are drawn as ↵, a run of spaces as one. panels: title → weights
    (T,) in [0, 1]. marked: (T,) bool, the tokens to underline. low, high, mark: words for the key. width:
    characters per line.
    """
    pieces = [re.sub(" +", " ", piece.replace("\n", "↵")) for piece in pieces]
    marked = np.zeros(len(pieces)) if marked is None else marked
    for name, values in (*panels.items(), ("marked", marked)):
        if np.shape(values) != (len(pieces),):  # or else some would not be drawn
            raise ValueError(f"{name!r} has values of shape {tuple(np.shape(values))}; "
                             f"{len(pieces)} pieces need one each")
    places, x, y = [], 0, 0  # of each token, in characters and lines
    for piece in pieces:
        if x + len(piece) > width:
            x, y = 0, y + 1
        places.append((x, y))
        x += len(piece)
    across, down, rows = width + 4, y + 3, -(-len(panels) // columns)
    inch = 1100 // (columns * across - 4) / 100  # a character's width, whole pixels at 100 dpi
    size = 72 * inch / 0.602                     # DejaVu Sans Mono is 0.602 em wide
    figure = plt.figure(figsize=((columns * across - 4) * inch, 2.1 * inch * (rows * down + 1.2)))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, columns * across - 4), ylim=(rows * down + 1, -0.2))
    axis.axis("off")

    def write(x, y, piece, weight, underline=False):
        if weight > 0.01:
            ground = plt.cm.Blues(0.7 * weight)
            axis.add_patch(plt.Rectangle((x, y), len(piece), 1, color=ground, linewidth=0))
        if underline:
            axis.hlines(y + 0.95, x, x + len(piece), color="#b03a00", linewidth=0.2 * size)
        axis.text(x, y + 0.5, piece, va="center_baseline", family="DejaVu Sans Mono", fontsize=size,
                  color="black" if weight else "0.45", parse_math=False)

    for i, (title, weights) in enumerate(panels.items()):
        left, top = i % columns * across, i // columns * down
        axis.text(left, top + 0.5, title, va="center", fontsize=max(1.1 * size, 9))
        for (x, y), piece, weight, underline in zip(places, pieces, weights, marked):
            write(left + x, top + 1.2 + y, piece, float(weight), underline)
    x = 0
    for word, weight in ((low, 0), ("  ", 0.25), ("  ", 0.5), ("  ", 0.75), (high, 1)):
        write(x, rows * down, word, weight)
        x += len(word) + 1
    if any(marked):
        write(x + 3, rows * down, mark, 1e-9, True)
    return figure


def check_matrix(title: str, values, meant: str):
    """ValueError unless values have two dimensions: a third would be taken for colours."""
    if np.ndim(values) != 2:
        raise ValueError(f"{title!r} has values of shape {tuple(np.shape(values))}, which must be {meant}")


def heads(axis, values, title: str, form: str = "{:.2f}", diverging: bool = False, most: float | None = None):
    """A number per layer and head, (L, heads), on a ground as dark as it is large; the darkest is for `most`.

    diverging: purple below 0, orange above.
    """
    values = np.asarray(values)
    check_matrix(title, values, "(L, heads)")
    most = 1.4 * (most or np.abs(values).max())  # so that black can be read on it
    axis.imshow(values, cmap="PuOr_r" if diverging else "Blues", vmin=-most if diverging else 0, vmax=most)
    for (layer, head), value in np.ndenumerate(values):
        axis.text(head, layer, form.format(value), ha="center", va="center", fontsize=8)
    axis.set(title=title, xlabel="head", ylabel="layer",
             xticks=range(values.shape[1]), yticks=range(values.shape[0]))


def attention(axis, p, title: str):
    """One head's probabilities (T, S), a row per query; drawn by their square root: faint ones show."""
    check_matrix(title, p, "(T, S)")
    axis.imshow(np.asarray(p), cmap="Greys", norm=PowerNorm(0.5, 0, 1))
    axis.set(title=title, xlabel="key", ylabel="query")
