"""What CriticalKV's rules measure: methods by name, ranks, and long answers."""

import numpy as np
import pytest
import torch

from common import tasks
from lab.claims.change_and_text import (
    METHODS,
    WINDOW_METHODS,
    long_answer,
    rank_correlation,
)
from lab.evaluate import text_windows
from methods.baselines.snap_kv import SnapKV
from nanollm import TINY, checkpoint


def test_the_rank_correlation_gives_equal_numbers_their_mean_rank():
    x, y = torch.tensor([3.0, 1, 1, 7]), torch.tensor([2.0, 0, 5, 9])
    expected = np.corrcoef([3, 1.5, 1.5, 4], [2, 1, 3, 4])[0, 1]
    assert rank_correlation(x, y) == pytest.approx(expected, rel=1e-6)
    assert len(METHODS) == 20 and len(WINDOW_METHODS) == 15


def test_a_long_answer_is_compressed_while_it_is_written():
    model, texts = checkpoint.from_hf(TINY), text_windows(tasks("test"), 1, 256)
    assert long_answer(model, texts, SnapKV.select).min() > 1e-3
    # room for all
    assert long_answer(model, texts, SnapKV.select, budget=256).max() < 1e-5
