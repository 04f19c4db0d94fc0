"""Ours: a residual entry. One slot per head represents all evicted entries.

After an eviction, softmax divides all attention among the kept entries, as if the others had never
existed. Here one slot of the budget represents the evicted entries. Its key and value are their
means, weighted by their window scores a. A logit bias β gives it the total weight that they had for
the window's queries t. Any other selection can choose the kept entries.

    k̄ = Σ_{i gone} a_i k_i / Σ_{i gone} a_i,  v̄ likewise
    β:   Σ_t exp(q_t·k̄/√D + β − log Z_t) = Σ_t Σ_{i gone} α_{t,i},   Z_t the partition sum of the full cache

On our two decoders of 2.8 M parameters, no selection by window scores with equal budgets for all
heads changes the attention output less. So it tests whether a smaller change means better text, as
Appendix I of CriticalKV (arXiv 2502.03805) argues (claim P10).

Two approximations:
- Keys are stored rotated, so the keys of distant tokens partly cancel in the mean.
- The weight matches in the sum over the window, not for each query.
"""

from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.baselines.snap_kv import HighestScores, SnapKV
from nanollm.attention import visible, wide
from nanollm.check import whole
from nanollm.window import Selection, WindowCache


@dataclass(frozen=True)
class Residual(Selection):
    """Select by `inner`, and add residual entries for the evicted tokens.

    A head whose budget is below `entries`, or that evicts nothing, gets no residual entry.
    """

    inner: Selection = HighestScores()  # chooses the entries beside the residual ones
    # residual entries per head, inside the budget; each stands for a run of tokens
    entries: int = 1
    # rounds of k-means on the keys, which turn the runs into clusters
    rounds: int = 0
    again = False  # evicted tokens have no window scores later
    # fraction of the evicted tokens' weight that the residual entries get
    share: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        whole("entries", self.entries, 1, 1000)
        whole("rounds", self.rounds, 0, 100)
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be above 0 and at most 1")

    def check(self, cache: WindowCache):
        self.inner.check(cache)

    def __call__(
        self, cache: WindowCache, scores: Tensor, budget: int | Tensor
    ) -> Tensor:
        """Return the mask of the slots of `inner` and of evicted slots that now hold residual entries."""
        n = scores.shape[-1]
        budget = torch.as_tensor(budget, device=scores.device).expand(scores.shape[:2])
        room = (budget >= self.entries) & (budget < n)  # (B, H)
        kept = self.inner(cache, scores, budget - self.entries * room)

        # key, value and bias of each group of evicted tokens
        # (B, H, entries, n)
        member = self.groups(cache.k[:, :, :n], ~kept & room[..., None], scores.mean(2))
        weight = mean_weights(member, scores.mean(2)).to(cache.k)
        key, value = weight @ cache.k[:, :, :n], weight @ cache.v[:, :, :n]
        # Σ_t Σ_i α_{t,i}
        total = cache.window_size * (member * scores.sum(2).unsqueeze(2)).sum(-1)
        bias = (self.share * total).log() - reach(cache, key)

        # each takes the slot, and so the position, of its group's newest token
        place = n - 1 - member.int().flip(-1).argmax(-1)
        nonempty = member.any(-1)
        cache.slots["bias"] = torch.zeros_like(cache.slots["pos"], dtype=torch.float32)
        b, h, _ = nonempty.nonzero(as_tuple=True)
        for name, new in dict(k=key, v=value, bias=bias).items():
            cache.slot(name)[b, h, place[nonempty]] = new[nonempty].to(
                cache.slot(name).dtype
            )
        return kept | (F.one_hot(place, n).bool() & nonempty[..., None]).any(2)

    def groups(self, k: Tensor, gone: Tensor, scores: Tensor) -> Tensor:
        """Split the evicted tokens, gone (B, H, n), into `entries` groups: a mask (B, H, entries, n)."""
        order = gone.cumsum(-1)  # the i-th evicted token has i
        group = ((order - 1).clamp(min=0) * self.entries) // order[..., -1:].clamp(
            min=1
        )
        member = F.one_hot(group, self.entries).mT.bool() & gone.unsqueeze(2)
        for _ in range(self.rounds):
            group = torch.cdist(k, mean_weights(member, scores).to(k) @ k).argmin(-1)
            member = F.one_hot(group, self.entries).mT.bool() & gone.unsqueeze(2)
        return member


def reach(cache: WindowCache, key: Tensor) -> Tensor:
    """Return log Σ_t exp(q_t·k̄/√D − log Z_t) of keys k̄ (B, H, E, D): (B, H, E).

    The sum is over the window's queries of all query heads of the group.
    """
    q, keys, _ = cache.observed()
    q, keys, key = wide(q) * key.shape[-1] ** -0.5, wide(keys), wide(key)
    token = torch.arange(keys.shape[2], device=q.device)[None]
    seen = visible(token[:, None], None, token[:, -q.shape[3] :]).unsqueeze(2)
    log_z = (
        (q @ keys.unsqueeze(2).mT)
        .masked_fill(~seen, -math.inf)
        .logsumexp(-1, keepdim=True)
    )
    return (q @ key.unsqueeze(2).mT - log_z).logsumexp((2, 3))


def mean_weights(member: Tensor, scores: Tensor) -> Tensor:
    """Return weights (B, H, E, n) for each group's mean, ∝ window scores (B, H, n); 0 in an empty group."""
    weight = member * scores.unsqueeze(2)
    return weight / weight.sum(-1, keepdim=True).clamp(
        min=torch.finfo(scores.dtype).tiny
    )


variants = {"snap_kv+residual": partial(SnapKV, select=Residual())}
additions = {"residual": dict(select=Residual())}
