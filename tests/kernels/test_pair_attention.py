"""Test tensor attention over tiles of pairs: kernel and plain twin equal the formula."""

from itertools import product
import math

import pytest
import torch

from common import DEVICE, TOLERANCE, amid_nan

pytest.importorskip("triton")  # Linux only

from kernels.pair_attention import plain, tensor_attention
from methods.tensor_attention import tensor_attention as formula

# At 16 bits k₁ ∘ q and the weights are rounded too, in float16 each to 1 in 4096: a score of 8 is
# off by up to 2e-3, and so is y.


def by_formula(q, *four, scale=None):
    """Return what the plain code returns in float64.

    test_tensor_attention.py compares it with a loop over pairs.
    """
    if scale is None:
        scale = q.shape[3] ** -0.5
    return formula(*(x.double() for x in (scale * q.double(), *four)))


def same(y, expected, rtol, atol):
    return torch.allclose(y.double(), expected, rtol=rtol, atol=atol)


def inputs(
    B,
    H,
    G,
    D,
    n,
    dtype=torch.float32,
    seed=0,
    sharp=2.0,
):
    """Return q, k₁, k₂, v₁, v₂, each amid NaN."""
    g = torch.Generator().manual_seed(seed)
    q = sharp * torch.randn(B, H, G, D, generator=g)
    four = torch.randn(4, B, H, n, D, generator=g)
    return [amid_nan(x.to(dtype)) for x in (q, *four)]


CASES = [  # (B, H, G, D, n), (rows, columns), scale
    ((1, 1, 1, 16, 1), (16, 16), 0.0),
    ((2, 1, 2, 40, 33), (32, 16), None),
    ((1, 2, 3, 80, 17), (16, 32), -0.1),
    ((2, 1, 1, 32, 32), (16, 16), 0.2),  # every tile full
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernel_and_twin_are_the_formula(poisoned, case, dtype):
    sizes, (rows, columns), scale = CASES[case]
    x = inputs(*sizes, dtype, case)
    # the same numbers, stored row by row for all heads
    turned = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
    by_default = by_formula(*x)
    for y, expected in (
        (plain(*x), by_default),
        (tensor_attention(*turned), by_default),
        (
            tensor_attention(*x, scale, rows, columns),
            by_formula(*x, scale=scale),
        ),
    ):
        assert y.dtype == dtype
        assert y.shape == expected.shape
        assert same(y, expected, **TOLERANCE[dtype])


def test_large_scores_and_any_tiles(poisoned):
    """Scores of hundreds overflow unless the largest is taken off.

    It is taken off a row, its tile, and all tiles. The scores' own last bits are 1e-5 and more, and
    so much are weights off.
    """
    x = inputs(1, 1, 2, 32, 33, sharp=200.0)
    q, k1, k2 = (y[0, 0] for y in x[:3])
    score = torch.einsum("gd,ad,bd->gab", q, k1, k2) / math.sqrt(32)
    assert score.max() > 200
    of_heads = score.amax((1, 2))
    assert (score.amax(-1).T - of_heads).min() < -150

    expected = by_formula(*x)
    for rows, columns in (16, 16), (16, 64), (64, 16):
        y = tensor_attention(*x, rows=rows, columns=columns)
        assert same(y, expected, 2e-4, 1e-5), (rows, columns)


def test_more_tiles_of_rows_than_are_added_up_at_once(poisoned):
    x = inputs(1, 1, 1, 16, 515, seed=5)
    # one row has all the weight, and it is in the last tile
    q, k1, *_ = x
    k1[:, :, -1] = 1000 * q[:, :, 0]
    y = tensor_attention(*x, rows=16)
    assert same(y, by_formula(*x), 1e-3, 1e-4)


def test_matrices_that_do_not_fit_are_refused():
    q = torch.zeros(1, 2, 3, 16, device=DEVICE)
    x = torch.zeros(1, 2, 5, 16, device=DEVICE)
    unfit = (
        x[:, :1],
        x[..., :8],
        x.half(),
        x.expand(2, -1, -1, -1),
        x[:, :, :0],
    )
    for i, wrong in product(range(4), unfit):
        four = [x] * i + [wrong] + [x] * (3 - i)
        with pytest.raises(ValueError, match="heads of at least 1 token, "):
            tensor_attention(q, *four)
