"""The benchmark: tasks and text, recorded once and measured for every method.

A recording holds the queries, keys and values that the decoder gives to each layer's cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor
from tqdm import tqdm

from lab.evaluate import (
    Make,
    Reference,
    budget_for,
    check_size,
    continuation,
    prompt_and_question,
    reference,
    retrieve,
    standard_error,
    text_windows,
)
from lab.replay import CannotReplay, Recorder, Recording, record
from lab.tasks import Batch, Tasks
from nanollm.cache import make_cache

# each with its default options: 4 facts, 16 pairs, 16 shots
TASKS = "needle", "pairs", "few_shot"
# documents or texts that the decoder reads at once, and their tokens
BATCH, TOKENS = 32, 2**14


@dataclass
class Benchmark:
    """Recorded documents and text, the same for every method: 10 KB per token (tiny model)."""

    batches: dict[str, Batch]
    # task → [context, question], each with one per layer
    recordings: dict[str, list[list[Recording]]]
    full: Reference | None

    @staticmethod
    @torch.no_grad()
    def read(model, batches: dict[str, Batch], text: Tensor | None) -> "Benchmark":
        """Record documents, and text (B, T) if there is any."""
        recordings = {}
        for task, batch in batches.items():
            caches = make_cache(model, Recorder)
            recordings[task] = [
                record(model, caches, part)
                for part in prompt_and_question(model, batch)[1:]
            ]
        full = None
        if text is not None:
            full = reference(
                model,
                text.to(model.embed.weight.device),
                continuation_length(text.shape[1]),
            )
        return Benchmark(batches, recordings, full)

    def measured(
        self, model, make: Make, alone: bool = False
    ) -> tuple[dict[str, Tensor], dict]:
        """Return the right answers (B,) by task and setting, and `continuation` of the text, or {}."""
        right = {}
        for task, batch in self.batches.items():
            answers = replayed_or_read(
                retrieve, model, batch, make, self.recordings[task]
            )
            right |= {f"{task}_{setting}": x for setting, x in answers.items()}
        if self.full is None:
            return right, {}
        measure = partial(continuation, alone=alone)
        return right, replayed_or_read(
            measure, model, self.full, make, self.full.recording
        )


def continuation_length(T: int) -> int:
    """Return how many of a text's T tokens are fed one by one, after the compressed prompt."""
    return min(64, T // 2)


def build(
    model,
    tasks: Tasks,
    T: int,
    documents: int,
    seed: int = 0,
    names: Iterable[str] = TASKS,
) -> list[Benchmark]:
    """Make and record `documents` documents of each task and half as many texts, T tokens each.

    The decoder reads some of them at once (`BATCH`), so there are several benchmarks; `run` joins
    them.
    """
    check_size(model, documents, 2, T)
    n = max(min(BATCH, TOKENS // T), 1)
    parts = [
        ({task: part}, None)
        for task in names
        for batch in tasks.batches(task, seed, documents, T)
        for part in cut(batch, n)
    ]
    parts += [
        ({}, part)
        for part in text_windows(tasks, max(2, documents // 2), T, model).split(n)
    ]
    return [
        Benchmark.read(model, *part)
        for part in tqdm(parts, "prompts", leave=False, disable=None)
    ]


def cut(batch: Batch, n: int) -> list[Batch]:
    """Split a batch into batches of at most n documents."""
    rows = range(0, len(batch.tokens), n)
    return [
        Batch(
            batch.tokens[i : i + n],
            batch.roles[i : i + n],
            batch.question,
            batch.answers,
        )
        for i in rows
    ]


def run(benchmarks: list[Benchmark], model, make: Make, alone: bool = False) -> dict:
    """Measure caches from `make` on all documents and texts; return one row.

    The row has the mean and standard error of each task and setting, and what `continuation`
    returns, bytes summed; l1_alone only if `alone`. "each" has the values of single documents, or
    of single texts for kl, nll and l1_alone.
    """
    parts = [benchmark.measured(model, make, alone) for benchmark in benchmarks]
    row, each = {}, {}
    for key in dict.fromkeys(key for right, _ in parts for key in right):
        right = torch.cat([right[key] for right, _ in parts if key in right])
        row[key], row[f"{key}_se"], each[key] = (
            right.mean().item(),
            standard_error(right),
            right.tolist(),
        )

    texts = [text for _, text in parts if text]
    kl, nll = (torch.cat([text[key] for text in texts]) for key in ("kl", "nll"))
    each |= dict(kl=kl.tolist(), nll=nll.tolist())
    if alone:
        l1 = torch.cat([text["l1_alone"] for text in texts])
        row["l1_alone"], each["l1_alone"] = (
            l1.mean(0).tolist(),
            l1.mean((1, 2)).tolist(),
        )
    row |= {
        key: sum(text[key] for text in texts)
        for key in ("live", "live_16", "allocated")
    }
    row |= {key: max(text[key] for text in texts) for key in ("slots", "slots_end")}
    row |= {key: texts[0][key] for key in ("prompt", "evicts", "keeps_all")}
    return row | dict(
        perplexity=math.exp(nll.mean().item()), kl=kl.mean().item(), each=each
    )


def replayed_or_read(measure, model, documents, make: Make, recorded):
    """Measure with the recording; if a method cannot replay, let the decoder read the prompt."""
    try:
        return measure(model, documents, make, recorded)
    except CannotReplay:
        return measure(model, documents, make)


def excess(row: dict) -> str:
    """Return a sentence if a row's method holds more entries than its budget; "" if it does not.

    After the prompt no method may exceed its budget. Methods with an `evict`, which is called after
    each token, may not exceed it later either. Window methods compress only the prompt, and then
    append.
    """
    if row["keep_ratio"] is None or row["keeps_all"]:
        return ""
    budget = budget_for(row["keep_ratio"], row["prompt"])
    if row["slots"] > budget:
        return f"holds {row['slots']:g} slots a head after a prompt, and its budget is {budget}"
    if row["evicts"] and row["slots_end"] > budget:
        return (
            f"grows to {row['slots_end']:g} slots a head after the prompt, and its budget is {budget}; "
            "does its observe call super().observe(q, p)?"
        )
    return ""
