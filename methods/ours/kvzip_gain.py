"""Ours: KVzip, weighed by what the reread gains.

KVzip keeps an entry if any query of its reread attends to it. So it also keeps entries for words that the
decoder would have guessed anyway. Here a query counts by what the cache gains at the next token, in nats
(natural logarithms of probability):

    g_t = max(0, log p(x_{t+1} | x_≤T, x_≤t) − log p(x_{t+1} | x_≤t))      all T tokens, then again up to t
    score_i = max_t g_t α_{t,i}                                            α of the reread, as in KVzip

What is surprising at first and certain in the reread, such as a name or a number, keeps its entries. (The
reread comes in pieces of 512 tokens; "again" begins at the piece.) Both probabilities cost a reading each, so
the prompt is read four times. `kvzip_gain_turbo` stores the kept entries in 3 bits a number, by TurboQuant.
"""
from dataclasses import dataclass
from functools import partial
import zlib

import torch
from torch import Tensor

from methods.kvzip import KVzip
from methods.turbo_quant import Turbo
from nanollm import saved
from nanollm.cache import make_cache
from nanollm.generate import reread_slices


@torch.no_grad()
def gains(model, tokens: Tensor, n: int) -> Tensor:
    """Return g (B, T) for a prompt (B, T); the last token's is 0. n: tokens per piece of the reread."""
    caches, T = make_cache(model), tokens.shape[1]

    def told(part: slice) -> Tensor:
        """Return the log probability of each token after those of a part, (B, part)."""
        following = tokens[:, part.start + 1:part.stop + 1]
        log_p = model(tokens[:, part], caches).float().log_softmax(-1)[:, :following.shape[1]]
        return log_p.gather(-1, following.unsqueeze(-1)).squeeze(-1)

    once = torch.cat([told(slice(i, min(i + n, T))) for i in range(0, T, n)], 1)
    again = []
    for i, part in enumerate(reread_slices(T, n)):
        again.append(told(part)[:, i * n - part.start:])
        for cache in caches:
            cache.length = cache.seen = T
    gain = (torch.cat(again, 1) - once).clamp(min=0)
    return torch.cat((gain, gain.new_zeros(len(gain), 1)), 1)


@dataclass(eq=False)
class GainKVzip(KVzip):

    def __post_init__(self):
        super().__post_init__()
        self.prompt_tokens = None  # the prompt's tokens (B, T), from end_prompt
        self.gain = None    # g (B, T)

    def observe(self, q: Tensor, p: Tensor | None):
        if self.rereading:
            self.weigh(q.shape[2])
        super().observe(q, p)

    def weigh(self, T: int):
        """Find the gains, and the place in the prompt of the T queries that the next scores come from."""
        if self.prompt_tokens is None and self.gain is None:
            raise ValueError("this method needs the prompt's tokens; call tell_prompt(tokens, caches) before "
                             "the reread, or end_prompt(model, tokens, caches)")
        if self.gain is None and self.layer:
            self.gain = self.previous.gain
        elif self.gain is None:
            self.gain = gains(self.model, self.prompt_tokens, self.reread_size)
        self.place = max(self.rereading.start - 8, 0) + self.length - T - self.first_pass

    def add(self, p: Tensor, start: int = 0):
        end = self.place + p.shape[3]
        weight = self.gain[:, self.place:end].to(p)
        self.place = end
        super().add(p * weight[:, None, None, :, None], start)

    def end_prefill(self):
        super().end_prefill()
        self.prompt_tokens = self.gain = None


@dataclass(eq=False)
class TurboGainKVzip(Turbo, GainKVzip):
    """GainKVzip in few bits."""


def to_bytes(caches) -> bytes:
    """Return a record's file. It leaves out positions: a rotated key knows where it stood."""
    for cache in caches:
        if cache.packed:
            cache.packed["pos"] = torch.zeros_like(cache.packed["pos"])
    return zlib.compress(saved.to_bytes(caches, half=True), 9)


def from_bytes(data: bytes, caches):
    saved.from_bytes(zlib.decompress(data), caches)


variants = {"kvzip_gain": GainKVzip, "kvzip_gain_turbo": partial(TurboGainKVzip, bits=3)}
