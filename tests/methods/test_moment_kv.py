"""MomentKV: the moments are those of what was evicted, and attention adds what they say."""
import math

import pytest
import torch

from common import B, D, G, H, decoder
from methods.h2o import H2O
from methods.moment_kv import MomentKV
from nanollm.cache import make_cache

T, PROMPT, BUDGET = 40, 24, 16


def text(seed=0, spread=1.0):
    """Return q, k, v; spread: how much the keys differ from their mean."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H))
    return q, k.mean(2, keepdim=True) + spread * k, v


def walk(q, k, v, Method=MomentKV, budget=BUDGET):
    """Feed a prompt, then tokens one by one; return the cache and the outputs of these tokens."""
    cache = make_cache(decoder(), Method, budget=budget)[0]
    cache.attend(*(x[:, :, :PROMPT] for x in (q, k, v)), torch.arange(PROMPT)[None])
    cache.end_prefill()
    return cache, [(cache.pos.clone(), cache.attend(*(x[:, :, t:t + 1] for x in (q, k, v)),
                                                    torch.tensor([[t]]))) for t in range(PROMPT, T)]


def test_the_moments_are_those_of_the_evicted_entries():
    q, k, v = text()
    cache, _ = walk(q, k, v)
    assert cache.length == BUDGET - cache.taken and cache.evicted == T - cache.length
    for b in range(B):
        for h in range(H):
            gone = [t for t in range(T) if t not in cache.pos[b, h].tolist()]
            keys, values = k[b, h, gone], v[b, h, gone]
            C = torch.cov(torch.cat((values, keys), 1).T, correction=0)[:D, D:]
            for name, expected in (("k", keys.mean(0)), ("v", values.mean(0)), ("C", C)):
                assert torch.allclose(cache.moments[name][b, h], expected, atol=1e-5), name


def test_attention_is_the_first_order_sum_over_the_evicted():
    q, k, v = text()
    _, steps = walk(q, k, v)
    for t, (kept, y) in zip(range(PROMPT, T), steps):
        for b in range(B):
            for head in range(H * G):
                h, query = head // G, q[b, head, t] * D ** -0.5
                held = [*kept[b, h].tolist(), t]
                gone = [i for i in range(t) if i not in held]
                mass = [math.exp(query @ k[b, h, i]) for i in held]
                total = sum(m * v[b, h, i] for m, i in zip(mass, held))
                keys, values = k[b, h, gone], v[b, h, gone]
                first_order = sum(values + (keys - keys.mean(0)) @ query[:, None] * (values - values.mean(0)))
                lost = math.exp(query @ keys.mean(0))
                expected = (total + lost * first_order) / (sum(mass) + lost * len(gone))
                assert torch.allclose(y[b, head, 0], expected, atol=1e-4)


def test_if_evicted_keys_are_alike_nearly_nothing_is_lost():
    def lost(Method, spread):
        q, k, v = text(1, spread)
        full, few = walk(q, k, v, Method, 10 * T)[1], walk(q, k, v, Method)[1]
        return max((a - b).abs().max().item() for (_, a), (_, b) in zip(full, few))

    assert lost(MomentKV, 0.0) < 1e-5 and lost(H2O, 0.0) > 0.1
    small, large = lost(MomentKV, 0.02), lost(MomentKV, 0.2)
    assert small < large / 30  # the error is of second order


def test_the_budget_counts_the_moments():
    q, k, v = text()
    cache, _ = walk(q, k, v)
    entry, heads = 2 * D * 4 + 4, B * H
    taken = sum(x.numel() for x in cache.moments.values()) * 4
    live, _ = cache.bytes()
    scores = 4 * cache.length * heads
    assert live == cache.length * entry * heads + taken + scores and live - scores <= BUDGET * entry * heads
    with pytest.raises(ValueError, match="the moments take the bytes of 5 entries"):
        make_cache(decoder(), MomentKV, budget=6)
