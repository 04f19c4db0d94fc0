"""KVzip: keep the entries that the decoder needs to repeat the text (Kim et al., arXiv 2505.23416).

A later question is unknown, but the text is known. So the decoder reads the text a second time, the
reread, with the first pass in its cache. An entry matters if some token of the reread attends to it
strongly. So its score is the largest attention that any token of the reread gives it. The entries
of all layers and heads are ranked together, so a head that repetition does not need keeps almost
nothing.

    S_i = max_{t in the reread, g} α_{t,g,i},   keep the L·H·b entries with the highest S

Differs from the paper:
- There a prompt asks the decoder to repeat the text. Here no such words are added, because our two
  small decoders would take them for text.
- There the reread comes in pieces of 2K tokens; here in pieces of 512, each after the 8 tokens
  before it. As there, a piece scores only the entries that it repeats. The softmax covers the first
  4 tokens (there the system prompt), these entries and the piece.
- There the system prompt always stays, and in NVIDIA/kvpress the first 4 tokens of a chat template.
  Here no entry is protected, so a question at the prompt's end may be lost.
- New tokens after the prompt are appended.

Ours: `kvzip_recent` also keeps the 8 newest entries of each head, within the budget.
"""

from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor

from nanollm.attention import probabilities
from nanollm.cache import NEVER, TILE, crop
from nanollm.check import check_budget, whole
from nanollm.generate import prefill
from nanollm.packed import PackedCache, keep_highest
from nanollm.ranking import indices, taken

# first tokens of the prompt; the softmax of each piece covers them, as the paper's system prompt
SYSTEM = 4
BEFORE = 8  # tokens that lead to a piece


@dataclass(eq=False)
class KVzip(PackedCache):
    # slots per key/value head at the prompt's end, mean over all heads of all layers
    budget: int
    recent: int = 0  # newest entries of each head, which stay whatever their scores
    sinks: int = 0  # first entries of each head, which stay whatever their scores
    piece: int = 512  # tokens per piece of the reread
    appends = True

    def __post_init__(self):
        super().__post_init__()
        whole("recent", self.recent, 0)
        whole("sinks", self.sinks, 0)
        whole("piece", self.piece, 1)
        check_budget(
            self.budget,
            self.sinks + self.recent + 1,
            f"{self.sinks} sinks and the newest {self.recent} stay, and one more",
        )

    @classmethod
    def compress(cls, model, tokens: Tensor, caches: list["KVzip"]):
        first, T = caches[0], tokens.shape[1]
        if T > first.budget:
            scores = cls.scores(model, tokens, caches)
            stays = [
                (cache.pos < first.sinks) | (cache.pos >= T - first.recent)
                for cache in caches
            ]
            scores = [x.masked_fill(stay, math.inf) for x, stay in zip(scores, stays)]
            keep_highest(caches, scores, first.budget)

    @classmethod
    def scores(cls, model, tokens: Tensor, caches: list["KVzip"]) -> list[Tensor]:
        """Read tokens (B, T) once more behind themselves, in pieces; return S (B, H, S) of each cache."""
        T, n = tokens.shape[1], caches[0].piece
        for cache in caches:
            # an earlier turn was compressed: empty slots go to the end
            if cache.ragged:
                cache.keep(indices(cache.pos != NEVER))
            cache.reserve(cache.length + min(n + BEFORE, T))
        scores = [torch.zeros_like(cache.pos, dtype=torch.float32) for cache in caches]
        for start in range(0, T, n):
            own = range(start, min(start + n, T))
            readers = [Reread(cache, own, T, x) for cache, x in zip(caches, scores)]
            prefill(model, tokens[:, max(start - BEFORE, 0) : own.stop], readers)
            crop(caches, T)
        return scores


class Reread:
    """Stands in for a cache while the decoder reads a piece of the prompt again, and updates S.

    own: the positions that the piece repeats. T: tokens of the first pass. scores: S (B, H, S),
    changed.
    """

    def __init__(self, cache: KVzip, own: range, T: int, scores: Tensor):
        self.cache, self.own, self.T, self.scores = cache, own, T, scores

    # all else that the decoder asks for is the cache's
    def __getattr__(self, name: str):
        return getattr(self.cache, name)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.cache.write(k, v, pos)
        self.look(q, pos)
        if self.cache.layer == len(self.cache.model.blocks) - 1:
            return torch.zeros_like(q)  # nothing uses the reread's logits
        return self.cache.attention(q, pos)[0]

    def look(self, q: Tensor, pos: Tensor):
        """Score the entries that the piece repeats, by its queries q (B, H·G, T, D) at pos.

        The softmax covers the first tokens, these entries, and the piece's own tokens up to the
        query.
        """
        slot_pos = self.cache.pos
        own = (slot_pos >= self.own.start) & (slot_pos < self.own.stop)
        i = indices(
            own | (slot_pos < SYSTEM) | (slot_pos >= self.T) & (slot_pos != NEVER)
        )
        empty, i = i < 0, i.clamp(min=0)
        own = own.gather(2, i) & ~empty
        keys, slot_pos = (
            taken(self.cache.k, i),
            slot_pos.gather(2, i).masked_fill(empty, NEVER),
        )
        end = keys.shape[2] - q.shape[2]
        # probabilities take much memory
        for some, at in zip(q.split(TILE, 2), pos.split(TILE, 1)):
            # without later tokens
            end = keys.shape[2] if self.cache.ragged else end + some.shape[2]
            highest = probabilities(
                some, keys[:, :, :end], slot_pos[:, :, :end], None, at
            ).amax((2, 3))
            mine = own[:, :, :end]
            self.scores.scatter_reduce_(
                2, i[:, :, :end] * mine, highest.float() * mine, "amax"
            )


variants = {"kvzip": KVzip, "kvzip_recent": partial(KVzip, recent=8)}
