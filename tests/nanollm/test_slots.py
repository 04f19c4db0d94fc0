"""Plain slots: what is written is read, what is evicted is gone, attention is exact on the rest."""

from hypothesis import given, settings, strategies as st
import pytest
import torch

from common import alone, dense, end
from nanollm.cache import (
    ALL,
    NEVER,
    Method,
    PackedSlots,
    Slots,
    begin_turn,
    evict_while_reading,
)
from nanollm.rounded import RoundedSlots
from stores import SLOT, fill, positions, sees


class Watching(Method):
    """Notes how many queries it was shown at a time."""

    watch = ALL

    def __init__(self):
        self.shown = []

    def observe(
        self,
        layer,
        q,
        p,
    ):
        self.shown.append(p.shape[3])


@pytest.mark.parametrize(
    "decoding, tiles",
    [(False, [64, 64, 64, 64, 44]), (True, [300])],
)
def test_a_long_prompt_is_watched_in_tiles_and_a_long_question_whole(decoding, tiles):
    """The question may evict once."""
    layer = alone(Watching())
    if decoding:
        evict_while_reading([layer])
    q, k, v, y = fill(layer, 300)
    assert torch.allclose(y, dense(q, k, v, sees([], 0, 300)), atol=1e-5)
    assert layer.method.shown == tiles


def test_growth_keeps_slack_small_and_does_not_copy_at_every_token():
    layer = Slots()
    moved = 0
    before = None
    for T in [100] + [1] * 400:
        fill(layer, T, seed=layer.seen)
        moved += layer.slots["k"].data_ptr() != before
        before = layer.slots["k"].data_ptr()
    live, allocated = layer.bytes()
    assert live == 4 * 500 * SLOT
    assert live <= allocated <= live * 1.1 + 1
    assert moved < 20


# slots that heads keep; −1: no slot
EVEN = [[[1, 4, 8], [0, 2, 3]], [[5, 6, 7], [2, 4, 6]]]
UNEVEN = [[[1, 4, 8], [2, -1, -1]], [[5, 6, -1], [2, 4, 6]]]
ALL_OR_NONE = [
    [[*range(9)], [2] + [-1] * 8],
    [[-1] * 9, [5, 6] + [-1] * 7],
]


class Numbered(Method):
    entry = {"score": torch.float32}


@pytest.mark.parametrize("kept", [EVEN, UNEVEN, ALL_OR_NONE])
@pytest.mark.parametrize("T", [1, 4])
def test_keep_moves_every_slot_and_attention_sees_what_is_left(kept, T):
    layer = Slots(Numbered())
    kept = torch.tensor(kept)
    n = kept.shape[2]
    there = kept >= 0
    _, k0, v0, _ = fill(layer, 9)
    layer.put("score", layer.pos * 10.0)
    full = layer.bytes()
    layer.keep(kept)
    assert torch.equal(layer.pos, kept.where(there, NEVER).int())
    assert layer.ragged == (not there.all())
    assert torch.equal(layer.slot("score")[there], kept[there] * 10.0)
    i = kept.clamp(min=0)[..., None].expand(2, 2, n, 8)
    assert torch.equal(layer.k[there], k0.gather(2, i)[there])
    assert torch.equal(layer.v[there], v0.gather(2, i)[there])
    assert (layer.length, layer.seen) == (n, 9)
    live, allocated = layer.bytes()
    assert allocated == full[1] * n // 9  # given back, not masked
    assert live == there.sum() * (SLOT + 4)

    held = positions(layer)
    q, k, v, y = fill(layer, T, seed=5)
    keys = torch.cat((k0, k), 2)
    values = torch.cat((v0, v), 2)
    assert torch.allclose(y, dense(q, keys, values, sees(held, 9, T)), atol=1e-5)
    # absolute positions go on
    assert (layer.pos[..., -T:] == torch.arange(9, 9 + T)).all()


# each text holds its newest token, in some head
ALIKE = [[[1, 4, 8], [8, 0, 3]], [[8, 7, 6], [2, 4, 6]]]
UNLIKE = [[[1, 4, 8], [2, -1, -1]], [[5, 8, -1], [6, 7, -1]]]


