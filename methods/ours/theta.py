"""Least θ: a selection that lowers CriticalKV's bound further. Ours.

An entry that is added raises S as well, and stage 2 of CriticalKV (arXiv 2502.03805) forgets that. What an
entry takes off the bound θ is its weight times the slope of −θ:

    −∂θ/∂N_i = A_i [(2 − 1/S) ‖𝒱_i‖₁ + W/S²],   W = Σ_i N_i A_i ‖𝒱_i‖₁,   S = Σ_i N_i A_i

So the set is chosen again by this score, a few times. Summed over a group of query heads it has the right
weight for each head, whatever S is.
"""
from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.critical_kv import part_of, two_stage, value_norms
from methods.snap_kv import SnapKV
from nanollm.check import whole
from nanollm.ranking import top
from nanollm.window import Selection, WindowCache, window_rows


@dataclass(frozen=True)
class LeastTheta(Selection):
    """The lowest θ of top-A, two-stage and what a few steps make of the better one.

    With `pooled`, θ and both starts are those of the pooled window scores.
    """
    steps: int = 2       # of improvement; 0: the better of top-A and two-stage; 2 come within 0.5 % of 12
    again = False        # θ is of a head that has every token
    pooled: bool = True  # A is what is to be expected after pooling; False: what the window's queries saw

    def __post_init__(self):
        super().__post_init__()
        whole("steps", self.steps, 0, 100)

    def __call__(self, cache: WindowCache, scores: Tensor, budget: int | Tensor) -> Tensor:
        # the window stays and carries weight too: (B, H, G, S)
        weights = window_rows(cache.queries, cache.k).mean(3, dtype=scores.dtype)
        if self.pooled:
            weights = torch.cat((cache.pool(scores), weights[..., scores.shape[-1]:]), -1)
            weights = weights / weights.sum(-1, keepdim=True)
        return least_theta(weights, value_norms(cache.v, cache.w_o), budget, cache.window_size, self.steps)


def least_theta(weights: Tensor, norms: Tensor, budget: int | Tensor, window_size: int, steps: int = 4,
                alpha: float = 0.25) -> Tensor:
    """Mask (..., n − w) of `budget` entries per group that aims at the least Σ_g θ_g; the window is kept too.

    weights and norms are (..., G, n). It starts from the better of top-A and two stages and never gets worse.
    """
    outside = weights.shape[-1] - window_size

    def choose(score):
        return top(score.sum(-2)[..., :outside], budget)

    def bound(kept):  # a head that gathers no weight at all (S = 0) has none
        return theta(weights, norms, with_window(kept, window_size)).sum(-1).nan_to_num(math.inf)

    def better(one, other):
        return torch.where((bound(one) >= bound(other))[..., None], other, one)

    # the better of two stages and top-A
    first = top(weights.sum(-2)[..., :outside], part_of(alpha, budget))
    staged = two_stage(first, (weights * norms).sum(-2)[..., :outside], budget)
    best = kept = better(staged, choose(weights))

    # chosen again by −∂θ/∂N_i, summed over the group
    for _ in range(steps):
        S, W = (x.unsqueeze(-1) for x in gathered(weights, norms, with_window(kept, window_size)))
        kept = choose(weights * ((2 - 1 / S) * norms + W / S ** 2))
        best = better(kept, best)
    return best


def with_window(kept: Tensor, window_size: int) -> Tensor:
    """A group's set (..., n − w) as (..., 1, n): the window is kept by every head."""
    return F.pad(kept, (0, window_size), value=True).unsqueeze(-2)


def gathered(weights: Tensor, norms: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """S = Σ N_i A_i, the weight that a set gathers, and W = Σ N_i A_i ‖𝒱_i‖₁."""
    return (weights * kept).sum(-1), (weights * norms * kept).sum(-1)


def theta(weights: Tensor, norms: Tensor, kept: Tensor) -> Tensor:
    """θ = C − (2 − 1/S) W ≥ L (CriticalKV, Theorem 2, Eq. 8)."""
    S, W = gathered(weights, norms, kept)
    return (weights * norms).sum(-1) - (2 - 1 / S) * W


variants = {"snap_kv+theta": partial(SnapKV, select=LeastTheta())}
additions = {"theta": dict(select=LeastTheta())}
