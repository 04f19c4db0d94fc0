"""Figures. Every line has its own marker and dash, so that a legend can be read in grey."""
from itertools import cycle
from pathlib import Path

import matplotlib.pyplot as plt

MARKERS, DASHES = "osD^vP*Xph<>", ("-", "--", "-.", ":")


def comparison(rows: list[dict], file: Path):
    """Accuracy aware and blind (mean over the tasks) and KL over the bytes of the cache, one line a method."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    full = next((row for row in rows if row["method"] == "full"), None)
    names = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "full"))
    panels = ("aware", "accuracy, question in the prompt"), ("blind", "accuracy, question after compression"), (
        "kl", "KL(full ‖ compressed) per token, nats")
    for axis, (key, label) in zip(axes, panels):
        for name, marker, dash in zip(names, cycle(MARKERS), cycle(DASHES)):
            mine = sorted((row["live"] / 1024, row[key]) for row in rows if row["method"] == name)
            axis.plot(*zip(*mine), marker=marker, linestyle=dash, label=name, markersize=5)
        if full:
            axis.axhline(full[key], color="black", linewidth=1)
            axis.annotate("full cache", (full["live"] / 1024, full[key]), ha="right", va="bottom" if key == "kl" else "top")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("live cache, KiB per sequence")
        axis.set_ylabel(label)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.grid(alpha=0.3)
        if key != "kl":
            axis.set_ylim(-0.02, 1.05)
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)
