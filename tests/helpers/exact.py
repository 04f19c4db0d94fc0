"""Share float64 draws and comparisons among test files."""

import math

from hypothesis import given, settings, strategies as st
import pytest
import torch

F64 = torch.float64
seeds = st.integers(0, 2**32 - 1)


def check(claims, *strategies, examples=20):
    """Decorate a test that runs on drawn values and checks these claims."""
    drawn = given(*strategies)
    limits = settings(max_examples=examples, deadline=None)
    marked = pytest.mark.claim(*claims.split())

    def decorate(test):
        return marked(limits(drawn(test)))

    return decorate


def vector(*values):
    return torch.tensor(values, dtype=F64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=F64)


def close(x, y, tolerance=1e-11):
    x = torch.as_tensor(x, dtype=F64)
    y = torch.as_tensor(y, dtype=F64)
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance)


def at_most(x, y):
    x = torch.as_tensor(x, dtype=F64)
    y = torch.as_tensor(y, dtype=F64)
    rounding = 1e-12 * (1 + y.abs())
    return bool((x <= y + rounding).all())


def near(runs, expected, errors=4.5):
    """Return whether the mean of runs (R, ...) is the expected (...), up to standard errors."""
    standard_error = runs.std(0) / math.sqrt(len(runs))
    rounding = 1e-12 * (1 + abs(expected))
    difference = (runs.mean(0) - expected).abs()
    return (difference <= errors * standard_error + rounding).all()
