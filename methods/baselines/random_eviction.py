"""Random eviction: the baseline that every method must beat.

Each token draws a random priority when it arrives, and the `budget` highest priorities stay. At any
time the kept tokens are therefore a uniform sample of all tokens seen (reservoir sampling).

Every layer, head and text of a batch draws its own priorities. A text therefore keeps other tokens
when it runs alone than when it runs in a batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.cache import PerEntry, ScoredCache
from nanollm.check import check_seed


@dataclass(eq=False)
class RandomEviction(ScoredCache):
    seed: int = 0  # of the random priorities; each layer has its own
    priority = PerEntry()  # uniform in [0, 1)

    def __post_init__(self):
        super().__post_init__()
        check_seed(self.seed, 1000)
        self.generator = None

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(
                self.seed * 1000 + self.layer
            )
        B, H, T, _ = k.shape
        # drawn token by token, so the result does not depend on how the prompt is cut into pieces
        priority = torch.rand((T, B, H), generator=self.generator).permute(1, 2, 0)
        super().write(k, v, pos, priority=priority.to(k.device))

    def score(self) -> Tensor:
        return self.priority


variants = {"random": RandomEviction}
