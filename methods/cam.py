"""CaM: cache merging (Zhang et al., ICML 2024, PMLR 235:58840).

What is evicted need not be lost: with a probability that grows with the attention it had, its value is added,
in equal parts, to the values of the next tokens that stay.

    V_j ← V_j + M V_i / m  for the m kept tokens after i
    M ~ Bernoulli(min(1, A_i / mean of A over those that stay))

A_i is the attention that i has had from all queries so far, summed up. The mean is over all that stay, heavy
hitters too. Keys stay as they are, and no token's weight grows.

Differs from the paper: it evicts while it reads, one token at a time. So do its authors' scripts, each with a
rule of its own for the mean. Here the prompt is read with full attention and its end evicts many tokens at
once, so that a kept value may receive much. Which tokens leave is H2O's choice (theirs: sinks and recent
tokens, or H2O's). m is 32 there.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from nanollm.cache import ALL, LayerCache
from nanollm.check import check_budget, check_seed
from nanollm.ranking import expand_index, indices, rank


@dataclass(eq=False)
class CaM(LayerCache):
    budget: int          # slots per key/value head
    recent: float = 0.5  # share of the budget for the newest tokens; the rest goes to heavy hitters
    targets: int = 32    # kept tokens that share an evicted value, m; the last ones where fewer come after it
    seed: int = 0        # of the coins, which differ by layer
    watch = ALL

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.recent <= 1 or self.targets < 1:
            raise ValueError(f"recent {self.recent} is a share of the budget, 0 to 1, "
                             f"and targets {self.targets} at least 1")
        check_budget(self.budget, 2, "one heavy hitter and the newest token")
        check_seed(self.seed, 1000)
        self.generator = None

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        super().write(k, v, pos, accumulated=k.new_zeros(k.shape[:3], dtype=torch.float32))

    def observe(self, q: Tensor, p: Tensor):
        self.slot("accumulated").add_(p.sum((2, 3), dtype=torch.float32))
        super().observe(q, p)

    def evict(self):
        if self.length <= self.budget:
            return
        newest = self.seen - max(1, round(self.recent * self.budget))
        score = self.slot("accumulated").masked_fill(self.pos >= newest, math.inf)
        kept = rank(score, self.pos) < self.budget
        self.merge(indices(~kept), indices(kept))
        self.keep(indices(kept))

    def merge(self, leave: Tensor, stay: Tensor):
        """Add values of slots leave (B, H, n), as the coin says, to m each of slots stay (B, H, budget)."""
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(1000 * self.seed + self.layer)
        attention, m = self.slot("accumulated"), min(self.targets, self.budget)

        # M: the coin of each value that leaves
        p = attention.gather(2, leave) / attention.gather(2, stay).mean(-1, keepdim=True)
        coin = torch.rand(p.shape, generator=self.generator).to(p.device) < p

        # its m targets: from the first kept token after it on, or the last m
        after = torch.searchsorted(self.pos.gather(2, stay), self.pos.gather(2, leave))
        first = after.clamp(max=self.budget - m).unsqueeze(-1)
        j = torch.arange(self.budget, device=stay.device)
        share = (coin.unsqueeze(-1) & (j >= first) & (j < first + m)).to(self.v) / m  # (B, H, n, budget)

        # V_j ← V_j + M V_i / m
        merged = share.mT @ self.v.gather(2, expand_index(leave, self.v))
        self.v.scatter_add_(2, expand_index(stay, self.v), merged)


variants = {"cam": CaM}
