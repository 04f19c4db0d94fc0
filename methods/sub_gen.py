"""SubGen: attention estimated from samples (Zandieh et al., arXiv 2402.06082), in memory that stops growing where keys cluster;
SubGen4Cache and SubGen2Cache are its forms for tensor attention (Chen et al., arXiv 2503.11108, Lemmas 5.1 and 5.2).

    o = Σ_i e^⟨q,k_i⟩ v_i / Σ_i e^⟨q,k_i⟩ ≈ z/τ
    τ = Σ_c n_c/t Σ_{t samples of cluster c} e^⟨q,k⟩        z = Σ_{s draws} ‖V‖_F²/(s ‖v‖²) e^⟨q,k⟩ v

Keys are clustered as they come, and of the n_c in each cluster t uniform samples are kept; values are drawn, with their keys,
with probability ‖v‖²/‖V‖_F². τ and z are unbiased, their ratio is not. For pairs of tokens the stream is that of all pairs
(SubGen2Cache, which keeps every token to form them), or one for each side of a pair, and all pairs are made of what both
have kept (SubGen4Cache). D is the papers' d.

Differs from the papers: Lemma 5.1 gives no algorithm, so SubGen4Cache is ours; a key joins the oldest cluster that it may,
not the nearest, so that the clusters do not depend on how a text is cut into chunks; scores are scaled by 1/√D as in the
decoder (`scale=1`: the papers). `sizes` gives the constants that the lemmas leave open.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from nanollm import check_seed
from nanollm.cache import LayerCache, spread


def first_true(x: Tensor) -> Tensor:
    """Index of the first True of each row (..., n); n where there is none."""
    return (x.cumsum(-1) == 0).sum(-1)


class Stream:
    """What is remembered of a stream of keys and values (B, H, T, D).

    Clusters: `centre` (B, H, M, D), `count` (B, H, M) and `sample` (B, H, M, t, D), the first so many as a head has.
    Draws: `k` and `v` (B, H, s, D), and `total` (B, H) = ‖V‖_F².
    """

    def __init__(self, radius: float, samples: int, draws: int, generator: torch.Generator):
        self.radius, self.samples, self.draws, self.generator = radius, samples, draws, generator
        self.k = None

    def add(self, k: Tensor, v: Tensor):
        if self.k is None:
            B, H, _, D = k.shape
            self.centre, self.sample = k.new_zeros(B, H, 0, D), k.new_zeros(B, H, 0, self.samples, D)
            self.count = torch.zeros(B, H, 0, dtype=torch.int64, device=k.device)
            self.k, self.v = k.new_zeros(B, H, self.draws, D), v.new_zeros(B, H, self.draws, D)
            self.total = v.new_zeros(B, H)
        self.renew(k, self.join(k))
        self.draw(k, v)

    def uniform(self, below: Tensor, n: int) -> Tensor:
        """n numbers in [0, below) for each of `below`, (..., n)."""
        u = torch.rand(*below.shape, n, generator=self.generator, dtype=torch.float64)
        return u.to(below.device) * below.unsqueeze(-1)

    def near(self, k: Tensor, centre: Tensor) -> Tensor:
        """(B, H, T, M): which keys are within the radius of which centres. NaN is near to all, lest `join` never end."""
        return ~(torch.cdist(k.double(), centre.double(), compute_mode="donot_use_mm_for_euclid_dist") > self.radius)

    def join(self, k: Tensor) -> Tensor:
        """The cluster of each key, (B, H, T): the oldest whose centre, its first key, is within the radius, else a new one."""
        used = (self.count > 0).sum(-1)
        near = self.near(k, self.centre)
        cluster = first_true(near & (self.count > 0).unsqueeze(2))
        homeless = cluster == near.shape[-1]
        while (opens := homeless.any(-1)).any():
            if used.max() == self.count.shape[2]:
                more = used.max() // 10 + 1
                self.centre, self.count, self.sample = (torch.cat((x, x.new_zeros(*x.shape[:2], more, *x.shape[3:])), 2)
                                                        for x in (self.centre, self.count, self.sample))
            centre = k.gather(2, spread(first_true(homeless).clamp(max=k.shape[2] - 1).unsqueeze(-1), k))
            self.centre[opens, used[opens]] = centre[opens].squeeze(1)
            joins = homeless & self.near(k, centre).squeeze(-1)
            cluster = torch.where(joins, used.unsqueeze(-1), cluster)
            homeless, used = homeless & ~joins, used + opens
        return cluster

    def renew(self, k: Tensor, cluster: Tensor):
        """Each sample of a cluster of n keys, m of them new, is with probability m/n replaced by one of the new (reservoirs)."""
        new = torch.zeros_like(self.count).scatter_add_(2, cluster, torch.ones_like(cluster))
        self.count += new
        u = self.uniform(self.count, self.samples)
        start = (new.cumsum(2) - new).unsqueeze(-1)                                  # in the order of clusters
        i = cluster.argsort(2).gather(2, (start + u.long()).clamp(max=k.shape[2] - 1).flatten(2))
        fresh = k.gather(2, spread(i, k)).view_as(self.sample)
        self.sample = torch.where((u < new.unsqueeze(-1)).unsqueeze(-1), fresh, self.sample)

    def draw(self, k: Tensor, v: Tensor):
        """The same for the draws, by ‖v‖² in place of counts."""
        weight = v.double().square().sum(-1).cumsum(-1)
        self.total = self.total + weight[..., -1]
        u = self.uniform(self.total, self.draws)
        i = torch.searchsorted(weight, u, right=True)
        renewed, i = (i < k.shape[2]).unsqueeze(-1), i.clamp(max=k.shape[2] - 1)
        self.k, self.v = (torch.where(renewed, x.gather(2, spread(i, x)), old) for x, old in ((k, self.k), (v, self.v)))

    def kept(self):
        """The samples (B, H, M·t, D), the draws (B, H, s, D), and with either the log of what each stands for: n_c/t, and
        ‖V‖_F²/(s ‖v‖²)."""
        share = (self.count.to(self.k) / self.samples).log().repeat_interleave(self.samples, 2)
        weight = self.total.unsqueeze(-1) / (self.draws * self.v.double().square().sum(-1))
        weight = weight.nan_to_num(0).log().to(self.k)  # 0/0: there was no value but 0
        return (self.sample.flatten(2, 3), share), (self.k, weight)

    def bytes(self) -> tuple[int, int]:
        fixed = sum(x.nbytes for x in (self.k, self.v, self.total))
        each = [x.element_size() * math.prod(x.shape[3:]) for x in (self.centre, self.count, self.sample)]
        return fixed + int((self.count > 0).sum()) * sum(each), fixed + self.count.numel() * sum(each)


@dataclass(eq=False)
class SubGen(LayerCache):
    """SubGen, for ordinary attention."""
    radius: float               # δ, of a cluster around its centre
    samples: int                # t, of each cluster
    draws: int                  # s, of all values
    seed: int = 0
    scale: float | None = None  # of the scores; None: 1/√D, as in the decoder; the papers have 1
    sides = 1                   # streams that k and v are split into

    def __post_init__(self):
        super().__post_init__()
        if not self.radius >= 0 or self.samples < 1 or self.draws < 1:
            raise ValueError(f"radius {self.radius} must be at least 0, samples {self.samples} and draws {self.draws} at least 1")
        check_seed(self.seed, 1000)
        self.streams: list[Stream] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.check(q, k, v, pos)
        B, heads, T, D = q.shape
        q = q.view(B, k.shape[1], -1, T, D) * (D ** -0.5 if self.scale is None else self.scale)
        outputs = []
        for t in range(T):
            self.write(k[:, :, t:t + 1], v[:, :, t:t + 1], pos[:, t:t + 1])
            z, tau, _ = self.estimate(q[:, :, :, t])
            outputs.append((z / tau).flatten(1, 2))
        return torch.stack(outputs, 2)

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        if not self.streams:
            generator = torch.Generator().manual_seed(self.seed * 1000 + self.layer)
            self.streams = [Stream(self.radius, self.samples, self.draws, generator) for _ in range(self.sides)]
        for stream, (key, value) in zip(self.streams, self.split(k, v)):
            stream.add(key, value)
        self.seen += k.shape[2]

    def split(self, k: Tensor, v: Tensor):
        return [(k, v)]

    def estimate(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, G, D), scaled → z (B, H, G, D) and τ (B, H, G, 1), both times e^−top, and top (B, H, G, 1)."""
        terms, rows = self.logs(q)
        top = torch.maximum(terms.amax(-1, keepdim=True), rows.amax(-1, keepdim=True))
        return self.weigh((rows - top).exp()), (terms - top).exp().sum(-1, keepdim=True), top

    def logs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Of the terms of τ, (B, H, G, M·t), and of what the drawn values are weighed with, (B, H, G, s)."""
        (sampled, share), (drawn, weight) = self.streams[0].kept()
        return q @ sampled.mT + share.unsqueeze(2), q @ drawn.mT + weight.unsqueeze(2)

    def weigh(self, p: Tensor) -> Tensor:
        """Σ p v over the drawn values: p (B, H, G, s) → (B, H, G, D)."""
        return p @ self.streams[0].v

    def bytes(self) -> tuple[int, int]:
        return tuple(map(sum, zip((0, 0), *(stream.bytes() for stream in self.streams))))


@dataclass(eq=False)
class SubGen2Cache(SubGen):
    """Lemma 5.2: the stream of all pairs. To form the new ones it needs every earlier token (`tokens`), so its memory grows."""
    vectors = 2

    def __post_init__(self):
        super().__post_init__()
        self.tokens = LayerCache()

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        T = k.shape[2]
        self.tokens.write(k, v, pos)
        for t in range(T):
            n = self.tokens.length - T + t + 1
            super().write(*(torch.cat((x[:, :, :n] * y[:, :, n - 1:n], x[:, :, n - 1:n] * y[:, :, :n - 1]), 2)
                            for x, y in (self.tokens.k.chunk(2, -1), self.tokens.v.chunk(2, -1))), pos)
        self.seen = self.tokens.seen

    def bytes(self) -> tuple[int, int]:
        return tuple(map(sum, zip(super().bytes(), self.tokens.bytes())))


@dataclass(eq=False)
class SubGen4Cache(SubGen):
    """Lemma 5.1: K₁ and K₂ are clustered apart, V₁ and V₂ drawn apart. Every left sample meets every right one, and every left
    draw every right one, in the factored form: no pair is formed, neither of the text nor of what was kept."""
    vectors = 2
    sides = 2

    def split(self, k: Tensor, v: Tensor):
        return zip(k.chunk(2, -1), v.chunk(2, -1))

    def logs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """As in SubGen, (B, H, G, M₁·t·M₂·t) and (B, H, G, s·s)."""
        return tuple((((q.unsqueeze(3) * one.unsqueeze(2)) @ two.unsqueeze(2).mT)  # (K₁ ∘ q) K₂ᵀ
                      + share1[:, :, None, :, None] + share2[:, :, None, None]).flatten(3)
                     for (one, share1), (two, share2) in zip(*(stream.kept() for stream in self.streams)))

    def weigh(self, p: Tensor) -> Tensor:
        one, two = self.streams
        return (one.v.unsqueeze(2) * (p.unflatten(-1, (self.draws, -1)) @ two.v.unsqueeze(2))).sum(3)  # Σ_a V₁[a] ∘ (P V₂)[a]


# ---- what the lemmas leave open, and what the clusters cost ------------------------------------------------------


def sizes(eps: float, half: float, v1: Tensor, v2: Tensor | None = None, p: float = 0.01) -> tuple[int, int]:
    """(t, s) with which the error exceeds ε‖softmax‖₂‖V‖₂ with probability p at most: Lemmas 5.1 and 5.2 with their constants.

    half: δr, so that no score of a cluster is farther from that of its centre (for two sides, of keys of norm ≤ 1: by what
    either key adds). v1: the values (n, D), or with v2 those of both sides.
    τ: its variance is at most x/t + y/t² times τ², with x = sinh²(half) and y = 0; for two sides 2 sinh²(half), sinh²(2·half).
    z: E‖z − E z‖² is at most x/s + y/s² times (τ‖softmax‖₂‖V‖₂)², with x and y from `value_ratios`.
    By Chebyshev they miss ε₂ and ε₁ with probabilities p/4 and 3p/4; else z/τ is within (ε₁ + ε₂)/(1 − ε₂) = ε. This is for
    one query that was chosen without a look at the samples; in a decoder later queries depend on earlier estimates.
    """
    def least(x: float, y: float, c: float) -> int:  # m with x/m + y/m² ≤ c
        return math.ceil((x + math.sqrt(x ** 2 + 4 * c * y)) / (2 * c))

    e2 = eps / 8
    e1 = eps * (1 - e2) - e2
    x, y = (math.sinh(half) ** 2, 0.0) if v2 is None else (2 * math.sinh(half) ** 2, math.sinh(2 * half) ** 2)
    return least(x, y, p / 4 * e2 ** 2), least(*value_ratios(v1, v2), 3 * p / 4 * e1 ** 2)


def value_ratios(v1: Tensor, v2: Tensor | None = None) -> tuple[float, float]:
    """(x, y) of `sizes`: ‖V‖_F²/‖V‖₂², which is at most D, and 0; for the draws of two sides
    (‖V₁‖_F²‖V₂‖₂² + ‖V₁‖₂²‖V₂‖_F²)/‖V₁ ⊘ V₂‖₂² and ‖V₁‖_F²‖V₂‖_F²/‖V₁ ⊘ V₂‖₂².

    The latter have no bound: values that are 0 where their partners are not make V₁ ⊘ V₂ as small as one likes. Raises
    ValueError if it is 0.
    """
    def norms(v: Tensor) -> tuple[float, float]:
        return v.square().sum().item(), torch.linalg.matrix_norm(v, 2).item() ** 2

    gram = v1.mT @ v1 * (1 if v2 is None else v2.mT @ v2)  # of V₁ ⊘ V₂, without forming it
    largest = torch.linalg.matrix_norm(gram, 2).item()
    if not largest:
        raise ValueError("the values, or all products of pairs of them, are 0; their estimate is 0 with any sizes")
    frobenius, spectral = norms(v1)
    if v2 is None:
        return frobenius / largest, 0.0
    frobenius2, spectral2 = norms(v2)
    return (frobenius * spectral2 + spectral * frobenius2) / largest, frobenius * frobenius2 / largest


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What SubGen2Cache and SubGen4Cache estimate, for one unscaled query (1, D) over the pairs of k and v (n, 2D): the
    numerator (D,), the normaliser, and the lemmas' unit of error ‖softmax‖₂‖V₁ ⊘ V₂‖₂; float64."""
    k1, k2, v1, v2 = (x for both in (k, v) for x in both.double().chunk(2, 1))
    e = ((k1 * q.double()) @ k2.T).exp()
    spectral = torch.linalg.matrix_norm((v1.T @ v1) * (v2.T @ v2), 2) ** 0.5
    return (v1 * (e @ v2)).sum(0), e.sum(), e.norm() / e.sum() * spectral


