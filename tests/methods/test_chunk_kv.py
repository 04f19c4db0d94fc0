"""Compare ChunkKV's chunks, scores and choices with loops; check choices shared by layers."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from common import TOKENS, decoder, end
from methods.baselines.ada_kv import AdaKV
from methods.baselines.snap_kv import SnapKV
from methods.chunk_kv import ChunkKV, Chunks, ChunksCode
from methods.ours.chunk_kv_semantic import SemanticChunkKV, SemanticChunks
from methods.ours.residual import Residual
from nanollm import window
from nanollm.cache import NEVER, LayerCache, crop, make_cache
from nanollm.generate import tell_chunk_ends
from windows import (
    AGAIN,
    GROUPED,
    PROMPTS,
    TIED,
    Case,
    by_chunk,
    by_head,
    check_walk,
    compressed,
    name_of,
    walk,
)


def chunks(select):
    """Return a function of a prompt: `select` with chunks no longer than the prompt's room."""

    def made(prompt):
        if isinstance(select, Residual):
            return replace(select, inner=chunks(select.inner)(prompt))
        return replace(
            select,
            chunk_size=min(select.chunk_size, prompt.budget - prompt.window_size),
        )

    return made


at_ends = partial(by_chunk, semantic=True)
CASES = {
    "chunk": Case(ChunkKV, {}, Chunks(5), choose=by_chunk),
    "longer than the room": Case(ChunkKV, {}, Chunks(30), choose=by_chunk),
    "whole": Case(ChunkKV, {}, chunks(Chunks(5, fill=False)), choose=by_chunk),
    "mean": Case(ChunkKV, {}, Chunks(4, "mean"), choose=by_chunk),
    "max": Case(ChunkKV, {}, chunks(Chunks(2, "max")), choose=by_chunk),
    "code": Case(
        ChunkKV, {}, chunks(ChunksCode(4)), choose=partial(by_chunk, together=True)
    ),
    "semantic": Case(SemanticChunkKV, {}, chunks(SemanticChunks(6)), choose=at_ends),
    "on ada": Case(AdaKV, dict(floor=0.1), Chunks(5), by_head, by_chunk),
    "whole on ada": Case(
        AdaKV, dict(floor=0.1), chunks(Chunks(3, fill=False)), by_head, by_chunk
    ),
    "semantic, cut": Case(
        SemanticChunkKV, {}, chunks(SemanticChunks(6, fill=True)), choose=at_ends
    ),
    "semantic on ada": Case(
        AdaKV, {}, chunks(SemanticChunks(20, "sum")), by_head, at_ends
    ),
    "residual": Case(
        ChunkKV, {}, chunks(Residual(Chunks(2), entries=2)), choose=by_chunk
    ),
}
WALKS = [
    *product(CASES, [GROUPED, TIED, AGAIN]),
    *product(["chunk", "whole", "semantic on ada"], PROMPTS),
]


@pytest.mark.parametrize("case, prompt", WALKS, ids=name_of)
def test_slots_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


def kept(Method=ChunkKV, ends=None, **options):
    cache = Method(budget=20, window_size=8, **options)
    if ends is not None:
        tell_chunk_ends([cache], ends)
    return compressed(cache, *walk(Case(SnapKV), GROUPED).raw).pos.tolist()


@pytest.mark.claim("C1")
@pytest.mark.parametrize("kernel_size", [1, 7])
@pytest.mark.parametrize("score", ["sum", "mean", "max"])
def test_chunks_of_one_token_are_snap_kv(kernel_size, score):
    """With chunks of one token ChunkKV keeps SnapKV's tokens; with two it keeps others."""
    one, two = (kept(kernel_size=kernel_size, select=Chunks(n, score)) for n in (1, 2))
    assert one == kept(SnapKV, kernel_size=kernel_size) != two


