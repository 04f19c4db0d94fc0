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

from methods.baselines.snap_kv import HighestScores, SnapKV
from nanollm.attention import visible, wide
from nanollm.window import Selection, Window, WindowMethod


@dataclass(frozen=True)
class Residual(Selection):
    """Select by `inner`, and add a residual entry for the evicted tokens.

    A head without a budget, or that evicts nothing, gets no residual entry.
    """

    inner: Selection = HighestScores()  # chooses the entries beside the residual one
    again = False  # evicted tokens have no window scores later

    def __post_init__(self):
        if isinstance(self.inner, Residual):
            raise ValueError(
                "residual entries cannot stand for residual ones; add them once"
            )

    def check(self, method: WindowMethod):
        self.inner.check(method)

    def __call__(
        self,
        window: Window,
        scores: Tensor,
        budget: int | Tensor,
    ) -> Tensor:
        """Return the mask of `inner`'s slots, and of one evicted slot for the residual entry."""
        kept, gone = self.split(window, scores, budget)
        return kept | newest(gone)

    def split(
        self,
        window: Window,
        scores: Tensor,
        budget: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return what `inner` keeps, and what the residual entry stands for, (B, H, n) each."""
        budget = torch.as_tensor(budget, device=scores.device).expand(scores.shape[:2])
        room = (budget > 0) & (budget < window.n)  # (B, H)
        kept = self.inner(window, scores, budget - room.int())
        return kept, ~kept & room[..., None]

    def apply(
        self,
        window: Window,
        scores: Tensor,
        budget: int | Tensor,
    ):
        """Put the residual entry into its slot, then keep the chosen slots and the window."""
        layer = window.layer
        kept, gone = self.split(window, scores, budget)

        # key, value and bias of the evicted tokens
        weight = mean_weights(gone, scores.mean(2)).to(layer.k).unsqueeze(2)
        key = weight @ layer.k[:, :, : window.n]
        value = weight @ layer.v[:, :, : window.n]
        # Σ_t Σ_i α_{t,i}
        total = window.method.window_size * (gone * scores.sum(2)).sum(-1)
        bias = total.log() - reach(window, key)

        # it takes the slot, and so the position, of the newest of them
        slot = newest(gone)  # (B, H, n)
        layer.add_bias()
        for name, new in dict(k=key[:, :, 0], v=value[:, :, 0], bias=bias).items():
            layer.put(name, placed(layer.slot(name), slot, new))
        layer.keep_chosen(window.with_window(kept | slot))


def newest(gone: Tensor) -> Tensor:
    """Return a mask of each head's newest evicted token: gone (B, H, n) 0 1 1 0 → 0 0 1 0."""
    later = gone.int().flip(-1).cumsum(-1).flip(-1)  # evicted here or later: 2 2 1 0
    return gone & (later == 1)


def placed(
    x: Tensor,
    slot: Tensor,
    new: Tensor,
) -> Tensor:
    """Return x (B, H, S, ...) with new (B, H, ...) in the slots of a mask (B, H, n)."""
    x = x.clone()
    b, h, i = slot.nonzero(as_tuple=True)
    x[b, h, i] = new[b, h].to(x.dtype)
    return x


def reach(window: Window, key: Tensor) -> Tensor:
    """Return log Σ_t exp(q_t·k̄/√D − log Z_t) of keys k̄ (B, H, 1, D): (B, H).

    The sum is over the window's queries of all query heads of the group.
    """
    q = wide(window.q) * key.shape[-1] ** -0.5
    keys = wide(window.k)
    token = torch.arange(keys.shape[2], device=q.device)[None]
    seen = visible(token[:, None], None, token[:, -q.shape[3] :]).unsqueeze(2)
    score = (q @ keys.unsqueeze(2).mT).masked_fill(~seen, -math.inf)
    log_z = score.logsumexp(-1, keepdim=True)
    return (q @ wide(key).unsqueeze(2).mT - log_z).logsumexp((2, 3, 4))


def mean_weights(gone: Tensor, scores: Tensor) -> Tensor:
    """Return weights (B, H, n) of the evicted tokens' mean, ∝ scores; 0 if there are none."""
    weight = gone * scores
    total = weight.sum(-1, keepdim=True)
    return weight / total.clamp(min=torch.finfo(scores.dtype).tiny)


variants = {"snap_kv+residual": partial(SnapKV, select=Residual())}
additions = {"residual": dict(select=Residual())}
