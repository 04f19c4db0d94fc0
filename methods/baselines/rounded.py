"""A store in few bits: an entry that a method keeps is rounded when the prompt ends.

An evicted entry is lost; a rounded one stays, with an error. So with the same bytes a method may
keep several times as many entries in few bits. `kvzip@4` stores what KVzip keeps in 4 bits.
`full@4` keeps every entry: it is KIVI (Liu et al., ICML 2024, arXiv 2402.02750).

    x ≈ zero + scale · code,   code ∈ {0 … 2^bits − 1}
    zero = min of the group,   scale = (max − min)/(2^bits − 1)

Groups are KIVI's. In its models some channels of the keys are always large, so keys are rounded per
channel: a group is one channel of up to 32 neighbouring entries of a head. Values have no such
channels there, so they are rounded per token: a group is up to 32 channels of one entry.

Differs from KIVI's code:
- Tokens after the prompt stay exact. There they are rounded, too, once they fill groups.
- All of the prompt is rounded. There its newest tokens stay exact, up to R of them.
- A head's last group of keys may be short.
- Codes are packed bit by bit, so a 3-bit code takes 3 bits.

When a later turn is compressed, rounded entries are rounded again.
"""

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.check import check_kept, whole
from nanollm.method import NEVER
from nanollm.packed import PackedSlots
from nanollm.ranking import indices, taken
from nanollm.slots import VECTORS

