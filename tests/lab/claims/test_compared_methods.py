"""What CriticalKV's rules measure: rank correlations, and long answers."""

import numpy as np
import pytest
import torch

from common import tasks
from lab.benchmark import text_windows
from lab.claims.compared_methods import (
    long_answer,
    rank_correlation,
)
from methods.baselines.snap_kv import SnapKV
from nanollm import TINY, checkpoint


def test_the_rank_correlation_gives_equal_numbers_their_mean_rank():
    x = torch.tensor([3.0, 1, 1, 7])
    y = torch.tensor([2.0, 0, 5, 9])
    expected = np.corrcoef([3, 1.5, 1.5, 4], [2, 1, 3, 4])[0, 1]
    assert rank_correlation(x, y) == pytest.approx(expected, rel=1e-6)


def test_a_window_that_fills_the_budget_of_a_long_answer_is_refused():
    model = checkpoint.from_hf(TINY)
    texts = text_windows(tasks("test"), 1, 256)
    with pytest.raises(ValueError, match="window's 8 entries fill the budget of 8"):
        long_answer(model, texts, 0.0625, SnapKV.select)
