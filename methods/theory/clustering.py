"""Estimate attention from samples (SubGen), and compute the constants of Lemmas 5.1 and 5.2.

SubGen (Zandieh et al., arXiv 2402.06082) reads keys and values one by one. Its memory stops growing
if keys cluster. It keeps t random keys of each cluster of radius δ, to estimate the softmax's
denominator τ. It keeps s random values with their keys, to estimate the numerator z. A value v is
drawn with probability ‖v‖²/‖V‖_F².

    o = Σ_i e^⟨q,k_i⟩ v_i / Σ_i e^⟨q,k_i⟩ ≈ z/τ
    τ = Σ_c n_c/t Σ_{t samples of cluster c} e^⟨q,k⟩
    z = Σ_{s draws} ‖V‖_F²/(s ‖v‖²) e^⟨q,k⟩ v

n_c is the number of keys in cluster c. τ and z are unbiased, their ratio is not.

For tensor attention (Chen et al., arXiv 2503.11108) the keys are pairs of tokens. Lemma 5.2
(SubGen2Cache) samples the stream of all pairs: `sub_gen` on the pairs, then `estimate`. New
pairs are formed from every earlier token, so all tokens are stored and the memory grows. Lemma 5.1
(SubGen4Cache) samples one stream for each side of a pair; `crossed` combines the two samples:

    τ = Σ_{left, right samples} n_c/t · n_c'/t · e^⟨q, k₁ ∘ k₂⟩
    and the same for z and the draws of both sides

`sizes` computes the constants of both lemmas (claims T9 and T10). `most_clusters` repairs Lemma
5.4: in few dimensions keys form few clusters, so memory stops growing (T11 and T12).

Differs from the papers:
- Lemma 5.1 gives no algorithm, so `crossed` is ours.
- `sub_gen` can take many independent samples of one stream at once (`runs`), to measure errors.

Scores are not scaled. D is the paper's d.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from methods.tensor_attention import pairs


class Sample(NamedTuple):
    """What SubGen keeps of one stream: M clusters, and t samples and s draws of each run."""

    keys: Tensor  # (R, M·t, D): random keys of each cluster
    shares: Tensor  # (M·t, 1): n_c/t
    drawn: Tensor  # (R, s, D): the draws' keys
    rows: Tensor  # (R, s, D): the draws' values times ‖V‖_F²/(s ‖v‖²)


def sub_gen(
    k: Tensor,
    v: Tensor,
    radius: float,
    t: int,
    s: int,
    generator: torch.Generator,
    runs: int = 1,
) -> Sample:
    """Return what SubGen keeps of the keys and values k, v (n, D), which it reads one by one.

    radius: of a cluster around its first key, δ. t: keys kept per cluster. s: values kept in all.
    runs: R, how many independent samples to return.

    This is reservoir sampling: a cluster's n-th key replaces each of its samples with chance 1/n,
    so every sample stays uniform. A value replaces each draw with chance ‖v‖²/‖V‖_F², where V are
    the values up to this one.
    """

    def renew(old: Tensor, new: Tensor, chance) -> Tensor:
        u = torch.rand(*old.shape[:2], 1, generator=generator)
        return torch.where(u < chance, new, old)

    centres = k[:1]
    counts = [0]
    keys = [centres.expand(runs, t, -1)]
    draws = centres.new_zeros(runs, s, 2 * k.shape[1])
    total = 0.0
    for key, value in zip(k, v):
        # the key joins the nearest cluster, or opens one, whose first key replaces all t samples
        distance, c = (centres - key).norm(dim=1).min(0)
        if distance > radius:
            c = len(counts)
            centres = torch.cat((centres, key[None]))
            counts += [0]
            keys += keys[:1]
        counts[c] += 1
        keys[c] = renew(keys[c], key, 1 / counts[c])

        square = value.square().sum()
        total += square
        # 0/0 before the first value that is not 0: no draw is renewed
        draws = renew(draws, torch.cat((key, value / square)), square / total)

    drawn, rows = draws.chunk(2, 2)
    shares = centres.new_tensor(counts).repeat_interleave(t)[:, None] / t
    return Sample(torch.cat(keys, 1), shares, drawn, rows * total / s)


def estimate(q: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return z (R, G, D) and τ (R, G, 1) of the queries q (G, D); z/τ estimates attention."""
    z = (q @ sample.drawn.mT).exp() @ sample.rows
    tau = (q @ sample.keys.mT).exp() @ sample.shares
    return z, tau


