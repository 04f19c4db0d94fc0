"""KeyDiff: keep the keys that differ from the others (Park et al., arXiv 2504.15364).

Keys that differ from the others, such as those of sinks, tend to get much attention. KeyDiff evicts the
entries whose keys are most similar to the mean direction of all keys. It uses no queries.

    evict argmax_i cos(k_i, k̄),   k̄ = mean_j k_j/‖k_j‖

Differs from the paper: the whole prompt is read with full attention and compressed at its end; the paper
compresses block by block. After the prompt one entry leaves at each step, as in the paper.
"""
from torch import Tensor
import torch.nn.functional as F

from nanollm.attention import wide
from nanollm.cache import ScoredCache


class KeyDiff(ScoredCache):

    def score(self) -> Tensor:
        return -likeness(self.k)


def likeness(k: Tensor) -> Tensor:
    """Return the cosine of keys (B, H, S, D) and their mean direction, (B, H, S), in at least 32 bits."""
    k = wide(k)
    scale = 1 / k.norm(dim=-1).clamp(min=1e-12)  # no normalized copy of k: this runs at each step
    mean = F.normalize(scale.unsqueeze(2) @ k, dim=-1)  # (B, H, 1, D)
    return (mean @ k.mT).squeeze(2) * scale


variants = {"key_diff": KeyDiff}
