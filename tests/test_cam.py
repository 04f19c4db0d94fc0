"""CaM against a loop over evicted tokens; who stays is H2O's choice."""
import copy

import pytest
import torch

from methods.cam import CaM
from methods.h2o import H2O
from nanollm.cache import LayerCache, finish_prompt, make_cache
from nanollm.generate import generate
from nanollm.model import Config, Decoder

B, H, G, D = 2, 2, 3, 8
SLOT = 2 * D * 4 + 4 + 4  # key, value, position, accumulated attention


def text(n, seed=0):
    q, k, v = (torch.randn(B, n, heads, D, generator=torch.Generator().manual_seed(seed + i)).transpose(1, 2)
               for i, heads in enumerate((H * G, H, H)))
    return q * 2, k, v


def feed(cache, q, k, v, start, stop, chunk=None):
    pos = torch.arange(start, stop)[None]
    return torch.cat([cache.attend(*x) for x in zip(*(x[:, :, start:stop].split(chunk or stop - start, 2) for x in (q, k, v)),
                                                    pos.split(chunk or stop - start, 1))], 2)


def merged(v, attention, leave, stay, coins, m):
    """Lists of one head: token → value, token → attention; tokens that leave, in order, and stay; their coins in [0, 1)."""
    v, mean = dict(v), sum(attention[j] for j in stay) / len(stay)
    m, given = min(m, len(stay)), {j: 0 for j in stay}
    for i, coin in zip(leave, coins):
        if coin < attention[i] / mean:
            after = [j for j in sorted(stay) if j > i][:m]
            for j in after if len(after) == m else sorted(stay)[-m:]:
                given[j] = given[j] + v[i] / m
    return {j: v[j] + given[j] for j in stay}


@pytest.mark.parametrize("recent", [0.5, 0.0])
@pytest.mark.parametrize("targets", [1, 4, 100])
@pytest.mark.parametrize("chunk", [None, 7])
def test_values_grow_as_in_the_loop_and_h2o_chooses_who_stays(recent, targets, chunk):
    n, budget, more = 30, 9, 6
    q, k, v = text(n + more)
    cache, h2o = CaM(budget, recent, targets, seed=3), H2O(budget, recent)
    cache.layer, generator = 2, torch.Generator().manual_seed(3002)
    for c in (cache, h2o):
        feed(c, q, k, v, 0, n, chunk)
    values = [[{i: v[b, h, i] for i in range(n)} for h in range(H)] for b in range(B)]
    steps = 0
    for stop in range(n, n + more + 1):
        if stop > n:
            steps += 1
            for b in range(B):
                for h in range(H):
                    values[b][h][stop - 1] = v[b, h, stop - 1]
            # what it has had before it forgets: the slots that it holds, and this query's weights
            held, attention = [x.clone() for x in (cache.pos, cache.slot("accumulated"))]
            k_now = torch.cat((cache.k, k[:, :, stop - 1:stop]), 2)
            p = ((q[:, :, stop - 1:stop].view(B, H, G, 1, D) @ k_now.unsqueeze(2).mT) / D ** .5).softmax(-1)
            attention = torch.cat((attention, torch.zeros(B, H, 1)), 2) + p.sum((2, 3))
            held = torch.cat((held, torch.full((B, H, 1), stop - 1)), 2)
            y = feed(cache, q, k, v, stop - 1, stop)
            v_now = torch.stack([torch.stack([torch.stack([values[b][h][j] for j in held[b, h].tolist()]) for h in range(H)]) for b in range(B)])
            assert torch.allclose(y, (p @ v_now.unsqueeze(2)).flatten(1, 2), atol=1e-5)
        else:
            held, attention = cache.pos.clone(), cache.slot("accumulated").clone()
            h2o.finish_prompt(), cache.finish_prompt()
            assert torch.equal(cache.pos, h2o.pos) and torch.equal(cache.k, h2o.k) and not torch.allclose(cache.v, h2o.v)
        coins = torch.rand(B, H, held.shape[2] - budget, generator=generator)
        assert cache.length == budget
        for b in range(B):
            for h in range(H):
                stay = cache.pos[b, h].tolist()
                leave = [i for i in held[b, h].tolist() if i not in stay]
                values[b][h] = merged(values[b][h], dict(zip(held[b, h].tolist(), attention[b, h].tolist())), leave, stay,
                                      coins[b, h].tolist(), targets)
                assert torch.allclose(cache.v[b, h], torch.stack([values[b][h][j] for j in stay]), atol=1e-5)
                assert torch.equal(cache.k[b, h], k[b, h, stay])
    assert steps == more