def crossed(left: Sample, right: Sample) -> Sample:
    """Return the sample of pairs in which every left sample or draw meets every right one."""
    return Sample(*map(pairs, left, right))


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numerator z (D,), the normaliser τ and the lemmas' unit of error.

    The attention of the query q (D,) over the keys and values k, v (n, D), or those of pairs, is
    z/τ. The unit is ‖softmax‖₂‖V‖₂.
    """
    e = (k @ q).exp()
    tau = e.sum()
    unit = e.norm() / tau * torch.linalg.matrix_norm(v, 2)
    return e @ v, tau, unit


def sizes(
    eps: float,
    half: float,
    *sides: Tensor,
    p: float = 0.01,
) -> tuple[int, int]:
    """Return (t, s), samples per cluster and draws that suffice for the error ε.

    With these sizes of Lemmas 5.1 and 5.2 the error, in units of ‖softmax‖₂‖V‖₂, exceeds ε with
    probability at most p. half: δr, the largest difference between a key's score and its centre's;
    with two sides, the largest difference that either key makes, for keys of norm ≤ 1. sides: the
    values (n, D) of one stream (the pairs, in Lemma 5.2), or of each of two sides (Lemma 5.1).

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
        return math.ceil((x + (x**2 + 4 * c * y) ** 0.5) / (2 * c))

    e2 = eps / 8
    e1 = eps * (1 - e2) - e2
    x = len(sides) * math.sinh(half) ** 2
    y = (len(sides) - 1) * math.sinh(2 * half) ** 2
    t = least(x, y, p / 4 * e2**2)
    return t, least(*value_ratios(*sides), 3 * p / 4 * e1**2)


def value_ratios(*sides: Tensor) -> tuple[float, float]:
    """Return x and y in the bound of `sizes` on the variance of z.

    r = ‖V‖_F²/‖V‖₂² is a side's stable rank, which is at most D.
    One side: x = r and y = 0.
    Two sides: x = c(r₁ + r₂) and y = c·r₁r₂, where c = ‖V₁‖₂²‖V₂‖₂²/‖V₁ ⊘ V₂‖₂².

    c has no bound: V₁ ⊘ V₂ is nearly 0 if the values of one side are nearly 0 in every dimension in
    which the other's are not. Raise ValueError if V, or V₁ ⊘ V₂, is 0.
    """
    grams = torch.stack([v.T @ v for v in sides])
    spectral = torch.linalg.matrix_norm(grams, 2)
    largest = torch.linalg.matrix_norm(grams.prod(0), 2)  # V₁ ⊘ V₂, without the pairs
    if not largest:
        raise ValueError(
            "all values, or all products of a left and a right value, are 0; give other values "
            "(these are estimated exactly at any size)"
        )
    ranks = torch.einsum("sii->s", grams) / spectral
    c = spectral.prod() / largest
    x = c * ranks.sum()
    y = c * ranks.prod() * (len(sides) - 1)
    return x.item(), y.item()


def most_clusters(D: int, radius: float) -> float:
    """Return (1 + 2/δ)^D, the most clusters of radius δ that keys of norm ≤ 1 can form.

    This repairs Lemma 5.4/B.8. Centres are farther than δ apart, so balls of radius δ/2 around them
    are disjoint, and all lie in a ball of radius 1 + δ/2. A part of diameter δ contains at most one
    centre, so keys in m such parts, (m, δ)-clusterable keys, form at most m clusters. The lemma has
    e^D parts of diameter e/3, from (3/δ)^D at δ = e/3. But that is (9/e)^D, and it counts balls of
    radius δ.
    """
    return (1 + 2 / radius) ** D
