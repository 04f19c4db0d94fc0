"""TurboQuant: rotate, then round every coordinate with one fixed codebook (Zandieh et al., arXiv 2504.19874).

KIVI (quantized.py) stores a zero and a scale for each group of numbers. After a random rotation Π no channel
is special: the coordinates of a unit vector are nearly normal with variance 1/D, whatever the vector was. So
one codebook serves all, the best one for a normal distribution (Lloyd-Max), and only each vector's length is
stored beside its codes, 16 bits for D numbers.

    x ≈ ‖x‖/√D · Πᵀ c[code],   code_j = index of the centroid of c that is nearest to (Π x)_j √D / ‖x‖

The second stage stores the rest r = x − x̂ as the signs of S r, S random and normal, and its length (QJL,
arXiv 2406.03482). It takes one bit a number. Products with a query are then right on average:

    q·x ≈ q·x̂ + √(π/2)/D · ‖r‖ · (S q)·sign(S r)

The prompt's entries are rounded once, at its end; later tokens stay exact. Only keys have a second stage,
because only they meet a query. `python -m experiments.kvzip_parts` measures what it is worth. What KVzip
keeps, rounded so: methods/ours/kvzip_gain.py.
"""
from dataclasses import dataclass, field
from functools import cache, partial
import math

import torch
from torch import Tensor

from methods.quantized import pack, unpack
from nanollm.check import whole
from nanollm.packed import PackedCache


@cache
def codebook(bits: int) -> tuple[Tensor, Tensor]:
    """Return the 2^bits centroids that lie nearest to a standard normal number, and the borders between."""
    part = (torch.arange(2 ** bits, dtype=torch.float64) + 0.5) / 2 ** bits
    normal = torch.distributions.Normal(part.new_zeros(()), part.new_ones(()))
    c, edge = 3 ** 0.5 * normal.icdf(part), part.new_tensor([math.inf])  # the best for many bits
    for _ in range(300):  # Lloyd: borders halfway, centroids at the mean of their part
        borders = torch.cat((-edge, (c[1:] + c[:-1]) / 2, edge))
        density, below = normal.log_prob(borders).exp(), normal.cdf(borders)
        c = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return c.float(), ((c[1:] + c[:-1]) / 2).float()


@cache
def random_matrix(D: int, orthogonal: bool) -> Tensor:
    """Return Π, a random rotation (D, D), or S, random normal numbers."""
    x = torch.randn(D, D, generator=torch.Generator().manual_seed(int(orthogonal)), dtype=torch.float64)
    if not orthogonal:
        return x.float()
    q, r = torch.linalg.qr(x)
    return (q * r.diagonal().sign()).float()  # uniform over all rotations


def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of vectors (n, D), uint8, and their lengths (n, 1) in 16 bits."""
    D, length = x.shape[-1], x.norm(dim=-1, keepdim=True).half()
    turned = x @ random_matrix(D, True).to(x).mT * (D ** 0.5 / length.to(x).clamp(min=1e-6))
    return torch.bucketize(turned, codebook(bits)[1].to(x)).to(torch.uint8), length


def decode(code: Tensor, length: Tensor, bits: int) -> Tensor:
    """Return the vectors (n, D) of codes and lengths; their dtype is that of `length`."""
    D = code.shape[-1]
    turned = codebook(bits)[0].to(length)[code.long()]
    return turned @ random_matrix(D, True).to(length) * (length / D ** 0.5)


@dataclass(eq=False)
class Turbo(PackedCache):
    """Mix-in for a PackedCache method: class TurboX(Turbo, X)."""
    bits: int = field(default=3, kw_only=True)         # bits per number, 1 to 8
    second: bool = field(default=False, kw_only=True)  # True: keys have the second stage, and a bit more

    def __post_init__(self):
        super().__post_init__()
        whole("bits", self.bits, 1, 8)

    def link(self, model, layer: int, previous):
        super().link(model, layer, previous)
        if (D := self.w_o.shape[-1]) % 8:
            raise ValueError(f"head dim {D} must be a multiple of 8; use a method that does not round")
        codebook(self.bits), random_matrix(D, True)  # ready before the first token

    @property
    def packs(self) -> bool:
        return self.slots.keys() <= {"k", "v", "pos", "bias"}

    def pack(self):
        super().pack()
        if not self.counts.any():
            return
        k, v = self.packed.pop("k").float(), self.packed.pop("v").float()  # (entries of all heads, D)
        for name, x in (("k", k), ("v", v)):
            code, length = encode(x, self.bits)
            self.packed |= {f"{name}_code": pack(code.flatten(), self.bits), f"{name}_length": length}
            if name == "k" and self.second:
                rest = k - decode(code, length.to(k), self.bits)
                signs = rest @ random_matrix(rest.shape[1], False).to(rest).mT > 0
                self.packed |= dict(k_signs=pack(signs.flatten(), 1),
                                    k_rest=rest.norm(dim=1, keepdim=True).half())

    def old(self, name: str) -> Tensor:
        if f"{name}_code" not in self.packed:
            return super().old(name)
        like, D = self.slots[name], self.slots[name].shape[-1]
        code = unpack(self.packed[f"{name}_code"], self.bits).view(-1, D)
        x = decode(code, self.packed[f"{name}_length"].to(like), self.bits)
        if name == "k" and self.second:
            signs = unpack(self.packed["k_signs"], 1).view(-1, D).to(x) * 2 - 1
            length = self.packed["k_rest"].to(x) * ((math.pi / 2) ** 0.5 / D)
            x = x + signs @ random_matrix(D, False).to(x) * length
        return x


@dataclass(eq=False)
class TurboQuant(Turbo):
    """Every entry of the prompt, in few bits."""
    keeps_all = True

    def end_prefill(self):
        super().end_prefill()
        if self.length:
            self.pack()


variants = {f"turbo_{bits}": partial(TurboQuant, bits=bits) for bits in (2, 3)}
