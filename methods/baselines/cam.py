"""CaM: cache merging (Zhang et al., ICML 2024, PMLR 235:58840).

An evicted value need not be lost. CaM tosses a coin for it; the more attention the entry got, the
more likely it wins. If it wins, its value is added, in equal parts, to the values of the next kept
tokens. Keys stay as they are.

    V_j ← V_j + M V_i / m   for the m kept tokens j after i
    M ~ Bernoulli(min(1, A_i / mean of A over the kept entries))

A_i is the attention that entry i got from all queries so far. Eviction starts with the first token
beyond the budget, while the prompt is read, so a kept value receives little at a time.

Differs from the paper:
- In its Eq. 14 the mean is over the m targets. Here it is over all kept entries, heavy hitters too.
- H2O's rule chooses the entries that leave.

The authors' scripts keep sinks and recent tokens. They differ from one another:
- The mean is over the targets, the recent tokens, or sinks and recent tokens; two scripts take a
  maximum.
- m is 32, 16 or the number of recent tokens. Two scripts add a value if A_i exceeds the mean,
  without a coin.
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor

from methods.scissorhands import BudgetSlots, check_leaving, leaving
from nanollm.cache import ALL, Method, Slots
from nanollm.check import check_seed, whole
from nanollm.ranking import expand_index, indices, top


@dataclass
class CaM(Method):
    budget: int  # slots per key/value head
    # fraction of the budget for the newest tokens; the rest: heavy hitters
    recent: float = 0.5
    at_a_time: int | None = 1  # entries evicted when full; more at a time read faster
    # kept tokens that share an evicted value, m; the last m if fewer follow
    targets: int = 32
    seed: int = 0  # of the coins, which differ by layer, head and text of the batch
    watch = ALL
    # A: attention that an entry got from all queries
    entry = {"accumulated": torch.float32}
    store = BudgetSlots

    def __post_init__(self):
        whole("targets", self.targets, 1)
        check_seed(self.seed, 1000)
        check_leaving(self.budget, self.newest, self.at_a_time)

    @property
    def newest(self) -> int:
        """Return how many of the newest entries are never evicted."""
        return max(1, round(self.recent * self.budget))

    def observe(self, layer: Slots, q: Tensor, p: Tensor):
        new = p.sum((2, 3), dtype=torch.float32)
        layer.put("accumulated", layer.slot("accumulated") + new)

    def evict(self, layer: Slots):
        newest = layer.pos >= layer.seen - self.newest
        score = layer.slot("accumulated").masked_fill(newest, math.inf)
        leave = leaving(self.budget, self.newest, self.at_a_time)
        # the slots are in the order of their tokens
        kept = top(score, self.budget - leave)
        stay = indices(kept)
        self.merge(layer, indices(~kept), stay)
        layer.keep(stay)

    def merge(self, layer: Slots, leave: Tensor, stay: Tensor):
        """Add each value of the slots `leave` whose coin wins to m values of the slots `stay`.

        leave (B, H, n), stay (B, H, kept).
        """
        if "coins" not in layer.state:
            seed = 1000 * self.seed + layer.index
            layer.state["coins"] = torch.Generator().manual_seed(seed)
        attention = layer.slot("accumulated")
        kept = stay.shape[2]
        m = min(self.targets, kept)

        # M: one coin for each value that leaves
        p = attention.gather(2, leave) / attention.gather(2, stay).mean(
            -1, keepdim=True
        )
        coin = torch.rand(p.shape, generator=layer.state["coins"]).to(p.device) < p

        # its m targets start at the first kept token after it; example with m = 2, kept tokens
        # 0 3 5 8: evicted 4 → targets 5 8; evicted 6 → only 8 follows, so again the last two, 5 8
        after = torch.searchsorted(
            layer.pos.gather(2, stay), layer.pos.gather(2, leave)
        )
        first = after.clamp(max=kept - m).unsqueeze(-1)
        j = torch.arange(kept, device=stay.device)
        target = (j >= first) & (j < first + m)
        share = (coin.unsqueeze(-1) & target).to(layer.v) / m  # (B, H, n, kept)

        # V_j ← V_j + M V_i / m
        merged = share.mT @ layer.v.gather(2, expand_index(leave, layer.v))
        layer.put("v", layer.v.scatter_add(2, expand_index(stay, layer.v), merged))


variants = {"cam": CaM}