def estimates(Cache, q: Tensor, k: Tensor, v: Tensor, runs: int, **knobs) -> tuple[Tensor, Tensor, int]:
    """The same from a Cache: z (runs, D) and τ (runs, 1) of so many runs, and the bytes that each holds. The runs are the
    rows of a batch, which draw apart."""
    cache = Cache(**knobs, scale=1.0)
    cache.write(k.expand(runs, 1, -1, -1), v.expand(runs, 1, -1, -1), torch.arange(len(k))[None])
    z, tau, top = cache.estimate(q.expand(runs, 1, -1, -1))
    return (z * top.exp())[:, 0, 0].double(), (tau * top.exp())[:, 0, 0].double(), cache.bytes()[0] // runs


def most_clusters(D: int, radius: float) -> float:
    """More clusters of radius δ cannot come of keys of norm ≤ 1: (1 + 2/δ)^D (Lemma 5.4/B.8, repaired).

    Their centres are farther than δ apart, so balls of δ/2 around them are disjoint and lie in one of 1 + δ/2. (No two lie
    in one part of a partition into parts of diameter δ either: (m, δ)-clusterable keys make at most m clusters.)
    The lemma has e^D parts of diameter e/3, from (3/δ)^D at δ = e/3. But that is (9/e)^D, of balls whose radius is δ.
    """
    return (1 + 2 / radius) ** D


variants = {}  # nothing here has a budget of entries, and tensor attention needs Config(vectors=2)
