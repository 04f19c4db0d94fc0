"""AdaKV: empty slots win nothing, and shares are exact."""

import torch

from common import end
from methods.baselines.ada_kv import AdaKV, shared
from nanollm.cache import NEVER, begin_turn
from windows import B, uneven


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
