"""Compare interpretations of the papers, and leave out parts of their methods.

    python -m experiments.readings                  both shipped decoders: twelve minutes of a core
    python -m experiments.readings --model FOLDER   and your own

Each table compares its rows with its first row, document by document. The question is part of the compressed
prompt (answers) or comes later (later): 32 documents of each task, 256 tokens each. KL is over the last 32
tokens of 32 texts. The last table has prompts of 32 tokens and answers of 480 tokens.
"""
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.change_and_text import WINDOW, long_answer, one_option_at_a_time, right_answers
from experiments.script import grouped, mean_and_error, run, with_error
from methods.cam import CaM
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical, CriticalCode
from methods.defensive_kv import DefensiveKV
from methods.drop_kv import DropKV
from methods.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.kv_reviver_mean import MeanReviver
from methods.moment_kv import MomentKV
from methods.ours.scissorhands_weight import MeanWeight
from methods.r_kv import RKV, Unlike
from methods.scissorhands import Scissorhands
from methods.theory.persistence_measured import Padded, Rate, tilted
from nanollm.cache import LayerCache
from nanollm.commands.text_table import text_table
from nanollm.measure.benchmark import TASKS, Benchmark, replayed_or_read
from nanollm.measure.evaluate import Reference, continuation, maker, reference, text_windows
from nanollm.measure.tasks import Tasks
from nanollm.ranking import indices, top

FEW = dict(at_a_time=8)
LAYERS = dict(across=True)


@dataclass(eq=False)
class EndCaM(CaM):
    """CaM that evicts and merges only at the prompt's end, no token earlier."""

    def pieces(self, *new: Tensor):
        return super().pieces(*new) if self.prompt_done else LayerCache.pieces(self, *new)

    def capacity(self, n: int) -> int:
        return LayerCache.capacity(self, n)

    def end_prefill(self):
        if self.length > self.budget:
            newest = self.pos >= self.seen - self.newest()
            self.shrink(self.importance().masked_fill(newest, torch.inf), self.budget)
        super().end_prefill()


@dataclass(eq=False)
class MeanAttention(DefensiveKV):
    """DefensiveKV that takes the mean over queries in place of the maximum."""

    def risk(self, rows: Tensor) -> Tensor:
        return super().risk(rows.mean((2, 3), keepdim=True))


@dataclass(eq=False)
class NoFloor(DefensiveKV):
    """DefensiveKV in which an entry may count less than the mean one."""

    def risk(self, rows: Tensor) -> Tensor:
        return self.pool(rows.amax((2, 3)))


@dataclass(eq=False)
class NoNorms(DefensiveKV):
    """DefensiveKV without the norms of the values."""

    def norms(self) -> Tensor:
        return torch.ones_like(super().norms())


@dataclass(eq=False)
class HeadByHead(DefensiveKV):
    """DefensiveKV in which all heads keep equally many entries."""

    def compress(self):
        self.keep(indices(top(self.worst_case(), self.budget)))


@dataclass(eq=False)
class NoCovariance(MomentKV):
    """MomentKV in which the evicted entries stand for their mean."""

    def add(self, i: Tensor):
        super().add(i)
        self.moments["C"].zero_()


# by group: the first interpretation, then the others; method and options, keep ratio 25 %
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
    "DefensiveKV": {
        "across layers": (DefensiveKV, LAYERS), "mean attention": (MeanAttention, LAYERS),
        "no entry raised to the mean": (NoFloor, LAYERS), "no stage 1": (DefensiveKV, LAYERS | dict(mass=0)),
        "no norms of values": (NoNorms, LAYERS), "not pooled": (DefensiveKV, LAYERS | dict(kernel_size=1)),
        "across the heads of a layer": (DefensiveKV, {}), "each head alone": (HeadByHead, {})},
    "DropKV": {"not pooled": (DropKV, {}), "pooled as in SnapKV": (DropKV, dict(kernel_size=7))},
    "R-KV": {
        "λ = 0.1": (RKV, {}), "λ = 0.5": (RKV, dict(select=Unlike(weight=0.5))),
        "λ = 1 (SnapKV)": (RKV, dict(select=Unlike(weight=1.0))),
        "the newest is penalised, too": (RKV, dict(select=Unlike(alike=1.0)))},
    "MomentKV": {"moments": (MomentKV, {}), "no covariance": (NoCovariance, {}),
                 "no moments (H2O)": (H2O, {})},
}
LONG = {"SnapKV, once": dict(again=False), "SnapKV": {}, "+critical": dict(select=Critical()),
        "+critical_code": dict(select=CriticalCode())}


