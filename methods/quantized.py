"""The whole cache in few bits: KIVI (Liu et al., ICML 2024, arXiv 2402.02750).

No token is dropped; every number of it is rounded. Keys have a few channels that are always large, so they are rounded channel
by channel over a group of tokens; values have none, and are rounded token by token over a group of channels.

    x ≈ zero + scale · code,   code ∈ {0 … 2^bits − 1},   zero = min, scale = (max − min)/(2^bits − 1) of the group

The newest tokens stay exact, since a group of keys is rounded only when it is full, and they matter most.

Differs from the authors' code: keys and values alike keep `exact` to `exact` + `group` − 1 tokens as they are (there, R values
and 0 to R − 1 keys), and codes are packed bit by bit, so that a 3-bit code takes 3 bits. No budget of entries: the size follows from `bits`.
"""
from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor

from nanollm.cache import ALL, LayerCache, indices, rank, spread

BITS = (torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1).to(torch.uint8).view(torch.int64)[:, 0]  # of a byte, a byte each


def pack(code: Tensor, bits: int) -> Tensor:
    """Codes (..., D) below 2^bits as uint8 (..., bits, D/8): the lowest bits of eight codes in a byte, then the next ones."""
    bit = torch.arange(8, dtype=torch.uint8, device=code.device)
    planes = code.to(torch.uint8).unsqueeze(-2) >> bit[:bits, None] & 1
    return (planes.unflatten(-1, (-1, 8)) << bit).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The codes (..., D), uint8, of packed (..., bits, D/8)."""
    byte = BITS.to(packed.device)
    return sum(byte[plane.int()] << i for i, plane in enumerate(packed.unbind(-2))).view(torch.uint8)


def quantise(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x, and the zero and scale of each group, which lies along `dim` and is of size 1 there; 16 bits each."""
    zero, high = x.amin(dim, keepdim=True).half(), x.amax(dim, keepdim=True)
    scale = ((high - zero.to(x)) / (2 ** bits - 1)).half()
    if not scale.isfinite().all():  # as when zero is not
        raise ValueError(f"keys or values between {x.min():g} and {x.max():g} are too large for ranges of 16 bits")
    code = ((x - zero.to(x)) / scale.to(x).clamp(min=2 ** -24)).round().clamp(0, 2 ** bits - 1)
    return code.to(torch.uint8), zero, scale


@dataclass(eq=False)
class Quantized(LayerCache):
    """Exact tokens are in the slots; rounded ones, which came before them, in `rounded`."""
    bits: int = 2    # a number, 1 to 8
    group: int = 32  # tokens that share a key channel's range, and channels that share a value's
    exact: int = 32  # newest tokens that are never rounded

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.bits <= 8 or self.group < 1 or self.exact < 0:
            raise ValueError(f"bits {self.bits} must be 1 to 8, group {self.group} at least 1 and exact {self.exact} at least 0")
        self.rounded: dict[str, Tensor] = {}  # (B, H, groups of tokens, ...): codes, zero and scale of keys and values

    def link(self, layer: int, layers: int, below: LayerCache | None, w_o: Tensor, freq: Tensor | None):
        D = w_o.shape[-1]
        if D % 8 or D % min(self.group, D):
            raise ValueError(f"head dim {D} must be a multiple of 8 and of the group {self.group}; choose another group")
        super().link(layer, layers, below, w_o, freq)

    def write(self, k: Tensor, v: Tensor, pos: Tensor, **state: Tensor):
        if not self.seen:
            self.start = pos[:, :1].int().view(-1, 1, 1).expand(*k.shape[:2], 1)  # (B, H, 1)
        super().write(k, v, pos, **state)

    def forget(self):
        """Round the oldest exact tokens, whole groups only."""
        n = (self.length - self.exact) // self.group * self.group
        if n > 0:
            self.round(torch.arange(self.length, device=self.pos.device).expand_as(self.pos) < n)

    def round(self, leaves: Tensor, **state: Tensor):
        """Slots of a mask (B, H, S) leave to be rounded, as many in every head; of each `state` (B, H, S) what is theirs goes with them."""
        i, D = indices(leaves), self.k.shape[-1]
        k, v = (x.gather(2, spread(i, x)).unflatten(2, (-1, self.group)) for x in (self.k, self.v))  # (B, H, groups, group, D)
        new = dict(zip(("k", "k_zero", "k_scale"), quantise(k, self.bits, 3))) | {name: x.gather(2, i) for name, x in state.items()}
        code, zero, scale = quantise(v.unflatten(-1, (-1, min(self.group, D))), self.bits, 5)   # (B, H, groups, group, D/g, g)
        new |= dict(v=code.flatten(4), v_zero=zero, v_scale=scale)
        for name, x in new.items():
            x = pack(x, self.bits) if name in ("k", "v") else x
            self.rounded[name] = torch.cat((self.rounded[name], x), 2) if name in self.rounded else x
        self.keep(indices(~leaves))

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        exact = super().read()
        if not self.rounded:
            return exact
        r, like = self.rounded, exact[0]
        k = unpack(r["k"]).to(like) * r["k_scale"].to(like) + r["k_zero"].to(like)
        v = unpack(r["v"]).to(like).unflatten(-1, (r["v_zero"].shape[4], -1)) * r["v_scale"].to(like) + r["v_zero"].to(like)
        at = r.get("at")
        if at is None:  # from the first token on
            at = self.start + torch.arange(self.seen - self.length, device=k.device, dtype=torch.int32)
        return *(torch.cat(x, 2) for x in zip((k.flatten(2, 3), v.flatten(4).flatten(2, 3), at), exact)), None

    def bytes(self) -> tuple[int, int]:
        rounded = sum(x.nbytes for x in self.rounded.values())
        return tuple(x + rounded for x in super().bytes())


@dataclass(eq=False)
class LowBitVague(Quantized):
    """Ours: KVReviver's three parts with few bits in place of its sketch. Beside the newest tokens, those that have had the
    most attention from all queries so far stay exact (while a group fills, more do); what is rounded does not come back."""
    heavy: int = 16  # tokens with the most attention that stay exact
    watch = ALL

    def __post_init__(self):
        super().__post_init__()
        if self.heavy < 0:
            raise ValueError(f"heavy {self.heavy} must be at least 0")

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        super().write(k, v, pos, accumulated=k.new_zeros(k.shape[:3], dtype=torch.float32))

    def observe(self, q: Tensor, p: Tensor):
        self.slot("accumulated").add_(p[..., -self.length:].sum((2, 3), dtype=torch.float32))  # rounded tokens come first
        super().observe(q, p)

    def forget(self):
        n = (self.length - self.exact - self.heavy) // self.group * self.group
        if n > 0:
            score = self.slot("accumulated").masked_fill(self.pos - self.start >= self.seen - self.exact, math.inf)
            self.round(rank(score, self.pos) >= self.length - n, at=self.pos)


variants = {f"quantized_{bits}": partial(Quantized, bits=bits, exact=16) for bits in (2, 3, 4)}  # they have no budget
