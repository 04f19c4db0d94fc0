"""Test KVReviver's lemmas and bounds, and what a sketch can tell."""

from functools import cache as once
from itertools import product
import math

from hypothesis import strategies as st
from pytest import approx, mark
import torch

from common import tasks
from exact import F64, check, near, random
from lab.benchmark import text_windows
from lab.replay import Recorder, record
from methods.kv_reviver import Sketch
from methods.ours.kv_reviver_shrunk import MEDIAN, ShrunkSketch, SignedSketch
from methods.theory.sketch_error import (
    collision_variance,
    load,
    printed_bound,
    relative_error,
)
from nanollm import TINY, checkpoint
from nanollm.cache import make_cache

each_rows = mark.parametrize("rows", MEDIAN)


def unit(*shape, seed=0):
    """Return random numbers with mean 0 and variance 1, exactly."""
    x = random(*shape, seed=seed)
    return (x - x.mean()) / x.std(correction=0)


def squared(kind, rows, width, x, runs):
    """Return the mean squared error of the estimates of vectors x (a, 2D) by seed, (runs,)."""
    k, v = (y[None, None] for y in x.chunk(2, -1))
    J = torch.arange(len(x)).view(1, 1, -1)
    errors = []
    for seed in range(runs):
        sketch = kind(k, rows, width, seed)
        sketch.insert(J, k, v)
        estimate = torch.cat(sketch.query(J), -1)
        errors.append((estimate - x).square().mean())
    return torch.stack(errors)


@mark.claim("R6")
def test_the_printed_density_of_the_median_is_half_of_one(note):
    """The printed density 3 Φ(1 − Φ)φ of Lemmas 1 and 2 integrates to 1/2; the factor must be 6.

    The appendix, after Lemma 3: independent logit errors of variance σ_A² give attention weights
    errors of variance σ_A² [p_i²(1 − p_i)² + Σ_{j ≠ i} p_j² p_i²], to first order.
    """
    x = torch.linspace(-10, 10, 200_001, dtype=F64)
    below = torch.special.ndtr(x)
    normal = (-(x**2) / 2).exp() / math.sqrt(2 * math.pi)

    density = 3 * below * (1 - below) * normal
    mass = torch.trapezoid(density, x).item()
    printed = torch.trapezoid(x**2 * density, x).item()
    true = 1 - math.sqrt(3) / math.pi
    assert (mass, printed) == approx((1 / 2, true / 2), abs=1e-9)
    assert MEDIAN == approx({1: 1, 3: true})
    note("R6", mass=mass, printed=printed, true=2 * printed)

    logits = 2 * random(3, 6)
    p = logits.softmax(-1)
    noisy = (logits + 0.01 * random(50_000, 3, 6, seed=1)).softmax(-1)
    expected = (noisy - p).square().mean(0)
    others = (p**2).sum(-1, keepdim=True) - p**2
    lemma = 1e-4 * p**2 * ((1 - p) ** 2 + others)
    assert torch.allclose(lemma, expected, rtol=0.04)


