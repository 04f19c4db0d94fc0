"""H2O: heavy hitters (Zhang et al., arXiv 2306.14048).

In the paper's models a few tokens collect most of the attention, and continue to do so. H2O adds up
the attention that each entry gets from all queries so far. It keeps the entries with the largest
sums, and the most recent ones.

    F_t(i) = Σ_{s ≤ t} α_{s,i},   evict argmin F_t outside the recent tokens

Differs from the paper:
- Eviction starts at the end of the prompt by default, not while the prompt is read.
- The query heads of a group share an entry, so their attention is added up.
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor

from nanollm.cache import ALL, Scored, Slots
from nanollm.check import check_budget


@dataclass
class H2O(Scored):
    # fraction of the budget for the newest tokens; the rest: heavy hitters
    recent: float = 0.5
    watch = ALL
    # F_t: attention that an entry got from all queries
    entry = {"accumulated": torch.float32}

    def __post_init__(self):
        if not 0 <= self.recent <= 1:
            raise ValueError(
                f"recent is {self.recent}; it is a fraction of the budget, between 0 and 1"
            )
        check_budget(self.budget, 2, "one heavy hitter and the newest token")

    def observe(self, layer: Slots, q: Tensor, p: Tensor):
        new = p.sum((2, 3), dtype=torch.float32)
        layer.put("accumulated", layer.slot("accumulated") + new)

    def score(self, layer: Slots) -> Tensor:
        newest = layer.seen - max(1, round(self.recent * self.budget))
        return layer.slot("accumulated").masked_fill(layer.pos >= newest, math.inf)


variants = {"h2o": H2O}
