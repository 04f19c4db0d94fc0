"""Softmax attention over a cache's slots.

Queries that no method observes use PyTorch's fused attention. For observed queries the attention
probabilities are computed explicitly.
"""

from contextlib import nullcontext
import math

import torch
from torch import Tensor
import torch.nn.functional as F
from torch.nn.attention import SDPBackend as Kernel, sdpa_kernel


def wide(x: Tensor) -> Tensor:
    """Return x in at least 32 bits: in 16, scores may overflow, and sums and orders lose digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_pos: Tensor,
    bias: Tensor | None,
    pos: Tensor,
    watch: int,
    in_order: bool,
    ragged: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and the last `watch` queries' probabilities (None if watch is 0).

    The output is (B, H·G, T, D), the probabilities are (B, H, G, w, S). Queries q (B, H·G, T, D)
    have positions pos (B or 1, T). Slots k and v (B, H, S, D) have positions slot_pos (B, H, S) and
    a logit bias (B, H, S) or None. in_order: nothing was evicted, so slot i of each head holds
    token i. ragged: some slots may be hidden from the newest query.
    """
    T = q.shape[2]
    w = min(watch, T)
    if in_order:
        slot_pos = slot_pos[:, :1]  # the heads share one mask
    rest, p, outputs = T - w, None, []
    # the newest token sees every slot
    sees_all = T == 1 and bias is None and not ragged
    if rest:
        causal = in_order and bias is None and k.shape[2] == T
        n = rest if causal else k.shape[2]
        mask = None if causal or sees_all else visible(slot_pos, bias, pos[:, :rest])
        outputs.append(fused(q[:, :, :rest], k[:, :, :n], v[:, :, :n], mask, causal))
    if w:  # only observed queries need explicit probabilities
        p = probabilities(
            q[:, :, rest:], k, None if sees_all else slot_pos, bias, pos[:, rest:]
        )
        # (B, H, G·w, D): a group's queries are rows of one product
        y = p.flatten(2, 3).to(v) @ v
        outputs.append(y.view(*q.shape[:2], w, -1))
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0], p


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return attention's output (B, H·G, T, D) without storing the probabilities.

    The mask is (B, H or 1, T, S). Without a mask, each query sees every slot or, if `causal`, those
    up to it.
    """
    B, heads, T, D = q.shape
    # the G queries of a group become rows of one small product, so that each key is read once
    if T == 1:
        # cuDNN, PyTorch's first choice on an H100, makes a plan for each new S: milliseconds
        others = Kernel.FLASH_ATTENTION, Kernel.EFFICIENT_ATTENTION, Kernel.MATH
        with sdpa_kernel([*others]) if q.is_cuda else nullcontext():
            y = F.scaled_dot_product_attention(q.view(B, k.shape[1], -1, D), k, v, mask)
        return y.reshape(B, heads, 1, D)  # on a GPU its strides may differ from q's
    if mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(heads // k.shape[1], 1)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, enable_gqa=True
    )


def visible(slot_pos: Tensor, bias: Tensor | None, pos: Tensor) -> Tensor:
    """Return a mask (B, H, T, S) of the slots that each query sees.

    Slots have positions slot_pos (B, H or 1, S), queries have positions pos (B or 1, T). Without a
    bias (B, H, S) the mask is boolean. With a bias it holds the slot's bias, and −∞ where the slot
    is hidden.
    """
    seen = slot_pos.unsqueeze(2) <= pos[:, None, :, None]
    return seen if bias is None else torch.where(seen, bias.unsqueeze(2), -math.inf)


def probabilities(
    q: Tensor, k: Tensor, slot_pos: Tensor | None, bias: Tensor | None, pos: Tensor
) -> Tensor:
    """Return softmax(q kᵀ/√D + bias) over visible slots, `wide`: q (B, H·G, w, D) → (B, H, G, w, S).

    If slot_pos is None, every query sees every slot, and there is no bias.
    """
    B, heads, w, D = q.shape
    H = k.shape[1]
    score = (
        (wide(q).reshape(B, H, -1, D) @ wide(k).mT)
        .mul_(D**-0.5)
        .view(B, H, heads // H, w, -1)
    )
    if slot_pos is not None:  # adding a float mask is faster than masked_fill
        mask = visible(
            slot_pos, score.new_zeros(1, 1, 1) if bias is None else bias, pos
        )
        score.add_(mask.unsqueeze(2))
    return score.softmax(-1)
