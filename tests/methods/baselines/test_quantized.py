"""Compare KIVI's rounded cache with loops: codes, what is rounded when, attention, bytes."""

from functools import cache as once
from itertools import pairwise, product
import struct

import pytest
import torch

from common import decoder, dense, end
from exact import F64, random
from methods.baselines.quantized import Quantized, quantise
from nanollm.cache import make_cache

B, H, G, D, T = 2, 2, 3, 16, 36
every_bits = pytest.mark.parametrize("bits", range(1, 9))


@once
def drawn(dtype=F64):
    """Return q, k, v; as in real decoders, some channels of the keys are always large."""
    k = random(B, H, T, D, seed=1)
    k[..., 3] += 20
    k[..., 8] -= 9
    return tuple(
        x.to(dtype) for x in (random(B, H * G, T, D), k, random(B, H, T, D, seed=2))
    )


def half(x):
    """Round to 16 bits by way of 32 bits, as torch does."""
    for form in "fe":
        (x,) = struct.unpack(form, struct.pack(form, x))
    return x


def by_loop(group, bits):
    """Return the codes, zero and scale of a list of numbers that share a range."""
    zero = half(min(group))
    scale = half((max(group) - zero) / (2**bits - 1))
    if scale <= 0:  # equal numbers, whose zero was rounded down or up in 16 bits
        return [0] * len(group), zero, scale
    return (
        [min(max(round((x - zero) / scale), 0), 2**bits - 1) for x in group],
        zero,
        scale,
    )


def restored(group, bits):
    code, zero, scale = by_loop(group, bits)
    return torch.tensor([zero + scale * c for c in code], dtype=F64)


@every_bits
def test_codes_zero_and_scale_are_the_loops(bits):
    """Codes, zero and scale equal the loop's.

    Numbers on whole steps, down to the smallest 16-bit step, and groups of equal numbers are
    restored exactly.
    """
    for dim, far in product((2, 4), (0, 30, -30)):
        x = far + random(2, 1, 7, 3, 5, seed=bits) * 10.0 ** torch.arange(-1, 2).view(
            -1, 1
        )
        groups = [
            part.movedim(dim, -1).flatten(0, -2) for part in quantise(x, bits, dim)
        ]
        assert [part.shape[-1] for part in groups] == [x.shape[dim], 1, 1]
        for group, code, zero, scale in zip(
            x.movedim(dim, -1).flatten(0, -2).tolist(), *groups
        ):
            assert (code.tolist(), zero.item(), scale.item()) == by_loop(group, bits)

    steps = [
        zero + scale * torch.arange(2**bits, dtype=F64)
        for zero, scale in ((-5, 0.25), (-3e4, 64), (0, 2**-24), (-(2**-18), 2**-24))
    ]
    equal = [torch.full((5,), c, dtype=F64) for c in (0, -7.5, 2**-24, 65504, -65504)]
    for x, dtype in product(steps + equal, (F64, torch.float32)):
        code, zero, scale = quantise(x.to(dtype), bits, 0)
        assert torch.equal(zero.to(F64) + scale.to(F64) * code, x), x


@pytest.mark.parametrize("numbers, bits", [([-1e5, 1.0], 8), ([-6e4, 6e4], 1)])
def test_what_no_half_holds_is_refused(numbers, bits):
    """Numbers beyond the range of 16 bits raise ValueError; otherwise attention would be NaN."""
    for dtype in torch.float32, torch.bfloat16:
        with pytest.raises(ValueError, match="large"):
            quantise(torch.tensor(numbers, dtype=dtype), bits, 0)


# ---- KIVI ---


def rounded(x, bits, group, dim):
    """Round keys (dim 0) or values (dim 1) of one head, (n, D), in groups along dim."""
    rows = (x.T if dim == 0 else x).tolist()
    done = torch.stack(
        [
            torch.cat(
                [restored(row[i : i + group], bits) for i in range(0, len(row), group)]
            )
            for row in rows
        ]
    )
    return done.T if dim == 0 else done


def old(n, group, exact):
    """Return how many of n tokens are rounded: whole groups, as long as enough exact tokens remain."""
    return max(n - exact, 0) // group * group


CASES = {  # options, tokens of the prompt
    "2 bits": (dict(bits=2, group_size=8, residual_length=5), 25),
    "more tokens than channels": (dict(bits=5, group_size=17, residual_length=1), 27),
    "each alone": (dict(bits=4, group_size=1, residual_length=3), 10),
    "one too few": (dict(bits=8, group_size=8, residual_length=8), 15),
    "nothing exact": (dict(bits=1, group_size=4, residual_length=0), 3),
}
# where each row of the batch starts
FIRST = torch.tensor([[1000], [7]], dtype=torch.int32)


