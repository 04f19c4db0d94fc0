"""Compare SnapKV, PyramidKV, AdaKV and their selections with loops; check options and limits."""

from fractions import Fraction
from functools import partial
from itertools import product
import math

import pytest
import torch

from common import end
from methods.baselines.ada_kv import AdaKV, shared
from methods.baselines.defensive_kv import DefensiveKV
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import (
    Critical,
    CriticalCode,
    PooledCritical,
    part_of,
    value_norms,
)
from methods.ours.residual import Residual
from methods.ours.theta import LeastTheta
from methods.baselines.pyramid_kv import PyramidKV
from methods.baselines.snap_kv import SnapKV
from nanollm.cache import NEVER, PerEntry, begin_turn
from windows import (
    AGAIN,
    B,
    D,
    GROUPED,
    PROMPTS,
    TIED,
    Case,
    by_chunk,
    by_depth,
    by_head,
    check_turns,
    check_walk,
    compressed,
    highest,
    mean,
    name_of,
    pool,
    uneven,
)


# ---- loops: weights and norms [g][i] of one key/value head; `out` tokens lie outside the window
# ---


def in_two_stages(
    A, norms, out, b, kernel_size, alpha, pooled=False, epsilon=0, of_means=False, **_
):
    """Algorithm 1 with Algorithm 2, lines 8 to 10."""
    A = [a[:out] for a in A]
    first = highest(pool(mean(A), kernel_size), math.floor(Fraction(str(alpha)) * b))
    A = [[x + epsilon for x in (pool(a, kernel_size) if pooled else a)] for a in A]
    if of_means:
        A, norms = [mean(A)], [mean(norms)]
    score = mean([[x * y for x, y in zip(a, norm)] for a, norm in zip(A, norms)])
    return first + highest(score, b - len(first), but=first)


as_the_code = partial(in_two_stages, pooled=True, epsilon=1e-4, of_means=True)


def by_least_theta(A, norms, out, b, kernel_size, steps, pooled=True, **_):
    """Return the set with the lowest θ of: by weight, in two stages, and `steps` improvements."""
    if pooled:
        A = [pool(a[:out], kernel_size) + a[out:] for a in A]
        A = [[x / sum(a) for x in a] for a in A]

    def gathered(a, norm, kept):
        all_kept = [*kept, *range(out, len(a))]
        return sum(a[i] for i in all_kept), sum(a[i] * norm[i] for i in all_kept)

    def theta(kept):
        total = 0
        for a, norm in zip(A, norms):
            S, W = gathered(a, norm, kept)
            total += sum(x * y for x, y in zip(a, norm)) - (2 - 1 / S) * W
        return total

    by_weight = highest(mean(A)[:out], b)
    staged = in_two_stages(A, norms, out, b, 1, alpha=0.25)
    sets = [by_weight, staged]
    kept = min(sets, key=theta)
    for _ in range(steps):
        gain = [0] * out
        for a, norm in zip(A, norms):
            S, W = gathered(a, norm, kept)
            gain = [
                gain[i] + a[i] * ((2 - 1 / S) * norm[i] + W / S**2) for i in range(out)
            ]
        kept = highest(gain, b)
        sets.append(kept)
    return min(sets, key=theta)


