"""ChunkKV: chunks of one token, of all the room, and choices shared by layers."""

from functools import partial

import pytest
import torch

from common import TOKENS, decoder, end
from methods.baselines.snap_kv import SnapKV
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical
from methods.ours.chunk_kv_semantic import SemanticChunks
from nanollm import window
from nanollm.cache import NEVER, Method, crop, make_cache
from windows import GROUPED, Case, compressed, Walk


def kept(Method=ChunkKV, **options):
    """Return the positions that stay of a text of random tokens, [b][h]."""
    walk = Walk(Case(), GROUPED)
    method = Method(budget=20, window_size=8, **options)
    layer = compressed(method, walk.q.flatten(1, 2), walk.k, walk.v)
    return layer.pos.tolist()


@pytest.mark.claim("C1")
@pytest.mark.parametrize("kernel_size", [1, 7])
@pytest.mark.parametrize("score", ["sum", "mean", "max"])
def test_chunks_of_one_token_are_snap_kv(kernel_size, score):
    """With chunks of one token ChunkKV keeps SnapKV's tokens; with two it keeps others."""
    one = kept(kernel_size=kernel_size, select=Chunks(1, score))
    two = kept(kernel_size=kernel_size, select=Chunks(2, score))
    assert one == kept(SnapKV, kernel_size=kernel_size) != two


def test_a_chunk_may_take_all_the_room_and_of_a_longer_one_the_first_tokens_stay():
    assert Chunks().fill
    assert kept(select=Chunks(12)) == kept(select=Chunks(12, fill=False))
    first = kept(select=Chunks(13))[0][0][:12]
    assert [position % 13 for position in first] == [*range(12)]


@pytest.mark.parametrize(
    "make, message",
    [
        (partial(Chunks, 0), "chunk_size 0 must be"),
        (partial(Chunks, score="median"), "score is 'median'; it must be"),
        (
            partial(ChunkKV, 20, 8, reuse=2, select=Critical()),
            "reuse is 2, .* set reuse=1 with Critical",
        ),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@torch.inference_mode()
def reads(Method, start=0, **options):
    """Return the stores of five layers after the prompt, read 11 tokens at a time."""
    model = decoder(n_layers=5)
    layers = make_cache(model, Method, **options)
    pos = torch.arange(start, start + 35)[None]
    for part, place in zip(TOKENS[:, :35].split(11, 1), pos.split(11, 1)):
        model(part, layers, place)
    return layers


class Semantic(ChunkKV):
    """ChunkKV whose chunks end with some tokens."""

    ends = torch.arange(50) % 6 == 0


@pytest.mark.parametrize(
    "reuse, leaders", [(1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4]), (9, [0, 0, 0, 0, 0])]
)
@pytest.mark.parametrize(
    "Kind, select", [(ChunkKV, Chunks(4)), (Semantic, SemanticChunks(5))]
)
@pytest.mark.parametrize("cropped", [0, 1])
@torch.inference_mode()
def test_layers_of_a_group_share_the_lowest_ones_choice(
    reuse, leaders, Kind, select, cropped, monkeypatch
):
    """Each layer keeps the slots that its group's lowest layer chose, with its own keys and values.

    Only the lowest layer keeps queries and computes scores.
    """
    options = dict(budget=14, window_size=5, select=select)
    alone = reads(Kind, **options)
    layers = reads(Kind, **options, reuse=reuse)
    full = reads(Method)
    tokens = TOKENS[:, : 35 - cropped]
    for each in (alone, layers, full):
        crop(each, 35 - cropped)
    end(*alone, tokens=tokens)
    choices = {str(alone[i].pos.tolist()) for i in leaders}
    assert len(choices) == len({*leaders})
    noting = ["window" in layer.notes for layer in layers]
    assert noting == [i == leader for i, leader in enumerate(leaders)]

    calls = []  # the other layers do not compute probabilities
    plain = window.probabilities
    monkeypatch.setattr(
        window, "probabilities", lambda *x: calls.append(x) or plain(*x)
    )
    end(*layers, tokens=tokens)
    assert len(calls) == len({*leaders})

    for layer, leader, memory in zip(layers, leaders, full):
        # both read the same prompt
        assert torch.equal(layer.pos, alone[leader].pos)
        # with semantic chunks heads differ in length
        assert not layer.ragged or layer.packed
        memory.keep(torch.where(layer.pos == NEVER, -1, layer.pos).long())
    model = decoder(n_layers=5)
    for token in TOKENS[:, 35 - cropped :].split(1, 1):
        # each layer has its own keys and values
        assert torch.allclose(model(token, layers), model(token, full), atol=1e-4)


@pytest.mark.parametrize("reuse", [1, 2])
def test_the_first_chunk_begins_with_the_text_wherever_that_begins(reuse):
    options = dict(budget=14, window_size=5, select=Chunks(4), reuse=reuse)
    one = reads(ChunkKV, **options)
    other = reads(ChunkKV, start=9, **options)
    end(*one)
    end(*other)
    for a, b in zip(one, other):
        assert torch.equal(a.pos + 9, b.pos)
