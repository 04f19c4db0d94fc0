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
# up to this head dim, kernels need this many KiB per SM
shared_memory = {64: 64, 128: 100, 256: 164}


def on_gpu(x: Tensor) -> bool:
    """Return whether the Triton kernels can take x (..., D).

    They need 16-bit numbers, which the tensor cores multiply, and heads whose tiles fit into shared
    memory.
    """
    if not (use_kernels and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)):
        return False
    available = torch.cuda.get_device_properties(
        x.device
    ).shared_memory_per_multiprocessor
    return any(
        x.shape[-1] <= D and available >= 1024 * needed
        for D, needed in shared_memory.items()
    )


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
    """Return a function of kernels/FILE.py if kernels can take x, else None.

    name: the function's name, by default that of the file. After None the caller runs plain code.
    """
    return getattr(kernel_file(file), name or file) if on_gpu(x) else None
