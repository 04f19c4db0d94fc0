"""Scissorhands: a KV cache with a fixed budget (Liu et al., NeurIPS 2023, arXiv 2305.17118).

The idea is the persistence of importance: a token that was attended to will be attended to again. The cache
never exceeds its budget, neither while the prompt is read nor later. Whenever it is full, the entries that
were unimportant most often in the last w steps make room. The newest r never do. Equal counts are common, and
then the newest stay.

    unimportance I_j = Σ_{s > t−w} 1{α_{s,j} < 1/s}
    drop the m entries with the highest I_j outside the newest r

Differs from the paper: the query heads of a group share an entry, so their mean weight is compared with 1/s.
A step before an entry came counts as nothing. Padded with zeros, its record would count each such step as
unimportant, for 0 < 1/s (`Padded` in theory/persistence_measured.py). All layers have the same budget;
Section 4.2 gives later layers more (`tilted`, there). w is 400 however long the text is. The authors' code
has no budget: it keeps what exceeded the 90th percentile of its row in one of the last 100 steps, and the
newest 10.
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
    """Algorithm 1: never more than `budget` slots, from the first token on.

    `importance` says what stays. Here it is the newest; subclasses override it.
    """
    budget: int                   # slots per key/value head, B
    recent: int = 10              # newest entries, never dropped, r
    at_a_time: int | None = None  # entries dropped when full, m; None: B/2, or as many as `recent` leaves

    def __post_init__(self):
        super().__post_init__()
        if self.recent < 0 or (self.at_a_time is not None and self.at_a_time < 1):
            raise ValueError(f"recent {self.recent} must be at least 0 "
                             f"and at_a_time {self.at_a_time} at least 1")
        leave, stay = self.at_a_time or 1, self.newest()
        check_budget(self.budget, stay + leave,
                     f"the newest {stay} stay and {leave} leave at a time; lower recent or at_a_time")
        if self.at_a_time is None:
            self.at_a_time = max(1, min(self.budget // 2, self.budget - stay))

    def newest(self) -> int:
        """How many of the newest entries are never dropped."""
        return self.recent

    def pieces(self, *new: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """As long as the room there is: chunks of any length give what single tokens would."""
        start, T = 0, new[0].shape[2]
        while start < T:
            if self.length == self.budget:
                newest = self.pos >= self.seen - self.newest()
                importance = self.importance().masked_fill(newest, math.inf)
                self.shrink(importance, self.budget - self.at_a_time)

            end = min(start + self.budget - self.length, T)
            q, k, v, pos = new
            yield from super().pieces(*(x[:, :, start:end] for x in (q, k, v)), pos[:, start:end])
            start = end

    def capacity(self, n: int) -> int:
        return min(super().capacity(n), self.budget)

    def importance(self) -> Tensor:
        """(B, H, S): the slots with the lowest leave."""
        return self.pos.float()


@dataclass(eq=False)
class Scissorhands(BudgetCache):
    """Algorithm 2. A slot also remembers a bit for each of the last w steps, and their sum: ⌈w/8⌉ + 4 bytes.
    """
    history: int = 400  # steps over which an entry's unimportance is counted, w
    count = PerEntry(torch.int32)

    def __post_init__(self):
        super().__post_init__()
        whole("history", self.history, 1, 2 ** 20)  # a slot's bits: 128 KiB at most
        self.watch = self.history  # so that no place of the ring comes up twice in one `observe`

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        bits = k.new_zeros(*k.shape[:3], math.ceil(self.history / 8), dtype=torch.uint8)
        super().write(k, v, pos, unimportant=bits)

    def observe(self, q: Tensor, p: Tensor):
        step = torch.arange(self.seen - p.shape[3], self.seen, device=p.device) + 1  # s, (n,)

        # 1{α_{s,j} < 1/s}, of the tokens that were there at step s: (B, H, S, n)
        weight = p.mean(2, dtype=torch.float32).mT
        now = ((weight < 1 / step) & (self.pos[..., None] < step)).to(torch.uint8)

        # the bits are a ring: step s has place s mod w, where step s − w was before
        ring, place = self.slot("unimportant"), step % self.history
        byte, bit = place // 8, (place % 8).to(torch.uint8)
        before = ring[..., byte] >> bit & 1

        # flip the bits that differ; those of one byte add up to their union
        ring ^= torch.zeros_like(ring).index_add_(-1, byte, (before ^ now) << bit)
        self.count += now.sum(-1, dtype=torch.int32) - before.sum(-1, dtype=torch.int32)
        super().observe(q, p)

    def importance(self) -> Tensor:
        return -self.count.float()


variants = {"scissorhands": Scissorhands}
