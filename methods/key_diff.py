"""KeyDiff: keep the keys that are unlike the others (Park et al., arXiv 2504.15364).

Keys that are unlike the others tend to get much attention, sinks among them. So the tokens whose keys are
most like the mean direction leave. No query decides.

    evict argmax_i cos(k_i, k̄),   k̄ = mean_j k_j/‖k_j‖

Differs from the paper: the prompt is read with full attention and compressed at its end, not block by block.
After it the entry most like the mean leaves at each step, as in the paper.
"""
import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.cache import ScoredCache


class KeyDiff(ScoredCache):

    def score(self) -> Tensor:
        return -likeness(self.k)


def likeness(k: Tensor) -> Tensor:
    """Cosine of each key and the mean direction of all: k (B, H, S, D) → (B, H, S), in 32 bits at least."""
    direction = F.normalize(k.to(torch.promote_types(k.dtype, torch.float32)), dim=-1)
    return F.cosine_similarity(direction, direction.mean(2, keepdim=True), dim=-1)


variants = {"key_diff": KeyDiff}
