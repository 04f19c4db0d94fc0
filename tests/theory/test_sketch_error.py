"""KVReviver's lemmas and bounds, what a sketch can tell, and budgets by layer."""

from collections import Counter
from functools import cache as once
from itertools import product
import math

from hypothesis import strategies as st
import pytest
import torch

from common import TOKENS, decoder, tasks
from exact import F64, check, near, random
from lab.evaluate import text_windows
from lab.replay import Recorder, record
from methods.baselines.count_sketch import Sketch
from methods.kv_reviver import KVReviver
from methods.ours.kv_reviver_shrunk import MEDIAN, ShrunkSketch, SignedSketch
from methods.theory.sketch_error import (
    collision_variance,
    fisher_shares,
    load,
    printed_bound,
    relative_error,
    share_out,
)
from nanollm import TINY, checkpoint
from nanollm.cache import make_cache

each_rows = pytest.mark.parametrize("rows", MEDIAN)


def unit(*shape, seed=0):
    """Return random numbers with mean 0 and variance 1, exactly."""
    x = random(*shape, seed=seed)
    return (x - x.mean()) / x.std(correction=0)


def errors(kind, rows, width, x, runs):
    """Return estimate minus truth of the vectors x (a, 2D) by seed, (runs, a, 2D)."""
    (k, v), J, found = (
        (y[None, None] for y in x.chunk(2, -1)),
        torch.arange(len(x)).view(1, 1, -1),
        [],
    )
    for seed in range(runs):
        sketch = kind(k, rows, width, seed)
        sketch.insert(J, k, v)
        found.append(torch.cat(sketch.query(J), -1)[0, 0])
    return torch.stack(found) - x


@pytest.mark.claim("R6")
def test_the_printed_density_of_the_median_is_half_of_one(note):
    """The printed density 3 Φ(1 − Φ)φ of Lemmas 1 and 2 integrates to 1/2; the factor must be 6.

    Lemma 3: independent logit errors of variance σ_A² give attention weights errors of variance
    σ_A² [p_i²(1 − p_i)² + Σ_{j ≠ i} p_j² p_i²], to first order.
    """
    x = torch.linspace(-10, 10, 200_001, dtype=F64)
    below = torch.special.ndtr(x)

    def moments(factor):
        density = (
            factor * below * (1 - below) * (-(x**2) / 2).exp() / math.sqrt(2 * math.pi)
        )
        return torch.trapezoid(density, x).item(), torch.trapezoid(
            x**2 * density, x
        ).item()

    (mass, printed), true = moments(3), moments(6)
    assert (mass, printed) == pytest.approx(
        (1 / 2, MEDIAN[3] / 2), abs=1e-9
    ) and MEDIAN[1] == 1
    assert true == pytest.approx((1, 1 - math.sqrt(3) / math.pi), abs=1e-9)
    note("R6", mass=mass, printed=printed, true=true[1])

    logits, variance = 2 * random(3, 6), 1e-4  # of attention weights under small noise
    p, noise = logits.softmax(-1), math.sqrt(variance) * random(50_000, 3, 6, seed=1)
    expected = ((logits + noise).softmax(-1) - p).square().mean(0)
    lemma = p**2 * (1 - p) ** 2 + p**2 * ((p**2).sum(-1, keepdim=True) - p**2)
    assert torch.allclose(variance * lemma, expected, rtol=0.04)


@check(
    "R6",
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 100)), min_size=1, max_size=4
    ),
)
def test_the_median_of_three_varies_no_more_than_one_if_symmetric(half):
    """The median of three varies at most as one value; for coins equally, against the proof's 3/4."""
    p = Counter([sign * x for x, w in half for sign in (1, -1) for _ in range(w)])
    one = sum(w * x * x for x, w in p.items()) * p.total() ** 2
    median = sum(
        p[x] * p[y] * p[z] * sorted((x, y, z))[1] ** 2
        for x, y, z in product(p, repeat=3)
    )
    assert median == one if len(half) == 1 else median <= one


