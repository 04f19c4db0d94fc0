"""Attention of one new token over heads of different length: kernel and twin against a loop, in float64.

test_kernels.py holds them against caches, packed ones too.
"""

import math

import pytest
import torch

from common import DEVICE, TOLERANCE, attended, segment

pytest.importorskip("triton")  # Linux only

from kernels.decode_attention import Segment, decode_attention, plain
from kernels.launch import split

CASES = [  # B, H, G, D, counts of the B·H heads, of a second segment, biased, tile
    (1, 1, 1, 16, [1], None, False, 16),
    (1, 1, 4, 128, [130], None, True, 16),  # 9 tiles in several parts
    (2, 2, 2, 64, [0, 1, 33, 32], None, False, 32),
    # a head dim and a group that are no powers of 2
    (3, 1, 3, 40, [5, 0, 33], [2, 2, 2], True, 16),
    (1, 2, 4, 80, [17, 0], [1, 0], False, 16),  # a head with nothing at all
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernel_and_twin_are_the_loop(poisoned, case, dtype):
    B, H, G, D, counts, more, biased, block = CASES[case]
    segments = [segment(counts, D, dtype, case, biased)]
    segments += [segment(more, D, dtype, 50 + case)] if more else []
    q = torch.randn(B, H, G, D, generator=torch.Generator().manual_seed(99 + case)).to(
        DEVICE, dtype
    )
    y, weights = attended(q, segments)
    for found, sums in (
        plain(q, segments, sums=True),
        decode_attention(q, segments, sums=True, block=block),
    ):
        assert found.dtype == dtype and torch.allclose(
            found.double(), y, **TOLERANCE[dtype]
        )
        assert len(sums) == len(segments)
        for mine, expected in zip(sums, weights):
            assert mine.dtype == torch.float32
            atol = max(1e-5, TOLERANCE[dtype]["atol"])
            assert torch.allclose(mine.double(), expected, rtol=1e-4, atol=atol)
    alone, none = decode_attention(q, segments, block=block)
    assert torch.equal(alone, found) and none == [] == plain(q, segments)[1]


def test_slots_are_dealt_out_in_whole_blocks_at_most_4096_to_a_program():
    """Eight programs at a time are wanted on a CPU."""
    for n, heads, parts in (
        (0, 1, 1),
        (16, 1, 1),
        (17, 1, 2),
        (1000, 1, 8),
        (1000, 4, 2),
        (1000, 100, 1),
        (4096, 100, 1),
        (4097, 100, 2),
        (100_000, 100, 25),
    ):
        share, programs = split(n, 16, heads, torch.device("cpu"))
        assert programs == parts and share % 16 == 0 and share <= 4096
        assert (programs - 1) * share < max(n, 1) <= programs * share


def test_many_parts_are_added_up_as_one(poisoned):
    """One head alone: its slots are split among programs. Large scores would overflow."""
    s = segment([700], 32, torch.float32, 3)
    q = 100 * torch.randn(1, 1, 2, 32, generator=torch.Generator().manual_seed(4)).to(
        DEVICE
    )
    y, (weight,) = attended(q, [s])
    assert (q[0, 0] @ s.k[1:701].T / math.sqrt(32)).max() > 89
    for block in 16, 256:
        found, (sums,) = decode_attention(q, [s], sums=True, block=block)
        assert torch.allclose(found.double(), y, rtol=1e-4, atol=1e-5)
        assert (
            torch.allclose(sums.double(), weight, atol=1e-5)
            and abs(sums.sum().item() - 2) < 1e-4
        )


def test_slots_with_a_bias_of_minus_infinity_are_hidden(poisoned):
    """The first tile of one head, and all slots of another, which gives 0 as if it had none."""
    s = segment([40, 20, 5], 16, torch.float32, 6, bias=True)
    q = torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    one, two, three = s.start.tolist()
    hidden = [*range(one, one + 17), *range(two, two + 20), three + 4]
    s.bias[hidden] = -math.inf
    count = torch.tensor([23, 0, 4], dtype=torch.int32)
    left = s._replace(start=torch.tensor([one + 17, two, three]), count=count)
    y, (weight,) = attended(q, [left])
    for block in (16, 64):  # in a part of its own, or in one with others
        found, (sums,) = decode_attention(q, [s], sums=True, block=block)
        assert (
            torch.allclose(found.double(), y, **TOLERANCE[torch.float32])
            and not found[0, 1].any()
        )
        assert (
            torch.allclose(sums.double(), weight, rtol=1e-4, atol=1e-5)
            and not sums[hidden].any()
        )


def test_slots_in_a_buffer_are_not_copied():
    k, v = torch.randn(2, 2, 3, 9, 16)[..., :5, :]
    s = Segment.of(k, v)
    assert s.k.data_ptr() == k.data_ptr() and s.v.data_ptr() == v.data_ptr()


def test_storage_that_does_not_fit_the_queries_is_refused():
    s, q = (
        segment([3, 4], 16, torch.float32, 0),
        torch.zeros(1, 2, 1, 16, device=DEVICE),
    )
    turned, narrow = (
        s._replace(k=s.k.T.contiguous().T),
        s._replace(v=s.v[:, :8].contiguous()),
    )
    wide, three = (
        segment([3, 4], 32, torch.float32, 0),
        segment([3, 4, 5], 16, torch.float32, 0),
    )
    for wrong in turned, narrow, wide, three:
        with pytest.raises(
            ValueError,
            match="must be contiguous rows of the head dim|3 starts and 3 counts",
        ):
            decode_attention(q, [wrong])
