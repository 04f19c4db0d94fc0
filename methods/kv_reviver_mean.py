"""A fairer reading of KVReviver: slots are read as the mean of what is in them, not as the sum.

Algorithm 2 prints the sum, and the text calls it an estimate of a token, which a sum of hundreds is not. How
many share a slot costs no bytes to know: the indices of all vague tokens tell.

    query J:   median over i of (key of S_i[h_i(J)], g_i(J) · value of S_i[h_i(J)]) / tokens in S_i[h_i(J)]

All else is as printed: keys have no signs, values have. So a key is read as the mean of those that share its
slots, and the mean of signed values, divided by their number, is near 0.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.count_sketch import Sketch
from methods.kv_reviver import KVReviver
from nanollm.kernel_switch import kernel_for


class MeanSketch(Sketch):

    def query(self, J: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Estimates of tokens J among all that are in (B, H, a); J itself, if not given."""
        return self.median(self.means(J if among is None else among), J).chunk(2, -1)

    def means(self, J: Tensor) -> Tensor:
        """Slots (B, H, r·b, 2D) divided by how many of the tokens J, all that are in, each has."""
        slot = self.bucket(J).flatten(2)
        count = torch.zeros(self.x.shape[:3], device=slot.device)
        count.scatter_add_(2, slot, torch.ones_like(slot, dtype=count.dtype))
        return (self.x / count.clamp(min=1).unsqueeze(3)).to(self.x)


@dataclass(eq=False)
class MeanReviver(KVReviver):
    kind = MeanSketch

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """On a GPU the kernel reads means where it would read sums."""
        fast = kernel_for(q, "revive_attention", "attend_one")
        if not self.revives(q) or fast is None:
            return super().attention(q, pos)
        return fast(self, q, self.sketch.means(self.vague_tokens()))


variants = {"kv_reviver_mean": MeanReviver}
