"""Softmax attention over a cache's slots.

Queries that no method observes use PyTorch's fused attention. For observed queries the probabilities are
computed.
"""
from collections.abc import Iterator
import math

import torch
from torch import Tensor
import torch.nn.functional as F


def split(n: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of n new tokens: q, k, v (B, heads, T, D), pos (B or 1, T)."""
    return zip(q.split(n, 2), k.split(n, 2), v.split(n, 2), pos.split(n, 1))


def attention(q: Tensor, k: Tensor, v: Tensor, at: Tensor, bias: Tensor | None, pos: Tensor, watch: int,
              first: bool, ragged: bool) -> tuple[Tensor, Tensor | None]:
    """Output (B, H·G, T, D), and the probabilities p (B, H, G, w, S) of the last `watch` queries, or None.

    Queries q (B, H·G, T, D) at positions pos (B or 1, T); slots k and v (B, H, S, D) at positions `at`
    (B, H, S), with a logit bias (B, H, S) or None. first: nothing came before these tokens, so slot i holds
    token i, unless the method shows other slots. ragged: some slots may be hidden from the newest query.
    """
    T = q.shape[2]
    w = min(watch, T)
    rest, p, outputs = T - w, None, []
    if rest:
        causal = first and bias is None and k.shape[2] == T
        sees_all = T == 1 and bias is None and not ragged  # the newest token sees every slot
        n = rest if causal else k.shape[2]
        mask = None if causal or sees_all else visible(at, bias, pos[:, :rest])
        outputs.append(fused(q[:, :, :rest], k[:, :, :n], v[:, :, :n], mask, causal))
    if w:  # only the observed rows are made explicit
        p = probabilities(q[:, :, rest:], k, at, bias, pos[:, rest:])
        y = p.flatten(2, 3) @ v  # (B, H, G·w, D): a group's queries are rows of one product
        outputs.append(y.view(*q.shape[:2], w, -1))
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0], p


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Output (B, H·G, T, D), without a matrix of probabilities.

    With a mask (B, H, T, S), it applies. With `causal`, a query sees earlier slots. With neither, it sees
    all.
    """
    B, heads, T, D = q.shape
    if T == 1:  # the G queries of a group are rows of one small product, so that each key is read once
        return F.scaled_dot_product_attention(q.view(B, k.shape[1], -1, D), k, v, mask).view(B, heads, 1, D)
    if mask is not None:
        mask = mask.repeat_interleave(heads // k.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)


def visible(at: Tensor, bias: Tensor | None, pos: Tensor) -> Tensor:
    """Mask (B, H, T, S): slots at `at` (B, H, S) seen from queries at pos (B or 1, T).

    Without a bias it is boolean. With a bias it is the bias, and −∞ where a slot is hidden.
    """
    seen = at.unsqueeze(2) <= pos[:, None, :, None]
    return seen if bias is None else torch.where(seen, bias.unsqueeze(2), -math.inf)


def probabilities(q: Tensor, k: Tensor, at: Tensor, bias: Tensor | None, pos: Tensor) -> Tensor:
    """softmax(q kᵀ/√D + bias) over the visible slots: q (B, H·G, w, D) → (B, H, G, w, S)."""
    B, heads, w, D = q.shape
    H = k.shape[1]
    score = (q.reshape(B, H, -1, D) @ k.mT).mul_(D ** -0.5).view(B, H, heads // H, w, -1)
    # a float mask is added, which is faster than masked_fill
    mask = visible(at, q.new_zeros(1, 1, 1) if bias is None else bias, pos)
    score.add_(mask.unsqueeze(2))
    return score.softmax(-1, dtype=torch.float32).to(q.dtype)