GROUP = 32  # entries that share a key channel's range; channels that share a value's
# bits that divide a byte; other codes are split into parts, 3 = 2 + 1
WIDTHS = [8, 4, 2, 1]


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
            lowest = code & 2**w - 1  # the w lowest bits
            code = code >> w
            rows = lowest.unflatten(-1, (8 // w, -1))  # of each byte, one code a row
            shifts = torch.arange(0, 8, w, dtype=torch.uint8)
            rows = rows << shifts[:, None].to(code.device)
            parts.append(rows.sum(-2, dtype=torch.uint8))
    return torch.cat(parts, -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack (..., n·bits/8) into codes (..., n), uint8."""
    widths = [w for w in WIDTHS if bits & w]
    sizes = [packed.shape[-1] * w // bits for w in widths]
    code = None
    shift = 0
    for w, part in zip(widths, packed.split(sizes, -1)):
        rows = [part >> i & 2**w - 1 for i in range(0, 8, w)]
        part = torch.cat(rows, -1)
        if shift:
            code = part << shift | code
        else:
            code = part
        shift += w
    return code


def quantise(
    x: Tensor,
    bits: int,
    dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of x, and zero and scale of each group along `dim`, in 16 bits.

    The codes have x's shape; zero and scale have size 1 along `dim`.
    """
    zero = x.amin(dim, keepdim=True).half()
    high = x.amax(dim, keepdim=True)
    scale = (high - zero.to(x)) / (2**bits - 1)
    scale = scale.half()
    if not scale.isfinite().all():  # nor is it if zero is infinite
        raise ValueError(
            f"keys or values between {x.min():g} and {x.max():g} are too large "
            "for ranges of 16 bits; use a method that does not round this model's cache"
        )
    step = scale.to(x).clamp(min=2**-24)
    code = ((x - zero.to(x)) / step).round()
    code = code.clamp(0, 2**bits - 1)
    return code.to(torch.uint8), zero, scale


def rounded(x: Tensor, bits: int, dim: int) -> Tensor:
    """Return x as its codes give it back, with a range for each group along `dim`."""
    code, zero, scale = quantise(x, bits, dim)
    return zero.to(x) + code * scale.to(x)


def check_head_dim(D: int):
    """Raise ValueError unless codes of D channels fill bytes, and groups of channels fit."""
    if D % 8 or D % min(GROUP, D):
        raise ValueError(
            f"head dim {D} must be a multiple of 8, and of {GROUP} if it is larger; "
            "use the method without rounding for this model"
        )


class RoundedSlots(PackedSlots):
    """Packed slots that store the keys and values of a prompt in few bits from its end on."""

    def __init__(
        self,
        *place,
        bits: int = 4,
    ):
        super().__init__(*place)
        self.bits = whole("bits", bits, 1, 8)
        self.options = dict(bits=bits)
        self.groups: list[int] = []  # entries in each group of keys
        if self.model is not None:
            check_head_dim(self.w_o.shape[-1])

    @property
    def rounded(self) -> bool:
        return "k_code" in self.packed

    def end_prompt(self):
        super().end_prompt()
        later = self.length - self.longest
        if later or not self.packed:
            self.pack(self.pos != NEVER)
        if "k" in self.packed and self.counts.any():
            self.round()

    def round(self):
        """Replace the packed keys and values by codes."""
        k = self.packed.pop("k")  # (entries of all heads, D)
        v = self.packed.pop("v")
        # a head of 70 entries has groups of 32, 32 and 6
        self.groups = []
        for n in self.sizes:
            for i in range(0, n, GROUP):
                self.groups.append(min(GROUP, n - i))
        rounded = []
        for keys in k.split(self.groups):
            rounded.append(quantise(keys, self.bits, 0))
        self.add_codes("k", *map(torch.cat, zip(*rounded)))

        # (entries, groups of channels, channels)
        v = v.unflatten(1, (-1, min(GROUP, v.shape[1])))
        self.add_codes("v", *quantise(v, self.bits, 2))

    def add_codes(
        self,
        name: str,
        code: Tensor,
        zero: Tensor,
        scale: Tensor,
    ):
        self.packed[f"{name}_code"] = pack(code.flatten(), self.bits)
        self.packed[f"{name}_zero"] = zero
        self.packed[f"{name}_scale"] = scale

    def codes(self, name: str) -> Tensor:
        """Return the codes of "k" or "v", (entries of all heads, D)."""
        D = self.slots[name].shape[-1]
        code = unpack(self.packed[f"{name}_code"], self.bits)
        return code.view(-1, D)

    def old(self, name: str) -> Tensor:
        """Return a packed tensor, (entries of all heads, ...); "k" and "v" from their codes."""
        if name not in VECTORS or not self.rounded:
            return super().old(name)
        code = self.codes(name).to(self.slots[name])
        zero = self.packed[f"{name}_zero"].to(code)
        scale = self.packed[f"{name}_scale"].to(code)
        if name == "v":
            code = code.unflatten(1, (zero.shape[1], -1))
            return code.mul_(scale).add_(zero).flatten(1)
        group = self.group_of_entries()
        zero = F.embedding(group, zero)
        scale = F.embedding(group, scale)
        return zero.addcmul_(code, scale)

    def group_of_entries(self) -> Tensor:
        """Return the number of each entry's group of keys: groups of 2 and 1 → 0 0 1."""
        sizes = torch.tensor(self.groups, device=self.counts.device)
        entries = sum(self.groups)
        return torch.repeat_interleave(sizes, output_size=entries)

    # ---- eviction after the prompt: codes stay as they are, and are not rounded again ----

    def keep_chosen(self, kept: Tensor):
        if self.rounded and self.prompt_done:
            self.select(kept & (self.pos != NEVER))
        else:
            super().keep_chosen(kept)

    def keep(self, i: Tensor):
        if self.rounded and self.prompt_done:
            B, H, S = self.pos.shape
            check_kept(i, (B, H, S))
            kept = i.new_zeros(B, H, S + 1, dtype=torch.bool)
            kept.scatter_(2, i.where(i >= 0, S), True)  # the last place is for −1
            self.keep_chosen(kept[:, :, :S])
        else:
            super().keep(i)

    def drop(self, i: Tensor):
        if self.packed:
            kept = torch.ones_like(self.pos, dtype=torch.bool)
            self.keep_chosen(kept.scatter(2, i, False))
        else:
            super().drop(i)

    def select(self, kept: Tensor):
        """Keep only the slots where kept (B, H, S) is true: codes, and what came later."""
        old, new = self.split(kept)
        tail = indices(new)
        later = {}
        for name in self.slots:
            x = self.new(name)
            later[name] = taken(x, tail.clamp(min=0))
        later["pos"].masked_fill_(tail < 0, NEVER)

        i = old[self.filled()].nonzero().squeeze(1)  # rows of `packed`
        if len(i):
            self.select_codes(i)
            self.counted(old.sum(-1))
        else:
            self.unpack()
        self.slots = later
        self.length = self.longest + tail.shape[2]
        self.ragged = True  # from now on, empty slots may lie among the later ones

    def select_codes(self, i: Tensor):
        """Keep only the entries i (n,) of `packed`; a group of keys goes with its last entry."""
        for name in VECTORS:
            code = self.codes(name)[i]
            self.packed[f"{name}_code"] = pack(code.flatten(), self.bits)
        group = self.group_of_entries()[i]
        left = group.bincount(minlength=len(self.groups))
        self.groups = left[left > 0].tolist()
        for name in ("k_zero", "k_scale"):
            self.packed[name] = self.packed[name][left > 0]
        for name in self.packed.keys() - {"k_code", "k_zero", "k_scale", "v_code"}:
            self.packed[name] = self.packed[name][i]

    def crop(self, n: int):
        if self.rounded and not self.prompt_done and 0 <= n < self.longest:
            self.keep(indices(self.pos != NEVER))  # back from codes
        super().crop(n)

    def put(
        self,
        name: str,
        x: Tensor,
    ):
        if self.rounded and name in VECTORS:
            raise ValueError(
                "keys and values in few bits cannot be changed; use this method without rounding"
            )
        super().put(name, x)

    def without_gaps(
        self,
        late: Tensor,
        pos: Tensor,
    ) -> Tensor:
        if not self.ragged:
            return late
        empty = (pos == NEVER).unsqueeze(1)
        return late.masked_fill(empty, -torch.inf)


variants = {}  # no method: a store for those without their own, as in kvzip@4
