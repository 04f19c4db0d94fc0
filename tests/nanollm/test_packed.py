"""Packed slots: heads of unlike length hold what padded ones hold, in less memory."""

from copy import deepcopy

import pytest
import torch

from methods.baselines.ada_kv import AdaKV
from nanollm.cache import NEVER, Method, PackedSlots, Slots
from nanollm.packed import keep_highest
from stores import SLOT, draw, fill, positions
from windows import uneven

TABLE = 4 * 8  # bytes that say how many slots each of four heads has
# slots that heads keep; −1: no slot. Head 3 keeps nothing
KEPT = torch.tensor([[[1, 4, 8], [-1, -1, 2]], [[-1, 5, 6], [-1, -1, -1]]])


def padded_and_packed(watch=0):
    """Return the same slots padded and packed; heads keep 3, 1, 2 and no token."""
    method = Method()
    method.watch = watch
    both = Slots(method), PackedSlots(method)
    for layer in both:
        fill(layer, 9)
    both[0].keep(KEPT)
    there = torch.zeros(2, 2, 10).scatter(2, KEPT % 10, 1)
    there = there[..., :9].bool()
    both[1].keep_chosen(there)
    return both


def check_same(padded, packed):
    there = padded.pos != NEVER
    assert torch.equal(packed.pos, padded.pos)  # NEVER where there is nothing
    for name in padded.slots:
        found = packed.slot(name)
        right = padded.slot(name)
        assert torch.equal(found[there], right[there])


@pytest.mark.parametrize("watch", [0, 1, 3])
def test_packed_heads_are_those_of_the_padded_store(watch):
    """Slots, outputs, weights and bytes, when one token comes and when several do."""
    padded, packed = padded_and_packed(watch)
    assert padded.bytes() == (6 * SLOT, 12 * SLOT)
    assert packed.bytes() == (6 * SLOT + TABLE,) * 2
    for T in (1, 3, 1, 20):
        before = deepcopy(packed)
        q, k, v = draw(T, seed=T)
        pos = torch.arange(T) + padded.seen
        found = []
        for layer in (padded, packed):
            layer.write(k, v, pos[None])
            layer.put("v", layer.v / 2)
            found.append(layer.attention(q, pos[None]))
        (expected, weights), (y, p) = found
        assert torch.allclose(y, expected, atol=1e-6)
        assert watch == 0 or torch.allclose(p, weights, atol=1e-6)
        check_same(padded, packed)
        assert packed.length == padded.length
        assert packed.seen == padded.seen
        live, allocated = packed.bytes()
        entries = 6 + 4 * (packed.seen - 9)
        assert live == entries * SLOT + TABLE
        assert live <= allocated <= 1.1 * live
        # a copy is not written to
        assert torch.equal(before.pos, padded.pos[..., :-T])


def test_keep_takes_from_packed_and_later_slots():
    both = padded_and_packed()
    for layer in both:
        fill(layer, 4)
        kept = [[[0, 2, 5], [2, 3, -1]], [[2, 3, 4], [6, -1, -1]]]
        layer.keep(torch.tensor(kept))
        assert positions(layer) == [[[1, 8, 11], [2, 9]], [[6, 9, 10], [12]]]
    check_same(*both)
    assert both[1].bytes() == both[0].bytes()
    assert not both[1].packed


@pytest.mark.parametrize(
    "budget, expected",
    [
        (1, [[[2], [8]], [[4, 8], []]]),
        (2, [[[2], [5, 7, 8]], [[1, 4, 8], [2]]]),
        (9, None),
    ],
)
def test_the_highest_scores_of_all_heads_and_layers_stay_and_no_empty_slot(
    budget, expected
):
    """Of equal scores, here 0, the newest of the last head of the last layer stays first."""
    held = [[[2, 4, 6], [5, 7, 8]], [[1, 4, 8], [2]]]
    # there is no entry where the score is 9
    scores = [[[4, 0, 0], [0, 0, 5]], [[1, 3, 3], [0, 9, 9]]]
    layers = [PackedSlots(), PackedSlots()]
    for layer, (a, b) in zip(layers, held):
        fill(layer, 9, rows=1)
        layer.keep(torch.tensor([[a, b + [-1] * (3 - len(b))]]))
    keep_highest(layers, [torch.tensor([x]).float() for x in scores], budget)
    assert [positions(layer)[0] for layer in layers] == (expected or held)


class Counting(AdaKV):
    entry = {"steps": torch.float32}


def test_numbers_that_change_are_not_packed():
    """Heads of different length stay padded if a method may change a number at each step."""
    layer = uneven(Counting(20, window_size=8, kernel_size=1, floor=0.0), 60)
    assert layer.ragged
    assert not layer.packed
    layer.put("steps", layer.slot("steps") + 1)
    assert (layer.slot("steps") == 1).all()
