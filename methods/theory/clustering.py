"""SubGen for pairs of tokens: the sizes that the lemmas leave open, its errors, its clusters.

Lemmas 5.1 (SubGen4Cache) and 5.2 (SubGen2Cache) and section 6 of Chen et al., arXiv 2503.11108.
"""
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from methods.sub_gen import SubGen2Cache, SubGen4Cache

# ---- what is estimated -------------------------------------------------------------------------------------


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What both caches estimate, for one unscaled query (1, D) over the pairs of k and v (n, 2D).

    The numerator (D,), the normaliser, and the lemmas' unit of error ‖softmax‖₂‖V₁ ⊘ V₂‖₂; float64.
    """
    k1, k2 = k.double().chunk(2, 1)
    v1, v2 = v.double().chunk(2, 1)
    e = ((k1 * q.double()) @ k2.T).exp()
    spectral = torch.linalg.matrix_norm((v1.T @ v1) * (v2.T @ v2), 2) ** 0.5
    return (v1 * (e @ v2)).sum(0), e.sum(), e.norm() / e.sum() * spectral


def estimates(Cache, q: Tensor, k: Tensor, v: Tensor, runs: int, **options) -> tuple[Tensor, Tensor, int]:
    """The same from a Cache: z (runs, D) and τ (runs, 1) of so many runs, and the bytes that each holds.

    The runs are the rows of a batch, which draw apart.
    """
    cache = Cache(**options, scale=1.0)
    cache.write(k.expand(runs, 1, -1, -1), v.expand(runs, 1, -1, -1), torch.arange(len(k))[None])
    z, tau, top = cache.estimate(q.expand(runs, 1, -1, -1))
    z, tau = z * top.exp(), tau * top.exp()
    return z[:, 0, 0].double(), tau[:, 0, 0].double(), cache.bytes()[0] // runs


def errors(Cache, q: Tensor, k: Tensor, v: Tensor, runs: int, rows: int = 1000,
           **options) -> tuple[Tensor, int]:
    """‖z/τ − o‖ in the lemmas' unit, (runs,), `rows` of them at a time; and the bytes that each run holds."""
    z, tau, unit = exact(q, k, v)
    found = []
    for seed in range(runs // rows):
        zs, taus, held = estimates(Cache, q, k, v, rows, seed=seed, **options)
        found.append((zs / taus - z / tau).norm(dim=-1) / unit)
    return torch.cat(found), held


# ---- what the lemmas leave open ----------------------------------------------------------------------------


def sizes(eps: float, half: float, v1: Tensor, v2: Tensor | None = None, p: float = 0.01) -> tuple[int, int]:
    """(t, s) with which the error exceeds ε‖softmax‖₂‖V‖₂ with probability p at most: Lemmas 5.1 and 5.2.

    half: δr, so that no score of a cluster is farther from that of its centre (for two sides, of keys of norm
    ≤ 1: by what either key adds). v1: the values (n, D), or with v2 those of both sides.

    τ: its variance is at most x/t + y/t² times τ², with x = sinh²(half) and y = 0; for two sides 2
    sinh²(half) and sinh²(2·half). z: E‖z − E z‖² is at most x/s + y/s² times (τ‖softmax‖₂‖V‖₂)², with x, y
    from `value_ratios`. By Chebyshev they miss ε₂ and ε₁ with probabilities p/4 and 3p/4; else z/τ is within
    (ε₁ + ε₂)/(1 − ε₂) = ε.

    This is for one query, chosen without a look at the samples. In a decoder later queries depend on earlier
    estimates.
    """
    def least(x: float, y: float, c: float) -> int:
        """The least m with x/m + y/m² ≤ c."""
        return math.ceil((x + math.sqrt(x ** 2 + 4 * c * y)) / (2 * c))

    e2 = eps / 8
    e1 = eps * (1 - e2) - e2
    if v2 is None:
        x, y = math.sinh(half) ** 2, 0.0
    else:
        x, y = 2 * math.sinh(half) ** 2, math.sinh(2 * half) ** 2
    return least(x, y, p / 4 * e2 ** 2), least(*value_ratios(v1, v2), 3 * p / 4 * e1 ** 2)


def value_ratios(v1: Tensor, v2: Tensor | None = None) -> tuple[float, float]:
    """(x, y) of `sizes`: ‖V‖_F²/‖V‖₂², which is at most D, and 0.

    For the draws of two sides (‖V₁‖_F²‖V₂‖₂² + ‖V₁‖₂²‖V₂‖_F²)/‖V₁ ⊘ V₂‖₂² and ‖V₁‖_F²‖V₂‖_F²/‖V₁ ⊘ V₂‖₂².
    These have no bound: values that are 0 where their partners are not make V₁ ⊘ V₂ as small as one likes.
    ValueError if it is 0.
    """
    def norms(v: Tensor) -> tuple[float, float]:
        return v.square().sum().item(), torch.linalg.matrix_norm(v, 2).item() ** 2

    gram = v1.mT @ v1 * (1 if v2 is None else v2.mT @ v2)  # of V₁ ⊘ V₂, without forming it
    largest = torch.linalg.matrix_norm(gram, 2).item()
    if not largest:
        raise ValueError("the values, or all products of pairs of them, are 0; "
                         "their estimate is 0 with any sizes")

    frobenius, spectral = norms(v1)
    if v2 is None:
        return frobenius / largest, 0.0
    frobenius2, spectral2 = norms(v2)
    return (frobenius * spectral2 + spectral * frobenius2) / largest, frobenius * frobenius2 / largest


def most_clusters(D: int, radius: float) -> float:
    """More clusters of radius δ cannot come of keys of norm ≤ 1: (1 + 2/δ)^D (Lemma 5.4/B.8, repaired).

    Their centres are farther than δ apart, so balls of δ/2 around them are disjoint and lie in one of 1 +
    δ/2. (No two lie in one part of a partition into parts of diameter δ either: (m, δ)-clusterable keys make
    at most m clusters.) The lemma has e^D parts of diameter e/3, from (3/δ)^D at δ = e/3. But that is
    (9/e)^D, of balls whose radius is δ.
    """
    return (1 + 2 / radius) ** D


# ---- texts, and what is held for which error ---------------------------------------------------------------


def in_ball(n: int, d: int, generator: torch.Generator) -> Tensor:
    """n points (n, d), uniform in the unit ball."""
    direction = normalize(torch.randn(n, d, generator=generator), dim=-1)
    return direction * torch.rand(n, 1, generator=generator) ** (1 / d)


def text(n: int, d: int, tail: float = 0.0, tight: bool = False, seed: int = 0,
         norm: float = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Keys uniform in the unit ball, or in 8 tight clusters a side; values of mean 1; a query of this norm.

    k and v (n, 2d), q (1, d). The values are multiplied by e^(tail·normal).
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
    """Four tight clusters a side: k and v (n, 2d), q (1, d) of norm 2, and the clusters' radius δ."""
    generator = torch.Generator().manual_seed(5)
    k = torch.cat([0.8 * in_ball(4, d, generator)[torch.arange(n) % 4] + 0.01 * in_ball(n, d, generator)
                   for _ in range(2)], 1)
    v = 1 + torch.randn(n, 2 * d, generator=generator)
    return k, v, 2 * normalize(torch.randn(1, d, generator=generator), dim=-1), 0.02


def biases(Cache, q: Tensor, k: Tensor, v: Tensor, samples, runs: int, **options) -> Tensor:
    """Mean of `runs` over the exact value, and its standard error: (len(samples), 3, 2) for z, τ and z/τ.

    Of z and z/τ the components are summed.
    """
    z, tau, _ = exact(q, k, v)
    found = []
    for t in samples:
        zs, taus, _ = estimates(Cache, q, k, v, runs, samples=t, **options)
        ratios = zs.sum(1) / z.sum(), taus[:, 0] / tau, (zs / taus).sum(1) / (z / tau).sum()
        found.append([(x.mean(), x.std() / runs ** 0.5) for x in ratios])
    return torch.tensor(found)


def error_over_bytes(n: int, delta: float = 0.9, texts: int = 6, runs: int = 8, **kind):
    """name → (sizes, texts, 2): KB, and the root mean square error; and the KB of the exact cache.

    Beside the two caches the simplest thing: keep as many random tokens as fit into what SubGen4Cache holds,
    and attend to their pairs.
    """
    found, token = {}, 4 * (4 * 3 + 1)  # bytes of a token: two keys, two values, a position
    Caches = (SubGen2Cache, SubGen4Cache) if n <= 256 else (SubGen4Cache,)
    for seed in range(texts):
        k, v, q = text(n, 3, seed=seed, **kind)
        z, tau, unit = exact(q, k, v)
        for Cache in Caches:
            for s, t in ((10, 1), (30, 2), (100, 4), (300, 8), (1000, 16)):
                zs, taus, held = estimates(Cache, q, k, v, runs, radius=delta, samples=t, draws=s)
                outputs = {Cache.__name__: zs / taus}
                if Cache is SubGen4Cache and held // token < n:
                    kept = (torch.randperm(n, generator=torch.Generator().manual_seed(run))[:held // token]
                            for run in range(runs))
                    parts = [exact(q, k[i], v[i]) for i in kept]
                    outputs["random tokens"] = torch.stack([some / total for some, total, _ in parts])
                for name, y in outputs.items():
                    rms = ((y - z / tau).norm(dim=-1) / unit).square().mean().sqrt().item()
                    found.setdefault(name, {}).setdefault(s, []).append((held / 1e3, rms))
    return {name: np.array([*points.values()]) for name, points in found.items()}, n * token / 1e3


def growth(d: int, lengths, radius: float = math.e / 3, samples: int = 8, draws: int = 100):
    """Keys uniform in the ball: clusters of k₁, and KB of a SubGen4Cache, after so many tokens each."""
    k, v, _ = text(int(lengths[-1]), d)
    cache, clusters, held = SubGen4Cache(radius, samples, draws), [], []
    for start, end in zip((0, *lengths), lengths):
        cache.write(k[None, None, start:end], v[None, None, start:end], torch.arange(start, end)[None])
        clusters.append(int((cache.streams[0].count > 0).sum()))
        held.append(cache.bytes()[0] / 1e3)
    return clusters, held
