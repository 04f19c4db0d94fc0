"""Decode one token: its queries attend to a compressed cache whose heads may differ in length.

A head's slots are rows start … start + count − 1 of a flat k and v. One kernel therefore reads both
layouts: heads packed one after the other (AdaKV), and heads in a buffer of equal capacity. A cache
with both layouts consists of two segments.

    y = Σ_n p_n v_n,   p_n = exp(s_n − m)/l,   l = Σ exp(s − m),   m = max s,   s_n = q·k_n/√D + bias_n

The slots of a head are split among several programs: with one program per head, a single sequence
would leave most of the GPU idle. Each program writes its own m, l and acc = Σ exp(s − m) v. A
second kernel combines them (flash-decoding). H2O, Scissorhands and KVReviver also need Σ_g p_n
(`sums`). The first kernel then stores the scores, 4 bytes per slot and query head, and a third
kernel turns them into weights.

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
        (B, H, S, D), apart = k.shape, k.stride(1) // k.shape[3]
        if k.stride() != v.stride() or k.stride() != (H * apart * D, apart * D, D, 1):
            k, v, apart = k.contiguous(), v.contiguous(), S
        flat = [x.as_strided(((B * H - 1) * apart + S, D), (D, 1)) for x in (k, v)]
        if bias is not None:
            bias = F.pad(bias.float(), (0, apart - S)).flatten()[: len(flat[0])]
        return cls(*flat, *evenly(B * H, apart, S, k.device), S, bias)

    def by_head(self, x: Tensor, B: int, H: int) -> Tensor:
        """Return x (N,), one number per slot, as (B, H, S); all heads must have S slots."""
        apart = (len(self.k) - self.longest) // max(B * H - 1, 1)
        return x.as_strided((B, H, self.longest), (H * apart, apart, 1))


def evenly(
    heads: int, apart: int, n: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return starts and counts of heads with n slots each, whose first slots are `apart` rows apart."""
    count = torch.full((heads,), n, dtype=torch.int32, device=device)
    return apart * torch.arange(heads, device=device), count


