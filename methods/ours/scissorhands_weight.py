"""Ours, on Scissorhands' budget cache: what has had the largest mean attention weight stays.

Scissorhands counts how often an entry was unimportant, and such a count grows with age. A mean does not.

    importance of entry j = (Σ_s α_{s,j}) / (steps since j arrived)
    drop the m entries with the lowest, outside the newest r

RoCo (Ren and Zhu, arXiv 2402.06262) scores entries alike. Of Scissorhands it keeps the budget that holds from
the first token on. It drops 8 entries at a time, where Scissorhands drops half of the budget.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.scissorhands import BudgetCache
from nanollm.cache import ALL, PerEntry


@dataclass(eq=False)
class MeanWeight(BudgetCache):
    """A slot also remembers the sum of its weights: 4 bytes."""
    at_a_time: int | None = 8  # entries dropped when the cache is full, m
    weight = PerEntry()        # the sum of its weights
    watch = ALL

    def observe(self, q: Tensor, p: Tensor):
        self.weight += p.mean(2, dtype=torch.float32).sum(2)
        super().observe(q, p)

    def importance(self) -> Tensor:
        return self.weight / (self.seen - self.pos)


variants = {"scissorhands_weight": MeanWeight}
