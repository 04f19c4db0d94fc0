"""PyramidKV: a budget that shrinks with depth (Cai et al., arXiv 2406.02069).

In the paper's models lower layers spread their attention over many tokens; upper layers concentrate
it on a few. So lower layers get more entries. The number of entries beside the window falls
linearly from the first layer to the last. Its mean over the L layers is SnapKV's number.

    b_l = b_max − l · (b_max − b_min) / (L − 1),   b_min = (b − w)/β,   b_max = 2 (b − w) − b_min

Differs from the paper:
- The total over the layers is exact: the largest remainders are rounded up.
- If b_max exceeds the prompt, the slope becomes flatter and the total stays the same.

Differs from the authors' code:
- The slope is flattened there too, but in steps (b_max − b_min) // (L − 1), so the total is often
  larger.
- Prompts shorter than 2 (b − w) fall back to SnapKV there.

In NVIDIA/kvpress the window lies inside the pyramid. All layers fall back to SnapKV there if the
last one would keep fewer entries than the window has.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from torch import Tensor

from methods.baselines.snap_kv import SnapKV
from nanollm.window import Window


@dataclass
class PyramidKV(SnapKV):
    beta: float = 20  # steepness, β: b_min is 1/β of the mean; 1 is SnapKV

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.beta < float("inf"):
            raise ValueError(
                f"beta is {self.beta}; it must be finite and at least 1 (1: all layers alike)"
            )

    def budgets(self, window: Window, scores: Tensor) -> int:
        layer = window.layer
        before = layer.seen - window.w  # the same in all layers, as `seen` is
        numbers = pyramid(window.room, layer.of, before, self.beta)
        return numbers[layer.index]


@cache
def pyramid(mean: int, layers: int, most: int, beta: float) -> list[int]:
    """Return the number of entries beside the window, one for each layer.

    The numbers fall linearly, up to rounding, and add up to layers · mean. None exceeds `most`,
    which is at least `mean`.
    """
    if layers == 1:
        return [mean]
    highest = min(2 * mean - mean / Fraction(str(beta)), most)
    lowest = 2 * mean - highest
    exact = [
        highest - layer * (highest - lowest) / (layers - 1) for layer in range(layers)
    ]

    # the largest remainders are rounded up; of equal ones the lower layer's, because sorting is
    # stable
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(layers), key=lambda layer: counts[layer] - exact[layer])
    for layer in by_remainder[: layers * mean - sum(counts)]:
        counts[layer] += 1
    return counts


variants = {"pyramid_kv": PyramidKV}
