"""Compare ChunkKV's chunks, scores and choices with loops; check indices shared by layers."""
from dataclasses import replace
from functools import partial
from itertools import product
import math

import pytest
import torch

from common import TOKENS, chunks_of, decoder
from methods.ada_kv import AdaKV
from methods.chunk_kv import ChunkKV, Chunks, ChunksCode
from methods.ours.chunk_kv_semantic import SemanticChunkKV, SemanticChunks
from methods.ours.residual import Residual
from methods.snap_kv import SnapKV
from methods.theory.chunk_bounds import LaterGroups
from nanollm import window
from nanollm.cache import NEVER, LayerCache, end_prefill, make_cache
from nanollm.generate import tell_chunk_ends
from windows import (GROUPED, PROMPTS, TIED, Case, by_head, check_walk, compress, live, mean, name_of, pool,
                     walk)


def by_chunk(A, norms, out, b, kernel_size, heads, chunk_size, score, fill, ends, semantic=False,
             together=False, **_):
    """Take chunks by their scores: those that fit whole, or with `fill` all, cut to b tokens."""
    scores = mean([pool(mean(a)[:out], kernel_size) for a in (heads if together else [A])])
    of = {"sum": math.fsum, "mean": lambda x: math.fsum(x) / len(x), "max": max}[score]
    kept, chunks = [], chunks_of(out, chunk_size, range(out), ends if semantic else ())
    for part in sorted(chunks, key=lambda part: (-of([scores[i] for i in part]), -part[0])):
        if fill or len(kept) + len(part) <= b:
            kept += part
    return kept[:b]


def chunks(select):
    """Return a function of a prompt: `select` with chunks no longer than the prompt's room."""
    def made(prompt):
        if isinstance(select, Residual):
            return replace(select, inner=chunks(select.inner)(prompt))
        return replace(select, chunk_size=min(select.chunk_size, prompt.budget - prompt.window_size))
    return made


at_ends = partial(by_chunk, semantic=True)
CASES = {
    "chunk": Case(ChunkKV, {}, Chunks(5), choose=by_chunk),
    "longer than the room": Case(ChunkKV, {}, Chunks(30), choose=by_chunk),
    "whole": Case(ChunkKV, {}, chunks(Chunks(5, fill=False)), choose=by_chunk),
    "mean": Case(ChunkKV, {}, Chunks(4, "mean"), choose=by_chunk),
    "max": Case(ChunkKV, {}, chunks(Chunks(2, "max")), choose=by_chunk),
    "code": Case(ChunkKV, {}, chunks(ChunksCode(4)), choose=partial(by_chunk, together=True)),
    "semantic": Case(SemanticChunkKV, {}, chunks(SemanticChunks(6)), choose=at_ends),
    "on ada": Case(AdaKV, dict(floor=0.1), Chunks(5), by_head, by_chunk),
    "whole on ada": Case(AdaKV, dict(floor=0.1), chunks(Chunks(3, fill=False)), by_head, by_chunk),
    "semantic, cut": Case(SemanticChunkKV, {}, chunks(SemanticChunks(6, fill=True)), choose=at_ends),
    "semantic on ada": Case(AdaKV, {}, chunks(SemanticChunks(20, "sum")), by_head, at_ends),
    "residual": Case(ChunkKV, {}, chunks(Residual(Chunks(2), entries=2)), choose=by_chunk),
}
WALKS = [*product(CASES, [GROUPED, TIED]), *product(["chunk", "whole", "semantic on ada"], PROMPTS[2:])]


@pytest.mark.parametrize("case, prompt", WALKS, ids=lambda x: x if isinstance(x, str) else name_of(x))
def test_slots_and_bytes_equal_the_loops(case, prompt):
    """A head keeps exactly the loop's tokens, and `bytes` counts them."""
    check_walk(CASES[case], prompt)


def kept(Method=ChunkKV, ends=None, **options):
    cache = Method(budget=20, window_size=8, **options)
    if ends is not None:
        tell_chunk_ends([cache], ends)
    return compress(cache, *walk(Case(SnapKV), GROUPED).raw).pos.tolist()


@pytest.mark.claim("C1")
@pytest.mark.parametrize("kernel_size", [1, 7])
@pytest.mark.parametrize("score", ["sum", "mean", "max"])
def test_chunks_of_one_token_are_snap_kv(kernel_size, score):
    """With chunks of one token ChunkKV keeps SnapKV's tokens; with two it keeps others."""
    one, two = (kept(kernel_size=kernel_size, select=Chunks(n, score)) for n in (1, 2))
    assert one == kept(SnapKV, kernel_size=kernel_size) != two


def test_a_chunk_may_take_all_the_room_and_of_a_longer_one_the_first_tokens_stay():
    """A chunk may fill the whole budget; a longer one is cut to its first tokens."""
    assert Chunks().fill and not ChunksCode().fill and not SemanticChunks().fill
    assert kept(select=Chunks(12)) == kept(select=Chunks(12, fill=False))
    assert [position % 13 for position in kept(select=Chunks(13))[0][0][:12]] == [*range(12)]
    ends = torch.zeros(2, 59, dtype=torch.bool)
    assert kept(select=SemanticChunks(32), ends=ends) == kept(select=Chunks(12, "mean", fill=False))


