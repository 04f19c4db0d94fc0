"""CriticalKV's definitions and theorems (arXiv 2502.03805), as printed in the paper and as they hold, and
what they say of heads.

Weights A and norms ‖𝒱‖₁ are (..., n), a set `kept` is (..., n) of bool and gathers some weight. θ itself
(Theorem 2) stands in methods/ours/theta.py.
"""
import torch
from torch import Tensor

from methods.critical_kv import part_of, two_stage, value_norms
from methods.ours.theta import least_theta, theta
from nanollm.cache import make_cache
from nanollm.generate import prefill
from nanollm.ranking import top
from nanollm.window import WindowCache, window_rows


# ---- definitions and theorems ---------------------------------------------------------------------------

def perturbation(weights: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """L = ‖o − ô‖₁ (Definition 1, Eq. 5) of projected values 𝒱 (..., n, d_model)."""
    return ((weights - masked_attention(weights, kept)).unsqueeze(-2) @ values).abs().sum((-2, -1))


def masked_attention(weights: Tensor, kept: Tensor) -> Tensor:
    """A′ = (N ∘ A) / Σ N_i A_i (Theorem 1, Eq. 6): softmax over the kept entries alone."""
    masked = weights * kept
    return masked / masked.sum(-1, keepdim=True)


def algorithm_1(weights: Tensor, norms: Tensor, budget: int, alpha: float = 0.25) -> tuple[Tensor, Tensor]:
    """Both stages' sets of a head that keeps no window."""
    first = top(weights, part_of(alpha, budget))
    return first, two_stage(first, weights * norms, budget) & ~first


def assumption_1(weights: Tensor, first: Tensor) -> Tensor:
    """σ = Σ N′_i A_i, the weight that stage 1 gathers. Assumption 1 holds where σ > 1/2."""
    return (weights * first).sum(-1)


def theta_hat(weights: Tensor, norms: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """θ̂ = C − (2 − 1/σ) Σ (N′ + N″)_i A_i ‖𝒱_i‖₁ (Theorem 3, Eq. 14, 15).

    θ̂ ≥ θ for any σ, with equality where stage 2 adds no weight or the kept values are 0 (the paper prints <).
    But only if σ > 1/2 does the largest A_i ‖𝒱_i‖₁ give the least θ̂; else it gives the greatest.
    """
    sigma = assumption_1(weights, first)
    return (weights * norms).sum(-1) - (2 - 1 / sigma) * (weights * norms * (first | second)).sum(-1)


def theta_relaxed(weights: Tensor, norms: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """θ̂_relax: θ̂ with M = min ‖𝒱_i‖₁ for every entry of stage 2 (Theorem 4, Eq. 18).

    It is least for stage 2 by weight alone. Both this and θ̂_relax ≥ θ̂ hold only if σ > 1/2.
    """
    none = torch.zeros_like(second)
    least = norms.amin(-1) * (weights * second).sum(-1)
    return theta_hat(weights, norms, first, none) - (2 - 1 / assumption_1(weights, first)) * least


# ---- heads, a model's or drawn --------------------------------------------------------------------------

def seen_by_window(model, tokens: Tensor, window_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights A, norms ‖𝒱‖₁ and 𝒱 of prompts (B, T): what their last `window_size` queries see on average.

    A and norms are (B, L, heads, T), 𝒱 (B, L, heads, T, d_model), for all query heads.
    """
    caches = make_cache(model, WindowCache, budget=window_size + 1, window_size=window_size)
    prefill(model, tokens, caches)
    w_o = [cache.w_o.unflatten(1, (cache.k.shape[1], -1)) for cache in caches]  # (d_model, H, G, D)
    values = [torch.einsum("bhnd,ohgd->bhgno", cache.v, w) for cache, w in zip(caches, w_o)]
    weights = [window_rows(cache.queries, cache.k).mean(3) for cache in caches]
    norms = [value_norms(cache.v, cache.w_o) for cache in caches]
    return tuple(torch.stack([x.flatten(1, 2) for x in layers], 1) for layers in (weights, norms, values))


def drawn_heads(heads: int = 300, n: int = 512, d: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, norms and values of heads in which weight and value are independent."""
    g = torch.Generator().manual_seed(seed)
    weights = (2 * torch.randn(heads, n, generator=g)).softmax(-1)
    values = torch.randn(heads, n, d, generator=g) * torch.rand(heads, n, 1, generator=g)
    return weights, values.abs().sum(-1), values


def heads_that_win(weights: Tensor, norms: Tensor, values: Tensor, budget: int) -> Tensor:
    """The share of heads in which θ, and L, is lower, (2, 3): θ then L, each of three pairs.

    Two stages than top-A, `least_theta` than top-A, `least_theta` than two stages. One query head an entry;
    no window, no pool.
    """
    ours = least_theta(weights.unsqueeze(-2), norms.unsqueeze(-2), budget, window_size=0)
    sets = top(weights, budget), torch.logical_or(*algorithm_1(weights, norms, budget)), ours
    lower = []
    for bound, x in ((theta, norms), (perturbation, values)):
        by_weight, critical, least = (bound(weights, x, kept) for kept in sets)
        pairs = (critical, by_weight), (least, by_weight), (least, critical)
        lower.append([(one < other * (1 - 1e-6)).float().mean() for one, other in pairs])
    return torch.tensor(lower)


def read_much_saying_little(weights: Tensor, norms: Tensor, window_size: int) -> tuple[int, int, int, int]:
    """Prompt, layer, head and token of the entry with more than 5 % of a head's weight and the smallest norm.

    The norm is taken in relation to the head's mean norm, as it weighs them; the window is left out.
    """
    relative = (norms / (weights * norms).sum(-1, keepdim=True))[..., :-window_size]
    place = torch.where(weights[..., :-window_size] > 0.05, relative, 9).argmin()
    return tuple(i.item() for i in torch.unravel_index(place, relative.shape))
