"""Verdicts from numbers and their errors, and an error over texts."""

import pytest
import torch

from lab.claims.subject import (
    HOLDS,
    NOT,
    OPEN,
    above,
    below,
    both,
    mean,
    over_texts,
    within,
)

# ---- verdicts ----


def test_a_number_within_two_errors_of_the_limit_decides_nothing():
    numbers = 0.71, 0.69, 0.31, 0.29
    found = [above((x, 0.1), 0.5) for x in numbers]
    assert found == [HOLDS, OPEN, OPEN, NOT]
    assert [below((x, 0.1), 0.5) for x in numbers] == found[::-1]
    found = [within((x, 0.1), 0.3) for x in (-0.6, -0.2, 0.0, 0.2, 0.6)]
    assert found == [NOT, OPEN, HOLDS, OPEN, NOT]
    assert above((0.5, 0.0), 0.5) == OPEN  # all documents alike, and at the limit


def test_conditions_must_all_hold():
    assert both(OPEN, NOT) == NOT
    assert both(HOLDS, OPEN) == OPEN
    assert both(HOLDS, HOLDS) == HOLDS


def test_an_error_over_texts_is_that_of_the_mean():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    found = over_texts(lambda x: x.mean(), x)
    assert found == pytest.approx(mean(x.mean(1)), rel=0.15)
