"""Triton kernels, each beside its plain PyTorch twin. Without a GPU they run in Triton's interpreter, for tests and reading.

In kernels p_ is a pointer, b_ a block of numbers in registers, o_ a block of offsets, i_ an index, is_ a mask.
"""
import os
import sys

import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    if "triton" in sys.modules:
        raise ImportError("triton was imported before kernels and looks for a GPU, which is not there; import kernels first, "
                          "or set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"


def split(n: int, block: int, heads: int, device: torch.device) -> tuple[int, int]:
    """How n slots of each head are dealt out, whole blocks to a program: slots a program, programs.

    Processors have several programs each where there are slots enough, and a program has at most 4096 slots, as a few long ones at
    the end would keep all others waiting.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    wanted = max(min(4 * processors // heads, 64), -(-n // 4096), 1)
    share = block * max(1, -(-n // (block * wanted)))
    return share, max(1, -(-n // share))
