"""Documents and texts are cut, recorded once, and no row holds more than it may."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import tasks
from lab import benchmark
from lab.benchmark import (
    Benchmark,
    build,
    cut,
    excess,
    run,
    text_windows,
)
from lab.continuation import reference
from lab.methods_by_name import pick
from lab.retrieval import budget_for, maker
from methods.baselines.h2o import H2O
from nanollm.model import Config, Decoder

V = 2048


# ---- rows ----


@pytest.mark.parametrize("at_once, reads", [(32, 4), (3, 7)])
def test_each_part_is_recorded_once_and_can_be_measured_again(
    model, monkeypatch, at_once, reads
):
    """tests/test_referee.py says what a row has to hold."""
    monkeypatch.setattr(benchmark, "BATCH", at_once)
    parts = build(model, tasks("test"), 320, 4)
    assert len(parts) == reads  # 4 documents of 3 tasks, and 2 texts
    monkeypatch.setattr(Benchmark, "read", None)
    make = maker(model, H2O, 0.25)
    row = run(parts, model, make)
    assert run(parts, model, make) == row
    assert [len(x) for x in row["each"].values()] == [4] * 6 + [2] * 2


def test_roles_are_cut_as_tokens_are():
    batch = tasks("test").batch("needle", 0, 3, 320)
    for name in "tokens", "roles":
        rows = [getattr(part, name) for part in cut(batch, 2)]
        assert np.array_equal(np.concatenate(rows), getattr(batch, name))


# ---- texts ----


@pytest.mark.parametrize("bos, first", [(7, []), (2047, [2047])])
def test_texts_begin_as_the_model_s_do(model, monkeypatch, bos, first):
    # 2047 is what the tokenizer calls BOS
    monkeypatch.setattr(model.config, "bos", bos)
    made = tasks("test")
    stream = made.stream[made.stream != made.bos].tolist()
    n = 24 - len(first)
    expected = []
    for start in np.linspace(0, len(stream) - n, 5):
        expected.append(first + stream[int(start) : int(start) + n])
    assert text_windows(made, 5, 24, model).tolist() == expected
    assert text_windows(made, 5, 24)[0].tolist() == stream[:24]
    (part,) = build(model, made, 24, 10, names=())
    assert part.full.tokens.tolist() == expected


@pytest.mark.parametrize("windows, T", [(0, 50), (4, 10**9)])
def test_texts_that_there_are_not_are_refused(windows, T):
    with pytest.raises(ValueError, match="(windows 0|T 1000000000) must be"):
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


class EvictsHalf(H2O):
    def evict(self, layer):
        if layer.index:
            super().evict(layer)


@cache
def long_texts():
    """Return a decoder with heads as large as nanollm/tiny's, and texts of 456 tokens."""
    torch.manual_seed(0)
    size = dict(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, d_model=32, d_ff=32)
    # KVzip reads twice
    model = Decoder(Config(V, max_len=1024, **size)).eval()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, V, (2, 456), generator=generator)
    return model, reference(model, tokens, 8)


def measured(kind, keep_ratio, store=None, **options):
    model, full = long_texts()
    make = maker(model, kind, keep_ratio, store, **options)
    row = Benchmark({}, {}, full).continued(model, make)
    return row | dict(keep_ratio=keep_ratio)


def test_a_method_that_holds_more_is_found_out():
    row = measured(EvictsHalf, 0.25)
    assert row["slots"] == (447 + 112) / 2
    words = "holds 279.5 slots a head after a prompt, and its budget is 112"
    assert excess(row) == words
    within = row | dict(slots=112)
    for texts in (within, row), (row, within):
        parts = [SimpleNamespace(measured=lambda *_, x=x: ({}, x)) for x in texts]
        assert run(parts, None, None)["slots"] == 279.5
    assert excess(row | dict(keep_ratio=None)) == ""


@pytest.mark.parametrize("name", pick([]))
def test_no_method_is_said_to_hold_more_than_its_budget(name):
    variant = pick([name])[name]
    if not variant.takes("budget"):
        return
    learned = dict(gates=torch.zeros(2, 8 * 32 + 1, 2), edges=torch.zeros(2, 2, 2))
    ends = torch.arange(V) % 9 == 0
    options = variant.given(window_size=8, ends=ends, **learned)
    row = measured(variant.kind, 0.0625, variant.store, **options)
    assert excess(row) == ""
    assert 0 < row["slots"] <= budget_for(0.0625, 447) == 28
