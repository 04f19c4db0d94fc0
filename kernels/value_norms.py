"""Compute ‖v_n W_O‖₁ of every cached token and query head, without writing v W_O to memory.

CriticalKV multiplies attention scores by these norms (Eq. 6).

    norm_n = Σ_m |Σ_d v_{n,d} W_{d,m}|     W: the head's columns of the output projection

Each program takes a tile of tokens of one head and loops over d_model in tiles. Each step is a
matrix product whose absolute values are summed at once.

Work: 2·D·d_model operations per token and query head, for 2·D bytes read (16 bits, once per query
head of a group). At D = 128 and d_model = 4096 this is some 4000 operations per byte: the tensor
cores are the limit, not memory.
"""

import torch
from torch import Tensor
from .launch import block_of, launcher  # before triton: chooses what runs it
import triton
import triton.language as tl


def plain(v: Tensor, w_o: Tensor) -> Tensor:
    """Return the norms (B, H, G, n) float32 of v (B, H, n, D) and w_o (d_model, H·G, D)."""
    w = w_o.float().unflatten(1, (v.shape[1], -1))
    return torch.einsum("bhnd,mhgd->bhgnm", v.float(), w).abs().sum(-1)


@triton.jit(do_not_specialize=["n"])
def norms(
    p_v,
    p_w,
    p_norm,
    n,
    H,
    d_model,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the norms of one tile of tokens of one head, (B·H, G, n).

    v is (B·H, n, D), w is (d_model, H·G, D).
    """
    i_head = tl.program_id(1).to(tl.int64)
    g = tl.program_id(2)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    is_n = o_n < n
    is_d = o_d < D
    b_v = tl.load(
        p_v + (i_head * n + o_n[:, None]) * D + o_d,
        mask=is_n[:, None] & is_d,
        other=0.0,
    )
    head = (i_head % H) * G + g

    b_norm = tl.zeros((BLOCK_N,), tl.float32)
    for m in range(0, d_model, BLOCK_M):
        is_m = m + o_m < d_model
        o_md = ((m + o_m)[:, None] * (H * G) + head) * D + o_d
        b_w = tl.load(p_w + o_md, mask=is_m[:, None] & is_d, other=0.0)  # (M, D)
        b_vw = tl.dot(b_v, tl.trans(b_w), input_precision="ieee")  # (tokens, M)
        b_norm += tl.sum(tl.abs(b_vw), 1)
    tl.store(p_norm + (i_head * G + g) * n + o_n, b_norm, mask=is_n)


@launcher
def value_norms(v: Tensor, w_o: Tensor, block: int = 128) -> Tensor:
    """Return what `plain` returns, computed by the kernel, `block` tokens at a time.

    Raise ValueError if v and w_o do not fit together.
    """
    B, H, n, D = v.shape
    d_model, heads, width = w_o.shape
    if width != D or heads % H or v.dtype != w_o.dtype:
        raise ValueError(
            f"w_o {tuple(w_o.shape)} of {w_o.dtype} must have a multiple of {H} heads of {D} "
            f"numbers, in v's dtype {v.dtype}"
        )
    G = heads // H
    norm = v.new_empty(B, H, G, n, dtype=torch.float32)
    if n:
        norms[triton.cdiv(n, block), B * H, G](
            p_v=v.contiguous(),
            p_w=w_o.contiguous(),
            p_norm=norm,
            n=n,
            H=H,
            d_model=d_model,
            G=G,
            D=D,
            BLOCK_N=block,
            BLOCK_M=128,
            BLOCK_D=block_of(D),
            num_warps=8,
            num_stages=2,
        )
    return norm
