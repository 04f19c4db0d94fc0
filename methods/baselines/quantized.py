"""KIVI: the whole cache in few bits (Liu et al., ICML 2024, arXiv 2402.02750).

No token is evicted; every number is rounded to a few bits. Some channels of the keys are always
large, so keys are rounded per channel, over a group of tokens. Values have no such channels, so
they are rounded per token, over a group of channels.

    x ≈ zero + scale · code,   code ∈ {0 … 2^bits − 1}
    zero = min of the group,   scale = (max − min)/(2^bits − 1)

The newest tokens stay exact: they matter most, and a group of keys can be rounded only when it is
full.

Differs from the authors' code:
- The newest R to R + `group_size` − 1 keys and values are exact, with R = `residual_length`. There
  R values and 0 to R − 1 keys are exact.
- Codes are packed bit by bit, so a 3-bit code takes 3 bits.

There is no budget of entries: the size follows from `bits`.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanollm.attention import wide
from nanollm.cache import LayerCache

# bits that divide a byte; other codes are split into parts of these widths, 3 = 2 + 1
WIDTHS = 8, 4, 2, 1


def pack(code: Tensor, bits: int) -> Tensor:
    """Pack codes (..., n) below 2^bits, n a multiple of 8, into uint8 (..., n·bits/8).

    The parts (see WIDTHS) follow one another. In a part of w bits, a byte holds 8/w codes that are
    n·w/8 apart. Example: 8 codes of 4 bits take 4 bytes; byte 0 holds codes 0 and 4, byte 1 codes 1
    and 5.
    """
    parts, code = [], code.to(torch.uint8)
    for w in (w for w in WIDTHS if bits & w):
        place = torch.arange(0, 8, w, dtype=torch.uint8, device=code.device)
        codes = (code & 2**w - 1).unflatten(-1, (8 // w, -1)) << place[:, None]
        parts.append(codes.sum(-2, dtype=torch.uint8))
        code = code >> w
    return torch.cat(parts, -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack (..., n·bits/8) into codes (..., n), uint8. Long rows are faster."""
    widths, code, shift = [w for w in WIDTHS if bits & w], 0, 0
    for w, part in zip(
        widths, packed.split([packed.shape[-1] * w // bits for w in widths], -1)
    ):
        part = torch.cat([part >> i & 2**w - 1 for i in range(0, 8, w)], -1)
        code = part << shift | code if shift else part
        shift += w
    return code


def quantise(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of x, and zero and scale of each group along `dim`, in 16 bits.

    The codes have x's shape; zero and scale have size 1 along `dim`.
    """
    zero, high = x.amin(dim, keepdim=True).half(), x.amax(dim, keepdim=True)
    scale = ((high - zero.to(x)) / (2**bits - 1)).half()
    if not scale.isfinite().all():  # nor is it if zero is infinite
        raise ValueError(
            f"keys or values between {x.min():g} and {x.max():g} are too large "
            "for ranges of 16 bits; use a method that does not round this model's cache"
        )
    code = (
        ((x - zero.to(x)) / scale.to(x).clamp(min=2**-24)).round().clamp(0, 2**bits - 1)
    )
    return code.to(torch.uint8), zero, scale


@dataclass(eq=False)
class Quantized(LayerCache):
    """Older tokens are in `rounded`, as codes. Newer tokens are exact, in the slots."""

    keeps_all = True
    bits: int = 2  # bits per number, 1 to 8
    # tokens that share a key channel's range; channels that share a value's range
    group_size: int = 32
    residual_length: int = 32  # newest tokens, which are never rounded, R

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.bits <= 8 or self.group_size < 1 or self.residual_length < 0:
            raise ValueError(
                f"bits {self.bits} must be 1 to 8, group_size {self.group_size} at least 1 "
                f"and residual_length {self.residual_length} at least 0"
            )
        # (B, H, groups of tokens, ...): codes, zeros and scales
        self.rounded: dict[str, Tensor] = {}

    def link(self, model, layer: int):
        super().link(model, layer)
        D = self.w_o.shape[-1]
        if D % 8 or D % min(self.group_size, D):
            raise ValueError(
                f"head dim {D} must be a multiple of 8 and of group_size {self.group_size}; "
                "choose another group_size"
            )

    def write(self, k: Tensor, v: Tensor, pos: Tensor, **state: Tensor):
        if not self.seen:
            # (B, H, 1)
            self.start = pos[:, :1].int().view(-1, 1, 1).expand(*k.shape[:2], 1)
        super().write(k, v, pos, **state)

    def evict(self):
        """Round the oldest exact tokens, in whole groups."""
        n = (self.length - self.residual_length) // self.group_size * self.group_size
        if n <= 0:
            return
        g = min(self.group_size, self.k.shape[-1])
        k, v = (
            x[:, :, :n].unflatten(2, (-1, self.group_size)) for x in (self.k, self.v)
        )
        # k (B, H, groups, tokens, D): each channel over the tokens
        k_code, k_zero, k_scale = quantise(k, self.bits, 3)
        # v (B, H, groups, tokens, D/g, g): each token over g channels
        v_code, v_zero, v_scale = quantise(v.unflatten(-1, (-1, g)), self.bits, 5)
        new = dict(k=pack(k_code.flatten(3), self.bits), k_zero=k_zero, k_scale=k_scale)
        new |= dict(
            v=pack(v_code.flatten(3), self.bits), v_zero=v_zero, v_scale=v_scale
        )
        for name, x in new.items():
            before = [self.rounded[name]] if name in self.rounded else []
            self.rounded[name] = torch.cat((*before, x), 2)
        self.keep(
            torch.arange(n, self.length, device=self.pos.device).expand(
                *self.pos.shape[:2], -1
            )
        )

    def codes(self, name: str) -> Tensor:
        """Return the codes of "k" or "v", (B, H, groups of tokens, tokens, D)."""
        return unpack(self.rounded[name], self.bits).unflatten(3, (self.group_size, -1))

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        k, v, pos, bias = super().read()
        if not self.rounded:
            return k, v, pos, bias

        r = {
            name: x.to(k)
            for name, x in self.rounded.items()
            if name.endswith(("zero", "scale"))
        }
        old_k, old_v = (self.codes(name).to(k) for name in "kv")
        old_k = old_k * r["k_scale"] + r["k_zero"]
        old_v = (
            old_v.unflatten(-1, (r["v_zero"].shape[4], -1)) * r["v_scale"] + r["v_zero"]
        )
        # (B, H, groups, tokens, …) → (B, H, rounded tokens, D), then the exact ones
        k = torch.cat((old_k.flatten(2, 3), k), 2)
        v = torch.cat((old_v.flatten(4).flatten(2, 3), v), 2)
        return k, v, torch.cat((self.rounded_pos(), pos), 2), None

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend from one new token to the codes, without restoring keys and values.

        A group shares its scale and zero. So they are multiplied into the query once, not into
        every key:

            keys:    q·(zero + scale·code_i) = (q·scale)·code_i + q·zero,  scale and zero channel by channel
            values:  Σ_i p_i (zero_i + scale_i code_i) = Σ_i (p_i scale_i) code_i + Σ_i p_i zero_i
        """
        if not self.rounded or q.shape[2] > 1:
            return super().attention(q, pos)
        k, v, (B, _, _, D) = self.k, self.v, q.shape
        grouped = wide(q).view(B, k.shape[1], 1, -1, D) * D**-0.5  # (B, H, 1, G, D)
        r = {
            name: x.to(grouped)
            for name, x in self.rounded.items()
            if name.endswith(("zero", "scale"))
        }

        code = self.codes("k").to(grouped)
        # (B, H, groups, G, tokens)
        old = grouped * r["k_scale"] @ code.mT + grouped @ r["k_zero"].mT
        new = grouped[:, :, 0] @ wide(k).mT
        # (B, H, G, S)
        p = torch.cat((old.transpose(2, 3).flatten(3), new), -1).softmax(-1)
        old, new = p.split((p.shape[-1] - self.length, self.length), -1)

        # values: (B, H, groups of channels, rounded tokens, channels); one range per token and
        # group
        scale, zero = (
            r[name].flatten(2, 3).transpose(2, 3) for name in ("v_scale", "v_zero")
        )
        code = (
            self.codes("v")
            .to(grouped)
            .flatten(2, 3)
            .unflatten(-1, (scale.shape[2], -1))
            .transpose(2, 3)
        )
        old = old.unsqueeze(2)  # (B, H, 1, G, rounded tokens)
        # (B, H, groups, G, channels)
        y = old * scale.mT @ code + (old * zero.mT).sum(-1, keepdim=True)
        y = y.transpose(2, 3).flatten(3) + new @ wide(v)
        return y.reshape(q.shape).to(q), p.unsqueeze(3) if self.watch else None

    def rounded_pos(self) -> Tensor:
        """Return the positions of the rounded tokens, (B, H, n), which are consecutive."""
        return self.start + torch.arange(
            self.seen - self.length, device=self.pos.device, dtype=torch.int32
        )

    def beside(self) -> list[Tensor]:
        return [*self.rounded.values()]


variants = {
    f"quantized_{bits}": partial(Quantized, bits=bits, residual_length=16)
    for bits in (2, 3, 4)
}
