"""TOVA: a bounded cache is the state of a recurrent network (Oren et al., arXiv 2401.06104).

The state has `budget` slots. TOVA evicts the entry that the newest query attends to least. It adds
nothing up over time. Sinks and new tokens are not protected.

    evict argmin_i mean_h α_{t,h,i}   whenever the cache holds more than b entries

The heads of a layer keep the same tokens, by their mean attention.

Differs from the paper: eviction starts at the end of the prompt. There the last query ranks all
entries at once, as in the authors' code. The paper's rule evicts one entry at each step.
"""

import torch
from torch import Tensor

from nanollm.cache import Scored, Slots


class TOVA(Scored):
    watch = 1
    entry = {"weight": torch.float32}  # attention from the newest query

    def observe(self, layer: Slots, q: Tensor, p: Tensor):
        # over all heads, (B, S)
        mean = p[:, :, :, -1].mean((1, 2), dtype=torch.float32)
        layer.put("weight", mean.unsqueeze(1).expand(layer.pos.shape))

    def score(self, layer: Slots) -> Tensor:
        return layer.slot("weight")


variants = {"tova": TOVA}
