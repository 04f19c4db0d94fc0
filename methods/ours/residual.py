"""A residual entry: a slot per head that stands for everything evicted. Not from a paper.

Eviction renormalises attention over what is kept, as if the rest had never been. Give one slot of the budget
to the rest instead. Its key and value are the means of the evicted ones, weighted by the window's window scores a. A
logit bias β lets it take the weight that they had together, as the window's queries t saw it. It wraps any
other selection.

    k̄ = Σ_{i gone} a_i k_i / Σ_{i gone} a_i,  v̄ likewise
    β:   Σ_t exp(q_t·k̄/√D + β − log Z_t) = Σ_t Σ_{i gone} α_{t,i},   Z_t the partition sum of the full cache

No choice of entries by the window's attention that we measured lowers the change of the attention output as
much as this does. So it tests whether a smaller change means better text, as Appendix I of CriticalKV (arXiv
2502.03805) argues; the numbers come from `experiments/change_and_text.py`.

Two things are only approximate: keys are stored rotated, so the mean of distant ones partly cancels; and the
weight is matched in the sum over the window, not for each query.
"""
from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.snap_kv import HighestScores, SnapKV
from nanollm.attention import visible
from nanollm.check import whole
from nanollm.window import Selection, WindowCache


@dataclass(frozen=True)
class Residual(Selection):
    """A head whose budget is below `entries`, or that evicts nothing, has no residual entry."""
    inner: Selection = HighestScores()  # chooses the entries beside the residual ones
    entries: int = 1    # residual entries per head, in its budget; each stands for a run of evicted tokens
    rounds: int = 0     # of k-means on the keys: from runs of tokens to clusters
    again = False       # what a residual entry stands for has no window scores
    share: float = 1.0  # of the evicted tokens' weight that the entries take

    def __post_init__(self):
        super().__post_init__()
        whole("entries", self.entries, 1, 1000)
        whole("rounds", self.rounds, 0, 100)
        if not 0 < self.share <= 1:
            raise ValueError(f"share {self.share} must lie above 0 and be at most 1")

    def check(self, cache: WindowCache):
        self.inner.check(cache)

    def __call__(self, cache: WindowCache, scores: Tensor, budget: int | Tensor) -> Tensor:
        """What `inner` keeps of a smaller budget, and the residual entries, written over evicted slots."""
        n = scores.shape[-1]
        budget = torch.as_tensor(budget, device=scores.device).expand(scores.shape[:2])
        room = (budget >= self.entries) & (budget < n)  # (B, H)
        kept = self.inner(cache, scores, budget - self.entries * room)

        # key, value and bias of each group of evicted tokens
        member = self.groups(cache.k[:, :, :n], ~kept & room[..., None], scores.mean(2))  # (B, H, entries, n)
        weight = mean_weights(member, scores.mean(2)).to(cache.k)
        key, value = weight @ cache.k[:, :, :n], weight @ cache.v[:, :, :n]
        total = cache.window_size * (member * scores.sum(2).unsqueeze(2)).sum(-1)  # Σ_t Σ_i α_{t,i}
        bias = (self.share * total).log() - reach(cache, key)

        # each takes the place, and with it the position, of its group's newest token
        place = n - 1 - member.int().flip(-1).argmax(-1)
        there = member.any(-1)
        cache.slots["bias"] = torch.zeros_like(cache.slots["pos"], dtype=torch.float32)
        b, h, _ = there.nonzero(as_tuple=True)
        for name, new in dict(k=key, v=value, bias=bias).items():
            cache.slot(name)[b, h, place[there]] = new[there].to(cache.slot(name).dtype)
        return kept | (F.one_hot(place, n).bool() & there[..., None]).any(2)

    def groups(self, k: Tensor, gone: Tensor, scores: Tensor) -> Tensor:
        """The evicted tokens (B, H, n) split into `entries` groups, (B, H, entries, n) of bool."""
        order = gone.cumsum(-1)
        group = ((order - 1).clamp(min=0) * self.entries) // order[..., -1:].clamp(min=1)
        member = F.one_hot(group, self.entries).mT.bool() & gone.unsqueeze(2)
        for _ in range(self.rounds):
            group = torch.cdist(k, mean_weights(member, scores).to(k) @ k).argmin(-1)
            member = F.one_hot(group, self.entries).mT.bool() & gone.unsqueeze(2)
        return member


def reach(cache: WindowCache, key: Tensor) -> Tensor:
    """log Σ_t exp(q_t·k̄/√D − log Z_t) of keys (B, H, E, D), over the group's window queries: (B, H, E)."""
    q = cache.queries * key.shape[-1] ** -0.5
    seen = visible(cache.pos, None, cache.pos[:, 0, -cache.window_size:]).unsqueeze(2)
    log_z = (q @ cache.k.unsqueeze(2).mT).masked_fill(~seen, -math.inf).logsumexp(-1, keepdim=True)
    return (q @ key.unsqueeze(2).mT - log_z).logsumexp((2, 3))


def mean_weights(member: Tensor, scores: Tensor) -> Tensor:
    """Weights (B, H, E, n) of each group's mean, by window scores (B, H, n); all 0 for an empty group."""
    weight = member * scores.unsqueeze(2)
    return weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


variants = {"snap_kv+residual": partial(SnapKV, select=Residual())}
additions = {"residual": dict(select=Residual())}
