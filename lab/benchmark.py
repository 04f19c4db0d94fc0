"""The benchmark: tasks and text, recorded once and measured for every method.

A recording holds the queries, keys and values that the decoder gives to each layer's cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lab.continuation import Reference, continuation, reference
from lab.replay import CannotReplay, Recorder, Recording, record
from lab.retrieval import Make, budget_for, prompt_and_question, retrieve
from lab.tasks import Batch, Tasks
from nanollm.cache import make_cache
from nanollm.check import whole
from nanollm.tokenizer import opening

# each with its default options: 4 facts, 16 pairs, 16 shots
TASKS = "needle", "pairs", "few_shot"
SETTINGS = "aware", "agnostic"
# most documents or texts that the decoder reads at once, and their tokens
BATCH = 32
TOKENS = 2**14


@dataclass
class Benchmark:
    """Recorded documents and text, the same for every method: 9 KB per token (nanollm/tiny)."""

    batches: dict[str, Batch]
    # task → [context, question], each with one per layer
    recordings: dict[str, list[list[Recording]]]
    full: Reference | None = None  # of the text

    @staticmethod
    @torch.no_grad()
    def read(
        model, batches: dict[str, Batch], text: Tensor | None = None
    ) -> "Benchmark":
        """Record documents, and text (B, T) if there is any."""
        recordings = {}
        for task, batch in batches.items():
            caches = make_cache(model, store=Recorder)
            parts = prompt_and_question(model, batch)[1:]
            recordings[task] = [record(model, caches, part) for part in parts]
        if text is None:
            return Benchmark(batches, recordings)
        text = text.to(model.embed.weight.device)
        full = reference(model, text, continuation_length(text.shape[1]))
        return Benchmark(batches, recordings, full)

    def measured(self, model, make: Make) -> tuple[dict[str, Tensor], dict]:
        """Return the shares right (B,) by task and setting, and the text's measurements, or {}."""
        right = {}
        for task in self.batches:
            answers = self.answers(model, task, make)
            right |= {f"{task}_{setting}": x for setting, x in answers.items()}
        return right, self.continued(model, make) if self.full else {}

    def answers(
        self, model, task: str, make: Make, settings: tuple[str, ...] = SETTINGS
    ) -> dict[str, Tensor]:
        """Return each document's share of right answers (B,), by setting."""
        batch = self.batches[task]
        recorded = self.recordings[task]
        return replayed_or_read(
            retrieve, model, batch, make, recorded, settings=settings
        )

    def continued(self, model, make: Make, alone: bool = False) -> dict:
        """Return `continuation` of the text."""
        recorded = self.full.recording
        return replayed_or_read(
            continuation, model, self.full, make, recorded, alone=alone
        )


def replayed_or_read(measure, model, documents, make: Make, recorded, **options):
    """Measure with the recording; if a method cannot replay, let the decoder read the prompt."""
    try:
        return measure(model, documents, make, recorded, **options)
    except CannotReplay:
        return measure(model, documents, make, **options)


# ---- all documents and texts, in parts ----


def continuation_length(T: int) -> int:
    """Return how many of a text's T tokens come after the compressed prompt."""
    return min(64, T // 2)


def check_size(model, documents: int, least: int, T: int):
    """Raise ValueError if the documents would be too few, or longer than the model can read."""
    whole("documents", documents, least)
    whole("T", T, 2)
    if T > model.config.max_len:
        raise ValueError(
            f"{T} tokens exceed the model's length of {model.config.max_len}; "
            "make the documents shorter"
        )


def text_windows(tasks: Tasks, windows: int, T: int, model=None) -> Tensor:
    """Return (windows, T) tokens: evenly spaced windows of text, after BOS if `model` uses it."""
    first = opening(tasks.encoding, model.config) if model else []
    stream = tasks.stream[tasks.stream != tasks.bos]
    n = T - len(first)
    whole("windows", windows, 1)
    whole("T", T, 2, len(stream))
    starts = np.linspace(0, len(stream) - n, windows).astype(int)
    rows = [np.append(first, stream[start : start + n]) for start in starts]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def build(
    model,
    tasks: Tasks,
    T: int,
    documents: int,
    seed: int = 0,
    names: Iterable[str] = TASKS,
) -> list[Benchmark]:
    """Record `documents` documents of each task and half as many texts, at least 2, T tokens each.

    The decoder reads some of them at once (`BATCH`), so there are several benchmarks; `run` joins
    them.
    """
    check_size(model, documents, 2, T)
    n = max(min(BATCH, TOKENS // T), 1)
    parts = []
    for task in names:
        for batch in tasks.batches(task, seed, documents, T):
            parts += [({task: part}, None) for part in cut(batch, n)]
    texts = text_windows(tasks, max(2, documents // 2), T, model)
    parts += [({}, part) for part in texts.split(n)]
    bar = tqdm(parts, "prompts", leave=False, disable=None)
    return [Benchmark.read(model, *part) for part in bar]


def cut(batch: Batch, n: int) -> list[Batch]:
    """Split a batch into batches of at most n documents."""
    parts = []
    for start in range(0, len(batch.tokens), n):
        rows = slice(start, start + n)
        tokens = batch.tokens[rows]
        roles = batch.roles[rows]
        parts.append(Batch(tokens, roles, batch.question, batch.answers))
    return parts


def run(benchmarks: list[Benchmark], model, make: Make) -> dict:
    """Measure caches from `make` on all documents and texts; return one row.

    The row has the mean and standard error of each task and setting. Of `continuation` it has the
    mean kl, the prompt's tokens, the most slots, and the bytes, summed. "each" has the values of
    single documents, or of single texts for kl and nll.
    """
    parts = [benchmark.measured(model, make) for benchmark in benchmarks]
    row = {}
    each = {}
    for name in dict.fromkeys(name for right, _ in parts for name in right):
        right = torch.cat([right[name] for right, _ in parts if name in right])
        row[name] = right.mean().item()
        row[f"{name}_se"] = standard_error(right)
        each[name] = right.tolist()

    texts = [text for _, text in parts if text]
    kl, nll = (torch.cat([text[key] for text in texts]) for key in ("kl", "nll"))
    each["kl"] = kl.tolist()
    each["nll"] = nll.tolist()
    for key in "live", "live_16", "allocated":
        row[key] = sum(text[key] for text in texts)
    for key in "slots", "slots_end":
        row[key] = max(text[key] for text in texts)
    row["prompt"] = texts[0]["prompt"]
    row["kl"] = kl.mean().item()
    row["each"] = each
    return row


def standard_error(x: Tensor) -> float:
    """Return the standard error of the mean of x (n,)."""
    return (x.std() / len(x) ** 0.5).item()


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Return the mean of x (n,) and its standard error."""
    return x.double().mean().item(), standard_error(x.double())


def excess(row: dict) -> str:
    """Return a sentence if a row's method holds more than its budget after a prompt, else ""."""
    if row["keep_ratio"] is None:
        return ""
    budget = budget_for(row["keep_ratio"], row["prompt"])
    if row["slots"] <= budget:
        return ""
    return f"holds {row['slots']:g} slots a head after a prompt, and its budget is {budget}"
