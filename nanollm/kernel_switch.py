"""Whether a Triton kernel of kernels/ is to run in place of plain PyTorch code."""
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
import sys
from types import ModuleType

import torch
from torch import Tensor

use_kernels = find_spec("triton") is not None  # False: plain code on a GPU, too
shared_memory = {64: 64, 128: 100, 256: 164}  # KiB of an SM that kernels want, by the largest head dim


def on_gpu(x: Tensor) -> bool:
    """Whether Triton's kernels are to take x (..., D).

    They are for 16-bit numbers, which the tensor cores multiply, and for heads whose tiles fit into shared
    memory.
    """
    if not (use_kernels and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)):
        return False

    there = torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor
    return any(x.shape[-1] <= D and there >= 1024 * wanted for D, wanted in shared_memory.items())


def kernel_file(name: str):
    """The module kernels/NAME.py.

    Its package has a name of its own here: the Hub has a library called `kernels`, which Python prefers to
    our folder where it is installed.
    """
    package = sys.modules.setdefault("nanollm_kernels", ModuleType("nanollm_kernels"))
    package.__path__ = [str(Path(__file__).parents[1] / "kernels")]
    return import_module(f"nanollm_kernels.{name}")


def kernel_for(x: Tensor, file: str, name: str | None = None):
    """The function of kernels/FILE.py that is called as the file is, or `name`, if x is for kernels; else
    None.

    After None the plain code that follows the call computes the same, but for its rounding to 16 bits on the
    way.
    """
    return getattr(kernel_file(file), name or file) if on_gpu(x) else None