def test_a_chunk_may_take_all_the_room_and_of_a_longer_one_the_first_tokens_stay():
    assert Chunks().fill and not ChunksCode().fill and not SemanticChunks().fill
    assert kept(select=Chunks(12)) == kept(select=Chunks(12, fill=False))
    assert [position % 13 for position in kept(select=Chunks(13))[0][0][:12]] == [
        *range(12)
    ]
    ends = torch.zeros(2, 59, dtype=torch.bool)
    assert kept(select=SemanticChunks(32), ends=ends) == kept(
        select=Chunks(12, "mean", fill=False)
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Chunks(0), "chunk 0 must be"),
        (lambda: Chunks(score="median"), "score is 'median'; it must be"),
        (
            lambda: ChunkKV(20, 8, reuse=2, select=Residual(Chunks())),
            "reuse is 2, .* set reuse=1 with Residual",
        ),
        (
            lambda: kept(SemanticChunkKV, torch.zeros(2, 58) > 0),
            "known for 58 .*tell_chunk_ends",
        ),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@torch.inference_mode()
def reads(Method, start=0, **options):
    """Return the caches of five layers after the prompt, read 11 tokens at a time."""
    model = decoder(n_layers=5)
    caches, pos = (
        make_cache(model, Method, **options),
        torch.arange(start, start + 35)[None],
    )
    tell_chunk_ends(caches, TOKENS[:, :35] % 6 == 0)
    for part, at in zip(TOKENS[:, :35].split(11, 1), pos.split(11, 1)):
        model(part, caches, at)
    return caches


@pytest.mark.parametrize(
    "reuse, leaders", [(1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4]), (9, [0, 0, 0, 0, 0])]
)
@pytest.mark.parametrize(
    "select", [Chunks(4), SemanticChunks(5)], ids=["grid", "semantic"]
)
@pytest.mark.parametrize("cropped", [0, 1])
@torch.inference_mode()
def test_layers_of_a_group_share_the_lowest_ones_choice(
    reuse, leaders, select, cropped, monkeypatch
):
    """Each layer keeps the slots that its group's lowest layer chose, with its own keys and values.

    Only the lowest layer keeps queries and computes scores.
    """
    options = dict(budget=14, window_size=5, select=select)
    alone, caches, full = (
        reads(ChunkKV, **options),
        reads(ChunkKV, **options, reuse=reuse),
        reads(LayerCache),
    )
    for each in (alone, caches, full):
        crop(each, 35 - cropped)
    end(*alone)
    assert len({str(alone[layer].pos.tolist()) for layer in {*leaders}}) == len(
        {*leaders}
    )
    assert [cache.queries is not None for cache in caches] == [
        i == layer for i, layer in enumerate(leaders)
    ]

    calls, plain = [], window.probabilities  # the other layers do not call it
    monkeypatch.setattr(
        window, "probabilities", lambda *x: calls.append(x) or plain(*x)
    )
    end(*caches)
    assert len(calls) == len({*leaders})

    for layer, (cache, memory) in enumerate(zip(caches, full)):
        # both read the same prompt
        assert torch.equal(cache.pos, alone[leaders[layer]].pos)
        # with semantic chunks heads differ in length
        assert not cache.ragged or cache.packed
        memory.keep(torch.where(cache.pos == NEVER, -1, cache.pos).long())
    model = decoder(n_layers=5)
    for t in range(35 - cropped, 40):  # each layer has its own keys and values
        assert torch.allclose(
            model(TOKENS[:, t : t + 1], caches),
            model(TOKENS[:, t : t + 1], full),
            atol=1e-4,
        )


@pytest.mark.parametrize("reuse", [1, 2])
def test_the_first_chunk_begins_with_the_text_wherever_that_begins(reuse):
    one, other = (
        reads(ChunkKV, start, budget=14, window_size=5, select=Chunks(4), reuse=reuse)
        for start in (0, 9)
    )
    end(*one)
    end(*other)
    assert all(torch.equal(a.pos + 9, b.pos) for a, b in zip(one, other))
