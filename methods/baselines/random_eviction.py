"""Random eviction: the baseline that every method must beat.

Each token draws a random priority when it arrives, and the `budget` highest priorities stay. At any
time the kept tokens are therefore a uniform sample of all tokens seen (reservoir sampling).

Every layer and head draws its own priorities, and so does every text that shares a cache. In a
shared cache a text may keep other tokens than alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.cache import Scored, Slots
from nanollm.check import check_seed


@dataclass
class RandomEviction(Scored):
    seed: int = 0  # of the random priorities; each layer has its own
    entry = {"priority": torch.float32}  # uniform in [0, 1)

    def __post_init__(self):
        super().__post_init__()
        check_seed(self.seed, 1000)

    def observe(self, layer: Slots, q: Tensor, p: Tensor | None):
        if "generator" not in layer.state:
            seed = self.seed * 1000 + layer.index
            layer.state["generator"] = torch.Generator().manual_seed(seed)
        B, H, S = layer.pos.shape
        T = q.shape[2]
        # drawn token by token, so the result does not depend on how the prompt is cut into pieces
        drawn = torch.rand((T, B, H), generator=layer.state["generator"]).permute(
            1, 2, 0
        )
        earlier = layer.slot("priority")[:, :, : S - T]
        layer.put("priority", torch.cat((earlier, drawn.to(earlier)), 2))

    def score(self, layer: Slots) -> Tensor:
        return layer.slot("priority")


variants = {"random": RandomEviction}
