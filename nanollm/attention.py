"""Softmax attention over a cache's slots.

Queries that no method observes use PyTorch's `scaled_dot_product_attention` here. For observed
queries the attention probabilities are computed explicitly.

A mask says which slots a query sees. It is one of

    None        every query sees every slot
    "causal"    T queries and T slots in order: each query sees the slots up to its own
    a tensor    (B or 1, H or 1, T, S), from `visible`: true where it sees the slot, or numbers to
                add
"""

from contextlib import nullcontext
import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F
from torch.nn.attention import SDPBackend as Kernel, sdpa_kernel

Mask = Tensor | str | None


class Sliding(NamedTuple):
    """How far back a layer sees: the last `size` tokens, or those of the query's chunk."""

    size: int
    in_chunks: bool = False

    def first(self, pos: Tensor | int) -> Tensor | int:
        """Return the first position that the queries at pos see; it may be below 0."""
        if self.in_chunks:
            return pos - pos % self.size
        return pos - self.size + 1


def wide(x: Tensor) -> Tensor:
    """Return x in at least 32 bits: in 16, scores may overflow or tie, and sums lose digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    watch: int,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and the last `watch` queries' probabilities (None if watch is 0).

    q (B, H·G, T, D), k and v (B, H, S, D) → the output (B, H·G, T, D), the probabilities (B, H, G,
    w, S), w = min(watch, T).
    """
    T = q.shape[2]
    S = k.shape[2]
    w = min(watch, T)
    if not w:
        return fused(q, k, v, mask), None

    # only the last w queries need explicit probabilities
    n = T - w
    early_q, late_q = q.split((n, w), 2)
    p = probabilities(late_q, k, last_rows(mask, w, S, q.device))
    # (B, H, G·w, S): a group's queries are rows of one product
    rows = p.flatten(2, 3).to(v)
    y = (rows @ v).view_as(late_q)
    if not n:
        return y, p

    # the others need only the output
    if isinstance(mask, str):  # and see none of the slots of the last w
        k = k[:, :, :n]
        v = v[:, :, :n]
    elif mask is not None:
        mask = mask[:, :, :n]
    early = fused(early_q, k, v, mask)
    return torch.cat((early, y), 2), p


def last_rows(
    mask: Mask,
    w: int,
    S: int,
    device: torch.device,
) -> Tensor | None:
    """Return the mask of the last w queries over S slots: a tensor, or None if it was None."""
    if mask is None:
        return None
    if isinstance(mask, str):  # w = 2, S = 4: rows 1 1 1 0 and 1 1 1 1
        causal = torch.ones(w, S, dtype=torch.bool, device=device)
        return causal.tril(S - w)[None, None]
    return mask[:, :, -w:]


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
) -> Tensor:
    """Return attention's output (B, H·G, T, D) by PyTorch's function, without probabilities."""
    B, heads, T, D = q.shape
    H = k.shape[1]
    if T == 1:
        # the G queries of a group are rows of one small product: each key is read once
        # cuDNN, PyTorch 2.11's first choice on an H100, makes a plan for each new S
        others = [Kernel.FLASH_ATTENTION, Kernel.EFFICIENT_ATTENTION, Kernel.MATH]
        rows = q.view(B, H, -1, D)
        if isinstance(mask, str):  # one query and one slot
            mask = None
        with sdpa_kernel(others) if q.is_cuda else nullcontext():
            y = F.scaled_dot_product_attention(rows, k, v, mask)
        return y.reshape(B, heads, 1, D)  # on a GPU its strides may differ from q's

    if isinstance(mask, str):
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            enable_gqa=True,
        )
    if mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(heads // H, 1)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def visible(
    slot_pos: Tensor,
    bias: Tensor | None,
    pos: Tensor,
    sliding: Sliding | None = None,
) -> Tensor:
    """Return a mask (B or 1, H or 1, T, S) of the slots that each query sees.

    Slots have positions slot_pos (B or 1, H or 1, S), queries have positions pos (B or 1, T).
    Without a bias (B, H, S) the mask is boolean. With a bias it holds the slot's bias, and −∞ where
    the slot is hidden. sliding: the layer sees no more than that.
    """
    slot_pos = slot_pos.unsqueeze(2)
    pos = pos[:, None, :, None]
    seen = slot_pos <= pos
    if sliding is not None:
        seen = seen & (slot_pos >= sliding.first(pos))
    if bias is None:
        return seen
    return torch.where(seen, bias.unsqueeze(2), -math.inf)


def probabilities(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the softmax of q kᵀ/√D over visible slots: q (B, H·G, w, D) → (B, H, G, w, S), `wide`.

    mask (B or 1, H or 1, w, S) is what `visible` returns; without one, every query sees every slot.
    """
    B, heads, w, D = q.shape
    H = k.shape[1]
    group = wide(q).reshape(B, H, -1, D)  # (B, H, G·w, D): the queries that read head h
    score = group @ wide(k).mT
    score.mul_(D**-0.5)
    score = score.view(B, H, heads // H, w, -1)
    if mask is not None:
        # for 32 queries or more masked_fill took several times as long as adding −∞ on one CPU
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf)
        score.add_(mask.unsqueeze(2))
    return score.softmax(-1)
