"""Read all tokens from KVReviver's sketch (arXiv 2512.17917) by least squares (claim R2).

A sketch is a linear system: each slot is an equation, and each token is an unknown. The solution is exact if
the tokens' patterns of signs are linearly independent. With three rows of 100 slots it is exact under 20 of
20 seeds at 0.85 tokens a slot, and under none at 0.95
(`pytest tests/theory/test_sketch_error.py -k least_squares`).
"""
import torch
from torch import Tensor

from methods.count_sketch import Sketch


def solve(sketch: Sketch, J: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v, (B, H, a, D) each, of all tokens J (B, H, a) in the sketch.

    Several solutions may give the same sketch. This one is nearest to the tokens' mean if the sketch stores
    the mean, otherwise to 0. With more tokens than slots no method is exact.
    """
    x = sketch.x.to(torch.promote_types(sketch.x.dtype, torch.float32))  # pinv does not support 16 bits
    mean = (sketch.sum / J.shape[2]).unsqueeze(2) if hasattr(sketch, "sum") else torch.zeros_like(x[:, :, :1])
    signs = sketch.sign(J)[..., [0, -1]].to(x)  # of keys and of values

    estimates = []
    for slots, centre, sign in zip(x.chunk(2, -1), mean.chunk(2, -1), signs.unbind(-1)):
        pattern = slots.new_zeros(*J.shape, slots.shape[2])  # (B, H, a, r·b): a token's factor in each slot
        pattern.scatter_add_(3, sketch.bucket(J), sign)
        rest = slots - pattern.sum(2).unsqueeze(-1) * centre
        estimates.append((centre + torch.linalg.pinv(pattern.mT) @ rest).to(sketch.x))
    return tuple(estimates)
