"""Read a prompt once for all methods: what the decoder tells the caches is recorded, and replayed to each
method's caches.

Methods that compress at the prompt's end are all told the same before it.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from nanollm.attention import probabilities
from nanollm.cache import LayerCache, cache_bytes
from nanollm.check import whole
from nanollm.generate import prefill


class Recording(NamedTuple):
    """What one layer's cache was told over a part of a text. It is kept in the CPU's memory."""
    q: Tensor    # (B, H·G, T, D)
    k: Tensor    # (B, H, T, D)
    v: Tensor
    pos: Tensor  # (B or 1, T)

    def split(self, n: int, device: torch.device | str = "cpu"):
        """The same, n tokens at a time, on a device."""
        q, k, v = (x.to(device).split(n, 2) for x in (self.q, self.k, self.v))
        return map(Recording, q, k, v, self.pos.to(device).split(n, 1))


class Recorder(LayerCache):
    """Full attention that keeps what each `attend` was told and answered."""

    def __post_init__(self):
        super().__post_init__()
        self.told: list[Recording] = []
        self.answers: list[Tensor] = []  # (B, H·G, T, D)

    def attend(self, q, k, v, pos):
        y = super().attend(q, k, v, pos)
        self.told.append(Recording(q, k, v, pos))
        self.answers.append(y)
        return y


class CannotReplay(Exception):
    """Before the prompt's end a cache shows attention something else than all tokens: it has to read the
    prompt itself.
    """


def feed(model, tokens: Tensor, caches: list[LayerCache], chunk_size: int = 64) -> int:
    """Feed tokens (B, T) of a prompt. Returns the peak of the caches' allocated bytes."""
    whole("chunk", chunk_size, 1)
    peak = 0
    for part in tokens.split(chunk_size, 1):
        prefill(model, part, caches)
        peak = max(peak, cache_bytes(caches)[1])
    return peak


def record(model, caches: list[Recorder], tokens: Tensor) -> list[Recording]:
    """What the caches, one a layer, are told while the decoder reads tokens (B, T); [] of no tokens."""
    if not tokens.shape[1]:
        return []
    feed(model, tokens, caches)
    recordings = []
    for cache in caches:
        q, k, v, pos = zip(*cache.told)
        recordings.append(Recording(*(torch.cat(x, 2).cpu() for x in (q, k, v)), torch.cat(pos, 1).cpu()))
        cache.told.clear()
        cache.answers.clear()
    return recordings


def replay(recordings: list[list[Recording]], caches: list[LayerCache]) -> int:
    """`feed` of the last part recorded, without the decoder and without attention's output, which is the full
    cache's.

    recordings: of each part of the prompt, one a layer; the caches have been told the parts before the last.
    At its end each must show all tokens as they were told, or else CannotReplay is raised. The part is
    written at once, so the peak of allocated bytes, which is returned, is without the slack of growth.
    """
    peak = 0
    for cache, *parts in zip(caches, *recordings):
        Method = type(cache)
        if Method.attend is not LayerCache.attend or Method.pieces is not LayerCache.pieces:
            raise CannotReplay

        chunk_size = 64 if cache.watch > 64 else parts[-1].q.shape[2]  # bounds the probabilities
        for q, k, v, pos in parts[-1].split(chunk_size, cache.w_o.device):
            cache.write(k, v, pos)
            keys, _, at, bias = cache.read()
            if bias is not None or keys.shape[2] != cache.seen:
                raise CannotReplay
            w = min(cache.watch, q.shape[2])
            cache.observe(q, probabilities(q[:, :, -w:], keys, at, None, pos[:, -w:]) if w else None)

        keys, values, at, _ = cache.read()
        k, v = (torch.cat(x, 2).to(keys.device) for x in zip(*((part.k, part.v) for part in parts)))
        pos = torch.cat([part.pos for part in parts], 1).to(at.device)
        same = torch.equal(keys, k) and torch.equal(values, v)
        if not (same and torch.equal(at, pos[:, None].expand_as(at))):
            raise CannotReplay
        peak += cache.bytes()[1]
    return peak
