"""Ours: semantic chunks. ChunkKV with chunks that end where a line, sentence or clause ends.

On all three decoders they keep most facts of four numbers; ChunkKV keeps 12 to 34 % (claim C1).

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
from methods.chunk_kv import Chunks
from nanollm.window import Selection, WindowCache


@dataclass(frozen=True)
class SemanticChunks(Chunks):
    """Select chunks by their mean score. A chunk longer than the whole budget is split."""

    chunk_size: int = 32  # most tokens per chunk (chosen on our own tasks)
    score: str = "mean"
    fill: bool = False  # keep only whole chunks
    again = False  # chunk ends are known for the prompt only

    def check(self, cache: WindowCache):
        pass

    def cut(self, cache: WindowCache, scores: Tensor) -> Tensor:
        # (B, T) of bool, from `tell_chunk_ends`
        ends = getattr(cache, "chunk_ends", None)
        known = 0 if ends is None else ends.shape[1]
        if known < cache.seen:
            raise ValueError(
                f"chunk ends are known for {known} of the prompt's {cache.seen} tokens; "
                "call nanollm.generate.tell_chunk_ends(caches, ends) for all of them"
            )
        longest = min(self.chunk_size, cache.room)
        ends = ends[:, : scores.shape[-1]].to(scores.device)
        return cut_at(ends, longest).unsqueeze(1).expand(scores.shape)


def cut_at(ends: Tensor, longest: int) -> Tensor:
    """Return the chunk number of every token, (..., n).

    A chunk ends where `ends` (..., n) is True, and after `longest` tokens. Example with longest =
    3: ends 0 1 0 0 0 0 → chunks 0 0 1 1 1 2.
    """
    i = torch.arange(ends.shape[-1], device=ends.device)
    after_end = F.pad(ends, (1, 0), value=True)[..., :-1]
    begin = torch.where(after_end, i, 0).cummax(-1).values
    return ((i - begin) % longest == 0).cumsum(-1) - 1


@dataclass(eq=False)
class SemanticChunkKV(SnapKV):
    """SnapKV with semantic chunks. Call `tell_chunk_ends(caches, ends)` before the prompt ends."""

    select: Selection = SemanticChunks()  # chooses the entries beside the window


variants = {"chunk_kv_semantic": SemanticChunkKV}
additions = {"semantic": dict(select=SemanticChunks())}
