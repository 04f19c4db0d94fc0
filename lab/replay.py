"""Read a prompt once for many methods: record it, and replay it to each method's caches.

Recordings have every layer's q, k and v. Replay is exact for methods that compress only at the
prompt's end: until then all caches get the same tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanollm.attention import probabilities, visible
from nanollm.cache import Slots, cache_bytes
from nanollm.generate import prefill
from nanollm.sliding import SlidingSlots


class Recording(NamedTuple):
    """The tensors that one layer's cache received for a part of a text."""

    q: Tensor  # (B, H·G, T, D)
    k: Tensor  # (B, H, T, D)
    v: Tensor
    pos: Tensor  # (B or 1, T)

    def to(self, device: torch.device | str) -> "Recording":
        here = [x.to(device) for x in self]
        return Recording(*here)

    def tokens(
        self,
        start: int | None,
        stop: int | None,
    ) -> "Recording":
        """Return the recording of some of the tokens."""
        some = slice(start, stop)
        q, k, v = (x[:, :, some] for x in self[:3])
        return Recording(q, k, v, self.pos[:, some])

    def split(
        self,
        n: int,
        device: torch.device | str = "cpu",
    ):
        """Yield the recording in pieces of n tokens, on a device."""
        here = self.to(device)
        for start in range(0, self.q.shape[2], n):
            yield here.tokens(start, start + n)

    @property
    def length(self) -> int:
        return self.q.shape[2]


class Noted:
    """The part of a store that notes what a layer receives, and attention's outputs."""

    def __init__(self, *place):
        super().__init__(*place)
        self.noted: list[tuple[Tensor, ...]] = []  # of each piece: q, k, v, y, pos

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        y = super().attend(q, k, v, pos)
        self.noted.append((q, k, v, y, pos))
        return y

    def take(self) -> tuple[Recording, Tensor]:
        """Return what came since the last call, and attention's outputs (B, H·G, T, D)."""
        *vectors, pos = zip(*self.noted)
        self.noted = []
        q, k, v, y = (torch.cat(x, 2) for x in vectors)
        return Recording(q, k, v, torch.cat(pos, 1)), y


class SlidingRecorder(Noted, SlidingSlots):
    """Slots of a layer that slides, which note what it receives."""


class Recorder(Noted, Slots):
    """Plain slots of a layer that note what it receives."""

    sliding = SlidingRecorder


class CannotReplay(Exception):
    """The cache must read the prompt itself: it evicts, hides or changes tokens before the end."""


def feed(
    model,
    tokens: Tensor,
    caches: list[Slots],
    chunk_size: int = 64,
) -> int:
    """Feed tokens (B, T) of a prompt; return the most bytes allocated after one of the chunks."""
    peak = 0
    for part in tokens.split(chunk_size, 1):
        prefill(model, part, caches)
        peak = max(peak, cache_bytes(caches)[1])
    return peak


def record(
    model,
    caches: list[Recorder],
    tokens: Tensor,
    chunk_size: int = 64,
) -> list[Recording]:
    """Let the decoder read tokens (B, T); return a recording per layer, in CPU memory.

    Without tokens there are none.
    """
    if not tokens.shape[1]:
        return []
    feed(model, tokens, caches, chunk_size)
    return [layer.take()[0].to("cpu") for layer in caches]


def replay(recordings: list[list[Recording]], caches: list[Slots]) -> int:
    """Replay the last recorded part to the caches; return the bytes that they then allocate.

    This replaces `feed`, without the decoder and without attention's output, which is the full
    cache's. recordings: for each part of the prompt, one per layer. The caches have already
    received all parts but the last. Raises CannotReplay if a cache that does not slide evicts
    tokens, hides them from attention or changes them. The part is written at once, or in the pieces
    that the store takes. If the first part is written at once, the returned bytes have no slack of
    buffers that grow.
    """
    peak = 0
    for layer, *parts in zip(caches, *recordings):
        if layer.prompt_done:  # its method evicts after each piece
            raise CannotReplay
        left = parts[-1].to(layer.w_o.device)
        while left.length:
            n = layer.room(left.length)
            read(layer, left.tokens(0, n))
            left = left.tokens(n, None)
        if not isinstance(layer, SlidingSlots):
            check_all(layer, parts)
        peak += layer.bytes()[1]
    return peak


def read(layer: Slots, piece: Recording):
    """Do what `attend` does with a piece, but for the output."""
    layer.write(piece.k, piece.v, piece.pos)
    if isinstance(layer, SlidingSlots):
        return layer.trim()
    keys, _, slot_pos, bias = layer.read()
    shown = keys.shape[2]
    if bias is not None or not shown == layer.length == layer.seen:
        raise CannotReplay
    w = min(layer.watch, piece.length)
    p = None
    if w:
        last = piece.tokens(-w, None)
        mask = visible(slot_pos, None, last.pos)
        p = probabilities(last.q, keys, mask)
    layer.method.observe(layer, piece.q, p)


def check_all(layer: Slots, parts: list[Recording]):
    """Raise CannotReplay unless a store shows exactly the recorded parts."""
    keys, values, slot_pos, _ = layer.read()
    k = torch.cat([part.k for part in parts], 2).to(keys.device)
    v = torch.cat([part.v for part in parts], 2).to(keys.device)
    pos = torch.cat([part.pos for part in parts], 1).to(keys.device)
    pos = pos[:, None].expand_as(slot_pos)
    same = torch.equal(keys, k) and torch.equal(values, v)
    if not same or not torch.equal(slot_pos, pos):
        raise CannotReplay
