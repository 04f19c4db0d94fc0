"""Residual entries against a loop: their tokens, means and biases."""

from functools import partial

import pytest

from methods.baselines.ada_kv import AdaKV
from methods.baselines.snap_kv import SnapKV
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical
from methods.ours.residual import Residual
from nanollm.cache import NEVER
from windows import (
    AGAIN,
    GROUPED,
    PROMPTS,
    TIED,
    B,
    Case,
    by_chunk,
    by_head,
    check_walk,
    each_walk,
    in_two_stages,
    uneven,
)

CASES = {
    "of 3 runs": Case(SnapKV, {}, Residual(entries=3, share=0.5)),
    "of clusters": Case(SnapKV, {}, Residual(entries=3, rounds=2)),
    "on ada": Case(AdaKV, dict(floor=0.0), Residual(entries=3), by_head),
    "on critical on ada": Case(
        AdaKV, {}, Residual(Critical(), entries=1), by_head, in_two_stages
    ),
    "on chunks": Case(ChunkKV, {}, Residual(Chunks(2), entries=2), choose=by_chunk),
}


@each_walk(CASES, GROUPED, TIED, AGAIN)
def test_slots_outputs_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


@each_walk(["of 3 runs"], *PROMPTS)
def test_slots_equal_the_loops_in_every_shape_of_prompt(case, prompt):
    check_walk(CASES[case], prompt)


@pytest.mark.parametrize("T, expected", [(60, [3, 0, 0, 0]), (42, [0, 3, 3, 3])])
def test_heads_with_too_little_room_or_nothing_to_evict_have_no_residual(T, expected):
    """A head with too little room, or with nothing to evict, gets no residual entry.

    Of 48 entries, head 0 gets 45 of 52 and the others 1 each (T = 60); or head 0 gets all 34 and
    the others 4 or 5 (T = 42).
    """
    select = Residual(entries=3, share=0.5)
    layer = uneven(AdaKV(20, window_size=8, kernel_size=1, floor=0.0, select=select), T)
    there = layer.pos != NEVER
    biased = (layer.slot("bias") != 0) & there
    assert biased.sum(-1).tolist() == [expected] * B
    assert there.sum((1, 2)).tolist() == [4 * 20] * B


@pytest.mark.parametrize(
    "make, message",
    [
        (partial(Residual, entries=0), "entries 0"),
        (partial(Residual, share=0), "share is 0"),
        (
            partial(AdaKV, 20, 8, select=Residual(Chunks(13, fill=False))),
            "budget 20 has no room for a chunk",
        ),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
