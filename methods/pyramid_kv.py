"""PyramidKV: a budget that shrinks with depth (Cai et al., arXiv 2406.02069).

Lower layers spread their attention, upper layers gather it on a few tokens. So the entries beside the window
fall linearly from the first layer to the last. Their mean over the L layers is what SnapKV has everywhere.

    b_l = b_max − l · (b_max − b_min) / (L − 1),   b_min = (b − w)/β,   b_max = 2 (b − w) − b_min

Differs from the paper: the total over the layers is exact, by rounding to the largest remainders. Where b_max
exceeds the prompt, the slope gets flatter, with the same total. The authors' code does that, too, but steps
by the integer (b_max − b_min) // (L − 1), so that the total is often larger; and where the prompt is shorter
than 2 (b − w) it falls back to SnapKV. In NVIDIA/kvpress the window lies inside the pyramid, and all layers
fall back to SnapKV where the last one would keep fewer entries than the window has.
"""
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from methods.snap_kv import SnapKV


@dataclass(eq=False)
class PyramidKV(SnapKV):
    beta: float = 20  # steepness: the top layer keeps 1/beta of the mean; 1 is SnapKV

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.beta < float("inf"):
            raise ValueError(f"beta {self.beta} must be finite and at least 1, which treats all layers alike")

    def budgets(self, scores: Tensor) -> int:
        entries = self.budget - self.window_size
        seen = self.seen - self.window_size  # the same in all layers, however often these have evicted
        return pyramid(entries, len(self.model.blocks), seen, self.beta)[self.layer]


def pyramid(mean: int, layers: int, most: int, beta: float) -> list[int]:
    """Entries beside the window, of every layer.

    They fall linearly, `layers · mean` in all, none above `most` ≥ `mean`.
    """
    if layers == 1:
        return [mean]
    highest = min(2 * mean - mean / Fraction(str(beta)), most)
    lowest = 2 * mean - highest
    exact = [highest - layer * (highest - lowest) / (layers - 1) for layer in range(layers)]

    # the largest remainders are rounded up, of equals the lower layer's, for sorting is stable
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(layers), key=lambda layer: counts[layer] - exact[layer])
    for layer in by_remainder[:layers * mean - sum(counts)]:
        counts[layer] += 1
    return counts


variants = {"pyramid_kv": PyramidKV}
