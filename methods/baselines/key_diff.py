"""KeyDiff: keep the keys that differ from the others (Park et al., arXiv 2504.15364).

In the paper's models, keys unlike the others, as those of sinks, get much attention. KeyDiff evicts
the entries whose keys are most similar to the mean direction of all keys. It uses no queries.

    evict argmax_i cos(k_i, k̄),   k̄ = mean_j k_j/‖k_j‖

Differs from the paper: by default the whole prompt is read with full attention and compressed at
its end; the paper compresses block by block.
"""

from torch import Tensor

from nanollm.attention import wide
from nanollm.cache import NEVER, Scored, Slots


class KeyDiff(Scored):
    def score(self, layer: Slots) -> Tensor:
        return -likeness(layer)


def likeness(layer: Slots) -> Tensor:
    """Return the cosine of each key and the mean direction of its head's keys, (B, H, S).

    It is multiplied by a constant of the head, and has at least 32 bits.
    """
    k = wide(layer.k)
    scale = k.norm(dim=-1).clamp_(min=1e-12).reciprocal_()
    if layer.ragged:  # empty slots take no part in the mean
        scale.masked_fill_(layer.pos == NEVER, 0)
    scale = scale.unsqueeze(2)  # saves a normalised copy of k at each step
    return (scale @ k @ k.mT).mul_(scale).squeeze(2)


variants = {"key_diff": KeyDiff}
