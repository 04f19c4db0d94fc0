"""Least θ against a loop that computes the bound of every set."""

import pytest

from methods.baselines.ada_kv import AdaKV
from methods.baselines.pyramid_kv import PyramidKV
from methods.baselines.snap_kv import SnapKV
from methods.ours.theta import LeastTheta
from windows import (
    AGAIN,
    GROUPED,
    PROMPTS,
    TIED,
    Case,
    by_depth,
    by_head,
    check_walk,
    each_walk,
    highest,
    in_two_stages,
    mean,
    pool,
    same_for_all,
)


def by_least_theta(A, norms, out, b, kernel_size, steps, pooled=True, **_):
    """Return the set with the lowest θ of: by weight, in two stages, and `steps` improvements."""
    if pooled:
        A = [pool(a[:out], kernel_size) + a[out:] for a in A]
        A = [[x / sum(a) for x in a] for a in A]

    def gathered(a, norm, kept):
        """Return S and W of a query head."""
        stay = [*kept, *range(out, len(a))]
        return sum(a[i] for i in stay), sum(a[i] * norm[i] for i in stay)

    def theta(kept):
        total = 0
        for a, norm in zip(A, norms):
            S, W = gathered(a, norm, kept)
            total += sum(x * y for x, y in zip(a, norm)) - (2 - 1 / S) * W
        return total

    staged = in_two_stages(A, norms, out, b, 1, alpha=0.25)
    sets = [highest(mean(A)[:out], b), staged]
    kept = min(sets, key=theta)
    for _ in range(steps):
        gain = [0] * out
        for a, norm in zip(A, norms):
            S, W = gathered(a, norm, kept)
            for i in range(out):
                gain[i] += a[i] * ((2 - 1 / S) * norm[i] + W / S**2)
        kept = highest(gain, b)
        sets.append(kept)
    return min(sets, key=theta)


def case(steps, Method=SnapKV, deal=same_for_all, pooled=True):
    return Case(Method, {}, LeastTheta(steps, pooled), deal, by_least_theta)


CASES = {
    "theta": case(4),
    "no step": case(0),
    "unpooled": case(1, pooled=False),
    "on pyramid": case(2, PyramidKV, by_depth),
    "on ada": case(2, AdaKV, by_head),
}


@each_walk(CASES, GROUPED, TIED, AGAIN)
def test_slots_outputs_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


@each_walk(["on pyramid"], *PROMPTS)
def test_slots_equal_the_loops_in_every_shape_of_prompt(case, prompt):
    check_walk(CASES[case], prompt)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="steps -1"):
        LeastTheta(steps=-1)