CASES = {
    "snap": Case(SnapKV),
    "pyramid": Case(PyramidKV, dict(beta=20), None, by_depth),
    "ada": Case(AdaKV, {}, None, by_head),
    "ada floor 0": Case(AdaKV, dict(floor=0.0), None, by_head),
    "critical": Case(SnapKV, {}, Critical(), choose=in_two_stages),
    "critical pooled": Case(
        SnapKV, {}, PooledCritical(0.5), choose=partial(in_two_stages, pooled=True)
    ),
    "critical code": Case(SnapKV, {}, CriticalCode(), choose=as_the_code),
    "critical on ada": Case(AdaKV, dict(floor=0.1), Critical(), by_head, in_two_stages),
    "critical on pyramid": Case(PyramidKV, {}, Critical(), by_depth, in_two_stages),
    "theta": Case(SnapKV, {}, LeastTheta(steps=4), choose=by_least_theta),
    "theta 0": Case(SnapKV, {}, LeastTheta(steps=0), choose=by_least_theta),
    "theta unpooled": Case(
        SnapKV, {}, LeastTheta(steps=1, pooled=False), choose=by_least_theta
    ),
    "theta on pyramid": Case(
        PyramidKV, {}, LeastTheta(steps=2), by_depth, by_least_theta
    ),
    "theta on ada": Case(AdaKV, {}, LeastTheta(steps=2), by_head, by_least_theta),
    "residual 3": Case(SnapKV, {}, Residual(entries=3, share=0.5)),
    "residual clusters": Case(SnapKV, {}, Residual(entries=3, rounds=2)),
    "residual on ada": Case(AdaKV, dict(floor=0.0), Residual(entries=3), by_head),
    "residual on critical on ada": Case(
        AdaKV, {}, Residual(Critical(), entries=1), by_head, in_two_stages
    ),
}
WALKS = [
    *product(CASES, [GROUPED, TIED, AGAIN]),
    *product(["critical on ada", "theta on pyramid", "residual 3"], PROMPTS),
]


@pytest.mark.parametrize("case, prompt", WALKS, ids=name_of)
def test_slots_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


MORE_THAN_ONCE = {
    name: case for name, case in CASES.items() if name[:5] not in ("theta", "resid")
} | {
    "critical code on ada": Case(
        AdaKV, dict(floor=0.0), CriticalCode(), by_head, as_the_code
    ),
    "chunk": Case(ChunkKV, {}, Chunks(3), choose=by_chunk),
    "whole chunks": Case(ChunkKV, {}, Chunks(3, fill=False), choose=by_chunk),
    "chunk on ada": Case(AdaKV, dict(floor=0.1), Chunks(3), by_head, by_chunk),
    "whole chunks on ada": Case(
        AdaKV, dict(floor=0.1), Chunks(3, fill=False), by_head, by_chunk
    ),
}


@pytest.mark.parametrize("case", MORE_THAN_ONCE)
@pytest.mark.parametrize("turns", [(30, 5, 9, 2, 1), (3, 8, 12, 4, 4)])
def test_slots_and_outputs_equal_the_loops_after_each_turn(case, turns):
    check_turns(MORE_THAN_ONCE[case], turns)


@pytest.mark.parametrize("H, G, budget", [(1, 4, 12), (3, 1, 9), (4, 2, 6)])
@pytest.mark.parametrize("case", ["snap", "critical on ada"])
def test_turns_with_other_heads_and_budgets(case, H, G, budget):
    check_turns(MORE_THAN_ONCE[case], (8, 5, 5, 5), H=H, G=G, budget=budget)


def test_empty_slots_take_no_room_from_tokens_that_nobody_looks_at_in_a_later_turn(T=8):
    """Empty slots never win over tokens without any attention.

    Heads have 53 and 9 entries. Then the whole window attends to its first token only, so all other
    tokens have a window score of 0.
    """
    cache = uneven(AdaKV(20, 8, kernel_size=1, floor=0.0), 60)
    begin_turn([cache])
    q, k = torch.zeros(B, 8, T, 2), torch.zeros(B, 4, T, 2)
    q[..., 1], k[:, :, 0, 1] = 1, 1000
    cache.attend(q, k, k, torch.arange(60, 60 + T)[None])
    end(cache)
    assert (cache.pos != NEVER).sum((1, 2)).tolist() == [4 * 20] * B


