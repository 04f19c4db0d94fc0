"""AdaKV: heads share a layer's budget (Feng et al., arXiv 2407.11550).

A head that spreads its attention needs more entries than one that gathers it. So the H heads of a layer are
ranked together: each gets as many entries as it has among the layer's H·b highest window scores, over a floor that is
dealt out evenly. Heads then differ in length; they are stored one after the other, so nothing is padded and
memory is freed.

    b_h = f·b + (1 − f) · |{ i : A_{h,i} ∈ Top_{H·b}(A) }|,   Σ_h b_h = H·b

Differs from the paper: b counts the entries beside the window, as in the authors' code, whose budget contains
the window, too. A head is a key/value head, whose group of query heads window scores together. NVIDIA/kvpress has
another floor: the f·b highest entries of each head stay, and the layer's others are ranked together.
"""
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from methods.snap_kv import SnapKV
from nanollm.ranking import rank, top


@dataclass(eq=False)
class AdaKV(SnapKV):
    floor: float = 0.2  # share of the budget dealt out evenly (the authors' code: 0.2 or 0.5); 1 is SnapKV

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor {self.floor} is a share of the budget; it must lie between 0 and 1")

    def budgets(self, scores: Tensor) -> Tensor:
        return shared(self.pool(scores.mean(2)), self.budget - self.window_size, self.floor)


def shared(score: Tensor, mean: int, floor: float) -> Tensor:
    """Entries per head (B, H), `H · mean` in all, from score (B, H, S); ties go to the newest token."""
    B, H, S = score.shape
    by_token = score.mT.flatten(1)  # so that a later place is a newer token
    highest = top(by_token, H * mean).view(B, S, H).sum(1)

    # in units of 1/denominator; the largest remainders are rounded up, of equals the lower head
    even = Fraction(str(floor)).limit_denominator(10**6)
    exact = (even.denominator - even.numerator) * highest + even.numerator * mean
    counts = exact // even.denominator
    spare = H * mean - counts.sum(-1, keepdim=True)
    lower_first = -torch.arange(H, device=score.device).expand(B, H)
    return counts + (rank(exact % even.denominator, lower_first) < spare)


variants = {"ada_kv": AdaKV}
