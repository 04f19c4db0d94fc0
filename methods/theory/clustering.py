"""Measure SubGen's estimate of tensor attention: error, bias, bytes and clusters.

The paper is Chen et al., arXiv 2503.11108. Its Lemmas 5.1 (SubGen4Cache) and 5.2 (SubGen2Cache) bound the
error, but leave the constants open; `sizes` computes them (claims T9 and T10). `most_clusters` and `growth`
test section 6: in few dimensions keys form few clusters, so memory stops growing (T11 and T12). The other
functions measure on random keys and values. The module prints nothing; notebook 04 shows its results.
"""
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from methods.sub_gen import SubGen2Cache, SubGen4Cache

# ---- exact values, estimates, errors -----------------------------------------------------------------------


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numerator z (D,), the normaliser τ and the lemmas' unit of error, in float64.

    The attention of one unscaled query q (1, D) over all pairs of the tokens k, v (n, 2D) is z/τ. The unit is
    ‖softmax‖₂‖V₁ ⊘ V₂‖₂.
    """
    k1, k2 = k.double().chunk(2, 1)
    v1, v2 = v.double().chunk(2, 1)
    e = ((k1 * q.double()) @ k2.T).exp()
    spectral = torch.linalg.matrix_norm((v1.T @ v1) * (v2.T @ v2), 2) ** 0.5
    return (v1 * (e @ v2)).sum(0), e.sum(), e.norm() / e.sum() * spectral


def estimates(Cache, q: Tensor, k: Tensor, v: Tensor, runs: int, **options) -> tuple[Tensor, Tensor, int]:
    """Return a Cache's estimates of z (runs, D) and τ (runs, 1), and the bytes of one cache.

    The runs are the rows of one batch; their random draws are independent.
    """
    cache = Cache(**options, scale=1.0)
    cache.write(k.expand(runs, 1, -1, -1), v.expand(runs, 1, -1, -1), torch.arange(len(k))[None])
    z, tau, top = cache.estimate(q.expand(runs, 1, -1, -1))
    z, tau = z * top.exp(), tau * top.exp()
    return z[:, 0, 0].double(), tau[:, 0, 0].double(), cache.bytes()[0] // runs


def errors(Cache, q: Tensor, k: Tensor, v: Tensor, runs: int, rows: int = 1000,
           **options) -> tuple[Tensor, int]:
    """Return each run's error ‖z/τ − o‖ in the lemmas' unit, (runs,), and a cache's bytes.

    o is the exact output. `rows` runs are computed at a time.
    """
    z, tau, unit = exact(q, k, v)
    batches = []
    for seed in range(runs // rows):
        zs, taus, cache_bytes = estimates(Cache, q, k, v, rows, seed=seed, **options)
        batches.append((zs / taus - z / tau).norm(dim=-1) / unit)
    return torch.cat(batches), cache_bytes


# ---- constants that the lemmas leave open ------------------------------------------------------------------


def sizes(eps: float, half: float, v1: Tensor, v2: Tensor | None = None, p: float = 0.01) -> tuple[int, int]:
    """Return (t, s), samples per cluster and draws that suffice for the error ε.

    With these sizes of Lemmas 5.1 and 5.2 the error, in units of ‖softmax‖₂‖V‖₂, exceeds ε with probability
    at most p. half: δr, the largest difference between a key's score and its centre's; with two sides, the
    largest difference that either key makes, for keys of norm ≤ 1. v1: the values (n, D) of one stream (the
    pairs, in Lemma 5.2); with v2, the values of the two sides (Lemma 5.1).

    - Variance of τ: at most (x/t + y/t²)·τ². One side: x = sinh²(half) and y = 0. Two sides: x = 2
      sinh²(half) and y = sinh²(2·half).
    - Variance of z: E‖z − E z‖² is at most (x/s + y/s²)·(τ‖softmax‖₂‖V‖₂)², with x and y from `value_ratios`.
    - By Chebyshev's inequality, τ is off by more than ε₂·τ with probability at most p/4, and z by more than
      ε₁·τ‖softmax‖₂‖V‖₂ with probability at most 3p/4. Otherwise the error of z/τ is at most
      (ε₁ + ε₂)/(1 − ε₂) = ε.

    The query must not depend on the samples. In a decoder it does: later queries depend on earlier estimates.
    """
    def least(x: float, y: float, c: float) -> int:
        """Return the least m with x/m + y/m² ≤ c."""
        return math.ceil((x + math.sqrt(x ** 2 + 4 * c * y)) / (2 * c))

    e2 = eps / 8
    e1 = eps * (1 - e2) - e2
    if v2 is None:
        x, y = math.sinh(half) ** 2, 0.0
    else:
        x, y = 2 * math.sinh(half) ** 2, math.sinh(2 * half) ** 2
    return least(x, y, p / 4 * e2 ** 2), least(*value_ratios(v1, v2), 3 * p / 4 * e1 ** 2)


def value_ratios(v1: Tensor, v2: Tensor | None = None) -> tuple[float, float]:
    """Return x and y in the bound of `sizes` on the variance of z.

    One side: x = ‖V‖_F²/‖V‖₂², which is at most D, and y = 0.
    Two sides: x = (‖V₁‖_F²‖V₂‖₂² + ‖V₁‖₂²‖V₂‖_F²)/‖V₁ ⊘ V₂‖₂² and y = ‖V₁‖_F²‖V₂‖_F²/‖V₁ ⊘ V₂‖₂².

    With two sides x and y have no bound: V₁ ⊘ V₂ is nearly 0 if the values of one side are nearly 0 in every
    dimension in which the other's are not. Raise ValueError if V, or V₁ ⊘ V₂, is 0.
    """
    def norms(v: Tensor) -> tuple[float, float]:
        return v.square().sum().item(), torch.linalg.matrix_norm(v, 2).item() ** 2

    gram = v1.mT @ v1 * (1 if v2 is None else v2.mT @ v2)  # Gram matrix of V₁ ⊘ V₂, without the pairs
    largest = torch.linalg.matrix_norm(gram, 2).item()
    if not largest:
        raise ValueError("all values, or all products of a left and a right value, are 0; give other values "
                         "(these are estimated exactly at any size)")

    frobenius, spectral = norms(v1)
    if v2 is None:
        return frobenius / largest, 0.0
    frobenius2, spectral2 = norms(v2)
    return (frobenius * spectral2 + spectral * frobenius2) / largest, frobenius * frobenius2 / largest


def most_clusters(D: int, radius: float) -> float:
    """Return (1 + 2/δ)^D, the most clusters of radius δ that keys of norm ≤ 1 can form.

    This repairs Lemma 5.4/B.8. Centres are farther than δ apart, so balls of radius δ/2 around them are
    disjoint, and all lie in a ball of radius 1 + δ/2. A part of diameter δ contains at most one centre, so
    keys in m such parts, (m, δ)-clusterable keys, form at most m clusters. The lemma has e^D parts of
    diameter e/3, from (3/δ)^D at δ = e/3. But that is (9/e)^D, and it counts balls of radius δ.
    """
    return (1 + 2 / radius) ** D


# ---- random tokens, and the measurements -------------------------------------------------------------------


def in_ball(n: int, d: int, generator: torch.Generator) -> Tensor:
    """Return n points (n, d), uniform in the unit ball."""
    direction = normalize(torch.randn(n, d, generator=generator), dim=-1)
    return direction * torch.rand(n, 1, generator=generator) ** (1 / d)


def text(n: int, d: int, tail: float = 0.0, tight: bool = False, seed: int = 0,
         norm: float = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return random keys and values k, v (n, 2d), and a query q (1, d) with norm `norm`.

    Keys are uniform in the unit ball or, if `tight`, form 8 tight clusters a side. Values have mean 1, times
    a factor e^(tail·x) for each token, with x standard normal.
    """
    generator = torch.Generator().manual_seed(n + d + 1000 * seed)
    k = torch.cat((in_ball(n, d, generator), in_ball(n, d, generator)), 1)
    if tight:
        centres = [in_ball(8, d, generator)[torch.randint(8, (n,), generator=generator)] for _ in range(2)]
        k = 0.1 * k + 0.9 * torch.cat(centres, 1)
    v = 1 + torch.randn(n, 2 * d, generator=generator)
    v = v * (tail * torch.randn(n, 1, generator=generator)).exp()
    return k, v, norm * normalize(torch.randn(1, d, generator=generator), dim=-1)


