"""KVzip without its second reading. Ours.

What counts is the largest attention that an entry got from a token of the prompt that comes at least 8 later.
The newest 8, at which none could look yet, stay.
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
    """Ours: no second reading. What counts is the attention of tokens that come later in the prompt."""
    later: int = 8  # by at least so many tokens; the newest so many stay
    rereads = 0
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
        """The newest tokens, at which none could look yet, stay."""
        return self.looked.masked_fill(self.pos >= self.seen - self.later, math.inf)


variants = {"one_reading": OneReading}
