"""Round numbers to few bits by loops, as KIVI does."""

import struct

import torch

from exact import F64


def half(x):
    """Round to 16 bits by way of 32 bits, as torch does."""
    for form in "fe":
        (x,) = struct.unpack(form, struct.pack(form, x))
    return x


def levels(numbers, bits):
    """Return the codes, zero and scale of numbers that share a range."""
    highest = 2**bits - 1
    zero = half(min(numbers))
    scale = half((max(numbers) - zero) / highest)
    if scale <= 0:  # equal numbers, whose zero was rounded down or up in 16 bits
        return [0] * len(numbers), zero, scale
    codes = [min(max(round((x - zero) / scale), 0), highest) for x in numbers]
    return codes, zero, scale


def restored(numbers, bits):
    codes, zero, scale = levels(numbers, bits)
    return [zero + scale * code for code in codes]


def rounded(x, bits, group, dim):
    """Round keys (dim 0) or values (dim 1) of one head, (n, D), in groups along dim."""
    rows = []
    for row in (x.T if dim == 0 else x).tolist():
        groups = [row[i : i + group] for i in range(0, len(row), group)]
        rows.append([y for part in groups for y in restored(part, bits)])
    done = torch.tensor(rows, dtype=F64)
    return done.T if dim == 0 else done
