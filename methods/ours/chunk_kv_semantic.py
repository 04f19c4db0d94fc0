"""Semantic chunks: ChunkKV whose chunks end where a line, sentence or clause does. Ours.

Such chunks differ in length, so their mean vote decides: it is what a slot of the chunk gathers. Window scores are
pooled, so that one beside a cut counts on both sides. The chunks are as good as the marks in the text: a list
without any falls into chunks of the longest length, and few have room.
"""
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.chunk_kv import Chunks
from methods.snap_kv import SnapKV
from nanollm.window import Selection, WindowCache


@dataclass(frozen=True)
class SemanticChunks(Chunks):
    """Any budget will do: a chunk that could never be kept is cut shorter."""
    chunk_size: int = 32        # of the longest (chosen on our own tasks)
    score: str = "mean"
    fill: bool = False          # none is cut
    again = False               # the ends are known of the prompt alone

    def check(self, cache: WindowCache):
        pass

    def cut(self, cache: WindowCache, scores: Tensor) -> Tensor:
        ends = getattr(cache, "chunk_ends", None)  # (B, T) of bool, from `tell_chunk_ends`
        known = 0 if ends is None else ends.shape[1]
        if known < cache.seen:
            raise ValueError(f"ends tell of {known} tokens and the prompt has {cache.seen}; call "
                             "tell_chunk_ends(caches, ends) of nanollm.generate with those of all its tokens")
        longest = min(self.chunk_size, cache.budget - cache.window_size)
        ends = ends[:, :scores.shape[-1]].to(scores.device)
        return cut_at(ends, longest).unsqueeze(1).expand(scores.shape)


def cut_at(ends: Tensor, longest: int) -> Tensor:
    """Number of the chunk of every token, (..., n): one ends at each of `ends` and after `longest` tokens."""
    i = torch.arange(ends.shape[-1], device=ends.device)
    after_end = F.pad(ends, (1, 0), value=True)[..., :-1]
    begin = torch.where(after_end, i, 0).cummax(-1).values
    return ((i - begin) % longest == 0).cumsum(-1) - 1


@dataclass(eq=False)
class SemanticChunkKV(SnapKV):
    """SnapKV's window and semantic chunks. `tell_chunk_ends(caches, ends)` says where they end."""
    select: Selection = SemanticChunks()


variants = {"chunk_kv_semantic": SemanticChunkKV}
additions = {"semantic": dict(select=SemanticChunks())}
