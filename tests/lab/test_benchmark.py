"""Rows are means over all documents and texts, however many are read at once."""

from functools import cache
import math

import numpy as np
import pytest
import torch

from common import decoder, tasks
from lab import benchmark
from lab.benchmark import (
    TASKS,
    Benchmark,
    build,
    cut,
    excess,
    mean_and_error,
    run,
    text_windows,
)
from lab.continuation import continuation, reference
from lab.methods_by_name import pick
from lab.retrieval import budget_for, maker, retrieve
from methods.baselines.h2o import H2O
from methods.baselines.random_eviction import RandomEviction
from nanollm.cache import Method
from nanollm.model import Config, Decoder

V = 2048
SIZE = dict(vocab_size=V, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32)


@pytest.fixture(scope="module")
def model():
    return decoder(**SIZE, max_len=512, d_ff=48)


# ---- rows ----


@pytest.mark.parametrize("at_once, reads", [(32, 4), (3, 7)])
def test_a_row_has_means_and_errors_of_all_documents(
    model, monkeypatch, at_once, reads
):
    """And bytes are sums over the texts; each part is recorded once."""
    monkeypatch.setattr(benchmark, "BATCH", at_once)
    parts = build(model, tasks("test"), 320, 4, seed=7)
    assert len(parts) == reads  # 4 documents of 3 tasks, and 2 texts
    monkeypatch.setattr(Benchmark, "read", None)
    make = maker(model, H2O, 0.25)
    row = run(parts, model, make, alone=True)

    right = {}
    for task in TASKS:
        documents = tasks("test").batch(task, 7, 4, 320)
        rows = [part.batches[task].tokens for part in parts if task in part.batches]
        assert (np.concatenate(rows) == documents.tokens).all()
        for setting, x in retrieve(model, documents, make).items():
            right[f"{task}_{setting}"] = x.double().numpy()
    for name, x in right.items():
        assert row[name] == pytest.approx(x.mean())
        assert row["each"][name] == x.tolist()
        assert row[f"{name}_se"] == pytest.approx(x.std(ddof=1) / math.sqrt(4))

    texts = text_windows(tasks("test"), 2, 320, model)
    text = continuation(model, reference(model, texts, 64), make, alone=True)
    assert row["each"]["kl"] == pytest.approx(text["kl"].tolist(), rel=1e-4)
    assert row["perplexity"] == pytest.approx(math.exp(np.mean(row["each"]["nll"])))
    assert np.allclose(row["l1_alone"], text["l1_alone"].mean(0), rtol=1e-4)
    for name in "live", "slots", "slots_end", "prompt":
        assert row[name] == text[name]


def test_a_row_can_be_measured_again(model):
    parts = build(model, tasks("test"), 320, 2)
    make = maker(model, H2O, 0.25)
    assert run(parts, model, make) == run(parts, model, make)


def test_one_setting_or_both_of_a_task(model):
    batches = dict(needle=tasks("test").batch("needle", 0, 3, 320))
    part = Benchmark.read(model, batches)
    make = maker(model, H2O, 0.25)
    both = part.answers(model, "needle", make)
    assert [*both] == ["aware", "agnostic"]
    for setting, x in both.items():
        (alone,) = part.answers(model, "needle", make, (setting,)).values()
        assert alone.equal(x)
    right, text = part.measured(model, make)
    assert [*right] == ["needle_aware", "needle_agnostic"]
    assert text == {}


def test_a_batch_is_cut_into_parts():
    batch = tasks("test").batch("needle", 0, 5, 320)
    parts = cut(batch, 2)
    assert [len(part.tokens) for part in parts] == [2, 2, 1]
    for name in "tokens", "roles":
        rows = [getattr(part, name) for part in parts]
        assert (np.concatenate(rows) == getattr(batch, name)).all()
    assert {part.question for part in parts} == {batch.question}