@pytest.mark.parametrize("store", [Slots, PackedSlots, RoundedSlots])
@pytest.mark.parametrize("kept", [None, ALIKE, UNLIKE])
@pytest.mark.parametrize(
    "new, n",
    [(0, 9), (0, 8), (0, 6), (2, 11), (2, 10), (2, 7), (2, 0)],
)
def test_crop_forgets_the_newest_tokens(
    store,
    kept,
    new,
    n,
):
    """Entries of tokens before n are left, and new ones come as if no others had been there."""
    layer = alone(store=store)
    fill(layer, 9)
    if kept is not None:
        there = torch.zeros(2, 2, 10).scatter(2, torch.tensor(kept) % 10, 1)
        layer.keep_chosen(there[..., :9].bool())
    end(layer)
    if new:
        fill(layer, new, seed=1)
    held = [[[i for i in head if i < n] for head in row] for row in positions(layer)]
    if n < layer.seen:
        with pytest.raises(ValueError, match="call crop before compress"):
            layer.crop(n)
    begin_turn([layer])
    layer.crop(n)
    assert positions(layer) == held
    assert layer.seen == n
    assert layer.length == max(len(head) for row in held for head in row)

    k0, v0 = layer.k, layer.v
    visible = (layer.pos != NEVER)[:, :, None].repeat(1, 1, 3, 1)
    causal = torch.ones(2, 2, 3, 3).tril().bool()
    q, k, v, y = fill(layer, 3, seed=2)
    keys = torch.cat((k0, k), 2)
    values = torch.cat((v0, v), 2)
    expected = dense(q, keys, values, torch.cat((visible, causal), 3))
    assert torch.allclose(y, expected, atol=1e-5)
    assert (layer.pos[..., -3:] == torch.arange(n, n + 3)).all()


def test_numbers_of_new_entries_are_0_also_where_another_entry_was():
    layer = Slots(Numbered())
    fill(layer, 9)
    fill(layer, 1)  # now there is room for one more
    layer.put("score", torch.ones(2, 2, 10))
    # leaves a stale 1 behind the last slot
    layer.drop(torch.zeros(2, 2, 1, dtype=torch.long))
    fill(layer, 1)  # into its place
    assert layer.slot("score")[0, 0].tolist() == [1] * 9 + [0]
    fill(layer, 2)
    layer.add_bias()
    layer.put("bias", torch.ones(2, 2, 12))
    fill(layer, 1)
    assert layer.slot("score")[0, 0].tolist() == [1] * 9 + [0] * 4
    assert layer.slot("bias")[0, 0].tolist() == [1] * 12 + [0]


@pytest.mark.parametrize("store", [Slots, PackedSlots, RoundedSlots])
def test_a_misspelt_name_and_numbers_of_another_shape_are_refused(
    store,
):
    layer = alone(Numbered(), store=store)
    fill(layer, 9)
    for x in (
        layer.slot,
        lambda name: layer.put(name, torch.zeros(2, 2, 9)),
    ):
        with pytest.raises(KeyError, match="scroe"):
            x("scroe")
    with pytest.raises(ValueError, match=r"score \(2, 2, 8\) must be \(2, 2, 9\)"):
        layer.put("score", torch.zeros(2, 2, 8))


@pytest.mark.parametrize("budget", [2, 3])
def test_shrinking_ragged_heads_drops_empty_slots_first(budget):
    layer = Slots()
    fill(layer, 9)
    row = (
        [[1, 4, 6, 8], [2, 3, -1, -1]],
        [[0, 5, 7, -1], [2, 4, 6, 8]],
    )
    layer.keep(torch.tensor(row))
    layer.shrink(layer.pos.float(), budget)
    newest = [[4, 6, 8], [2, 3]], [[0, 5, 7], [4, 6, 8]]
    for found, expected in zip(positions(layer), newest):
        assert found == [head[-budget:] for head in expected]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.randoms(),
    st.integers(1, 12),
)
@settings(max_examples=40, deadline=None)
def test_shrink_keeps_the_best_and_of_equals_the_newest_in_any_order(
    scores, random, budget
):
    n = len(scores)
    pos = random.sample(range(n), n)
    layer = Slots()
    k = torch.zeros(1, 1, n, 8)
    layer.write(k, k, torch.tensor([pos]))
    layer.seen += 1  # a token has left, so slots may have any order
    layer.shrink(torch.tensor([[scores]]).float(), budget)
    best = sorted(range(n), key=lambda i: (-scores[i], -pos[i]))[:budget]
    assert sorted(layer.pos[0, 0].tolist()) == sorted(pos[i] for i in best)


def test_what_a_method_remembers_counts_until_the_prompt_ends_or_for_good():
    layer = Slots()
    fill(layer, 9)
    live, _ = layer.bytes()
    layer.notes["queries"] = torch.zeros(100)
    layer.state["sums"] = torch.zeros(10)
    layer.state["coins"] = torch.Generator()
    layer.forget(7)
    size = live - 2 * 4 * SLOT
    assert layer.bytes()[0] == size + 400 + 40 + 2 * 4 * 32  # two forgotten keys
    layer.end_prompt()
    assert layer.bytes()[0] == size + 40
