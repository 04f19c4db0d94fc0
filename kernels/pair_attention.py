"""Compute tensor attention over all n² pairs of tokens from the four cached matrices.

Neither the pairs nor their n² weights are written to memory.

    score of (a, b) = (k_{1,a} ∘ q)·k_{2,b}/√D,   y = Σ_a v_{1,a} ∘ Σ_b p_{ab} v_{2,b}

A tile is a block of rows a with all b. Within a tile this is ordinary attention with the queries
k_{1,a} ∘ q: two matrix products, and a running maximum and total for each row. The kernel then
weighs the rows against each other, multiplies them by v_{1,a} and sums them to one vector per tile.
`add_up` in decode_attention combines the tiles.

Work: 4·n²·D operations per query head, for 8·n·D bytes per group at 16 bits. This is at least n/2
operations per byte, and beyond a few hundred tokens the tensor cores are the limit. Example: n =
8192 and D = 128 need 34 GFLOP per head, at least 35 µs at 989 TFLOP/s (H100, H200). An SM computes
4096 operations or 16 exponentials per clock; the one exponential of a pair takes half as long as
its 4·D operations. The queries k₁ ∘ q are written to memory: n·D numbers per query head.
"""

import torch
from torch import Tensor
from .launch import block_of, launcher  # before triton: chooses what runs it
import triton
import triton.language as tl

from .decode_attention import LOG2E, add_tile, added_up, partials


def plain(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor) -> Tensor:
    """Return y (B, H, G, D) of q (B, H, G, D), with the pairs' scores as one n × n matrix.

    k1, k2, v1 and v2 are (B, H, n, D).
    """
    D, n = q.shape[-1], k1.shape[2]
    k1, k2, v1, v2 = (x.float().unsqueeze(2) for x in (k1, k2, v1, v2))
    score = (k1 * q.float().unsqueeze(3)) @ k2.mT * D**-0.5  # (B, H, G, n, n)
    p = score.flatten(3).softmax(-1).unflatten(3, (n, n))
    return (v1 * (p @ v2)).sum(3).to(q.dtype)


@triton.jit(do_not_specialize=["n", "parts"])
def rows_of_pairs(
    p_rows,
    p_k2,
    p_v1,
    p_v2,
    p_m,
    p_l,
    p_acc,
    n,
    parts,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to one tile: a block of rows a and all b, for one query head.

    Write m and l = Σ 2^(s − m) (B·H, parts, G), and acc = Σ 2^(s − m) v₁ ∘ v₂ (B·H, parts, G, D).
    """
    part = tl.program_id(0)
    i_head = (tl.program_id(1) // G).to(tl.int64)
    g = tl.program_id(1) % G
    o_a = part * BLOCK_A + tl.arange(0, BLOCK_A)
    o_b = tl.arange(0, BLOCK_B)
    o_d = tl.arange(0, BLOCK_D)
    is_a = o_a < n
    is_d = o_d < D
    o_head = i_head * n * D
    o_ad = o_a[:, None] * D + o_d
    is_ad = is_a[:, None] & is_d
    o_query_head = (i_head * G + g) * n * D
    b_rows = tl.load(p_rows + o_query_head + o_ad, mask=is_ad, other=0.0)

    b_m = tl.full((BLOCK_A,), -3e38, tl.float32)
    b_l = tl.zeros((BLOCK_A,), tl.float32)
    b_acc = tl.zeros((BLOCK_A, BLOCK_D), tl.float32)
    for b in range(0, n, BLOCK_B):
        is_b = b + o_b < n
        o_bd = o_head + (b + o_b)[:, None] * D + o_d
        is_bd = is_b[:, None] & is_d
        b_k2 = tl.load(p_k2 + o_bd, mask=is_bd, other=0.0)
        b_s = tl.dot(b_rows, tl.trans(b_k2), input_precision="ieee")  # (a, b)
        b_s = tl.where(is_b[None, :], b_s, float("-inf"))
        b_v2 = tl.load(p_v2 + o_bd, mask=is_bd, other=0.0)
        b_m, b_l, b_acc = add_tile(b_s, b_v2, b_m, b_l, b_acc)

    # weigh the rows against each other; rows beyond n get weight 0
    b_m = tl.where(is_a, b_m, float("-inf"))
    m = tl.max(b_m, 0)
    b_weight = tl.exp2(b_m - m)
    b_v1 = tl.load(p_v1 + o_head + o_ad, mask=is_ad, other=0.0).to(tl.float32)
    b_sum = tl.sum(b_weight[:, None] * b_v1 * b_acc, 0)
    o = (i_head * parts + part) * G + g
    tl.store(p_m + o, m)
    tl.store(p_l + o, tl.sum(b_weight * b_l, 0))
    tl.store(p_acc + o * D + o_d, b_sum, mask=is_d)


@launcher
def tensor_attention(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    scale: float | None = None,
    rows: int | None = None,
    columns: int = 64,
) -> Tensor:
    """Return what `plain` returns, computed by the kernels, `rows` × `columns` pairs at a time.

    scale: factor of the scores; None is 1/√D. rows: None is 128, or 64 for a head dim above 128.
    Raise ValueError if the four matrices do not fit q or hold no token.
    """
    B, H, G, D = q.shape
    n = k1.shape[2]
    for x in (k1, k2, v1, v2):
        if x.shape != (B, H, n, D) or x.dtype != q.dtype or not n:
            raise ValueError(
                f"k₁, k₂, v₁ and v₂ {tuple(x.shape)} of {x.dtype} must be {(B, H)} heads of at "
                f"least 1 token, here {n}, with {D} numbers in q's dtype {q.dtype}"
            )
    q, k1, k2, v1, v2 = (x.contiguous() for x in (q, k1, k2, v1, v2))
    block_d = block_of(D)
    if rows is None:  # the largest tile that fits into an SM
        rows = 128 if block_d <= 128 else 64
    parts = triton.cdiv(n, rows)

    # k₁ ∘ q times log₂ e, computed beforehand: computing it in the kernel would keep the tensor
    # cores waiting
    scale = D**-0.5 if scale is None else scale
    scaled = q.float() * (scale * LOG2E.value)
    k1_q = torch.mul(k1.unsqueeze(2), scaled.unsqueeze(3)).to(q.dtype)
    buffers = partials(q, parts)
    rows_of_pairs[parts, B * H * G](
        p_rows=k1_q,
        p_k2=k2,
        p_v1=v1,
        p_v2=v2,
        **buffers,
        n=n,
        G=G,
        D=D,
        BLOCK_A=rows,
        BLOCK_B=columns,
        BLOCK_D=block_d,
        num_warps=8,
        num_stages=3 if block_d <= 128 else 2,
    )
    return added_up(q, buffers)[0]
