"""Compactor: outliers and locally attended keys stay (Chari & Van Durme, arXiv 2507.08143).

A later question is unknown, so Compactor adds two scores that need none. The leverage of a key is
large if the head's other keys cannot replace it. The attention within a chunk, without a causal
mask, stands for the attention of a later question.

    l_i = x_iᵀ (XᵀX)⁺ x_i,   x_i = key i before rotation − mean key
    a_i = 1/3 Σ_{|j − i| ≤ 1} ‖v_j‖ Σ_t p_tj,   p = softmax(Q Kᵀ) of a chunk's tokens
    keep Top_b of (1 − b/T) z(l) + z(a),   z: z-score over the heads and tokens of the layer

The first and the newest entries take no part in these scores, and stay.

Differs from the paper:
- The leverage is exact. There a random projection of the keys approximates it; kvpress projects
  them to 48 columns and adds a ridge.
- The other equations and the defaults are those of NVIDIA/kvpress. The authors' code takes 0.5 for
  1 − b/T, chunks of 128 for a, and leverage within chunks of 512. As in both, p lacks 1/√D.
- kvpress takes z-scores over the batch; here each text has its own. There the last chunk is padded,
  and the padding takes part in p.
- Σ runs over a group's query heads, too; kvpress takes their mean. The z-scores are the same.
- The text is compressed once, because queries of earlier turns are gone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.attention import wide
from nanollm.cache import ALL, Method, Slots
from nanollm.check import check_budget, whole
from nanollm.model import rope, rotate
from nanollm.window import WindowMethod


@dataclass
class Compactor(Method):
    budget: int  # entries that each key/value head may keep
    sinks: int = 8  # first entries of each head, which stay whatever their scores
    recent: int = 4  # newest entries, which stay, too
    piece: int = 256  # tokens of a chunk
    window_size = ALL  # `observe` notes the queries of the whole prompt
    observe = WindowMethod.observe

    def __post_init__(self):
        whole("sinks", self.sinks, 0)
        whole("recent", self.recent, 0)
        whole("piece", self.piece, 1)
        least = self.sinks + self.recent + 1
        check_budget(
            self.budget, least, f"the first {self.sinks}, the newest {self.recent}"
        )

    def compress(self, model, tokens: Tensor, layers: list[Slots]):
        for layer in layers:
            if layer.length > self.budget:
                layer.shrink(self.score(layer), self.budget)

    def score(self, layer: Slots) -> Tensor:
        """Return the scores (B, H, T) of the prompt's entries."""
        T = layer.length
        q = layer.notes.get("window")
        if q is None or min(T, q.shape[3]) < layer.seen:
            raise ValueError(
                "Compactor needs the queries of all turns, which are gone; compress once, or use "
                "key_diff"
            )
        middle = slice(self.sinks, T - self.recent)
        q, k, v = (wide(x[..., middle, :]) for x in (q, layer.k, layer.v))
        cos, sin = rope(layer.freq, layer.pos[:, 0, middle])
        outlier = leverage(rotate(k, cos, -sin))
        looked = attention_in_chunks(q, k, self.piece) * v.norm(dim=-1)
        looked = F.avg_pool1d(looked, 3, 1, 1)
        both = torch.stack((outlier, looked))
        # z-scores; the default eps would count
        outlier, looked = F.layer_norm(both, outlier.shape[1:], eps=1e-12)
        score = (1 - self.budget / T) * outlier + looked
        return F.pad(score, (self.sinks, self.recent), value=torch.inf)


def leverage(k: Tensor) -> Tensor:
    """Return l (B, H, S) of keys (B, H, S, D)."""
    x = k - k.mean(2, keepdim=True)
    return (x * torch.linalg.pinv(x).mT).sum(-1)


def attention_in_chunks(q: Tensor, k: Tensor, size: int) -> Tensor:
    """Return Σ_t p_tj (B, H, S), also over a group's query heads: q (B, H, G, S, D)."""
    sums = []
    for queries, keys in zip(q.split(size, 3), k.split(size, 2)):
        p = (queries @ keys.unsqueeze(2).mT).softmax(-1)
        sums.append(p.sum((2, 3)))
    return torch.cat(sums, 2)


variants = {"compactor": Compactor}
