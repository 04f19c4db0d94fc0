"""Compute the constants that SubGen's lemmas leave open, and how many clusters keys form.

The paper is Chen et al., arXiv 2503.11108. Its Lemmas 5.1 (SubGen4Cache) and 5.2 (SubGen2Cache)
bound the error of tensor attention from samples; `sizes` computes their constants (claims T9 and
T10). `most_clusters` repairs section 6: in few dimensions keys form few clusters, so memory stops
growing (T11 and T12).
"""

import math

import torch
from torch import Tensor


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numerator z (D,), the normaliser τ and the lemmas' unit of error, in float64.

    The attention of one unscaled query q (1, D) over all pairs of the tokens k, v (n, 2D) is z/τ.
    The unit is ‖softmax‖₂‖V₁ ⊘ V₂‖₂.
    """
    k1, k2 = k.double().chunk(2, 1)
    v1, v2 = v.double().chunk(2, 1)
    e = ((k1 * q.double()) @ k2.T).exp()
    z = (v1 * (e @ v2)).sum(0)
    tau = e.sum()
    gram = (v1.T @ v1) * (v2.T @ v2)
    spectral = torch.linalg.matrix_norm(gram, 2) ** 0.5
    return z, tau, e.norm() / tau * spectral


def sizes(
    eps: float,
    half: float,
    v1: Tensor,
    v2: Tensor | None = None,
    p: float = 0.01,
) -> tuple[int, int]:
    """Return (t, s), samples per cluster and draws that suffice for the error ε.

    With these sizes of Lemmas 5.1 and 5.2 the error, in units of ‖softmax‖₂‖V‖₂, exceeds ε with
    probability at most p. half: δr, the largest difference between a key's score and its centre's;
    with two sides, the largest difference that either key makes, for keys of norm ≤ 1. v1: the
    values (n, D) of one stream (the pairs, in Lemma 5.2); with v2, the values of the two sides
    (Lemma 5.1).

    - Variance of τ: at most (x/t + y/t²)·τ². One side: x = sinh²(half) and y = 0. Two sides: x = 2
      sinh²(half) and y = sinh²(2·half).
    - Variance of z: E‖z − E z‖² is at most (x/s + y/s²)·(τ‖softmax‖₂‖V‖₂)², with x and y from
      `value_ratios`.
    - By Chebyshev's inequality, τ is off by more than ε₂·τ with probability at most p/4, and z by
      more than ε₁·τ‖softmax‖₂‖V‖₂ with probability at most 3p/4. Otherwise the error of z/τ is at
      most (ε₁ + ε₂)/(1 − ε₂) = ε.

    The query must not depend on the samples. In a decoder it does: later queries depend on earlier
    estimates.
    """

    def least(x: float, y: float, c: float) -> int:
        """Return the least m with x/m + y/m² ≤ c."""
        return math.ceil((x + math.sqrt(x**2 + 4 * c * y)) / (2 * c))

    e2 = eps / 8
    e1 = eps * (1 - e2) - e2
    x, y = math.sinh(half) ** 2, 0.0
    if v2 is not None:
        x, y = 2 * x, math.sinh(2 * half) ** 2
    samples = least(x, y, p / 4 * e2**2)
    draws = least(*value_ratios(v1, v2), 3 * p / 4 * e1**2)
    return samples, draws


def value_ratios(v1: Tensor, v2: Tensor | None = None) -> tuple[float, float]:
    """Return x and y in the bound of `sizes` on the variance of z.

    One side: x = ‖V‖_F²/‖V‖₂², which is at most D, and y = 0.
    Two sides: x = (‖V₁‖_F²‖V₂‖₂² + ‖V₁‖₂²‖V₂‖_F²)/‖V₁ ⊘ V₂‖₂² and y = ‖V₁‖_F²‖V₂‖_F²/‖V₁ ⊘ V₂‖₂².

    With two sides x and y have no bound: V₁ ⊘ V₂ is nearly 0 if the values of one side are nearly 0
    in every dimension in which the other's are not. Raise ValueError if V, or V₁ ⊘ V₂, is 0.
    """

    def norms(v: Tensor) -> tuple[float, float]:
        return v.square().sum().item(), torch.linalg.matrix_norm(v, 2).item() ** 2

    gram = v1.mT @ v1
    if v2 is not None:  # the Gram matrix of V₁ ⊘ V₂, without the pairs
        gram = gram * (v2.mT @ v2)
    largest = torch.linalg.matrix_norm(gram, 2).item()
    if not largest:
        raise ValueError(
            "all values, or all products of a left and a right value, are 0; give other values "
            "(these are estimated exactly at any size)"
        )

    frobenius1, spectral1 = norms(v1)
    if v2 is None:
        return frobenius1 / largest, 0.0
    frobenius2, spectral2 = norms(v2)
    x = frobenius1 * spectral2 + spectral1 * frobenius2
    y = frobenius1 * frobenius2
    return x / largest, y / largest


def most_clusters(D: int, radius: float) -> float:
    """Return (1 + 2/δ)^D, the most clusters of radius δ that keys of norm ≤ 1 can form.

    This repairs Lemma 5.4/B.8. Centres are farther than δ apart, so balls of radius δ/2 around them
    are disjoint, and all lie in a ball of radius 1 + δ/2. A part of diameter δ contains at most one
    centre, so keys in m such parts, (m, δ)-clusterable keys, form at most m clusters. The lemma has
    e^D parts of diameter e/3, from (3/δ)^D at δ = e/3. But that is (9/e)^D, and it counts balls of
    radius δ.
    """
    return (1 + 2 / radius) ** D
