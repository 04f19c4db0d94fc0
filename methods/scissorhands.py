"""Scissorhands: a KV cache that never exceeds its budget (Liu et al., arXiv 2305.17118).

The paper's hypothesis is the persistence of importance: a token that got attention will get
attention again. When the cache is full, it evicts the entries that were unimportant most often in
the last w steps. This also happens while the prompt is read. The newest r entries always stay.
Equal counts are common; then the newest entries stay.

    unimportance I_j = Σ_{s > t−w} 1{α_{s,j} < 1/s}
    drop the m entries with the highest I_j outside the newest r

Differs from the paper:
- The query heads of a group share an entry, so their mean weight is compared with 1/s.
- Steps before an entry came do not count. The paper pads its record with zeros, which counts each
  such step as unimportant, because 0 < 1/s.
- All layers have the same budget. Section 4.2 gives later layers more.
- w is 400, as in the paper, but its texts have 2048 tokens; Scissorhands reads at most 1024 in our
  tables.

The authors' code has no budget: in layers 5 to 35 it keeps the newest 10 entries, and those that
exceeded the 90th percentile of their row in one of the last 100 steps.
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor

from nanollm.cache import Method, Slots
from nanollm.check import check_budget, whole


class BudgetSlots(Slots):
    """Algorithm 1: never more than `budget` slots, from the first token on.

    When no slot is free, the method evicts. New tokens are taken in pieces that fit into the free
    slots, so prompt chunks of any length give the result of single tokens, up to rounding.
    """

    def room(self, T: int) -> int:
        budget = self.method.budget
        if self.length == budget:
            self.method.evict(self)
        return super().room(min(T, budget - self.length))

    def capacity(self, n: int) -> int:
        return min(super().capacity(n), self.method.budget)

    def evict(self):
        """Do nothing at the prompt's end or after a piece: `room` evicts."""


@dataclass
class Scissorhands(Method):
    """Algorithm 2: an entry's unimportance is counted over the last w steps.

    An entry also stores one bit for each of these steps, and their sum: ⌈w/8⌉ + 4 bytes.
    """

    budget: int  # slots per key/value head, B
    recent: int = 10  # newest entries, which are never dropped, r
    # entries dropped when full, m; None: B/2, but at most B − r
    at_a_time: int | None = None
    history: int = 400  # steps over which unimportance is counted, w
    store = BudgetSlots

    def __post_init__(self):
        recent = self.recent
        if recent < 0:
            raise ValueError(f"recent is {recent}; it must be at least 0")
        if self.at_a_time is not None:
            whole("at_a_time", self.at_a_time, 1)
        leave = self.at_a_time or 1
        check_budget(
            self.budget,
            recent + leave,
            f"the newest {recent} stay and {leave} leave at a time; lower recent or at_a_time",
        )
        whole("history", self.history, 1, 2**20)  # at most 128 KiB of bits per slot

    @property
    def watch(self) -> int:
        return self.history  # each step that is seen at once has a bit of its own

    @property
    def entry(self) -> dict:
        return dict(
            count=torch.int32, unimportant=(torch.uint8, math.ceil(self.history / 8))
        )

    def observe(
        self,
        layer: Slots,
        q: Tensor,
        p: Tensor,
    ):
        # s, (n,)
        step = torch.arange(layer.seen - p.shape[3], layer.seen, device=p.device) + 1

        # 1{α_{s,j} < 1/s} for the tokens present at step s: (B, H, S, n)
        weight = p.mean(2, dtype=torch.float32).mT
        now = (weight < 1 / step) & (layer.pos[..., None] < step)

        # I counts the last w steps: those that come minus those that leave
        bits = Bits(layer.slot("unimportant"), self.history)
        change = bits.replace(step, now.to(torch.uint8))
        layer.put("unimportant", bits.bytes)
        layer.put("count", layer.slot("count") + change)

    def evict(self, layer: Slots):
        newest = layer.pos >= layer.seen - self.recent
        importance = -layer.slot("count").float()
        half = max(1, min(self.budget // 2, self.budget - self.recent))
        leave = self.at_a_time or half
        layer.shrink(importance.masked_fill(newest, math.inf), self.budget - leave)


class Bits:
    """A bit for each of the last w steps, packed: bytes (..., ⌈w/8⌉). Step s overwrites step s − w.

    Example with w = 4: step 6 has the bit 6 mod 4 = 2, which was that of step 2.
    """

    def __init__(self, packed: Tensor, w: int):
        self.bytes = packed
        self.w = w

    def replace(self, step: Tensor, now: Tensor) -> Tensor:
        """Set the bits of steps (n,) to now (..., n); return by how much their sum grew, (...)."""
        place = step % self.w
        byte = place // 8
        bit = (place % 8).to(torch.uint8)
        before = self.bytes[..., byte] >> bit & 1

        # flip the bits that differ; different bits of one byte can be added: 0001 + 0100 = 0101
        flips = (before ^ now) << bit
        self.bytes = self.bytes ^ torch.zeros_like(self.bytes).index_add_(
            -1, byte, flips
        )
        return now.sum(-1, dtype=torch.int32) - before.sum(-1, dtype=torch.int32)


variants = {"scissorhands": Scissorhands}