def feed(cache, prompt, chunk, block):
    """Feed a text, `chunk` tokens at a time in the prompt, then `block`; yield each part and its output."""
    for a, b in pairwise([*range(0, prompt, chunk), *range(prompt, T, block), T]):
        y = cache.attend(
            *(x[:, :, a:b] for x in drawn()),
            FIRST + torch.arange(a, b, dtype=torch.int32),
        )
        if b == prompt:
            end(cache)
        yield range(a, b), y


def check_bytes(cache, seen, before, after, bits, group_size, **_):
    """Compare `bytes` with a count by hand, if `before` tokens were rounded and now `after` are.

    A buffer is at most a tenth too large.
    """
    channels = D / min(group_size, D)  # groups of a value's channels, 4 bytes each
    token = 2 * bits * D / 8 + channels * 4 + D * 4 / group_size
    size = lambda exact: B * H * (exact * (2 * D * 8 + 4) + after * token)
    live, allocated = cache.bytes()
    assert live == size(seen - after) <= allocated <= size(1.1 * (seen - before))
    assert before == after or allocated == live


@pytest.mark.parametrize("chunk, block", [(100, 1), (7, 1), (4, 5)])
@pytest.mark.parametrize("case", CASES)
def test_the_oldest_groups_are_rounded_as_in_the_loop_and_attended_to(
    case, chunk, block
):
    """The oldest whole groups are rounded as by the loop, after the attention of the part that
    fills them."""
    options, prompt = CASES[case]
    cache, (q, *kv) = Quantized(**options), drawn()
    n, bits, group = (
        old(T, options["group_size"], 0),
        options["bits"],
        options["group_size"],
    )
    coarse = [
        torch.stack(
            [rounded(head[:n], bits, group, dim) for head in x.flatten(0, 1)]
        ).view(B, H, n, D)
        for dim, x in enumerate(kv)
    ]
    before = 0
    for part, y in feed(cache, prompt, chunk, block):
        seen = part.stop
        after = old(seen, group, options["residual_length"]) if seen >= prompt else 0
        visible = (torch.arange(seen) <= torch.tensor(part)[:, None]).expand(
            B, H, -1, -1
        )
        k, v = (
            torch.cat((x[:, :, :before], exact[:, :, before:seen]), 2)
            for x, exact in zip(coarse, kv)
        )
        assert torch.allclose(
            y, dense(q[:, :, part.start : part.stop], k, v, visible), atol=1e-9
        ), part

        *found, at, bias = cache.read()
        assert bias is None and torch.equal(
            at, (FIRST + torch.arange(seen))[:, None].expand(B, H, seen)
        )
        assert at.dtype == torch.int32 and cache.length == seen - after
        for x, rough, exact in zip(found, coarse, kv):
            assert torch.allclose(
                x[:, :, :after], rough[:, :, :after], rtol=1e-12, atol=1e-12
            ), part
            assert torch.equal(x[:, :, after:], exact[:, :, after:seen])
        check_bytes(cache, seen, before, after, **options)
        before = after


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_new_token_attends_to_what_is_read_and_no_copy_of_it_is_kept(dtype, bits):
    """Attention to codes equals attention to the restored numbers, also in 16 bits.

    The two parts of a score are large and cancel if a channel is always large.
    """
    cache, (q, k, v) = (
        Quantized(bits=bits, group_size=8, residual_length=4),
        drawn(dtype),
    )
    cache.attend(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], torch.arange(T - 1)[None])
    end(cache)
    cache.write(k[:, :, -1:], v[:, :, -1:], torch.tensor([[T - 1]]))
    y, p = cache.attention(q[:, :, -1:], torch.tensor([[T - 1]]))
    assert p is None and y.dtype == dtype
    held = {
        x.data_ptr(): x.nbytes
        for part in (vars(cache), cache.slots, cache.rounded)
        for x in part.values()
        if torch.is_tensor(x) and x is not cache.start
    }
    assert sum(held.values()) == cache.bytes()[1]

    # then `read` does not round
    cache.slots |= {name: cache.slots[name].to(F64) for name in "kv"}
    keys, values, at, _ = cache.read()
    expected = dense(q[:, :, -1:].to(F64), keys, values, at[:, :, None] < T)
    assert torch.allclose(y.to(F64), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("head_dim, group", [(12, 4), (16, 12)])
def test_head_dims_are_multiples_of_8_and_of_the_group(head_dim, group):
    with pytest.raises(
        ValueError,
        match=f"{head_dim} must be a multiple of 8 and of group_size {group}",
    ):
        make_cache(decoder(head_dim=head_dim), Quantized, group_size=group)
