"""Compare KIVI's cache with loops: what is rounded when, attention, bytes."""

from functools import cache as once
from itertools import pairwise

import pytest
import torch

from common import alone, decoder, dense, end
from exact import F64, random
from methods.baselines.quantized import Quantized
from nanollm.cache import make_cache
from rounding import rounded

B, H, G, D, T = 2, 2, 3, 16, 36


@once
def drawn(dtype=F64):
    """Return q, k, v; as in real decoders, some channels of the keys are always large."""
    q = random(B, H * G, T, D)
    k = random(B, H, T, D, seed=1)
    v = random(B, H, T, D, seed=2)
    k[..., 3] += 20
    k[..., 8] -= 9
    return [x.to(dtype) for x in (q, k, v)]


def layer_of(*options):
    w_o = torch.zeros(1, H * G, D)
    return alone(Quantized(*options), w_o=w_o)


CASES = {  # bits, group_size, residual_length, tokens of the prompt
    "2 bits": (2, 8, 5, 25),
    "more tokens than channels": (5, 17, 1, 27),
    "each alone": (4, 1, 3, 10),
    "one too few": (8, 8, 8, 15),
    "nothing exact": (1, 4, 0, 3),
}
# where each row of the batch starts
FIRST = torch.tensor([[1000], [7]], dtype=torch.int32)


def feed(layer, prompt, chunk, block):
    """Feed a text, `chunk` prompt tokens at a time, then `block`; yield parts and outputs."""
    starts = [*range(0, prompt, chunk), *range(prompt, T, block), T]
    for a, b in pairwise(starts):
        pos = FIRST + torch.arange(a, b, dtype=torch.int32)
        y = layer.attend(*(x[:, :, a:b] for x in drawn()), pos)
        if b == prompt:
            end(layer)
        yield a, b, y


def check_bytes(layer, seen, before, after, bits, group):
    """Compare `bytes` with a count by hand, if `before` tokens were rounded and now `after` are.

    A buffer is at most a tenth too large.
    """
    channels = D / min(group, D)  # groups of a value's channels, 4 bytes each
    token = 2 * bits * D / 8 + channels * 4 + D * 4 / group
    exact = 2 * D * 8 + 4
    coarse = after * token
    live, allocated = layer.bytes()
    assert live == B * H * ((seen - after) * exact + coarse)
    most = B * H * (1.1 * (seen - before) * exact + coarse)
    assert live <= allocated <= most
    assert before == after or allocated == live


@pytest.mark.parametrize("chunk, block", [(100, 1), (7, 1), (4, 5)])
@pytest.mark.parametrize("case", CASES)
def test_the_oldest_groups_are_rounded_as_in_the_loop_and_attended_to(
    case, chunk, block
):
    """The oldest whole groups are rounded as by the loop, after the attention of the part that
    fills them."""
    bits, group, recent, prompt = CASES[case]
    q, *kv = drawn()
    n = T // group * group
    coarse = []
    for dim, x in enumerate(kv):
        heads = []
        for y in x.flatten(0, 1):
            heads.append(rounded(y[:n], bits, group, dim))
        coarse.append(torch.stack(heads).view(B, H, n, D))

    layer = layer_of(bits, group, recent)
    before = 0  # rounded tokens
    for start, seen, y in feed(layer, prompt, chunk, block):
        new = torch.arange(start, seen)
        visible = torch.arange(seen) <= new[:, None]
        read = []
        for rough, exact in zip(coarse, kv):
            parts = rough[:, :, :before], exact[:, :, before:seen]
            read.append(torch.cat(parts, 2))
        visible = visible.expand(B, H, -1, -1)
        expected = dense(q[:, :, start:seen], *read, visible)
        assert torch.allclose(y, expected, atol=1e-9), seen

        after = 0
        if seen >= prompt:
            after = max(seen - recent, 0) // group * group
        *found, pos, bias = layer.read()
        assert bias is None
        expected = FIRST + torch.arange(seen)
        assert torch.equal(pos, expected[:, None].expand(B, H, seen))
        assert pos.dtype == torch.int32
        assert layer.length == seen - after
        for x, rough, exact in zip(found, coarse, kv):
            old, new = x[:, :, :after], x[:, :, after:]
            expected = rough[:, :, :after]
            assert torch.allclose(old, expected, rtol=1e-12, atol=1e-12), seen
            assert torch.equal(new, exact[:, :, after:seen])
        check_bytes(layer, seen, before, after, bits, group)
        before = after


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_new_token_attends_to_what_is_read_and_no_copy_of_it_is_kept(dtype, bits):
    """Attention to codes equals attention to the restored numbers, also in 16 bits.

    The two parts of a score are large and cancel if a channel is always large.
    """
    layer = layer_of(bits, 8, 4)
    q, k, v = drawn(dtype)
    pos = torch.arange(T)[None]
    older = [x[:, :, :-1] for x in (q, k, v)]
    layer.attend(*older, pos[:, :-1])
    end(layer)
    q, k, v = (x[:, :, -1:] for x in (q, k, v))
    newest = pos[:, -1:]
    layer.write(k, v, newest)
    y, p = layer.attention(q, newest)
    assert p is None
    assert y.dtype == dtype
    held = [*layer.slots.values(), *layer.rounded.values()]
    for x in vars(layer).values():
        if torch.is_tensor(x) and x is not layer.start:
            held.append(x)
    assert sum(x.nbytes for x in held) == layer.bytes()[1]

    # then `read` does not round
    layer.slots |= {name: layer.slots[name].to(F64) for name in "kv"}
    keys, values, pos, _ = layer.read()
    expected = dense(q.to(F64), keys, values, pos[:, :, None] < T)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(y.to(F64), expected, rtol=eps, atol=1e-6)


def test_head_dims_are_multiples_of_8_and_of_the_group():
    model = decoder(head_dim=16)
    with pytest.raises(ValueError, match="16 must be a multiple of 8, and of 12"):
        make_cache(model, Quantized, group_size=12)