@pytest.mark.parametrize("make, message", [
    (lambda: Chunks(0), "chunk 0 must be a whole number of at least 1"),
    (lambda: Chunks(score="median"), "score is 'median'; it must be 'sum', 'mean' or 'max'"),
    (lambda: ChunkKV(20, 8, reuse=0), "reuse 0 must be"), (lambda: LaterGroups(20, 8, first=-1), "first -1"),
    (lambda: AdaKV(20, 8, select=Chunks(13, fill=False)), "no room for a chunk of 13 .* to 21, or set"),
    (lambda: Chunks(fill=1), "fill 1 of Chunks must be True or False"),
    (lambda: ChunkKV(20, 8, reuse=2, select=Residual(Chunks())), "reuse is 2, .* set reuse=1 with Residual"),
    (lambda: tell_chunk_ends([], torch.zeros(1, 9)), "ends .1, 9. of torch.float32 must be .B, T. of bool"),
    (lambda: kept(SemanticChunkKV), "chunk ends are known for 0 of the prompt's 59 tokens"),
    (lambda: kept(SemanticChunkKV, torch.zeros(2, 58) > 0), "known for 58 .*tell_chunk_ends"),
])
def test_bad_options_are_refused(make, message):
    """A wrong option raises ValueError."""
    with pytest.raises(ValueError, match=message):
        make()


ENDS, ROOM = TOKENS[:, :35] % 6 == 0, dict(budget=14, window_size=5)


@torch.inference_mode()
def reads(Method, start=0, **options):
    """Return the caches of five layers after the prompt, read 11 tokens at a time."""
    model = decoder(n_layers=5)
    caches, pos = make_cache(model, Method, **options), torch.arange(start, start + 35)[None]
    tell_chunk_ends(caches, ENDS)
    for part, at in zip(TOKENS[:, :35].split(11, 1), pos.split(11, 1)):
        model(part, caches, at)
    return caches


@pytest.mark.parametrize("reuse, first, leaders", [
    (1, 2, [0, 1, 2, 3, 4]), (2, 0, [0, 0, 2, 2, 4]), (2, 1, [0, 1, 1, 3, 3]), (9, 0, [0, 0, 0, 0, 0])])
@pytest.mark.parametrize("select", [Chunks(4), SemanticChunks(5)], ids=["grid", "semantic"])
@torch.inference_mode()
def test_layers_of_a_group_take_the_lowest_ones_indices(reuse, first, leaders, select, monkeypatch):
    """A layer that follows keeps its group's indices, with its own keys and values, and computes no scores.
    """
    selects = [leader == layer for layer, leader in enumerate(leaders)]
    options = ROOM | dict(select=select)
    Method = partial(LaterGroups, first=first) if first else ChunkKV
    alone, caches, full = reads(ChunkKV, **options), reads(Method, **options, reuse=reuse), reads(LayerCache)
    end_prefill(alone)
    assert len({str(alone[layer].pos.tolist()) for layer in {*leaders}}) == len({*leaders})
    assert [cache.queries is not None for cache in caches] == selects

    calls, plain = [], window.probabilities  # layers that follow do not call it
    monkeypatch.setattr(window, "probabilities", lambda *x: calls.append(x) or plain(*x))
    end_prefill(caches)
    assert len(calls) == sum(selects)

    for layer, (cache, memory) in enumerate(zip(caches, full)):
        assert torch.equal(cache.pos, alone[leaders[layer]].pos)  # both read the same prompt
        assert bool(cache.packed) == isinstance(select, SemanticChunks)  # then heads differ in length
        memory.keep(torch.where(cache.pos == NEVER, -1, cache.pos).long())
    model = decoder(n_layers=5)
    for t in range(35, 40):  # each layer has its own keys and values
        assert torch.allclose(model(TOKENS[:, t:t + 1], caches), model(TOKENS[:, t:t + 1], full), atol=1e-4)


def test_the_first_chunk_begins_with_the_text_wherever_that_begins():
    """The first chunk begins with the text, also if the text begins at a later position."""
    one, other = (reads(ChunkKV, start=start, select=Chunks(4), **ROOM) for start in (0, 9))
    for caches in one, other:
        end_prefill(caches)
    assert all(torch.equal(a.pos + 9, b.pos) for a, b in zip(one, other))


def test_a_text_may_begin_anywhere_for_layers_that_follow():
    """Layers that follow work for a text at any position, and refuse to compress before their leader."""
    caches = reads(ChunkKV, start=9, select=Chunks(4), reuse=2, **ROOM)
    with pytest.raises(ValueError, match="layer 1 uses the indices of layer 0, which has not compressed yet"):
        caches[1].end_prefill()
    k = caches[1].k
    end_prefill(caches)
    for b, h in product(range(2), range(2)):
        pos, keys, *_ = live(caches[1], b, h)
        assert torch.equal(pos, live(caches[0], b, h).pos) and torch.equal(keys, k[b, h, pos.long() - 9])
