"""Compute window scores: the mean attention of the last w queries to every earlier token.

    score_n = 1/w Σ_t exp(s_{t,n} − lse_t),   s = q kᵀ/√D
    lse_t = log Σ exp(s_{t,n}) over the keys n that query t sees

SnapKV and all methods built on it select entries by these scores (Algorithm 2 of CriticalKV). The w
× n attention weights are never written to memory. A first kernel reads the keys and computes lse_t
of each query. A second kernel reads the keys again and averages the weights of each token.

The query heads of a group are rows of one tile if they fit into 128 rows: each kernel then reads a
key once for all of them.

The kernels together then read every earlier key twice, write the window scores once, and do 4·w·D
operations per such key and query head. With w = 32, D = 128, 16 bits and groups of 4 this is 124
operations per byte. Memory is the limit up to 295 operations per byte on an H100 and 206 on an
H200. Reading the keys once would give 241: memory and tensor cores would both be near their limits.
With D = 128 the two exponentials of each score take as long as the products. PyTorch does the
pooling and the sums over chunks, which need only one number per token and head.
"""

import torch
from torch import Tensor
from .launch import block_of, launcher, split  # before triton: chooses what runs it
import triton
import triton.language as tl

from .decode_attention import LOG2E


@triton.jit
def queries(
    p_q,
    i_head,
    w,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the window's queries of BLOCK_G heads as rows of a tile.

    Also return, for each row: its place in the window, its number, and whether it exists.
    """
    # Two heads of w = 3 queries in blocks of 4 rows: place 0 1 2 3 0 1 2 3, number 0 1 2 . 3 4 5 .
    # The rows at the dots do not exist.
    o_r = tl.arange(0, BLOCK_G * BLOCK_W)
    o_d = tl.arange(0, BLOCK_D)
    o_g = tl.program_id(2) * BLOCK_G + o_r // BLOCK_W
    o_w = o_r % BLOCK_W
    is_r = (o_g < G) & (o_w < w)
    row = o_g * w + o_w
    b_q = tl.load(
        p_q + (i_head * G * w + row[:, None]) * D + o_d,
        mask=is_r[:, None] & (o_d < D),
        other=0.0,
    )
    return b_q, o_w, row, is_r


@triton.jit(do_not_specialize=["n", "parts"])
def row_sums(
    p_q,
    p_k,
    p_lse,
    scale,
    w,
    n,
    share,
    parts,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write log₂ Σ exp(s) over `share` keys for BLOCK_G query heads, (B·H, parts, G, w)."""
    i_head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    b_q, o_w, row, is_r = queries(p_q, i_head, w, G, D, BLOCK_G, BLOCK_W, BLOCK_D)

    b_m = tl.full((BLOCK_G * BLOCK_W,), -3e38, tl.float32)
    b_l = tl.zeros((BLOCK_G * BLOCK_W,), tl.float32)
    end = tl.minimum(n, (part + 1) * share)
    for first in range(part * share, end, BLOCK_N):
        position = first + o_n
        is_n = position < end
        b_k = tl.load(
            p_k + (i_head * n + position[:, None]) * D + o_d,
            mask=is_n[:, None] & (o_d < D),
            other=0.0,
        )
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # (G·w, keys)
        b_s *= scale * LOG2E
        # query t has position n − w + t
        is_seen = position[None, :] <= n - w + o_w[:, None]
        b_s = tl.where(is_seen, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_m_new[:, None])
        b_l = b_l * tl.exp2(b_m - b_m_new) + tl.sum(b_p, 1)
        b_m = b_m_new

    # in powers of 2; a query that sees no key of this part gives −3e38
    b_lse = b_m + tl.log2(tl.maximum(b_l, 1e-37))
    o_lse = (i_head * parts + part) * G * w + row
    tl.store(p_lse + o_lse, b_lse, mask=is_r)


@triton.jit(do_not_specialize=["n", "parts"])
def column_means(
    p_q,
    p_k,
    p_lse,
    p_score,
    scale,
    w,
    n,
    share,
    parts,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the window scores of `share` keys for BLOCK_G query heads, (B·H, G, n − w)."""
    i_head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    b_q, o_w, row, is_r = queries(p_q, i_head, w, G, D, BLOCK_G, BLOCK_W, BLOCK_D)

    # combine the parts to log₂ Σ exp(s) over all keys
    b_lse = tl.full((BLOCK_G * BLOCK_W,), -3e38, tl.float32)
    for first in range(0, parts, 16):
        o_p = first + tl.arange(0, 16)[:, None]
        b_part = tl.load(
            p_lse + (i_head * parts + o_p) * G * w + row,
            mask=(o_p < parts) & is_r,
            other=-3e38,
        )
        b_max = tl.maximum(b_lse, tl.max(b_part, 0))
        b_sum = tl.sum(tl.exp2(b_part - b_max), 0)
        b_lse = b_max + tl.log2(tl.exp2(b_lse - b_max) + b_sum)
    b_lse = tl.where(is_r, b_lse, float("inf"))  # rows beyond w get weight 0

    o_g = tl.program_id(2) * BLOCK_G + tl.arange(0, BLOCK_G)
    end = tl.minimum(n - w, (part + 1) * share)
    for first in range(part * share, end, BLOCK_N):
        position = first + o_n
        is_n = position < end
        b_k = tl.load(
            p_k + (i_head * n + position[:, None]) * D + o_d,
            mask=is_n[:, None] & (o_d < D),
            other=0.0,
        )
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")  # (keys, G·w)
        b_p = tl.exp2(b_s * (scale * LOG2E) - b_lse[None, :])
        b_p = tl.reshape(b_p, (BLOCK_N, BLOCK_G, BLOCK_W))
        b_score = tl.sum(b_p, 2) / w
        tl.store(
            p_score + (i_head * G + o_g[None, :]) * (n - w) + position[:, None],
            b_score,
            mask=(o_g < G)[None, :] & is_n[:, None],
        )


@launcher
def window_scores(q: Tensor, k: Tensor, block: int = 64) -> Tensor:
    """Return the window scores (B, H, G, n − w) float32 of q (B, H, G, w, D) and k (B, H, n, D).

    q: the queries of the observation window. The last w keys are the window's own. The kernels take
    `block` keys at a time. Raise ValueError if q and k do not fit together or the window has more
    than 128 queries.
    """
    B, H, G, w, D = q.shape
    n = k.shape[2]
    if w > 128:
        raise ValueError(
            f"a window of {w} queries is more than the 128 that fit into a tile; "
            "use a shorter window or the plain code"
        )
    if k.shape != (B, H, n, D) or k.dtype != q.dtype or n < w:
        raise ValueError(
            f"k {tuple(k.shape)} of {k.dtype} must be {(B, H)} heads of at least {w} keys of "
            f"{D} numbers, in q's dtype {q.dtype}"
        )
    q, k = q.contiguous(), k.contiguous()
    heads = B * H

    # a tile has at least 16 rows, and at most 128
    block_w = triton.next_power_of_2(w)
    block_g = min(triton.next_power_of_2(G), max(1, 128 // block_w))
    block_w = max(block_w, 16 // block_g)
    groups = triton.cdiv(G, block_g)
    sizes = dict(
        scale=D**-0.5,
        w=w,
        n=n,
        G=G,
        D=D,
        BLOCK_G=block_g,
        BLOCK_W=block_w,
        BLOCK_N=block,
        BLOCK_D=block_of(D),
    )

    share, parts = split(n, block, heads * groups, q.device)
    lse = q.new_empty(heads, parts, G, w, dtype=torch.float32)
    row_sums[heads, parts, groups](
        p_q=q,
        p_k=k,
        p_lse=lse,
        share=share,
        parts=parts,
        **sizes,
        num_warps=4,
        num_stages=3,
    )

    score = q.new_empty(B, H, G, n - w, dtype=torch.float32)
    if n > w:
        share, programs = split(n - w, block, heads * groups, q.device)
        column_means[heads, programs, groups](
            p_q=q,
            p_k=k,
            p_lse=lse,
            p_score=score,
            share=share,
            parts=parts,
            **sizes,
            num_warps=4,
            num_stages=3,
        )
    return score
