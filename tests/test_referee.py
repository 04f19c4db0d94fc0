"""Compare all fields of lab's rows with a reader of one document, and then one token, at a time."""

import numpy as np
import pytest
import torch

from common import tasks
from lab import benchmark
from lab.methods_by_name import pick
from lab.retrieval import maker
from lab.table import row_of
from nanollm import TINY
from nanollm.cache import cache_bytes, compress, crop
from nanollm.checkpoint import from_hf

N, T = 3, 88  # documents of each task, and texts; their tokens
CUT, NEW = 79, 8  # a text's prompt, and what follows; the token between is read twice
APPEND = {"full": None, "full@2": None, "ada_kv+critical": 0.5, "kvzip": 0.1}
KEEP = APPEND | {"h2o": 0.7, "scissorhands": 0.7}
METHODS = pick([*KEEP])
MODEL = from_hf(TINY)
TASKS = tasks("test")


def compressed(name, tokens, cut=CUT, whole=CUT):
    """Read tokens, forget those from `cut` on, and compress; a budget is part of `whole`."""
    budget = round((KEEP[name] or 1) * whole)
    caches = METHODS[name].caches(MODEL, budget=budget)
    MODEL(tokens[None], caches)
    crop(caches, cut)
    compress(MODEL, tokens[None, :cut], caches)
    return caches


def read(tokens, caches):
    """Read token by token; return log p of each next one, (n, V)."""
    logits = [MODEL(token[None], caches)[0] for token in tokens.split(1)]
    return torch.cat(logits).double().log_softmax(1).numpy()


def is_right(name, batch, aware, tokens):
    """Return whether each token of the answer is the likeliest, as greedy decoding needs."""
    [span] = batch.answers
    cut = span.start - 1 if aware else batch.question
    caches = compressed(name, tokens[: cut + aware], cut, batch.question)
    said = read(tokens[cut : span.stop - 1], caches).argmax(1)
    return float(np.array_equal(said[span.start - 1 - cut :], tokens[span]))


def measured(name, text):
    """Return a text's fields of the row, and the −log p of its true tokens."""
    prompt = text[: CUT + 1]
    after = text[CUT:-1]
    caches = compressed(name, prompt)
    held = lambda: sum((x.pos < x.seen).sum().item() for x in caches)
    start = held()
    p = read(after, compressed("full", prompt))
    q = read(after, caches)
    end = held()
    live = cache_bytes(caches)[0]
    exact = end - start if "@" in name else end  # the others have few bits
    if name in APPEND:  # fed at once in lab; a full buffer grows by a tenth of that
        caches = compressed(name, prompt)
        MODEL(after[None], caches)
    return dict(
        kl=(np.exp(p) * (p - q)).sum(1).mean(),
        nll=-q[range(NEW), text[-NEW:]].mean(),
        slots=start / 18,  # of a head: 3 heads in 6 layers
        slots_end=end / 18,
        live=live,
        live_16=live - 2 * 64 * exact,  # two bytes less a number
        allocated=cache_bytes(caches)[1],
    )


def row_by_hand(name):
    row = dict(keep_ratio=KEEP[name], tokens=T, prompt=CUT)
    row["each"] = each = {}
    for aware, setting in enumerate(("agnostic", "aware")):
        for task in benchmark.TASKS:
            batch = TASKS.batch(task, 1, N, T)
            key = f"{task}_{setting}"
            texts = torch.tensor(batch.tokens)
            each[key] = [is_right(name, batch, aware, text) for text in texts]
            row[key] = np.mean(each[key])
            row[f"{key}_se"] = np.std(each[key], ddof=1) / N**0.5
        means = [row[f"{task}_{setting}"] for task in benchmark.TASKS]
        row[setting] = np.mean(means)

    texts = [measured(name, text) for text in benchmark.text_windows(TASKS, N, T)]
    for key in texts[0]:
        row[key] = np.mean([text[key] for text in texts], 0).tolist()
        if key in ("kl", "nll"):
            each[key] = [np.mean(text[key]) for text in texts]
    del row["nll"]  # a row has it of each text
    return row


@pytest.mark.slow
@torch.inference_mode()
def test_rows_are_what_a_reader_measures(monkeypatch, subtests):
    patch = monkeypatch.setattr
    patch(type(TASKS).pairs, "__defaults__", (6, 1, 1))  # short documents
    patch(type(TASKS).few_shot, "__defaults__", (4, 3))
    assert [*map(benchmark.continuation_length, (T, 320))] == [T // 2, 64]
    patch(benchmark, "continuation_length", lambda T: NEW)
    patch(benchmark, "BATCH", 2)  # lab reads two of three at once
    parts = benchmark.build(MODEL, TASKS, T, N, seed=1)[:-1]  # without its two texts
    parts += benchmark.build(MODEL, TASKS, T, 2 * N, names=())
    partly = set()
    for name, keep in KEEP.items():
        with subtests.test(name):
            variant = METHODS[name]
            make = maker(MODEL, variant.kind, keep, variant.store, **variant.options)
            row = benchmark.run(parts, MODEL, make)
            row = row_of(name, keep, T, {}, row)
            del row["method"]
            close = dict(rtol=1e-5, atol=1e-5, check_dtype=False)
            torch.testing.assert_close(row, row_by_hand(name), **close)
            partly |= {key for key in row if "_se" in key and row[key]}
    assert len(partly) == 6  # tasks and settings neither all right nor all wrong
