"""Prepare a kernel launch: choose GPU or interpreter, and divide the slots among programs.

Prefixes of names in all kernels: p_ is a pointer, b_ a block of numbers in registers, o_ a block of
offsets, i_ an index, is_ a mask.
"""

from functools import wraps
import os
import sys

import torch

# Triton reads TRITON_INTERPRET when it wraps a function; its own it wraps at its first import
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

# True: kernels run in Triton's interpreter, on a CPU. False: they are compiled for a GPU
interpreted = not isinstance(tl.sum, triton.JITFunction)


def launcher(function):
    """Make `function` launch its kernels on the GPU of its first tensor, not on the current one.

    Raise ValueError if the tensors are on a CPU and the kernels are compiled for a GPU.
    """

    @wraps(function)
    def launch(*args, **named):
        given = (*args, *named.values())
        x = next(x for x in given if isinstance(x, torch.Tensor))
        if not (interpreted or x.is_cuda):
            raise ValueError(
                f"tensors on {x.device} are for Triton's interpreter, but Triton compiles for "
                "a GPU here; set TRITON_INTERPRET=1 before Python starts"
            )
        with torch.cuda.device_of(x):
            return function(*args, **named)

    return launch


def block_of(n: int) -> int:
    """Return the smallest power of 2 that is at least n and 16, which our products need."""
    return max(16, triton.next_power_of_2(n))


def split(n: int, block: int, heads: int, device: torch.device) -> tuple[int, int]:
    """Divide n slots of each head among programs.

    Return the slots per program and the programs per head. Each program gets whole blocks, the last
    of a head what is left. With enough slots, each SM gets about two programs or more, but a head
    at most 64 for this. A program has at most 4096 slots, so long heads get more: otherwise a few
    long programs would still run after all others have finished.
    """
    sms = 4  # the interpreter, as if it were a small GPU
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    two_per_sm = min(2 * sms // heads, 64)
    wanted = max(two_per_sm, triton.cdiv(n, 4096), 1)
    blocks = max(1, triton.cdiv(n, block * wanted))
    share = block * blocks
    return share, max(1, triton.cdiv(n, share))
