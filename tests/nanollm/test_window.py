"""What an observation window sees: its queries' weights, and the slots before it."""

from functools import partial

import pytest
import torch

from common import alone, dense, end
from methods.baselines.snap_kv import SnapKV
from nanollm.cache import NEVER, begin_turn
from nanollm.window import Window, WindowMethod, max_pool, window_rows, window_scores
from stores import SLOT, VECTORS, draw, fill

QUERIES = 2 * 6 * 4 * 8 * 4  # bytes of the last four queries of all heads


def layer_of(T, **options):
    layer = alone(SnapKV(**dict(budget=10, window_size=4) | options))
    return layer, *fill(layer, T)[:3]


@pytest.mark.parametrize("forgotten", [0, 1, 3])
def test_the_windows_weights_are_those_of_its_queries_over_all_keys(forgotten):
    """Forgotten tokens are no slots any more, but the queries saw their keys."""
    layer, q, k, v = layer_of(20)
    if forgotten:
        layer.forget(20 - forgotten)
    window = Window(layer.method, layer, torch.zeros(2, layer.seen))
    assert (window.n, window.w, window.room) == (16, 4 - forgotten, 6 + forgotten)
    seen = torch.ones(20, 20).tril().bool()[16:]
    rows = window.rows()
    y = (rows @ v.unsqueeze(2)).flatten(1, 2)
    expected = dense(q[:, :, 16:], k, v, seen[None, None])
    assert torch.allclose(y, expected, atol=1e-5)
    assert torch.allclose(window.scores(), rows[..., :16].mean(3))
    stays = window.with_window(torch.zeros(2, 2, 16).bool())
    assert stays.sum(-1).tolist() == [[4 - forgotten] * 2] * 2


def test_no_query_sees_an_empty_slot_and_none_wins_by_pooling():
    layer, *_ = layer_of(20)
    kept = torch.ones(2, 2, 20).bool()
    kept[0, 1, 5:12] = False
    layer.keep_chosen(kept)
    begin_turn([layer])
    fill(layer, 4, seed=1)
    window = Window(layer.method, layer, torch.zeros(2, 24))
    empty = layer.pos == NEVER
    assert empty.sum() == 7
    assert (window.rows().sum((2, 3))[empty] == 0).all()
    pooled = window.pool(window.scores())
    before = empty[:, :, : window.n].unsqueeze(2).expand(pooled.shape)
    assert (pooled[before] == -1).all()
    assert (pooled[~before] >= 0).all()


def test_windows_scores_have_32_bits_at_least():
    q, k, _ = draw(30)
    q = q.unflatten(1, (2, -1))[..., -4:, :]
    wide = window_scores(q, k)
    few = window_scores(q.half(), k.half())
    assert few.dtype == torch.float32
    assert torch.allclose(few, wide, atol=1e-3)
    assert torch.equal(wide, window_rows(q, k)[..., :26].mean(3))


def test_max_pool_takes_the_highest_of_the_neighbours():
    score = torch.tensor([[0.0, 3, 1, 0, 0, 2]])
    assert max_pool(score, 3).tolist() == [[3, 3, 3, 1, 2, 2]]
    assert torch.equal(max_pool(score, 1), score)


def test_the_windows_queries_count_as_memory_until_the_prompt_is_compressed():
    layer, *_ = layer_of(20)
    # not a view of all of them
    assert layer.notes["window"].untyped_storage().nbytes() == QUERIES
    assert layer.bytes()[0] == QUERIES + 4 * 20 * SLOT
    layer.forget(18)
    # two keys that they saw
    assert layer.bytes()[0] == QUERIES + 4 * (18 * SLOT + VECTORS)
    end(layer)
    assert layer.bytes() == (4 * 10 * SLOT,) * 2


@pytest.mark.parametrize(
    "make, message",
    [
        (partial(WindowMethod, 8, 8), "budget 8 must exceed the window 8"),
        (partial(WindowMethod, 20, 0), "window_size 0"),
        (partial(WindowMethod, 20, 8, 2), "kernel_size 2"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
