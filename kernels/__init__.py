"""Triton kernels, each beside its plain PyTorch twin. Without a GPU they run in Triton's interpreter, for tests and reading."""
import os
import sys

import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    if "triton" in sys.modules:
        raise ImportError("triton was imported before kernels and looks for a GPU, which is not there; import kernels first, "
                          "or set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
