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

import torch
from torch import Tensor

from methods.scissorhands import BudgetCache
from nanollm.cache import ALL, PerEntry
from nanollm.check import check_seed, whole
from nanollm.ranking import expand_index, indices, top


@dataclass(eq=False)
class CaM(BudgetCache):
    # fraction of the budget for the newest tokens; the rest goes to heavy hitters
    recent: float = 0.5
    # entries evicted when the cache is full; more at a time read faster
    at_a_time: int | None = 1
    # kept tokens that share an evicted value, m; the last m if fewer follow
    targets: int = 32
    # of the coins, which differ by layer, head and text of the batch
    seed: int = 0
    accumulated = PerEntry()  # A: attention that an entry got from all queries so far
    watch = ALL

    def __post_init__(self):
        super().__post_init__()
        whole("targets", self.targets, 1)
        check_seed(self.seed, 1000)
        self.generator = None

    def newest(self) -> int:
        return max(1, round(self.recent * self.budget))

    def observe(self, q: Tensor, p: Tensor):
        self.accumulated += p.sum((2, 3), dtype=torch.float32)
        super().observe(q, p)

    def importance(self) -> Tensor:
        return self.accumulated

    def shrink(self, score: Tensor, budget: int):
        # `top` needs slots in the order of their tokens, as they are here
        kept = top(score, budget)
        stay = indices(kept)
        self.merge(indices(~kept), stay)
        self.keep(stay)

    def merge(self, leave: Tensor, stay: Tensor):
        """Add each value of the slots `leave` whose coin wins to m values of the slots `stay`.

        leave (B, H, n), stay (B, H, kept).
        """
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(
                1000 * self.seed + self.layer
            )
        attention, kept = self.accumulated, stay.shape[2]
        m = min(self.targets, kept)

        # M: one coin for each value that leaves
        p = attention.gather(2, leave) / attention.gather(2, stay).mean(
            -1, keepdim=True
        )
        coin = torch.rand(p.shape, generator=self.generator).to(p.device) < p

        # its m targets start at the first kept token after it; example with m = 2:
        # kept tokens 0 3 5 8, evicted 4 → targets 5 8; evicted 6 → only 8 follows, so again the
        # last two, 5 8
        after = torch.searchsorted(self.pos.gather(2, stay), self.pos.gather(2, leave))
        first = after.clamp(max=kept - m).unsqueeze(-1)
        j = torch.arange(kept, device=stay.device)
        # (B, H, n, kept)
        share = (coin.unsqueeze(-1) & (j >= first) & (j < first + m)).to(self.v) / m

        # V_j ← V_j + M V_i / m
        merged = share.mT @ self.v.gather(2, expand_index(leave, self.v))
        self.v.scatter_add_(2, expand_index(stay, self.v), merged)


variants = {"cam": CaM}
