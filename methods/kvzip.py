"""KVzip: keep what the decoder needs to repeat the text (Kim et al., arXiv 2505.23416).

A question that comes later is not known, but the text itself is. So let the decoder read it a second time,
with the first reading in its cache: what the second reading looks at is what the text can be rebuilt from. An
entry's score is the largest attention that any token of the second reading gave it. The entries of all layers
and heads are ranked together, so that a head that is not needed for this keeps nearly nothing.

    S_i = max_{t in the second reading, g} α_{t,g,i},   keep the L·H·b entries with the highest S

Differs from the paper: the text is read again without words that ask for a repetition, which a decoder that
was not taught to follow instructions would only take for text; 512 tokens at a time, each time with the 8
before them, where the paper takes 2K. There a piece scores only its own piece of the first reading, by a
softmax over the system prompt, that and itself; here it scores the whole cache. The system prompt stays
there, and in NVIDIA/kvpress the first 4 tokens of a chat template. Here no entry is safe, so a question at
the prompt's end may be lost. (With `sinks=4` the KL falls by 0.003 at most with a quarter of the entries, and
rises by 0.016 at most with an eighth.) What follows the prompt is appended.

Ours: `kvzip_recent` also keeps the 8 newest entries of each head, within the budget. With an eighth of the
entries and the question in the prompt, few-shot rises by that from 0.44 to 1.00 on `built` and from 0.38 to
0.56 on `learned` (python -m nanollm --methods kvzip kvzip_recent --budgets 12.5 --documents 32). `OneReading`
goes by the first reading alone, the largest attention from a token at least 8 later.
"""
from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.cache import ALL
from nanollm.check import check_budget, whole
from nanollm.packed import PackedCache
from nanollm.ranking import indices, top


@dataclass(eq=False)
class KVzip(PackedCache):
    budget: int          # slots per key/value head at the prompt's end, mean over all heads of all layers
    score: str = "max"   # of the attention that an entry got: "max" or "sum"
    across: bool = True  # the entries of all layers and heads are ranked together; False: of each head
    recent: int = 0      # newest entries of each head that stay, whatever their scores
    sinks: int = 0       # first tokens whose entries stay, in each head
    rereads = 512        # tokens of a piece of the second reading: `reread` in nanollm/generate.py

    def __post_init__(self):
        super().__post_init__()
        whole("recent", self.recent, 0)
        whole("sinks", self.sinks, 0)
        check_budget(self.budget, self.sinks + self.recent + 1,
                     f"{self.sinks} sinks and the newest {self.recent} stay, and one more")
        if self.score not in ("max", "sum"):
            raise ValueError(f"score {self.score!r} must be 'max' or 'sum'")
        self.rereading = 0      # tokens of the first reading, while `reread` feeds the second
        self.looked = None      # (B, H, tokens): of each entry, the score

    def link(self, model, layer: int, previous):
        super().link(model, layer, previous)
        self.previous = previous

    watch = property(lambda self: ALL if self.rereading else 0)

    def observe(self, q: Tensor, p: Tensor | None):
        if self.watch and not self.prompt_done:
            self.look(p)
        super().observe(q, p)

    def look(self, p: Tensor):
        """Of the probabilities (B, H, G, T, S), what falls on the first reading."""
        self.add(p[..., :self.rereading])

    def add(self, p: Tensor):
        p = p.flatten(2, 3)
        new = p.amax(2).float() if self.score == "max" else p.sum(2, dtype=torch.float32)
        if self.looked is not None:
            before = F.pad(self.looked, (0, new.shape[2] - self.looked.shape[2]))
            new = torch.maximum(before, new) if self.score == "max" else before + new
        self.looked = new

    def end_prefill(self):
        if self.prompt_done:
            raise ValueError("end_prefill was already called for this cache; call it once per prompt")
        super().end_prefill()
        if self.across and self.layer < len(self.model.blocks) - 1:
            return  # the last layer ends it for all
        caches = [self]
        while self.across and caches[0].previous is not None:
            caches.insert(0, caches[0].previous)
        if self.length > self.budget:
            looked = torch.stack([cache.scores().to(self.pos.device) for cache in caches], 1)  # (B, L, H, S)
            looked[..., :self.sinks] = looked[..., self.length - self.recent:] = math.inf
            ranked = looked.flatten(1) if self.across else looked
            kept = top(ranked, ranked.shape[-1] // self.length * self.budget).view_as(looked)
            for cache, stays in zip(caches, kept.unbind(1)):
                cache.keep(indices(stays.to(cache.pos.device)))
                if cache.packs:
                    cache.pack()
        for cache in caches:
            cache.looked = None

    def scores(self) -> Tensor:
        if self.looked is None:
            raise ValueError("this method reads a prompt twice; end it by end_prompt(model, prompt, caches)")
        return self.looked

    def beside(self) -> list[Tensor]:
        return super().beside() + ([] if self.looked is None else [self.looked])


variants = {"kvzip": KVzip, "kvzip_recent": partial(KVzip, recent=8)}
