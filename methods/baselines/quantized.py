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

from methods.baselines.rounded import check_head_dim, pack, quantise, unpack
from nanollm.attention import wide
from nanollm.cache import Method, Slots
from nanollm.slots import Stored, all_live


class QuantizedSlots(Slots):
    """Older tokens are in `rounded`, as codes. Newer tokens are exact, in the slots."""

    def __init__(self, *place):
        super().__init__(*place)
        self.bits = self.method.bits
        self.group_size = self.method.group_size
        # (B, H, groups of tokens, ...): codes, zeros, scales
        self.rounded: dict[str, Tensor] = {}
        if self.model is not None:
            check_head_dim(self.w_o.shape[-1], self.group_size)

    def write(
        self,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ):
        if not self.seen:
            first = pos[:, :1].int().view(-1, 1, 1)
            self.start = first.expand(*k.shape[:2], 1)  # (B, H, 1)
        super().write(k, v, pos)

    def round(self, groups: int):
        """Round the oldest exact tokens, so many groups of them."""
        n = groups * self.group_size
        k = self.k[:, :, :n]
        v = self.v[:, :, :n]
        k = k.unflatten(2, (groups, -1))
        v = v.unflatten(2, (groups, -1))
        # k (B, H, groups, tokens, D): each channel over the tokens
        k_code, k_zero, k_scale = quantise(k, self.bits, 3)
        # v (B, H, groups, tokens, D/g, g): each token over g channels
        g = min(self.group_size, k.shape[-1])
        v_code, v_zero, v_scale = quantise(v.unflatten(-1, (-1, g)), self.bits, 5)
        new = dict(
            k=pack(k_code.flatten(3), self.bits),
            k_zero=k_zero,
            k_scale=k_scale,
            v=pack(v_code.flatten(3), self.bits),
            v_zero=v_zero,
            v_scale=v_scale,
        )
        for name, x in new.items():
            if name in self.rounded:
                x = torch.cat((self.rounded[name], x), 2)
            self.rounded[name] = x
        newer = torch.arange(n, self.length, device=k.device)
        self.keep(newer.expand(*k.shape[:2], -1))

    def codes(self, name: str) -> Tensor:
        """Return the codes of "k" or "v", (B, H, groups of tokens, tokens, D)."""
        code = unpack(self.rounded[name], self.bits)
        return code.unflatten(3, (self.group_size, -1))

    def ranges(self, like: Tensor) -> dict[str, Tensor]:
        """Return zeros and scales, in the dtype of `like`."""
        names = "k_zero", "k_scale", "v_zero", "v_scale"
        return {name: self.rounded[name].to(like) for name in names}

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        k, v, pos, bias = super().read()
        if not self.rounded:
            return k, v, pos, bias

        r = self.ranges(k)
        old_k = self.codes("k").to(k)
        old_k = old_k * r["k_scale"] + r["k_zero"]
        channel_groups = r["v_zero"].shape[4]
        old_v = self.codes("v").to(k).unflatten(-1, (channel_groups, -1))
        old_v = old_v * r["v_scale"] + r["v_zero"]
        # (B, H, groups, tokens, …) → (B, H, rounded tokens, D), then the exact ones
        k = torch.cat((old_k.flatten(2, 3), k), 2)
        old_v = old_v.flatten(4).flatten(2, 3)
        v = torch.cat((old_v, v), 2)
        return k, v, self.positions(), None

    def attention(
        self,
        q: Tensor,
        pos: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from one new token to the codes, without restoring keys and values.

        A group shares its scale and zero. So they are multiplied into the query once, not into
        every key; scale and zero of keys hold for a channel, those of values for a token:

            keys:    q·(zero + scale·code_i) = (q·scale)·code_i + q·zero
            values:  Σ_i p_i (zero_i + scale_i code_i) = Σ_i (p_i scale_i) code_i + Σ_i p_i zero_i
        """
        if not self.rounded or q.shape[2] > 1:
            return super().attention(q, pos)
        k = self.k
        B, _, _, D = q.shape
        grouped = wide(q).view(B, k.shape[1], 1, -1, D)  # (B, H, 1, G, D)
        grouped = grouped * D**-0.5
        r = self.ranges(grouped)

        code = self.codes("k").to(grouped)
        old = grouped * r["k_scale"] @ code.mT
        old = old + grouped @ r["k_zero"].mT
        # (B, H, groups, G, tokens) → (B, H, G, tokens)
        old = old.transpose(2, 3).flatten(3)
        new = grouped[:, :, 0] @ wide(k).mT
        p = torch.cat((old, new), -1).softmax(-1)  # (B, H, G, S)
        rounded = p.shape[-1] - self.length
        old = p[..., :rounded]
        new = p[..., rounded:]

        # values: (B, H, groups of channels, rounded tokens, channels)
        # one range per token and group
        scale = r["v_scale"].flatten(2, 3).transpose(2, 3)
        zero = r["v_zero"].flatten(2, 3).transpose(2, 3)
        code = self.codes("v").to(grouped).flatten(2, 3)
        code = code.unflatten(-1, (scale.shape[2], -1))
        code = code.transpose(2, 3)
        old = old.unsqueeze(2)  # (B, H, 1, G, rounded tokens)
        y = old * scale.mT @ code
        y = y + (old * zero.mT).sum(-1, keepdim=True)
        # (B, H, groups, G, channels) → (B, H, G, D)
        y = y.transpose(2, 3).flatten(3) + new @ wide(self.v)
        y = y.reshape(q.shape).to(q)
        if not self.watch:
            return y, None
        return y, p.unsqueeze(3)

    def positions(self) -> Tensor:
        """Return the positions of the rounded tokens, which are consecutive, and the exact ones."""
        n = self.seen - self.length
        rounded = self.start + torch.arange(
            n, device=self.pos.device, dtype=torch.int32
        )
        return torch.cat((rounded, self.pos), 2)

    def stored(self) -> list[Stored]:
        rounded = [all_live(x) for x in self.rounded.values()]
        return super().stored() + rounded


@dataclass
class Quantized(Method):
    """Round the oldest exact tokens whenever they fill groups."""

    bits: int = 2  # bits per number, 1 to 8
    # tokens that share a key channel's range; channels that share a value's
    group_size: int = 32
    residual_length: int = 32  # newest tokens, which are never rounded, R
    store = QuantizedSlots

    def __post_init__(self):
        if not 1 <= self.bits <= 8 or self.group_size < 1 or self.residual_length < 0:
            raise ValueError(
                f"bits {self.bits} must be 1 to 8, group_size {self.group_size} at least 1 "
                f"and residual_length {self.residual_length} at least 0"
            )

    def evict(self, layer: QuantizedSlots):
        groups = (layer.length - self.residual_length) // self.group_size
        if groups > 0:
            layer.round(groups)


variants = {
    f"quantized_{bits}": partial(Quantized, bits=bits, residual_length=16)
    for bits in (2, 3, 4)
}
