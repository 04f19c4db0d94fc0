"""CriticalKV: keep the entries whose loss would change the output most (arXiv 2502.03805).

An entry with a large attention weight but a tiny projected value adds almost nothing to the output.
So the paper bounds the L1 change of the output that an eviction causes, and chooses the entries
that lower the bound. Algorithm 1 has two stages: the first α·b entries are chosen by weight alone,
the others by weight × ‖projected value‖₁. Window methods can use this selection, ChunkKV only with
reuse=1.

    L = ‖o − ô‖₁ ≤ θ = C − (2 − 1/S) Σ_i N_i A_i ‖𝒱_i‖₁
    𝒱 = V W_O,   S = Σ_i N_i A_i,   C = Σ_i A_i ‖𝒱_i‖₁

A are the attention weights; N_i is 1 if entry i stays and 0 if it is evicted; o is the output
before the eviction and ô the output after it.

Differs from the paper:
- The window always stays, and b counts the entries beside it; Algorithm 2 ranks all entries.
- The paper does not discuss query groups. Without them the rest is as printed.
- If G query heads share an entry, its score is the mean of their products A·‖𝒱‖, each with its own
  norm. The published code multiplies the means (`CriticalCode`).
- All query heads of a group count alike. The sum of their bounds would weight head g's products by
  2 − 1/σ, where σ is the weight that its stage 1 gathers. That factor is positive only if σ > 1/2
  (Assumption 1).

The paper pools the window scores of stage 1, but not those of stage 2. `PooledCritical` pools both,
as the authors' code does, and is the paper's rule in all else.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
import math

from torch import Tensor

from methods.baselines.snap_kv import SnapKV
from nanollm.attention import wide
from nanollm.ranking import top
from nanollm.window import Selection, Window


@dataclass(frozen=True)
class Critical(Selection):
    """Algorithm 1 with the scores of Algorithm 2.

    Stage 1 uses pooled window scores; stage 2 uses unpooled window scores × norms.
    """

    # fraction of the budget that stage 1 chooses by weight alone, α
    alpha: float = 0.25

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(
                f"alpha is {self.alpha}; it is a fraction of the budget, between 0 and 1"
            )

    def __call__(
        self,
        window: Window,
        scores: Tensor,
        budget: int | Tensor,
    ) -> Tensor:
        # stage 1: the first α·b entries, by weight alone
        first = top(window.pool(scores.mean(2)), part_of(self.alpha, budget))

        # stage 2: the others, by weight × ‖projected value‖₁
        layer = window.layer
        norms = value_norms(layer.v[:, :, : window.n], layer.w_o)
        return two_stage(first, self.second(window, scores, norms), budget)

    def second(
        self,
        window: Window,
        scores: Tensor,
        norms: Tensor,
    ) -> Tensor:
        """Return the scores of stage 2, (B, H, n), from window scores and norms (B, H, G, n)."""
        return (scores * norms).mean(2)


@dataclass(frozen=True)
class PooledCritical(Critical):
    """Stage 2 pools the window scores too. NVIDIA/kvpress also pools both stages."""

    def second(
        self,
        window: Window,
        scores: Tensor,
        norms: Tensor,
    ) -> Tensor:
        return (window.pool(scores) * norms).mean(2)


@dataclass(frozen=True)
class CriticalCode(Critical):
    """The authors' code, in NVIDIA/kvpress.

    - Both stages pool the window scores.
    - Stage 1 chooses half of the budget. There that half contains the window; here it does not.
    - Stage 2 multiplies the group's mean score by its mean norm.
    """

    alpha: float = 0.5

    def second(
        self,
        window: Window,
        scores: Tensor,
        norms: Tensor,
    ) -> Tensor:
        return (window.pool(scores).mean(2) + 1e-4) * norms.mean(2)


def two_stage(
    first: Tensor,
    score: Tensor,
    budget: int | Tensor,
) -> Tensor:
    """Return Algorithm 1's mask: the entries of `first`, then the highest of the other scores.

    first (stage 1's entries) and score are (B, H, n); the mask has `budget` entries per head.
    """
    return top(score.masked_fill(first, math.inf), budget)


def part_of(alpha: float, budget: int | Tensor) -> int | Tensor:
    """Return ⌊α·b⌋, with α taken as an exact fraction.

    Example: 0.29 of 100 is 29. In floats 0.29 * 100 is 28.999…, so int() would give 28.
    """
    exact = Fraction(str(alpha)).limit_denominator(10**6)
    return exact.numerator * budget // exact.denominator


def value_norms(v: Tensor, w_o: Tensor) -> Tensor:
    """Return ‖𝒱_i‖₁ = ‖v_i W_O‖₁ for every query head, in at least 32 bits.

    v (B, H, n, D), w_o (d_model, H·G, D) → (B, H, G, n). Of 𝒱, n × d_model, at most 1024 rows are
    in memory at once.
    """
    # In one line, with w_o (d_model, H, G, D):
    #     torch.einsum("bhnd,mhgd->bhgnm", v, w_o).abs().sum(-1)
    # The loop does the same for one head and 1024 tokens at a time, in less memory.
    B, H, n, D = v.shape
    w_o = w_o.unflatten(1, (H, -1)).permute(1, 2, 3, 0)  # (H, G, D, d_model)
    norms = wide(v[:0]).new_empty(H, w_o.shape[1], B * n)
    for h, heads in enumerate(w_o):
        for i, tokens in enumerate(v[:, h].flatten(0, 1).split(1024)):
            part = slice(i * 1024, i * 1024 + len(tokens))
            for g, w in enumerate(heads):
                norms[h, g, part] = (wide(tokens) @ wide(w)).abs_().sum(-1)
    return norms.view(H, -1, B, n).permute(2, 0, 1, 3)


variants = {"snap_kv+critical": partial(SnapKV, select=Critical())}
additions = {
    "critical": dict(select=Critical()),
    "critical_code": dict(select=CriticalCode()),
}
