"""CriticalKV: keep what the output would miss, not what attention looks at (arXiv 2502.03805).

A token with a large attention weight but a tiny projected value adds next to nothing to the output. So bound the L1
change of the output that an eviction causes, and choose the entries that minimise the bound: the first α·b by weight
alone, the others by weight × ‖projected value‖₁ (Algorithm 1). It goes on top of any window method.

    L = ‖o − ô‖₁ ≤ θ = C − (2 − 1/S) Σ_i N_i A_i ‖𝒱_i‖₁,   𝒱 = V W_O,   S = Σ_i N_i A_i,   C = Σ_i A_i ‖𝒱_i‖₁

Differs from the paper: nothing for one query head per key/value head. Where G query heads share an entry, its score is
the mean of their products A·‖𝒱‖, each with its own norm; the paper does not say, and its published code multiplies the
means. The sum of the heads' bounds would weigh the products by 2 − 1/σ_g; that is positive only where Assumption 1
holds, so the heads are taken alike.

Beyond the paper: `LeastTheta`. An entry that is added raises S as well, and stage 2 forgets that. The gain of θ is
A_i [(2 − 1/S) ‖𝒱_i‖₁ + W/S²] with W = Σ_i N_i A_i ‖𝒱_i‖₁, so the set is chosen again by this score, a few times. Summed
over a group it has the right weight for each head, whatever S is.

Shapes of the theory: weights A and norms ‖𝒱‖₁ (..., n), a set `kept` (..., n) of bool that gathers some weight.
"""
from dataclasses import dataclass
from fractions import Fraction
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm import whole
from nanollm.cache import WindowCache, kernel_for, make_cache, top
from nanollm.generate import prefill


@dataclass(eq=False)
class Critical(WindowCache):
    """Algorithm 1 with the scores of Algorithm 2: stage 1 by pooled votes, stage 2 by unpooled votes × norms."""
    alpha: float = 0.25             # share of the entries that stage 1 takes by weight alone (the authors' code: 0.5)
    pool_second: bool = False       # stage 2 on pooled votes too, as in the authors' code
    epsilon: float = 0.0            # added to the votes of stage 2; the authors' code: 1e-4
    product_of_means: bool = False  # mean vote × mean norm over the group, as in the authors' code

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is a share of the budget; it must lie between 0 and 1")

    def select(self, votes: Tensor, budget: int | Tensor) -> Tensor:
        first = top(self.pool(votes.mean(2)), part_of(self.alpha, budget))
        norms = value_norms(self.v[:, :, :votes.shape[-1]], self.w_o)
        if self.pool_second:
            votes = self.pool(votes)
        if self.product_of_means:
            score = (votes.mean(2) + self.epsilon) * norms.mean(2)
        else:
            score = ((votes + self.epsilon) * norms).mean(2)
        return two_stage(first, score, budget)


@dataclass(eq=False)
class CriticalCode(Critical):
    """As the authors' code does it: everything pooled, half of the budget for stage 1, the product of means."""
    alpha: float = 0.5
    pool_second: bool = True
    epsilon: float = 1e-4
    product_of_means: bool = True


@dataclass(eq=False)
class LeastTheta(WindowCache):
    """The lowest θ of top-A, two-stage and what a few steps make of the better one (beyond the paper).

    With `pooled`, θ and both starts are those of the pooled votes.
    """
    steps: int = 2       # of improvement; 0 takes the better of top-A and two-stage; here 2 come within 0.5 % of 12
    pooled: bool = True  # A is what is to be expected after pooling; False: what the window's queries saw

    def __post_init__(self):
        super().__post_init__()
        whole("steps", self.steps, 0, 100)

    def select(self, votes: Tensor, budget: int | Tensor) -> Tensor:
        weights = self.rows.mean(3)  # (B, H, G, S): the window stays and carries weight too
        if self.pooled:
            weights = torch.cat((self.pool(votes), weights[..., votes.shape[-1]:]), -1)
            weights = weights / weights.sum(-1, keepdim=True)
        return least_theta(weights, value_norms(self.v, self.w_o), budget, self.window, self.steps)


