"""A store in few bits: codes and their ranges by loops, what evictions leave of them, bytes."""

from functools import partial
from itertools import product
import math

import pytest
import torch

from common import SLOT, B, D, G, H, alone, decoder, dense, end, feed
from exact import random
import loops
from methods.baselines.ada_kv import AdaKV
from methods.baselines.snap_kv import SnapKV
from methods.baselines.rounded import (
    GROUP,
    RoundedSlots,
    pack,
    quantise,
    unpack,
)
from nanollm.cache import NEVER, begin_turn, make_cache
from rounding import levels, rounded
from stores import positions, sees

every_bits = pytest.mark.parametrize("bits", range(1, 9))


@every_bits
def test_codes_come_back_from_their_bytes(bits):
    g = torch.Generator().manual_seed(bits)
    code = torch.randint(2**bits, (3, 40), generator=g, dtype=torch.uint8)
    packed = pack(code, bits)
    assert packed.shape == (3, 40 * bits // 8)
    assert torch.equal(unpack(packed, bits), code)


@every_bits
def test_codes_zero_and_scale_are_the_loops(bits):
    for dim, far in product((2, 4), (0, 30, -30)):
        size = torch.tensor([0.1, 1, 10]).view(-1, 1)
        x = random(2, 1, 7, 3, 5, seed=bits)
        x = x * size + far
        parts = quantise(x, bits, dim)
        rows = []
        for y in (x, *parts):
            y = y.movedim(dim, -1)
            rows.append(y.flatten(0, -2).tolist())
        for numbers, codes, (zero,), (scale,) in zip(*rows, strict=True):
            assert (codes, zero, scale) == levels(numbers, bits)


@pytest.mark.parametrize("numbers, bits", [([-1e5, 1.0], 8), ([-6e4, 6e4], 1)])
def test_what_no_half_holds_is_refused(numbers, bits):
    """Numbers, or ranges of them, that no 16 bits hold raise ValueError."""
    for dtype in torch.float32, torch.bfloat16:
        with pytest.raises(ValueError, match="large"):
            quantise(torch.tensor(numbers, dtype=dtype), bits, 0)


OLD, NEW = 90, 3  # tokens of the prompt, and after it


def text():
    return [3 * x for x in loops.text(OLD + NEW)]


def read(n, method=None, **options):
    """Return a store that has read n tokens, and with `bits` has rounded them."""
    store = partial(RoundedSlots, **options) if options else None
    layer = alone(method, store=store)
    feed(layer, text(), n)
    end(layer)
    return layer


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("Method", [SnapKV, AdaKV])
def test_entries_are_those_of_the_method_rounded_by_loops(Method, bits):
    method = Method(budget=50, window_size=8)
    layer = read(OLD, method, bits=bits)
    held = positions(read(OLD, method))
    assert positions(layer) == held
    q, k, v = text()
    old = 0
    groups = 0
    for b, h in product(range(B), range(H)):
        kept = held[b][h]
        for x, dim in ((k, 0), (v, 1)):
            x[b, h, kept] = rounded(x[b, h, kept], bits, GROUP, dim).float()
        old += len(kept)
        groups += math.ceil(len(kept) / GROUP)
    y = feed(layer, text(), NEW, chunk=1)
    expected = dense(q[:, :, OLD:], k, v, sees(held, OLD, NEW))
    # a number halfway between two levels may be rounded to either
    atol = 2e-2 if bits == 2 else 5e-3
    torch.testing.assert_close(y, expected, atol=atol, rtol=0)

    # an entry's codes, 4 bytes for its value's range and 4 for its position; a group's key ranges
    size = old * (2 * D * bits // 8 + 4 + 4) + groups * D * 4 + 8 * B * H
    live, allocated = layer.bytes()
    assert live == size + B * H * NEW * SLOT
    assert live <= allocated


def read_wide(dtype):
    """Return a store with 64 channels that has read 70 tokens, and q, k, v of 71.

    Two channels of the keys are always large.
    """
    q = 4 * random(B, H * G, 71, 64)  # few entries get most of the attention
    k = random(B, H, 71, 64, seed=1)
    v = random(B, H, 71, 64, seed=2)
    k[..., 3] += 20
    k[..., 40] -= 9
    qkv = [x.to(dtype) for x in (q, k, v)]
    w_o = torch.zeros(1, H * G, 64)
    layer = alone(w_o=w_o, store=partial(RoundedSlots, bits=3))
    feed(layer, qkv, 70)
    end(layer)
    return layer, qkv


def test_a_group_of_a_value_has_32_channels():
    layer, (_, *kv) = read_wide(torch.float32)
    for found, x, dim in zip(layer.read(), kv, (0, 1)):
        for b, h in product(range(B), range(H)):
            expected = rounded(x[b, h, :70], 3, GROUP, dim).float()
            torch.testing.assert_close(found[b, h], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_new_token_attends_to_what_is_read_also_in_16_bits(dtype):
    layer, qkv = read_wide(dtype)
    y = feed(layer, qkv)
    assert y.dtype == dtype
    k, v, pos, _ = layer.read()
    q = qkv[0][:, :, 70:]
    expected = dense(q.double(), k.double(), v.double(), pos[:, :, None] < 71)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, atol=2 * eps + 4e-6, rtol=0)


def test_several_groups_of_a_head_keep_their_ranges_when_others_leave():
    """70 entries are three groups of keys. Entries that stay do not change, bit for bit."""
    layer = read(70, bits=4)
    g = torch.Generator().manual_seed(5)
    for _ in range(6):
        before = layer.k, layer.v, layer.pos
        chance = torch.rand(layer.pos.shape, generator=g)
        kept = (chance < 0.5) & (layer.pos != NEVER)
        layer.keep_chosen(kept)
        left = layer.pos != NEVER
        after = layer.k, layer.v, layer.pos
        for x, old in zip(after, before):
            assert torch.equal(x[left], old[kept])
        feed(layer, text(), 3, chunk=1)


def test_nothing_may_be_left_of_the_prompt():
    """All rounded entries leave; later tokens go on as if they had been the first."""
    layer = read(20, bits=3)
    layer.keep_chosen(torch.zeros(B, H, 20).bool())
    y = feed(layer, text(), 10, chunk=3)
    q, k, v = (x[:, :, 20:30] for x in text())
    causal = torch.ones(10, 10).tril().bool()[None, None]
    assert torch.allclose(y, dense(q, k, v, causal), atol=1e-5)
    assert layer.bytes()[0] == 10 * B * H * SLOT


def test_later_turns_are_rounded_too_and_keys_and_values_cannot_be_changed():
    layer = read(20, bits=4)
    begin_turn([layer])
    end(layer)  # a turn without tokens
    begin_turn([layer])
    feed(layer, text(), 25)
    end(layer)
    assert layer.new("k").numel() == 0
    assert layer.pos.tolist() == [[[*range(45)]] * H] * B
    with pytest.raises(ValueError, match="few bits cannot be changed"):
        layer.put("k", layer.k)


@pytest.mark.parametrize("bits", [0, 9, 2.5])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits {bits} must be"):
        make_cache(decoder(), store=partial(RoundedSlots, bits=bits))


@pytest.mark.parametrize("head_dim", [12, 40])
def test_head_dims_are_multiples_of_8_and_of_the_group(head_dim):
    words = f"head dim {head_dim} must be a multiple of 8, and of 32 if it is larger"
    with pytest.raises(ValueError, match=words):
        make_cache(decoder(head_dim=head_dim), store=RoundedSlots)
