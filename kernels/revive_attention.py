"""Compute KVReviver's attention over exact tokens and vague tokens, tile by tile.

An exact token has a slot. A vague token is only in the sketch: r rows of slots, each slot a sum over many
tokens, from which its key and value are estimated.

    k̂_J = median over rows i of ±S_i[h_i(J)],   v̂_J likewise
    y = Σ p v + Σ p̂ v̂,   one softmax over all scores

PyTorch would write the estimated keys and values to memory and read them again; here they stay in registers.
A program hashes a tile of tokens, gathers their slots from each row and takes the median of three from minima
and maxima. It shrinks the median and continues like decode_attention, whose kernels compute the exact part
and combine both. `insert` adds tokens to the sketch with atomic adds.

Bytes read from memory: only the sketch, the exact slots and 4 bytes per vague token. But the slots of each
vague token, 2·r·D numbers, come from the GPU's cache: r times the bytes that full attention reads from
memory. With r = 3 rows the kernel matches full attention only if the cache is three times as fast as memory,
which is unlikely. With one row it should be faster. (One row is also linear:
`methods/ours/kv_reviver_shrunk.py` attends to slots instead of tokens.)
"""
import torch
from torch import Tensor
from .launch import block_of, launcher, split  # before triton: chooses what runs it
import triton
import triton.language as tl

from .decode_attention import (LOG2E, Segment, add_tile, added_up, check, evenly, launch_attend, partials,
                               plain as plain_attention, tile)

PRIME = tl.constexpr(2 ** 31 - 1)


def cubic(token: Tensor, coefficients: Tensor) -> Tensor:
    """Return r cubics of the tokens modulo 2³¹ − 1, (...) → (..., r).

    coefficients: (4, r) int64.
    """
    token, f = token.long().unsqueeze(-1), 0
    for c in coefficients:
        f = (f * token + c) % PRIME.value
    return f