def plain(
    q: Tensor, segments: list[Segment], sums: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Return attention y (B, H, G, D) of q (B, H, G, D) over all segments, in plain PyTorch.

    y is 0 for a head without visible slots. With `sums`, also return (N,) float32 for each segment:
    the sum of the weights that a slot gets from the G queries of its head.
    """
    y, weights = (
        torch.zeros_like(q),
        [torch.zeros(len(s.k), device=q.device) for s in segments],
    )
    for i, (queries, out) in enumerate(zip(q.flatten(0, 1), y.flatten(0, 1))):
        rows = [
            slice(int(s.start[i]), int(s.start[i]) + int(s.count[i])) for s in segments
        ]
        k, v = (
            torch.cat([getattr(s, name)[row] for s, row in zip(segments, rows)]).float()
            for name in "kv"
        )
        bias = torch.cat(
            [
                s.k.new_zeros(len(s.k), dtype=torch.float32)[row]
                if s.bias is None
                else s.bias[row]
                for s, row in zip(segments, rows)
            ]
        )

        # (G, slots)
        p = (queries.float() @ k.T * q.shape[-1] ** -0.5 + bias).softmax(-1)
        p = p.masked_fill((bias == -torch.inf).all(), 0)
        out.copy_(p @ v)
        for weight, row, part in zip(
            weights, rows, p.sum(0).split([row.stop - row.start for row in rows])
        ):
            weight[row] = part
    return y, weights if sums else []


@triton.jit
def add_tile(b_s, b_v, b_m, b_l, b_acc):
    """Update m, l and acc with a tile of scores times log₂ e (G, slots) and values (slots, D)."""
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_m_new[:, None])
    b_alpha = tl.exp2(b_m - b_m_new)
    b_acc = b_acc * b_alpha[:, None] + tl.dot(
        b_p.to(b_v.dtype), b_v, input_precision="ieee"
    )
    return b_m_new, b_l * b_alpha + tl.sum(b_p, 1), b_acc


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
    """Attend to `share` slots of one head; write m and l (B·H, parts, G), acc (B·H, parts, G, D).

    A part is the result of one program for one head. All segments together have `parts` parts;
    those of this segment begin at number `part`.
    """
    i_head, i_share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = (
        tl.load(p_start + i_head),
        tl.minimum(tl.load(p_count + i_head), (i_share + 1) * share),
    )
    o_g, o_d, o_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    is_g, is_d = o_g < G, o_d < D
    # (G, D)
    b_q = tl.load(
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
        # (G, slots)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (scale * LOG2E)
        if BIASED:
            b_s += tl.load(p_bias + row, mask=is_n, other=0.0)[None, :] * LOG2E
        b_s = tl.where(is_n[None, :], b_s, float("-inf"))
        if SCORES:
            tl.store(
                p_score + row[None, :] * G + o_g[:, None],
                b_s,
                mask=is_n[None, :] & is_g[:, None],
            )
        b_v = tl.load(p_v + o_nd, mask=is_n[:, None] & is_d, other=0.0)
        b_m, b_l, b_acc = add_tile(b_s, b_v, b_m, b_l, b_acc)
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
    i, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p, o_d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    is_d, m = o_d < D, -3e38  # finite even if the head has no slots
    for p in range(0, parts, BLOCK_P):
        o = (i * parts + p + o_p) * G + g
        m = tl.maximum(
            m, tl.max(tl.load(p_m + o, mask=p + o_p < parts, other=-3e38), 0)
        )

    b_l, b_acc = tl.zeros((BLOCK_P,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for p in range(0, parts, BLOCK_P):
        is_p = p + o_p < parts
        o = (i * parts + p + o_p) * G + g
        b_weight = tl.exp2(tl.load(p_m + o, mask=is_p, other=float("-inf")) - m)
        b_l += b_weight * tl.load(p_l + o, mask=is_p, other=0.0)
        b_parts = tl.load(
            p_acc + o[:, None] * D + o_d, mask=is_p[:, None] & is_d, other=0.0
        )
        b_acc += tl.sum(b_weight[:, None] * b_parts, 0)

    total = tl.maximum(tl.sum(b_l, 0), 1e-37)  # without slots y is 0
    tl.store(p_y + (i * G + g) * D + o_d, b_acc / total, mask=is_d)
    tl.store(p_lse + i * G + g, m + tl.log2(total))


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
    """Write Σ_g 2^(s_n − log₂ Σ 2^s) for `share` slots of one head."""
    i_head, i_share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = (
        tl.load(p_start + i_head),
        tl.minimum(tl.load(p_count + i_head), (i_share + 1) * share),
    )
    o_g, o_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    b_lse = tl.load(p_lse + i_head * G + o_g, mask=o_g < G, other=float("inf"))
    for n in range(i_share * share, end, BLOCK_N):
        is_n = n + o_n < end
        row = start + n + o_n
        b_s = tl.load(
            p_score + row[:, None] * G + o_g,
            mask=is_n[:, None] & (o_g < G),
            other=float("-inf"),
        )
        tl.store(p_sums + row, tl.sum(tl.exp2(b_s - b_lse), 1), mask=is_n)


def check(q: Tensor, segments: list[Segment]):
    """Raise ValueError if the segments do not fit the queries q (B, H, G, D)."""
    heads, D = q.shape[0] * q.shape[1], q.shape[3]
    for s in segments:
        rows = (
            s.k.is_contiguous()
            and s.v.is_contiguous()
            and s.k.shape == s.v.shape
            and s.k.shape[1] == D
        )
        if not rows or not s.k.dtype == s.v.dtype == q.dtype:
            raise ValueError(
                f"k {tuple(s.k.shape)} of {s.k.dtype} and v {tuple(s.v.shape)} of {s.v.dtype} "
                f"must be contiguous rows of the head dim {D}, in q's dtype {q.dtype}"
            )
        if len(s.start) != heads or len(s.count) != heads:
            raise ValueError(
                f"{len(s.start)} starts and {len(s.count)} counts for {heads} heads; "
                "give one each per head"
            )


def partials(q: Tensor, parts: int) -> dict:
    """Allocate m and l (B·H, parts, G) and acc (B·H, parts, G, D) for queries q (B, H, G, D)."""
    B, H, G, D = q.shape
    m, total = q.new_empty(2, B * H, parts, G, dtype=torch.float32)
    return dict(
        p_m=m,
        p_l=total,
        p_acc=q.new_empty(B * H, parts, G, D, dtype=torch.float32),
        parts=parts,
    )


def launch_attend(
    q: Tensor,
    s: Segment,
    score: Tensor | None,
    buffers: dict,
    share: int,
    programs: int,
    part: int,
    block: int,
):
    """Launch `attend` on one segment: `programs` programs per head with `share` slots each.

    Their results are stored from number `part` on. If `score` (N, G) is given, the scores are
    written there.
    """
    attend[len(s.start), programs](
        p_q=q,
        p_k=s.k,
        p_v=s.v,
        p_bias=s.bias,
        p_start=s.start,
        p_count=s.count,
        p_score=score,
        **buffers,
        scale=q.shape[3] ** -0.5,
        share=share,
        part=part,
        **tile(q),
        BLOCK_N=block,
        BIASED=s.bias is not None,
        SCORES=score is not None,
        num_warps=4,
        num_stages=2,
    )


def tile(q: Tensor) -> dict:
    """Return the sizes of a tile: G, D and the blocks that hold them."""
    G, D = q.shape[2:]
    return dict(G=G, D=D, BLOCK_G=block_of(G), BLOCK_D=block_of(D))


def added_up(q: Tensor, buffers: dict, scored=()) -> tuple[Tensor, list[Tensor]]:
    """Combine all parts into y (B, H, G, D); also return the slots' weights (N,) of each scored segment.

    scored: tuples (segment, (share, programs), scores (N, G)).
    """
    B, H, G, D = q.shape
    y, lse, weights = (
        torch.empty_like(q),
        q.new_empty(B * H, G, dtype=torch.float32),
        [],
    )
    add_up[B * H, G](
        **buffers, p_y=y, p_lse=lse, G=G, D=D, BLOCK_D=block_of(D), BLOCK_P=32
    )
    for s, (share, programs), score in scored:
        weights.append(torch.zeros(len(score), device=q.device))
        column_sums[B * H, programs](
            p_score=score,
            p_lse=lse,
            p_start=s.start,
            p_count=s.count,
            p_sums=weights[-1],
            share=share,
            G=G,
            BLOCK_G=triton.next_power_of_2(G),
            BLOCK_N=256,
        )
    return y, weights


@launcher
def decode_attention(
    q: Tensor, segments: list[Segment], sums: bool = False, block: int = 64
) -> tuple[Tensor, list[Tensor]]:
    """Return what `plain` returns, computed by the kernels, `block` slots at a time.

    Raise ValueError if the segments do not fit q.
    """
    q = q.contiguous()
    check(q, segments)
    splits = [
        split(s.longest, block, q.shape[0] * q.shape[1], q.device) for s in segments
    ]
    buffers, part = partials(q, sum(programs for _, programs in splits)), 0
    scores = [
        q.new_empty(len(s.k), q.shape[2], dtype=torch.float32) if sums else None
        for s in segments
    ]
    for s, (share, programs), score in zip(segments, splits, scores):
        launch_attend(q, s, score, buffers, share, programs, part, block)
        part += programs
    return added_up(q, buffers, zip(segments, splits, scores) if sums else ())


def attend_one(cache, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return y of q (B, H·G, 1, D) over all slots of the cache, for `LayerCache.attention`.

    Also return the weights' mean over G, (B, H, G, 1, S), or None if `cache.watch` is 0.
    """
    (B, heads, _, D), H = q.shape, cache.slots["k"].shape[1]
    k, v, position, bias = cache.read()
    if cache.ragged or bias is not None:
        bias = torch.where(
            position <= pos[:, None], 0.0 if bias is None else bias, -torch.inf
        )
    s = Segment.of(k, v, bias)

    y, sums = decode_attention(q.view(B, H, -1, D), [s], sums=bool(cache.watch))
    if not sums:
        return y.view_as(q), None
    p = s.by_head(sums[0], B, H) / (heads // H)
    return y.view_as(q), p.view(B, H, 1, 1, -1).expand(-1, -1, heads // H, -1, -1)


def attend_packed(cache, q: Tensor) -> Tensor:
    """Return y of q (B, H·G, 1, D) over packed slots and newer slots, for `PackedCache.attention`."""
    counts = cache.counts.flatten()
    old = Segment(
        cache.packed["k"],
        cache.packed["v"],
        counts.cumsum(0) - counts,
        counts.int(),
        cache.longest,
        cache.packed.get("bias"),
    )
    new = Segment.of(
        *(cache.new(name) for name in ("k", "v", "bias") if name in cache.slots)
    )
    y, _ = decode_attention(q.view(*cache.counts.shape, -1, q.shape[3]), [old, new])
    return y.view_as(q)
