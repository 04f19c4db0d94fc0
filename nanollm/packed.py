"""A cache whose heads keep different numbers of slots, stored without padding.

The slots of one head follow those of the previous head. Packed slots can be read, or removed by `keep`, but
not changed in place. Attention pads them to the longest head, one layer at a time and only while it runs.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.cache import NEVER, LayerCache, Stored
from nanollm.kernel_switch import kernel_for


@dataclass(eq=False)
class PackedCache(LayerCache):

    def __post_init__(self):
        super().__post_init__()
        self.packed: dict[str, Tensor] = {}  # per-slot tensors (slots of all heads, ...), packed by `pack`
        self.counts = None                   # (B, H): how many slots each head has in `packed`
        self.longest = 0                     # the largest count; `length` − `longest` slots came later

    @property
    def packs(self) -> bool:
        """Whether heads differ and store only tensors that never change: k, v, pos and bias."""
        return self.ragged and self.slots.keys() <= {"k", "v", "pos", "bias"}

    def pack(self):
        """Store the slots head after head."""
        filled = self.pos != NEVER
        self.packed = {name: self.slot(name)[filled] for name in self.slots}
        self.slots = {name: x[:, :, :0].clone() for name, x in self.slots.items()}
        self.counts, self.longest = filled.sum(-1), self.length

    def slot(self, name: str) -> Tensor:
        if not self.packed:
            return super().slot(name)
        new = self.slots[name][:, :, :self.length - self.longest]
        x, offset = self.packed[name], torch.arange(self.longest, device=new.device)
        start = (self.counts.flatten().cumsum(0) - self.counts.flatten())[:, None]
        old = x[(start + offset).clamp(max=len(x) - 1)].view(*new.shape[:2], self.longest, *x.shape[1:])
        if name == "pos":
            old.masked_fill_(offset >= self.counts[..., None], NEVER)
        return torch.cat((old, new), 2)

    def write(self, k: Tensor, v: Tensor, pos: Tensor, **state: Tensor):
        self.length -= self.longest  # `slots` holds only what came after the packed slots
        super().write(k, v, pos, **state)
        self.length += self.longest

    def keep(self, i: Tensor):
        super().keep(i)
        self.packed, self.counts, self.longest = {}, None, 0

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """For one new token a kernel may read the packed slots without padding them."""
        plain = self.packed and not self.watch and q.shape[2] == 1 and type(self).read is LayerCache.read
        if plain and (fast := kernel_for(q, "decode_attention", "attend_packed")):
            return fast(self, q), None
        return super().attention(q, pos)

    def stored(self) -> list[Stored]:
        """Add the packed tensors, with 0 live numbers: the base class counts their live slots."""
        return super().stored() + [Stored(x, 0, model_dtype=True) for x in self.packed.values()]

    def beside(self) -> list[Tensor]:
        return [] if self.counts is None else [self.counts]