def measured(model, bench: Benchmark, full: Reference, Method, keep_ratio: float, tilt: float = 0.0,
             **options) -> dict[str, Tensor]:
    """Return which documents are answered right in both settings, and the KL of each text, (n,) each."""
    make = maker(model, Method, keep_ratio, **options)
    if tilt:
        make = lambda n, *_: tilted(model, round(keep_ratio * n), tilt, Method, **options)
    kl = replayed_or_read(continuation, model, full, make, full.recording)["kl"]
    right = right_answers(model, bench, make)
    return dict(answers=right["aware"].flatten(), later=right["agnostic"].flatten(), KL=kl)


def groups(model, tasks: Tasks, documents: int = 32) -> Iterator[tuple[str, dict[str, dict]]]:
    """Yield each group's title and its measurements by interpretation; the first is the base."""
    bench = Benchmark.build(model, tasks, 256, documents=documents)
    full = reference(model, text_windows(tasks, documents, 256, model), 32)
    for title, readings in READINGS.items():
        yield title, {name: measured(model, bench, full, Method, 0.25, **options)
                      for name, (Method, options) in readings.items()}

    changed = one_option_at_a_time(model, bench, full)
    for base in "critical", "critical_code":
        yield f"SnapKV+{base}, an eighth", {
            name.removeprefix(f"{base}, "): dict(answers=row["answers"], KL=row["kl"], L=row["L"])
            for name, row in changed.items() if name.partition(",")[0] == base}

    texts = text_windows(tasks, documents, 512, model)
    asked = {task: tasks.batch(task, 0, documents, 512) for task in TASKS}
    yield "prompt of 32 tokens, answer of 480", {name: long_answer(model, texts, asked, **how)
                                                 for name, how in LONG.items()}


def summary(group: str, measurements: dict[str, dict]) -> list[dict]:
    """Return a row for each interpretation: means, changes against the first, and standard errors."""
    first, rows = next(iter(measurements.values())), []
    for reading, each in measurements.items():
        means = {key: mean_and_error(x) for key, x in each.items() if isinstance(x, Tensor)}
        changes = {} if each is first else {key: mean_and_error(each[key] - first[key]) for key in means}
        rows.append(dict(group=group, reading=reading, means=means, changes=changes,
                         kib=[each[key] for key in ("most", "last") if key in each]))
    return rows


def show(rows: list[dict]) -> str:
    """Return a table for each group: means and changes against the first row, ± one standard error."""
    tables = []
    for (decoder, group), each in grouped(rows, "decoder", "group").items():
        keys = each[0]["means"]
        header = [f"{decoder}: {group}", *(name for key in keys for name in (key, "change"))]
        table = [header + ["KiB at most", "KiB at the end"][:len(each[0]["kib"])]]
        for row in each:
            table.append([row["reading"]])
            for key in keys:
                table[-1].append(with_error(*row["means"][key], 3))
                table[-1].append(with_error(*row["changes"][key], 3, "+") if row["changes"] else "")
            table[-1] += [f"{x:.0f}" for x in row["kib"]]
        tables.append(text_table(table))
    return "\n\n".join(tables)


@torch.no_grad()
def all_rows(model, encoding, documents: int) -> list[dict]:
    """Return the rows of all groups."""
    each_group = groups(model, Tasks(encoding, "test"), documents)
    return [row for group, measurements in tqdm(each_group, leave=False, disable=None)
            for row in summary(group, measurements)]


if __name__ == "__main__":
    run("experiments.readings", __doc__, all_rows, show, documents=32)