def plain(q: Tensor, exact: Segment, token: Tensor, x: Tensor, place: Tensor, sign: Tensor,
          mean: Tensor | None = None, shrink: float = 1.0, signed_keys: bool = False,
          sums: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Return attention y (B, H, G, D) of q (B, H, G, D), in plain PyTorch.

    With `sums`, also return the weights of exact slots (N,) and vague tokens (B, H, a), float32.

    token: the vague tokens (B, H, a) int32. x: the sketch (B, H, r·b, 2D), r rows of b slots [k | v].
    place, sign: coefficients (4, r) int64 of two cubics per row. `place` modulo b is the slot; the lowest bit
    of `sign` is 1 for the sign −1. mean: (B, H, 2D), already subtracted from the tokens in x; the estimate is
    then mean + shrink · median. signed_keys: keys have signs too; in the paper only values have them.
    """
    (B, H, a), r, D = token.shape, place.shape[1], q.shape[-1]
    width = x.shape[2] // r
    slot = cubic(token, place) % width + width * torch.arange(r, device=x.device)  # (B, H, a, r)
    rows = x.float().gather(2, slot.flatten(2).unsqueeze(-1).expand(-1, -1, -1, 2 * D))
    rows = rows.view(B, H, a, r, 2 * D)
    minus = 1 - 2 * (cubic(token, sign) % 2).unsqueeze(-1).float()
    k, v = rows.chunk(2, -1)
    k, v = ((y * s).median(3).values for y, s in ((k, minus if signed_keys else 1.0), (v, minus)))
    if mean is not None:
        k, v = (shrink * y + m.unsqueeze(2) for y, m in zip((k, v), mean.float().chunk(2, -1)))

    vague = Segment(k.flatten(0, 2), v.flatten(0, 2), *evenly(B * H, a, a, q.device), a)
    y, weights = plain_attention(q, [exact, vague], sums)
    return y, [weights[0], weights[1].view(B, H, a)] if sums else []


@triton.jit
def cubic_of(b_token, p_coefficients, row, ROWS: tl.constexpr):
    """Return a cubic of tokens (uint32) modulo p = 2³¹ − 1, in 32 bits.

    2³¹ is 1 modulo p. Adding the upper bits of a number to its lower 31 bits therefore replaces the division.
    """
    b_f = tl.load(p_coefficients + row).to(tl.uint32) + 0 * b_token
    for i in tl.static_range(1, 4):
        b_upper, b_lower = tl.umulhi(b_f, b_token), b_f * b_token  # 2³² · upper + lower
        b_f = ((b_upper << 1) | (b_lower >> 31)) + (b_lower & PRIME)
        b_f = (b_f & PRIME) + (b_f >> 31) + tl.load(p_coefficients + i * ROWS + row).to(tl.uint32)
        b_f = (b_f & PRIME) + (b_f >> 31)
        b_f = tl.where(b_f >= PRIME, b_f - PRIME, b_f)
    return b_f


@triton.jit
def of_row(p_x, b_token, p_place, p_sign, row, is_n, o_d, is_d, width, D: tl.constexpr, ROWS: tl.constexpr,
           SIGNED: tl.constexpr):
    """Return the keys and values (tokens, D) that one row of the sketch gives."""
    b_bucket = cubic_of(b_token, p_place, row, ROWS) % tl.cast(width, tl.uint32)
    b_slot = b_bucket.to(tl.int32) + row * width
    b_sign = (1 - 2 * (cubic_of(b_token, p_sign, row, ROWS) & 1).to(tl.int32)).to(tl.float32)
    o_x = b_slot[:, None] * (2 * D) + o_d
    b_k = tl.load(p_x + o_x, mask=is_n[:, None] & is_d, other=0.0)
    b_v = tl.load(p_x + o_x + D, mask=is_n[:, None] & is_d, other=0.0) * b_sign.to(b_k.dtype)[:, None]
    if SIGNED:
        b_k *= b_sign.to(b_k.dtype)[:, None]
    return b_k, b_v


@triton.jit
def median(b_one, b_two, b_three):
    return tl.maximum(tl.minimum(b_one, b_two), tl.minimum(tl.maximum(b_one, b_two), b_three))


@triton.jit(do_not_specialize=["a", "part", "parts"])
def attend_revived(p_q, p_x, p_mean, p_token, p_place, p_sign, p_m, p_l, p_acc, p_score, scale, shrink, a,
                   width, share, part, parts, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SIGNED: tl.constexpr,
                   MEAN: tl.constexpr, SCORES: tl.constexpr):
    """Attend to `share` vague tokens of one head; write m, l and acc as `attend` does."""
    i_head, i_share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum(a, (i_share + 1) * share)
    o_g, o_d, o_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    is_g, is_d = o_g < G, o_d < D
    p_x += i_head * ROWS * width * 2 * D
    b_q = tl.load(p_q + (i_head * G + o_g[:, None]) * D + o_d, mask=is_g[:, None] & is_d, other=0.0)
    if MEAN:
        b_mean_k = tl.load(p_mean + i_head * 2 * D + o_d, mask=is_d, other=0.0)
        b_mean_v = tl.load(p_mean + i_head * 2 * D + D + o_d, mask=is_d, other=0.0)
    b_m = tl.full((BLOCK_G,), -3e38, tl.float32)
    b_l = tl.zeros((BLOCK_G,), tl.float32)
    b_acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for n in range(i_share * share, end, BLOCK_N):
        is_n = n + o_n < end
        b_token = tl.load(p_token + i_head * a + n + o_n, mask=is_n, other=0).to(tl.uint32)
        b_k, b_v = of_row(p_x, b_token, p_place, p_sign, 0, is_n, o_d, is_d, width, D, ROWS, SIGNED)
        if ROWS == 3:
            b_k1, b_v1 = of_row(p_x, b_token, p_place, p_sign, 1, is_n, o_d, is_d, width, D, ROWS, SIGNED)
            b_k2, b_v2 = of_row(p_x, b_token, p_place, p_sign, 2, is_n, o_d, is_d, width, D, ROWS, SIGNED)
            b_k, b_v = median(b_k, b_k1, b_k2), median(b_v, b_v1, b_v2)
        if MEAN:
            b_k, b_v = b_mean_k + shrink * b_k.to(tl.float32), b_mean_v + shrink * b_v.to(tl.float32)
        b_k, b_v = b_k.to(b_q.dtype), b_v.to(b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (scale * LOG2E)
        b_s = tl.where(is_n[None, :], b_s, float("-inf"))
        if SCORES:
            o_score = (i_head * a + n + o_n)[None, :] * G + o_g[:, None]
            tl.store(p_score + o_score, b_s, mask=is_n[None, :] & is_g[:, None])
        b_m, b_l, b_acc = add_tile(b_s, b_v, b_m, b_l, b_acc)
    o = (i_head * parts + part + i_share) * G + o_g
    tl.store(p_m + o, b_m, mask=is_g)
    tl.store(p_l + o, b_l, mask=is_g)
    tl.store(p_acc + o[:, None] * D + o_d, b_acc, mask=is_g[:, None] & is_d)


@launcher
def revive_attention(q: Tensor, exact: Segment, token: Tensor, x: Tensor, place: Tensor, sign: Tensor,
                     mean: Tensor | None = None, shrink: float = 1.0, signed_keys: bool = False,
                     sums: bool = False, block: int = 32) -> tuple[Tensor, list[Tensor]]:
    """Return what `plain` returns, computed by the kernels, `block` slots or tokens at a time.

    Raise ValueError if shapes do not fit.
    """
    (B, H, G, D), a, rows = q.shape, token.shape[2], place.shape[1]
    if rows not in (1, 3) or x.shape[2] % rows or x.shape != (B, H, x.shape[2], 2 * D) or x.dtype != q.dtype:
        raise ValueError(f"sketch {tuple(x.shape)} of {x.dtype} must be 1 or 3 equal rows, here {rows}, "
                         f"for {(B, H)} heads, with slots [k | v] of 2 × {D} numbers in q's dtype {q.dtype}")
    mean_size = 2 * B * H * D if mean is None else mean.numel()
    if token.shape != (B, H, a) or not place.shape == sign.shape == (4, rows) or mean_size != 2 * B * H * D:
        raise ValueError(f"tokens {tuple(token.shape)} must be for {(B, H)} heads, place "
                         f"{tuple(place.shape)} and sign {tuple(sign.shape)} must be {(4, rows)}, and a "
                         f"mean must have 2 × {D} numbers per head")
    check(q, [exact])

    # some programs read the exact slots, others the vague tokens
    heads, q, x, token, place, sign = B * H, *(y.contiguous() for y in (q, x, token.int(), place, sign))
    vague = Segment(x, x, *evenly(heads, a, a, q.device), a)
    splits = [split(s.longest, block, heads, q.device) for s in (exact, vague)]
    (share, programs), (share_vague, programs_vague) = splits
    buffers = partials(q, programs + programs_vague)
    scores = [q.new_empty(n, G, dtype=torch.float32) if sums else None for n in (len(exact.k), heads * a)]

    launch_attend(q, exact, scores[0], buffers, share, programs, 0, block)
    attend_revived[heads, programs_vague](
        p_q=q, p_x=x, p_mean=None if mean is None else mean.contiguous(), p_token=token, p_place=place,
        p_sign=sign, p_score=scores[1], **buffers, scale=D ** -0.5, shrink=shrink, a=a,
        width=x.shape[2] // rows, share=share_vague, part=programs, **tile(q), BLOCK_N=block, ROWS=rows,
        SIGNED=signed_keys, MEAN=mean is not None, SCORES=sums, num_warps=4, num_stages=2)
    y, weights = added_up(q, buffers, zip((exact, vague), splits, scores) if sums else (), block)
    return y, [weights[0], weights[1].view(B, H, a)] if sums else []


def attend_one(cache, q: Tensor, x: Tensor, mean: Tensor | None = None,
               shrink: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the output of q (B, H·G, 1, D) and the tokens' weights, for `KVReviver.decode`.

    The weights are the mean over G for exact slots and vague tokens, (B, H, G, 1, S + a).
    mean: (B, H, 1, 2D).
    """
    B, H = cache.k.shape[:2]
    grouped, exact, sketch = q[:, :, 0].unflatten(1, (H, -1)), Segment.of(cache.k, cache.v), cache.sketch
    hashes = sketch.bucket_by, sketch.sign_by
    y, (slots, vague) = revive_attention(grouped, exact, cache.vague_tokens(), x, *hashes, mean, shrink,
                                         sketch.signed_keys, sums=True)
    p = torch.cat((exact.by_head(slots, B, H), vague), 2) / grouped.shape[2]
    return y.view_as(q), p[:, :, None, None].expand(-1, -1, grouped.shape[2], -1, -1)


# ---- insert ---------------------------------------------------------------------------------------


def in_32_bits(x: Tensor) -> Tensor:
    """Return x itself if its dtype has at least 32 bits, else a float32 copy."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plain_insert(x: Tensor, token: Tensor, k: Tensor, v: Tensor, times: Tensor, place: Tensor, sign: Tensor,
                 signed_keys: bool = False):
    """Add tokens (B, H, n) with k and v (B, H, n, D) to the sketch x (B, H, r·b, 2D), in place.

    times: factor of each token (B, H, n). The sums are computed in 32 bits and rounded to 16 bits once. If
    each addition were rounded, small tokens would no longer change a large sum.
    """
    r, D, total = place.shape[1], k.shape[-1], in_32_bits(x)
    slot = cubic(token, place) % (x.shape[2] // r) + x.shape[2] // r * torch.arange(r, device=x.device)
    minus = (1 - 2 * (cubic(token, sign) % 2)).unsqueeze(-1).to(total)

    times = times[..., None, None]
    k, v = (torch.where(times == 0, 0, y.unsqueeze(3) * times.to(total)) for y in (k, v))
    k = k * minus if signed_keys else k.expand(*minus.shape[:-1], D)
    rows = torch.cat((k, v * minus), -1).flatten(2, 3)
    x.copy_(total.scatter_add_(2, slot.flatten(2).unsqueeze(-1).expand_as(rows), rows))


@triton.jit(do_not_specialize=["n"])
def add(p_x, p_token, p_k, p_v, p_times, p_place, p_sign, n, width, D: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SIGNED: tl.constexpr):
    """Add a tile of tokens of one head to one row of the sketch."""
    i_head, row = tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_n, o_d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    is_n, is_d = o_n < n, o_d < D
    b_token = tl.load(p_token + i_head * n + o_n, mask=is_n, other=0).to(tl.uint32)
    b_times = tl.load(p_times + i_head * n + o_n, mask=is_n, other=0.0)
    b_signed = b_times * (1 - 2 * (cubic_of(b_token, p_sign, row, ROWS) & 1).to(tl.int32)).to(tl.float32)
    b_bucket = cubic_of(b_token, p_place, row, ROWS) % tl.cast(width, tl.uint32)
    o_x = ((i_head * ROWS + row) * width + b_bucket.to(tl.int64))[:, None] * (2 * D) + o_d

    is_in = (is_n & (b_times != 0))[:, None] & is_d
    o_nd = (i_head * n + o_n)[:, None] * D + o_d
    b_k = tl.load(p_k + o_nd, mask=is_in, other=0.0) * (b_signed if SIGNED else b_times)[:, None]
    b_v = tl.load(p_v + o_nd, mask=is_in, other=0.0) * b_signed[:, None]
    tl.atomic_add(p_x + o_x, b_k, mask=is_in, sem="relaxed")
    tl.atomic_add(p_x + o_x + D, b_v, mask=is_in, sem="relaxed")


@launcher
def insert(x: Tensor, token: Tensor, k: Tensor, v: Tensor, times: Tensor, place: Tensor, sign: Tensor,
           signed_keys: bool = False, block: int = 32):
    """Do the same as `plain_insert`, with the kernel, `block` tokens at a time.

    Programs add to a slot in any order, so the last bits may differ from run to run. Raise ValueError if
    shapes do not fit or x is not contiguous.
    """
    (B, H, n), rows, D = token.shape, place.shape[1], k.shape[-1]
    if not x.is_contiguous() or x.shape[2] % rows or x.shape != (B, H, x.shape[2], 2 * D):
        raise ValueError(f"sketch {tuple(x.shape)} must be contiguous, with {rows} rows of equal length, "
                         f"2 × {D} numbers per slot and {(B, H)} heads")
    tokens = k.shape == v.shape == (B, H, n, D) and times.shape == (B, H, n)
    if not tokens or not place.shape == sign.shape == (4, rows):
        raise ValueError(f"k {tuple(k.shape)}, v {tuple(v.shape)} and times {tuple(times.shape)} must be "
                         f"for {n} tokens of {(B, H)} heads with {D} numbers, and place "
                         f"{tuple(place.shape)} and sign {tuple(sign.shape)} must be {(4, rows)}")
    if n:
        given = (token.int(), k, v, times.float(), place, sign)
        token, k, v, times, place, sign = (y.contiguous() for y in given)
        total = in_32_bits(x)
        add[triton.cdiv(n, block), B * H, rows](
            p_x=total, p_token=token, p_k=k, p_v=v, p_times=times, p_place=place, p_sign=sign, n=n,
            width=x.shape[2] // rows, D=D, BLOCK_N=block, BLOCK_D=block_of(D), ROWS=rows, SIGNED=signed_keys,
            num_warps=4)
        x.copy_(total)
