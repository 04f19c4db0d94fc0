"""Attention matching: the two fits, and what attention then gives to the reference queries."""
import pytest
import torch

from common import TOKENS, decoder
from methods.attention_matching import AttentionMatching, fitted, nnls
from methods.kvzip import KVzip
from methods.ours.careful_matching import CarefulMatching
from methods.ours.kvzip_gain import GainKVzip
from nanollm.cache import make_cache
from nanollm.generate import end_prompt, prefill, reread

N, n, D = 60, 20, 8


def head(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, D, generator=g, dtype=torch.float64) for rows in (N, n, n)]


def test_nnls_finds_the_least_squares_among_weights_that_are_not_negative():
    g = torch.Generator().manual_seed(1)
    A, y = torch.rand(30, 6, generator=g, dtype=torch.float64), torch.randn(30, generator=g).double()
    w = nnls(A, y, 3000)
    slope = A.mT @ (A @ w - y)
    assert (w >= 0).all() and (w == 0).any() and (w > 0).any()
    assert (slope[w == 0] > -1e-6).all() and slope[w > 0].abs().max() < 1e-6  # Karush, Kuhn and Tucker


def attended(q, k, v, bias=0):
    return (q @ k.mT * D ** -0.5 + bias).softmax(-1) @ v


def test_the_fits_bring_mass_and_output_back():
    q, k, v = head()
    kept = torch.arange(0, n, 2)
    bias, values = fitted(q, k, v, kept, torch.ones(N), False, 1e-9)
    mass = lambda keys, bias=0: (q @ keys.mT * D ** -0.5 + bias).exp().sum(1)
    lost = lambda x: (x / mass(k) - 1).square().mean()
    assert lost(mass(k[kept], bias)) < 0.3 * lost(mass(k[kept]))
    p = (q @ k[kept].mT * D ** -0.5 + bias).softmax(-1)
    y = attended(q, k, v)
    best = torch.linalg.lstsq(p, y).solution
    assert (p @ values - y).norm() < 1.001 * (p @ best - y).norm() < 0.8 * (p @ v[kept] - y).norm()

    weight = torch.zeros(N)
    weight[7] = 1.0  # a single query counts: its output comes back whole
    bias, values = fitted(q, k, v, kept, weight, False, 1e-9)
    found = attended(q[7:8], k[kept], values, bias)
    assert torch.allclose(found, attended(q[7:8], k, v), atol=1e-4)


def test_a_careful_fit_does_not_answer_for_what_is_gone():
    """Half of the queries look up evicted entries. The others keep their own values."""
    k = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(3)).double())[0] * 12
    v, kept = torch.randn(n, n, generator=torch.Generator().manual_seed(4)).double(), torch.arange(n // 2)
    q = k.repeat(3, 1) * 0.5
    found = {careful: fitted(q, k, v, kept, torch.ones(len(q)), careful, 0.1)[1] for careful in (True, False)}
    change = {careful: (x - v[kept]).abs().max() for careful, x in found.items()}
    assert change[True] < 0.05 < 0.2 < change[False]
    stiff = fitted(q, k, v, kept, torch.ones(len(q)), False, 1e9)[1]
    assert torch.allclose(stiff, v[kept], atol=1e-4)


@pytest.mark.parametrize("Method, Base", [(AttentionMatching, KVzip), (CarefulMatching, GainKVzip)])
@torch.no_grad()
def test_the_entries_are_the_base_methods_with_other_values(Method, Base):
    model, prompt, found = decoder(), TOKENS[:, :30], {}
    for Made in (Method, Base):
        caches = make_cache(model, Made, budget=12)
        prefill(model, prompt, caches)
        end_prompt(model, prompt, caches)
        found[Made] = caches
    for one, other in zip(*found.values()):
        assert torch.equal(one.pos, other.pos) and torch.equal(one.k, other.k)
        assert not torch.equal(one.v, other.v) and one.asked == []
    with pytest.raises(ValueError, match="ridge 0"):
        Method(budget=12, ridge=0)


@torch.no_grad()
def test_with_room_for_everything_nothing_is_fitted():
    model, prompt = decoder(), TOKENS[:, :30]
    caches = make_cache(model, AttentionMatching, budget=40)
    prefill(model, prompt, caches)
    before = [cache.v.clone() for cache in caches]
    end_prompt(model, prompt, caches)
    assert all(torch.equal(cache.v, v) for cache, v in zip(caches, before))


@torch.no_grad()
def test_without_the_rereads_queries_it_fits_nothing_and_says_so():
    model = decoder()
    caches, other = (make_cache(model, AttentionMatching, budget=8) for _ in range(2))
    for each in (caches, other):
        prefill(model, TOKENS[:, :24], each)
    reread(other, lambda part: prefill(model, TOKENS[:, :24][:, part], other))
    for cache, full in zip(caches, other):
        cache.entry_scores, cache.reread_size = full.entry_scores, 0
    with pytest.raises(ValueError, match="no queries to fit to; reread the prompt"):
        end_prompt(model, TOKENS[:, :24], caches)
