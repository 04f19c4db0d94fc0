"""Random eviction: the baseline that every method must beat.

Each token draws a random priority when it arrives, and the `budget` highest priorities stay. At any time the
kept tokens are therefore a uniform sample of all tokens seen (reservoir sampling).

Every layer, head and text of a batch draws its own priorities. A text therefore keeps other tokens when it
runs alone than when it runs in a batch.

`random_ends` keeps the first and the newest tokens, a tenth of the budget each, and evicts the others at
random (arXiv 2605.18053).
"""
from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor

from nanollm.cache import PerEntry, ScoredCache
from nanollm.check import check_seed


@dataclass(eq=False)
class RandomEviction(ScoredCache):
    seed: int = 0          # of the random priorities; each layer has its own
    ends: float = 0.0      # fraction of the budget that stays at the text's start, and as much at its end
    priority = PerEntry()  # uniform in [0, 1)

    def __post_init__(self):
        super().__post_init__()
        check_seed(self.seed, 1000)
        if not 0 <= self.ends <= 0.5:
            raise ValueError(f"ends is {self.ends}; it is a fraction of the budget, between 0 and 0.5")
        self.generator = None

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(self.seed * 1000 + self.layer)
        B, H, T, _ = k.shape
        # drawn token by token, so the result does not depend on how the prompt is cut into pieces
        priority = torch.rand((T, B, H), generator=self.generator).permute(1, 2, 0)
        super().write(k, v, pos, priority=priority.to(k.device))

    def score(self) -> Tensor:
        n = round(self.ends * self.budget)
        stays = (self.pos < n) | (self.pos >= self.seen - n)
        return self.priority.masked_fill(stays, math.inf)


variants = {"random": RandomEviction, "random_ends": partial(RandomEviction, ends=0.1)}