def test_mean_and_error_is_the_standard_error_of_the_mean():
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert mean_and_error(x) == pytest.approx((3, math.sqrt(14 / 3 / 4)))


# ---- texts ----


@pytest.mark.parametrize("bos, first", [(None, []), (7, []), (2047, [2047])])
def test_texts_begin_as_the_model_s_do(model, monkeypatch, bos, first):
    # 2047 is what the tokenizer calls BOS
    monkeypatch.setattr(model.config, "bos", bos)
    made = tasks("test")
    stream = made.stream[made.stream != made.bos].tolist()
    rows = text_windows(made, 5, 24, model)
    n = 24 - len(first)
    expected = []
    for start in np.linspace(0, len(stream) - n, 5):
        expected.append(first + stream[int(start) : int(start) + n])
    assert rows.tolist() == expected
    assert rows.dtype == torch.int64
    assert text_windows(made, 5, 24)[0].tolist() == stream[:24]


@pytest.mark.parametrize("windows, T", [(0, 50), (4, 1), (4, 10**9)])
def test_texts_that_there_are_not_are_refused(windows, T):
    with pytest.raises(ValueError, match="(windows 0|T 1|T 1000000000) must be"):
        text_windows(tasks("test"), windows, T)


@pytest.mark.parametrize(
    "T, documents, message",
    [
        (320, 1, "documents 1 must be a .* at least 2"),
        (320.0, 4, "T 320.0 must be"),
        (513, 4, "513 tokens exceed the model's length of 512"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(
    model, monkeypatch, T, documents, message
):
    monkeypatch.setattr(Decoder, "forward", None)
    with pytest.raises(ValueError, match=message) as error:
        build(model, None, T, documents)
    assert "\n" not in str(error.value)


# ---- what a row holds beyond its budget ----


class NeverEvicts(RandomEviction):
    def evict(self, layer):
        pass


class EvictsHalf(H2O):
    def evict(self, layer):
        if layer.index:
            super().evict(layer)


@cache
def long_texts():
    """Return a decoder with heads as large as the checkpoint's, and texts of a usual length."""
    torch.manual_seed(0)
    # KVzip reads twice
    config = Config(**SIZE, max_len=1024, head_dim=32, d_ff=32)
    model = Decoder(config).eval()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, V, (2, 456), generator=generator)
    return model, reference(model, tokens, 8)


def measured(kind, keep_ratio, store=None, **options):
    model, full = long_texts()
    make = maker(model, kind, keep_ratio, store, **options)
    row = Benchmark({}, {}, full).continued(model, make)
    return row | dict(keep_ratio=keep_ratio)


@pytest.mark.parametrize(
    "kind, slots", [(NeverEvicts, 447), (EvictsHalf, (447 + 112) / 2)]
)
def test_a_method_that_holds_more_is_found_out(kind, slots):
    row = measured(kind, 0.25)
    assert row["slots"] == slots
    words = f"holds {slots:g} slots a head after a prompt, and its budget is 112"
    assert excess(row) == words
    assert excess(row | dict(keep_ratio=None)) == ""


@pytest.mark.parametrize("name", pick([]))
def test_no_method_is_said_to_hold_more_than_its_budget(name):
    variant = pick([name])[name]
    if not variant.takes("budget"):
        return
    gates = torch.zeros(2, 8 * 32 + 1, 2)
    options = variant.given(window_size=8, gates=gates, ends=torch.arange(V) % 9 == 0)
    row = measured(variant.kind, 0.0625, variant.store, **options)
    assert row["prompt"] == 447
    assert excess(row) == ""
    budget = budget_for(0.0625, 447)
    assert 0 < row["slots"] <= budget == 28
    if name in ("h2o", "ada_kv"):
        assert row["slots"] == budget
        assert row["slots_end"] == (budget if name == "h2o" else budget + 8)


def test_the_full_cache_holds_everything():
    row = measured(Method, None)
    assert (row["slots"], row["slots_end"]) == (447, 455)
