"""Expected Attention: the attention that future queries will pay (Devoto et al., arXiv 2510.00636).

Future queries are unknown, but their distribution is not: before rotation a head's queries are nearly normal,
N(μ, Σ), and the prompt's queries give μ and Σ. Averaged over the next n positions they are treated as normal
again. The mean of exp(q·k/√D) over a normal q has a closed form. An entry's score is this expected attention,
times the norm of its projected value.

    â_i = z_i / Σ_j z_j,   z_i = exp(μ̄·k_i/√D + k_iᵀ Σ̄ k_i / 2D),   μ̄ = R̄ μ,  Σ̄ = R̄ Σ R̄ᵀ
    keep the b entries with the highest (â_i + ε) ‖W_O v_i‖₂,   R̄ the mean rotation of the next n positions

A decoder without rotation has R̄ = 1.

Differs from the paper:
- All heads keep the same number of entries.
- The prompt is compressed at its end; new tokens are appended.
- The query heads of a group share an entry, so its score is their mean.

As in NVIDIA/kvpress, by the paper's authors, the first tokens stay, and their queries do not count for μ and
Σ. There the softmax also leaves out these tokens, the norm is ‖v_i‖₂, and ε is 0 by default.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from nanollm.cache import LayerCache, ScoredCache
from nanollm.check import check_budget, whole
from nanollm.model import rope, rotate


@dataclass(eq=False)
class ExpectedAttention(ScoredCache):
    future: int = 512      # next positions over which the rotation is averaged, n
    sinks: int = 4         # first tokens, which stay; their queries do not count
    epsilon: float = 0.02  # ε: with it the value's norm counts even if no attention is expected

    def __post_init__(self):
        super().__post_init__()
        whole("future", self.future, 1, 2 ** 16)  # the cosines of all n positions are in memory at once
        whole("sinks", self.sinks, 0)
        check_budget(self.budget, self.sinks + 1, f"{self.sinks} sinks and one more")
        if self.epsilon < 0:
            raise ValueError(f"epsilon is {self.epsilon}; it must be at least 0")
        # sums of q and of q qᵀ over the queries before rotation
        self.total, self.products = 0.0, 0.0  # (B, H·G, D) and (B, H·G, D, D)

    def observe(self, q: Tensor, p: Tensor | None):
        if not self.prompt_done:
            pos = self.pos[:, 0, -q.shape[2]:]
            if self.freq is not None:  # undo the rotation
                cos, sin = rope(self.freq, pos)
                q = rotate(q, cos, -sin)
            # in 64 bits, so the sums do not depend on how the prompt is cut into pieces
            q = (q * (pos >= self.sinks)[:, None, :, None]).double()
            self.total, self.products = self.total + q.sum(2), self.products + q.mT @ q
        super().observe(q, p)

    def end_prefill(self):
        if self.prompt_done:
            raise ValueError("end_prefill was already called for this cache; call it once per prompt")
        super().evict()
        self.total = self.products = 0.0
        super().end_prefill()

    evict = LayerCache.evict  # evicts nothing: tokens after the prompt are appended

    def score(self) -> Tensor:
        """Return (â + ε) ‖W_O v‖₂, (B, H, S), the mean over a group's query heads."""
        heads, D, n = self.k.shape[1], self.k.shape[3], self.seen - self.sinks
        mean = self.total / n
        spread = self.products / n - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        if self.freq is not None:
            cos, sin = (x.mean(-2).double() for x in rope(
                self.freq, torch.arange(self.seen, self.seen + self.future, device=self.freq.device)))
            mean = rotate(mean, cos, sin)                                     # R̄ μ
            spread = rotate(rotate(spread, cos, sin).mT, cos, sin)            # R̄ Σ R̄ᵀ
        mean, spread = (x.to(torch.float32).unflatten(1, (heads, -1)) for x in (mean, spread))

        # log z_i = μ̄·k_i/√D + k_iᵀ Σ̄ k_i / 2D for each query head: (B, H, G, S)
        k, w_o = self.k.float().unsqueeze(2), self.w_o.float().unflatten(1, (heads, -1))
        log_z = (k @ mean.unsqueeze(-1))[..., 0] * D ** -0.5 + ((k @ spread) * k).sum(-1) / (2 * D)

        # ‖W_O v‖₂² = vᵀ (W_Oᵀ W_O) v
        gram, v = torch.einsum("ohgd,ohge->hgde", w_o, w_o), self.v.float().unsqueeze(2)
        norms = ((v @ gram) * v).sum(-1).clamp(min=0).sqrt()
        score = ((log_z.softmax(-1) + self.epsilon) * norms).mean(2)
        return score.masked_fill(self.pos < self.sinks, math.inf)

    def beside(self) -> list[Tensor]:
        return [x for x in (self.total, self.products) if isinstance(x, Tensor)]


variants = {"expected_attention": ExpectedAttention}
