"""SubGen: attention estimated from samples, in memory that stops growing if keys cluster.

Zandieh et al., arXiv 2402.06082. SubGen keeps t random keys of each cluster of keys, to estimate
the softmax's denominator τ. It keeps s random values with their keys, to estimate the numerator z.
A value v is drawn with probability ‖v‖²/‖V‖_F².

    o = Σ_i e^⟨q,k_i⟩ v_i / Σ_i e^⟨q,k_i⟩ ≈ z/τ
    τ = Σ_c n_c/t Σ_{t samples of cluster c} e^⟨q,k⟩
    z = Σ_{s draws} ‖V‖_F²/(s ‖v‖²) e^⟨q,k⟩ v

Keys are clustered as they come; n_c is the number of keys in cluster c. τ and z are unbiased, their
ratio is not.

For tensor attention (Chen et al., arXiv 2503.11108, Lemmas 5.1, 5.2) the keys are pairs of tokens.
`SubGen2Cache` uses the stream of all pairs. `SubGen4Cache` uses one stream for each side of a pair:

    τ = Σ_{left, right samples} n_c/t · n_c'/t · e^⟨q, k₁ ∘ k₂⟩
    and the same for z and the draws of both sides

Differs from the papers:
- A key joins the oldest cluster near it, not the nearest: cuts of the text do not change the
  clusters.
- Scores are scaled by 1/√D, as in the decoder (`scale=1`: the papers).
- Lemma 5.1 gives no algorithm, so SubGen4Cache is ours.

theory/clustering.py has the constants that the lemmas leave open. D is the paper's d.
"""

import math

import torch
from torch import Tensor

from methods.tensor_attention import remember
from nanollm.attention import wide
from nanollm.cache import Slots
from nanollm.check import check_seed
from nanollm.ranking import expand_index
from nanollm.slots import Stored, all_live


