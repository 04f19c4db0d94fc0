"""Ours: a residual entry. One slot per head represents all evicted entries.

After an eviction, softmax divides all attention among the kept entries, as if the others had never
existed. Here one slot of the budget represents the evicted entries. Its key and value are their
means, weighted by their window scores a. A logit bias β gives it the total weight that they had for
the window's queries t. Any other selection can choose the kept entries.

    k̄ = Σ_{i gone} a_i k_i / Σ_{i gone} a_i,  v̄ likewise
    β:   Σ_t exp(q_t·k̄/√D + β − log Z_t) = Σ_t Σ_{i gone} α_{t,i}
    Z_t the partition sum of the full cache

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
from nanollm.window import Selection, Window, WindowMethod


@dataclass(frozen=True)
class Residual(Selection):
    """Select by `inner`, and add residual entries for the evicted tokens.

    A head whose budget is below `entries`, or that evicts nothing, gets no residual entry.
    """

    inner: Selection = HighestScores()  # chooses the entries beside the residual ones
    # residual entries per head, in the budget; each stands for a run of tokens
    entries: int = 1
    rounds: int = 0  # rounds of k-means on the keys, which turn the runs into clusters
    # fraction of the evicted tokens' weight that the residual entries get
    share: float = 1.0
    again = False  # evicted tokens have no window scores later

    def __post_init__(self):
        if isinstance(self.inner, Residual):
            raise ValueError(
                "residual entries cannot stand for residual ones; add them once"
            )
        whole("entries", self.entries, 1, 1000)
        whole("rounds", self.rounds, 0, 100)
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be above 0 and at most 1")

    def check(self, method: WindowMethod):
        self.inner.check(method)

    def __call__(
        self,
        window: Window,
        scores: Tensor,
        budget: int | Tensor,
    ) -> Tensor:
        """Return the mask of `inner`'s slots, and of one evicted slot for each residual entry."""
        kept, member = self.split(window, scores, budget)
        return kept | newest(member).any(2)

    def split(
        self,
        window: Window,
        scores: Tensor,
        budget: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return what `inner` keeps, (B, H, n), and the groups of what it evicts, (B, H, E, n)."""
        budget = torch.as_tensor(budget, device=scores.device).expand(scores.shape[:2])
        room = (budget >= self.entries) & (budget < window.n)  # (B, H)
        kept = self.inner(window, scores, budget - self.entries * room)
        k = window.layer.k[:, :, : window.n]
        return kept, self.groups(k, ~kept & room[..., None], scores.mean(2))

    def apply(
        self,
        window: Window,
        scores: Tensor,
        budget: int | Tensor,
    ):
        """Put each residual entry into its slot, then keep the chosen slots and the window."""
        layer = window.layer
        kept, member = self.split(window, scores, budget)

        # key, value and bias of each group of evicted tokens
        weight = mean_weights(member, scores.mean(2)).to(layer.k)
        key = weight @ layer.k[:, :, : window.n]
        value = weight @ layer.v[:, :, : window.n]
        # Σ_t Σ_i α_{t,i}
        total = window.method.window_size * (member * scores.sum(2).unsqueeze(2)).sum(
            -1
        )
        bias = (self.share * total).log() - reach(window, key)

        # each takes the slot, and so the position, of its group's newest token
        slot = newest(member)  # (B, H, E, n)
        layer.add_bias()
        for name, new in dict(k=key, v=value, bias=bias).items():
            layer.put(name, placed(layer.slot(name), slot, new))
        kept = kept | slot.any(2)
        layer.keep_chosen(window.with_window(kept))

    def groups(
        self,
        k: Tensor,
        gone: Tensor,
        scores: Tensor,
    ) -> Tensor:
        """Split the evicted tokens, gone (B, H, n), into groups: a mask (B, H, entries, n)."""
        order = gone.cumsum(-1)  # the i-th evicted token has i
        count = order[..., -1:].clamp(min=1)
        group = (order - 1).clamp(min=0) * self.entries // count
        member = F.one_hot(group, self.entries).mT.bool() & gone.unsqueeze(2)
        for _ in range(self.rounds):
            centre = mean_weights(member, scores).to(k) @ k
            group = torch.cdist(k, centre).argmin(-1)
            member = F.one_hot(group, self.entries).mT.bool() & gone.unsqueeze(2)
        return member


def newest(member: Tensor) -> Tensor:
    """Return a mask of each group's newest token: member (B, H, E, n) 0 1 1 0 → 0 0 1 0."""
    later = member.int().flip(-1).cumsum(-1).flip(-1)  # members here or later: 2 2 1 0
    return member & (later == 1)


def placed(
    x: Tensor,
    slot: Tensor,
    new: Tensor,
) -> Tensor:
    """Return x (B, H, S, ...) with new (B, H, E, ...) in the slots of a mask (B, H, E, n)."""
    x = x.clone()
    b, h, e, i = slot.nonzero(as_tuple=True)
    x[b, h, i] = new[b, h, e].to(x.dtype)
    return x


def reach(window: Window, key: Tensor) -> Tensor:
    """Return log Σ_t exp(q_t·k̄/√D − log Z_t) of keys k̄ (B, H, E, D): (B, H, E).

    The sum is over the window's queries of all query heads of the group.
    """
    q = wide(window.q) * key.shape[-1] ** -0.5
    keys = wide(window.k)
    token = torch.arange(keys.shape[2], device=q.device)[None]
    seen = visible(token[:, None], None, token[:, -q.shape[3] :]).unsqueeze(2)
    score = (q @ keys.unsqueeze(2).mT).masked_fill(~seen, -math.inf)
    log_z = score.logsumexp(-1, keepdim=True)
    return (q @ wide(key).unsqueeze(2).mT - log_z).logsumexp((2, 3))


def mean_weights(member: Tensor, scores: Tensor) -> Tensor:
    """Return weights (B, H, E, n) of a group's mean, ∝ scores (B, H, n); 0 if it is empty."""
    weight = member * scores.unsqueeze(2)
    total = weight.sum(-1, keepdim=True)
    return weight / total.clamp(min=torch.finfo(scores.dtype).tiny)


variants = {"snap_kv+residual": partial(SnapKV, select=Residual())}
additions = {"residual": dict(select=Residual())}
