"""What all kernels need before they run: something to run on, and how many programs share the slots.

In the other files p_ is a pointer, b_ a block of numbers in registers, o_ a block of offsets, i_ an index,
is_ a mask.
"""
from functools import wraps
import os
import sys

import torch

# Triton reads it once, when it is first imported
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

# Whether kernels run in Triton's interpreter, on a CPU; else they are compiled for a GPU
interpreted = not isinstance(tl.sum, triton.JITFunction)


def launcher(function):
    """Makes a function launch kernels on the GPU that its tensors are on; Triton takes the current one."""
    @wraps(function)
    def launch(*args, **named):
        x = next(x for x in (*args, *named.values()) if isinstance(x, torch.Tensor))
        if not (interpreted or x.is_cuda):
            raise ValueError(f"tensors on {x.device} are for Triton's interpreter, but Triton is here to "
                             "compile for a GPU; set TRITON_INTERPRET=1 before Python starts")
        with torch.cuda.device_of(x):
            return function(*args, **named)
    return launch


def block_of(n: int) -> int:
    """The least block that holds n numbers: blocks are powers of 2, and the tensor cores want 16 at least."""
    return max(16, triton.next_power_of_2(n))


def split(n: int, block: int, heads: int, device: torch.device) -> tuple[int, int]:
    """How n slots of each head are dealt out, whole blocks to a program: slots a program, programs.

    An SM has several programs where there are slots enough. A program has at most 4096 slots, as a few long
    ones at the end would keep all others waiting.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    wanted = max(min(4 * sms // heads, 64), -(-n // 4096), 1)
    share = block * max(1, -(-n // (block * wanted)))
    return share, max(1, -(-n // share))
