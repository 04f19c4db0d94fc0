"""KVzip: keep the entries that the decoder needs to repeat the text (Kim et al., arXiv 2505.23416).

A later question is unknown, but the text is known. So the decoder reads the text a second time, the reread,
with the first pass in its cache. An entry matters if some token of the reread attends to it strongly. So its
score is the largest attention that any token of the reread gives it. The entries of all layers and heads are
ranked together, so a head that repetition does not need keeps almost nothing.

    S_i = max_{t in the reread, g} α_{t,g,i},   keep the L·H·b entries with the highest S

Differs from the paper:
- There a prompt asks the decoder to repeat the text. Here no such words are added, because a decoder without
  instruction tuning would take them for text.
- There the reread comes in pieces of 2K tokens; here in pieces of 512, each after the 8 tokens before it. As
  there, a piece scores only the entries that it repeats. The softmax covers the first 4 tokens (there the
  system prompt), these entries and the piece. With `own=False` a piece scores the whole cache: in texts of
  1,536 tokens the reread takes 1.4 times as long. With a sixteenth of the entries it then finds as many
  pairs, 0.94 on `built` and 0.78 on `learned` (python -m experiments.kvzip_parts).
- There the system prompt always stays, and in NVIDIA/kvpress the first 4 tokens of a chat template. Here no
  entry is protected, so a question at the prompt's end may be lost. (With `sinks=4` the KL falls by at most
  0.003 with a quarter of the entries, and rises by at most 0.016 with an eighth.)
- New tokens after the prompt are appended.

Ours: `kvzip_recent` also keeps the 8 newest entries of each head, within the budget. With an eighth of the
entries and the question in the prompt, this raises few-shot from 0.44 to 1.00 on `built` and from 0.62 to
0.84 on `learned` (python -m nanollm --methods kvzip kvzip_recent --keep 12.5 --documents 32). `OneReading`
needs no reread: it uses the first pass alone (methods/ours/one_reading.py).
"""
from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor

from nanollm.attention import probabilities
from nanollm.cache import ALL, TILE
from nanollm.check import check_budget, whole
from nanollm.packed import PackedCache, keep_highest, with_previous

SYSTEM = 4  # first tokens of the prompt; the softmax of each piece covers them, as the paper's system prompt


@dataclass(eq=False)
class KVzip(PackedCache):
    budget: int          # slots per key/value head at the prompt's end, mean over all heads of all layers
    score: str = "max"   # "max" or "sum" of the attention that an entry gets in the reread
    across: bool = True  # True: rank the entries of all layers and heads together; False: each head alone
    recent: int = 0      # newest entries of each head, which stay whatever their scores
    sinks: int = 0       # first entries of each head, which stay whatever their scores
    own: bool = True     # True: a piece of the reread scores its own entries; False: all entries
    reread_size = 512    # tokens per piece of the reread (`reread` in nanollm/generate.py); 0: no reread
    always = False       # True: rank the entries even if the budget has room for all

    def __post_init__(self):
        super().__post_init__()
        whole("recent", self.recent, 0)
        whole("sinks", self.sinks, 0)
        check_budget(self.budget, self.sinks + self.recent + 1,
                     f"{self.sinks} sinks and the newest {self.recent} stay, and one more")
        if self.score not in ("max", "sum"):
            raise ValueError(f"score is {self.score!r}; it must be 'max' or 'sum'")
        self.rereading = None     # during the reread: the slice of entries that the piece repeats
        self.first_pass = 0       # during the reread: tokens of the first pass
        self.entry_scores = None  # S, (B, H, tokens)

    def link(self, model, layer: int, previous):
        super().link(model, layer, previous)
        self.previous = previous

    watch = property(lambda self: ALL if self.rereading and not self.own else 0)

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.rereading and self.own and self.layer == len(self.model.blocks) - 1:
            return torch.zeros_like(q), None  # nothing uses the reread's logits
        return super().attention(q, pos)

    def observe(self, q: Tensor, p: Tensor | None):
        if self.rereading and self.own:
            self.look_at_own(q)
        elif self.watch and not self.prompt_done:
            self.look(p)
        super().observe(q, p)

    def look_at_own(self, q: Tensor):
        """Score the entries that the piece repeats, by queries q (B, H·G, T, D) of the reread.

        The softmax covers the first tokens, these entries, and the reread's own tokens up to the query.
        """
        own, first = self.rereading, slice(min(SYSTEM, self.rereading.start))
        i = self.length - q.shape[2]
        for some in q.split(TILE, 2):
            i += some.shape[2]
            keys, pos = (torch.cat([x[:, :, part] for part in (first, own, slice(self.first_pass, i))], 2)
                         for x in (self.k, self.pos[:, :1]))
            p = probabilities(some, keys, pos, None, pos[:, 0, -some.shape[2]:])
            self.add(p[..., first.stop:first.stop + own.stop - own.start], own.start)

    def look(self, p: Tensor):
        """Use the probabilities p (B, H, G, T, S) that fall on entries of the first pass."""
        self.add(p[..., :self.first_pass])

    def add(self, p: Tensor, start: int = 0):
        """Update S of the entries from `start` on, with probabilities p (B, H, G, T, entries)."""
        p = p.flatten(2, 3)
        new = p.amax(2).float() if self.score == "max" else p.sum(2, dtype=torch.float32)
        n = 0 if self.entry_scores is None else self.entry_scores.shape[2]
        if start + new.shape[2] > n:
            more = new.new_zeros(*new.shape[:2], start + new.shape[2] - n)
            self.entry_scores = torch.cat((*([self.entry_scores] if n else []), more), 2)
        part = self.entry_scores[:, :, start:start + new.shape[2]]
        part.copy_(torch.maximum(part, new) if self.score == "max" else part + new)

    def end_prefill(self):
        if self.prompt_done:
            raise ValueError("end_prefill was already called for this cache; call it once per prompt")
        super().end_prefill()
        if self.across and self.layer < len(self.model.blocks) - 1:
            return  # the last layer compresses all layers
        caches = with_previous(self) if self.across else [self]
        if self.length > (0 if self.always else self.budget):
            scores = [cache.scores().clone() for cache in caches]
            for x in scores:
                x[..., :self.sinks] = x[..., self.length - self.recent:] = math.inf
            keep_highest(caches, scores, self.budget, self.across)
        for cache in caches:
            cache.entry_scores = None

    def scores(self) -> Tensor:
        if self.entry_scores is None:
            raise ValueError("this method reads a prompt twice; call end_prompt(model, prompt, caches) "
                             "instead of end_prefill(caches)")
        return self.entry_scores

    def beside(self) -> list[Tensor]:
        return super().beside() + ([] if self.entry_scores is None else [self.entry_scores])


variants = {"kvzip": KVzip, "kvzip_recent": partial(KVzip, recent=8)}
