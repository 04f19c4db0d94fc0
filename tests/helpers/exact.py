"""Share float64 draws and comparisons among the tests of theory."""

import math

from hypothesis import given, settings, strategies as st
import pytest
import torch

F64 = torch.float64
seeds = st.integers(0, 2**32 - 1)


def check(claims, *strategies, examples=20):
    """Decorate a test that runs on drawn values and checks these claims."""

    def of(test):
        test = settings(max_examples=examples, deadline=None)(given(*strategies)(test))
        return pytest.mark.claim(*claims.split())(test)

    return of


def vector(*values):
    return torch.tensor(values, dtype=F64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=F64)


def close(x, y, tolerance=1e-11):
    x, y = (torch.as_tensor(value, dtype=F64) for value in (x, y))
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance)


def at_most(x, y):
    x, y = (torch.as_tensor(value, dtype=F64) for value in (x, y))
    return bool((x <= y + 1e-12 * (1 + y.abs())).all())


def near(runs, expected, errors=4.5):
    """Return whether the mean over runs (R, ...) is the expected (...), within `errors` standard errors."""
    error = errors * runs.std(0) / math.sqrt(len(runs)) + 1e-12 * (1 + abs(expected))
    return ((runs.mean(0) - expected).abs() <= error).all()
