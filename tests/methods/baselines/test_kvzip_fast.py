"""Check Fast KVzip: the gates' inputs and training, and that the highest scores stay."""

import pytest
import torch

from common import SLOT, TOKENS, H, decoder, end, highest, kept, tasks
from methods.baselines.kvzip import KVzip
from methods.baselines.kvzip_fast import FastKVzip, fit, lessons
from nanollm.cache import crop, make_cache
from nanollm.generate import prefill, prefill_evicting

L = 3
N = (6 + 2 + 2) * 8  # numbers of a token's queries, keys and values
GATES = torch.randn(L, N + 1, H, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def projections(model, tokens):
    """Return queries, keys and values before rotation, from the weights: (L, B, T, n)."""
    found = []

    def note(module, inputs, output):
        found.append(output)

    hooks = [x.attention.qkv.register_forward_hook(note) for x in model.blocks]
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
    model = decoder(family=family)
    budget = 9
    n = 40 - cropped
    options = dict(gates=GATES, recent=recent, sinks=sinks)
    caches = make_cache(model, FastKVzip, budget=budget, **options)
    prefill(model, TOKENS, caches, chunk)
    live, _ = caches[0].bytes()
    assert live == 2 * H * 40 * (SLOT + 4)  # with a score of each entry
    crop(caches, n)
    end(*caches)  # no reread
    x = projections(model, TOKENS)
    score = x @ GATES[:, None, :-1] + GATES[:, None, -1:]  # (L, B, T, H)
    expected = {}
    for key in kept(caches):
        b, i, h = key
        expected[key] = dict(enumerate(score[i, b, :n, h].tolist()))
    assert kept(caches) == highest(expected, budget, sinks, n - recent)


@torch.no_grad()
def test_a_large_bias_hides_no_score_in_16_bits():
    model = decoder().bfloat16()
    found = []
    for bias in 0, 300:
        gates = GATES.clone()
        gates[:, -1] += bias
        caches = make_cache(model, FastKVzip, budget=15, gates=gates)
        prefill(model, TOKENS, caches)
        end(*caches)
        found.append(kept(caches))
    assert found[0] == found[1]


@torch.no_grad()
def test_evicting_while_reading_keeps_what_has_the_highest_scores_so_far():
    model = decoder()
    options = dict(budget=9, gates=GATES, recent=3, sinks=2)
    caches = make_cache(model, FastKVzip, **options)
    prefill_evicting(model, TOKENS, caches, piece=8)
    end(*caches)
    by_hand = make_cache(model, FastKVzip, **options)
    for stop in range(8, 41, 8):
        prefill(model, TOKENS[:, stop - 8 : stop], by_hand)
        scores = {}
        for head, there in kept(by_hand).items():
            b, i, h = head
            mine = by_hand[i].notes["score"][b, h].tolist()
            scores[head] = {t: mine[t] for t in there}
        by_hand[0].method.compress(model, TOKENS[:, :stop], by_hand)
        assert kept(by_hand) == highest(scores, 9, 2, stop - 3)
    assert kept(caches) == kept(by_hand)


@torch.no_grad()
def test_lessons_are_projections_and_kvzips_scores():
    model = decoder(vocab_size=2048, max_len=130)
    batch = tasks("test").batch("plain", 3, 3, 61)
    # T becomes (130 − 8)/2 = 61
    x, y = lessons(model, tasks("test"), 3, 512, 3, rows=2)
    tokens = torch.from_numpy(batch.tokens)
    inputs = projections(model, tokens).flatten(1, 2)
    torch.testing.assert_close(x, inputs, rtol=1e-4, atol=1e-4)
    caches = make_cache(model, KVzip, budget=60)
    prefill(model, tokens, caches)
    scores = caches[0].method.scores(model, tokens, caches)
    expected = torch.stack(scores).mT.flatten(1, 2)  # (L, B · T, H)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_gates_learn_the_chance_of_a_score():
    """If a logistic regression made the scores, `fit` finds it; torch's random state stays."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2000, 5, generator=g) * 3 + 1
    W = torch.randn(2, 5, 3, generator=g) / 3
    y = torch.sigmoid(x @ W - 0.5)
    state = torch.get_rng_state()
    gates = fit(x, y, steps=300, rate=0.03, rows=128)
    assert torch.equal(torch.get_rng_state(), state)
    assert not gates.requires_grad
    torch.testing.assert_close(gates[:, :-1], W, atol=0.05, rtol=0)
    torch.testing.assert_close(gates[:, -1], torch.full((2, 3), -0.5), atol=0.1, rtol=0)
    assert torch.equal(fit(x, y, steps=5), fit(x, y, steps=5))


def test_no_gates_and_those_of_another_decoder_are_refused():
    model = decoder()
    with pytest.raises(ValueError, match="FastKVzip needs gates; give"):
        make_cache(model, FastKVzip, budget=13)
    with pytest.raises(ValueError, match="gates contain NaN"):
        make_cache(model, FastKVzip, budget=13, gates=GATES / 0)
    message = r"gates .* must be \(3, 81, 2\) for this decoder; use"
    for gates in (GATES[:2], GATES[:, 1:], GATES[..., :1]):
        with pytest.raises(ValueError, match=message):
            model(TOKENS, make_cache(model, FastKVzip, budget=13, gates=gates))
