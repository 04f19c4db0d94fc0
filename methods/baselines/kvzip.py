"""KVzip: keep the entries that the decoder needs to repeat the text (Kim et al., arXiv 2505.23416).

A later question is unknown, but the text is known. So the decoder reads the text a second time, the
reread, with the first pass in its cache. The reread comes in pieces. An entry's score is the
largest attention that it gets from the piece that repeats it. The entries of all layers and heads
are ranked together, so a head that repetition does not need keeps almost nothing.

    S_i = max_{t in i's piece, g} α_{t,g,i},   keep the L·H·b entries with the highest S

Differs from the paper:
- There a prompt asks the decoder to repeat the text. Here no such words are added, because our two
  small decoders would take them for text.
- A piece has 2K tokens there, and 512 here. As there, each but the first is led in by the 8 tokens
  before it. The softmax covers the first 4 tokens (there the system prompt), the entries that the
  piece repeats, and the piece.
- There the system prompt always stays, and in NVIDIA/kvpress the first 4 tokens of a chat template.
  Here no entry is protected by default, so a question at the prompt's end may be
  lost.
- As there, new tokens after the prompt are appended.

Ours: `kvzip_recent` also keeps the 8 newest entries of each head, within the budget.
"""

from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor

from nanollm.attention import probabilities, visible
from nanollm.cache import NEVER, Method, Slots
from nanollm.check import check_budget, whole
from nanollm.generate import prefill
from nanollm.packed import keep_highest
from nanollm.ranking import indices, taken
from nanollm.slots import TILE

# first tokens of the prompt; the softmax of each piece covers them, as the paper's system prompt
SYSTEM = 4
BEFORE = 8  # tokens that lead to a piece


@dataclass
class KVzip(Method):
    budget: int  # slots per key/value head at the prompt's end, mean over all heads of all layers
    recent: int = 0  # newest entries of each head, which stay whatever their scores
    sinks: int = 0  # first entries of each head, which stay whatever their scores
    piece: int = 512  # tokens per piece of the reread

    def __post_init__(self):
        whole("recent", self.recent, 0)
        whole("sinks", self.sinks, 0)
        whole("piece", self.piece, 1)
        check_budget(
            self.budget,
            self.sinks + self.recent + 1,
            f"{self.sinks} sinks and the newest {self.recent} stay, and one more",
        )

    def compress(self, model, tokens: Tensor, layers: list[Slots]):
        T = tokens.shape[1]
        if T <= self.budget:
            return
        scores = []
        for layer, score in zip(layers, self.scores(model, tokens, layers)):
            stays = (layer.pos < self.sinks) | (layer.pos >= T - self.recent)
            scores.append(score.masked_fill(stays, math.inf))
        keep_highest(layers, scores, self.budget)

    def scores(self, model, tokens: Tensor, layers: list[Slots]) -> list[Tensor]:
        """Reread tokens (B, T) behind themselves, in pieces; return S (B, H, S) of each layer."""
        T = tokens.shape[1]
        end = T + min(T, self.piece + BEFORE)
        if end > model.config.max_len:
            raise ValueError(
                f"{T} tokens are read again, which takes {end} positions, and the model has "
                f"{model.config.max_len}; shorten the text, or take kvzip_fast"
            )
        for layer in layers:
            # an earlier turn was compressed: empty slots go to the end
            if layer.ragged:
                layer.keep(indices(layer.pos != NEVER))
            layer.reserve(layer.length + min(self.piece + BEFORE, T))

        scores = [torch.zeros_like(layer.pos, dtype=torch.float32) for layer in layers]
        for start in range(0, T, self.piece):
            own = range(start, min(start + self.piece, T))
            readers = [Reread(layer, own, T, x) for layer, x in zip(layers, scores)]
            prefill(model, tokens[:, max(start - BEFORE, 0) : own.stop], readers)
            for layer in layers:
                layer.crop(T)
        return scores


class Reread:
    """Stands in for a store while the decoder reads a piece of the prompt again, and updates S.

    own: the positions that the piece repeats. T: tokens of the first pass. scores: S (B, H, S),
    changed.
    """

    def __init__(self, layer: Slots, own: range, T: int, scores: Tensor):
        self.layer = layer
        self.own = own
        self.T = T
        self.scores = scores

    @property
    def seen(self) -> int:
        return self.layer.seen

    @property
    def slots(self) -> dict[str, Tensor]:
        return self.layer.slots

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.layer.write(k, v, pos)
        self.look(q, pos)
        if self.layer.block == len(self.layer.model.blocks) - 1:
            return torch.zeros_like(q)  # nothing uses the reread's logits
        return self.layer.attention(q, pos)[0]

    def look(self, q: Tensor, pos: Tensor):
        """Score the entries that the piece repeats, by its queries q (B, H·G, T, D) at pos.

        The softmax covers the first tokens, these entries, and the piece's own tokens up to the
        query.
        """
        slot_pos = self.layer.pos
        own = (slot_pos >= self.own.start) & (slot_pos < self.own.stop)
        piece = (slot_pos >= self.T) & (slot_pos != NEVER)
        i = indices(own | (slot_pos < SYSTEM) | piece)
        empty = i < 0
        i = i.clamp(min=0)
        own = own.gather(2, i) & ~empty
        keys = taken(self.layer.k, i)
        slot_pos = slot_pos.gather(2, i).masked_fill(empty, NEVER)

        end = keys.shape[2] - q.shape[2]
        # probabilities take much memory
        for some, at in zip(q.split(TILE, 2), pos.split(TILE, 1)):
            if self.layer.ragged:
                end = keys.shape[2]
            else:  # without the tokens after these queries
                end = end + some.shape[2]
            mask = visible(slot_pos[:, :, :end], None, at)
            highest = probabilities(some, keys[:, :, :end], mask).amax((2, 3))
            mine = own[:, :, :end]
            where = i[:, :, :end] * mine
            self.scores.scatter_reduce_(2, where, highest.float() * mine, "amax")


variants = {"kvzip": KVzip, "kvzip_recent": partial(KVzip, recent=8)}
