"""Linear layers that multiply by the 4-bit numbers of a GGUF file's blocks.

Decoding a short text mostly waits for the weights' bytes, which it reads once a token. A long
prompt uses a layer's weights for all its tokens, and mostly waits for multiplications.
`BlockLinear` therefore has each weight twice: as 4-bit numbers for few rows, and as a plain tensor
for more.

A block of 32 weights is scale · (q − 8) + zero, with q from 0 to 15. llama.cpp's Q4_0 and Q4_1 are
of this form, and PyTorch has a product for it. Scale, zero and the input are rounded to bfloat16.
"""

import numpy as np
import torch
from torch import Tensor, nn
import torch.nn.functional as F

BLOCK = 32  # weights
BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # of a block
pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
product = torch.ops.aten._weight_int4pack_mm_for_cpu
FEW = 16  # rows; for more, the other product was faster on a CPU with AVX512
ROWS = 4096  # packed at once; meanwhile they have 32 bits


def fast_in_bfloat16() -> bool:
    """Return whether this processor has AVX512's or AMX's instructions for bfloat16."""
    avx = torch.cpu._is_avx512_bf16_supported()
    return avx or torch.cpu._is_amx_tile_supported()


def fast_kinds() -> list[str]:
    """Return the kinds of blocks that gguf.py packs. A block of Q8_0 becomes two of 4 bits."""
    return [kind for kind in BYTES if kind != "Q8_0" or not fast_in_bfloat16()]


def blocks(data: np.ndarray, kind: str) -> tuple[Tensor, Tensor]:
    """Return the numbers of a tensor's bytes in GGUF (rows, bytes), of a kind in BYTES.

    q (rows, n) uint8 from 0 to 15; scale and zero of each block, (rows, n / 32, 2). Of Q8_0 both
    have twice as many columns, so the layer's input must have each block twice, one after the
    other.
    """
    x = torch.tensor(data)
    x = x.view(len(data), -1, BYTES[kind])
    if kind == "Q8_0":
        return eight_bits(x)

    n = x.shape[-1] - 16  # bytes before those of q
    numbers = floats(x[..., :n])
    scale = numbers[..., :1]
    zero = torch.zeros_like(scale)
    if kind == "Q4_1":  # scale · q + least
        least = numbers[..., 1:]
        zero = least + 8 * scale
    scale_and_zero = torch.cat((scale, zero), -1)

    q = x[..., n:]
    low = q & 15
    high = q >> 4
    q = torch.cat((low, high), -1)
    return q.flatten(1), scale_and_zero


def eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `blocks` returns of Q8_0: each block becomes two.

    With q + 128 = 16 · high + low, where q is a signed byte,
    scale · q = 16 · scale · (high − 8) + scale · (low − 8) + 8 · scale.
    """
    scale = floats(x[..., :2])
    q = x[..., 2:] ^ 128  # a signed byte + 128
    high = q >> 4
    low = q & 15
    q = torch.stack((high, low), 2)

    zero = torch.zeros_like(scale)
    of_high = torch.cat((16 * scale, zero), -1)
    of_low = torch.cat((scale, 8 * scale), -1)
    both = torch.stack((of_high, of_low), 2)
    return q.flatten(1), both.flatten(1, 2)


def floats(x: Tensor) -> Tensor:
    """Return the 16-bit floating-point numbers that bytes x hold, as 32-bit ones."""
    x = x.contiguous()
    return x.view(torch.float16).float()


class BlockLinear(nn.Module):
    """A linear layer that multiplies few rows by `packed`, 4-bit numbers, and more by its weight.

    Rows that need a gradient are multiplied by the weight, too. data: the weight's bytes in GGUF
    (rows, bytes), of a kind in BYTES.
    """

    def __init__(self, linear: nn.Linear, data: np.ndarray, kind: str):
        super().__init__()
        # (n, d); if it learned, `packed` would not follow
        self.weight = linear.weight.requires_grad_(False)
        self.bias = linear.bias
        self.twice = kind == "Q8_0"
        packed = []
        scales = []
        for i in range(0, len(data), ROWS):
            rows = data[i : i + ROWS]
            q, scale_and_zero = blocks(rows, kind)
            q = q.int()
            packed.append(pack(q, 2))
            scales.append(scale_and_zero)
        packed = torch.cat(packed)
        scales = torch.cat(scales)
        scales = scales.transpose(0, 1)  # (blocks, n, 2)
        scales = scales.to(torch.bfloat16).contiguous()
        # the packed layout depends on the processor, so it belongs in no file
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        *shape, d = x.shape
        rows = x.reshape(-1, d)
        if len(rows) > FEW or x.requires_grad:
            return F.linear(x, self.weight, self.bias)
        # with 32 bits PyTorch's product took 13 to 60 times as long on one CPU
        rows = rows.to(torch.bfloat16)
        if self.twice:  # each block, one after the other
            rows = rows.unflatten(1, (-1, 1, BLOCK))
            rows = rows.expand(-1, -1, 2, -1)
            rows = rows.flatten(1)
        y = product(rows, self.packed, BLOCK, self.scales)
        y = y.to(x.dtype)
        y = y.view(*shape, -1)
        return y if self.bias is None else y + self.bias


def number_format(model) -> str:
    """Return torch's name of the first weight's dtype; "4bit" if there is a `BlockLinear`."""
    modules = getattr(model, "modules", tuple)  # the bridge's models have none
    for module in modules():
        if isinstance(module, BlockLinear):
            return "4bit"
    weight = next(model.parameters())
    return str(weight.dtype).removeprefix("torch.")
