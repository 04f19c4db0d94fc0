"""A fairer reading of KVReviver: a query reads the mean of the tokens in a slot, not their sum.

Algorithm 2 prints the sum, and the text calls it an estimate of one token. But a sum of hundreds of tokens
estimates none of them. The number of tokens in a slot costs no bytes: it follows from the indices of all
vague tokens.

    query J:   median over i of (key of S_i[h_i(J)], g_i(J) · value of S_i[h_i(J)]) / tokens in S_i[h_i(J)]

Else all is as printed: only values have signs. So a key is read as its slot's mean key, and a value as a mean
of values with random signs, which is near 0.
"""
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.baselines.count_sketch import Sketch
from methods.kv_reviver import KVReviver


class MeanSketch(Sketch):

    def revive(self, J: Tensor, among: Tensor | None = None) -> Iterable[Tensor]:
        return self.median(self.means(J if among is None else among), J)

    def means(self, J: Tensor) -> Tensor:
        """Return the slots, (B, H, r·b, 2D), each divided by its number of tokens.

        J (B, H, a): all tokens in the sketch.
        """
        slot = self.bucket(J).flatten(2)
        count = torch.zeros(self.x.shape[:3], device=slot.device)
        count.scatter_add_(2, slot, torch.ones_like(slot, dtype=count.dtype))
        return (self.x / count.clamp(min=1).unsqueeze(3)).to(self.x)


@dataclass(eq=False)
class MeanReviver(KVReviver):
    kind = MeanSketch


variants = {"kv_reviver_mean": MeanReviver}
