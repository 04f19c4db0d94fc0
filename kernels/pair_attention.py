"""Tensor attention to all n² pairs of tokens from the four cached matrices; neither the pairs nor their n²
weights are in memory.

    score of (a, b) = (k_{1,a} ∘ q)·k_{2,b}/√D,   y = Σ_a v_{1,a} ∘ Σ_b p_{ab} v_{2,b}

For a tile of rows a this is ordinary attention whose queries are k_{1,a} ∘ q: two products for the tensor
cores, with a running maximum and total for each row. Only then are the rows weighed against each other and by
v_{1,a}. What remains of a tile is a vector, and decode_attention's `add_up` adds the tiles up.

Work: 4·n²·D operations a query head, for 8·n·D bytes a group at 16 bits: n/2 operations a byte and more. So
beyond a few hundred tokens the rate of the tensor cores binds. With n = 8192, D = 128 that is 34 GFLOP a
head: not below 35 µs at 989 TFLOP/s (H100, H200). An SM does 4096 operations a clock and 16 exponentials, so
that the one exponential of a pair takes half as long as its 4·D operations. The queries k₁ ∘ q are made in
memory, n·D numbers a query head.
"""
import torch
from torch import Tensor
from .launch import block_of, launcher  # before triton: chooses what runs it
import triton
import triton.language as tl

from .decode_attention import LOG2E, added_up, partials


def plain(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor) -> Tensor:
    """q (B, H, G, D), the others (B, H, n, D) → y (B, H, G, D): the pairs' scores as one n × n matrix."""
    D, n = q.shape[-1], k1.shape[2]
    kind, (q, k1, k2, v1, v2) = q.dtype, (x.float() for x in (q, k1, k2, v1, v2))
    score = (k1.unsqueeze(2) * q.unsqueeze(3)) @ k2.unsqueeze(2).mT * D ** -0.5  # (B, H, G, n, n)
    p = score.flatten(3).softmax(-1).unflatten(3, (n, n))
    return (v1.unsqueeze(2) * (p @ v2.unsqueeze(2))).sum(3).to(kind)


@triton.jit(do_not_specialize=["n", "parts"])
def rows_of_pairs(p_rows, p_k2, p_v1, p_v2, p_m, p_l, p_acc, n, parts, G: tl.constexpr, D: tl.constexpr,
                  BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr):
    """One query head, a tile of rows a, all b. Leaves m and l (B·H, parts, G) and acc (B·H, parts, G, D).

    l = Σ 2^(s − m), acc = Σ 2^(s − m) v₁ ∘ v₂.
    """
    part, i_head, g = tl.program_id(0), (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    o_a, o_b, o_d = part * BLOCK_A + tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_D)
    is_d, is_a = o_d < D, o_a < n
    of_head = i_head * n * D
    of_a = o_a[:, None] * D + o_d
    b_rows = tl.load(p_rows + (i_head * G + g) * n * D + of_a, mask=is_a[:, None] & is_d, other=0.0)
    b_m = tl.full((BLOCK_A,), -3e38, tl.float32)
    b_l = tl.zeros((BLOCK_A,), tl.float32)
    b_acc = tl.zeros((BLOCK_A, BLOCK_D), tl.float32)
    for b in range(0, n, BLOCK_B):
        here = b + o_b < n
        of_b = of_head + (b + o_b)[:, None] * D + o_d
        b_k2 = tl.load(p_k2 + of_b, mask=here[:, None] & is_d, other=0.0)
        b_s = tl.dot(b_rows, tl.trans(b_k2), input_precision="ieee")  # (a, b)
        b_s = tl.where(here[None, :], b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_m_new[:, None])
        b_alpha = tl.exp2(b_m - b_m_new)
        b_v2 = tl.load(p_v2 + of_b, mask=here[:, None] & is_d, other=0.0)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p.to(b_v2.dtype), b_v2, input_precision="ieee")
        b_m = b_m_new

    # rows against each other; those beyond n weigh nothing
    b_m = tl.where(is_a, b_m, float("-inf"))
    m = tl.max(b_m, 0)
    b_weight = tl.exp2(b_m - m)
    b_v1 = tl.load(p_v1 + of_head + of_a, mask=is_a[:, None] & is_d, other=0.0).to(tl.float32)
    o = (i_head * parts + part) * G + g
    tl.store(p_m + o, m)
    tl.store(p_l + o, tl.sum(b_weight * b_l, 0))
    tl.store(p_acc + o * D + o_d, tl.sum(b_weight[:, None] * b_v1 * b_acc, 0), mask=is_d)


@launcher
def tensor_attention(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, scale: float | None = None,
                     rows: int | None = None, columns: int = 64) -> Tensor:
    """As `plain`, by the kernels, `rows` × `columns` pairs at a time; scores are times `scale`, 1/√D if None.

    rows None: 128, or 64 above a head dim of 128. ValueError if the four matrices do not fit the queries or
    hold no token.
    """
    (B, H, G, D), n = q.shape, k1.shape[2]
    for x in (k1, k2, v1, v2):
        if x.shape != (B, H, n, D) or x.dtype != q.dtype or not n:
            raise ValueError(f"k₁, k₂, v₁, v₂ {tuple(x.shape)} of {x.dtype} must be {(B, H)} heads of at "
                             f"least 1 token, {n} in all of them, of {D} numbers of {q.dtype} as q")
    q, k1, k2, v1, v2 = (x.contiguous() for x in (q, k1, k2, v1, v2))
    block_d = block_of(D)
    rows = rows or (128 if block_d <= 128 else 64)  # so that it all fits into an SM
    parts = triton.cdiv(n, rows)

    # k₁ ∘ q in units of log₂; they have to be loaded, not worked out, or the tensor cores wait for them
    scaled = q.float() * ((D ** -0.5 if scale is None else scale) * LOG2E.value)
    k1 = torch.mul(k1.unsqueeze(2), scaled.unsqueeze(3)).to(q.dtype)
    found = partials(q, parts)
    rows_of_pairs[parts, B * H * G](
        p_rows=k1, p_k2=k2, p_v1=v1, p_v2=v2, **found, n=n, G=G, D=D, BLOCK_A=rows, BLOCK_B=columns,
        BLOCK_D=block_d, num_warps=8, num_stages=3 if block_d <= 128 else 2)
    return added_up(q, found)[0]
