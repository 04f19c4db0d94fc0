"""StreamingLLM: attention sinks and a sliding window (Xiao et al., arXiv 2309.17453).

Softmax weights add up to 1, so in most trained decoders a head with nothing to look for puts its
weight on the first few tokens, the sinks (*built* has none). StreamingLLM keeps the sinks and the
most recent tokens, and evicts everything between.

    S_t = {0 … s−1} ∪ {t−(b−s)+1 … t}

Differs from the paper: by default the prompt is read with full attention and compressed at its
end, as with most methods here. After that, once the budget is full, one token leaves for each new
one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.cache import Scored, Slots
from nanollm.check import check_budget
from nanollm.model import rope, rotate
from nanollm.slots import Stored, all_live


class SinkSlots(Slots):
    """Plain slots whose first entries, the sinks, move up to the newest ones as others leave.

    Example: with 2 sinks, positions 0 1 8 9 are read as 6 7 8 9.
    """

    def __init__(self, *place):
        super().__init__(*place)
        # (B, H, sinks, D), rotated by their positions in the text
        self.sink_keys = None
        _ = self.freq  # ValueError if how the model rotates is not known
        if getattr(self.model, "positions", None):
            raise ValueError(
                "relative positions need RoPE over whole heads, which this model does not have; "
                "use streaming_llm_absolute"
            )

    def write(
        self,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ):
        super().write(k, v, pos)
        sinks = self.method.sinks
        gap = self.seen - self.length  # tokens that left
        if sinks and gap:
            if self.sink_keys is None:
                self.sink_keys = self.k[:, :, :sinks].clone()
            freq = self.freq
            angles = rope(freq, torch.tensor([gap], device=freq.device))
            self.k[:, :, :sinks] = rotate(self.sink_keys, *angles)

    def stored(self) -> list[Stored]:
        sinks = [] if self.sink_keys is None else [all_live(self.sink_keys)]
        return super().stored() + sinks


@dataclass
class StreamingLLM(Scored):
    """Positions count inside the cache, as in the paper."""

    sinks: int = 4  # first tokens, which are never evicted, s
    store = SinkSlots

    def __post_init__(self):
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it must be at least 0")
        check_budget(
            self.budget, self.sinks + 1, f"{self.sinks} sinks and the newest token"
        )

    def evict(self, layer: Slots):
        if not layer.length == layer.seen > self.budget:
            return super().evict(layer)
        # every token is there, in order: no need to sort scores
        slot = torch.arange(layer.length, device=layer.pos.device)
        newest = slot[self.sinks + layer.length - self.budget :]
        kept = torch.cat((slot[: self.sinks], newest))
        B, H, _ = layer.pos.shape
        layer.keep(kept.expand(B, H, -1))

    def score(self, layer: Slots) -> Tensor:
        # of the others, which score alike, the newest stay
        return (layer.pos < self.sinks).float()


class AbsoluteStreamingLLM(StreamingLLM):
    """Positions count in the text, as in NVIDIA/kvpress."""

    store = None


variants = {
    "streaming_llm": StreamingLLM,
    "streaming_llm_absolute": AbsoluteStreamingLLM,
}
