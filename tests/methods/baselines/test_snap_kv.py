"""SnapKV keeps the window and the highest pooled window scores, in every shape of prompt."""

from methods.baselines.snap_kv import SnapKV
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
