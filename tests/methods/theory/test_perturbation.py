"""Test CriticalKV's theorems on random heads in float64, and on the heads of *built*."""

from itertools import combinations

from hypothesis import strategies as st
from pytest import fixture, mark
import torch

from common import tasks
from exact import F64, at_most, check, close, seeded, seeds, vector
from methods.critical_kv import two_stage
from methods.theory.perturbation import (
    algorithm_1,
    assumption_1,
    masked_attention,
    perturbation,
    seen_by_window,
    theta,
)
from nanollm import TINY, checkpoint
from nanollm.cache import make_cache
from nanollm.ranking import top

sizes = st.integers(2, 9)
sharpness = st.sampled_from([0.3, 1.0, 3.0])


def draw(seed, n, sharp=1.0):
    """Return a head's logits (n,), values (n, 3), some zero or equal, and W_O (3, 5)."""
    g = seeded(seed)
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=F64)
    logits = sharp * normal(n, 3) @ normal(3)
    return logits, normal(n, 3).round(), normal(3, 5)


def head(seed, n, sharp=1.0):
    """Return weights A (n,), projected values 𝒱 (n, 5) and their norms (n,)."""
    logits, v, w_o = draw(seed, n, sharp)
    values = v @ w_o
    return logits.softmax(-1), values, values.abs().sum(-1)


def mask(n, *kept):
    """Return a mask (n,) that is True for these entries."""
    result = torch.zeros(n, dtype=torch.bool)
    result[[*kept]] = True
    return result


def sets(n, size):
    """Return every set of this size, (sets, n)."""
    return torch.stack([mask(n, *kept) for kept in combinations(range(n), size)])


# ---- definitions and bounds ---


@mark.claim("P1")
@mark.parametrize(
    "name, weights, by_weight, by_product",
    [
        # it takes the place of an entry that adds something
        ("zero_value", [0.3, 0.25, 0.25, 0.2], 0.5 / 4 + 0.3, 0.8 * 3 / 7),
        # but without it the others are blown up to twice their size
        ("sink", [0.5, 0.2, 0.2, 0.1], 0.4 / 9 + 0.15, 0.55),
    ],
)
def test_the_largest_weight_misleads_if_its_value_is_0_but_not_a_sink(
    name, weights, by_weight, by_product, note
):
    A, norms = torch.tensor([weights, [0, 1, 1, 1.5]], dtype=F64)
    heaviest = top(A, 3)
    product = two_stage(mask(4), A * norms, 3)  # α = 0
    assert (heaviest == mask(4, 0, 1, 2)).all()
    assert (product == mask(4, 1, 2, 3)).all()
    kept = perturbation(A, norms.diag(), heaviest)
    dropped = perturbation(A, norms.diag(), product)
    assert close(kept, by_weight)
    assert close(dropped, by_product)
    note("P1", **{f"{name}_kept": kept, f"{name}_dropped": dropped})


@check("P1 P2", seeds, sizes, sharpness)
def test_l_is_the_change_under_a_softmax_over_the_kept_keys_alone(seed, n, sharp):
    logits, v, w_o = draw(seed, n, sharp)
    weights = logits.softmax(-1)
    before = weights @ v @ w_o
    for kept in sets(n, 1 + seed % n):
        # Theorem 1
        masked = logits.masked_fill(~kept, -torch.inf)
        assert close(masked_attention(weights, kept), masked.softmax(-1))
        after = logits[kept].softmax(-1) @ v[kept] @ w_o
        L = perturbation(weights, v @ w_o, kept)
        assert close(L, (before - after).abs().sum())


@check("P3", seeds, sizes, sharpness)
def test_theta_is_eq_10_a_bound_and_tight_where_nothing_cancels(seed, n, sharp):
    """θ is Eq. 10 and bounds L; both are equal if kept and evicted values oppose."""
    weights, values, norms = head(seed, n, sharp)
    for size in range(1, n + 1):
        kept = sets(n, size)
        bound = theta(weights, norms, kept)
        assert at_most(perturbation(weights, values, kept), bound)
        moved = (weights - masked_attention(weights, kept)).abs()
        assert close(bound, (moved * norms).sum(-1))

    kept = sets(n, 1 + seed % n)
    bound = theta(weights, norms, kept)
    opposed = torch.where(kept[..., None], -values.abs(), values.abs())
    assert close(perturbation(weights, opposed, kept), bound)


def theta_hat(weights, norms, first, second):
    """Return θ̂ = C − (2 − 1/σ) Σ (N′ + N″)_i A_i ‖𝒱_i‖₁ (Theorem 3, Eq. 14, 15)."""
    terms = weights * norms
    kept = (terms * (first | second)).sum(-1)
    return terms.sum(-1) - (2 - 1 / assumption_1(weights, first)) * kept


def theta_relaxed(weights, norms, first, second):
    """Return θ̂_relax: θ̂ with M = min ‖𝒱_i‖₁ for every entry of stage 2 (Theorem 4, Eq. 18)."""
    factor = 2 - 1 / assumption_1(weights, first)
    above = weights * (norms - norms.amin(-1)) * second
    return theta_hat(weights, norms, first, second) + factor * above.sum(-1)


