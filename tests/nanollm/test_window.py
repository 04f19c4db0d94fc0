"""What an observation window sees: its queries' weights, and the slots before it."""

import pytest
import torch

from common import TOKENS, alone, decoder, end
from methods.baselines.snap_kv import SnapKV
from nanollm.cache import NEVER, begin_turn, compress, crop, make_cache
from nanollm.generate import prefill
from nanollm.window import Window, window_rows
from stores import SLOT, VECTORS, fill

QUERIES = 2 * 6 * 4 * 8 * 4  # bytes of the last four queries of all heads


def read_layer():
    layer = alone(SnapKV(budget=10, window_size=4))
    return layer, *fill(layer, 20)


@pytest.mark.parametrize("forgotten", [0, 1, 3])
def test_the_windows_weights_are_those_of_its_queries_over_all_keys(forgotten):
    """Forgotten tokens are no slots any more, but the queries saw their keys."""
    layer, q, k, v, y = read_layer()
    if forgotten:
        layer.forget(20 - forgotten)
    window = Window(layer.method, layer, tokens=None)
    assert (window.n, window.w, window.room) == (16, 4 - forgotten, 6 + forgotten)
    rows = window_rows(window.q, window.k, window.empty)
    found = (rows @ v.unsqueeze(2)).flatten(1, 2)
    assert torch.allclose(found, y[:, :, 16:], atol=1e-5)
    assert torch.allclose(window.scores(), rows[..., :16].mean(3))
    stays = window.with_window(torch.zeros(2, 2, 16).bool())
    assert (stays.sum(-1) == 4 - forgotten).all()


def test_no_query_sees_an_empty_slot_and_none_wins_by_pooling():
    layer, *_ = read_layer()
    kept = torch.ones(2, 2, 20).bool()
    kept[0, 1, 5:12] = False
    layer.keep_chosen(kept)
    begin_turn([layer])
    fill(layer, 4, seed=1)
    window = Window(layer.method, layer, tokens=None)
    empty = layer.pos == NEVER
    assert empty.sum() == 7
    rows = window_rows(window.q, window.k, window.empty)
    assert (rows.sum((2, 3))[empty] == 0).all()
    pooled = window.pool(window.scores().mean(2))
    assert torch.equal(pooled == -1, empty[:, :, : window.n])


def test_the_windows_queries_count_as_memory_until_the_prompt_is_compressed():
    layer, *_ = read_layer()
    layer.state["coins"] = torch.zeros(5)  # for good
    # not a view of all of them
    assert layer.notes["window"].untyped_storage().nbytes() == QUERIES
    assert layer.bytes()[0] == QUERIES + 4 * 20 * SLOT + 20
    layer.forget(18)
    # two keys that they saw
    assert layer.bytes()[0] == QUERIES + 4 * (18 * SLOT + VECTORS) + 20
    end(layer)
    assert layer.bytes() == (4 * 10 * SLOT + 20,) * 2


def test_tokens_that_the_window_looked_at_are_forgotten_only_for_the_compression():
    model = decoder()
    caches = make_cache(model, SnapKV, budget=12, window_size=4)
    prefill(model, TOKENS, caches)
    T = TOKENS.shape[1]
    crop(caches, T - 2)
    with pytest.raises(ValueError, match="looked at tokens that were forgotten"):
        prefill(model, TOKENS[:, -2:], caches)
    crop(caches, T - 6)
    with pytest.raises(ValueError, match="of the window's 4 tokens and 2 before it"):
        compress(model, TOKENS[:, : T - 6], caches)
