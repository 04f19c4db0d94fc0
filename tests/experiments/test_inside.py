"""What a decoder is like inside: loops over made-up attention, and weights taken out."""
from copy import deepcopy

import numpy as np
import pytest
import torch

from common import decoder, tasks
from experiments import inside
from experiments.inside import (DISTANCES, found_without, layer, norm_spread, read_at_question, sinks,
                                scores_kept, without_each, without_pairs)
from methods.critical_kv import value_norms
from nanollm import TINY
from nanollm.cache import make_cache
from nanollm.hf import checkpoint
from nanollm.measure.evaluate import exact_match, text_windows
from nanollm.measure.replay import Recorder, record

SIZE, L, HEADS = dict(documents=6, T=150), 2, 4


@pytest.fixture(scope="module")
def shipped():
    return checkpoint.from_hf(TINY)


@pytest.fixture
def small():
    return decoder(vocab_size=2048, n_layers=L, n_heads=HEADS, n_kv_heads=2, max_len=300)


def zeroed(model, heads):
    """A copy whose output projections do not read these heads."""
    model, D = deepcopy(model), model.config.head_dim
    for i, head in heads:
        model.blocks[i].attention.o.weight.data[:, head * D:(head + 1) * D] = 0
    return model


def test_a_head_left_out_is_one_whose_output_nobody_reads(shipped):
    for heads in ([], [(0, 0)], [(1, h) for h in range(4)], layer(shipped, 2, 3)):
        expected = exact_match(zeroed(shipped, heads), tasks("test"), "needle", **SIZE)
        assert found_without(shipped, tasks("test"), heads, **SIZE) == expected
    assert found_without(shipped, tasks("test"), [(1, 0)], **SIZE) > 0.9  # nothing is left behind
    assert found_without(shipped, tasks("test"), layer(shipped, 1), **SIZE) == 0
    few = dict(documents=2, T=100)
    pairs = without_pairs(shipped, tasks("test"), **few)
    assert torch.equal(pairs, pairs.T) and pairs[1].eq(0).all() and pairs[5, 5] == 1
    assert without_each(shipped, tasks("test"), **few)[1, 0] == 1  # three heads of layer 1 retrieve


def maps(monkeypatch, T, texts, seed=0):
    """Made-up attention (texts, L, heads, T, T) in place of a model's."""
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(texts, L, HEADS, T, T, generator=g).square().tril()
    p /= p.sum(-1, keepdim=True)
    left = iter(p)
    monkeypatch.setattr(inside, "attention_maps", lambda model, text: next(left)[:, None])
    return p.numpy()


def test_sinks_are_mean_weights_of_the_second_half(monkeypatch):
    T, texts = 20, 3
    p = maps(monkeypatch, T, texts)
    first, strongest = sinks(None, torch.zeros(texts, T))
    for i in range(L):
        for h in range(HEADS):
            read = [[np.mean([p[b, i, h, q, s] for q in range(10, T)]) for s in range(10)]
                    for b in range(texts)]
            assert first[i, h] == pytest.approx(np.mean([of[0] for of in read]), rel=1e-5)
            assert strongest[i, h] == pytest.approx(np.mean([max(of) for of in read]), rel=1e-5)


def test_window_scores_are_compared_with_those_of_later_windows(monkeypatch):
    T, w, texts = 2 * max(DISTANCES), 8, 2
    half = T // 2
    p = maps(monkeypatch, T, texts)
    kept = scores_kept(None, torch.zeros(texts, T), window=w, share=0.1)

    def top(of_head, end):
        scores = of_head[end - w:end, :half].mean(0)
        return set(np.argsort(-scores)[:round(0.1 * half)].tolist())

    for i in range(L):
        for j, d in enumerate(DISTANCES):
            both = [len(top(p[b, i, h], half) & top(p[b, i, h], half + d)) / round(0.1 * half)
                    for b in range(texts) for h in range(HEADS)]
            assert kept[i, j] == pytest.approx(np.mean(both))
    with pytest.raises(ValueError, match="texts have 200 tokens; they must have at least 256"):
        scores_kept(None, torch.zeros(1, 200))


def test_norms_and_the_question_s_reading_are_those_of_the_caches(small):
    batch = tasks("test").batch("needle", 0, 3, 150)
    tokens, asking = torch.from_numpy(batch.tokens), batch.answers[0].start - 1
    read, spread = read_at_question(small, batch), norm_spread(small, tokens)
    expected_read, expected = torch.zeros(L, HEADS), torch.zeros(L, HEADS)
    with torch.no_grad():
        for row, at in zip(tokens, batch.stated):
            caches = make_cache(small)
            small(row[None], caches)
            for i, cache in enumerate(caches):
                norms = value_norms(cache.v, cache.w_o).flatten(1, 2)[0].numpy()
                low, high = np.quantile(norms, 0.05, axis=1), np.quantile(norms, 0.95, axis=1)
                expected[i] += torch.tensor(high / low) / 3
            for i, (q, k) in enumerate(query_and_keys(small, row, asking)):
                score = (q[:, None] * k).sum(-1) / small.config.head_dim ** 0.5
                expected_read[i] += score.softmax(-1)[:, at] / 3
    assert torch.allclose(spread, expected, rtol=1e-4)
    assert torch.allclose(read, expected_read, atol=1e-5)


def test_the_page_has_each_measurement_under_its_name():
    model = decoder(vocab_size=2048, n_layers=L, n_heads=HEADS, n_kv_heads=2, max_len=600)
    rows = inside.page(model, tasks("test"), documents=2)
    first, strongest = sinks(model, text_windows(tasks("test"), 2, 512, model))
    assert {len(x) for x in rows.values()} == {L}
    first, strongest = first.amax(1).tolist(), strongest.amax(1).tolist()
    assert rows["weight on the first token, strongest head"] == first != strongest
    assert rows["weight on the most read, strongest head"] == strongest


def query_and_keys(model, row, asking):
    """The last query (heads, D) of a prompt and the keys (heads, T, D) it meets, a layer each."""
    caches = make_cache(model, Recorder)
    for part, cache in zip(record(model, caches, row[None, :asking + 1]), caches):
        yield part.q[0, :, -1], cache.k[0].repeat_interleave(2, 0)
