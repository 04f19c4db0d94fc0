"""Compute CriticalKV's L and its bound θ, and compare selections of entries by them.

The paper is arXiv 2502.03805 (claims P1 to P4, P6, P9). L is the change of a head's output after
eviction. θ bounds it. The θ̂ and θ̂_relax of Theorems 3 and 4 are in
tests/methods/theory/test_perturbation.py.

Weights A and norms ‖𝒱‖₁ are (..., n). A set of entries is a mask (..., n); its weight must be above
0.
"""

import torch
from torch import Tensor

from methods.critical_kv import part_of, two_stage, value_norms
from nanollm.cache import full_layers, make_cache
from nanollm.generate import prefill
from nanollm.ranking import top
from nanollm.window import WindowMethod, window_rows


# ---- definitions and theorems ---


def perturbation(weights: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """Return L = ‖o − ô‖₁ (Definition 1, Eq. 5) for projected values 𝒱 (..., n, d_model): (...)."""
    difference = weights - masked_attention(weights, kept)
    change = difference.unsqueeze(-2) @ values  # o − ô, (..., 1, d_model)
    return change.abs().sum((-2, -1))


def masked_attention(weights: Tensor, kept: Tensor) -> Tensor:
    """Return A′ = (N ∘ A) / Σ N_i A_i, the softmax over the kept entries (Theorem 1, Eq. 6)."""
    masked = weights * kept
    return masked / masked.sum(-1, keepdim=True)


def theta(weights: Tensor, norms: Tensor, kept: Tensor) -> Tensor:
    """Return θ = C − (2 − 1/S) Σ N_i A_i ‖𝒱_i‖₁ ≥ L (Theorem 2, Eq. 8), with S = Σ N_i A_i."""
    S = (weights * kept).sum(-1)
    terms = weights * norms
    return terms.sum(-1) - (2 - 1 / S) * (terms * kept).sum(-1)


def algorithm_1(
    weights: Tensor,
    norms: Tensor,
    budget: int,
    alpha: float = 0.25,
) -> tuple[Tensor, Tensor]:
    """Return the masks of stage 1 and stage 2 for a head without an observation window."""
    first = top(weights, part_of(alpha, budget))
    both = two_stage(first, weights * norms, budget)
    return first, both & ~first


def assumption_1(weights: Tensor, first: Tensor) -> Tensor:
    """Return σ = Σ N′_i A_i, the weight of stage 1's entries. Assumption 1 is σ > 1/2."""
    return (weights * first).sum(-1)


# ---- the heads of a model ---


def seen_by_window(
    model,
    tokens: Tensor,
    window_size: int,
) -> tuple[Tensor, Tensor]:
    """Return A and ‖𝒱‖₁ of prompts (B, T), (B, L, query heads, T) each.

    A is the mean over the last `window_size` queries. Layers that slide are left out.
    """
    options = dict(budget=window_size + 1, window_size=window_size)
    caches = make_cache(model, WindowMethod, **options)
    prefill(model, tokens, caches)
    caches = full_layers(caches)
    weights = [window_rows(cache.notes["window"], cache.k).mean(3) for cache in caches]
    norms = [value_norms(cache.v, cache.w_o) for cache in caches]
    both = [torch.stack(layers, 1) for layers in (weights, norms)]
    return tuple(x.flatten(2, 3) for x in both)
