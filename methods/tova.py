"""TOVA: a cache as a state of many vectors (Oren et al., arXiv 2401.06104).

A decoder with a bounded cache is a recurrent network whose state has `budget` slots. What the newest query
looks at least leaves. Nothing is added up and no token is safe: neither sinks nor the newest, unless they are
looked at.

    evict argmin_i mean_h α_{t,h,i},   whenever more than b are held

The heads of a layer choose together. Differs from the paper: eviction starts at the end of the prompt, where
the last query decides about all of it at once, as in the authors' code; by the rule one leaves at each step.
"""
import torch
from torch import Tensor

from nanollm.cache import PerEntry, ScoredCache


class TOVA(ScoredCache):
    weight = PerEntry()  # the newest query's attention
    watch = 1

    def observe(self, q: Tensor, p: Tensor):
        self.weight = p[:, :, :, -1].mean((1, 2), dtype=torch.float32).unsqueeze(1)  # over the layer's heads
        super().observe(q, p)

    def score(self) -> Tensor:
        return self.weight


variants = {"tova": TOVA}