def test_the_authors_code_adds_a_little_to_scores_and_takes_half_by_weight():
    """CriticalCode adds 1e-4 to the scores, multiplies the means and has α = 0.5."""
    scores, norms = torch.tensor(
        [[[[0, 0.5, 0], [0, 0.1, 0.2]]], [[[2, 1, 4.0], [4, 3, 2.0]]]]
    )[:, None]
    second = CriticalCode().second(
        SnapKV(20, window_size=8, kernel_size=1), scores, norms
    )
    assert torch.allclose(
        second, torch.tensor([[[1e-4 * 3, 0.3001 * 2, 0.1001 * 3]]]), atol=0
    )
    assert (
        CriticalCode().alpha == 0.5
        and Critical().alpha == PooledCritical().alpha == 0.25
    )


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
@pytest.mark.parametrize("beta", [1, 3, 20])
def test_pyramid_keeps_what_snap_kv_keeps_over_all_layers(
    layers, beta, budget=12, window_size=3
):
    for T in (budget + 1, 2 * budget, 2 * budget + 5, 4 * budget + 1):
        x, scores = torch.zeros(1, 1, T, 2), [[0] * (T - window_size)]
        counts = [
            compressed(
                PyramidKV(budget, window_size, beta=beta), x, x, x, None, i, layers
            ).length
            for i in range(layers)
        ]
        assert sum(counts) == layers * budget
        assert layers == 1 or counts == [
            window_size + by_depth(scores, budget - window_size, beta, i, layers)[0]
            for i in range(layers)
        ]


def test_shares_of_a_budget_are_exact_and_do_not_overflow():
    assert part_of(0.29, 100) == 29 and part_of(1 / 3, 3000) == 1000
    assert part_of(1 / 3, torch.tensor([3000, 6001])).tolist() == [1000, 2000]
    for floor in (1 / 3, 0.1 + 0.2):
        assert shared(torch.rand(1, 3, 5000), 1000, floor).sum() == 3000


@pytest.mark.parametrize(
    "make, message",
    [
        (partial(SnapKV, 8, 8), "budget 8 must exceed the window 8"),
        (partial(SnapKV, 20, 0), "window_size 0"),
        (partial(AdaKV, 20, 8, 2), "kernel_size 2"),
        (partial(PyramidKV, 20, 8, beta=0), "beta is 0"),
        (partial(AdaKV, 20, 8, floor=1.5), "floor is 1.5"),
        (partial(SnapKV, 20, 8, select=Critical), "select"),
        (partial(Critical, alpha=-0.5), "alpha is -0.5"),
        (partial(LeastTheta, steps=-1), "steps -1"),
        (partial(DefensiveKV, 12, 4, mass=1.1), "mass is 1.1"),
        (partial(Residual, entries=0), "entries 0"),
        (partial(Residual, share=0), "share is 0"),
        (
            partial(AdaKV, 20, 8, select=Residual(Chunks(13, fill=False))),
            "budget 20 has no room for a chunk",
        ),
    ],
)
def test_bad_options_are_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_norms_are_added_up_in_32_bits():
    v, w_o = torch.full((B, 2, 3, D), 8.0).half(), torch.ones(4000, 4, D).half()
    assert torch.equal(value_norms(v, w_o), torch.full((B, 2, 2, 3), 8.0 * D * 4000))


@pytest.mark.parametrize("T, expected", [(60, [3, 0, 0, 0]), (42, [0, 3, 3, 3])])
def test_heads_with_too_little_room_or_nothing_to_evict_have_no_residual(T, expected):
    """A head with too little room, or with nothing to evict, gets no residual entry.

    Of 48 entries, head 0 gets 45 of 52 and the others 1 each (T = 60); or head 0 gets all 34 and
    the others 4 or 5 (T = 42).
    """
    select = Residual(entries=3, share=0.5)
    cache = uneven(AdaKV(20, window_size=8, kernel_size=1, floor=0.0, select=select), T)
    assert ((cache.slot("bias") != 0) & (cache.pos != NEVER)).sum(-1).tolist() == [
        expected
    ] * B
    assert (cache.pos != NEVER).sum((1, 2)).tolist() == [4 * 20] * B


def test_numbers_that_change_are_not_packed():
    """Packed slots cannot be changed, so heads of different length stay padded if a number does change."""

    class Counting(AdaKV):
        steps = PerEntry()

    cache = uneven(Counting(20, window_size=8, kernel_size=1, floor=0.0), 60)
    assert cache.ragged and not cache.packed
    cache.steps += 1
    assert (cache.steps == 1).all()
