"""Random eviction: the floor that every method must beat.

Each token draws a priority when it arrives and the `budget` highest priorities stay, so that at any time the
kept tokens are a uniform sample of those seen (reservoir sampling), drawn apart for every layer, head and
text of a batch. So a text keeps other tokens alone than as one of several.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.cache import PerEntry, ScoredCache
from nanollm.check import check_seed


@dataclass(eq=False)
class RandomEviction(ScoredCache):
    seed: int = 0
    priority = PerEntry()

    def __post_init__(self):
        super().__post_init__()
        check_seed(self.seed, 1000)
        self.generator = None

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(self.seed * 1000 + self.layer)
        B, H, T, _ = k.shape
        # drawn token by token, so that it does not matter how the prompt is cut
        priority = torch.rand((T, B, H), generator=self.generator).permute(1, 2, 0)
        super().write(k, v, pos, priority=priority.to(k.device))

    def score(self) -> Tensor:
        return self.priority


variants = {"random": RandomEviction}
