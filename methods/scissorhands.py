"""Scissorhands: a KV cache that never exceeds its budget (Liu et al., NeurIPS 2023, arXiv 2305.17118).

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
- w is 400, as in the paper, whose texts have 2048 tokens; ours are shorter.

The authors' code has no budget: it keeps the newest 10 entries, and those that exceeded the 90th
percentile of their row in one of the last 100 steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from nanollm.cache import LayerCache, PerEntry
from nanollm.check import check_budget, whole


@dataclass(eq=False)
class BudgetCache(LayerCache):
    """Algorithm 1: the cache never has more than `budget` slots, from the first token on.

    `importance` decides which entries stay: here the newest. Subclasses override it.
    """

    budget: int  # slots per key/value head, B
    recent: int = 10  # newest entries, which are never dropped, r
    # entries dropped when full, m; None: B/2, but at most B − r
    at_a_time: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.recent < 0:
            raise ValueError(f"recent is {self.recent}; it must be at least 0")
        if self.at_a_time is not None:
            whole("at_a_time", self.at_a_time, 1)
        leave, stay = self.at_a_time or 1, self.newest()
        check_budget(
            self.budget,
            stay + leave,
            f"the newest {stay} stay and {leave} leave at a time; lower recent or at_a_time",
        )
        if self.at_a_time is None:
            self.at_a_time = max(1, min(self.budget // 2, self.budget - stay))

    def newest(self) -> int:
        """Return how many of the newest entries are never dropped."""
        return self.recent

    def pieces(self, *new: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Cut the new tokens into pieces that fit into the free slots; drop entries when none is free.

        So prompt chunks of any length give the same result as single tokens.
        """
        start, T = 0, new[0].shape[2]
        while start < T:
            if self.length == self.budget:
                newest = self.pos >= self.seen - self.newest()
                importance = self.importance().masked_fill(newest, math.inf)
                self.shrink(importance, self.budget - self.at_a_time)

            end = min(start + self.budget - self.length, T)
            q, k, v, pos = new
            yield from super().pieces(
                *(x[:, :, start:end] for x in (q, k, v)), pos[:, start:end]
            )
            start = end

    def capacity(self, n: int) -> int:
        return min(super().capacity(n), self.budget)

    def importance(self) -> Tensor:
        """Return the importance of every slot, (B, H, S); the slots with the lowest leave."""
        return self.pos.float()


@dataclass(eq=False)
class Scissorhands(BudgetCache):
    """Algorithm 2: an entry's unimportance is counted over the last w steps.

    A slot also stores one bit for each of these steps, and their sum: ⌈w/8⌉ + 4 bytes.
    """

    history: int = 400  # steps over which unimportance is counted, w
    count = PerEntry(torch.int32)  # I

    def __post_init__(self):
        super().__post_init__()
        whole("history", self.history, 1, 2**20)  # at most 128 KiB of bits per slot
        # no more queries than bits: each step in `observe` has a bit of its own
        self.watch = self.history

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        bits = k.new_zeros(*k.shape[:3], math.ceil(self.history / 8), dtype=torch.uint8)
        super().write(k, v, pos, unimportant=bits)

    def observe(self, q: Tensor, p: Tensor):
        # s, (n,)
        step = torch.arange(self.seen - p.shape[3], self.seen, device=p.device) + 1

        # 1{α_{s,j} < 1/s} for the tokens present at step s: (B, H, S, n)
        weight = p.mean(2, dtype=torch.float32).mT
        now = ((weight < 1 / step) & (self.pos[..., None] < step)).to(torch.uint8)

        # the bits are a ring: step s overwrites step s − w, at place s mod w (w = 4: step 6
        # overwrites 2)
        ring, place = self.slot("unimportant"), step % self.history
        byte, bit = place // 8, (place % 8).to(torch.uint8)
        before = ring[..., byte] >> bit & 1

        # flip the bits that differ; different bits of one byte can be added, as in 0001 + 0100 =
        # 0101
        ring ^= torch.zeros_like(ring).index_add_(-1, byte, (before ^ now) << bit)
        self.count += now.sum(-1, dtype=torch.int32) - before.sum(-1, dtype=torch.int32)
        super().observe(q, p)

    def importance(self) -> Tensor:
        return -self.count.float()


variants = {"scissorhands": Scissorhands}
