"""The papers read in other ways, each against the reading taken first, text by text.

    python -m experiments.readings                  both decoders that ship: nine minutes of a core
    python -m experiments.readings --model FOLDER   and one of yours

32 texts, and 32 documents each of needle, recall and few-shot with the question in the prompt, 256 tokens
each. KL is of the last 32 tokens of a text. Last come short prompts with long answers, 512 tokens each.
"""
import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.change_and_text import WINDOW, long_answer, one_knob_at_a_time, right_answers
from methods.cam import CaM
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical, CriticalCode
from methods.kv_reviver import KVReviver
from methods.kv_reviver_mean import MeanReviver
from methods.ours.scissorhands_weight import MeanWeight
from methods.scissorhands import Scissorhands
from methods.theory.persistence_measured import Padded, Rate, tilted
from nanollm import LEARNED, TINY
from nanollm.cache import LayerCache
from nanollm.commands.registry import loaded
from nanollm.commands.shell import command, model_options
from nanollm.measure.benchmark import TASKS, Benchmark, replayed_or_read
from nanollm.measure.evaluate import Reference, continuation, maker, reference, standard_error, text_windows
from nanollm.measure.tasks import Tasks

FEW = dict(at_a_time=8)
Row = dict[str, Tensor]  # measurement → a number a text or document


@dataclass(eq=False)
class EndCaM(CaM):
    """All that leaves does so when the prompt ends."""

    def pieces(self, *new: Tensor):
        return super().pieces(*new) if self.prompt_done else LayerCache.pieces(self, *new)

    def capacity(self, n: int) -> int:
        return LayerCache.capacity(self, n)

    def end_prefill(self):
        if self.length > self.budget:
            newest = self.pos >= self.seen - self.newest()
            self.shrink(self.importance().masked_fill(newest, torch.inf), self.budget)
        super().end_prefill()


# the reading taken first, then the others: method and knobs, all at a quarter of the entries
READINGS = {
    "Scissorhands": {
        "counts, m = B/2": (Scissorhands, {}), "an absent step is unimportant": (Padded, {}),
        "rate": (Rate, {}), "w = 50 of 256": (Scissorhands, dict(history=50)),
        "later layers more": (Scissorhands, dict(tilt=0.3)),
        "lower layers more": (Scissorhands, dict(tilt=-0.3))},
    "Scissorhands, m = 8": {
        "counts": (Scissorhands, FEW), "an absent step is unimportant": (Padded, FEW), "rate": (Rate, FEW),
        "w = 50 of 256": (Scissorhands, FEW | dict(history=50)), "mean weight": (MeanWeight, FEW)},
    "CaM": {"evicts at the prompt's end": (EndCaM, {}), "evicts while it reads": (CaM, {})},
    "ChunkKV": {"room stays empty": (ChunkKV, WINDOW | dict(select=Chunks(fill=False))),
                "the last chunk is cut": (ChunkKV, WINDOW)},
    "KVReviver": {"sums, as printed": (KVReviver, dict(slack=0)),
                  "means of slots": (MeanReviver, dict(slack=0))},
}
LONG = {"SnapKV, once": dict(again=False), "SnapKV": {}, "+critical": dict(select=Critical()),
        "+critical_code": dict(select=CriticalCode())}


def measured(model, bench: Benchmark, full: Reference, Method, share: float, tilt: float = 0.0,
             **knobs) -> Row:
    """Which documents are answered right, and KL of every text, (n,) each."""
    make = maker(model, Method, share, **knobs)
    if tilt:
        make = lambda n, *_: tilted(model, round(share * n), tilt, Method, **knobs)
    kl = replayed_or_read(continuation, model, full, make, full.recording)["kl"]
    return dict(answers=right_answers(model, bench, make)["aware"].flatten(), KL=kl)


def groups(model, tasks: Tasks) -> Iterator[tuple[str, dict[str, Row]]]:
    """A title, and each reading's row, first the one that others are compared with."""
    bench = Benchmark.build(model, tasks, 256, documents=32)
    full = reference(model, text_windows(tasks, 32, 256, model), 32)
    for title, readings in READINGS.items():
        yield title, {name: measured(model, bench, full, Method, 0.25, **knobs)
                      for name, (Method, knobs) in readings.items()}

    knobs = one_knob_at_a_time(model, bench, full)
    for base in "critical", "critical_code":
        rows = {name.removeprefix(f"{base}, "): dict(answers=row["answers"], KL=row["kl"], L=row["L"])
                for name, row in knobs.items() if name.partition(",")[0] == base}
        yield f"SnapKV+{base}, an eighth", rows

    texts = text_windows(tasks, 32, 512, model)
    asked = {task: tasks.batch(task, 0, 32, 512) for task in TASKS}
    rows = {name: long_answer(model, texts, asked, **how) for name, how in LONG.items()}
    kib = ", ".join(f"{name} {row['most']:.0f}, {row['last']:.0f}" for name, row in rows.items())
    yield f"prompt of 32 tokens, answer of 480; KiB at most, at the end: {kib}", {
        name: {key: x for key, x in row.items() if isinstance(x, Tensor)} for name, row in rows.items()}


def show(rows: dict[str, Row]) -> str:
    """A line a reading: means ± a standard error, and their changes against the first."""
    first, lines = next(iter(rows.values())), []
    for name, row in rows.items():
        cells = []
        for key, x in row.items():
            cell = f"{key} {x.mean():.3f} ± {standard_error(x):.3f}"
            d = x - first[key]
            change = "" if row is first else f" ({d.mean():+.3f} ± {standard_error(d):.3f})"
            cells.append(f"{cell + change:<42}")
        lines.append(f"    {name:<32}{''.join(cells)}".rstrip())
    return "\n".join(lines)


@torch.no_grad()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m experiments.readings", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    model_options(parser)
    args = parser.parse_args(argv)
    names = {TINY: "built", LEARNED: "learned"}
    for folder in dict.fromkeys([TINY, LEARNED, args.model]):
        model, encoding = loaded(args, folder)
        tqdm.write(f"{names.get(folder, folder)}\n")
        for title, rows in tqdm(groups(model, Tasks(encoding, "test")), leave=False, disable=None):
            tqdm.write(f"{title}\n{show(rows)}\n")


if __name__ == "__main__":
    command(main)
