"""R-KV: keep what is attended to and unlike the rest (Cai et al., arXiv 2505.24133).

A model that reasons repeats itself. Repeated tokens have similar keys, and attention keeps all of them. So an
entry loses score by its likeness to the others. Of several entries that are alike the newest is not
penalised.

    I_i = maxpool of the window score          R = softmax_i( 1/n Σ_j cos(k_i, k_j) ),   j ≠ i
    Z_i = λ I_i − (1 − λ) R_i,                 keep Top(Z);   cos = 0 if i is the newest like j (cos > T)

The paper compresses again and again while the model writes: `again(RKV)` of compress_again.py does so. In the
tables it compresses the prompt, as SnapKV does.

Differs from the paper:
- T is 0.5 here; the window and the pool are those of SnapKV in this repository.
"""
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.snap_kv import SnapKV
from nanollm.ranking import top
from nanollm.window import Selection, WindowCache


@dataclass(frozen=True)
class Unlike(Selection):
    """Select entries with high window scores whose keys differ from other keys."""
    weight: float = 0.1  # of the window scores, λ; 1: SnapKV
    alike: float = 0.5   # cosine above which two keys are alike, T

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.weight <= 1 or not -1 <= self.alike <= 1:
            raise ValueError(f"weight {self.weight} must lie between 0 and 1, and alike {self.alike} between "
                             "−1 and 1")

    def __call__(self, cache: WindowCache, scores: Tensor, budget: int | Tensor) -> Tensor:
        importance = cache.pool(scores.mean(2))  # −1 for empty slots
        redundant = redundancy(cache.k[:, :, :scores.shape[-1]], self.alike)
        joint = self.weight * importance - (1 - self.weight) * redundant
        return top(joint.masked_fill(importance < 0, -torch.inf), budget)


def redundancy(k: Tensor, alike: float) -> Tensor:
    """Return R (B, H, n) of keys (B, H, n, D), the oldest first."""
    unit = F.normalize(k.float(), dim=-1)
    cos = unit @ unit.mT
    cos.diagonal(dim1=2, dim2=3).zero_()
    n = k.shape[2]
    place = torch.arange(n, device=k.device)
    newest = torch.where(cos > alike, place, -1).amax(-1, keepdim=True)  # for each j, the newest i like it
    cos = cos.masked_fill(place == newest, 0)
    return cos.mean(2).softmax(-1)


@dataclass(eq=False)
class RKV(SnapKV):
    select: Selection = Unlike()


variants = {"r_kv": RKV}
