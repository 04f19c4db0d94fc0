"""Ours: semantic chunks. ChunkKV with chunks that end where a line, sentence or clause ends.

With half of the entries, query-aware, they find most facts of four numbers on all three decoders
(claim C1).

Such chunks differ in length, so a chunk's score is the mean of its tokens' window scores. The
scores are pooled first, so a token beside a cut counts on both sides of it. The method needs
separators in the text: a list without any is cut into chunks of the longest length, and few of
these fit into the budget.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.baselines.snap_kv import SnapKV
from methods.chunk_kv import Chunks, places
from nanollm.tokenizer import boundaries
from nanollm.window import Selection, Window, WindowMethod


@dataclass(frozen=True)
class SemanticChunks(Chunks):
    """Select chunks by their mean score. A chunk longer than the room beside the window is cut."""

    chunk_size: int = 32  # most tokens per chunk (chosen on our own tasks)
    score: str = "mean"
    fill: bool = False  # keep only whole chunks

    def check(self, method: WindowMethod):
        if getattr(method, "ends", None) is None:
            raise ValueError(
                "semantic chunks need `ends`, which tokens end one; give those that "
                "SemanticChunkKV.calibrate finds, boundaries(encoding, V)"
            )

    def cut(self, window: Window, scores: Tensor) -> Tensor:
        ends = window.method.ends.to(scores.device)[window.tokens]
        longest = min(self.chunk_size, window.room)
        chunk = cut_at(ends, longest).unsqueeze(1) + 1  # of each token, (B, 1, T)
        place = places(window)
        chunk = chunk.expand(-1, place.shape[1], -1).gather(2, place.clamp(min=0))
        return chunk.masked_fill(place < 0, 0)


def cut_at(ends: Tensor, longest: int) -> Tensor:
    """Return the chunk number of every token, (..., n).

    A chunk ends where `ends` (..., n) is True, and after `longest` tokens. Example with longest =
    3: ends 0 1 0 0 0 0 → chunks 0 0 1 1 1 2.
    """
    i = torch.arange(ends.shape[-1], device=ends.device)
    after_end = F.pad(ends, (1, 0), value=True)[..., :-1]
    begin = torch.where(after_end, i, 0).cummax(-1).values
    return ((i - begin) % longest == 0).cumsum(-1) - 1


@dataclass
class SemanticChunkKV(SnapKV):
    """SnapKV with semantic chunks."""

    select: Selection = SemanticChunks()  # chooses the entries beside the window
    # (V,): which tokens of the vocabulary end a chunk; see `calibrate`
    ends: Tensor | None = None

    @staticmethod
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the tokenizer. tasks: `Tasks` of any text."""
        return dict(ends=boundaries(tasks.encoding, model.config.vocab_size))


variants = {"chunk_kv_semantic": SemanticChunkKV}