def test_the_coin_falls_as_often_as_attention_says():
    """One token leaves; its attention is 0.3 of the mean of the others, and all values are 1 or 0."""
    runs = 20_000
    cache = CaM(4, recent=0.5, targets=2)
    x = torch.zeros(runs, 1, 5, 1)
    x[:, :, 0] = 1
    cache.write(x, x, torch.arange(5)[None])
    cache.slot("accumulated").copy_(torch.tensor([0.3, 1, 1, 1, 1]))
    cache.forget()
    assert (cache.pos == torch.arange(1, 5)).all()
    got = cache.v[:, 0, :, 0]
    assert torch.equal(got.unique(), torch.tensor([0, 0.5])) and (got[:, 2:] == 0).all() and torch.equal(got[:, 0], got[:, 1])
    assert abs((got[:, 0] > 0).double().mean() - 0.3) < 4 * (0.21 / runs) ** 0.5


def test_nothing_is_merged_while_nothing_leaves_and_all_of_it_if_attention_is_above_the_mean():
    q, k, v = text(9)
    cache, full = CaM(9), LayerCache()
    assert torch.allclose(feed(cache, q, k, v, 0, 9), feed(full, q, k, v, 0, 9), atol=1e-5)
    cache.finish_prompt()
    assert torch.equal(cache.v, v)
    cache.budget = 5
    cache.slot("accumulated").fill_(1)  # equal: every coin says yes; the oldest leave
    cache.forget()
    assert torch.allclose(cache.v.sum(2), v.sum(2), atol=1e-5) and torch.equal(cache.pos[0, 0], torch.arange(4, 9).int())


def test_live_slots_and_bytes_stay_within_the_budget_and_a_seed_tells_the_text():
    torch.manual_seed(0)
    model = Decoder(Config(vocab_size=30, max_len=80, n_layers=3, n_heads=6, n_kv_heads=2, d_model=48, d_ff=48)).eval()
    for p in model.parameters():
        p.data.mul_(4)
    tokens = torch.randint(30, (2, 40), generator=torch.Generator().manual_seed(0))
    texts = []
    for seed in (0, 0, 1):
        caches = make_cache(model, CaM, budget=11, seed=seed)
        texts.append(generate(model, tokens, 20, caches, chunk=16))
        assert all(cache.length == 11 and cache.bytes()[0] == 2 * 2 * 11 * SLOT for cache in caches)
    assert torch.equal(texts[0], texts[1])
    caches = make_cache(model, CaM, budget=11)
    with torch.no_grad():
        model(tokens, caches)
        finish_prompt(caches)
        twin = copy.deepcopy(caches)
        assert torch.equal(model(tokens[:, :1], caches), model(tokens[:, :1], twin))
    firsts = [torch.rand(3, generator=copy.deepcopy(cache.generator)) for cache in caches]
    assert not torch.equal(firsts[0], firsts[1])  # layers toss coins of their own


@pytest.mark.parametrize("knobs, message", [
    (dict(budget=1), "budget 1 must be at least 2"), (dict(budget=5, recent=1.1), "recent 1.1"),
    (dict(budget=5, targets=0), "targets 0 at least 1")])
def test_bad_knobs_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        CaM(**knobs)
