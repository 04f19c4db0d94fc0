"""A store whose heads keep different numbers of slots, without padding.

The slots of one head follow those of the previous head. One new token attends to them head by
head, not through `read`. Several new tokens at once pad them to the longest head, one layer at a
time and only while attention runs.

Example: two heads keep tokens 1 4 7 and 2; token 8 came later.

    packed["pos"]   1 4 7 2       sizes   3 1
    slots["pos"]    8 / 8         longest 3
    slot("pos")     1 4 7 8 / NEVER NEVER 2 8
"""

import torch
from torch import Tensor
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from nanollm.attention import wide
from nanollm.kernel_switch import kernel_for
from nanollm.method import NEVER
from nanollm.ranking import indices, top
from nanollm.slots import VECTORS, Slots, Stored, all_live


class PackedSlots(Slots):
    """Plain slots; `keep_chosen` packs heads of unlike length if the method has no `entry`."""

    def __init__(self, *place):
        super().__init__(*place)
        # per-slot tensors (slots of all heads, ...)
        self.packed: dict[str, Tensor] = {}
        self.counts = None  # (B, H): how many slots each head has in `packed`
        self.sizes: list[int] = []  # the same numbers, read without waiting for a GPU
        self.longest = 0  # the largest count; `length` − `longest` slots came later

    def pack(self, kept: Tensor):
        """Keep only the slots where kept (B, H, S) is true, stored head after head."""
        i = kept.flatten().nonzero().squeeze(1)
        packed = {}
        later = {}
        for name in self.slots:
            x = self.slot(name)
            rows = x.flatten(0, 2)
            packed[name] = rows.index_select(0, i)
            later[name] = x[:, :, :0].clone()
        self.packed = packed
        self.slots = later
        self.counted(kept.sum(-1))
        self.length = self.longest

    def counted(self, counts: Tensor):
        """Note how many slots each head has in `packed`, (B, H)."""
        self.counts = counts
        self.sizes = counts.flatten().tolist()
        self.longest = max(self.sizes)

    def unpack(self):
        self.packed = {}
        self.counts = None
        self.sizes = []
        self.longest = 0

    def old(self, name: str) -> Tensor:
        """Return a packed tensor, (slots of all heads, ...)."""
        return self.packed[name]

    def new(self, name: str) -> Tensor:
        """Return the slots that came after the packed ones, (B, H, n, ...)."""
        n = self.length - self.longest
        return self.slots[name][:, :, :n]

    def slot(self, name: str) -> Tensor:
        if not self.packed:
            return super().slot(name)
        new = self.new(name)
        x = self.old(name)
        # Empty slots come first, so that each head's newest entries are neighbours of what came
        # later. Example: heads of 3 and 1 slots end at rows 3 and 4 of `packed`; back = −3 −2 −1
        # gives rows 0 1 2 and 1 2 3, of which the second head hides two.
        back = torch.arange(-self.longest, 0, device=x.device)
        end = self.counts.flatten().cumsum(0)
        end = end.unsqueeze(1)
        rows = (end + back).clamp(min=0)
        B, H = self.counts.shape
        old = x[rows]
        old = old.view(B, H, self.longest, *x.shape[1:])
        if name == "pos":
            old.masked_fill_(~self.filled(), NEVER)
        return torch.cat((old, new), 2)

    def put(
        self,
        name: str,
        x: Tensor,
    ):
        super().put(name, x)
        if self.packed:  # then `slot` made a copy, and nothing was replaced yet
            old, new = self.split(x)
            dtype = self.packed[name].dtype
            self.packed[name] = old[self.filled()].to(dtype)
            self.new(name).copy_(new)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split x (B, H, S, ...) into the packed slots, padded, and those that came later."""
        later = x.shape[2] - self.longest
        return x.split((self.longest, later), 2)

    def filled(self) -> Tensor:
        """Return a mask (B, H, longest) of the padded packed slots that hold an entry."""
        device = self.counts.device
        back = torch.arange(self.longest, 0, -1, device=device)
        return back <= self.counts[..., None]

    def write(
        self,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ):
        # `slots` holds only what came after the packed slots
        self.length -= self.longest
        super().write(k, v, pos)
        self.length += self.longest

    def keep(self, i: Tensor):
        super().keep(i)
        self.unpack()

    def keep_chosen(self, kept: Tensor):
        """Keep only the slots where kept (B, H, S) is true. Pack as the class says."""
        if self.ragged:
            kept = kept & (self.pos != NEVER)
        count = kept.sum(-1)
        if int(count.min()) < int(count.max()):
            self.ragged = True
        # a method's own numbers may change at each step
        if self.ragged and not self.method.entry:
            self.pack(kept)
        else:
            self.keep(indices(kept))

    def attention(
        self,
        q: Tensor,
        pos: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.packed or q.shape[2] > 1:
            return super().attention(q, pos)
        if not self.watch and "k" in self.packed:
            fast = kernel_for(q, "decode_attention", "attend_packed")
            if fast:
                return fast(self, q), None
        return self.attend_packed(q)

    def attend_packed(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend from one new token (B, H·G, 1, D): two small products per head."""
        B, _, _, D = q.shape
        H = self.counts.shape[1]
        k = self.old("k").split(self.sizes)
        v = self.old("v").split(self.sizes)
        # (B·H, n, ...)
        new = {name: self.new(name).flatten(0, 1) for name in self.slots}
        q_h = wide(q) * D**-0.5
        q_h = q_h.view(B * H, -1, D)  # (B·H, G, D)

        # scores of the packed slots, (slots, G) head by head, and of the later ones, (B·H, G, n)
        score = []
        for k_h, q_one in zip(k, q_h):
            score.append(wide(k_h) @ q_one.mT)
        late = q_h @ wide(new["k"]).mT
        late = self.without_gaps(late, new["pos"])

        # one softmax over both, with the shorter heads padded on the left
        # (B·H, longest, G)
        score = pad_sequence(score, True, -torch.inf, padding_side="left")
        score = torch.cat((score.mT, late), 2)
        p = score.softmax(-1)
        old = p[:, :, : self.longest].to(q)
        late = p[:, :, self.longest :].to(q)
        y = []
        for p_h, v_h in zip(old, v):
            first = self.longest - len(v_h)
            y.append(p_h[:, first:] @ v_h)
        y = torch.stack(y) + late @ new["v"]
        y = y.view_as(q)
        if not self.watch:
            return y, None
        return y, p.view(B, H, -1, 1, self.length)

    def without_gaps(
        self,
        late: Tensor,
        pos: Tensor,
    ) -> Tensor:
        """Hide empty ones of the later slots (B·H, G, n) with pos (B·H, n); here there are none."""
        return late

    def stored(self) -> list[Stored]:
        if not self.packed:
            return super().stored()
        stored = []
        for name, x in self.packed.items():
            stored.append(Stored(x, x.numel(), name in VECTORS))
        stored += self.counted_slots(self.slots)
        stored.append(all_live(self.counts))
        return stored + self.remembered()

    def live(self) -> int:
        """Return how many of the slots that are not packed hold an entry."""
        if not self.packed:
            return super().live()
        return int((self.new("pos") != NEVER).sum())


def keep_highest(
    layers: list[PackedSlots],
    scores: list[Tensor],
    budget: int,
):
    """Keep the highest scores (B, H, S) of all heads of all layers: `budget` entries a head.

    That is the mean over heads, at most. If scores are equal, the newest token of the last head of
    the last layer stays. A score of −∞ never stays.
    """
    device = scores[-1].device
    longest = max(x.shape[2] for x in scores)
    ranked = []
    for layer, x in zip(layers, scores):
        x = x.masked_fill(layer.pos == NEVER, -torch.inf)
        padding = longest - x.shape[2]
        x = F.pad(x, (0, padding), value=-torch.inf)
        ranked.append(x.to(device))
    ranked = torch.stack(ranked, 1)  # (B, L, H, S)

    L, H = ranked.shape[1:3]
    kept = top(ranked.flatten(1), L * H * budget)
    kept = kept.view_as(ranked) & (ranked > -torch.inf)
    for i, layer in enumerate(layers):
        stays = kept[:, i, :, : layer.length]
        layer.keep_chosen(stays.to(layer.pos.device))
