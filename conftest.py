import math
import os
import sys

import pytest
import torch

torch.set_num_threads(1)  # the tests' tensors are too small to share out
if not torch.cuda.is_available():  # Triton reads this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = os.path.dirname(__file__)
sys.path.insert(0, ROOT)
import kernels  # noqa: E402
kernels.__path__.append(os.path.join(ROOT, "kernels"))  # the Hub's, where it is installed: tests find ours in it

# What kernels are tested on: a GPU, or a CPU in Triton's interpreter, which TRITON_INTERPRET=1 asks for where there is a GPU.
DEVICE = "cuda" if os.environ.get("TRITON_INTERPRET", "0") == "0" else "cpu"
interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="in Triton's interpreter alone: TRITON_INTERPRET=1 pytest")


def pytest_configure(config):
    config.addinivalue_line("markers", "claim(id): the numbered claim of a paper that this test checks")


@pytest.fixture
def poisoned(monkeypatch):
    """Whatever is allocated without being filled is full of NaN."""
    def full_of_nan(make):
        return lambda *a, **k: x.fill_(math.nan) if (x := make(*a, **k)).is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", full_of_nan(torch.empty_like))
