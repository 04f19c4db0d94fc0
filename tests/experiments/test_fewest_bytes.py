"""Fewest bytes: each row is what the method finds; standard errors decide which rows count."""
import json

import pytest
import torch

from common import tasks
from experiments import fewest_bytes
from experiments.fewest_bytes import Found, enough, kept, summary, verdict
from nanollm import TINY
from nanollm.cache import bytes_in_16_bits
from nanollm.commands.registry import pick
from nanollm.generate import end_prompt, prefill
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.benchmark import TASKS
from nanollm.measure.evaluate import maker, prompt_and_question, retrieve


@torch.no_grad()
def test_each_row_is_what_the_method_finds(monkeypatch):
    monkeypatch.setattr(fewest_bytes, "KEEP_RATIOS", (0.5, 0.25))
    monkeypatch.setattr(fewest_bytes, "FIRST", 2)
    monkeypatch.setattr(fewest_bytes, "FAR", torch.inf)  # every piece is asked
    model = from_hf(TINY)
    methods = pick(["full", "kvzip", "snap_kv", "quantized_2"])
    rows = fewest_bytes.found(model, tasks("test"), methods, 4, 160)
    assert [*rows] == [("full", None), ("kvzip", 0.5), ("kvzip", 0.25), ("snap_kv", 0.5), ("snap_kv", 0.25),
                       ("quantized_2", None)]
    for (name, part), row in rows.items():
        options = {} if part is None or name == "kvzip" else dict(window_size=8)
        make, held = maker(model, methods[name], part, **options), 0
        for task, right in row.right.items():
            batch = tasks("test").batch(task, 0, 4, 160, **TASKS[task])
            assert torch.equal(right, retrieve(model, batch, make)["agnostic"])
            _, context, _ = prompt_and_question(model, batch)
            caches = make(batch.question, context)
            prefill(model, context, caches)
            end_prompt(model, context, caches)
            held += bytes_in_16_bits(caches)
        assert row.seconds > 0 and row.bytes == pytest.approx(held / 8, rel=0.01)  # mean over tasks
    assert rows["full", None].right["needle"].mean() == 1


def found(*right, held=1.0, documents=100):
    """A row of as many right answers to the first documents of each task."""
    answers = [torch.arange(documents).lt(n).float() for n in right]
    return Found(dict(zip(("needle", "pairs"), answers)), held, 1.0)


def test_what_is_kept_is_a_share_of_the_full_cache_s_answers():
    full = found(80, 80)
    share, error = kept(found(76, 72), full)
    assert share == pytest.approx((76 + 72) / 160)
    lost = [torch.zeros(100).index_fill(0, torch.arange(n, 80), 1.0) for n in (76, 72)]  # by document
    beyond = [0.05 * full.right["needle"] - 0.95 * x - 0.05 * x for x in lost]
    assert error == pytest.approx(sum(x.var() / 100 for x in beyond).item() ** 0.5 / 1.6, rel=1e-3)
    first = found(40, 36, documents=50)  # asked no more; the full cache is right on all of these
    assert kept(first, full)[0] == pytest.approx((40 + 36) / 100)


def test_bytes_and_reading_are_in_units_of_the_full_cache_s():
    made = {("full", None): found(80, 80, held=100.0),
            ("a", 0.5): found(80, 80, held=25.0)._replace(seconds=3.0)}
    full, row = summary("built", made)
    assert (full["bytes"], full["reading"]) == (1, 1) and (row["bytes"], row["reading"]) == (0.25, 3)


def test_a_row_counts_if_it_passes_by_one_standard_error():
    made = {("full", None): found(80, 80, held=100.0), ("a", 0.5): found(80, 80, held=50.0),
            ("a", 0.25): found(77, 77, held=25.0), ("a", 0.125): found(60, 60, held=12.0),
            ("b", 0.5): found(70, 70, held=50.0), ("c", None): found(80, 79, held=15.0)}
    rows = json.loads(json.dumps(summary("built", made)))
    assert [verdict(row) for row in rows] == ["yes", "yes", "undecided", "no", "no", "yes"]
    assert [row["bytes"] for row in rows] == [1, 0.5, 0.25, 0.12, 0.5, 0.15]
    best = {name: row["keep_ratio"] for name, row in enough(rows).items()}
    assert best == {"c": None, "a": 0.5, "full": None}
    nothing = summary("built", {("full", None): found(0, 0), ("a", 0.5): found(0, 0)})
    assert enough(nothing) == {}  # no method can do less
    assert "Undecided on built: none" in fewest_bytes.show(nothing)


@pytest.mark.parametrize("far, asked", [(4, 6), (torch.inf, 12)])
def test_a_row_that_misses_by_far_is_asked_no_more(monkeypatch, far, asked):
    for name, x in dict(KEEP_RATIOS=(0.0625,), FIRST=6, FAR=far).items():
        monkeypatch.setattr(fewest_bytes, name, x)
    rows = fewest_bytes.found(from_hf(TINY), tasks("test"), pick(["full", "random"]), 12, 160)
    assert [row.documents for row in rows.values()] == [12, asked]


def test_a_budget_too_small_for_a_method_is_named_before_any_work(monkeypatch):
    monkeypatch.delattr(fewest_bytes, "measure")
    with pytest.raises(ValueError, match="quest at 6.25 % of 1.. tokens: budget .* a page has 16 tokens"):
        fewest_bytes.found(from_hf(TINY), tasks("test"), pick(["full", "quest"]), 2, 160)


def test_a_method_that_fits_to_the_rereads_queries_gets_them_at_each_budget(monkeypatch):
    monkeypatch.setattr(fewest_bytes, "KEEP_RATIOS", (0.25, 0.125))
    methods = pick(["full", "kvzip", "attention_matching"])
    rows = fewest_bytes.found(from_hf(TINY), tasks("test"), methods, 2, 160)
    for ratio in (0.25, 0.125):  # a fitted entry has a bias
        assert rows["attention_matching", ratio].bytes > rows["kvzip", ratio].bytes
