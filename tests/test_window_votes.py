"""The window's votes: the kernels, their twin and WindowCache's own against a loop in float64."""
from itertools import product
import math

import pytest
import torch

from common import DEVICE, TOLERANCE, amid_nan

pytest.importorskip("triton")  # Linux only

from kernels.window_votes import plain, window_votes
from nanollm import window


def by_hand(q, k):
    (B, H, G, w, D), n, q, k = q.shape, k.shape[2], q.cpu(), k.cpu()
    votes = torch.zeros(B, H, G, n - w, dtype=torch.float64)
    for b, h, g, t in product(range(B), range(H), range(G), range(w)):
        score = (k[b, h, :n - w + t + 1].double() @ q[b, h, g, t].double()) / math.sqrt(D)
        votes[b, h, g] += score.softmax(0)[:n - w] / w
    return votes.to(DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("B, H, G, w, n, D, block", [
    (1, 1, 1, 1, 2, 16, 16), (2, 2, 2, 5, 37, 40, 16), (1, 2, 3, 7, 7, 16, 16), (1, 1, 1, 20, 130, 16, 16),
    # heads of a group in two tiles, and a tile for each
    (1, 1, 3, 50, 113, 16, 64), (1, 1, 2, 100, 150, 16, 64)])
def test_kernels_and_twin_are_the_loop(poisoned, B, H, G, w, n, D, block, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    g = torch.Generator().manual_seed(n)
    q = 2 * torch.randn(B, H, G, w, D, generator=g).to(DEVICE, dtype)
    k = torch.randn(B, n, H, D, generator=g).to(DEVICE, dtype).transpose(1, 2)
    expected = by_hand(q, k)
    for found in plain(q, k), window_votes(amid_nan(q), amid_nan(k), block), window.window_votes(q, k):
        assert found.shape == (B, H, G, n - w) and found.dtype == torch.float32
        assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance / 10)


def test_large_scores_do_not_overflow():
    g = torch.Generator().manual_seed(0)
    q = 100 * torch.randn(1, 1, 2, 4, 16, generator=g).to(DEVICE)
    k = torch.randn(1, 1, 100, 16, generator=g).to(DEVICE)
    assert torch.allclose(window_votes(q, k, 16).double(), by_hand(q, k), rtol=1e-3, atol=1e-5)


def test_what_does_not_fit_a_tile_or_the_queries_is_refused():
    with pytest.raises(ValueError, match="129 queries is more than the 128"):
        window_votes(torch.zeros(1, 1, 1, 129, 16, device=DEVICE), torch.zeros(1, 1, 200, 16))
    q = torch.zeros(1, 2, 1, 4, 16, device=DEVICE)
    wrong = [torch.zeros(1, *shape) for shape in ((2, 3, 16), (1, 8, 16), (2, 8, 32))]
    for k in *wrong, torch.zeros(1, 2, 8, 16).half():
        with pytest.raises(ValueError, match="heads of at least 4 keys of 16 numbers"):
            window_votes(q, k)