@check("P4", seeds, sizes, sharpness)
def test_stage_2_has_the_least_theta_hat_above_half_else_the_most(seed, n, sharp):
    """Stage 2 has the least θ̂ if σ > 1/2, else the largest; θ̂ ≥ θ either way."""
    weights, _, norms = head(seed, n, sharp)
    size = 1 + seed % (n // 2)
    first = top(weights, size)
    more = 1 + seed // n % (n - size)
    seconds = sets(n, more)
    seconds = seconds[~(seconds & first).any(-1)]  # every stage 2 that may follow
    factor = 2 - 1 / weights[first].sum()
    budget = size + more

    hat = theta_hat(weights, norms, first, seconds)
    product = weights * norms
    assert at_most(theta(weights, norms, first | seconds), hat)

    relaxed = theta_relaxed(weights, norms, first, seconds)
    for bound, every, score in (
        (theta_hat, hat, product),
        (theta_relaxed, relaxed, weights),
    ):
        kept = two_stage(first, score, budget)
        extreme = every.amin() if factor > 0 else every.amax()
        assert close(bound(weights, norms, first, kept & ~first), extreme)
    assert (kept == top(weights, budget)).all()  # stage 2 by weight alone is top-A


@mark.claim("P4", "P6")
def test_without_assumption_1_stage_2_may_be_worst_and_theorem_4_no_bound(note):
    A = vector(0.4, 0.2, 0.2, 0.1, 0.1)
    norms = vector(5, 2, 2, 5, 5)
    first = top(A, 1)
    kept = sets(5, 3)[:6]  # all that hold entry 0, from 0 1 2 to 0 3 4
    assert (top(A, 3) == kept[0]).all()
    assert (two_stage(first, A * norms, 3) == kept[-1]).all()
    hat = theta_hat(A, norms, first, kept & ~first)
    assert close(hat, [5.2, *[5.25] * 4, 5.3])
    # weights alone have the least
    expected = [1.7, *[15 / 7] * 4, 2.8]
    assert close(theta(A, norms, kept), expected)
    note("P4", chosen=hat[-1], least=hat.min())

    A = vector(0.3, 0.2, 0.2, 0.2, 0.1)
    norms = vector(0, 0, 0, 0, 3)
    first, second = mask(5, 0), mask(5, 4)
    relaxed = theta_relaxed(A, norms, first, second)
    L = perturbation(A, norms.diag(), first | second)
    assert close(theta_hat(A, norms, first, second), 0.7)
    assert close(relaxed, 0.3)
    assert close(L, 0.45)
    note("P4", relaxed=relaxed, change=L)


def two_stages_win(measure, weights, norms, values, budget):
    """Return in which fraction of heads two stages have a lower θ or L than weights alone.

    Each entry has one query head. Nothing is pooled, and no window is kept beside the budget.
    """
    kept = torch.logical_or(*algorithm_1(weights, norms, budget))
    staged = measure(weights, values, kept)
    alone = measure(weights, values, top(weights, budget))
    return (staged < alone * (1 - 1e-6)).float().mean()


# ---- the heads of *built* ---


@fixture(scope="module")
@torch.inference_mode()
def heads():
    """Return weights, norms and projected values of notebook 01's 16 prompts."""
    batch = tasks("test").batch("needle", seed=0, B=16, T=256)
    tokens = torch.from_numpy(batch.tokens[:, : batch.answers[0].start])
    model = checkpoint.from_hf(TINY)
    caches = make_cache(model)
    model(tokens, caches)
    values = []
    for layer in caches:
        w = layer.w_o.unflatten(1, (layer.v.shape[1], -1))
        v = torch.einsum("bhnd,ohgd->bhgno", layer.v, w)
        values.append(v.flatten(1, 2))
    return *seen_by_window(model, tokens, 8), torch.stack(values, 1)


@mark.claim("P3")
def test_on_the_models_weights_theta_is_about_three_to_four_times_l(heads, note):
    A, norms, values = heads
    for budget in (8, 192):
        kept = torch.logical_or(*algorithm_1(A, norms, budget))
        bound = theta(A, norms, kept)
        L = perturbation(A, values, kept)
        assert (L <= bound * (1 + 1e-4) + 1e-4).all()
        ratio = bound.mean() / L.mean()
        assert 2.7 < ratio < 4.4
        note("P3", **{f"ratio_{budget}": ratio})


@mark.claim("P6")
def test_in_the_model_stage_1_gathers_less_than_half_in_many_heads(heads, note):
    A, norms, _ = heads
    for percent in (25, 12.5, 6.25):
        budget = round(percent / 100 * A.shape[-1])
        first, second = algorithm_1(A, norms, budget)
        holds = (assumption_1(A, first) > 0.5).float()
        whole = (assumption_1(A, first | second) > 0.5).float()
        assert holds.mean() < whole.mean()
        note("P6", **{f"sigma_{int(percent)}": 100 * holds.mean()})
        note("P6", **{f"S_{int(percent)}": 100 * whole.mean()})
    by_layer = holds.mean((0, 2))
    assert (by_layer < 0.75).all()  # not of the first layer only
    note("P6", lowest_layer=100 * by_layer.min(), highest_layer=100 * by_layer.max())


@mark.claim("P9")
def test_in_the_model_two_stages_lower_theta_in_few_heads_and_l_in_few(heads, note):
    A, norms, values = heads
    for budget in 32, 64, 128:
        lower = two_stages_win(theta, A, norms, norms, budget)
        less = two_stages_win(perturbation, A, norms, values, budget)
        assert lower < 0.25
        assert less < 0.5
        note("P9", **{f"theta_{budget}": 100 * lower, f"L_{budget}": 100 * less})
