"""Read a prompt once for all methods: record it, and replay it to each method's caches.

A recording has every layer's q, k and v. Replay is exact for methods that compress only at the
prompt's end: until then all caches get the same tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanollm.attention import probabilities
from nanollm.cache import LayerCache, cache_bytes
from nanollm.generate import prefill


class Recording(NamedTuple):
    """The tensors that one layer's cache received for a part of a text, in CPU memory."""

    q: Tensor  # (B, H·G, T, D)
    k: Tensor  # (B, H, T, D)
    v: Tensor
    pos: Tensor  # (B or 1, T)

    def split(self, n: int, device: torch.device | str = "cpu"):
        """Yield the recording in pieces of n tokens, on a device."""
        q, k, v = (x.to(device).split(n, 2) for x in (self.q, self.k, self.v))
        return map(Recording, q, k, v, self.pos.to(device).split(n, 1))


class Recorder(LayerCache):
    """Full attention that records the input and output of each `attend`."""

    def __post_init__(self):
        super().__post_init__()
        self.recorded: list[Recording] = []
        self.answers: list[Tensor] = []  # (B, H·G, T, D)

    def attend(self, q, k, v, pos):
        y = super().attend(q, k, v, pos)
        self.recorded.append(Recording(q, k, v, pos))
        self.answers.append(y)
        return y


class CannotReplay(Exception):
    """The cache must read the prompt itself, because it hides or changes tokens before the end."""


def feed(model, tokens: Tensor, caches: list[LayerCache], chunk_size: int = 64) -> int:
    """Feed tokens (B, T) of a prompt; return the most bytes that the caches allocated."""
    peak = 0
    for part in tokens.split(chunk_size, 1):
        prefill(model, part, caches)
        peak = max(peak, cache_bytes(caches)[1])
    return peak


def record(model, caches: list[Recorder], tokens: Tensor) -> list[Recording]:
    """Let the decoder read tokens (B, T), and return one recording per layer; [] without tokens."""
    if not tokens.shape[1]:
        return []
    feed(model, tokens, caches)
    recordings = []
    for cache in caches:
        q, k, v, pos = zip(*cache.recorded)
        recordings.append(
            Recording(
                *(torch.cat(x, 2).cpu() for x in (q, k, v)), torch.cat(pos, 1).cpu()
            )
        )
        cache.recorded.clear()
        cache.answers.clear()
    return recordings


def replay(recordings: list[list[Recording]], caches: list[LayerCache]) -> int:
    """Replay the last recorded part to the caches; return the bytes that they then allocate.

    This replaces `feed`, without the decoder and without attention's output, which is the full
    cache's. recordings: for each part of the prompt, one per layer. The caches have already
    received all parts but the last. Raises CannotReplay if a cache does not show attention all
    tokens unchanged. The part is written at once, so the returned bytes lack the slack of buffers
    that grow.
    """
    peak = 0
    for cache, *parts in zip(caches, *recordings):
        Method = type(cache)
        if (
            Method.attend is not LayerCache.attend
            or Method.pieces is not LayerCache.pieces
        ):
            raise CannotReplay

        # limits the memory of probabilities
        chunk_size = 64 if cache.watch > 64 else parts[-1].q.shape[2]
        for q, k, v, pos in parts[-1].split(chunk_size, cache.w_o.device):
            cache.write(k, v, pos)
            keys, _, slot_pos, bias = cache.read()
            if bias is not None or keys.shape[2] != cache.seen:
                raise CannotReplay
            w = min(cache.watch, q.shape[2])
            cache.observe(
                q,
                probabilities(q[:, :, -w:], keys, slot_pos, None, pos[:, -w:])
                if w
                else None,
            )

        keys, values, slot_pos, _ = cache.read()
        k, v = (
            torch.cat(x, 2).to(keys.device)
            for x in zip(*((part.k, part.v) for part in parts))
        )
        pos = torch.cat([part.pos for part in parts], 1).to(slot_pos.device)
        same = torch.equal(keys, k) and torch.equal(values, v)
        if not (same and torch.equal(slot_pos, pos[:, None].expand_as(slot_pos))):
            raise CannotReplay
        peak += cache.bytes()[1]
    return peak
