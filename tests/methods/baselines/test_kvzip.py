"""Compare KVzip's reread, its scores and the entries that stay with loops."""

import math

import pytest
import torch

from common import B, H, TOKENS, G, D, decoder
from methods.baselines import kvzip
from methods.baselines.kvzip import KVzip
from nanollm.cache import NEVER, begin_turn, compress, copied, make_cache
from nanollm.generate import prefill


def kept(cache):
    """Return the kept positions by row and head."""
    return [
        [sorted(i for i in head if i != NEVER) for head in row]
        for row in cache.pos.tolist()
    ]


def scores_by_loop(model, tokens, caches, size, read_before=8):
    """Return KVzip's scores, {(row, layer, head): {position: score}}, of the entries that the caches hold.

    The decoder reads each piece again behind everything, with the 8 tokens before it. Every token
    of the reread looks at the first 4 tokens, the piece's entries, and the reread up to itself.
    """
    T = tokens.shape[1]
    held = {
        (b, layer, h): [*pos]
        for layer, cache in enumerate(caches)
        for b, row in enumerate(kept(cache))
        for h, pos in enumerate(row)
    }
    score = {key: dict.fromkeys(pos, 0.0) for key, pos in held.items()}
    for start in range(0, T, size):
        again, queries = copied(caches), []
        for cache in again:
            cache.observe = lambda q, p: queries.append(q)
        own = range(start, min(start + size, T))
        prefill(model, tokens[:, max(start - read_before, 0) : own.stop], again)
        for (b, layer, h), pos in held.items():
            cache, q = again[layer], queries[layer]
            slot = {i: s for s, i in enumerate(cache.pos[b, h].tolist())}
            for t in range(q.shape[2]):
                seen = [i for i in pos if i < 4 or i in own] + [*range(T, T + t + 1)]
                keys = cache.k[b, h, [slot[i] for i in seen]]
                for g in range(G):
                    p = (keys @ q[b, h * G + g, t] / math.sqrt(D)).softmax(0)
                    for i, x in zip(seen, p.tolist()):
                        if i in own:
                            score[b, layer, h][i] = max(score[b, layer, h][i], x)
    return score


def highest(score, budget, layers, first=0, newest=math.inf):
    """Return the positions that stay, by key: the highest scores of a row over all layers and heads.

    Positions below `first` and from `newest` on come first.
    """
    stays = {key: [] for key in score}
    for b in range(B):
        every = [
            (math.inf if i < first or i >= newest else x, key, i)
            for key, entries in score.items()
            if key[0] == b
            for i, x in entries.items()
        ]
        for _, key, i in sorted(every, key=lambda x: -x[0])[: budget * layers * H]:
            stays[key].append(i)
    return stays


@pytest.mark.parametrize(
    "recent, sinks, piece", [(0, 0, 512), (3, 4, 512), (0, 0, 10), (2, 1, 7)]
)
@torch.no_grad()
def test_scores_and_kept_entries_are_the_loop_s_over_two_turns(recent, sinks, piece):
    """Scores and kept entries equal the loop's after a prompt, and again after a conversation's
    second turn.

    The softmax covers the first 4 tokens, the piece's entries and the reread. Positions of the
    reread follow the text. In the second turn heads differ in length.
    """
    model, budget = decoder(max_len=100), 10
    caches = make_cache(
        model, KVzip, budget=budget, recent=recent, sinks=sinks, piece=piece
    )
    for start, T in ((0, 24), (24, 33)):
        prefill(model, TOKENS[:, start:T], caches)
        expected = scores_by_loop(model, TOKENS[:, :T], caches, piece)
        found = copied(caches)
        scores = KVzip.scores(model, TOKENS[:, :T], found)
        for (b, layer, h), entries in expected.items():
            for pos, x in zip(
                found[layer].pos[b, h].tolist(), scores[layer][b, h].tolist()
            ):
                assert x == (
                    pytest.approx(entries[pos], abs=1e-5) if pos != NEVER else 0
                )

        compress(model, TOKENS[:, :T], caches)
        stays = highest(expected, budget, 3, sinks, T - recent)
        for layer, cache in enumerate(caches):
            assert cache.seen == T
            assert kept(cache) == [
                [sorted(stays[b, layer, h]) for h in range(H)] for b in range(B)
            ], layer
        assert any(cache.packed for cache in caches)
        begin_turn(caches)


@torch.no_grad()
def test_the_reread_leaves_no_trace_and_follows_the_prompt(monkeypatch):
    """The reread's pieces have the 8 tokens before them, at positions after the prompt; no entry stays."""

    class Recording(kvzip.Reread):
        def attend(self, q, k, v, pos):
            if self.cache.layer == 0:
                read.append(pos[0].tolist())
            return super().attend(q, k, v, pos)

    model, prompt, read = decoder(), TOKENS[:, :25], []
    monkeypatch.setattr(kvzip, "Reread", Recording)
    caches = make_cache(model, KVzip, budget=5, piece=10)
    prefill(model, prompt, caches)
    before = [cache.k.clone() for cache in caches]
    scores = KVzip.scores(model, prompt, caches)
    assert read == [[*range(25, 35)], [*range(25, 43)], [*range(25, 38)]]
    assert all(
        torch.equal(cache.k, k) and cache.seen == 25 for cache, k in zip(caches, before)
    )
    assert all(x.shape == cache.pos.shape for x, cache in zip(scores, caches))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(budget=9, piece=0), "piece 0"),
        (
            dict(budget=12, recent=8, sinks=4),
            "budget 12 must be at least 13: 4 sinks and the newest 8",
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KVzip(**options)
