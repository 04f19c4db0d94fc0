"""The KV cache, and the seam through which every method compresses it.

The decoder says one thing to memory: `y = cache.attend(q, k, v, pos)`, which is write → read → attention →
observe. A method overrides what it needs: `write` (what is remembered), `read` (what attention sees),
`observe` (what was attended to), `evict` (what goes).

Shapes: B batch, T new tokens, S slots, H key/value heads, G query heads per key/value head, D head dim, w
window. Keys are stored rotated. A slot is visible to a query if its stored position ≤ the query's: this one
rule serves causality, chunked prefill, heads of different length and slots that stand for several tokens.
"""
from copy import deepcopy
from dataclasses import dataclass
import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.check import (check_attend, check_kept, check_knobs, check_numbers, check_score, check_watch,
                           constructed)
from nanollm.kernel_switch import kernel_for
from nanollm.ranking import expand_index, indices, rank

NEVER = torch.iinfo(torch.int32).max  # the position of an empty slot: no query ever sees it
ALL = NEVER                           # watch every query
TILE = 128                            # of a prompt that is watched throughout, so many queries at a time


@dataclass(eq=False)
class LayerCache:
    """Full attention: remembers every token of one layer. Subclasses add their knobs as dataclass fields."""
    watch = 0    # for how many of the last queries `observe` wants probabilities: 0, a window, or ALL
    keeps_all = False  # whether every token stays in some form; a budget then is what a query reads
    rereads = 0  # tokens of the prompt that are read a second time, so many at a time, before it ends (KVzip)

    def __post_init__(self):
        check_knobs(self)
        self.slots: dict[str, Tensor] = {}  # (B, H, capacity, ...): k, v, pos, and what methods add
        self.length = 0                     # slots in use
        self.seen = 0                       # tokens that have passed, evicted ones too: RoPE counts these
        self.ragged = False                 # some slots are empty or hidden: even one new token needs a mask
        self.prompt_done = False
        self.layer, self.layers, self.below, self.w_o, self.freq = 0, 1, None, None, None  # as `link` says

    def link(self, layer: int, layers: int, below: "LayerCache | None", w_o: Tensor, freq: Tensor | None):
        """Called by `make_cache`: where this cache sits in the decoder.

        `below` is the cache one layer down (ChunkKV may take its choice); w_o (d_model, H·G, D) multiplies
        the heads' outputs (CriticalKV); freq are RoPE's angles, or None (StreamingLLM moves its sinks).
        """
        check_watch(self)
        self.layer, self.layers, self.below, self.w_o, self.freq = layer, layers, below, w_o, freq

    def slot(self, name: str) -> Tensor:
        """The slots in use of one per-slot tensor, (B, H, S, ...): a view, to be changed in place."""
        return self.slots[name][:, :, :self.length]

    k = property(lambda self: self.slot("k"))      # (B, H, S, D), rotated
    v = property(lambda self: self.slot("v"))      # (B, H, S, D)
    pos = property(lambda self: self.slot("pos"))  # (B, H, S), int32

    # ---- write → read → attention → observe ---------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q (B, H·G, T, D), k and v (B, H, T, D), pos (B or 1, T) → output (B, H·G, T, D)."""
        self.check(q, k, v, pos)
        T, empty = q.shape[2], self.seen == 0
        if self.watch == ALL and T > TILE and not self.prompt_done:  # or T · S weights stand at once
            pieces = zip(*(x.split(TILE, 2) for x in (q, k, v)), pos.split(TILE, 1))
            return torch.cat([self.attend(*piece) for piece in pieces], 2)
        self.write(k, v, pos)
        if T == 1 and (done := self.decode(q, pos)):
            y, p = done
            self.observe(q, p)
            return y

        k, v, at, bias = self.read()
        w = min(self.watch, T)
        rest, p, parts = T - w, None, []
        if rest:
            causal = empty and bias is None and k.shape[2] == T  # slot i holds token i
            alone = T == 1 and bias is None and not self.ragged  # the newest token sees every slot
            n = rest if causal else k.shape[2]
            mask = None if causal or alone else visible(at, bias, pos[:, :rest])
            parts.append(attention(q[:, :, :rest], k[:, :, :n], v[:, :, :n], mask, causal))

        if w:  # only the watched rows are made explicit
            p = probabilities(q[:, :, rest:], k, at, bias, pos[:, rest:])
            y = p.flatten(2, 3) @ v  # (B, H, G·w, D): a group's queries are rows of one product
            parts.append(y.view(*q.shape[:2], w, -1))
        self.observe(q, p)
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def check(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor):
        """ValueError, before anything is written, unless these are new tokens of the texts held."""
        check_attend(self, q, k, v, pos)

    def decode(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """A shorter way than attend's for one new token, if there is one: its output, and p for `observe`.

        Here: a kernel that reads the slots as they lie. Of the probabilities (B, H, G, 1, S) it tells the
        mean over G. Without `watch`, scaled_dot_product_attention reads every slot once, too.
        """
        fast = kernel_for(q, "decode_attention", "attend_one") if self.watch else None
        return fast(self, q, pos) if fast else None

    def write(self, k: Tensor, v: Tensor, pos: Tensor, **state: Tensor):
        """Remember T tokens. `state` adds per-slot tensors (B, H, T, ...), 0 if not given, that move too."""
        B, H, T, _ = k.shape
        start, end = self.length, self.length + T
        new = dict.fromkeys(self.slots) | dict(k=k, v=v, pos=pos[:, None], **state)
        if self.slots and end > self.slots["k"].shape[2]:
            self.reserve(self.capacity(end))

        for name, x in new.items():
            if name not in self.slots:
                room = self.slots["k"].shape[2] if self.slots else self.capacity(end)
                dtype = torch.int32 if name == "pos" else x.dtype
                self.slots[name] = x.new_zeros(B, H, room, *x.shape[3:], dtype=dtype)
            self.slots[name][:, :, start:end] = 0 if x is None else x

        self.length, self.seen = end, self.seen + T

    def reserve(self, n: int):
        """Room for n slots: until they are in use nothing is copied again."""
        for name, x in self.slots.items():
            more = x.new_zeros(*x.shape[:2], max(n - x.shape[2], 0), *x.shape[3:])
            self.slots[name] = torch.cat((x, more), 2)

    def capacity(self, n: int) -> int:
        """Slots to allocate when n are needed. Growing by a tenth copies a slot eleven times on average."""
        return n + n // 10 if self.length else n

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What attention sees: k, v (B, H, S, D), positions (B, H, S), and a logit bias (B, H, S) or None.

        A slot that stands for several tokens carries a bias that is added to its score; exact entries have 0.
        A method that hides slots by their positions sets `ragged`.
        """
        return self.k, self.v, self.pos, self.slot("bias") if "bias" in self.slots else None

    def observe(self, q: Tensor, p: Tensor | None):
        """Called after each `attend`: q (B, H·G, T, D), and p (B, H, G, w, S) of the last w queries.

        A long prompt may come in pieces, and then this is called once for each piece, w at most its length.
        An override ends with `super().observe(q, p)`, which calls `evict` once the prompt is over. For w = 1
        a kernel tells each of the G their mean (`decode`): go by sums or means over G, and do not write to p.
        """
        if self.prompt_done:
            self.evict()

    def end_prefill(self):
        """Called once, when the prompt is over. Never guessed from T > 1: a prompt may come in pieces."""
        self.prompt_done = True
        if self.length:  # else the prompt was one token, which comes after its end
            self.evict()

    # ---- eviction -----------------------------------------------------------------------------------------

    def evict(self):
        """Called at the prompt's end, if the cache holds any of it, and after each later `attend`."""

    def keep(self, i: Tensor):
        """Keep the slots i (B, H, n), −1 for an empty one; all per-slot tensors move together."""
        check_kept(i, self.pos.shape)
        empty, i = i < 0, i.clamp(min=0)
        held = {name: self.slot(name) for name in self.slots}
        self.slots = {name: x.gather(2, expand_index(i, x)) for name, x in held.items()}
        self.slots["pos"].masked_fill_(empty, NEVER)
        self.length, self.ragged = i.shape[2], self.ragged or bool(empty.any())

    def drop(self, i: Tensor):
        """Evict one slot per head, i (B, H, 1). The last slot moves into the hole: nothing else is copied."""
        for x in self.slots.values():
            last = x[:, :, self.length - 1:self.length].clone()
            x.scatter_(2, expand_index(i, x), last)
        self.length -= 1

    def shrink(self, score: Tensor, budget: int):
        """Keep the `budget` slots with the highest score (B, H, S) per head; ties go to the newest token."""
        check_score(score, self.pos.shape)
        if self.ragged:
            score = score.masked_fill(self.pos == NEVER, -math.inf)
        if self.length == budget + 1 and not self.ragged:  # as in decoding: the oldest of the lowest goes
            lowest = score == score.amin(-1, keepdim=True)
            self.drop(self.pos.masked_fill(~lowest, NEVER).argmin(-1, keepdim=True))
        elif self.length > budget:
            check_numbers(score)  # only here: one entry at a time, a GPU would be waited for at every token
            self.keep(indices(rank(score, self.pos) < budget))

    def bytes(self) -> tuple[int, int]:
        """(live, allocated) bytes of this layer's cache; live leaves out slack and empty slots."""
        stored = self.stored()
        return sum(x.live * x.tensor.element_size() for x in stored), sum(x.tensor.nbytes for x in stored)

    def stored(self) -> list["Stored"]:
        """Everything that `bytes` counts: the slots, and what a method holds beside them."""
        live = 0
        if self.slots:
            live = int((self.pos != NEVER).sum()) if self.ragged else self.pos.numel()
        slots = [Stored(x, live * math.prod(x.shape[3:]), follows=name in ("k", "v"))
                 for name, x in self.slots.items()]
        return slots + [Stored(x, x.numel(), follows=x.dim() > 3) for x in self.beside()]

    def beside(self) -> list[Tensor]:
        """Tensors that a method holds beside its slots."""
        return []


class Stored(NamedTuple):
    """A tensor of a cache, and how many of its numbers are live.

    follows: its numbers are as wide as the model's. Scores per token stay in 32 bits in any model.
    """
    tensor: Tensor
    live: int
    follows: bool


# ---- attention -------------------------------------------------------------------------------------------

def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Output (B, H·G, T, D), without a matrix of probabilities. mask (B, H, T, S), `causal`, or all is seen.
    """
    B, heads, T, D = q.shape
    if T == 1:  # the G queries of a group are rows of one small product, so that each key is read once
        return F.scaled_dot_product_attention(q.view(B, k.shape[1], -1, D), k, v, mask).view(B, heads, 1, D)
    if mask is not None:
        mask = mask.repeat_interleave(heads // k.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)


def visible(at: Tensor, bias: Tensor | None, pos: Tensor) -> Tensor:
    """Mask (B, H, T, S): slots at `at` (B, H, S) seen from queries at pos (B or 1, T); floats if biased."""
    seen = at.unsqueeze(2) <= pos[:, None, :, None]
    return seen if bias is None else torch.where(seen, bias.unsqueeze(2), -math.inf)


def probabilities(q: Tensor, k: Tensor, at: Tensor, bias: Tensor | None, pos: Tensor) -> Tensor:
    """softmax(q kᵀ/√D + bias) over the visible slots: q (B, H·G, w, D) → (B, H, G, w, S)."""
    B, heads, w, D = q.shape
    H = k.shape[1]
    score = (q.reshape(B, H, -1, D) @ k.mT).mul_(D ** -0.5).view(B, H, heads // H, w, -1)
    mask = visible(at, q.new_zeros(1, 1, 1) if bias is None else bias, pos)  # floats: to add is fastest
    score.add_(mask.unsqueeze(2))
    return score.softmax(-1, dtype=torch.float32).to(q.dtype)


# ---- a list of caches, one a layer -----------------------------------------------------------------------

def make_cache(model, Method=LayerCache, **knobs) -> list[LayerCache]:
    """One cache per layer of the decoder, linked to it. Knobs go to the method; a bad one is a ValueError."""
    caches = []
    for layer, block in enumerate(model.blocks):
        cache = constructed(Method, knobs)
        w_o, freq = block.attention.w_o, getattr(model, "freq", None)
        freq = freq if freq is None else freq.to(w_o.device)  # a model may be spread over GPUs
        cache.link(layer, len(model.blocks), caches[-1] if caches else None, w_o, freq)
        caches.append(cache)
    return caches


def end_prefill(caches: list[LayerCache]):
    """Tell every layer, lowest first, that the prompt is over."""
    for cache in caches:
        cache.end_prefill()


def copied(caches: list[LayerCache]) -> list[LayerCache]:
    """A copy that goes its own way. What belongs to the decoder (w_o, freq) is shared."""
    return deepcopy(caches, {id(x): x for cache in caches for x in (cache.w_o, cache.freq)})


def cache_bytes(caches: list[LayerCache]) -> tuple[int, int]:
    """(live, allocated) bytes of all layers."""
    live, allocated = zip(*(cache.bytes() for cache in caches))
    return sum(live), sum(allocated)


def bytes_in_16_bits(caches: list[LayerCache]) -> int:
    """Live bytes of all layers if the model's numbers had 16 bits. Shares of a cache are taken of these."""
    each = lambda x: 2 if x.follows and x.tensor.is_floating_point() else x.tensor.element_size()
    return sum(x.live * each(x) for cache in caches for x in cache.stored())
