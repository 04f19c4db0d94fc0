"""MomentKV: moments of the evicted entries stand for them (Li et al., arXiv 2606.01563).

An evicted entry is added to four statistics of its head: the number n of evicted entries, the mean key, the
mean value, and the covariance C of values and keys. They give the attention to all evicted entries, up to
first order in how their keys differ:

    Σ e^{q·k_i} v_i  ≈  n e^{q·k̄} (v̄ + C q),     Σ e^{q·k_i}  ≈  n e^{q·k̄},     C = mean (v_i − v̄)(k_i − k̄)ᵀ

(q includes 1/√D.) So attention sees one more slot, with key k̄ and bias ln n. Its value v̄ + C q depends on
the query. KVReviver's sketch is another answer to the same question: what can a few bytes say of the evicted?

Differs from the paper:
- H2O chooses what is evicted. The paper also uses the moments for that.
- The budget counts bytes: the statistics take the room of about D/2 entries.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.h2o import H2O
from nanollm.attention import probabilities
from nanollm.cache import Stored
from nanollm.ranking import expand_index, indices


@dataclass(eq=False)
class MomentKV(H2O):

    def __post_init__(self):
        super().__post_init__()
        self.evicted = 0                        # n, the same for all heads
        self.moments: dict[str, Tensor] = {}    # k (B, H, D), v (B, H, D), C (B, H, D, D)

    def link(self, model, layer: int, previous):
        super().link(model, layer, previous)
        D, size = self.w_o.shape[-1], self.w_o.element_size()
        self.taken = math.ceil((D * D + 2 * D) * size / (2 * D * size + 4))
        if self.budget < self.taken + 2:
            raise ValueError(f"budget {self.budget} must be at least {self.taken + 2}: the moments take the "
                             f"bytes of {self.taken} entries")

    def score(self) -> Tensor:
        newest = self.seen - max(1, round(self.recent * (self.budget - self.taken)))
        return self.accumulated.masked_fill(self.pos >= newest, math.inf)

    def evict(self):
        if self.length > self.budget - self.taken:
            self.shrink(self.score(), self.budget - self.taken)

    def keep(self, i: Tensor):
        stays = torch.zeros_like(self.pos, dtype=torch.bool).scatter(2, i, True)
        self.add(indices(~stays))
        super().keep(i)

    def drop(self, i: Tensor):
        self.add(i)
        super().drop(i)

    def add(self, i: Tensor):
        """Add slots i (B, H, n) to the moments."""
        n = i.shape[2]
        k, v = (x.gather(2, expand_index(i, x)).float() for x in (self.k, self.v))
        mean_k, mean_v = k.mean(2), v.mean(2)
        C = (v - mean_v.unsqueeze(2)).mT @ (k - mean_k.unsqueeze(2)) / n  # rows: the value's channels
        self.evicted += n
        if self.moments:
            share = n / self.evicted
            old_k, old_v, old_C = (self.moments[name].float() for name in "kvC")
            apart_k, apart_v = mean_k - old_k, mean_v - old_v
            C = (1 - share) * old_C + share * C + share * (1 - share) * (
                apart_v.unsqueeze(3) * apart_k.unsqueeze(2))
            mean_k, mean_v = old_k + share * apart_k, old_v + share * apart_v
        self.moments = {name: x.to(self.k) for name, x in dict(k=mean_k, v=mean_v, C=C).items()}

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.evicted:
            return super().attention(q, pos)
        m, (B, _, T, D) = self.moments, q.shape
        k = torch.cat((m["k"].unsqueeze(2), self.k), 2)
        bias = F.pad(k.new_zeros(self.pos.shape), (1, 0), value=math.log(self.evicted))
        p = probabilities(q, k, F.pad(self.pos, (1, 0)), bias, pos)          # (B, H, G, T, 1 + S)
        grouped = q.view(B, k.shape[1], -1, T, D) * D ** -0.5
        value = m["v"][:, :, None, None] + grouped @ m["C"].unsqueeze(2).mT  # v̄ + C q
        y = p[..., :1] * value + p[..., 1:] @ self.v.unsqueeze(2)
        return y.view_as(q), p[..., 1:]

    def stored(self) -> list[Stored]:
        return super().stored() + [Stored(x, x.numel(), model_dtype=True) for x in self.moments.values()]


variants = {"moment_kv": MomentKV}
