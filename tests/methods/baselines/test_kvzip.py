"""Compare KVzip's reread, its scores and the entries that stay with loops."""

import math

import pytest
import torch

from common import D, G, TOKENS, decoder, highest, kept
from methods.baselines.kvzip import KVzip
from nanollm.cache import NEVER, Method, begin_turn, compress, copied, make_cache
from nanollm.generate import prefill


class Recorder(Method):
    """Keeps each layer's queries of the last call."""

    def observe(self, layer, q, p):
        layer.state["queries"] = q


def reread(
    model,
    tokens,
    caches,
    own,
):
    """Return copies of the caches that reread a piece, and up to 8 tokens before it, at the end."""
    again = copied(caches)
    for layer in again:
        layer.method = Recorder()
    start = max(own.start - 8, 0)
    prefill(model, tokens[:, start : own.stop], again)
    return again


def scores_by_loop(
    model,
    tokens,
    caches,
    size,
):
    """Return KVzip's scores, {(row, layer, head): {position: score}}, of the entries that are held.

    Every token of the reread looks at the first 4 tokens, the piece's entries, and the reread up to
    itself.
    """
    T = tokens.shape[1]
    held = kept(caches)
    score = {key: dict.fromkeys(pos, 0.0) for key, pos in held.items()}
    for start in range(0, T, size):
        own = range(start, min(start + size, T))
        again = reread(model, tokens, caches, own)
        for (b, i, h), pos in held.items():
            layer = again[i]
            q = layer.state["queries"]
            slot = {place: s for s, place in enumerate(layer.pos[b, h].tolist())}
            looked_at = [x for x in pos if x < 4 or x in own]
            for t in range(q.shape[2]):
                seen = [*looked_at, *range(T, T + t + 1)]
                slots = [slot[x] for x in seen]
                keys = layer.k[b, h, slots]
                for g in range(G):
                    p = (keys @ q[b, h * G + g, t] / math.sqrt(D)).softmax(0)
                    for x, weight in zip(seen, p.tolist()):
                        if x in own:
                            before = score[b, i, h][x]
                            score[b, i, h][x] = max(before, weight)
    return score


@pytest.mark.parametrize(
    "recent, sinks, piece",
    [(3, 4, 512), (0, 0, 10), (2, 1, 7)],
)
@torch.no_grad()
def test_scores_and_kept_entries_are_the_loops_over_two_turns(recent, sinks, piece):
    """Also after a conversation's second turn, when heads differ in length."""
    model = decoder(max_len=100)
    options = dict(recent=recent, sinks=sinks, piece=piece)
    caches = make_cache(model, KVzip, budget=10, **options)
    for start, T in ((0, 24), (24, 33)):
        prefill(model, TOKENS[:, start:T], caches)
        expected = scores_by_loop(model, TOKENS[:, :T], caches, piece)
        found = copied(caches)
        scores = found[0].method.scores(model, TOKENS[:, :T], found)
        for (b, i, h), entries in expected.items():
            for pos, x in zip(found[i].pos[b, h].tolist(), scores[i][b, h].tolist()):
                right = 0 if pos == NEVER else pytest.approx(entries[pos], abs=1e-5)
                assert x == right

        compress(model, TOKENS[:, :T], caches)
        assert kept(caches) == highest(expected, 10, sinks, T - recent)
        assert all(layer.seen == T for layer in caches)
        assert any(layer.packed for layer in caches)
        begin_turn(caches)
