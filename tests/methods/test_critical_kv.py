"""CriticalKV: the published code, exact fractions of the budget, norms in 32 bits."""

import pytest
import torch

from methods.baselines.snap_kv import SnapKV
from methods.critical_kv import (
    Critical,
    CriticalCode,
    PooledCritical,
    part_of,
    value_norms,
)
from nanollm.window import Window
from windows import compressed


def test_the_authors_code_adds_a_little_to_scores_and_takes_half_by_weight():
    """CriticalCode adds 1e-4 to the scores, multiplies the means and has α = 0.5."""
    scores = torch.tensor([[[[0, 0.5, 0], [0, 0.1, 0.2]]]])
    norms = torch.tensor([[[[2, 1, 4.0], [4, 3, 2.0]]]])
    x = torch.zeros(1, 2, 21, 2)
    layer = compressed(SnapKV(30, window_size=18), x, x[:, :1], x[:, :1])
    layer.notes["window"] = torch.zeros(1, 1, 2, 18, 2)
    method = SnapKV(30, window_size=18, kernel_size=1)
    window = Window(method, layer, tokens=None)
    found = CriticalCode().second(window, scores, norms)
    expected = torch.tensor([[[1e-4 * 3, 0.3001 * 2, 0.1001 * 3]]])
    assert torch.allclose(found, expected, atol=0)
    assert CriticalCode().alpha == 0.5
    assert Critical().alpha == PooledCritical().alpha == 0.25


def test_parts_of_a_budget_are_exact():
    assert part_of(0.29, 100) == 29
    assert part_of(1 / 3, 3000) == 1000
    assert part_of(1 / 3, torch.tensor([3000, 6001])).tolist() == [1000, 2000]


def test_norms_are_added_up_in_32_bits():
    v = torch.full((2, 2, 3, 4), 8.0).half()
    w_o = torch.ones(4000, 4, 4).half()
    expected = torch.full((2, 2, 2, 3), 8.0 * 4 * 4000)
    assert torch.equal(value_norms(v, w_o), expected)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="alpha is -0.5"):
        Critical(alpha=-0.5)
