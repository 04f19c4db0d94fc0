"""Compare KVReviver with loops; check its hashes, its sums and a small budget."""

from itertools import combinations, product
import math

import pytest
import torch

from common import TOKENS, alone, decoder
from exact import F64, near
from loops import check_sums
from methods.kv_reviver import KVReviver, Sketch
from methods.ours.kv_reviver_shrunk import SignedSketch
from nanollm.cache import PackedSlots, make_cache
from nanollm.generate import generate
from sketches import PARTS, SHORT, WHOLE, check_walk, parts_of, step, texts


@pytest.mark.claim("R1")
def test_over_the_seeds_pairs_fall_independently_and_signs_apart():
    """Over the seeds, slots and signs are uniform; tokens and rows coincide as by chance."""
    like = torch.zeros(1, 1, 1, 1)
    J = torch.tensor([[[0, 1, 2, 7, 100, 101, 2000]]])
    width = 5
    buckets = []
    signs = []
    for seed in range(1500):
        sketch = Sketch(like, 3, width, seed)
        first = width * torch.arange(3)[:, None]
        buckets.append(sketch.bucket(J)[0, 0].T - first)
        signs.append(1.0 - 2 * sketch.sign_bit(J)[0, 0].T)
    bucket = torch.stack(buckets)
    sign = torch.stack(signs)
    assert near(sign, 0)
    for slot in range(width):
        assert near((bucket == slot).float(), 1 / width)
    for i, j in combinations(range(7), 2):
        together = (bucket[..., i] == bucket[..., j]).float()
        apart = sign[..., i] * sign[..., j]
        assert near(together, 1 / width)
        assert near(apart, 0)
        assert near(together * apart, 0)
        assert near(sign[..., i] * (bucket[..., j] == 0), 0)
        assert near(sign[..., j] * (bucket[..., j] == 0), 0)
    for row, other in combinations(range(3), 2):
        assert near((bucket[:, row] == bucket[:, other]).float(), 1 / width)
        assert near(sign[:, row] * sign[:, other], 0)


@pytest.mark.claim("R1")
def test_linear_hashes_would_bias_what_is_read(note):
    """With linear signs the median of a sketch is biased over 800 seeds; with cubic ones not.

    Twelve ones are in one slot per row, with signs.
    """
    J = torch.arange(12).view(1, 1, -1)
    ones = torch.ones(1, 1, 12, 1, dtype=F64)
    errors = []
    for seed, cubic in product(range(800), (False, True)):
        sketch = SignedSketch(ones, 3, 1, seed)
        sketch.sign_by[:2] *= cubic
        sketch.insert(J, ones, ones)
        errors.append(sketch.query(J)[1].mean() - 1)
    error = torch.stack(errors).view(-1, 2)
    linear, cubic = error.mean(0).tolist()
    spread, around = (error.std(0) / math.sqrt(800)).tolist()
    assert linear < -5 * spread
    assert abs(cubic) < 4 * around
    note("R1", linear=linear, cubic=cubic, around=around)


WALKS = [
    (WHOLE, {}),
    (PARTS, dict(rows=1, replace_rate=1.0, slack=0)),
    (SHORT, {}),
    (WHOLE, dict(vague=0.0)),
]


@pytest.mark.parametrize("walk, changed", WALKS)
@pytest.mark.claim("R2", "R3")
def test_the_store_is_the_loop_at_every_step(walk, changed, note):
    """Exact and vague tokens, scores, sketch and bytes equal the loop's."""
    note("R2", walks=len(WALKS))
    check_walk(KVReviver, walk, changed)


@pytest.mark.claim("R1", "R3")
def test_where_nothing_collides_compressed_attention_is_exact(note):
    text = texts(40)
    full = PackedSlots()
    layer = alone(KVReviver(8000, vague=0.9985, recent=0.0006, slack=1))
    most = 2e-6  # because weights have 32 bits
    for part in parts_of(40, 30):
        y = step(layer, text, part, 30)
        assert (y - step(full, text, part, 30)).abs().max() < most
    assert layer.length < 12
    bucket = layer.sketch.bucket(torch.arange(40).view(1, 1, -1))[0, 0]
    assert all(len(row.unique()) == 40 for row in bucket.T)
    note("R3", most=most)


def test_seed_and_layer_decide_the_hashes_also_after_one_token():
    def buckets(seed):
        options = dict(budget=24, vague=0.2, slack=2, rows=1, seed=seed)
        caches = make_cache(decoder(), KVReviver, **options)
        # one token is cached when the prompt ends
        generate(decoder(), TOKENS[:, :1], 30, caches)
        J = torch.arange(30).view(1, 1, -1)
        return [str(layer.sketch.bucket(J).tolist()) for layer in caches]

    one = buckets(0)
    assert buckets(0) == one
    assert len({*one, *buckets(1)}) == 6


@pytest.mark.parametrize("chunk", [300, 1])
def test_attention_is_added_up_in_32_bits(chunk):
    check_sums(KVReviver(budget=300), lambda layer: layer.score, chunk)


def test_a_budget_without_room_for_exact_tokens_is_refused():
    layer = alone(KVReviver(budget=10))
    with pytest.raises(ValueError, match="budget 10 has no room"):
        step(layer, texts(30, torch.float32), range(30), 30)