def value_norms(v: Tensor, w_o: Tensor) -> Tensor:
    """‖𝒱_i‖₁ = ‖v_i W_O‖₁ of every query head: v (B, H, n, D), w_o (d_model, H·G, D) → (B, H, G, n), 32 bits at least.

    One head and 1024 tokens at a time, which fit into a processor's cache: 𝒱 itself, n × d_model, is never there whole.
    """
    if fast := kernel_for(v, "value_norms"):
        return fast(v, w_o)
    B, H, n, D = v.shape
    w_o = w_o.unflatten(1, (H, -1)).permute(1, 2, 3, 0)  # (H, G, D, d_model)
    norms = v.new_empty(H, w_o.shape[1], B * n, dtype=torch.promote_types(v.dtype, torch.float32))
    for h, heads in enumerate(w_o):
        for part, tokens in enumerate(v[:, h].flatten(0, 1).split(1024)):
            for g, w in enumerate(heads):
                norms[h, g, part * 1024:part * 1024 + len(tokens)] = torch.sum((tokens @ w).abs_(), -1, dtype=norms.dtype)
    return norms.view(H, -1, B, n).permute(2, 0, 1, 3)


def two_stage(first: Tensor, score: Tensor, budget: int | Tensor) -> Tensor:
    """Algorithm 1: the entries of stage 1, `first`, and of the others those with the highest score."""
    return top(score.masked_fill(first, math.inf), budget)


def least_theta(weights: Tensor, norms: Tensor, budget: int | Tensor, window: int, steps: int = 4, alpha: float = 0.25) -> Tensor:
    """Mask (..., n − window) of `budget` entries per group that aims at the least Σ_g θ_g; the window is kept besides.

    weights and norms are (..., G, n). θ never exceeds that of top-A or of two stages, for it starts from the better one.
    """
    outside = weights.shape[-1] - window

    def choose(score):
        return top(score.sum(-2)[..., :outside], budget)

    def better(one, other):
        # a head that gathers no weight at all (S = 0) has no bound
        bounds = (theta(weights, norms, with_window(kept, window)).sum(-1).nan_to_num(math.inf) for kept in (one, other))
        return torch.where(torch.ge(*bounds)[..., None], other, one)

    first = top(weights.sum(-2)[..., :outside], part_of(alpha, budget))
    best = kept = better(two_stage(first, (weights * norms).sum(-2)[..., :outside], budget), choose(weights))
    for _ in range(steps):
        S, W = (x.unsqueeze(-1) for x in gathered(weights, norms, with_window(kept, window)))
        kept = choose(weights * ((2 - 1 / S) * norms + W / S ** 2))  # −∂θ/∂N_i, summed over the group
        best = better(kept, best)
    return best


def part_of(alpha: float, budget: int | Tensor) -> int | Tensor:
    """⌊α·b⌋, for α as it is meant: 0.29 of 100 is 29 and 1/3 of 3 is 1, though the floats are a little less."""
    exact = Fraction(str(alpha)).limit_denominator(10**6)
    return exact.numerator * budget // exact.denominator


def with_window(kept: Tensor, window: int) -> Tensor:
    """A group's set (..., n − w) as (..., 1, n): the window is kept by every head."""
    return F.pad(kept, (0, window), value=True).unsqueeze(-2)


# ---- the theory -------------------------------------------------------------------------------------------------

