"""Slots: what is written is read, what is evicted is gone, attention is exact on the rest."""

import pytest
import torch

from common import alone, dense, end
from methods.baselines.rounded import RoundedSlots
from nanollm.cache import (
    ALL,
    NEVER,
    Method,
    PackedSlots,
    Slots,
    begin_turn,
    evict_while_reading,
)
from stores import SLOT, fill, positions, sees


class Watching(Method):
    """Notes how many queries it was shown at a time."""

    watch = ALL

    def __init__(self):
        self.shown = []

    def observe(self, layer, q, p):
        self.shown.append(p.shape[3])


@pytest.mark.parametrize("decoding", [False, True])
def test_a_long_prompt_is_watched_in_tiles_and_a_long_question_whole(decoding):
    """A question's tokens come in one piece, after which the method may evict."""
    layer = alone(Watching())
    if decoding:
        evict_while_reading([layer])
    q, k, v, y = fill(layer, 300)
    causal = torch.ones(300, 300).tril().bool()
    assert torch.allclose(y, dense(q, k, v, causal[None, None]), atol=1e-5)
    pieces = [300] if decoding else [64, 64, 64, 64, 44]
    assert layer.method.shown == pieces


def test_growth_keeps_slack_small_and_does_not_copy_at_every_token():
    layer = Slots()
    places = set()
    for T in [100] + [1] * 400:
        fill(layer, T)
        places.add(layer.slots["k"].data_ptr())
    live, allocated = layer.bytes()
    assert live == 4 * 500 * SLOT
    assert live <= allocated <= live * 1.1 + 1
    assert len(places) < 20


class Numbered(Method):
    entry = {"score": torch.float32}


# slots that heads keep; −1: no slot
EVEN = [[[1, 4, 8], [0, 2, 3]], [[5, 6, 7], [2, 4, 6]]]
UNEVEN = [[[1, 4, 8], [2, -1, -1]], [[5, 6, -1], [2, 4, 6]]]
ALL_OR_NONE = [[[*range(9)], [2] + [-1] * 8], [[-1] * 9, [5, 6] + [-1] * 7]]


@pytest.mark.parametrize("kept", [EVEN, UNEVEN, ALL_OR_NONE])
@pytest.mark.parametrize("T", [1, 4])
def test_keep_moves_every_slot_and_attention_sees_what_is_left(kept, T):
    layer = Slots(Numbered())
    kept = torch.tensor(kept)
    n = kept.shape[2]
    there = kept >= 0
    _, k0, v0, _ = fill(layer, 9)
    layer.put("score", layer.pos * 10.0)
    _, allocated = layer.bytes()
    layer.keep(kept)
    assert torch.equal(layer.pos, kept.where(there, NEVER).int())
    assert torch.equal(layer.slot("score")[there], kept[there] * 10.0)
    i = kept.clamp(min=0)[..., None]
    i = i.expand(2, 2, n, 8)
    for x, old in ((layer.k, k0), (layer.v, v0)):
        right = old.gather(2, i)
        assert torch.equal(x[there], right[there])
    assert layer.length == n
    assert layer.seen == 9
    assert layer.ragged == (not there.all())
    # given back, not masked
    assert layer.bytes() == (there.sum() * (SLOT + 4), allocated * n // 9)

    held = positions(layer)
    visible = sees(held, 9, T)
    q, k, v, y = fill(layer, T, seed=5)
    keys = torch.cat((k0, k), 2)
    values = torch.cat((v0, v), 2)
    expected = dense(q, keys, values, visible)
    assert torch.allclose(y, expected, atol=1e-5)
    # absolute positions go on
    new = layer.pos[..., -T:]
    assert (new == torch.arange(9, 9 + T)).all()


# each text holds its newest token, in some head
ALIKE = [[[1, 4, 8], [8, 0, 3]], [[8, 7, 6], [2, 4, 6]]]
UNLIKE = [[[1, 4, 8], [2, -1, -1]], [[5, 8, -1], [6, 7, -1]]]
each_store = pytest.mark.parametrize("store", [Slots, PackedSlots, RoundedSlots])


@each_store
@pytest.mark.parametrize("kept", [None, ALIKE, UNLIKE])
@pytest.mark.parametrize(
    "new, n", [(0, 9), (0, 8), (0, 6), (2, 11), (2, 10), (2, 7), (2, 0)]
)
def test_crop_forgets_the_newest_tokens(store, kept, new, n):
    """Entries of tokens before n are left; new ones come as if the others had not been there."""
    layer = alone(store=store)
    fill(layer, 9)
    if kept is not None:
        there = torch.zeros(2, 2, 10).scatter(2, torch.tensor(kept) % 10, 1)
        layer.keep_chosen(there[..., :9].bool())
    end(layer)
    if new:
        fill(layer, new, seed=1)
    held = []
    for row in positions(layer):
        left = [[i for i in head if i < n] for head in row]
        held.append(left)
    if n < layer.seen:
        with pytest.raises(ValueError, match="call crop before compress"):
            layer.crop(n)
    begin_turn([layer])
    layer.crop(n)
    assert positions(layer) == held
    assert layer.length == max(len(head) for row in held for head in row)

    old_k = layer.k
    old_v = layer.v
    q, k, v, y = fill(layer, 3, seed=2)
    new = torch.arange(n, n + 3)
    assert (layer.pos[..., -3:] == new).all()
    visible = layer.pos[:, :, None] <= new[:, None]
    keys = torch.cat((old_k, k), 2)
    values = torch.cat((old_v, v), 2)
    expected = dense(q, keys, values, visible)
    assert torch.allclose(y, expected, atol=1e-5)


def test_numbers_of_new_entries_are_0_also_where_another_entry_was():
    layer = Slots(Numbered())
    fill(layer, 9)
    fill(layer, 1)  # now there is room for one more
    layer.put("score", torch.ones(2, 2, 10))
    # leaves a stale 1 behind the last slot
    layer.drop(torch.zeros(2, 2, 1, dtype=torch.long))
    fill(layer, 1)  # into its place
    fill(layer, 2)
    assert layer.slot("score")[0, 0].tolist() == [1] * 9 + [0] * 3


@each_store
def test_a_misspelt_name_and_numbers_of_another_shape_are_refused(store):
    layer = alone(Numbered(), store=store)
    fill(layer, 9)
    with pytest.raises(KeyError, match="scroe"):
        layer.slot("scroe")
    with pytest.raises(KeyError, match="scroe"):
        layer.put("scroe", torch.zeros(2, 2, 9))
    with pytest.raises(ValueError, match=r"score \(2, 2, 8\) must be \(2, 2, 9\)"):
        layer.put("score", torch.zeros(2, 2, 8))


@pytest.mark.parametrize("budget", [2, 3])
def test_shrinking_ragged_heads_drops_empty_slots_first(budget):
    layer = Slots()
    fill(layer, 9)
    kept = [[[1, 4, 6, 8], [2, 3, -1, -1]], [[0, 5, 7, -1], [2, 4, 6, 8]]]
    layer.keep(torch.tensor(kept))
    before = positions(layer)
    layer.shrink(layer.pos.float(), budget)
    for found, row in zip(positions(layer), before):
        assert found == [head[-budget:] for head in row]
