"""Decode one token: its queries attend to a cache whose heads may differ in length.

A head's slots are rows start … start + count − 1 of a flat k and v. One kernel therefore reads both
layouts: heads packed one after the other (AdaKV), and heads in a buffer of equal capacity. A cache
with both layouts consists of two segments.

    s_n = q·k_n/√D + bias_n,   m = max s,   l = Σ exp(s − m)
    y = Σ_n p_n v_n,   p_n = exp(s_n − m)/l

The slots of a long head are split among several programs: with one program per head, a single
sequence would leave most of the GPU idle. Each program writes its own m, l and
acc = Σ exp(s − m) v. A second kernel combines them (flash-decoding). H2O, Scissorhands and
KVReviver also need Σ_g p_n (`sums`). The first kernel then stores the scores, 4 bytes per slot and
query head, and a third kernel turns them into weights.

Bytes moved per slot: 2·D numbers, since each key and value is read once; with `sums`, 8·G + 4 bytes
more. All other traffic is small. Example: 32k slots in each of 8 heads are 134 MB at 16 bits and D
= 128. Reading them takes at least 40 µs on an H100 (3.35 TB/s) and 28 µs on an H200 (4.8 TB/s).
"""

from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F
from .launch import block_of, launcher, split  # before triton: chooses what runs it
import triton
import triton.language as tl

# the GPU computes 2^x only: e^x = 2^(x log₂ e)
LOG2E = tl.constexpr(1.4426950408889634)


class Segment(NamedTuple):
    """Hold the slots of B·H heads in flat tensors."""

    k: Tensor  # (N, D)
    v: Tensor  # (N, D)
    start: Tensor  # (B·H,) int64: row of each head's first slot
    count: Tensor  # (B·H,) int32: number of slots of each head
    # at least the largest count; an int, so that the launch need not wait for the GPU
    longest: int
    bias: Tensor | None = None  # (N,) float32, added to the scores; −inf hides a slot

    @classmethod
    def of(cls, k: Tensor, v: Tensor, bias: Tensor | None = None) -> "Segment":
        """Return a segment of k and v (B, H, S, D), heads of equal length.

        k and v may be the front part of a longer buffer. They are copied only if their strides do
        not allow a flat view.
        """
        B, H, S, D = k.shape
        # rows from one head's first slot to the next head's: S, or more in a longer buffer
        apart = k.stride(1) // D
        flat = (H * apart * D, apart * D, D, 1)
        if k.stride() != v.stride() or k.stride() != flat:
            k, v = k.contiguous(), v.contiguous()
            apart = S

        rows = (B * H - 1) * apart + S
        flat_k = k.as_strided((rows, D), (D, 1))
        flat_v = v.as_strided((rows, D), (D, 1))
        if bias is not None:
            padded = F.pad(bias.float(), (0, apart - S))
            bias = padded.flatten()[:rows]
        start = apart * torch.arange(B * H, device=k.device)
        count = torch.full((B * H,), S, dtype=torch.int32, device=k.device)
        return cls(flat_k, flat_v, start, count, S, bias)

    def by_head(self, x: Tensor, B: int, H: int) -> Tensor:
        """Return x (N,), one number per row, as (B, H, S); all heads must have S slots."""
        apart = (len(self.k) - self.longest) // max(B * H - 1, 1)
        return x.as_strided((B, H, self.longest), (H * apart, apart, 1))


