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
    "alone": Case(SnapKV, {}, Residual()),
    "on ada": Case(AdaKV, dict(floor=0.0), Residual(), by_head),
    "on critical on ada": Case(AdaKV, {}, Residual(Critical()), by_head, in_two_stages),
    "on chunks": Case(ChunkKV, {}, Residual(Chunks(2)), choose=by_chunk),
}


@each_walk(CASES, GROUPED, TIED, AGAIN)
def test_slots_outputs_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


@each_walk(["alone"], *PROMPTS)
def test_slots_equal_the_loops_in_every_shape_of_prompt(case, prompt):
    check_walk(CASES[case], prompt)


@pytest.mark.parametrize("T, expected", [(60, [1, 0, 0, 0]), (42, [0, 1, 1, 1])])
def test_heads_with_too_little_room_or_nothing_to_evict_have_no_residual(T, expected):
    """A head with too little room, or with nothing to evict, gets no residual entry.

    Of 48 entries, head 0 gets 45 of 52 and the others 1 each (T = 60); or head 0 gets all 34 and
    the others 4 or 5 (T = 42).
    """
    select = Residual()
    layer = uneven(AdaKV(20, window_size=8, kernel_size=1, floor=0.0, select=select), T)
    there = layer.pos != NEVER
    biased = (layer.slot("bias") != 0) & there
    assert biased.sum(-1).tolist() == [expected] * B
    assert there.sum((1, 2)).tolist() == [4 * 20] * B


@pytest.mark.parametrize(
    "make, message",
    [
        (partial(Residual, Residual()), "add them once"),
        (
            partial(AdaKV, 20, 8, select=Residual(Chunks(13, fill=False))),
            "budget 20 has no room for a chunk",
        ),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
