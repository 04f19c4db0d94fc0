"""DefensiveKV: prepare for the worst query (Feng et al., arXiv 2510.13334).

CriticalKV's authors wrote it. SnapKV and CriticalKV take the mean of the attention that an entry
gets in the observation window. That assumes that later queries want what the window wanted on
average. DefensiveKV takes the maximum over the window's queries and the group's query heads: an
entry stays if a single query wanted it. A low maximum proves little about later queries, so no
entry counts less than the mean one. CriticalKV's two stages follow. Stage 1 takes the entries that
gather 90 % of the mean attention; stage 2 multiplies by the norms of the projected values. The
entries of a layer's heads are ranked together; LayerDefensiveKV ranks those of all layers. (Ours,
`worst_query`, leaves out stage 1.)

    r_i = max_{t in the window, g} α_{t,g,i},   c_i = max(r_i, mean_j r_j) · N_i / Σ_j N_j,
    N_i = mean_g ‖v_i W_O‖₁

Differs from the paper's code:
- Scores are max-pooled over 7 neighbouring tokens, as in SnapKV here. There the average of 5 is
  taken.
- Stage 1 counts the attention that the window gets, head by head. The code sums the w columns
  before the window, and takes their mean over all heads.
- What stage 1 takes always stays. In the code it gets the highest score of its layer.
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.critical_kv import value_norms
from nanollm.cache import Slots
from nanollm.packed import keep_highest
from nanollm.ranking import rank
from nanollm.window import Window, WindowMethod


@dataclass
class DefensiveKV(WindowMethod):
    """Rank the entries of a layer's heads together."""

    mass: float = 0.9  # attention that stage 1 gathers by weight alone

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.mass <= 1:
            raise ValueError(
                f"mass is {self.mass}; it is a part of the attention, between 0 and 1"
            )

    def compress(
        self,
        model,
        tokens: Tensor,
        layers: list[Slots],
    ):
        if layers[0].seen > self.budget:
            for layer in layers:
                keep_highest(
                    [layer], [self.worst_case(self.window(layer, tokens))], self.budget
                )

    def worst_case(self, window: Window) -> Tensor:
        """Return c (B, H, S); infinite for the entries of stage 1 and of the window."""
        n = window.n
        w = window.w
        rows = window.rows()  # (B, H, G, queries, S)
        norms = self.norms(window)
        if window.empty is not None:  # after an earlier turn, heads differ in length
            norms = norms.masked_fill(window.empty[:, :, :n], 0)
        score = self.risk(window, rows[..., :n]) * F.normalize(norms, p=1, dim=-1)

        mean = rows.mean((2, 3))  # (B, H, S)
        place = rank(mean[..., :n], window.layer.pos[:, :, :n])
        gathered = mean[..., :n].sort(-1, descending=True).values.cumsum(-1)
        gathered = gathered + mean[..., n:].sum(-1, keepdim=True)
        needed = (gathered < self.mass).sum(-1, keepdim=True).clamp(max=self.budget - w)
        return F.pad(
            score.masked_fill(place < needed, math.inf), (0, w), value=math.inf
        )

    def risk(self, window: Window, rows: Tensor) -> Tensor:
        """Return max(r, mean r), (B, H, n), of the window's attention (B, H, G, queries, n)."""
        risk = window.pool(rows.amax((2, 3)))  # −1 in empty slots
        entries = (risk >= 0).sum(-1, keepdim=True)
        mean = risk.clamp(min=0).sum(-1, keepdim=True) / entries
        return torch.maximum(risk, mean)

    def norms(self, window: Window) -> Tensor:
        """Return N (B, H, n)."""
        layer = window.layer
        return value_norms(layer.v[:, :, : window.n], layer.w_o).mean(2)


class LayerDefensiveKV(DefensiveKV):
    """Rank the entries of all layers and heads together."""

    def compress(
        self,
        model,
        tokens: Tensor,
        layers: list[Slots],
    ):
        if layers[0].seen > self.budget:
            scores = [self.worst_case(self.window(layer, tokens)) for layer in layers]
            keep_highest(layers, scores, self.budget)


variants = {"defensive_kv": DefensiveKV, "layer_defensive_kv": LayerDefensiveKV}
