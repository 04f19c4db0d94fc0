"""DropKV: the exact change of a head's output if one entry goes (openreview.net/forum?id=MqfNzH3TVH).

CriticalKV bounds the change that an eviction causes. For a single entry no bound is needed, because the
softmax of the other entries only grows by the factor 1/(1 − p). So the change is known exactly. DropKV sums
its square over the queries of the observation window and keeps the entries with the highest sum, as if each
were evicted alone.

    o_t without i  −  o_t  =  p_ti/(1 − p_ti) · (o_t − v_i)
    s_i = Σ_{t in the window, g} (p_ti/(1 − p_ti))² ‖v_i − o_t‖²

Differs from the paper:
- Nothing known: the paper's page and NVIDIA/kvpress #284 give this score. As there, it is not pooled
  (`kernel_size=7` pools it as SnapKV does), and W_O is left out.
"""
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.ranking import indices, top
from nanollm.window import WindowCache, window_rows


@dataclass(eq=False)
class DropKV(WindowCache):
    kernel_size: int = 1  # width of the max-pool over neighbouring tokens; 1 turns it off

    def chosen(self) -> Tensor:
        kept = top(self.pool(self.changes()), self.budget - self.window_size)
        return indices(F.pad(kept, (0, self.window_size), value=True))

    def changes(self) -> Tensor:
        """Return s (B, H, S − w), for the entries before the window."""
        w, wide = self.window_size, torch.promote_types(self.k.dtype, torch.float32)
        p = window_rows(self.queries, self.k, self.empty()).to(wide)                 # (B, H, G, w, S)
        o, v = p @ self.v.to(wide).unsqueeze(2), self.v[:, :, :-w].to(wide)          # (B, H, G, w, D)
        # ‖v_i − o_t‖; as a matrix product it would cancel where p ≈ 1 and v_i ≈ o_t
        distance = torch.cdist(o.flatten(2, 3), v, compute_mode="donot_use_mm_for_euclid_dist")
        odds = p[..., :-w] / (1 - p[..., :-w]).clamp(min=1e-6)
        return (odds * distance.view_as(odds)).square().sum((2, 3))


variants = {"drop_kv": DropKV}