def clusters_of_text(n: int, d: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return k, v (n, 2d) with four tight clusters a side, q (1, d) of norm 2, and the radius δ."""
    generator = torch.Generator().manual_seed(5)
    k = torch.cat([0.8 * in_ball(4, d, generator)[torch.arange(n) % 4] + 0.01 * in_ball(n, d, generator)
                   for _ in range(2)], 1)
    v = 1 + torch.randn(n, 2 * d, generator=generator)
    return k, v, 2 * normalize(torch.randn(1, d, generator=generator), dim=-1), 0.02


def biases(Cache, q: Tensor, k: Tensor, v: Tensor, samples, runs: int, **options) -> Tensor:
    """Return mean estimate / exact value and its standard error, (len(samples), 3, 2).

    The three rows are z, τ and z/τ; the components of z and z/τ are summed first. samples: values of t. The
    mean is over `runs` runs.
    """
    z, tau, _ = exact(q, k, v)
    statistics = []
    for t in samples:
        zs, taus, _ = estimates(Cache, q, k, v, runs, samples=t, **options)
        ratios = zs.sum(1) / z.sum(), taus[:, 0] / tau, (zs / taus).sum(1) / (z / tau).sum()
        statistics.append([(x.mean(), x.std() / runs ** 0.5) for x in ratios])
    return torch.tensor(statistics)


def error_over_bytes(n: int, delta: float = 0.9, texts: int = 6, runs: int = 8, **text_options):
    """Return {name: (sizes, texts, 2)} of KB and rms error, and the exact cache's KB.

    The names are the caches and a simple baseline, "random tokens": it keeps as many random tokens as fit
    into the bytes of SubGen4Cache, and attends to all their pairs.
    """
    measured = {}
    token_bytes = 4 * (4 * 3 + 1)  # two keys, two values, a position
    Caches = (SubGen2Cache, SubGen4Cache) if n <= 256 else (SubGen4Cache,)
    for seed in range(texts):
        k, v, q = text(n, 3, seed=seed, **text_options)
        z, tau, unit = exact(q, k, v)
        for Cache in Caches:
            for s, t in ((10, 1), (30, 2), (100, 4), (300, 8), (1000, 16)):
                zs, taus, cache_bytes = estimates(Cache, q, k, v, runs, radius=delta, samples=t, draws=s)
                outputs = {Cache.__name__: zs / taus}
                budget = cache_bytes // token_bytes
                if Cache is SubGen4Cache and budget < n:
                    subsets = (torch.randperm(n, generator=torch.Generator().manual_seed(run))[:budget]
                               for run in range(runs))
                    parts = [exact(q, k[i], v[i])[:2] for i in subsets]
                    outputs["random tokens"] = torch.stack([part_z / part_tau for part_z, part_tau in parts])
                for name, y in outputs.items():
                    rms = ((y - z / tau).norm(dim=-1) / unit).square().mean().sqrt().item()
                    measured.setdefault(name, {}).setdefault(s, []).append((cache_bytes / 1e3, rms))
    return {name: np.array([*points.values()]) for name, points in measured.items()}, n * token_bytes / 1e3


def growth(d: int, lengths, radius: float = math.e / 3, samples: int = 8, draws: int = 100):
    """Return the clusters of k₁ and a SubGen4Cache's KB after each number of tokens.

    `lengths` are the numbers of tokens. Keys are uniform in the unit ball.
    """
    k, v, _ = text(int(lengths[-1]), d)
    cache, clusters, kilobytes = SubGen4Cache(radius, samples, draws), [], []
    for start, end in zip((0, *lengths), lengths):
        cache.write(k[None, None, start:end], v[None, None, start:end], torch.arange(start, end)[None])
        clusters.append(int((cache.streams[0].count > 0).sum()))
        kilobytes.append(cache.bytes()[0] / 1e3)
    return clusters, kilobytes
