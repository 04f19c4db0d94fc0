"""CriticalKV's theorems on random heads in float64 and where they stop; the least θ; the model's heads."""

from itertools import combinations

from hypothesis import strategies as st
import pytest
import torch

from common import tasks
from exact import F64, at_most, check, close, seeded, seeds
from methods.critical_kv import two_stage
from methods.ours.theta import least_theta, theta
from methods.theory.perturbation import (
    algorithm_1,
    assumption_1,
    masked_attention,
    perturbation,
    seen_by_window,
    theta_hat,
)
from nanollm import TINY, checkpoint
from nanollm.ranking import top

sizes, sharpness = st.integers(2, 9), st.sampled_from([0.3, 1.0, 3.0])


def draw(seed, n, sharp=1.0):
    """Return a head's logits (n,), values (n, 3), some zero or equal, and W_O (3, 5)."""
    g = seeded(seed)
    q, k, v, w_o = (
        torch.randn(*shape, generator=g, dtype=F64)
        for shape in ((3,), (n, 3), (n, 3), (3, 5))
    )
    return sharp * k @ q, v.round(), w_o


def head(seed, n, sharp=1.0):
    """Return weights A (n,), projected values 𝒱 (n, 5) and their norms (n,)."""
    logits, v, w_o = draw(seed, n, sharp)
    return logits.softmax(-1), v @ w_o, (v @ w_o).abs().sum(-1)


def mask(n, *kept):
    return torch.zeros(n, dtype=torch.bool).index_fill(
        0, torch.tensor(kept, dtype=torch.long), True
    )


def sets(n, size):
    """Return every set of this size, (sets, n)."""
    return torch.stack([mask(n, *kept) for kept in combinations(range(n), size)])


# ---- definitions and bounds ---


