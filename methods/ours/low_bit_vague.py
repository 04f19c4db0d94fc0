"""KVReviver's three parts (methods/kv_reviver.py) with few bits in place of its sketch. Ours.

The newest tokens stay exact, and so do those with the most attention from all queries so far. Every other
token is rounded as KIVI rounds (methods/quantized.py). What is rounded does not come back.

    exact: the last R tokens ∪ Top_h(Σ_{s ≤ t} α_s) of the others

While a group fills, up to `group_size` − 1 more tokens stay exact.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from methods.quantized import Quantized
from nanollm.cache import ALL, PerEntry
from nanollm.ranking import rank


@dataclass(eq=False)
class LowBitVague(Quantized):
    heavy: int = 16  # tokens with the most attention that stay exact, h
    accumulated = PerEntry()
    watch = ALL

    def __post_init__(self):
        super().__post_init__()
        if self.heavy < 0:
            raise ValueError(f"heavy {self.heavy} must be at least 0")

    def observe(self, q: Tensor, p: Tensor):
        exact = p[..., -self.length:]  # rounded tokens come first
        self.accumulated += exact.sum((2, 3), dtype=torch.float32)
        super().observe(q, p)

    def evict(self):
        n = (self.length - self.residual_length - self.heavy) // self.group_size * self.group_size
        if n > 0:
            newest = self.pos - self.start >= self.seen - self.residual_length
            score = self.accumulated.masked_fill(newest, math.inf)
            self.round(rank(score, self.pos) >= self.length - n, at=self.pos)

    def rounded_pos(self) -> Tensor:
        return self.rounded["at"]


variants = {}  # compared in notebook 05
