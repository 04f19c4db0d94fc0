"""KVzip taken apart: each row is what the method itself finds."""
import torch

from common import tasks
from experiments.kvzip_parts import apart, by_heads, by_pieces, fewer_bits
from methods.duo_attention import DuoAttention
from methods.kvzip import KVzip
from methods.ours.kvzip_gain import GainKVzip
from methods.ours.one_reading import OneReading
from nanollm import TINY
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.evaluate import full_cache_bytes, maker, retrieve, budget_for


@torch.no_grad()
def test_each_row_is_what_the_method_finds():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 6, 160)
    found, times = apart(model, batch, keep_ratios=(1.0, 0.25))
    assert len(found) == 3 * 2 * 2 * 2 and times > 0
    for reading, Method in (("second", KVzip), ("by gain", GainKVzip), ("first alone", OneReading)):
        for score in ("max", "sum"):
            for ranked, across in (("all", True), ("each head", False)):
                make = maker(model, Method, 0.25, score=score, across=across)
                expected = retrieve(model, batch, make)["agnostic"]
                assert torch.equal(found[reading, score, ranked, 0.25], expected), (reading, score, ranked)
                assert torch.equal(found[reading, score, ranked, 1.0], found["second", "max", "all", 1.0])
    assert found["second", "max", "all", 1.0].mean() > 0.9  # nothing was evicted
    assert found["second", "max", "all", 0.25].mean() > found["first alone", "sum", "each head", 0.25].mean()


@torch.no_grad()
def test_fewer_bits_are_fewer_bytes():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 4, 160)
    found = fewer_bits(model, batch, keep_ratios=(0.25,))
    make = maker(model, KVzip, 0.25)
    assert torch.equal(found["kvzip", 16, 0.25][0], retrieve(model, batch, make)["agnostic"])
    for name in ("snap_kv", "kvzip"):
        exact, four, two = (found[name, bits, 0.25][1] for bits in (16, 4, 2))
        assert two < four < exact < found["full", 16, None][1] / 2
    assert found["full", 16, None][0].mean() == 1
    c, n = model.config, batch.answers[-1].stop  # a text's bytes after its answer, with a position a slot
    assert found["full", 16, None][1] == full_cache_bytes(c, n) + 4 * c.n_layers * c.n_kv_heads * n
    left = budget_for(0.25, batch.question) + n - batch.question  # a quarter of the context, and later tokens
    assert found["snap_kv", 16, 0.25][1] == full_cache_bytes(c, left) + 4 * c.n_layers * c.n_kv_heads * left
    assert found["quantized_2", 2, None][1] > found["kvzip", 4, 0.25][1]


@torch.no_grad()
def test_duo_attention_by_two_sets_of_heads():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 6, 160)
    heads = {"right": ((1, 0), (1, 1), (1, 2)), "wrong": ((5, 0), (5, 1), (5, 2))}
    found = by_heads(model, batch, heads, keep_ratios=(0.3, 0.2))  # at 0.2 aware finds more
    for (name, part), right in found.items():
        make = maker(model, DuoAttention, part, heads=heads[name])
        assert torch.equal(right, retrieve(model, batch, make)["agnostic"])
    assert len(found) == 4 and found["right", 0.3].mean() > found["wrong", 0.3].mean() + 0.3


@torch.no_grad()
def test_scored_entries_of_a_piece():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 3, 700)  # two pieces
    found = by_pieces(model, batch, keep_ratios=(0.04,))
    for scored, own in (("its own", True), ("all", False)):
        right, seconds = found[scored, 0.04]
        assert seconds > 0
        assert torch.equal(right, retrieve(model, batch, maker(model, KVzip, 0.04, own=own))["agnostic"])
