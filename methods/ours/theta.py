"""Ours: least θ, a selection that lowers CriticalKV's bound further.

Keeping an entry also raises S, the gathered weight; stage 2 of CriticalKV (arXiv 2502.03805)
ignores that. To first order, keeping entry i lowers θ by the slope

    −∂θ/∂N_i = A_i [(2 − 1/S) ‖𝒱_i‖₁ + W/S²],   W = Σ_i N_i A_i ‖𝒱_i‖₁,   S = Σ_i N_i A_i

S and W depend on the chosen set, so the set is chosen again by this score a few times. Summed over
a group of query heads, the score weights each head correctly, whatever its S is.
"""

from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.baselines.snap_kv import SnapKV
from methods.critical_kv import part_of, two_stage, value_norms
from nanollm.check import whole
from nanollm.ranking import top
from nanollm.window import Selection, Window


@dataclass(frozen=True)
class LeastTheta(Selection):
    """Select the set with the lowest θ: improve the better of top-A and two-stage."""

    steps: int = 2  # improvements; 0: the better of top-A and two-stage
    # A: the pooled window scores, normalised; False: the window scores
    pooled: bool = True
    again = False  # θ assumes a head that still has every token

    def __post_init__(self):
        whole("steps", self.steps, 0, 100)

    def __call__(self, window: Window, scores: Tensor, budget: int | Tensor) -> Tensor:
        layer = window.layer
        # (B, H, G, S): the window's entries stay, and their weight counts too
        weights = window.rows()[..., : layer.length].mean(3, dtype=scores.dtype)
        if self.pooled:
            weights = torch.cat((window.pool(scores), weights[..., window.n :]), -1)
            weights = weights / weights.sum(-1, keepdim=True)
        norms = value_norms(layer.v, layer.w_o)
        return least_theta(weights, norms, budget, window.w, self.steps)


def least_theta(
    weights: Tensor,
    norms: Tensor,
    budget: int | Tensor,
    window_size: int,
    steps: int = 4,
    alpha: float = 0.25,
) -> Tensor:
    """Return the mask (..., n − w) of `budget` entries per group with a low Σ_g θ_g.

    weights and norms are (..., G, n). The window's entries stay beside them. The result is never
    worse than top-A or two-stage.
    """
    outside = weights.shape[-1] - window_size

    def choose(score):
        return top(score.sum(-2)[..., :outside], budget)

    def bound(kept):  # if a head gathers no weight (S = 0), θ is not defined: take ∞
        return (
            theta(weights, norms, with_window(kept, window_size))
            .sum(-1)
            .nan_to_num(math.inf)
        )

    def better(one, other):
        return torch.where((bound(one) >= bound(other))[..., None], other, one)

    # start: the better of two-stage and top-A
    first = top(weights.sum(-2)[..., :outside], part_of(alpha, budget))
    staged = two_stage(first, (weights * norms).sum(-2)[..., :outside], budget)
    best = kept = better(staged, choose(weights))

    # choose again by −∂θ/∂N_i, summed over the group
    for _ in range(steps):
        S, W = (
            x.unsqueeze(-1)
            for x in gathered(weights, norms, with_window(kept, window_size))
        )
        kept = choose(weights * ((2 - 1 / S) * norms + W / S**2))
        best = better(kept, best)
    return best


def with_window(kept: Tensor, window_size: int) -> Tensor:
    """Return a group's mask (..., n − w) with the window added, (..., 1, n)."""
    return F.pad(kept, (0, window_size), value=True).unsqueeze(-2)


def gathered(weights: Tensor, norms: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return S = Σ N_i A_i, the weight that a set gathers, and W = Σ N_i A_i ‖𝒱_i‖₁."""
    return (weights * kept).sum(-1), (weights * norms * kept).sum(-1)


def theta(weights: Tensor, norms: Tensor, kept: Tensor) -> Tensor:
    """Return θ = C − (2 − 1/S) W ≥ L (CriticalKV, Theorem 2, Eq. 8)."""
    S, W = gathered(weights, norms, kept)
    return (weights * norms).sum(-1) - (2 - 1 / S) * W


variants = {"snap_kv+theta": partial(SnapKV, select=LeastTheta())}
additions = {"theta": dict(select=LeastTheta())}
