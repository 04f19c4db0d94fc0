"""Ours: evict, then round. Another method chooses the entries; KIVI's rounding (quantized.py) shrinks them.

An evicted token is lost; a rounded one is only a little wrong. So with the same bytes a method may
keep several times as many entries in few bits. The prompt's kept entries are rounded once, at its
end. New tokens stay exact.

    x ≈ zero + scale · code:  keys channel by channel over up to 32 neighbouring entries of a head,
                              values entry by entry over up to 32 channels, as in KIVI

Heads may keep different numbers of entries. Compressed again, rounded entries are rounded again.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.baselines.kvzip import KVzip
from methods.baselines.quantized import pack, quantise, unpack
from nanollm.check import whole
from nanollm.packed import PackedCache

# entries that share a key channel's range; channels that share a value's range
GROUP = 32


@dataclass(eq=False)
class Rounded(PackedCache):
    """Mix-in for a PackedCache method: class RoundedX(Rounded, X)."""

    # bits per number, 1 to 8; 16: no rounding
    bits: int = field(default=4, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if whole("bits", self.bits, 1, 16) > 8 and self.bits != 16:
            raise ValueError(f"bits {self.bits} must be 1 to 8, or 16 for no rounding")

    def link(self, model, layer: int):
        super().link(model, layer)
        D = self.w_o.shape[-1]
        if D % 8 or D % min(GROUP, D):
            raise ValueError(
                f"head dim {D} must be a multiple of 8, and of {GROUP} if it is larger; "
                "use the method without rounding for this model"
            )

    @property
    def packs(self) -> bool:
        return (
            super().packs
            if self.bits == 16
            else self.slots.keys() <= {"k", "v", "pos", "bias"}
        )

    def pack(self, kept: Tensor):
        super().pack(kept)
        if self.bits == 16 or not self.counts.any():
            return
        k, v = self.packed.pop("k"), self.packed.pop("v")  # (entries of all heads, D)
        self.groups = [
            min(GROUP, n - i) for n in self.sizes for i in range(0, n, GROUP)
        ]
        groups = (quantise(keys, self.bits, 0) for keys in k.split(self.groups))
        code, zero, scale = map(torch.cat, zip(*groups))
        self.packed |= dict(
            k_code=pack(code.flatten(), self.bits), k_zero=zero, k_scale=scale
        )
        code, zero, scale = quantise(
            v.unflatten(1, (-1, min(GROUP, v.shape[1]))), self.bits, 2
        )
        self.packed |= dict(
            v_code=pack(code.flatten(), self.bits), v_zero=zero, v_scale=scale
        )

    def old(self, name: str) -> Tensor:
        """Return a packed tensor, (entries of all heads, ...); "k" and "v" are restored from codes."""
        if f"{name}_code" not in self.packed:
            return super().old(name)
        like = self.slots[name]
        code, zero, scale = (
            self.packed[f"{name}_{part}"] for part in ("code", "zero", "scale")
        )
        code = unpack(code, self.bits).view(-1, like.shape[-1]).to(like)
        zero, scale = zero.to(like), scale.to(like)
        if name == "v":
            return (
                code.unflatten(1, (zero.shape[1], -1)).mul_(scale).add_(zero).flatten(1)
            )
        group = torch.repeat_interleave(
            torch.tensor(self.groups, device=code.device), output_size=len(code)
        )
        return F.embedding(group, zero).addcmul_(code, F.embedding(group, scale))


@dataclass(eq=False)
class RoundedKVzip(Rounded, KVzip):
    """KVzip in few bits."""


variants = {"kvzip_4": RoundedKVzip}
