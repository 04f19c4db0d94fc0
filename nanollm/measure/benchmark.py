"""The benchmark: three tasks and text, recorded once and measured for every method.

A recording holds the queries, keys and values that the decoder gives to each layer's cache.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import math
from multiprocessing import get_context
import pickle
import signal

import torch
from torch import Tensor

from nanollm.cache import make_cache
from nanollm.measure.evaluate import (Make, Reference, check_size, continuation, prompt_and_question,
                                      reference, retrieve, budget_for, standard_error, text_windows)
from nanollm.measure.replay import CannotReplay, Recorder, Recording, record
from nanollm.measure.tasks import Batch, Tasks

TASKS = {"needle": {}, "pairs": {}, "few_shot": {}}  # options: 4 facts, 16 pairs, 16 shots of 4 classes


@dataclass
class Benchmark:
    """Recorded documents and text, the same for every method: 10 KB per token (tiny model)."""
    batches: dict[str, Batch]
    recordings: dict[str, list[list[Recording]]]  # task → [context, question], each with one per layer
    full: Reference | None

    @staticmethod
    def continuation_length(T: int) -> int:
        return min(64, T // 2)

    @staticmethod
    def text(model, tasks: Tasks, T: int, documents: int) -> Tensor:
        """Return text windows of T tokens, half as many as `documents`."""
        return text_windows(tasks, max(2, documents // 2), T, model)

    @staticmethod
    @torch.no_grad()
    def read(model, batches: dict[str, Batch], text: Tensor | None) -> "Benchmark":
        """Record documents, and text (B, T) if there is any."""
        recordings = {}
        for task, batch in batches.items():
            caches = make_cache(model, Recorder)
            recordings[task] = [record(model, caches, part) for part in prompt_and_question(model, batch)[1:]]
        full = None
        if text is not None:
            text = text.to(model.embed.weight.device)
            full = reference(model, text, Benchmark.continuation_length(text.shape[1]))
        return Benchmark(batches, recordings, full)

    @staticmethod
    def build(model, tasks: Tasks, T: int, documents: int, seed: int = 0) -> "Benchmark":
        """Make and record `documents` documents of each task and half as many texts, T tokens each."""
        check_size(model, documents, 2, T)
        batches = {task: tasks.batch(task, seed, documents, T, **options) for task, options in TASKS.items()}
        return Benchmark.read(model, batches, Benchmark.text(model, tasks, T, documents))

    def measured(self, model, make: Make) -> tuple[dict[str, Tensor], dict]:
        """Return the right answers (B,) by task and setting, and `continuation` of the text, or {}."""
        right = {}
        for task, batch in self.batches.items():
            answers = replayed_or_read(retrieve, model, batch, make, self.recordings[task])
            right |= {f"{task}_{setting}": x for setting, x in answers.items()}
        if self.full is None:
            return right, {}
        measure = partial(continuation, alone=True)
        return right, replayed_or_read(measure, model, self.full, make, self.full.recording)

    def run(self, model, make: Make) -> dict:
        """Measure caches from `make`, and return a row of `summary`."""
        return summary([self.measured(model, make)])


def summary(parts: list[tuple[dict[str, Tensor], dict]]) -> dict:
    """Combine the results of `Benchmark.measured` on several parts into one row.

    The row has the mean and standard error of each task and setting, and what `continuation` returns, bytes
    summed. "each" has the values of single documents, or of single texts for kl, nll and L1.
    """
    row, each = {}, {}
    for key in dict.fromkeys(key for right, _ in parts for key in right):
        right = torch.cat([right[key] for right, _ in parts if key in right])
        row[key], row[f"{key}_se"], each[key] = right.mean().item(), standard_error(right), right.tolist()

    texts = [text for _, text in parts if text]
    kl, nll, l1, alone = (torch.cat([text[key] for text in texts]) for key in ("kl", "nll", "l1", "l1_alone"))
    seconds = sum(len(text["kl"]) / text["tokens_per_s"] for text in texts)  # all texts have equal length
    each |= dict(kl=kl.tolist(), nll=nll.tolist(), l1_alone=alone.mean((1, 2)).tolist())
    for key in ("live", "live_16", "allocated", "peak", "device", "slots", "slots_end"):
        values, total = [text[key] for text in texts], max if key in ("slots", "slots_end") else sum
        row[key] = None if None in values else total(values)
    row |= {key: texts[0][key] for key in ("prompt", "evicts", "keeps_all")}
    return row | dict(tokens_per_s=len(kl) / seconds, perplexity=math.exp(nll.mean().item()),
                      kl=kl.mean().item(), l1=l1.mean(0).tolist(), l1_alone=alone.mean(0).tolist(), each=each)


def replayed_or_read(measure, model, documents, make: Make, recorded):
    """Measure with the recording; if a method cannot replay, let the decoder read the prompt."""
    try:
        return measure(model, documents, make, recorded)
    except CannotReplay:
        return measure(model, documents, make)


class Slices:
    """A benchmark of any size, recorded in pieces of `batch` documents or texts.

    If all recordings fit into `keep` bytes, each is made once. Otherwise each is made again for every row. A
    row equals that of one Benchmark of all documents, up to rounding. processes: how many measure a row at a
    time, each some of the pieces; forks of this process, so they share the model and the recordings. Decoding
    speed is then that of a process beside others; a second thread (--threads 2) leaves one process.
    """

    def __init__(self, model, tasks: Tasks, T: int, documents: int, seed: int, batch: int, keep: float,
                 processes: int = 1):
        check_size(model, documents, 2, T)
        self.pieces = [({task: part}, None) for task, options in TASKS.items()
                       for whole_batch in tasks.batches(task, seed, documents, T, **options)
                       for part in cut(whole_batch, batch)]
        text = Benchmark.text(model, tasks, T, documents)
        self.pieces += [({}, part) for part in text.split(batch)]
        self.recorded = {}  # number of the piece → its Benchmark, if `keeps`

        c, tokens = model.config, T * (documents * len(TASKS) + len(text))
        numbers = c.n_layers * (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
        self.bytes = tokens * numbers * model.embed.weight.element_size()
        self.keeps = self.bytes <= keep
        # on a GPU nothing can be forked, and for a few documents it takes longer than it saves
        forked = self.bytes > 2e7 and not model.embed.weight.is_cuda
        self.processes = min(processes, len(self.pieces)) if forked else 1

    def run(self, model, make: Make) -> dict:
        """Measure caches from `make` on all pieces, and return a row of `summary`."""
        for i in range(len(self.pieces)) if self.keeps else ():
            self.benchmark(model, i)  # recorded before the fork
        return summary(in_forks(lambda i: self.benchmark(model, i).measured(model, make),
                                len(self.pieces), self.processes))

    def benchmark(self, model, i: int) -> Benchmark:
        """Return the Benchmark of piece i, and record it if that has not been done."""
        if i in self.recorded:
            return self.recorded[i]
        benchmark = Benchmark.read(model, *self.pieces[i])
        if self.keeps:
            self.recorded[i] = benchmark
        return benchmark

    def __str__(self):
        size = f"recordings of all prompts take {self.bytes / 1e9:.2g} GB"
        return size if self.keeps else f"{size}, more than --memory allows; each row reads the prompts again"


def in_forks(function: Callable[[int], object], n: int, processes: int) -> list:
    """Return [function(0), …, function(n − 1)], computed by forks of this process."""
    if processes == 1:
        return [function(i) for i in range(n)]
    with get_context("fork").Pool(processes, begin_fork, [function]) as pool:
        last_first = [pickle.loads(x) for x in pool.imap(call, range(n)[::-1])]  # the text takes longest
        return last_first[::-1]


def begin_fork(function: Callable[[int], object]):
    """Keep a function that cannot be sent to a process; Ctrl-C ends the process silently."""
    call.function = function
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def call(i: int) -> bytes:
    return pickle.dumps(call.function(i))  # else torch would share each tensor as an open file


def cut(batch: Batch, n: int) -> list[Batch]:
    """Split a batch into batches of at most n documents."""
    rows = range(0, len(batch.tokens), n)
    return [Batch(batch.tokens[i:i + n], batch.roles[i:i + n], batch.question, batch.answers) for i in rows]


def excess(row: dict) -> str:
    """Return a sentence if a row's method holds more entries than its budget; "" if it does not.

    After the prompt no method may exceed its budget. Methods with an `evict`, which is called after each
    token, may not exceed it later either. Window methods compress only the prompt, and then append.
    """
    if row["keep_ratio"] is None or row["slots"] is None or row["keeps_all"]:
        return ""
    budget = budget_for(row["keep_ratio"], row["prompt"])
    if row["slots"] == row["prompt"] > budget:
        return f"evicts nothing: holds all {row['prompt']} tokens of a prompt, and its budget is {budget}"
    if row["slots"] > budget:
        return f"holds {row['slots']:g} slots a head after a prompt, and its budget is {budget}"
    if row["evicts"] and row["slots_end"] > budget:
        return (f"grows to {row['slots_end']:g} slots a head after the prompt, and its budget is {budget}; "
                "does its observe call super().observe(q, p)?")
    return ""


def paired(row: dict, base: dict, keys: list[str]) -> tuple[float, float]:
    """Return the mean difference of two rows over `keys`, by document, and its standard error."""
    own, other = (torch.tensor([x["each"][key] for key in keys]) for x in (row, base))
    difference = own - other
    return difference.mean().item(), standard_error(difference.flatten())
