"""AdaKV gives a head as many entries as it has among its layer's highest scores."""

import torch

from common import end
from methods.baselines.ada_kv import AdaKV, shared
from methods.critical_kv import Critical
from nanollm.cache import NEVER, begin_turn
from windows import (
    AGAIN,
    GROUPED,
    TIED,
    TURNS,
    B,
    Case,
    by_head,
    check_walk,
    each_walk,
    in_two_stages,
    uneven,
)

CASES = {
    "ada": Case(AdaKV, deal=by_head),
    "floor 0": Case(AdaKV, dict(floor=0.0), deal=by_head),
    "critical": Case(AdaKV, dict(floor=0.1), Critical(), by_head, in_two_stages),
}


@each_walk(CASES, GROUPED, TIED, AGAIN, *TURNS)
def test_slots_outputs_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


def test_empty_slots_take_no_room_from_tokens_that_nobody_looks_at_later():
    """Empty slots never win over tokens without any attention.

    Heads have 53 and 9 entries. Then the whole window attends to its first token only, so all other
    tokens have a window score of 0.
    """
    layer = uneven(AdaKV(20, 8, kernel_size=1, floor=0.0), 60)
    begin_turn([layer])
    q = torch.zeros(B, 8, 8, 2)
    k = torch.zeros(B, 4, 8, 2)
    q[..., 1] = 1
    k[:, :, 0, 1] = 1000
    layer.attend(q, k, k, torch.arange(60, 68)[None])
    end(layer)
    assert (layer.pos != NEVER).sum((1, 2)).tolist() == [4 * 20] * B


def test_shares_are_exact():
    for floor in (1 / 3, 0.1 + 0.2):
        assert shared(torch.rand(1, 3, 5000), 1000, floor).sum() == 3000
