"""CaM: cache merging (Zhang et al., ICML 2024, PMLR 235:58840).

What is evicted need not be lost: with a probability that grows with the attention it had, its value is added,
in equal parts, to the values of the next tokens that stay.

    V_j ← V_j + M V_i / m  for the m kept tokens after i
    M ~ Bernoulli(min(1, A_i / mean of A over those that stay))

A_i is accumulated attention: what i has had from all queries so far, summed up. Keys stay as they are, and no
token's weight grows. It evicts while it reads: the budget holds from the first token on, so that a kept value
receives little at a time.

Differs from the paper: in its Eq. 14 the mean is over the m targets; here it is over all that stay, heavy
hitters too. Which tokens leave is H2O's choice. The authors' scripts differ from one another. Sinks and
recent tokens stay, or H2O's choice. The mean is over the targets or all recent tokens, or a maximum is in its
place. m is 32, 16 or the number of recent tokens.
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
    recent: float = 0.5         # share of the budget for the newest tokens; the rest goes to heavy hitters
    at_a_time: int | None = 1   # entries that leave when the cache is full; by 8 it reads 4 to 6 times faster
    targets: int = 32           # kept tokens that share an evicted value, m; the last ones where fewer follow
    seed: int = 0               # of the coins, which differ by layer, head and text of the batch
    accumulated = PerEntry()    # the attention that an entry had from all queries so far
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
        kept = top(score, budget)  # slots are in the order of their tokens
        self.merge(indices(~kept), indices(kept))
        self.keep(indices(kept))

    def merge(self, leave: Tensor, stay: Tensor):
        """Add values of slots leave (B, H, n), as the coin says, to m each of slots stay (B, H, kept)."""
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(1000 * self.seed + self.layer)
        attention, kept = self.accumulated, stay.shape[2]
        m = min(self.targets, kept)

        # M: the coin of each value that leaves
        p = attention.gather(2, leave) / attention.gather(2, stay).mean(-1, keepdim=True)
        coin = torch.rand(p.shape, generator=self.generator).to(p.device) < p

        # its m targets: from the first kept token after it on, or the last m
        after = torch.searchsorted(self.pos.gather(2, stay), self.pos.gather(2, leave))
        first = after.clamp(max=kept - m).unsqueeze(-1)
        j = torch.arange(kept, device=stay.device)
        share = (coin.unsqueeze(-1) & (j >= first) & (j < first + m)).to(self.v) / m  # (B, H, n, kept)

        # V_j ← V_j + M V_i / m
        merged = share.mT @ self.v.gather(2, expand_index(leave, self.v))
        self.v.scatter_add_(2, expand_index(stay, self.v), merged)


variants = {"cam": CaM}