class Stream:
    """The samples of one stream of keys and values.

    - Clusters: `centre` (B, H, M, D), `count` (B, H, M) and `sample` (B, H, M, t, D). A head with
      fewer than M clusters uses the first places; in the others `count` is 0.
    - Draws: `k` and `v` (B, H, s, D), and `total` (B, H), which is ‖V‖_F².
    """

    def __init__(
        self,
        like: Tensor,
        radius: float,
        samples: int,
        draws: int,
        generator: torch.Generator,
    ):
        """like (B, H, _, D): a tensor with the shape, type and device of the keys."""
        self.radius = radius
        self.samples = samples
        self.draws = draws
        self.generator = generator
        B, H, _, D = like.shape
        self.centre = like.new_zeros(B, H, 0, D)
        self.sample = like.new_zeros(B, H, 0, samples, D)
        self.count = like.new_zeros(B, H, 0, dtype=torch.int64)
        self.k = like.new_zeros(B, H, draws, D)
        self.v = like.new_zeros(B, H, draws, D)
        self.total = like.new_zeros(B, H, dtype=torch.float64)

    def add(
        self,
        k: Tensor,
        v: Tensor,
    ):
        """Add keys and values (B, H, T, D) to the clusters and draws."""
        self.renew(k, self.join(k))
        self.draw(k, v)

    def uniform(
        self,
        below: Tensor,
        n: int,
    ) -> Tensor:
        """Return n random numbers in [0, below) for each number in `below` (...): (..., n)."""
        shape = *below.shape, n
        u = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return u.to(below.device) * below.unsqueeze(-1)

    def near(
        self,
        k: Tensor,
        centre: Tensor,
    ) -> Tensor:
        """Return whether each key is within the radius of each centre, (B, H, T, M)."""
        distance = torch.cdist(
            k.double(), centre.double(), compute_mode="donot_use_mm_for_euclid_dist"
        )
        # not <=: a NaN then counts as near, so the loop in `join` ends
        return ~(distance > self.radius)

    def join(self, k: Tensor) -> Tensor:
        """Return each key's cluster, (B, H, T): the oldest near it, or a new one around it."""
        used = (self.count > 0).sum(-1)
        near = self.near(k, self.centre) & (self.count > 0).unsqueeze(2)
        cluster = (near.cumsum(-1) == 0).sum(-1)  # the first that is near; M if none is
        homeless = cluster == near.shape[-1]

        # the first homeless key of each head opens a cluster; the homeless keys near it join
        while homeless.any():
            opens = homeless.any(-1)
            if used.max() == self.count.shape[2]:
                more = int(used.max()) // 10 + 1  # new places for clusters
                self.centre = longer(self.centre, more)
                self.count = longer(self.count, more)
                self.sample = longer(self.sample, more)
            first = homeless.int().argmax(-1, keepdim=True)
            centre = k.gather(2, expand_index(first, k))
            self.centre[opens, used[opens]] = centre[opens].squeeze(1)

            joins = homeless & self.near(k, centre).squeeze(-1)
            cluster = torch.where(joins, used.unsqueeze(-1), cluster)
            homeless = homeless & ~joins
            used = used + opens
        return cluster

    def renew(
        self,
        k: Tensor,
        cluster: Tensor,
    ):
        """Update the samples: each becomes one of a cluster's m new keys with chance m/n.

        n is the number of the cluster's keys, the new ones included. This is reservoir sampling:
        every sample stays uniform among the cluster's keys.
        """
        new = torch.zeros_like(self.count).scatter_add_(
            2, cluster, torch.ones_like(cluster)
        )
        self.count += new
        u = self.uniform(self.count, self.samples)

        # where a cluster's new keys start, sorted by cluster
        start = (new.cumsum(2) - new).unsqueeze(-1)
        place = (start + u.long()).clamp(max=k.shape[2] - 1).flatten(2)
        i = cluster.argsort(2).gather(2, place)
        fresh = k.gather(2, expand_index(i, k)).view_as(self.sample)
        self.sample = torch.where(
            (u < new.unsqueeze(-1)).unsqueeze(-1), fresh, self.sample
        )

    def draw(
        self,
        k: Tensor,
        v: Tensor,
    ):
        """Update the draws: like `renew`, with ‖v‖² instead of counts."""
        weight = v.double().square().sum(-1).cumsum(-1)
        self.total = self.total + weight[..., -1]
        u = self.uniform(self.total, self.draws)

        i = torch.searchsorted(
            weight, u, right=True
        )  # k.shape[2]: none of the new ones
        renewed = (i < k.shape[2]).unsqueeze(-1)
        i = i.clamp(max=k.shape[2] - 1)
        new_k = k.gather(2, expand_index(i, k))
        new_v = v.gather(2, expand_index(i, v))
        self.k = torch.where(renewed, new_k, self.k)
        self.v = torch.where(renewed, new_v, self.v)

    def kept(self):
        """Return two pairs: samples with log n_c/t, and draws' keys with log ‖V‖_F²/(s ‖v‖²).

        Samples are (B, H, M·t, D), keys (B, H, s, D); the logarithms lack the last dimension.
        """
        share = (self.count.double() / self.samples).log()
        share = share.repeat_interleave(self.samples, 2)
        norm = self.v.double().square().sum(-1)
        weight = self.total.unsqueeze(-1) / (self.draws * norm)
        weight = weight.nan_to_num(0).log()  # 0/0 if all values are 0
        return (self.sample.flatten(2, 3), share), (self.k, weight)

    def stored(self) -> list[Stored]:
        clusters = int((self.count > 0).sum())
        stored = [all_live(self.k), all_live(self.v), all_live(self.total)]
        for x in (self.centre, self.count, self.sample):
            live = clusters * math.prod(x.shape[3:])
            stored.append(Stored(x, live, model_dtype=x.dim() > 3))
        return stored


def longer(x: Tensor, more: int) -> Tensor:
    """Return x (B, H, M, ...) with `more` zeros at the end of its third axis."""
    B, H, _, *shape = x.shape
    return torch.cat((x, x.new_zeros(B, H, more, *shape)), 2)


