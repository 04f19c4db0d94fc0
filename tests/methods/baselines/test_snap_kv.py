"""SnapKV keeps the window and the highest pooled window scores, in every shape of prompt."""

from functools import partial

import pytest

from methods.baselines.snap_kv import SnapKV
from methods.critical_kv import Critical
from windows import (
    AGAIN,
    GROUPED,
    OTHER_TURNS,
    PROMPTS,
    TIED,
    TURNS,
    Case,
    check_walk,
    each_walk,
)

CASES = {"snap": Case(SnapKV)}


@each_walk(CASES, GROUPED, TIED, AGAIN, *PROMPTS, *TURNS, *OTHER_TURNS)
def test_slots_outputs_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


@pytest.mark.parametrize(
    "make, message",
    [
        (partial(SnapKV, 8, 8), "budget 8 must exceed the window 8"),
        (partial(SnapKV, 20, 0), "window_size 0"),
        (partial(SnapKV, 20, 8, 2), "kernel_size 2"),
        (partial(SnapKV, 20, 8, select=Critical), "select"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
