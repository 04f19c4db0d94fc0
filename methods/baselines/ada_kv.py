"""AdaKV: heads share a layer's budget (Feng et al., arXiv 2407.11550).

Some heads spread their attention over many tokens and need many entries; others need few. So AdaKV
ranks the entries of a layer's H heads together. Without a floor a head gets as many entries as it
has among the H·b highest pooled window scores. A floor f guarantees each head a part of the budget.

    b_h = f·b + (1 − f) · |{ i : A_{h,i} ∈ Top_{H·b}(A) }|,   Σ_h b_h = H·b

The heads may then differ in length. Packed slots, the default store, keep them one after the other,
without padding, so memory is freed.

Differs from the paper:
- b counts the entries beside the window, as in the authors' code; the option `budget` contains the
  window, there as here.
- A head is a key/value head. Its window scores are the mean over its group of query heads.

NVIDIA/kvpress has another floor: each head keeps its f·b highest entries; the others are ranked
together.
"""

from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from methods.baselines.snap_kv import SnapKV
from nanollm.ranking import top
from nanollm.window import Window


@dataclass
class AdaKV(SnapKV):
    # fraction of b dealt out evenly, f (authors' code: 0.2 or 0.5); 1 is SnapKV
    floor: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"floor is {self.floor}; it is a fraction of the budget, between 0 and 1"
            )

    def budgets(self, window: Window, scores: Tensor) -> Tensor:
        return shared(window.pool(scores.mean(2)), window.room, self.floor)


def shared(score: Tensor, mean: int, floor: float) -> Tensor:
    """Return how many entries each head keeps beside the window, (B, H), from scores (B, H, S).

    The numbers of a layer add up to H · mean. Equal scores: the newest token first.
    """
    B, H, S = score.shape
    # token by token, so `top` breaks ties towards the newest token
    by_token = score.mT.flatten(1)
    highest = top(by_token, H * mean).view(B, S, H).sum(1)

    # exact counts in units of 1/denominator; the largest remainders are rounded up, equal ones in
    # lower heads
    even = Fraction(str(floor)).limit_denominator(10**6)
    exact = (even.denominator - even.numerator) * highest + even.numerator * mean
    counts = exact // even.denominator
    spare = H * mean - counts.sum(-1, keepdim=True)
    largest_first = (exact % even.denominator).argsort(
        dim=-1, descending=True, stable=True
    )
    return counts + (largest_first.argsort(dim=-1) < spare)


variants = {"ada_kv": AdaKV}
