"""Figures. Every line has its own marker and dash, so that a legend can be read in grey."""
from itertools import cycle
from pathlib import Path
import re

import matplotlib.pyplot as plt
from matplotlib.colors import PowerNorm
import numpy as np

from nanollm.cache import held

TITLE = "Figure of python -m nanollm"  # written into the file, so that no other figure is taken for one of ours
MARKERS, DASHES = "osD^vP*Xph<>dH8", ("-", "--", "-.", ":")


def comparison(rows: list[dict], file: Path):
    """Accuracy aware and blind (mean over the tasks) and KL over the bytes of the cache; one line a method."""
    if not rows:
        raise ValueError("there are no rows to draw")
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.8), layout="constrained")
    full = next((row for row in rows if row["method"] == "full"), None)
    names = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "full"))
    panels = ("aware", "accuracy, question in the prompt"), ("blind", "accuracy, question after compression"), (
        "kl", "KL(full ‖ compressed) per token, nats")
    live = [row["live"] / 1024 for row in rows if row["method"] != "full"] or [full["live"] / 1024]
    live = [x for x in live if x > 0] or [1]  # the axis has no place for others
    for axis, (key, label) in zip(axes, panels):
        for name, marker, dash in zip(names, cycle(MARKERS), cycle(DASHES)):
            mine = sorted((row["live"] / 1024, row[key]) for row in rows if row["method"] == name)
            axis.plot(*zip(*mine), marker=marker, linestyle=dash, label=name, markersize=5)
        if full:
            axis.axhline(full[key], color="black", linewidth=1)
            axis.text(0.98, full[key], "full cache", transform=axis.get_yaxis_transform(), ha="right", va="bottom")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("live cache after the text, KiB per sequence")
        axis.set_ylabel(label)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.grid(alpha=0.3)
        axis.set_xticks(2.0 ** np.arange(np.floor(np.log2(min(live)) + 0.01), np.ceil(np.log2(max(live))) + 1))  # octaves around all points
        if key == "kl":
            axis.set_yscale("symlog", linthresh=0.01)
            axis.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.set_ylim(-0.001, 2 * max(row[key] for row in rows) + 0.01)
        else:
            axis.set_ylim(-0.02, 1.05)
    if names:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=110, metadata={"Title": TITLE})
    plt.close(figure)


def kept(caches: list, tokens: int) -> np.ndarray:
    """Which of the first `tokens` tokens every head still holds, (L, H, tokens) of bool; of a batch, the first row."""
    return held(caches, tokens)[0].cpu().numpy()


def text(pieces: list[str], panels: dict, marked=None, low: str = "dropped", high: str = "kept by every head",
         mark: str = "fact", columns: int = 1, width: int = 110):
    """The figure of a text, once per panel, each token on a ground as dark as its weight; a token of weight 0 is grey.

    pieces: the tokens' strings; line breaks are drawn as ↵, a run of spaces as one. panels: title → weights (T,) in
    [0, 1]. marked: (T,) bool, the tokens to underline. low, high, mark: words for the key. width: characters per line.
    """
    pieces = [re.sub(" +", " ", piece.replace("\n", "↵")) for piece in pieces]
    marked = np.zeros(len(pieces)) if marked is None else marked
    for name, values in (*panels.items(), ("marked", marked)):
        if np.shape(values) != (len(pieces),):  # or else some would not be drawn
            raise ValueError(f"{name!r} has values of shape {tuple(np.shape(values))}; {len(pieces)} pieces need one each")
    places, x, y = [], 0, 0  # of each token, in characters and lines
    for piece in pieces:
        if x + len(piece) > width:
            x, y = 0, y + 1
        places.append((x, y))
        x += len(piece)
    across, down, rows = width + 4, y + 3, -(-len(panels) // columns)
    inch = 1100 // (columns * across - 4) / 100  # a character's width, whole pixels at 100 dpi; a line is 2.1 of them high
    size = 72 * inch / 0.602                     # DejaVu Sans Mono is 0.602 em wide
    figure = plt.figure(figsize=((columns * across - 4) * inch, 2.1 * inch * (rows * down + 1.2)))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, columns * across - 4), ylim=(rows * down + 1, -0.2))
    axis.axis("off")

    def write(x, y, piece, weight, underline=False):
        if weight > 0.01:
            axis.add_patch(plt.Rectangle((x, y), len(piece), 1, color=plt.cm.Blues(0.7 * weight), linewidth=0))
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
    """A number per layer and head, (L, heads), on a ground as dark as it is large; the darkest ground is for `most`.

    diverging: purple below 0, orange above.
    """
    values = np.asarray(values)
    check_matrix(title, values, "(L, heads)")
    most = 1.4 * (most or np.abs(values).max())  # so that black can be read on it
    axis.imshow(values, cmap="PuOr_r" if diverging else "Blues", vmin=-most if diverging else 0, vmax=most)
    for (layer, head), value in np.ndenumerate(values):
        axis.text(head, layer, form.format(value), ha="center", va="center", fontsize=8)
    axis.set(title=title, xlabel="head", ylabel="layer", xticks=range(values.shape[1]), yticks=range(values.shape[0]))


def attention(axis, p, title: str):
    """One head's probabilities (T, S), a row per query; drawn by their square root, so that faint ones can be seen."""
    check_matrix(title, p, "(T, S)")
    axis.imshow(np.asarray(p), cmap="Greys", norm=PowerNorm(0.5, 0, 1))
    axis.set(title=title, xlabel="key", ylabel="query")
