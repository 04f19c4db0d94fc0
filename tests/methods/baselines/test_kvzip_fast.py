"""Check Fast KVzip: the gates' inputs and training, and that the entries they score highest stay."""

import math

import pytest
import torch

from common import TOKENS, decoder, end, tasks
from methods.baselines.kvzip import KVzip
from methods.baselines.kvzip_fast import FastKVzip, fit, lessons
from nanollm.cache import crop, make_cache
from nanollm.generate import prefill

L, H, D, N = 3, 2, 8, (6 + 2 + 2) * 8
GATES = torch.randn(L, N + 1, H, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def projections(model, tokens):
    """Return each layer's queries, keys and values before rotation, computed from its weights: (B,
    T, n)."""
    found = []
    hooks = [
        block.attention.qkv.register_forward_hook(
            lambda module, of, out: found.append(out)
        )
        for block in model.blocks
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("recent, sinks", [(0, 0), (3, 4)])
@pytest.mark.parametrize("cropped", [0, 1])
@torch.no_grad()
def test_sinks_the_newest_and_what_the_gates_rank_highest_stay(
    family, chunk, recent, sinks, cropped
):
    model, budget, n = decoder(family=family), 9, 40 - cropped
    x = projections(model, TOKENS)
    caches = make_cache(
        model, FastKVzip, budget=budget, gates=GATES, recent=recent, sinks=sinks
    )
    prefill(model, TOKENS, caches, chunk)
    crop(caches, n)
    end(*caches)  # no reread
    for b in range(2):
        score = {
            (layer, h, i): (
                x[layer, b, i] @ GATES[layer, :-1, h] + GATES[layer, -1, h]
            ).item()
            for layer in range(L)
            for h in range(H)
            for i in range(n)
        }
        score |= {key: math.inf for key in score if not sinks <= key[2] < n - recent}
        best = {*sorted(score, key=score.get)[-budget * L * H :]}
        kept = {
            (layer, h, i)
            for layer, cache in enumerate(caches)
            for h in range(H)
            for i in cache.pos[b, h].tolist()
            if i < n
        }
        assert kept == best


@torch.no_grad()
def test_lessons_are_projections_and_kvzips_scores():
    model, batch = (
        decoder(vocab_size=2048, max_len=130),
        tasks("test").batch("plain", 3, 3, 61),
    )
    # T becomes (130 − 8)/2 = 61
    x, y = lessons(model, tasks("test"), 3, 512, 3, rows=2)
    tokens = torch.from_numpy(batch.tokens)
    torch.testing.assert_close(
        x, projections(model, tokens).flatten(1, 2), rtol=1e-4, atol=1e-4
    )
    caches = make_cache(model, KVzip, budget=60)
    prefill(model, tokens, caches)
    # (L, B · T, H)
    expected = torch.stack(KVzip.scores(model, tokens, caches)).mT.flatten(1, 2)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_gates_learn_the_chance_of_a_score():
    """If a logistic regression made the scores, `fit` finds it, without changing torch's random state."""
    g = torch.Generator().manual_seed(1)
    x, W = (
        torch.randn(2, 2000, 5, generator=g) * 3 + 1,
        torch.randn(2, 5, 3, generator=g) / 3,
    )
    y = torch.sigmoid(x @ W - 0.5)
    state = torch.get_rng_state()
    gates = fit(x, y, steps=300, rate=0.03, rows=128)
    assert torch.equal(torch.get_rng_state(), state) and not gates.requires_grad
    torch.testing.assert_close(gates[:, :-1], W, atol=0.05, rtol=0)
    torch.testing.assert_close(gates[:, -1], torch.full((2, 3), -0.5), atol=0.1, rtol=0)
    assert torch.equal(fit(x, y, steps=5), fit(x, y, steps=5))


@torch.no_grad()
def test_without_gates_the_newest_stay_and_gates_of_another_decoder_are_refused():
    """Without gates the newest entries and the sinks stay; gates of a wrong shape raise ValueError."""
    model = decoder()
    caches = make_cache(model, FastKVzip, budget=13)
    prefill(model, TOKENS, caches, 7)
    end(*caches)
    kept = torch.tensor([*range(4), *range(31, 40)])  # four sinks and the newest nine
    assert all(cache.pos.sort(-1).values.eq(kept).all() for cache in caches)
    for gates in (GATES[:2], GATES[:, 1:], GATES[..., :1]):
        with pytest.raises(
            ValueError, match=r"gates .* must be \(3, 81, 2\) for this decoder; use"
        ):
            model(TOKENS, make_cache(model, FastKVzip, budget=13, gates=gates))
