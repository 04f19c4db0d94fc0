"""A store in few bits: an entry that a method keeps is rounded when the prompt ends.

An evicted entry is lost; a rounded one is only a little wrong. So with the same bytes a method may
keep several times as many entries in few bits. New tokens stay exact.

    x ≈ zero + scale · code,   code ∈ {0 … 2^bits − 1}
    zero = min of the group,   scale = (max − min)/(2^bits − 1)

A group is, as in KIVI (arXiv 2402.02750), of a key channel up to 32 neighbouring entries of a head,
and of a value up to 32 channels. Compressed again, rounded entries are rounded again.
"""

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.check import whole
from nanollm.method import NEVER
from nanollm.packed import PackedSlots
from nanollm.ranking import indices, taken

GROUP = (
    32  # entries that share a key channel's range; channels that share a value's range
)
WIDTHS = (
    8,
    4,
    2,
    1,
)  # bits that divide a byte; other codes are split into parts, 3 = 2 + 1


def pack(code: Tensor, bits: int) -> Tensor:
    """Pack codes (..., n) below 2^bits, n a multiple of 8, into uint8 (..., n·bits/8).

    The parts (see WIDTHS) follow one another. In a part of w bits, a byte holds 8/w codes that are
    n·w/8 apart. Example: 8 codes of 4 bits take 4 bytes; byte 0 holds codes 0 and 4, byte 1 codes 1
    and 5.
    """
    parts = []
    code = code.to(torch.uint8)
    for w in WIDTHS:
        if bits & w:
            place = torch.arange(0, 8, w, dtype=torch.uint8, device=code.device)
            codes = (code & 2**w - 1).unflatten(-1, (8 // w, -1)) << place[:, None]
            parts.append(codes.sum(-2, dtype=torch.uint8))
            code = code >> w
    return torch.cat(parts, -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack (..., n·bits/8) into codes (..., n), uint8. Long rows are faster."""
    widths = [w for w in WIDTHS if bits & w]
    sizes = [packed.shape[-1] * w // bits for w in widths]
    code = 0
    shift = 0
    for w, part in zip(widths, packed.split(sizes, -1)):
        part = torch.cat([part >> i & 2**w - 1 for i in range(0, 8, w)], -1)
        code = part << shift | code if shift else part
        shift += w
    return code


def quantise(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of x, and zero and scale of each group along `dim`, in 16 bits.

    The codes have x's shape; zero and scale have size 1 along `dim`.
    """
    zero = x.amin(dim, keepdim=True).half()
    high = x.amax(dim, keepdim=True)
    scale = ((high - zero.to(x)) / (2**bits - 1)).half()
    if not scale.isfinite().all():  # nor is it if zero is infinite
        raise ValueError(
            f"keys or values between {x.min():g} and {x.max():g} are too large "
            "for ranges of 16 bits; use a method that does not round this model's cache"
        )
    code = ((x - zero.to(x)) / scale.to(x).clamp(min=2**-24)).round()
    return code.clamp(0, 2**bits - 1).to(torch.uint8), zero, scale


def check_head_dim(D: int, group: int):
    """Raise ValueError unless codes of D channels fill bytes, and groups of channels fit."""
    if D % 8 or D % min(group, D):
        raise ValueError(
            f"head dim {D} must be a multiple of 8, and of {group} if it is larger; "
            "use the method without rounding for this model"
        )


class RoundedSlots(PackedSlots):
    """Packed slots whose keys and values are codes of few bits, from the prompt's end on."""

    def __init__(self, *place, bits: int = 4):
        super().__init__(*place)
        self.bits = whole("bits", bits, 1, 8)
        self.options = dict(bits=bits)
        self.groups: list[int] = []  # entries in each group of keys
        if self.model is not None:
            check_head_dim(self.w_o.shape[-1], GROUP)

    @property
    def rounded(self) -> bool:
        return "k_code" in self.packed

    def end_prompt(self):
        super().end_prompt()
        if self.length:
            self.pack(self.pos != NEVER)
        if self.packed and self.counts.any():
            self.round()

    def round(self):
        """Replace the packed keys and values by codes."""
        k = self.packed.pop("k")  # (entries of all heads, D)
        v = self.packed.pop("v")
        self.groups = [
            min(GROUP, n - i) for n in self.sizes for i in range(0, n, GROUP)
        ]
        groups = [quantise(keys, self.bits, 0) for keys in k.split(self.groups)]
        code, zero, scale = map(torch.cat, zip(*groups))
        self.packed["k_code"] = pack(code.flatten(), self.bits)
        self.packed["k_zero"] = zero
        self.packed["k_scale"] = scale

        code, zero, scale = quantise(
            v.unflatten(1, (-1, min(GROUP, v.shape[1]))), self.bits, 2
        )
        self.packed["v_code"] = pack(code.flatten(), self.bits)
        self.packed["v_zero"] = zero
        self.packed["v_scale"] = scale

    def codes(self, name: str) -> Tensor:
        """Return the codes of "k" or "v", (entries of all heads, D)."""
        return unpack(self.packed[f"{name}_code"], self.bits).view(
            -1, self.slots[name].shape[-1]
        )

    def old(self, name: str) -> Tensor:
        """Return a packed tensor, (entries of all heads, ...); "k" and "v" from their codes."""
        if name not in ("k", "v") or not self.rounded:
            return super().old(name)
        code = self.codes(name).to(self.slots[name])
        zero = self.packed[f"{name}_zero"].to(code)
        scale = self.packed[f"{name}_scale"].to(code)
        if name == "v":
            groups = code.unflatten(1, (zero.shape[1], -1))
            return groups.mul_(scale).add_(zero).flatten(1)
        group = self.group_of_entries()
        return F.embedding(group, zero).addcmul_(code, F.embedding(group, scale))

    def group_of_entries(self) -> Tensor:
        """Return the number of each entry's group of keys: groups of 2 and 1 → 0 0 1."""
        sizes = torch.tensor(self.groups, device=self.counts.device)
        return torch.repeat_interleave(sizes, output_size=sum(self.groups))

    # ---- eviction after the prompt: codes stay as they are, and are not rounded again ----

    def keep_chosen(self, kept: Tensor):
        if self.rounded and self.prompt_done:
            self.select(kept & (self.pos != NEVER))
        else:
            super().keep_chosen(kept)

    def keep(self, i: Tensor):
        if self.rounded and self.prompt_done:
            S = self.length
            kept = i.new_zeros(
                *i.shape[:2], S + 1, dtype=torch.bool
            )  # the last is for −1
            self.keep_chosen(kept.scatter(2, i.where(i >= 0, S), True)[:, :, :S])
        else:
            super().keep(i)

    def drop(self, i: Tensor):
        if self.packed:
            self.keep_chosen(
                torch.ones_like(self.pos, dtype=torch.bool).scatter(2, i, False)
            )
        else:
            super().drop(i)

    def select(self, kept: Tensor):
        """Keep only the slots where kept (B, H, S) is true: codes, and what came later."""
        old, new = kept.split((self.longest, kept.shape[2] - self.longest), 2)
        tail = indices(new)
        slots = {name: taken(self.new(name), tail.clamp(min=0)) for name in self.slots}
        slots["pos"].masked_fill_(tail < 0, NEVER)

        # rows of `packed` follow one another as the entries do in `filled`
        i = old[self.filled()].nonzero().squeeze(1)
        for name in ("k", "v"):
            self.packed[f"{name}_code"] = pack(self.codes(name)[i].flatten(), self.bits)
        left = self.group_of_entries()[i].bincount(minlength=len(self.groups))
        for name in self.packed.keys() - {"k_code", "k_zero", "k_scale", "v_code"}:
            self.packed[name] = self.packed[name][i]
        for name in ("k_zero", "k_scale"):
            self.packed[name] = self.packed[name][left > 0]
        self.groups = left[left > 0].tolist()

        self.slots = slots
        self.counted(old.sum(-1))
        self.length = self.longest + tail.shape[2]
        self.ragged = True  # from now on, empty slots may lie among the later ones

    def put(self, name: str, x: Tensor):
        if self.rounded and name in ("k", "v"):
            raise ValueError(
                "keys and values in few bits cannot be changed; use this method without rounding"
            )
        super().put(name, x)

    def without_gaps(self, late: Tensor, pos: Tensor) -> Tensor:
        if not self.ragged:
            return late
        return late.masked_fill((pos == NEVER).unsqueeze(1), -torch.inf)
