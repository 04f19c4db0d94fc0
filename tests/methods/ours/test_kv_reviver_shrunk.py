"""Compare our three ways to read the sketch with loops; check the mean of numbers of 16 bits."""

import pytest
import torch

from common import alone
from exact import random
from methods.kv_reviver import KVReviver
from methods.ours.kv_reviver_shrunk import (
    MeanReviver,
    ShrunkReviver,
    ShrunkSketch,
    SignedReviver,
)
from sketches import B, H, PARTS, SHORT, WHOLE, check_walk, parts_of, step, texts


@pytest.mark.parametrize(
    "Method, walk, changed",
    [
        (MeanReviver, WHOLE, {}),
        (MeanReviver, PARTS, dict(rows=1)),
        (SignedReviver, PARTS, dict(replace_rate=1.5)),
        (SignedReviver, WHOLE, dict(rows=1)),
        (ShrunkReviver, SHORT, dict(vague=0.02)),
        (ShrunkReviver, PARTS, {}),
        (ShrunkReviver, WHOLE, dict(rows=1, slack=4)),
    ],
)
def test_the_store_is_the_loop_at_every_step(Method, walk, changed):
    check_walk(Method, walk, changed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits_the_mean_is_exact_and_the_budget_holds(dtype):
    """The mean stored of 600 keys is right to about 1e-4; a head's bytes end within its budget."""
    J = torch.arange(600).view(1, 1, -1)
    k = (1 + random(1, 1, 600, 4) / 4).to(dtype)
    sketch = ShrunkSketch(k, 1, 3, 0)
    for one, x in zip(J.split(1, 2), k.split(1, 2)):
        sketch.insert(one, x, -x)
    mean = sketch.sum[0, 0, :4].double() / 600
    assert torch.allclose(mean, k[0, 0].double().mean(0), atol=1e-4)
    text = texts(66, dtype)
    for Method in (KVReviver, MeanReviver, ShrunkReviver):
        layer = alone(Method(40, slack=0))
        for part in parts_of(66, 60):
            step(layer, text, part, 60)
        # 20 bytes per entry
        size = layer.bytes()[0] / B / H
        assert 40 * 20 - 20 - 3 * 16 < size <= 40 * 20
