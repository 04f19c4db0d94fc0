"""KVReviver's sketch taken apart: what its slots add to a cache of the same bytes.

    python -m experiments.sketch_parts                  both decoders that ship: three minutes
    python -m experiments.sketch_parts --model FOLDER   and one of yours

KVReviver keeps recent tokens and candidates as they are, and adds all others into a sketch. Here the sketch
is read in four ways: as the printed sum, as the mean of each slot, with signs on the keys, and shrunk towards
the mean of all its tokens. Beside these stand a cache with that mean alone, and one without a sketch, whose
bytes go to exact tokens. Every cache fills the bytes of its budget. KL is that of the next token on plain
text. Needles are asked for after the compression.
"""
from functools import partial

import torch
from tqdm import tqdm

from experiments.script import grouped, keep_label, mean_and_error, run, with_error
from methods.kv_reviver import KVReviver
from methods.kv_reviver_mean import MeanReviver
from methods.ours.kv_reviver_shrunk import ShrunkReviver, SignedReviver
from methods.theory.sketch_error import found_agnostic
from nanollm.cache import make_cache
from nanollm.commands.text_table import text_table
from nanollm.measure.evaluate import (check_size, continuation, maker, prompt_and_question, reference,
                                      text_windows)
from nanollm.measure.replay import Recorder, record
from nanollm.measure.tasks import Tasks

KEEP_RATIOS = 0.25, 0.125, 0.0625
NEW = 32  # tokens of a text that follow the compression
READINGS = {
    "sum (printed)": KVReviver,
    "slot means": MeanReviver,
    "signed keys": SignedReviver,
    "shrunk": ShrunkReviver,
    "mean only": partial(ShrunkReviver, vague=1e-9),  # a sketch of one slot, and the exact mean beside it
    "no sketch": partial(KVReviver, vague=0.0)}


@torch.no_grad()
def measured(model, encoding, documents: int, length: int, keep_ratios=KEEP_RATIOS) -> list[dict]:
    """Return a row for each budget and reading. KL, its change, needles: [mean, error]."""
    check_size(model, documents, 2, length)
    tasks = Tasks(encoding, "test")
    full = reference(model, text_windows(tasks, documents, length, model), NEW)
    batch = tasks.batch("needle", 0, documents, length)
    recording = record(model, make_cache(model, Recorder), prompt_and_question(model, batch)[1])
    rows = []
    for keep_ratio in tqdm(keep_ratios, leave=False, desc="budgets", disable=None):
        found = {}
        for name, Method in READINGS.items():
            make = maker(model, Method, keep_ratio, slack=0)
            row = continuation(model, full, make, full.recording)
            needles = found_agnostic(model, batch, make, recording)
            found[name] = row["kl"], needles, row["live_16"] / documents / 1024
        for name, (kl, needles, kib) in found.items():
            change = mean_and_error(kl - found["no sketch"][0])
            rows.append(dict(keep_ratio=keep_ratio, reading=name, KiB=kib, kl=mean_and_error(kl),
                             change=change, needle=mean_and_error(needles)))
    return rows


def show(rows: list[dict]) -> str:
    """Return a table for each decoder."""
    parts = []
    for (decoder,), mine in grouped(rows, "decoder").items():
        cells = [["keep", "reading", "KiB", "KL", "against no sketch", "needle"]]
        for row in mine:
            cells.append([keep_label(row["keep_ratio"]), row["reading"], f"{row['KiB']:.0f}",
                          with_error(*row["kl"], 3), with_error(*row["change"], 3, "+"),
                          with_error(*row["needle"])])
        parts.append(f"{decoder}\n{text_table(cells)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    run("experiments.sketch_parts", __doc__, measured, show, documents=32, length=480)
