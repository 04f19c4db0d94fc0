"""CriticalKV: keep what the output would miss, not what attention looks at (arXiv 2502.03805).

A token with a large attention weight but a tiny projected value adds next to nothing to the output. So bound
the L1 change of the output that an eviction causes, and choose the entries that minimise the bound: the first
α·b by weight alone, the others by weight × ‖projected value‖₁ (Algorithm 1). It is a selection for any window
method. With A the attention weights, N 1 for an entry that stays and 0 for another, o the output and ô the
output after the eviction:

    L = ‖o − ô‖₁ ≤ θ = C − (2 − 1/S) Σ_i N_i A_i ‖𝒱_i‖₁,   𝒱 = V W_O,   S = Σ_i N_i A_i,   C = Σ_i A_i ‖𝒱_i‖₁

Differs from the paper: nothing for one query head per key/value head. Where G query heads share an entry, its
score is the mean of their products A·‖𝒱‖, each with its own norm. The paper does not say; its published code
multiplies the means (`CriticalCode`). The sum of the heads' bounds would weigh head g's products by 2 − 1/σ,
σ the weight that its stage 1 gathers. That is positive only where σ > 1/2 (Assumption 1). So the heads are
taken alike.

Ours: `PooledCritical`. The paper pools the window scores of stage 1 and not those of stage 2.
"""
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
import math

import torch
from torch import Tensor

from methods.snap_kv import SnapKV
from nanollm.kernel_switch import kernel_for
from nanollm.ranking import top
from nanollm.window import Selection, WindowCache


@dataclass(frozen=True)
class Critical(Selection):
    """Algorithm 1, as Algorithm 2 scores: stage 1 by pooled window scores, stage 2 by unpooled window scores × norms."""
    alpha: float = 0.25  # share of the entries that stage 1 takes by weight alone

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is a share of the budget; it must lie between 0 and 1")

    def __call__(self, cache: WindowCache, scores: Tensor, budget: int | Tensor) -> Tensor:
        first = top(cache.pool(scores.mean(2)), part_of(self.alpha, budget))
        norms = value_norms(cache.v[:, :, :scores.shape[-1]], cache.w_o)
        return two_stage(first, self.second(cache, scores, norms), budget)

    def second(self, cache: WindowCache, scores: Tensor, norms: Tensor) -> Tensor:
        """Scores of stage 2, (B, H, n), from window scores and norms (B, H, G, n)."""
        return (scores * norms).mean(2)


@dataclass(frozen=True)
class PooledCritical(Critical):
    """Ours: stage 2 on pooled window scores, too."""

    def second(self, cache: WindowCache, scores: Tensor, norms: Tensor) -> Tensor:
        return (cache.pool(scores) * norms).mean(2)


@dataclass(frozen=True)
class CriticalCode(Critical):
    """The authors' code, in NVIDIA/kvpress: everything pooled, half of the budget for stage 1, the product of
    means. But there the window counts in that half; here it is half of the entries beside the window.
    """
    alpha: float = 0.5

    def second(self, cache: WindowCache, scores: Tensor, norms: Tensor) -> Tensor:
        return (cache.pool(scores).mean(2) + 1e-4) * norms.mean(2)


def two_stage(first: Tensor, score: Tensor, budget: int | Tensor) -> Tensor:
    """Algorithm 1: the entries of stage 1, `first`, and of the others those with the highest score."""
    return top(score.masked_fill(first, math.inf), budget)


def part_of(alpha: float, budget: int | Tensor) -> int | Tensor:
    """⌊α·b⌋ for α as it is meant: 0.29 of 100 is 29, 1/3 of 3 is 1, though the floats are a little less."""
    exact = Fraction(str(alpha)).limit_denominator(10**6)
    return exact.numerator * budget // exact.denominator


def value_norms(v: Tensor, w_o: Tensor) -> Tensor:
    """‖𝒱_i‖₁ = ‖v_i W_O‖₁ of every query head, in 32 bits at least.

    v (B, H, n, D), w_o (d_model, H·G, D) → (B, H, G, n). One head and 1024 tokens at a time, which fit into a
    core's cache: 𝒱 itself, n × d_model, is never there whole.
    """
    if fast := kernel_for(v, "value_norms"):
        return fast(v, w_o)

    B, H, n, D = v.shape
    w_o = w_o.unflatten(1, (H, -1)).permute(1, 2, 3, 0)  # (H, G, D, d_model)
    norms = v.new_empty(H, w_o.shape[1], B * n, dtype=torch.promote_types(v.dtype, torch.float32))

    for h, heads in enumerate(w_o):
        for part, tokens in enumerate(v[:, h].flatten(0, 1).split(1024)):
            at = slice(part * 1024, part * 1024 + len(tokens))
            for g, w in enumerate(heads):
                norms[h, g, at] = torch.sum((tokens @ w).abs_(), -1, dtype=norms.dtype)
    return norms.view(H, -1, B, n).permute(2, 0, 1, 3)


variants = {"snap_kv+critical": partial(SnapKV, select=Critical())}
additions = {"critical": dict(select=Critical()), "critical_code": dict(select=CriticalCode())}
