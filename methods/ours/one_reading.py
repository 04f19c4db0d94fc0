"""Ours: KVzip without its reread.

An entry's score is the largest attention that it gets from a token of the prompt at least 8 places later. For
the newest 8 entries no such token exists yet, so they stay.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from methods.kvzip import KVzip
from nanollm.cache import ALL
from nanollm.check import check_budget, whole


@dataclass(eq=False)
class OneReading(KVzip):
    """KVzip scored in the first pass, by the attention of later tokens."""
    later: int = 8  # least distance of a token that scores an entry; this many newest entries stay
    reread_size = 0
    watch = ALL

    def __post_init__(self):
        super().__post_init__()
        whole("later", self.later, 1)
        check_budget(self.budget, self.sinks + self.later + 1,
                     f"{self.sinks} sinks and the newest {self.later} stay, and one more")

    def look(self, p: Tensor):
        token = torch.arange(p.shape[4], device=p.device)
        near = token[-p.shape[3]:, None] - token < self.later
        self.add(p.masked_fill(near, 0))

    def scores(self) -> Tensor:
        """Return the scores, infinite for the newest entries, which no token could score yet."""
        return self.entry_scores.masked_fill(self.pos >= self.seen - self.later, math.inf)


variants = {"one_reading": OneReading}