@triton.jit(do_not_specialize=["part", "parts"])
def attend(
    p_q,
    p_k,
    p_v,
    p_bias,
    p_start,
    p_count,
    p_m,
    p_l,
    p_acc,
    p_score,
    scale,
    share,
    part,
    parts,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIASED: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Attend to up to `share` slots of one head.

    Write m and l (B·H, parts, G), and acc (B·H, parts, G, D). A part is the result of one program
    for one head. All segments together have `parts` parts; those of this segment begin at number
    `part`.
    """
    i_head = tl.program_id(0).to(tl.int64)
    i_share = tl.program_id(1)
    start = tl.load(p_start + i_head)
    count = tl.load(p_count + i_head)
    end = tl.minimum(count, (i_share + 1) * share)
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_N)
    is_g = o_g < G
    is_d = o_d < D
    b_q = tl.load(  # (G, D)
        p_q + (i_head * G + o_g[:, None]) * D + o_d,
        mask=is_g[:, None] & is_d,
        other=0.0,
    )

    # a finite start: a hidden slot scores −inf, and −inf − (−inf) would be NaN
    b_m = tl.full((BLOCK_G,), -3e38, tl.float32)
    b_l = tl.zeros((BLOCK_G,), tl.float32)
    b_acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for n in range(i_share * share, end, BLOCK_N):
        is_n = n + o_n < end
        row = start + n + o_n
        o_nd = row[:, None] * D + o_d
        b_k = tl.load(p_k + o_nd, mask=is_n[:, None] & is_d, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # (G, slots)
        b_s *= scale * LOG2E
        if BIASED:
            b_bias = tl.load(p_bias + row, mask=is_n, other=0.0)
            b_s += b_bias[None, :] * LOG2E
        b_s = tl.where(is_n[None, :], b_s, float("-inf"))
        if SCORES:
            tl.store(
                p_score + row[None, :] * G + o_g[:, None],
                b_s,
                mask=is_n[None, :] & is_g[:, None],
            )
        b_v = tl.load(p_v + o_nd, mask=is_n[:, None] & is_d, other=0.0)
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_m_new[:, None])
        b_alpha = tl.exp2(b_m - b_m_new)
        b_pv = tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = b_acc * b_alpha[:, None] + b_pv
        b_m = b_m_new

    o = (i_head * parts + part + i_share) * G + o_g
    tl.store(p_m + o, b_m, mask=is_g)
    tl.store(p_l + o, b_l, mask=is_g)
    tl.store(p_acc + o[:, None] * D + o_d, b_acc, mask=is_g[:, None] & is_d)


@triton.jit(do_not_specialize=["parts"])
def add_up(
    p_m,
    p_l,
    p_acc,
    p_y,
    p_lse,
    parts,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Combine all parts of one query head; write y (B·H, G, D) and log₂ Σ 2^s (B·H, G)."""
    i_head = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    o_p = tl.arange(0, BLOCK_P)
    o_d = tl.arange(0, BLOCK_D)
    is_d = o_d < D
    m = -3e38  # finite even if the head has no slots
    for p in range(0, parts, BLOCK_P):
        o = (i_head * parts + p + o_p) * G + g
        b_m = tl.load(p_m + o, mask=p + o_p < parts, other=-3e38)
        m = tl.maximum(m, tl.max(b_m, 0))

    b_l = tl.zeros((BLOCK_P,), tl.float32)
    b_acc = tl.zeros((BLOCK_D,), tl.float32)
    for p in range(0, parts, BLOCK_P):
        is_p = p + o_p < parts
        o = (i_head * parts + p + o_p) * G + g
        b_m = tl.load(p_m + o, mask=is_p, other=float("-inf"))
        b_weight = tl.exp2(b_m - m)
        b_l += b_weight * tl.load(p_l + o, mask=is_p, other=0.0)
        b_parts = tl.load(
            p_acc + o[:, None] * D + o_d,
            mask=is_p[:, None] & is_d,
            other=0.0,
        )
        b_acc += tl.sum(b_weight[:, None] * b_parts, 0)

    total = tl.maximum(tl.sum(b_l, 0), 1e-37)  # without slots y is 0
    row = i_head * G + g
    tl.store(p_y + row * D + o_d, b_acc / total, mask=is_d)
    tl.store(p_lse + row, m + tl.log2(total))


@triton.jit
def column_sums(
    p_score,
    p_lse,
    p_start,
    p_count,
    p_sums,
    share,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write Σ_g 2^(s_n − log₂ Σ 2^s) for up to `share` slots of one head."""
    i_head = tl.program_id(0).to(tl.int64)
    i_share = tl.program_id(1)
    start = tl.load(p_start + i_head)
    count = tl.load(p_count + i_head)
    end = tl.minimum(count, (i_share + 1) * share)
    o_g = tl.arange(0, BLOCK_G)
    o_n = tl.arange(0, BLOCK_N)
    b_lse = tl.load(p_lse + i_head * G + o_g, mask=o_g < G, other=float("inf"))
    for n in range(i_share * share, end, BLOCK_N):
        is_n = n + o_n < end
        row = start + n + o_n
        b_s = tl.load(
            p_score + row[:, None] * G + o_g,
            mask=is_n[:, None] & (o_g < G),
            other=float("-inf"),
        )
        b_sums = tl.sum(tl.exp2(b_s - b_lse), 1)
        tl.store(p_sums + row, b_sums, mask=is_n)


def check(q: Tensor, segments: list[Segment]):
    """Raise ValueError if k, v, start or count of a segment do not fit q (B, H, G, D)."""
    B, H, _, D = q.shape
    heads = B * H
    for s in segments:
        rows = s.k.is_contiguous() and s.v.is_contiguous()
        fits = s.k.shape == s.v.shape and s.k.shape[1] == D
        if not (rows and fits and s.k.dtype == s.v.dtype == q.dtype):
            raise ValueError(
                f"k {tuple(s.k.shape)} of {s.k.dtype} and v {tuple(s.v.shape)} of {s.v.dtype} "
                f"must be contiguous rows of the head dim {D}, in q's dtype {q.dtype}"
            )
        if len(s.start) != heads or len(s.count) != heads:
            raise ValueError(
                f"{len(s.start)} starts and {len(s.count)} counts for {heads} heads; "
                "give one each per head"
            )


@launcher
def decode_attention(
    q: Tensor, segments: list[Segment], sums: bool = False, block: int = 64
) -> tuple[Tensor, list[Tensor]]:
    """Return attention y (B, H, G, D) of q (B, H, G, D) over all segments, `block` slots at a time.

    y is 0 for a head without visible slots. With `sums`, also return (N,) float32 for each segment:
    the sum of the weights that a slot gets from the G queries of its head. Raise ValueError if
    `check` finds that the segments do not fit q.
    """
    q = q.contiguous()
    check(q, segments)
    B, H, G, D = q.shape
    heads = B * H
    splits = [split(s.longest, block, heads, q.device) for s in segments]
    parts = sum(programs for _, programs in splits)
    # the results of `attend`
    m, total = q.new_empty(2, heads, parts, G, dtype=torch.float32)
    acc = q.new_empty(heads, parts, G, D, dtype=torch.float32)
    shared = dict(p_m=m, p_l=total, p_acc=acc, parts=parts)
    shared |= dict(G=G, D=D, BLOCK_D=block_of(D))

    scores = []
    part = 0
    for s, (share, programs) in zip(segments, splits):
        score = None
        if sums:
            score = q.new_empty(len(s.k), G, dtype=torch.float32)
        scores.append(score)
        attend[heads, programs](
            p_q=q,
            p_k=s.k,
            p_v=s.v,
            p_bias=s.bias,
            p_start=s.start,
            p_count=s.count,
            p_score=score,
            **shared,
            scale=D**-0.5,
            share=share,
            part=part,
            BLOCK_G=block_of(G),
            BLOCK_N=block,
            BIASED=s.bias is not None,
            SCORES=sums,
            num_warps=4,
            num_stages=2,
        )
        part += programs

    y = torch.empty_like(q)
    lse = q.new_empty(heads, G, dtype=torch.float32)
    add_up[heads, G](**shared, p_y=y, p_lse=lse, BLOCK_P=32)
    if not sums:
        return y, []

    weights = []
    for s, (share, programs), score in zip(segments, splits, scores):
        weight = torch.zeros(len(score), device=q.device)
        weights.append(weight)
        column_sums[heads, programs](
            p_score=score,
            p_lse=lse,
            p_start=s.start,
            p_count=s.count,
            p_sums=weight,
            share=share,
            G=G,
            BLOCK_G=triton.next_power_of_2(G),
            BLOCK_N=256,
        )
    return y, weights


def attend_one(cache, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return y of q (B, H·G, 1, D) over all slots of the cache, for `Slots.attention`.

    Also return the weights' mean over G, (B, H, G, 1, S), or None if `cache.watch` is 0.
    """
    B, heads, _, D = q.shape
    H = cache.slots["k"].shape[1]
    G = heads // H
    k, v, position, bias = cache.read()
    if cache.ragged or bias is not None:
        visible = position <= pos[:, None]
        bias = torch.where(visible, 0.0 if bias is None else bias, -torch.inf)

    s = Segment.of(k, v, bias)
    y, sums = decode_attention(q.view(B, H, G, D), [s], sums=bool(cache.watch))
    if not sums:
        return y.view_as(q), None
    mean = s.by_head(sums[0], B, H) / G
    return y.view_as(q), mean.view(B, H, 1, 1, -1).expand(-1, -1, G, -1, -1)


def attend_packed(cache, q: Tensor) -> Tensor:
    """Return y of q (B, H·G, 1, D) over packed and newer slots, for `PackedSlots.attention`."""
    counts = cache.counts.flatten()
    old = Segment(
        cache.packed["k"],
        cache.packed["v"],
        counts.cumsum(0) - counts,
        counts.int(),
        cache.longest,
    )
    new = Segment.of(cache.new("k"), cache.new("v"))
    B, H = cache.counts.shape
    y, _ = decode_attention(q.view(B, H, -1, q.shape[3]), [old, new])
    return y.view_as(q)
