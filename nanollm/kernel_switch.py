"""Choose between a Triton kernel of kernels/ and plain PyTorch code."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
import sys
from types import ModuleType

import torch
from torch import Tensor

use_kernels = find_spec("triton") is not None  # set it to False for plain code on a GPU
# head dim: KiB of shared memory per SM that the kernels need for heads of at most this size
shared_memory = {64: 64, 128: 100, 256: 164}


def on_gpu(x: Tensor) -> bool:
    """Return whether x (..., D) is for the Triton kernels.

    They get 16-bit numbers, which the tensor cores multiply, and heads whose tiles fit into shared
    memory.
    """
    if not (use_kernels and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)):
        return False
    gpu = torch.cuda.get_device_properties(x.device)
    available = gpu.shared_memory_per_multiprocessor // 1024
    D = x.shape[-1]
    for largest, needed in shared_memory.items():
        if D <= largest and needed <= available:
            return True
    return False


@cache
def kernel_file(name: str):
    """Return the module kernels/NAME.py.

    It is imported as a part of `nanollm_kernels`. Hugging Face publishes a library called
    `kernels`; where that is installed, Python would import it in place of our folder.
    """
    package = sys.modules.setdefault("nanollm_kernels", ModuleType("nanollm_kernels"))
    package.__path__ = [str(Path(__file__).parents[1] / "kernels")]
    return import_module(f"nanollm_kernels.{name}")


def kernel_for(x: Tensor, file: str, name: str | None = None):
    """Return a function of kernels/FILE.py if x is for the kernels, else None.

    name: the function's name, by default that of the file. After None the caller runs plain code.
    """
    if not on_gpu(x):
        return None
    return getattr(kernel_file(file), name or file)
