import os
import sys

import torch

torch.set_num_threads(1)  # the tests' tensors are too small to share out
if not torch.cuda.is_available():  # Triton reads this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, os.path.dirname(__file__))


def pytest_configure(config):
    config.addinivalue_line("markers", "claim(id): the numbered claim of a paper that this test checks")
