"""StreamingLLM: attention sinks and a sliding window (Xiao et al., arXiv 2309.17453).

The first few tokens draw attention whatever they say, since softmax must put its weight somewhere; keep them
and the most recent tokens, forget everything between.

    S_t = {0 … s−1} ∪ {t−(b−s)+1 … t}

Differs from the paper: the prompt is read with full attention and evicted at its end, so that all methods
here compress the same cache; from then on one token leaves for each that comes.
"""
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanollm.cache import NEVER, ScoredCache
from nanollm.check import check_budget
from nanollm.model import rope, rotate


@dataclass(eq=False)
class StreamingLLM(ScoredCache):
    sinks: int = 4         # first tokens that are never dropped
    relative: bool = True  # positions as counted in the cache (paper); False: as in the text (NVIDIA/kvpress)

    def __post_init__(self):
        super().__post_init__()
        if self.sinks < 0:
            raise ValueError(f"sinks {self.sinks} must be at least 0")
        check_budget(self.budget, self.sinks + 1, f"{self.sinks} sinks and the newest token")
        self.sink_keys = None  # as they were stored, rotated by their position in the text

    def link(self, model, layer: int, previous):
        super().link(model, layer, previous)
        if self.relative and self.freq is None:
            raise ValueError("relative positions need RoPE over whole heads, which this model has not; "
                             "take streaming_llm_absolute (relative=False)")

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dropped = self.seen - self.length
        if self.relative and dropped and self.sinks:
            # the window keeps its distances to the query, so moving the sinks up to it closes the gap
            if self.sink_keys is None:
                self.sink_keys = self.k[:, :, :self.sinks].clone()
            angles = rope(self.freq, torch.tensor([dropped], device=self.freq.device))
            self.k[:, :, :self.sinks] = rotate(self.sink_keys, *angles)
        return super().read()

    def score(self) -> Tensor:
        return self.pos.masked_fill(self.pos < self.sinks, NEVER)

    def beside(self) -> list[Tensor]:
        return [] if self.sink_keys is None else [self.sink_keys]


variants = {"streaming_llm": StreamingLLM, "streaming_llm_absolute": partial(StreamingLLM, relative=False)}
