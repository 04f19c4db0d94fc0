"""A cache whose heads keep different numbers of slots, stored without padding.

The slots of one head follow those of the previous head. Packed slots can be read, or removed by
`keep`, but not changed in place. One new token attends to them head by head, without padding.
Several new tokens at once pad them to the longest head, one layer at a time and only while
attention runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from nanollm.attention import wide
from nanollm.cache import NEVER, LayerCache, Stored
from nanollm.kernel_switch import kernel_for
from nanollm.ranking import indices, top


@dataclass(eq=False)
class PackedCache(LayerCache):
    def __post_init__(self):
        super().__post_init__()
        # per-slot tensors (slots of all heads, ...), packed by `pack`
        self.packed: dict[str, Tensor] = {}
        # (B, H): how many slots each head has in `packed`
        self.counts = None
        # the same numbers, read without waiting for a GPU
        self.sizes: list[int] = []
        # the largest count; `length` − `longest` slots came later
        self.longest = 0

    @property
    def packs(self) -> bool:
        """Whether heads differ and store only tensors that never change: k, v, pos and bias."""
        return self.ragged and self.slots.keys() <= {"k", "v", "pos", "bias"}

    def pack(self, kept: Tensor):
        """Keep only the slots where kept (B, H, S) is true, stored head after head."""
        i = kept.flatten().nonzero().squeeze(1)
        self.packed = {
            name: self.slot(name).flatten(0, 2).index_select(0, i)
            for name in self.slots
        }
        self.slots = {name: x[:, :, :0].clone() for name, x in self.slots.items()}
        self.counts = kept.sum(-1)
        self.sizes = self.counts.flatten().tolist()
        self.length = self.longest = max(self.sizes)

    def old(self, name: str) -> Tensor:
        """Return a packed tensor, (slots of all heads, ...)."""
        return self.packed[name]

    def new(self, name: str) -> Tensor:
        """Return the slots that came after the packed ones, (B, H, n, ...)."""
        return self.slots[name][:, :, : self.length - self.longest]

    def slot(self, name: str) -> Tensor:
        if not self.packed:
            return super().slot(name)
        # empty slots come first, so that each head's newest entries are neighbours of what came
        # later
        new, x = self.new(name), self.old(name)
        back = torch.arange(-self.longest, 0, device=x.device)
        end = self.counts.flatten().cumsum(0)[:, None]
        old = x[(end + back).clamp(min=0)].view(
            *new.shape[:2], self.longest, *x.shape[1:]
        )
        if name == "pos":
            old.masked_fill_(-back > self.counts[..., None], NEVER)
        return torch.cat((old, new), 2)

    def write(self, k: Tensor, v: Tensor, pos: Tensor, **state: Tensor):
        # `slots` holds only what came after the packed slots
        self.length -= self.longest
        super().write(k, v, pos, **state)
        self.length += self.longest

    def keep(self, i: Tensor):
        super().keep(i)
        self.packed, self.counts, self.sizes, self.longest = {}, None, [], 0

    def keep_chosen(self, kept: Tensor):
        """Keep only the slots where kept (B, H, S) is true. Pack them if the heads differ."""
        kept = kept & (self.pos != NEVER) if self.ragged else kept
        count = kept.sum(-1)
        self.ragged = self.ragged or int(count.min()) < int(count.max())
        self.pack(kept) if self.packs else self.keep(indices(kept))

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.packed or q.shape[2] > 1 or type(self).read is not LayerCache.read:
            return super().attention(q, pos)
        if (
            not self.watch
            and "k" in self.packed
            and (fast := kernel_for(q, "decode_attention", "attend_packed"))
        ):
            return fast(self, q), None
        return self.attend_packed(q)

    def attend_packed(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend from one new token (B, H·G, 1, D), which sees every slot: two small products per head."""
        k, v, *bias = (
            self.old(name).split(self.sizes)
            for name in ("k", "v", "bias")
            if name in self.slots
        )
        # (B·H, n, ...)
        new = {name: self.new(name).flatten(0, 1) for name in self.slots}
        # (B·H, G, D)
        q_h = (wide(q) * q.shape[-1] ** -0.5).view(len(k), -1, q.shape[-1])
        # score (slots, G)
        late, score = q_h @ wide(new["k"]).mT, [*map(torch.mm, map(wide, k), q_h.mT)]
        if bias:
            late = late + new["bias"].unsqueeze(1)
            score = [x + b.unsqueeze(1) for x, b in zip(score, bias[0])]
        # (B·H, longest, G)
        score = pad_sequence(score, True, -torch.inf, padding_side="left")
        p = torch.cat((score.mT, late), 2).softmax(-1)
        old, late = p.to(q).split((self.longest, p.shape[2] - self.longest), 2)
        y = torch.stack(
            [
                p_h[:, self.longest - n :] @ v_h
                for p_h, n, v_h in zip(old, self.sizes, v)
            ]
        )
        y = (y + late @ new["v"]).view_as(q)
        return y, p.view(*self.counts.shape, -1, 1, self.length) if self.watch else None

    def stored(self) -> list[Stored]:
        if not self.packed:
            return super().stored()
        old = [
            Stored(x, x.numel(), model_dtype=name != "bias")
            for name, x in self.packed.items()
        ]
        new = [
            Stored(x, self.new(name).numel(), model_dtype=name in ("k", "v"))
            for name, x in self.slots.items()
        ]
        return (
            old
            + new
            + [Stored(x, x.numel(), model_dtype=x.dim() > 3) for x in self.beside()]
        )

    def beside(self) -> list[Tensor]:
        return [] if self.counts is None else [self.counts]


def keep_highest(caches: list[PackedCache], scores: list[Tensor], budget: int):
    """Keep the highest scores (B, H, S) of all heads of all caches: `budget` entries a head on average.

    If scores are equal, the newest token of the last head of the last cache stays. A score of −∞
    never stays.
    """
    device, S = scores[-1].device, max(x.shape[2] for x in scores)
    scores = [
        x.masked_fill(cache.pos == NEVER, -torch.inf).to(device)
        for cache, x in zip(caches, scores)
    ]
    # (B, L, H, S)
    ranked = torch.stack(
        [F.pad(x, (0, S - x.shape[2]), value=-torch.inf) for x in scores], 1
    )
    L, H = ranked.shape[1:3]
    kept = top(ranked.flatten(1), L * H * budget).view_as(ranked) & (
        ranked > -torch.inf
    )
    for cache, stays in zip(caches, kept.unbind(1)):
        cache.keep_chosen(stays[:, :, : cache.length].to(cache.pos.device))
