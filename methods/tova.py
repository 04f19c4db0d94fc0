"""TOVA: a cache as a state of many vectors (Oren et al., arXiv 2401.06104).

A decoder with a bounded cache is a recurrent network whose state has `budget` slots. What the newest query
looks at least leaves. Nothing is added up and no token is safe: neither sinks nor the newest, unless they are
looked at.

    evict argmin_i mean_h α_{t,h,i},   whenever more than b are held

The heads of a layer choose together. Differs from the paper: eviction starts at the end of the prompt, where
the last query decides about all of it at once, as in the authors' code; by the rule one leaves at each step.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.cache import LayerCache
from nanollm.check import check_budget


@dataclass(eq=False)
class TOVA(LayerCache):
    budget: int  # slots per key/value head
    watch = 1

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget, 1, "one slot")

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        super().write(k, v, pos, weight=k.new_zeros(k.shape[:3], dtype=torch.float32))

    def observe(self, q: Tensor, p: Tensor):
        self.slot("weight").copy_(p[:, :, :, -1].mean((1, 2), dtype=torch.float32).unsqueeze(1))
        super().observe(q, p)

    def evict(self):
        if self.length > self.budget:
            self.shrink(self.slot("weight"), self.budget)


variants = {"tova": TOVA}