@check("R6", st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_the_median_of_three_varies_no_more_than_one_if_symmetric(half):
    """The median of three symmetric values varies at most as one of them does.

    For coins the two vary equally, where the proof says 3/4.
    """
    values = [*half, *(-x for x in half)]  # equally likely
    one = sum(x**2 for x in values) * len(values) ** 2
    median = sum(sorted(three)[1] ** 2 for three in product(values, repeat=3))
    assert median <= one
    if len({*half}) == 1:
        assert median == one


@mark.parametrize("ratio, N", [(0.1, 600), (1, 120), (20, 12)])  # a/N and N
@mark.claim("R6")
def test_squared_errors_of_numbers_of_mean_0(ratio, N):
    """From one token a slot on, three rows have a larger error than one, and than reading 0."""
    a = round(ratio * N)
    x = unit(a, 32)
    one = squared(SignedSketch, 1, N, x, 100)
    three = squared(SignedSketch, 3, N // 3, x, 100)
    assert near(one, collision_variance(a, N, 1))
    assert (one.mean() > three.mean()) == (ratio < 1)
    assert (three.mean() > 1) == (ratio >= 1)
    if ratio > 1:
        expected = collision_variance(a, N // 3, 3)
        assert three.mean() == approx(expected, rel=0.1)
        bound, p = printed_bound(a, N)
        assert bound == approx(math.pi * ratio)
        assert p == approx(math.exp(-ratio))
        assert (three <= bound).all()


@mark.claim("R6")
def test_the_printed_bound_is_not_one_of_keys_that_have_a_mean(note):
    error = squared(Sketch, 3, 4, 1 + unit(60, 16), 100)
    bound, p = printed_bound(60, 12)
    assert p < 0.01
    exceeded = (error > bound).sum()
    assert exceeded == 100
    note("R6", exceeded=exceeded)


@each_rows
@mark.parametrize("a, width, mean", [(2, 3, 0.0), (13, 1, 5.0), (40, 12, -2.0)])
@mark.claim("R7")
def test_what_is_shrunk_is_on_average_nearer_than_the_mean(rows, a, width, mean):
    x = mean + random(a, 6)
    ratio = (a - 1) / width
    alone = (x - x.mean(0)).square().mean()
    error = squared(ShrunkSketch, rows, width, x, 200)
    if rows == 3:
        assert error.mean() < alone
    else:  # whatever the vectors are
        assert near(error, alone * ratio / (1 + ratio))


@mark.parametrize("budget", [0.0625, 0.1, 0.25, 0.5])
def test_a_slot_of_memory_never_has_fewer_tokens_than_one_over_the_budget(budget):
    for vague in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0):
        slots = vague * budget
        ratio = load(budget, vague)
        assert ratio == approx((1 - budget + slots) / slots)
        assert (ratio > (1 + 1e-9) / budget) == (vague < 1)


@once
def real():
    """Return the tokens (L, H, n) of a text, and the decoder's keys and values (L, H, n, D)."""
    model = checkpoint.from_hf(TINY)
    text = text_windows(tasks("test"), 1, 1024)
    recording = record(model, make_cache(model, store=Recorder), text)
    k = torch.cat([layer.k for layer in recording])
    v = torch.cat([layer.v for layer in recording])
    return torch.arange(1024).expand(k.shape[:3]), k, v


@mark.claim("R7")
def test_of_real_keys_the_shrunk_are_nearest_and_sums_farther_than_the_mean(note):
    J, k, v = real()
    for N in 1536, 192:
        error = {}
        for name, kind, rows in (
            ("one", ShrunkSketch, 1),
            ("three", ShrunkSketch, 3),
            ("paper", Sketch, 3),
        ):
            sketch = kind(k, rows, N // rows, 0)
            sketch.insert(J, k, v)
            keys, values = sketch.query(J)
            error[name] = [relative_error(keys, k), relative_error(values, v)]
            note("R7", **{f"{name}_{N}": error[name][0]})
        assert error["one"] < error["three"]
        assert error["three"][0] < 1 < error["paper"][0]
    mean = k.mean(2, keepdim=True)
    assert relative_error(mean, k) == approx(1)


@mark.claim("R2", "R7")
@mark.parametrize(
    "claim, kind, rows, N",
    [("R2", SignedSketch, 3, 180), ("R7", ShrunkSketch, 1, 30)],
)
def test_deleted_estimates_leave_their_errors_to_those_who_stay(
    claim, kind, rows, N, note
):
    J, k, v = (x[:, :, :120] for x in real())
    last = {}
    for what in "true", "estimate":
        sketch = kind(k, rows, N // rows, 0)
        sketch.insert(J, k, v)
        for i in range(100):  # as KVReviver's swaps delete a token
            token, *pair = (x[:, :, i : i + 1] for x in (J, k, v))
            if what == "estimate":
                pair = sketch.query(token, J[:, :, i:])
            sketch.insert(token, *pair, times=-1.0)
        _, values = sketch.query(J[:, :, 100:])
        last[what] = relative_error(values, v[:, :, 100:])
    assert last["estimate"] > 3 * last["true"]
    note(claim, **last)
