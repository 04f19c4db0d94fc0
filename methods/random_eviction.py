"""Random eviction: the floor that every method must beat.

Each token draws a priority when it arrives and the `budget` highest priorities stay, so that at any time the
kept tokens are a uniform sample of those seen (reservoir sampling), drawn apart for every layer and head. The
texts of a batch share their draws, so that each keeps what it would keep alone.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.cache import LayerCache
from nanollm.check import check_budget, check_seed


@dataclass(eq=False)
class RandomEviction(LayerCache):
    budget: int    # slots per key/value head
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget, 1, "one token")
        check_seed(self.seed, 1000)
        self.generator = None

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(self.seed * 1000 + self.layer)
        _, H, T, _ = k.shape
        # drawn token by token, so that it does not matter how the prompt is cut
        priority = torch.rand((T, H), generator=self.generator).T
        super().write(k, v, pos, priority=priority.to(k.device))

    def evict(self):
        if self.length > self.budget:
            self.shrink(self.slot("priority"), self.budget)


variants = {"random": RandomEviction}
