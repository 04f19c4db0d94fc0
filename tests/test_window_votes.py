"""The window's votes: the kernels and their twin against a loop in float64, and against what WindowCache votes with."""
from itertools import product
import math

import pytest
import torch

from conftest import DEVICE

pytest.importorskip("triton")  # Linux only

from kernels.window_votes import plain, window_votes  # noqa: E402
from nanollm.cache import WindowCache  # noqa: E402
from test_decode_attention import TOLERANCE  # noqa: E402
from test_revive_attention import amid_nan  # noqa: E402


def by_hand(q, k):
    (B, H, G, w, D), n, q, k = q.shape, k.shape[2], q.cpu(), k.cpu()
    votes = torch.zeros(B, H, G, n - w, dtype=torch.float64)
    for b, h, g, t in product(range(B), range(H), range(G), range(w)):
        score = (k[b, h, :n - w + t + 1].double() @ q[b, h, g, t].double()) / math.sqrt(D)
        votes[b, h, g] += score.softmax(0)[:n - w] / w
    return votes.to(DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("B, H, G, w, n, D, block", [
    (1, 1, 1, 1, 2, 16, 16), (3, 2, 2, 8, 65, 64, 32), (1, 1, 1, 32, 63, 128, 16), (2, 1, 4, 5, 40, 40, 16), (1, 2, 3, 7, 7, 16, 16),
    (1, 1, 1, 20, 130, 16, 16),
    (1, 2, 3, 50, 113, 16, 64), (1, 1, 2, 100, 150, 16, 64)])  # heads of a group in two tiles, and a tile for each
def test_kernels_and_twin_are_the_loop(poisoned, B, H, G, w, n, D, block, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    g = torch.Generator().manual_seed(n)
    q = 2 * torch.randn(B, H, G, w, D, generator=g).to(DEVICE, dtype)
    k = torch.randn(B, n, H, D, generator=g).to(DEVICE, dtype).transpose(1, 2)
    for found in plain(q, k), window_votes(amid_nan(q), amid_nan(k), block):
        assert found.shape == (B, H, G, n - w) and found.dtype == torch.float32
        assert torch.allclose(found.double(), by_hand(q, k), rtol=tolerance, atol=tolerance / 10)


def test_large_scores_do_not_overflow():
    g = torch.Generator().manual_seed(0)
    q, k = 100 * torch.randn(1, 1, 2, 4, 16, generator=g).to(DEVICE), torch.randn(1, 1, 100, 16, generator=g).to(DEVICE)
    assert torch.allclose(window_votes(q, k, 16).double(), by_hand(q, k), rtol=1e-3, atol=1e-5)


def test_a_window_cache_would_vote_the_same():
    class Votes(WindowCache):
        def select(self, votes, budget):
            self.votes = votes
            return super().select(votes, budget)

    B, H, G, n, D, w, g = 2, 2, 3, 50, 16, 6, torch.Generator().manual_seed(1)
    q, k, v = torch.randn(B, H * G, n, D, generator=g).to(DEVICE), *torch.randn(2, B, H, n, D, generator=g).to(DEVICE)
    cache = Votes(budget=20, window=w)
    cache.attend(q, k, v, torch.arange(n, device=DEVICE)[None])
    cache.finish_prompt()
    assert torch.allclose(window_votes(q[:, :, -w:].unflatten(1, (H, G)), k), cache.votes, rtol=1e-5, atol=1e-7)


def test_a_window_that_does_not_fit_a_tile_is_refused():
    with pytest.raises(ValueError, match="129 queries is more than the 128"):
        window_votes(torch.zeros(1, 1, 1, 129, 16, device=DEVICE), torch.zeros(1, 1, 200, 16))


def test_keys_that_do_not_fit_the_queries_are_refused():
    q = torch.zeros(1, 2, 1, 4, 16, device=DEVICE)
    for k in torch.zeros(1, 2, 3, 16), torch.zeros(1, 1, 8, 16), torch.zeros(1, 2, 8, 32), torch.zeros(1, 2, 8, 16).half():
        with pytest.raises(ValueError, match="heads of at least 4 keys of 16 numbers"):
            window_votes(q, k)
