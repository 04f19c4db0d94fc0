"""Test window scores: the kernels equal the plain code in float64."""

from pytest import importorskip, mark
import torch

from common import DEVICE, TOLERANCE, amid_nan

importorskip("triton")  # Linux only

from kernels import window_scores as scoring
from nanollm import window


@mark.parametrize("dtype", TOLERANCE)
@mark.parametrize(
    "sizes, block, sharp",  # sizes: B, H, G, w, n, D
    [
        ((1, 1, 1, 1, 2, 16), 16, 2),
        ((2, 2, 2, 5, 37, 40), 16, 2),
        ((1, 2, 3, 7, 7, 16), 16, 2),
        # scores whose exp would overflow
        ((1, 1, 2, 4, 100, 16), 16, 100),
        # heads of a group in two tiles, and a tile for each
        ((1, 1, 3, 50, 113, 16), 64, 2),
        ((1, 1, 2, 100, 150, 16), 64, 2),
    ],
)
def test_scores_of_kernels_are_the_plain_codes(poisoned, sizes, block, sharp, dtype):
    B, H, G, w, n, D = sizes
    off = 1e-5 if dtype == torch.float32 else 2e-3
    off = off * max(1, sharp / 10)
    g = torch.Generator().manual_seed(n)
    q = sharp * torch.randn(B, H, G, w, D, generator=g)
    q = q.to(DEVICE, dtype)
    k = torch.randn(B, n, H, D, generator=g)
    k = k.to(DEVICE, dtype)
    k = k.transpose(1, 2)
    # tests/helpers/windows.py compares what the plain code keeps with loops
    rows = window.window_rows(q.double(), k.double())
    expected = rows[..., : n - w].mean(3)
    kernels = scoring.window_scores(
        amid_nan(q),
        amid_nan(k),
        block,
    )
    for score in kernels, window.window_scores(q, k):
        assert score.shape == (B, H, G, n - w)
        assert score.dtype == torch.float32
        score = score.double()
        assert torch.allclose(score, expected, rtol=off, atol=off / 10)
