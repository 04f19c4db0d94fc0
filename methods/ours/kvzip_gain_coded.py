"""Ours: what kvzip_gain finds worth keeping, in a small file.

A token stays in all heads of a layer or in none. It stays if its score (kvzip_gain.py) is at least `least`
nats in one of the heads. So one text keeps more tokens than another, and the budget is an upper bound.

Keys and values are turned into uncorrelated coordinates (karhunen_loeve.py), rounded to whole numbers, and
written by an entropy coder (rans.py). A coordinate that varies much less than 1 is nearly always 0, and takes
nearly no bits; one whose spread is below NARROW is not written. The file of `python -m nanollm record` holds

    the number of tokens, the length of the next part, which tokens each layer keeps (zlib), the codes (rANS)

Who reads it needs the same coordinates, measured on the same decoder.

In memory the kept entries are rounded too, but take as much room as any others. So a step takes as long as
with kvzip_gain, and only the file is small.
"""
from dataclasses import dataclass
import zlib

import numpy as np
import torch
from torch import Tensor

from methods.ours import rans
from methods.ours.karhunen_loeve import TokenGainKVzip, Watched, measured
from nanollm.measure.hard_tasks import HardTasks
from nanollm.packed import PackedCache

NARROW = 1 / 8  # coordinates that vary less are 0


@dataclass(eq=False)
class CodedGainKVzip(TokenGainKVzip):
    least: float = 1.0
    bases: Tensor | None = None  # (L, 2N + 2, N): M^½ U, Uᵀ M^-½, μ, spreads of z; None: no rounding
    measured_on = Watched        # the cache whose tokens the bases are measured on

    def basis(self) -> tuple[Tensor, ...]:
        """Return this layer's M^½ U and Uᵀ M^-½ (N, N), μ and spreads (N,)."""
        N = self.bases.shape[2]
        into, back, rows = self.bases[self.layer].to(self.w_o).split((N, N, 2))
        return into, back, *rows

    @property
    def written(self) -> Tensor:
        """Which coordinates a file holds, (N,)."""
        return self.basis()[3] > NARROW

    def codes(self) -> Tensor:
        """Return z, rounded, (B, n, N)."""
        into, _, mean, _ = self.basis()
        z = ((self.vectors() - mean) @ into).round().clamp(-rans.MOST, rans.MOST)
        return z * self.written

    def pack(self):
        if self.bases is not None:
            self.hold(self.codes(), self.pos[:, 0])
        super().pack()

    def hold(self, codes: Tensor, pos: Tensor):
        """Fill the slots with keys and values from codes (B, n, N) at positions pos (B, n)."""
        _, back, mean, spread = self.basis()
        centres = torch.from_numpy(rans.centres()).to(codes)[rans.class_of(spread.cpu().numpy())]
        z = centres.gather(1, codes.long().flatten(0, 1).T + rans.MOST).T.view_as(codes)
        x = (z @ back + mean).unflatten(2, (-1, self.w_o.shape[2])).transpose(1, 2)
        k, v = x.chunk(2, 1)
        self.slots = dict(k=self.turned(k, pos), v=v.clone(), pos=pos[:, None].repeat(1, k.shape[1], 1))

    @classmethod
    def calibrate(cls, model, encoding) -> dict:
        """Return the options that depend on the decoder, as arguments of the constructor."""
        rans.tables(), rans.centres()  # ready before the first text
        return dict(bases=measured(model, HardTasks(encoding, "train"), cls.measured_on))


def to_bytes(caches) -> bytes:
    """Return a record's file, for a prompt of one text."""
    tokens, codes = caches[0].seen, []
    kept = np.zeros((len(caches), tokens), bool)
    for cache, stays in zip(caches, kept):
        stays[cache.pos[0, 0].cpu().numpy()] = True
        codes.append(cache.codes()[0, :, cache.written].flatten().long().cpu().numpy())
    places = zlib.compress(np.packbits(kept), 9)
    head = np.array([tokens, len(places)], "<u4").tobytes()
    return head + places + rans.encode(np.concatenate(codes), classes(caches, kept))


def from_bytes(data: bytes, caches):
    """Fill fresh caches with what `to_bytes` returned."""
    tokens, end = np.frombuffer(data, "<u4", 2).tolist()
    places = np.frombuffer(zlib.decompress(data[8:8 + end]), np.uint8)
    kept = np.unpackbits(places, count=len(caches) * tokens).astype(bool).reshape(len(caches), tokens)
    codes = torch.from_numpy(rans.decode(data[8 + end:], classes(caches, kept))).to(caches[0].w_o)
    for cache, stays in zip(caches, kept):
        z = codes.new_zeros(int(stays.sum()), len(cache.written))
        n = z[:, cache.written].numel()
        z[:, cache.written], codes = codes[:n].view_as(z[:, cache.written]), codes[n:]
        cache.hold(z[None], torch.from_numpy(np.flatnonzero(stays)).int().to(z.device)[None])
        cache.length, cache.seen, cache.prompt_done = len(z), tokens, True
        PackedCache.pack(cache)


def classes(caches, kept: np.ndarray) -> np.ndarray:
    """Return the class of each code of a file, by the spread of its coordinate; kept (L, tokens) of bool."""
    spreads = [cache.basis()[3][cache.written].cpu().numpy() for cache in caches]
    return np.concatenate([np.tile(rans.class_of(x), n) for x, n in zip(spreads, kept.sum(1))])


variants = {"kvzip_gain_coded": CodedGainKVzip}
