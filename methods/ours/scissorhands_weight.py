"""Ours, on Scissorhands' budget cache: keep the entries with the largest mean attention weight.

Scissorhands counts how often an entry was unimportant. Such a count grows with age; a mean does not.

    importance of entry j = (Σ_s α_{s,j}) / (steps since j arrived)
    drop the m entries with the lowest, outside the newest r

RoCo (Ren and Zhu, arXiv 2402.06262) scores entries in the same way. As in Scissorhands, the budget holds from
the first token on. Here 8 entries are dropped at a time; Scissorhands drops half of the budget.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.scissorhands import BudgetCache
from nanollm.cache import ALL, PerEntry


@dataclass(eq=False)
class MeanWeight(BudgetCache):
    """A slot also stores the sum of its attention weights: 4 bytes."""
    at_a_time: int | None = 8  # entries dropped when the cache is full, m
    weight = PerEntry()        # Σ_s α_{s,j}
    watch = ALL

    def observe(self, q: Tensor, p: Tensor):
        self.weight += p.mean(2, dtype=torch.float32).sum(2)
        super().observe(q, p)

    def importance(self) -> Tensor:
        return self.weight / (self.seen - self.pos)


variants = {"scissorhands_weight": MeanWeight}
