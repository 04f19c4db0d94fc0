"""A sketch read back by least squares: its slots are equations, the tokens in it unknowns."""
import torch
from torch import Tensor

from methods.count_sketch import Sketch


def solve(sketch: Sketch, J: Tensor) -> tuple[Tensor, Tensor]:
    """k and v (B, H, a, D) of all tokens J (B, H, a) that are in, by least squares.

    Of all vectors that would give this sketch, those nearest to the mean if it is kept, otherwise to 0. Exact
    while no token's signs in the slots are a combination of others'. With more tokens than slots they are,
    and then no reader is exact.
    """
    x = sketch.x.to(torch.promote_types(sketch.x.dtype, torch.float32))  # no pseudo-inverse in 16 bits
    near = (sketch.sum / J.shape[2]).unsqueeze(2) if hasattr(sketch, "sum") else torch.zeros_like(x[:, :, :1])
    signs = sketch.sign(J)[..., [0, -1]].to(x)  # of keys and of values

    found = []
    for x, near, sign in zip(x.chunk(2, -1), near.chunk(2, -1), signs.unbind(-1)):
        pattern = x.new_zeros(*J.shape, x.shape[2])  # (B, H, a, r·b): a token's part in each slot
        pattern.scatter_add_(3, sketch.bucket(J), sign)
        rest = x - pattern.sum(2).unsqueeze(-1) * near
        found.append((near + torch.linalg.pinv(pattern.mT) @ rest).to(sketch.x))
    return *found,
