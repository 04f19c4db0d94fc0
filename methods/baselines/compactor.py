"""Compactor: keep keys that are outliers or attended to nearby (Chari et al., arXiv 2507.08143).

A later question is unknown, so two scores that need none are added. The leverage of a key says how
little the head's other keys can stand in for it. The attention that it gets within its chunk, also
from earlier tokens, stands for that of a later question.

    l_i = x_iᵀ (XᵀX + λI)⁻¹ x_i,   x_i = key i before rotation − mean key
    a_i = mean over i−1, i, i+1 of ‖v_j‖ Σ_t p_tj,   p = softmax(Q Kᵀ), a chunk's queries and keys
    keep Top_b of (1 − b/T) l/std(l) + a/std(a),   std over the layer's heads and tokens

The first and the newest entries take no part in either score, and stay.

Differs from the paper:
- The leverage is exact, because D is small. There random projections to 48 dimensions make X
  narrower.
- Equations, weight 1 − b/T and defaults are those of NVIDIA/kvpress. The authors' code has the
  weight 0.5, chunks of 128, and leverage within chunks of 512. As in both, p lacks the usual 1/√D.
- kvpress takes z-scores over the whole batch; here each text is on its own. Without the z-scores'
  means, which are left out, each head keeps the same entries.
- The text is compressed once. The queries of earlier turns are not kept.
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.attention import probabilities, wide
from nanollm.cache import Method, Slots
from nanollm.check import check_budget, whole
from nanollm.model import rope, rotate

RIDGE = 0.01  # λ


@dataclass
class Compactor(Method):
    budget: int  # entries that each key/value head may keep
    sinks: int = 8  # first entries of each head, which stay whatever their scores
    recent: int = 4  # newest entries of each head, likewise
    chunk: int = 256  # tokens that attend to each other

    def __post_init__(self):
        whole("sinks", self.sinks, 0)
        whole("recent", self.recent, 0)
        whole("chunk", self.chunk, 1)
        stay = self.sinks + self.recent
        check_budget(self.budget, stay + 1, f"{stay} entries stay, and one more")

    def observe(self, layer: Slots, q: Tensor, p: Tensor | None):
        if not layer.prompt_done:
            earlier = layer.notes.get("q", q[:, :, :0])
            layer.notes["q"] = torch.cat((earlier, q), 2)

    def compress(self, model, tokens: Tensor, layers: list[Slots]):
        for layer in layers:
            if layer.length > self.budget:
                layer.shrink(self.scores(layer), self.budget)

    def scores(self, layer: Slots) -> Tensor:
        """Return the scores (B, H, S) of a layer that has read the prompt."""
        T = layer.length
        q = layer.notes.get("q", layer.k[:, :, :0])
        if q.shape[2] < T:
            raise ValueError(
                "Compactor has forgotten the queries of earlier turns; compress once, or use KVzip"
            )
        middle = slice(self.sinks, T - self.recent)
        q, k, v = (wide(x[:, :, middle]) for x in (q, layer.k, layer.v))
        cos, sin = rope(layer.freq, layer.pos[:, 0, middle])
        score = leverage(rotate(k, cos, -sin))
        score = (1 - self.budget / T) * scaled(score)
        weight = attention_in_chunks(q, k, self.chunk) * v.norm(dim=-1)
        score = score + scaled(F.avg_pool1d(weight, 3, 1, 1))
        return F.pad(score, (self.sinks, self.recent), value=math.inf)


def leverage(k: Tensor) -> Tensor:
    """Return l (B, H, S) of keys (B, H, S, D)."""
    x = k - k.mean(2, keepdim=True)
    ridge = RIDGE * torch.eye(k.shape[3]).to(k)
    inverse = (x.mT @ x + ridge).inverse()
    return (x @ inverse * x).sum(-1)


def attention_in_chunks(q: Tensor, k: Tensor, size: int) -> Tensor:
    """Return Σ_t p_tj (B, H, S), the mean over a group's query heads; no mask hides later keys."""
    q = q * q.shape[3] ** 0.5  # `probabilities` divides by it
    sums = []
    for queries, keys in zip(q.split(size, 2), k.split(size, 2)):
        p = probabilities(queries, keys)
        sums.append(p.sum(3).mean(2))
    return torch.cat(sums, 2)


def scaled(x: Tensor) -> Tensor:
    """Divide by the standard deviation over each text's heads and tokens, x (B, H, S)."""
    return x / x.std((1, 2), keepdim=True).clamp(min=1e-6)


variants = {"compactor": Compactor}
