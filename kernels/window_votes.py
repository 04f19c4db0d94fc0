"""The observation window's votes: the attention that the last w queries give to every earlier token, mean over the window.

    vote_n = 1/w Σ_t exp(s_{t,n} − lse_t),   s = q kᵀ/√D,   lse_t = log Σ exp(s_{t,n}) over all tokens that query t sees

SnapKV and all that is built on it choose by them (Algorithm 2 of CriticalKV). The weights of w queries and n tokens are never
in memory: a first kernel goes over the keys for the sums of each row, a second one goes over them again and adds up columns.

Bytes moved: every key twice for each query head of a group (the second time and the group mostly from the GPU's cache), the
votes once. Work: 4·w·D operations a key and query head; at w = 32, D = 128 and 16 bits some 64 a byte, so memory binds.
Pooling and chunk sums are left to PyTorch: they work on the votes, a number a token.
"""
import torch
from torch import Tensor
import triton
import triton.language as tl

from kernels import split


def plain(q: Tensor, k: Tensor) -> Tensor:
    """The window's queries q (B, H, G, w, D), keys k (B, H, n, D), the window's at the end → votes (B, H, G, n − w) float32."""
    w, n = q.shape[3], k.shape[2]
    score = q.float() @ k.float().unsqueeze(2).mT * q.shape[-1] ** -0.5
    later = torch.ones(w, n, dtype=torch.bool, device=q.device).triu(n - w + 1)
    return score.masked_fill(later, -torch.inf).softmax(-1)[..., :n - w].mean(3)


@triton.jit
def row_sums(p_q, p_k, p_lse, scale, w, n, share, parts, G: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """One query head, `share` of the keys: log Σ exp(s) of each query, (B·H·G, parts, w)."""
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_w, o_n, o_d = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    b_q = tl.load(p_q + (i * w + o_w[:, None]) * D + o_d, mask=(o_w < w)[:, None] & (o_d < D), other=0.0)
    b_most, b_total = tl.full((BLOCK_W,), -3e38, tl.float32), tl.zeros((BLOCK_W,), tl.float32)
    end = tl.minimum(n, (part + 1) * share)
    for first in range(part * share, end, BLOCK_N):
        at = first + o_n
        b_k = tl.load(p_k + ((i // G) * n + at[:, None]) * D + o_d, mask=(at < end)[:, None] & (o_d < D), other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # (w, keys)
        b_s = tl.where(at[None, :] <= n - w + o_w[:, None], b_s, float("-inf"))  # query t stands at n − w + t
        b_new = tl.maximum(b_most, tl.max(b_s, 1))
        b_total = b_total * tl.exp(b_most - b_new) + tl.sum(tl.exp(b_s - b_new[:, None]), 1)
        b_most = b_new
    tl.store(p_lse + (i * parts + part) * w + o_w, b_most + tl.log(tl.maximum(b_total, 1e-37)), mask=o_w < w)  # a query that sees none: −3e38


@triton.jit
def column_means(p_q, p_k, p_lse, p_vote, scale, w, n, G: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """One query head, a tile of the keys before the window: votes (B·H·G, n − w)."""
    i = tl.program_id(0).to(tl.int64)
    o_w, o_d, at = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_q = tl.load(p_q + (i * w + o_w[:, None]) * D + o_d, mask=(o_w < w)[:, None] & (o_d < D), other=0.0)
    b_lse = tl.load(p_lse + i * w + o_w, mask=o_w < w, other=float("inf"))  # rows beyond w weigh nothing
    b_k = tl.load(p_k + ((i // G) * n + at[:, None]) * D + o_d, mask=(at < n - w)[:, None] & (o_d < D), other=0.0)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    tl.store(p_vote + i * (n - w) + at, tl.sum(tl.exp(b_s - b_lse[:, None]), 0) / w, mask=at < n - w)


def window_votes(q: Tensor, k: Tensor, block: int = 64) -> Tensor:
    """As `plain`, by the kernels; `block` keys at a time. ValueError if q and k do not fit together."""
    (B, H, G, w, D), n = q.shape, k.shape[2]
    if k.shape != (B, H, n, D) or k.dtype != q.dtype or n < w:
        raise ValueError(f"k {tuple(k.shape)} of {k.dtype} must be {(B, H)} heads of at least {w} keys of {D} numbers, "
                         f"of {q.dtype} as q")
    q, k, heads = q.contiguous(), k.contiguous(), B * H * G
    share, parts = split(n, block, heads, q.device)
    sizes = G, D, max(16, triton.next_power_of_2(w)), block, max(16, triton.next_power_of_2(D))
    lse, vote = (q.new_empty(*shape, dtype=torch.float32) for shape in ((heads, parts, w), (B, H, G, n - w)))
    row_sums[heads, parts](q, k, lse, D ** -0.5, w, n, share, parts, *sizes, num_warps=4, num_stages=3)
    if n > w:
        tiles = triton.cdiv(n - w, block)
        column_means[heads, tiles](q, k, lse.logsumexp(1), vote, D ** -0.5, w, n, *sizes, num_warps=4, num_stages=3)
    return vote


typical = [(row_sums, dict(G=4, D=128, BLOCK_W=32, BLOCK_N=64, BLOCK_D=128)),
           (column_means, dict(G=4, D=128, BLOCK_W=32, BLOCK_N=64, BLOCK_D=128))]
