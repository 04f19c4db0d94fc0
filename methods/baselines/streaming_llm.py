"""StreamingLLM: attention sinks and a sliding window (Xiao et al., arXiv 2309.17453).

Softmax weights add up to 1, so in most trained decoders a head with nothing to look for puts its
weight on the first few tokens, the sinks (*built* has none). StreamingLLM keeps the sinks and the
most recent tokens, and evicts everything between.

    S_t = {0 … s−1} ∪ {t−(b−s)+1 … t}

Differs from the paper: the prompt is read with full attention and compressed at its end, so all
methods here compress the same cache. After that one token leaves for each new token.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanollm.cache import ScoredCache
from nanollm.check import check_budget
from nanollm.model import rope, rotate


@dataclass(eq=False)
class StreamingLLM(ScoredCache):
    sinks: int = 4  # first tokens, which are never evicted, s
    # True: positions inside the cache (paper); False: in the text (NVIDIA/kvpress)
    relative: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it must be at least 0")
        check_budget(
            self.budget, self.sinks + 1, f"{self.sinks} sinks and the newest token"
        )
        self.sink_keys = None  # the sinks' keys, rotated by their positions in the text

    def link(self, model, layer: int):
        super().link(model, layer)
        if self.relative and (getattr(model, "positions", None) or self.freq is None):
            raise ValueError(
                "relative positions need RoPE over whole heads, which this model does not have; "
                "use streaming_llm_absolute (relative=False)"
            )

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dropped = self.seen - self.length
        if self.relative and dropped and self.sinks:
            # Close the gap: move the sinks up to the window, by the number of dropped tokens.
            # Example: with 2 sinks, positions 0 1 8 9 become 6 7 8 9.
            if self.sink_keys is None:
                self.sink_keys = self.k[:, :, : self.sinks].clone()
            angles = rope(self.freq, torch.tensor([dropped], device=self.freq.device))
            self.k[:, :, : self.sinks] = rotate(self.sink_keys, *angles)
        return super().read()

    def evict(self):
        if not self.length == self.seen > self.budget:
            return super().evict()
        # in the order of the tokens
        slot = torch.arange(self.length, device=self.pos.device)
        kept = torch.cat(
            (slot[: self.sinks], slot[self.sinks + self.length - self.budget :])
        )
        self.keep(kept.expand(*self.pos.shape[:2], -1))

    def score(self) -> Tensor:
        # of the others, which score alike, the newest stay
        return (self.pos < self.sinks).float()

    def beside(self) -> list[Tensor]:
        return [] if self.sink_keys is None else [self.sink_keys]


variants = {
    "streaming_llm": StreamingLLM,
    "streaming_llm_absolute": partial(StreamingLLM, relative=False),
}
