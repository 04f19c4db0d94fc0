"""Tensor attention over tiles of pairs: kernel and twin against the formula."""

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
    """The plain code in float64, which test_tensor_attention.py holds against a loop over pairs."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return formula(scale * q.double(), *(x.double() for x in four))


def inputs(B, H, G, D, n, dtype=torch.float32, seed=0, sharp=2.0):
    """q, k₁, k₂, v₁, v₂, each amid NaN."""
    g = torch.Generator().manual_seed(seed)
    q, *four = (torch.randn(B, H, rows, D, generator=g) for rows in (G, n, n, n, n))
    return [amid_nan(x.to(dtype)) for x in (sharp * q, *four)]


CASES = [  # B, H, G, D, n, rows, columns, scale
    (1, 1, 1, 16, 1, 16, 16, 0.0),
    (2, 1, 2, 40, 33, 32, 16, None),
    (1, 2, 3, 80, 17, 16, 32, -0.1),
    (2, 1, 1, 32, 32, 16, 16, 0.2),  # every tile full
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernel_and_twin_are_the_formula(poisoned, case, dtype):
    *sizes, rows, columns, scale = CASES[case]
    x = inputs(*sizes, dtype, case)
    turned = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
    for found, factor in (
        (plain(*x), None),
        (tensor_attention(*turned), None),
        (tensor_attention(*x, scale, rows, columns), scale),
    ):
        y = by_formula(*x, scale=factor)
        assert found.dtype == dtype and found.shape == y.shape
        assert torch.allclose(found.double(), y, **TOLERANCE[dtype])


def test_large_scores_and_any_tiles(poisoned):
    """Scores of hundreds overflow unless the largest is taken off: of a row, of its tile, and of all tiles.

    Their own last bits are 1e-5 and more, and so much are weights off.
    """
    x = inputs(1, 1, 2, 32, 33, sharp=200.0)
    score = torch.einsum(
        "gd,ad,bd->gab", x[0][0, 0], x[1][0, 0], x[2][0, 0]
    ) / math.sqrt(32)
    assert (
        score.max() > 200
        and (score.amax(-1) - score.amax((1, 2)).unsqueeze(1)).min() < -150
    )
    y = by_formula(*x)
    for rows, columns in ((16, 16), (16, 64), (64, 16)):
        found = tensor_attention(*x, rows=rows, columns=columns).double()
        assert torch.allclose(found, y, rtol=2e-4, atol=1e-5), (rows, columns)


def test_more_tiles_of_rows_than_are_added_up_at_once(poisoned):
    x = inputs(1, 1, 1, 16, 515, seed=5)
    # one row has all the weight, and it is in the last tile
    x[1][:, :, -1] = 1000 * x[0][:, :, 0]
    assert torch.allclose(
        tensor_attention(*x, rows=16).double(), by_formula(*x), rtol=1e-3, atol=1e-4
    )


def test_matrices_that_do_not_fit_are_refused():
    q, x = (
        torch.zeros(1, 2, 3, 16, device=DEVICE),
        torch.zeros(1, 2, 5, 16, device=DEVICE),
    )
    for i, wrong in product(
        range(4), (x[:, :1], x[..., :8], x.half(), x.expand(2, -1, -1, -1), x[:, :, :0])
    ):
        with pytest.raises(ValueError, match="heads of at least 1 token, "):
            tensor_attention(q, *(wrong if j == i else x for j in range(4)))