class SubGen(Slots):
    """SubGen for ordinary attention: a store without slots, whose method keeps everything.

    radius: of a cluster around its centre, δ. samples: keys kept per cluster, t. draws: values kept
    in all, s. seed: of samples and draws; each layer has its own. scale: factor of the scores;
    None: 1/√D, as in the decoder; the papers: 1.
    """

    sides = 1  # streams into which k and v are split

    def __init__(
        self,
        *place,
        radius: float,
        samples: int,
        draws: int,
        seed: int = 0,
        scale: float | None = None,
    ):
        super().__init__(*place)
        if not radius >= 0 or samples < 1 or draws < 1:
            raise ValueError(
                f"radius {radius} must be at least 0, "
                f"samples {samples} and draws {draws} at least 1"
            )
        check_seed(seed, 1000)
        self.radius = radius
        self.samples = samples
        self.draws = draws
        self.seed = seed
        self.scale = scale
        self.streams: list[Stream] = []

    def room(self, T: int) -> int:
        return 1  # a token attends to what the tokens before it have left

    def write(
        self,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ):
        if not self.streams:
            generator = torch.Generator().manual_seed(self.seed * 1000 + self.index)
            like = k[..., : k.shape[-1] // self.sides]
            self.streams = [
                Stream(like, self.radius, self.samples, self.draws, generator)
                for _ in range(self.sides)
            ]
        keys = k.chunk(self.sides, -1)
        values = v.chunk(self.sides, -1)
        for stream, key, value in zip(self.streams, keys, values):
            stream.add(key, value)
        self.seen += k.shape[2]

    def attention(
        self,
        q: Tensor,
        pos: Tensor,
    ) -> tuple[Tensor, None]:
        """Estimate attention's output for one new token, q (B, H·G, 1, D)."""
        stream = self.streams[0]
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        # (B, H, G, D)
        grouped = wide(q)[:, :, 0].unflatten(1, (stream.k.shape[1], -1)) * scale
        z, tau, _ = self.estimate(grouped)
        return (z / tau).view(q.shape).to(stream.v), None

    def estimate(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z (B, H, G, D) and τ (B, H, G, 1), both times e^−top, and top (B, H, G, 1).

        q (B, H, G, D) is scaled already. top is the largest exponent, so nothing overflows.
        """
        terms, rows = self.logs(q)
        top = torch.maximum(terms.amax(-1, keepdim=True), rows.amax(-1, keepdim=True))
        z = self.weigh((rows - top).exp())
        tau = (terms - top).exp().sum(-1, keepdim=True)
        return z, tau, top

    def logs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of τ's terms, (B, H, G, M·t), and of the draws' weights in z.

        The latter are (B, H, G, s).
        """
        (sampled, share), (drawn, weight) = self.streams[0].kept()
        terms = q @ wide(sampled).mT
        terms = terms + share.unsqueeze(2).to(q)
        rows = q @ wide(drawn).mT
        rows = rows + weight.unsqueeze(2).to(q)
        return terms, rows

    def weigh(self, p: Tensor) -> Tensor:
        """Return Σ p v over the drawn values: p (B, H, G, s) → (B, H, G, D)."""
        return p @ wide(self.streams[0].v)

    def stored(self) -> list[Stored]:
        return [x for stream in self.streams for x in stream.stored()]


class SubGen2Cache(SubGen):
    """Lemma 5.2: SubGen on the stream of all pairs.

    New pairs are formed from every earlier token, so all tokens are stored and the memory grows.
    """

    vectors = 2

    def __init__(self, *place, **options):
        super().__init__(*place, **options)
        self.tokens = Slots()

    def write(
        self,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ):
        for new_k, new_v in remember(self.tokens, k, v, pos):
            super().write(new_k, new_v, pos)
        self.seen = self.tokens.seen

    def stored(self) -> list[Stored]:
        return super().stored() + self.tokens.stored()


class SubGen4Cache(SubGen):
    """Lemma 5.1: K₁ and K₂ have their own clusters, V₁ and V₂ their own draws.

    Every left sample is combined with every right sample, and every left draw with every right
    draw. The factored form does this without forming a pair.
    """

    vectors = 2
    sides = 2

    def logs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as SubGen.logs, here (B, H, G, M₁·t·M₂·t) and (B, H, G, s·s)."""
        logs = []
        left, right = (stream.kept() for stream in self.streams)
        for (x1, log1), (x2, log2) in zip(left, right):  # of samples, then of draws
            # (K₁ ∘ q) K₂ᵀ
            k1_q = q.unsqueeze(3) * wide(x1).unsqueeze(2)
            score = k1_q @ wide(x2).unsqueeze(2).mT
            score = (
                score + log1[:, :, None, :, None].to(q) + log2[:, :, None, None].to(q)
            )
            logs.append(score.flatten(3))
        return tuple(logs)

    def weigh(self, p: Tensor) -> Tensor:
        """Return Σ_a V₁[a] ∘ (P V₂)[a]."""
        v1, v2 = (wide(stream.v).unsqueeze(2) for stream in self.streams)
        p = p.unflatten(-1, (self.draws, -1))
        return (v1 * (p @ v2)).sum(3)


variants = {}  # not in the tables: none has a budget of entries
