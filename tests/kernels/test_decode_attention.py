"""Test the attention of one new token over heads of different length.

Kernels equal a loop in float64. test_kernels.py compares them with caches, packed ones too.
"""

import math

import pytest
import torch

from common import DEVICE, TOLERANCE, attended, segment

pytest.importorskip("triton")  # Linux only

from kernels.decode_attention import Segment, decode_attention
from kernels.launch import split

F32 = torch.float32


# B, H, G, D; slots of the B·H heads; of a second segment; whether there is a bias
CASES = [
    ((1, 1, 1, 16), [1], [], False),
    # one head alone: 44 tiles, on a CPU in eight parts
    ((1, 1, 4, 128), [700], [], True),
    ((2, 2, 2, 64), [0, 1, 33, 32], [], False),
    # a head dim and a group that are no powers of 2
    ((3, 1, 3, 40), [5, 0, 33], [2, 2, 2], True),
    ((1, 2, 4, 80), [17, 0], [1, 0], False),  # a head with nothing at all
]


def queries(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


def same(x, expected, rtol=1e-4, atol=1e-5):
    return torch.allclose(x.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_kernels_are_the_loop(poisoned, case, dtype):
    shape, counts, more, biased = CASES[case]
    D = shape[-1]
    segments = [segment(counts, D, dtype, case, biased)]
    if more:
        segments.append(segment(more, D, dtype, 50 + case))
    q = queries(*shape, seed=99 + case).to(dtype)
    if case == 1:
        q = 100 * q  # the exp of some scores would overflow
    expected, weights = attended(q, segments)

    turned = (
        q.transpose(0, 1).contiguous().transpose(0, 1)
    )  # in another order of memory
    y, sums = decode_attention(turned, segments, sums=True, block=16)
    tolerance = TOLERANCE[dtype]
    assert y.dtype == dtype
    assert same(y, expected, **tolerance)
    for x, weight in zip(sums, weights, strict=True):
        assert x.dtype == F32
        assert same(x, weight, atol=max(1e-5, tolerance["atol"]))

    without_sums, none = decode_attention(q, segments, block=16)
    assert torch.equal(without_sums, y)
    assert none == []


def test_slots_are_dealt_out_in_whole_blocks_at_most_4096_to_a_program():
    """On a CPU eight programs are wanted, of all heads together."""
    cpu = torch.device("cpu")
    for n, heads, parts in (
        (0, 1, 1),
        (16, 1, 1),
        (17, 1, 2),
        (1000, 4, 2),
        (4096, 100, 1),
        (4097, 100, 2),
    ):
        share, programs = split(n, 16, heads, cpu)
        assert programs == parts
        assert share in range(0, 4097, 16)
        assert (programs - 1) * share < max(n, 1) <= programs * share


def test_slots_with_a_bias_of_minus_infinity_are_hidden(poisoned):
    """Of one head the first tile is hidden; another is hidden whole, and gives 0."""
    s = segment([40, 20, 5], 16, F32, 6, bias=True)
    q = queries(1, 3, 2, 16, seed=8)
    one, two, three = s.start.tolist()
    hidden = [three + 4, *range(one, one + 17), *range(two, two + 20)]
    s.bias[hidden] = -math.inf
    expected, (weight,) = attended(q, [s])  # NaN in the head that sees nothing
    for block in (16, 64):  # hidden slots fill a tile, or share one with others
        y, (sums,) = decode_attention(q, [s], sums=True, block=block)
        assert same(y, expected.nan_to_num(0), **TOLERANCE[F32])
        assert not y[0, 1].any()
        assert same(sums, weight.nan_to_num(0))
        assert not sums[hidden].any()


def test_slots_in_a_buffer_are_not_copied():
    x = torch.randn(2, 2, 3, 9, 16)[..., :5, :]
    for stored, own in zip(Segment.of(*x), x):
        assert stored.data_ptr() == own.data_ptr()


def test_storage_that_does_not_fit_the_queries_is_refused():
    q = queries(1, 2, 1, 16, seed=0)
    s = segment([3, 4], 16, F32, 0)
    turned = s.k.T.contiguous().T
    narrow = s.v[:, :8].contiguous()
    message = "contiguous rows of the head dim|3 starts"
    for wrong in (
        s._replace(k=turned),
        s._replace(v=narrow),
        segment([3, 4], 32, F32, 0),
        segment([3, 4, 5], 16, F32, 0),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(q, [wrong])