@pytest.mark.claim("P1")
@pytest.mark.parametrize(
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
    product = two_stage(mask(4), A * norms, 3)  # α = 0
    assert (top(A, 3) == mask(4, 0, 1, 2)).all() and (product == mask(4, 1, 2, 3)).all()
    kept, dropped = perturbation(A, norms.diag(), torch.stack((top(A, 3), product)))
    assert close(kept, by_weight) and close(dropped, by_product)
    note("P1", **{f"{name}_kept": kept, f"{name}_dropped": dropped})


@check("P1 P2", seeds, sizes, sharpness)
def test_l_is_the_change_under_a_softmax_over_the_kept_keys_alone(seed, n, sharp):
    logits, v, w_o = draw(seed, n, sharp)
    weights, kept = logits.softmax(-1), sets(n, 1 + seed % n)
    for some, L, after in zip(
        kept, perturbation(weights, v @ w_o, kept), masked_attention(weights, kept)
    ):
        # Theorem 1
        assert close(after, logits.masked_fill(~some, -torch.inf).softmax(-1))
        assert close(
            L,
            (weights @ v @ w_o - logits[some].softmax(-1) @ v[some] @ w_o).abs().sum(),
        )


@check("P3", seeds, sizes, sharpness)
def test_theta_is_eq_10_a_bound_and_tight_where_nothing_cancels(seed, n, sharp):
    """θ is Eq. 10 and bounds L; both are equal if kept and evicted values oppose."""
    weights, values, norms = head(seed, n, sharp)
    for size in range(1, n + 1):
        bound = theta(weights, norms, kept := sets(n, size))
        assert at_most(perturbation(weights, values, kept), bound)
        assert close(
            bound, ((weights - masked_attention(weights, kept)).abs() * norms).sum(-1)
        )

    kept = sets(n, 1 + seed % n)
    opposed = torch.where(kept[..., None], -values.abs(), values.abs())
    for tight in (norms.diag(), opposed):
        assert close(perturbation(weights, tight, kept), theta(weights, norms, kept))


def theta_relaxed(weights, norms, first, second):
    """Return θ̂_relax: θ̂ with M = min ‖𝒱_i‖₁ for every entry of stage 2 (Theorem 4, Eq. 18)."""
    least = norms.amin(-1) * (weights * second).sum(-1)
    return (
        theta_hat(weights, norms, first, torch.zeros_like(second))
        - (2 - 1 / assumption_1(weights, first)) * least
    )


@check("P4", seeds, sizes, sharpness)
def test_stage_2_has_the_least_theta_hat_above_half_else_the_most(seed, n, sharp):
    """Stage 2 has the least θ̂ if σ > 1/2, else the largest; θ̂ ≥ θ either way."""
    weights, _, norms = head(seed, n, sharp)
    first, seconds = (
        top(weights, taken := 1 + seed % (n // 2)),
        sets(n, 1 + seed // n % (n - taken)),
    )
    seconds = seconds[~(seconds & first).any(-1)]  # every stage 2 that may follow
    factor, budget = 2 - 1 / weights[first].sum(), int((first | seconds[0]).sum())
    hat, relaxed = (
        bound(weights, norms, first, seconds) for bound in (theta_hat, theta_relaxed)
    )
    assert close(
        hat, weights @ norms - factor * ((first | seconds) * weights * norms).sum(-1)
    )
    assert at_most(theta(weights, norms, first | seconds), hat)
    assert close(
        relaxed, hat + factor * (weights * (norms - norms.min()) * seconds).sum(-1)
    )
    for bound, every, score in (
        (theta_hat, hat, weights * norms),
        (theta_relaxed, relaxed, weights),
    ):
        kept = two_stage(first, score, budget)
        extreme = every.amin() if factor > 0 else every.amax()
        assert close(bound(weights, norms, first, kept & ~first), extreme)
    assert (kept == top(weights, budget)).all()  # stage 2 by weight alone is top-A


@pytest.mark.claim("P4", "P6")
def test_without_assumption_1_stage_2_may_be_worst_and_theorem_4_no_bound(note):
    A, norms = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1], [5, 2, 2, 5, 5]], dtype=F64)
    # all that hold entry 0, from 0 1 2 to 0 3 4
    first, kept = top(A, 1), sets(5, 3)[:6]
    assert (top(A, 3) == kept[0]).all() and (
        two_stage(first, A * norms, 3) == kept[-1]
    ).all()
    hat = theta_hat(A, norms, first, kept & ~first)
    assert close(hat, [5.2, *[5.25] * 4, 5.3])
    # weights alone have the least
    assert close(theta(A, norms, kept), [1.7, *[15 / 7] * 4, 2.8])
    # nothing cancels: L is θ
    assert close(perturbation(A, norms.diag(), kept), [1.7, *[15 / 7] * 4, 2.8])
    note("P4", chosen=hat[-1], least=hat.min())

    A, norms = torch.tensor([[0.3, 0.2, 0.2, 0.2, 0.1], [0, 0, 0, 0, 3]], dtype=F64)
    first, second = mask(5, 0), mask(5, 4)
    relaxed, L = (
        theta_relaxed(A, norms, first, second),
        perturbation(A, norms.diag(), first | second),
    )
    assert (
        close(theta_hat(A, norms, first, second), 0.7)
        and close(relaxed, 0.3)
        and close(L, 0.45)
    )
    note("P4", relaxed=relaxed, change=L)


def heads_that_win(weights, norms, values, budget):
    """Return the fraction of heads in which one selection has a lower θ or L than another.

    Shape (2, 3). Rows: θ, L. Columns: two stages lower than top-A, `least_theta` lower than top-A,
    `least_theta` lower than two stages. Each entry has one query head; no window, no pooling.
    """
    ours = least_theta(
        weights.unsqueeze(-2), norms.unsqueeze(-2), budget, window_size=0
    )
    sets = (
        top(weights, budget),
        torch.logical_or(*algorithm_1(weights, norms, budget)),
        ours,
    )
    lower = []
    for measure, x in ((theta, norms), (perturbation, values)):
        by_weight, staged, least = (measure(weights, x, kept) for kept in sets)
        pairs = (staged, by_weight), (least, by_weight), (least, staged)
        lower.append(
            [(one < other * (1 - 1e-6)).float().mean() for one, other in pairs]
        )
    return torch.tensor(lower)


@pytest.mark.claim("P9")
def test_the_least_theta_is_no_higher_than_that_of_any_other_selection():
    """Of values independent of weights two stages mostly have a higher θ than weights alone."""
    g, heads, n = torch.Generator().manual_seed(0), 100, 256
    A = (2 * torch.randn(heads, n, generator=g)).softmax(-1)
    values = torch.randn(heads, n, 16, generator=g) * torch.rand(
        heads, n, 1, generator=g
    )
    norms = values.abs().sum(-1)
    (two_stages, *_), _ = heads_that_win(A, norms, values, 32)
    assert two_stages < 0.1
    ours = theta(A, norms, least_theta(A[:, None], norms[:, None], 32, window_size=0))
    shifts = (
        torch.cat((torch.zeros(1), torch.logspace(-3, 3, 99)))[:, None] * norms.mean()
    )
    sweep = top(A[:, None] * (norms[:, None] + shifts), 32)  # A (‖𝒱‖ + λ)
    assert (
        ours <= theta(A[:, None], norms[:, None], sweep).amin(-1) * (1 + 1e-5)
    ).all()


# ---- the heads of the shipped model ---


@pytest.fixture(scope="module")
@torch.inference_mode()
def heads():
    """Return weights, norms and projected values of notebook 01's 16 prompts."""
    batch = tasks("test").batch("needle", seed=0, B=16, T=256)
    tokens = torch.from_numpy(batch.tokens[:, : batch.answers[0].start])
    return seen_by_window(checkpoint.from_hf(TINY), tokens, 8)


@pytest.mark.claim("P3")
def test_on_the_models_weights_theta_is_about_three_to_four_times_l(heads, note):
    A, norms, values = heads
    for budget in (8, 192):
        kept = torch.logical_or(*algorithm_1(A, norms, budget))
        bound, L = theta(A, norms, kept), perturbation(A, values, kept)
        assert (L <= bound * (1 + 1e-4) + 1e-4).all()
        ratio = bound.mean() / L.mean()
        assert 2.7 < ratio < 4.4
        note("P3", **{f"ratio_{budget}": ratio})


@pytest.mark.claim("P6")
def test_in_the_model_stage_1_gathers_less_than_half_in_many_heads(heads, note):
    A, norms, _ = heads
    for percent in (25, 12.5, 6.25):
        first, second = algorithm_1(A, norms, round(percent / 100 * A.shape[-1]))
        holds, whole = (
            (assumption_1(A, x) > 0.5).float() for x in (first, first | second)
        )
        assert holds.mean() < whole.mean()
        note(
            "P6",
            **{
                f"sigma_{int(percent)}": 100 * holds.mean(),
                f"S_{int(percent)}": 100 * whole.mean(),
            },
        )
    by_layer = holds.mean((0, 2))
    assert (by_layer < 0.75).all()  # not of the first layer only
    note("P6", lowest_layer=100 * by_layer.min(), highest_layer=100 * by_layer.max())


@pytest.mark.claim("P9")
def test_in_the_model_a_lower_bound_is_a_lower_change_in_few_heads(heads, note):
    for budget in 32, 64, 128:
        bound, change = heads_that_win(*heads, budget)
        assert bound[0] < 0.25 and bound[1] > 0.65
        assert change[:2].max() < 0.5 < change[2]  # below top-A; ours below two stages
        note(
            "P9",
            **{
                f"two_stages_{budget}": 100 * change[0],
                f"ours_{budget}": 100 * change[1],
            },
        )
    note("P9", ours_below_two_stages=100 * change[2])
