"""KVzip taken apart: each row is what the method itself finds."""
import torch

from common import tasks
from methods.kvzip import KVzip, OneReading
from methods.theory.kvzip import apart
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