@pytest.mark.parametrize("ratio, N", [(0.1, 600), (1, 120), (20, 12)])  # a/N and N
@pytest.mark.claim("R6")
def test_squared_errors_of_numbers_of_mean_0(ratio, N):
    """Above one token a slot, reading 0 has a smaller error, and one row is better than three."""
    a = round(ratio * N)
    one, three = (
        errors(SignedSketch, r, N // r, unit(a, 32), 100).square().mean((1, 2))
        for r in MEDIAN
    )
    assert near(one, collision_variance(a, N, 1)) and (one.mean() > three.mean()) == (
        ratio < 1
    )
    assert (three.mean() > 1) == (ratio >= 1)
    if ratio > 1:
        assert three.mean() == pytest.approx(collision_variance(a, N // 3, 3), rel=0.1)
        bound, p = printed_bound(a, N)
        assert (bound, p) == pytest.approx((math.pi * ratio, math.exp(-ratio))) and (
            three > bound
        ).sum() == 0


@pytest.mark.claim("R6")
def test_the_printed_bound_is_not_one_of_keys_that_have_a_mean(note):
    error = errors(Sketch, 3, 4, 1 + unit(60, 16), 100).square().mean((1, 2))
    bound, p = printed_bound(60, 12)
    exceeded = int((error > bound).sum())
    assert exceeded == 100 and p < 0.01
    note("R6", exceeded=exceeded)


@each_rows
@pytest.mark.parametrize("a, width, mean", [(2, 3, 0.0), (13, 1, 5.0), (40, 12, -2.0)])
@pytest.mark.claim("R7")
def test_what_is_shrunk_is_on_average_nearer_than_the_mean(rows, a, width, mean):
    x, ratio = mean + random(a, 6), (a - 1) / width
    alone = (x - x.mean(0)).square().mean()
    error = errors(ShrunkSketch, rows, width, x, 200).square().mean((1, 2))
    # of one row whatever the vectors are
    assert (
        error.mean() < alone if rows == 3 else near(error, alone * ratio / (1 + ratio))
    )


@pytest.mark.parametrize("budget", [0.0625, 0.1, 0.25, 0.5])
def test_a_slot_of_memory_never_has_fewer_tokens_than_one_over_the_budget(
    budget, n=16_000
):
    for vague in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0):
        slots = round(vague * budget * n)
        exact = round(budget * n) - slots
        assert load(budget, vague) == pytest.approx((n - exact) / slots)
        assert load(budget, vague) >= 1 / budget * (1 + 1e-9) or vague == 1
    assert load(budget, 1.0) == pytest.approx(1 / budget)


@once
def real(n):
    """Return n tokens (L, H, n) of the decoder's text, and their keys and values (L, H, n, D)."""
    model, text = checkpoint.from_hf(TINY), text_windows(tasks("test"), 1, 1024)
    recording = record(model, make_cache(model, Recorder), text)
    k, v = (
        torch.cat([getattr(layer, name) for layer in recording])[:, :, :n]
        for name in "kv"
    )
    return torch.arange(n).expand(k.shape[:3]), k, v


@pytest.mark.claim("R7")
def test_of_real_keys_the_shrunk_are_nearest_and_sums_farther_than_the_mean(note):
    J, *true = real(1024)
    for N in 1536, 192:
        error = {}
        for name, kind, rows in (
            ("one", ShrunkSketch, 1),
            ("three", ShrunkSketch, 3),
            ("paper", Sketch, 3),
        ):
            sketch = kind(true[0], rows, N // rows, 0)
            sketch.insert(J, *true)
            error[name] = [relative_error(*pair) for pair in zip(sketch.query(J), true)]
            note("R7", **{f"{name}_{N}": error[name][0]})
        assert (
            error["one"] < error["three"] and error["three"][0] < 1 < error["paper"][0]
        )
    assert relative_error(true[0].mean(2, keepdim=True), true[0]) == pytest.approx(1)


@pytest.mark.claim("R2", "R7")
@pytest.mark.parametrize(
    "claim, kind, rows, N", [("R2", SignedSketch, 3, 180), ("R7", ShrunkSketch, 1, 30)]
)
def test_deleted_estimates_leave_their_errors_to_those_who_stay(
    claim, kind, rows, N, note
):
    (J, k, v), last = real(120), {}
    for what in "true", "estimate":
        sketch = kind(k, rows, N // rows, 0)
        sketch.insert(J, k, v)
        for i in range(100):  # as KVReviver's swaps delete a token
            token, *pair = (x[:, :, i : i + 1] for x in (J, k, v))
            if what == "estimate":
                pair = sketch.query(token, J[:, :, i:])
            sketch.insert(token, *pair, times=-1.0)
        last[what] = relative_error(sketch.query(J[:, :, 100:])[1], v[:, :, 100:])
    assert last["estimate"] > 3 * last["true"]
    note(claim, **last)


@pytest.mark.claim("R5")
def test_fisher_shares_are_mean_squared_gradients_of_keys_and_values():
    model, text = decoder(), TOKENS[:, :12]
    c, expected = model.config, torch.zeros(3)
    for one in text:
        log_p = model(one[None, :-1])[0].log_softmax(-1)
        model.zero_grad()
        sum(log_p[i, one[i + 1]] for i in range(11)).backward()
        for layer, block in enumerate(model.blocks):
            rows = block.attention.qkv.weight.grad.unflatten(0, (-1, c.head_dim))[
                c.n_heads :
            ]
            expected[layer] += rows.square().mean() / 2  # as many of keys as of values
    model.zero_grad()
    alone = fisher_shares(model, text)
    assert alone == pytest.approx((expected / expected.sum()).tolist(), rel=1e-4)
    assert fisher_shares(model, text, 0.75) == pytest.approx(
        [x / 4 + 0.25 for x in alone], rel=1e-5
    )
    assert max(alone) > 1.2 * min(alone) and all(
        p.grad is None for p in model.parameters()
    )


def test_shares_divide_the_total_budget_among_layers():
    fresh = lambda: make_cache(decoder(), KVReviver, budget=41)
    assert [cache.budget for cache in share_out(fresh(), (0.5, 0.2, 0.3))] == [
        62,
        25,
        37,
    ]
    with pytest.raises(ValueError, match="add up to 1"):
        share_out(fresh(), (0.5, 0.2, 0.2))
