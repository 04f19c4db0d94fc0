"""The KV cache, and the interface through which every method compresses it.

The decoder calls one method of the cache: `y = cache.attend(q, k, v, pos)`. For each piece of the new tokens
that is write → attention → observe. A method overrides what it needs: `write` (what is remembered), `read`
(what attention sees), `observe` (what was attended to), `evict` (what goes). A method that gives each entry a
score overrides `score` of ScoredCache and nothing else.

Shapes: B batch, T new tokens, S slots, H key/value heads, G query heads per key/value head, D head dim, w
window. Keys are stored rotated. A slot is visible to a query if its stored position ≤ the query's: this one
rule serves causality, chunked prefill, heads of different length and merged slots. After an eviction the
slots are in no order; `pos` tells which token a slot holds.
"""
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanollm.attention import attention, split
from nanollm.check import (
    check_attend, check_budget, check_kept, check_options, check_numbers, check_score, check_watch, constructed)
from nanollm.kernel_switch import kernel_for
from nanollm.ranking import expand_index, indices, rank

NEVER = torch.iinfo(torch.int32).max  # the position of an empty slot: no query ever sees it
ALL = NEVER                           # observe every query
TILE = 128                            # if every query is observed, a prompt comes in pieces of this many


class PerEntry:
    """A number that a method remembers of each entry, 0 for a new one. It moves with its entry.

    With `weight = PerEntry()` in the class (no annotation: it is not an option), `cache.weight` is a view
    (B, H, S) of the slots in use. Assigning to it writes into these slots.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype

    def __set_name__(self, owner, name: str):
        self.name = name
        owner.per_entry = owner.per_entry | {name: self.dtype}  # a new one: the parent's stays as it is

    def __get__(self, cache, owner=None) -> Tensor:
        return self if cache is None else cache.slot(self.name)

    def __set__(self, cache, x: Tensor):
        slots = cache.slot(self.name)
        if x.dim() != 3 or x.shape[2] != slots.shape[2]:
            raise ValueError(f"{self.name} {tuple(x.shape)} must be {tuple(slots.shape)}, one for each slot")
        slots.copy_(x)


@dataclass(eq=False)
class LayerCache:
    """Full attention: remembers every token of one layer. Subclasses add their options as dataclass fields.
    """
    watch = 0          # how many of the latest queries' probabilities `observe` receives: 0, a number, or ALL
    keeps_all = False  # True if every token stays in some form, as in fewer bits; tables and pictures ask
    per_entry = {}     # names and types of what a method declares as PerEntry

    def __post_init__(self):
        check_options(self)
        self.slots: dict[str, Tensor] = {}  # (B, H, capacity, ...): k, v, pos, and what methods add
        self.length = 0                     # slots in use
        self.seen = 0                       # tokens so far, evicted ones too: the next token's position
        self.ragged = False                 # some slots are empty or hidden: even one new token needs a mask
        self.prompt_done = False
        self.model, self.layer = None, 0    # the decoder, and which of its layers this is

    def link(self, model, layer: int, previous: "LayerCache | None"):
        """Called by `make_cache`: which layer of which decoder this is.

        previous: the previous layer's cache, for methods whose layers decide together; None in the first layer.
        """
        check_watch(self)
        self.model, self.layer = model, layer

    @property
    def w_o(self) -> Tensor:
        """(d_model, H·G, D), which multiplies the heads' outputs."""
        return self.model.blocks[self.layer].attention.w_o

    @property
    def freq(self) -> Tensor | None:
        """RoPE's angles, (D/2,), on this layer's device; None if the decoder has none or rotates half a head.
        """
        freq = getattr(self.model, "freq", None)
        return None if freq is None else freq.to(self.w_o.device)

    def slot(self, name: str) -> Tensor:
        """The slots in use of one per-slot tensor, (B, H, S, ...): a view, to be changed in place."""
        return self.slots[name][:, :, :self.length]

    k = property(lambda self: self.slot("k"))      # (B, H, S, D), rotated
    v = property(lambda self: self.slot("v"))      # (B, H, S, D)
    pos = property(lambda self: self.slot("pos"))  # (B, H, S), int32

    # ---- write → attention → observe ----------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q (B, H·G, T, D), k and v (B, H, T, D), pos (B or 1, T) → output (B, H·G, T, D)."""
        self.check(q, k, v, pos)
        outputs = []
        for q, k, v, pos in self.pieces(q, k, v, pos):
            self.write(k, v, pos)
            y, p = self.attention(q, pos)
            self.observe(q, p)
            outputs.append(y)
        return torch.cat(outputs, 2) if len(outputs) > 1 else y

    def check(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor):
        """Raise ValueError if shapes and types do not continue what the cache holds. Nothing is written yet.
        """
        check_attend(self, q, k, v, pos)

    def pieces(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """The new tokens, one piece after the other: whole, or TILE at a time if every query is observed."""
        if self.watch == ALL and not self.prompt_done:
            return split(TILE, q, k, v, pos)
        return [(q, k, v, pos)]

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output (B, H·G, T, D) over what `read` shows, and p (B, H, G, w, S) of the last `watch` queries.

        For one new token a GPU kernel may read the slots directly. Each of the G in its p is their mean.
        """
        if self.watch and q.shape[2] == 1 and (fast := kernel_for(q, "decode_attention", "attend_one")):
            return fast(self, q, pos)
        return attention(q, *self.read(), pos, self.watch, self.seen == q.shape[2], self.ragged)

    def write(self, k: Tensor, v: Tensor, pos: Tensor, **state: Tensor):
        """Remember T tokens. `state` has further tensors (B, H, T, ...) of the new slots; 0 if not given."""
        B, H, T, _ = k.shape
        start, end = self.length, self.length + T
        if self.slots and end > self.slots["k"].shape[2]:
            self.reserve(self.capacity(end))
        room = self.slots["k"].shape[2] if self.slots else self.capacity(end)

        new = dict(k=k, v=v, pos=pos[:, None].int(), **state)
        for name in dict.fromkeys((*new, *self.slots, *self.per_entry)):
            x = new.get(name)
            if name not in self.slots:
                shape, dtype = ((), self.per_entry[name]) if x is None else (x.shape[3:], x.dtype)
                self.slots[name] = k.new_zeros(B, H, room, *shape, dtype=dtype)
            self.slots[name][:, :, start:end] = 0 if x is None else x

        self.length, self.seen = end, self.seen + T

    def reserve(self, n: int):
        """Allocate n slots. Nothing is copied again until they are full."""
        for name, x in self.slots.items():
            more = x.new_zeros(*x.shape[:2], max(n - x.shape[2], 0), *x.shape[3:])
            self.slots[name] = torch.cat((x, more), 2)

    def capacity(self, n: int) -> int:
        """Slots to allocate when n are needed: a tenth more, so that few steps of decoding copy the cache."""
        return n + n // 10 if self.length else n

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What attention sees: k, v (B, H, S, D), positions (B, H, S), and a logit bias (B, H, S) or None.

        A slot that stands for several tokens carries a bias that is added to its score; exact entries have 0.
        A method that hides slots by their positions sets `ragged`.
        """
        return self.k, self.v, self.pos, self.slot("bias") if "bias" in self.slots else None

    def observe(self, q: Tensor, p: Tensor | None):
        """Called after each piece: q (B, H·G, T, D), and p (B, H, G, w, S) of its last w queries.

        w is `watch`, or the piece's length if that is less. An override ends with `super().observe(q, p)`,
        which calls `evict` once the prompt is over. Use p.sum(2) or p.mean(2): of each G a kernel knows the
        mean alone. Do not write to p.
        """
        if self.prompt_done:
            self.evict()

    def end_prefill(self):
        """Called once, when the prompt is over. Never guessed from T > 1: a prompt may come in pieces."""
        self.prompt_done = True
        if self.length:  # a prompt of one token has nothing to compress: it is fed after this call
            self.evict()

    # ---- eviction -----------------------------------------------------------------------------------------

    def evict(self):
        """Called at the prompt's end, if the cache holds any of it, and after each later piece."""

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
        if self.length == budget + 1 and not self.ragged:  # one too many, as in decoding: no sort is needed
            lowest = score == score.amin(-1, keepdim=True)
            self.drop(self.pos.masked_fill(~lowest, NEVER).argmin(-1, keepdim=True))
        elif self.length > budget:
            check_numbers(score)  # not in decoding, where it would wait for the GPU at each token
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


@dataclass(eq=False)
class ScoredCache(LayerCache):
    """A method that is a score: from the prompt's end on, each head keeps the entries with the highest."""
    budget: int  # slots per key/value head

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget, 1, "one slot")

    def score(self) -> Tensor:
        """(B, H, S): slots with the lowest score are evicted, of equal ones the oldest. ±inf is allowed."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score(self) -> (B, H, S)")

    def evict(self):
        if self.length > self.budget:
            self.shrink(self.score(), self.budget)


# ---- a list of caches, one a layer -----------------------------------------------------------------------

def make_cache(model, Method=LayerCache, **options) -> list[LayerCache]:
    """One cache per layer of the decoder. Options go to the method; a bad one is a ValueError."""
    caches = []
    for layer in range(len(model.blocks)):
        cache = constructed(Method, options)
        cache.link(model, layer, caches[-1] if caches else None)
        caches.append(cache)
    return caches


def end_prefill(caches: list[LayerCache]):
    """Tell every layer, lowest first, that the prompt is over."""
    for cache in caches:
        cache.end_prefill()


def copied(caches: list[LayerCache]) -> list[LayerCache]:
    """A copy that goes its own way. The decoder is shared."""
    return deepcopy(caches, {id(cache.model): cache.model for cache in caches})


def cache_bytes(caches: list[LayerCache]) -> tuple[int, int]:
    """(live, allocated) bytes of all layers."""
    live, allocated = zip(*(cache.bytes() for cache in caches))
    return sum(live), sum(allocated)


def bytes_in_16_bits(caches: list[LayerCache]) -> int:
    """Live bytes of all layers if the model's numbers had 16 bits. Tables take their shares of these."""
    each = lambda x: 2 if x.follows and x.tensor.is_floating_point() else x.tensor.element_size()
    return sum(x.live * each(x) for cache in caches for x in cache.stored())
