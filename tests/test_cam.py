"""CaM against a loop over evicted tokens; who stays is H2O's choice."""
from itertools import product

import pytest
import torch

from common import B, D, G, H, SLOT, feed
from methods.cam import CaM
from methods.h2o import H2O


def text(n):
    q, k, v = (torch.randn(B, n, heads, D, generator=torch.Generator().manual_seed(i)).transpose(1, 2)
               for i, heads in enumerate((H * G, H, H)))
    return q * 2, k, v


def merged(v, attention, stay, coins, m):
    """One head, by token: values of those that stay, once the others, in order, are merged as coins say."""
    mean = sum(attention[j] for j in stay) / len(stay)
    m, given = min(m, len(stay)), dict.fromkeys(stay, 0)
    for i, coin in zip(sorted(v.keys() - given.keys()), coins):
        if coin < attention[i] / mean:
            after = [j for j in stay if j > i][:m]
            for j in after if len(after) == m else stay[-m:]:
                given[j] = given[j] + v[i] / m
    return {j: v[j] + given[j] for j in stay}


class Noting(CaM):
    """Notes what is held, and the attention it has had, before tokens leave; test_methods.py adds it up."""
    def evict(self):
        self.held, self.attention = self.pos.clone(), self.slot("accumulated").clone()
        super().evict()


@pytest.mark.parametrize("recent, targets, chunk", [
    (0.5, 1, 100), (0.5, 4, 7), (0.0, 4, 100), (0.5, 100, 100)])
def test_values_grow_as_in_the_loop_and_h2o_chooses_who_stays(recent, targets, chunk):
    n, budget, later = 30, 9, 6
    qkv = _, k, v = text(n + later)
    cache, h2o = Noting(budget, recent, targets, seed=3), H2O(budget, recent)
    cache.layer, generator = 2, torch.Generator().manual_seed(3002)
    for c in (cache, h2o):
        feed(c, *(x[:, :, :n] for x in qkv), chunk)
    values = [[dict(enumerate(v[b, h, :n])) for h in range(H)] for b in range(B)]
    h2o.end_prefill(), cache.end_prefill()
    assert torch.equal(cache.pos, h2o.pos) and torch.equal(cache.k, h2o.k)

    for t in range(n, n + later + 1):
        coins = torch.rand(B, H, cache.held.shape[2] - budget, generator=generator)
        for b, h in product(range(B), range(H)):
            had = dict(zip(cache.held[b, h].tolist(), cache.attention[b, h].tolist()))
            stay = cache.pos[b, h].tolist()
            values[b][h] = merged(values[b][h], had, stay, coins[b, h].tolist(), targets)
            assert torch.allclose(cache.v[b, h], torch.stack([values[b][h][j] for j in stay]), atol=1e-5)
            assert torch.equal(cache.k[b, h], k[b, h, stay])
        assert cache.length == budget and cache.bytes()[0] == B * H * budget * (SLOT + 4)  # attention
        if t < n + later:
            for b, h in product(range(B), range(H)):
                values[b][h][t] = v[b, h, t]
            feed(cache, *(x[:, :, t:t + 1] for x in qkv), first=t)
