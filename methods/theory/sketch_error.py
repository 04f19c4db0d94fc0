"""Compute the error of KVReviver's sketch (arXiv 2512.17917).

The sketch returns estimates of keys and values. `collision_variance` is their squared error if both
have signs, `printed_bound` the paper's bound on it (claims R6, R7). The load is the number of
tokens for each slot (R4).
"""

import math

from torch import Tensor

from methods.ours.kv_reviver_shrunk import MEDIAN

# ---- errors of estimates ---


def relative_error(
    estimate: Tensor,
    true: Tensor,
) -> float:
    """Return the squared error of estimates (B, H, n, D) over the variance, mean over heads.

    The variance is that of `true` about its mean over tokens. This mean as an estimate has the
    error 1.
    """
    mean = true.mean(2, keepdim=True)
    variance = (true - mean).square().sum((2, 3))
    error = (estimate - true).square().sum((2, 3))
    return (error / variance).mean().item()


# ---- the appendix ---


def collision_variance(
    a: float,
    width: int,
    rows: int,
) -> float:
    """Return the expected squared error of an estimated number in a signed sketch of `a` tokens.

    The sketch has `rows` rows of `width` slots. The tokens' numbers have mean 0 and variance 1. If
    the result is above 1, the estimate 0 has a smaller error. With three rows the formula needs
    many tokens a slot.
    """
    return MEDIAN[rows] * (a - 1) / width


def printed_bound(
    a: float,
    slots: int,
) -> tuple[float, float]:
    """Return the paper's bound πa/N on an estimate's variance for `a` tokens, and e^(−a/N).

    The unit is the variance of one token's number; N is the number of slots in all rows. The paper
    says that the variance exceeds the bound with a probability below e^(−a/N).
    """
    bound = math.pi * a / slots
    exceeded = math.exp(-a / slots)
    return bound, exceeded


# ---- limits of any way to read the sketch ---


def load(budget: float, vague: float) -> float:
    """Return a/N, the tokens for each slot, if the fraction `vague` of the budget is the sketch.

    budget: a fraction of all n entries. The result is at least 1/budget for any `vague`. If
    positions and scores take bytes too, fewer tokens are exact and a/N is larger.
    """
    # The Bn entries of the budget are N = vBn slots and Bn − N exact tokens. The sketch has the
    # other tokens: a = n − Bn + N.
    #     a/N = 1 + (1 − B) n/N = 1 + (1 − B)/(vB) ≥ 1 + (1 − B)/B = 1/B
    # since v ≤ 1, with equality if no token is exact.
    return 1 + (1 - budget) / (vague * budget)