def seen_by_window(model, tokens: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a prompt's last `window` queries see: weights A (mean over them), norms ‖𝒱‖₁ and 𝒱 of prompts tokens (B, T).

    A and norms are (B, L, heads, T), 𝒱 (B, L, heads, T, d_model), for all query heads.
    """
    caches = make_cache(model, WindowCache, budget=window + 1, window=window)
    prefill(model, tokens, caches)
    w_o = [cache.w_o.unflatten(1, (cache.k.shape[1], -1)) for cache in caches]  # (d_model, H, G, D)
    values = [torch.einsum("bhnd,ohgd->bhgno", cache.v, w) for cache, w in zip(caches, w_o)]
    seen = [(cache.rows.mean(3), value_norms(cache.v, cache.w_o), value) for cache, value in zip(caches, values)]
    return tuple(torch.stack([x.flatten(1, 2) for x in layers], 1) for layers in zip(*seen))


def algorithm_1(weights: Tensor, norms: Tensor, budget: int, alpha: float = 0.25) -> tuple[Tensor, Tensor]:
    """Both stages' sets of a head that keeps no window."""
    first = top(weights, part_of(alpha, budget))
    return first, two_stage(first, weights * norms, budget) & ~first


def heads_that_win(weights: Tensor, norms: Tensor, values: Tensor, budget: int) -> Tensor:
    """(2, 3): the share of heads in which θ, and L, is lower with two stages than with top-A, with `least_theta` than
    with top-A, and with `least_theta` than with two stages. One query head an entry, no window, no pool."""
    ours = least_theta(weights.unsqueeze(-2), norms.unsqueeze(-2), budget, window=0)
    sets = top(weights, budget), torch.logical_or(*algorithm_1(weights, norms, budget)), ours
    lower = []
    for bound, x in ((theta, norms), (perturbation, values)):
        by_weight, critical, least = (bound(weights, x, kept) for kept in sets)
        lower.append([(one < other * (1 - 1e-6)).float().mean() for one, other in
                      ((critical, by_weight), (least, by_weight), (least, critical))])
    return torch.tensor(lower)


def perturbation(weights: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """L = ‖o − ô‖₁ (Definition 1, Eq. 5) of projected values 𝒱 (..., n, d_model)."""
    return ((weights - masked_attention(weights, kept)).unsqueeze(-2) @ values).abs().sum((-2, -1))


def masked_attention(weights: Tensor, kept: Tensor) -> Tensor:
    """A′ = (N ∘ A) / Σ N_i A_i (Theorem 1, Eq. 6): softmax over the kept entries alone."""
    masked = weights * kept
    return masked / masked.sum(-1, keepdim=True)


def gathered(weights: Tensor, norms: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """S = Σ N_i A_i, the weight that a set gathers, and W = Σ N_i A_i ‖𝒱_i‖₁."""
    return (weights * kept).sum(-1), (weights * norms * kept).sum(-1)


def theta(weights: Tensor, norms: Tensor, kept: Tensor) -> Tensor:
    """θ = C − (2 − 1/S) W ≥ L (Theorem 2, Eq. 8)."""
    S, W = gathered(weights, norms, kept)
    return (weights * norms).sum(-1) - (2 - 1 / S) * W


def assumption_1(weights: Tensor, first: Tensor) -> Tensor:
    """σ = Σ N′_i A_i, the weight that stage 1 gathers. Assumption 1 holds where σ > 1/2."""
    return (weights * first).sum(-1)


def theta_hat(weights: Tensor, norms: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """θ̂ = C − (2 − 1/σ) Σ (N′ + N″)_i A_i ‖𝒱_i‖₁ (Theorem 3, Eq. 14, 15).

    θ̂ ≥ θ for any σ, with equality where stage 2 adds no weight or the kept values are 0 (the paper prints <). But only
    if σ > 1/2 does the largest A_i ‖𝒱_i‖₁ give the least θ̂; else it gives the greatest.
    """
    return (weights * norms).sum(-1) - (2 - 1 / assumption_1(weights, first)) * (weights * norms * (first | second)).sum(-1)


def theta_relaxed(weights: Tensor, norms: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """θ̂ with M = min ‖𝒱_i‖₁ for every entry of stage 2 (Theorem 4, Eq. 18); least for stage 2 by weight alone.

    Both this and θ̂_relax ≥ θ̂ only if σ > 1/2.
    """
    none = torch.zeros_like(second)
    least = norms.amin(-1) * (weights * second).sum(-1)
    return theta_hat(weights, norms, first, none) - (2 - 1 / assumption_1(weights, first)) * least


variants = {"snap_kv+critical": Critical, "snap_kv+theta": LeastTheta}
additions = {"critical": Critical, "critical_code": CriticalCode, "theta": LeastTheta}  # on top of any window method, as in ada_kv+critical
