"""KVzip taken apart: each row is what the method itself finds."""
import torch

from common import tasks
from methods.duo_attention import DuoAttention
from methods.kvzip import KVzip, OneReading
from methods.theory.kvzip import apart, by_heads, fewer_bits
from nanollm import TINY
from nanollm.evaluate import maker, retrieve
from nanollm.weights import from_hf


@torch.no_grad()
def test_each_row_is_what_the_method_finds():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 6, 160)
    found, ratio = apart(model, batch, shares=(1.0, 0.25), steps=list)
    assert len(found) == 2 * 2 * 2 * 2 and ratio > 0
    for reading, Method in (("second", KVzip), ("first alone", OneReading)):
        for score in ("max", "sum"):
            for ranked, across in (("all", True), ("each head", False)):
                make = maker(model, Method, 0.25, score=score, across=across)
                expected = retrieve(model, batch, make)["blind"]
                assert torch.equal(found[reading, score, ranked, 0.25], expected), (reading, score, ranked)
                assert torch.equal(found[reading, score, ranked, 1.0], found["second", "max", "all", 1.0])
    assert found["second", "max", "all", 1.0].mean() > 0.9  # nothing was evicted
    assert found["second", "max", "all", 0.25].mean() > found["first alone", "sum", "each head", 0.25].mean()


@torch.no_grad()
def test_fewer_bits_are_fewer_bytes():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 4, 160)
    found = fewer_bits(model, batch, shares=(0.25,), steps=list)
    make = maker(model, KVzip, 0.25)
    assert torch.equal(found["kvzip", 16, 0.25][0], retrieve(model, batch, make)["blind"])
    for name in ("snap_kv", "kvzip"):
        exact, four, two = (found[name, bits, 0.25][1] for bits in (16, 4, 2))
        assert two < four < exact < found["full", 16, 1.0][1] / 2
    assert found["full", 16, 1.0][0].mean() == 1
    assert found["quantized_2", 2, 1.0][1] > found["kvzip", 4, 0.25][1]


@torch.no_grad()
def test_duo_attention_by_two_sets_of_heads():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 6, 160)
    heads = {"right": ((1, 0), (1, 1), (1, 2)), "wrong": ((5, 0), (5, 1), (5, 2))}
    found = by_heads(model, batch, heads, shares=(0.5, 0.3), steps=list)
    for (name, part), right in found.items():
        make = maker(model, DuoAttention, part, heads=heads[name])
        assert torch.equal(right, retrieve(model, batch, make)["blind"])
    assert len(found) == 4 and found["right", 0.3].mean() > found["wrong", 0.3].mean() + 0.3
