"""The KV cache, and the interface through which every method compresses it.

The decoder calls one method of the cache: `y = cache.attend(q, k, v, pos)`. For each piece of the
new tokens, `attend` runs write → attention → observe. When the whole prompt has been read,
`compress(model, tokens, caches)` lets the method remove entries. A method overrides what it needs:
`write` (what is stored), `read` (what attention sees), `observe` (what was attended to), `evict`
(what is removed from a layer), `compress` (all layers at once). A method that gives each entry a
score overrides `score` of ScoredCache, and `observe` if the score needs attention.

Shapes: B batch, T new tokens, S slots, H key/value heads, G query heads per key/value head, D head
dim, w window. A slot is a place in the cache's tensors. It holds one entry, a token's key and
value, or is empty. Keys are stored rotated. A query sees a slot if the slot's position ≤ the
query's. This rule alone covers causality, prompts read in pieces, and heads of different length.
Eviction may change the order of the slots; `pos` says which token a slot holds.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanollm.attention import attention
from nanollm.check import (
    check_attend,
    check_budget,
    check_kept,
    check_numbers,
    check_options,
    check_score,
    constructed,
    whole,
)
from nanollm.kernel_switch import kernel_for
from nanollm.ranking import expand_index, indices, rank, taken, top

# the position of an empty slot: no query ever sees it
NEVER = torch.iinfo(torch.int32).max
ALL = NEVER  # observe every query
# if every query is observed, prompts are read in pieces of this size
TILE = 64


class PerEntry:
    """A number that a method stores with each entry. It starts at 0 and moves with its entry.

    Write `weight = PerEntry()` in the class, without an annotation, because it is not an option.
    Then `cache.weight` is a view (B, H, S) of the slots in use, and assigning to it writes into
    these slots.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype

    def __set_name__(self, owner, name: str):
        self.name = name
        # a new dict: the parent class keeps its own
        owner.per_entry = owner.per_entry | {name: self.dtype}

    def __get__(self, cache, owner=None) -> Tensor:
        return self if cache is None else cache.slot(self.name)

    def __set__(self, cache, x: Tensor):
        slots = cache.slot(self.name)
        if x.dim() != 3 or x.shape[2] != slots.shape[2]:
            raise ValueError(
                f"{self.name} {tuple(x.shape)} must be {tuple(slots.shape)}, one for each slot"
            )
        slots.copy_(x)


@dataclass(eq=False)
class LayerCache:
    """Full attention: stores every token of one layer. Subclasses add options as fields."""

    # `observe` receives the probabilities of this many latest queries: 0, a number, or ALL
    watch = 0
    # True if no token is lost; tables then show "all" as the keep ratio
    keeps_all = False
    # True if tokens after the prompt are only appended: then several at once change nothing but
    # rounding
    appends = property(lambda self: type(self) is LayerCache)
    per_entry = {}  # name → dtype of each PerEntry in the class

    def __post_init__(self):
        check_options(self)
        # (B, H, capacity, ...): k, v, pos, and what methods add
        self.slots: dict[str, Tensor] = {}
        self.length = 0  # slots in use
        # tokens so far, evicted ones too: the next token's position
        self.seen = 0
        # some slots are empty or hidden: even one new token needs a mask
        self.ragged = False
        # the prompt was compressed; what follows is decoding
        self.prompt_done = False
        # the decoder, and which of its layers this is
        self.model, self.layer = None, 0

    def link(self, model, layer: int):
        """Tell the cache its decoder and its layer; `make_cache` calls this."""
        whole(f"watch of {type(self).__name__}", self.watch, 0)
        self.model, self.layer = model, layer

    @property
    def w_o(self) -> Tensor:
        """Return this layer's output projection W_O, (d_model, H·G, D)."""
        return self.model.blocks[self.layer].attention.w_o

    @property
    def freq(self) -> Tensor | None:
        """Return this layer's angles per token (RoPE), (D/2,): 0 if it does not rotate, None if unknown."""
        # learned ones, added to the embeddings
        if getattr(self.model, "positions", None):
            return torch.zeros(self.w_o.shape[2] // 2)
        freq = getattr(self.model, "freq", None)
        freq = freq[self.layer] if isinstance(freq, list) else freq
        return (
            None
            if freq is None
            else freq.to(self.k.device if self.slots else freq.device)
        )

    def slot(self, name: str) -> Tensor:
        """Return the slots in use of one per-slot tensor, (B, H, S, ...): a view to read or change."""
        return self.slots[name][:, :, : self.length]

    k = property(lambda self: self.slot("k"))  # (B, H, S, D), rotated
    v = property(lambda self: self.slot("v"))  # (B, H, S, D)
    pos = property(lambda self: self.slot("pos"))  # (B, H, S), int32

    # ---- write → attention → observe
    # ----------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store T new tokens and return attention's output (B, H·G, T, D).

        q (B, H·G, T, D), k and v (B, H, T, D), pos (B or 1, T).
        """
        self.check(q, k, v, pos)
        outputs = []
        for q, k, v, pos in self.pieces(q, k, v, pos):
            self.write(k, v, pos)
            y, p = self.attention(q, pos)
            self.observe(q, p)
            outputs.append(y)
        return torch.cat(outputs, 2) if len(outputs) > 1 else y

    def check(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor):
        """Raise ValueError, before anything is written, if the new tokens do not fit this cache."""
        check_attend(self, q, k, v, pos)

    def pieces(
        self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor
    ) -> Iterable[tuple[Tensor, ...]]:
        """Split the new tokens: one piece, or pieces of TILE tokens if every query is observed."""
        if self.watch == ALL and not self.prompt_done:
            return zip(
                q.split(TILE, 2), k.split(TILE, 2), v.split(TILE, 2), pos.split(TILE, 1)
            )
        return [(q, k, v, pos)]

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output over the slots of `read`, and the last `watch` queries' probabilities p.

        Output (B, H·G, T, D), p (B, H, G, w, S) or None. For one new token a GPU kernel may read
        the slots directly. Its p holds the mean over the G queries of a group, repeated G times.
        """
        # else PyTorch's kernels are as fast
        explicit = self.watch or self.ragged or "bias" in self.slots
        if (
            explicit
            and q.shape[2] == 1
            and (fast := kernel_for(q, "decode_attention", "attend_one"))
        ):
            return fast(self, q, pos)
        in_order = self.length == self.seen and not self.ragged
        return attention(q, *self.read(), pos, self.watch, in_order, self.ragged)

    def write(self, k: Tensor, v: Tensor, pos: Tensor, **state: Tensor):
        """Store T new tokens in the next slots.

        `state`: further per-slot tensors (B, H, T, ...) by name. Those not given are 0 for the new
        tokens.
        """
        B, H, T, _ = k.shape
        start, end = self.length, self.length + T
        if self.slots and end > self.slots["k"].shape[2]:
            self.reserve(self.capacity(end))
        room = self.slots["k"].shape[2] if self.slots else self.capacity(end)

        new = dict(k=k, v=v, pos=pos[:, None].int(), **state)
        for name in dict.fromkeys((*new, *self.slots, *self.per_entry)):
            x = new.get(name)
            if name not in self.slots:
                shape, dtype = (
                    ((), self.per_entry[name]) if x is None else (x.shape[3:], x.dtype)
                )
                self.slots[name] = k.new_zeros(B, H, room, *shape, dtype=dtype)
            self.slots[name][:, :, start:end] = 0 if x is None else x

        self.length, self.seen = end, self.seen + T

    def reserve(self, n: int):
        """Grow the buffers to n slots. Nothing is copied again until the n slots are full."""
        for name, x in self.slots.items():
            more = x.new_zeros(*x.shape[:2], max(n - x.shape[2], 0), *x.shape[3:])
            self.slots[name] = torch.cat((x, more), 2)

    def capacity(self, n: int) -> int:
        """Return how many slots to allocate for n; a tenth more if the cache grows, to copy rarely."""
        return n + n // 10 if self.length else n

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return what attention sees: k, v (B, H, S, D), positions (B, H, S), logit bias or None.

        The bias (B, H, S) is added to a slot's attention score, if a slot stands for several
        tokens. Exact entries have 0. A method that hides slots by changing their positions sets
        `ragged`.
        """
        return (
            self.k,
            self.v,
            self.pos,
            self.slot("bias") if "bias" in self.slots else None,
        )

    def observe(self, q: Tensor, p: Tensor | None):
        """Look at a piece's queries and attention probabilities. Called after each piece.

        q is (B, H·G, T, D). p (B, H, G, w, S) belongs to the last w queries, and is None if `watch`
        is 0. w is `watch`, or the piece's length if that is less. Reduce p by p.sum(2) or
        p.mean(2), because a GPU kernel returns only the mean over a group's G query heads. Do not
        write to p. An override that evicts ends with `super().observe(q, p)`, which calls `evict`
        each time after the prompt.
        """
        if self.prompt_done:
            self.evict()

    # ---- eviction
    # -----------------------------------------------------------------------------------------

    @classmethod
    def compress(cls, model, tokens: Tensor, caches: list["LayerCache"]):
        """Compress the caches of all layers, which have read the prompt, tokens (B, T). Here each evicts.

        A method overrides this if it chooses over several layers, or if it reads the prompt again.
        Call the function `compress` of this file, not this method.
        """
        for cache in caches:
            cache.evict()

    def forget_prompt(self):
        """Drop what was remembered for the compression alone (here nothing). Called right after it."""

    def evict(self):
        """Remove entries (here none). Called when the prompt is compressed, and after each later piece."""

    def crop(self, n: int):
        """Forget the newest tokens of a prompt, so that n are left. Scores keep what their queries added.

        Only before `compress`: after it, a head may have evicted any of them.
        """
        if not 0 <= n <= self.seen:
            raise ValueError(
                f"{n} tokens cannot be left of {self.seen}; give 0 to {self.seen}"
            )
        if self.prompt_done and n < self.seen:
            raise ValueError(
                "a compressed cache cannot forget tokens; call crop before compress"
            )
        if self.length == self.seen and not self.ragged:  # slot i holds token i
            self.length = n
        elif n < self.seen:
            newest = self.pos.masked_fill(self.pos == NEVER, -1).amax(
                (1, 2), keepdim=True
            )
            self.keep(indices(self.pos <= newest - (self.seen - n)))
        self.seen = n

    def keep(self, i: Tensor):
        """Keep only slots i (B, H, n) of all per-slot tensors; −1 stands for an empty slot."""
        check_kept(i, self.pos.shape)
        empty, i = i < 0, i.clamp(min=0)
        in_use = {name: self.slot(name) for name in self.slots}
        self.slots = {name: taken(x, i) for name, x in in_use.items()}
        self.length = i.shape[2]
        if empty.any():
            self.ragged = True
            self.slots["pos"].masked_fill_(empty, NEVER)

    def drop(self, i: Tensor):
        """Evict slot i (B, H, 1) of each head. The last slot moves there; nothing else is copied."""
        for x in self.slots.values():
            last = x[:, :, self.length - 1 : self.length].clone()
            x.scatter_(2, expand_index(i, x), last)
        self.length -= 1

    def shrink(self, score: Tensor, budget: int):
        """Keep each head's `budget` slots of highest score (B, H, S). Ties go to the newest token."""
        check_score(score, self.pos.shape)
        if self.ragged:
            score = score.masked_fill(self.pos == NEVER, -math.inf)
        # one slot too many, as in decoding: no sort needed
        if self.length == budget + 1 and not self.ragged:
            higher = score > score.amin(-1, keepdim=True)
            self.drop(self.pos.masked_fill(higher, NEVER).argmin(-1, keepdim=True))
        elif self.length > budget:
            # not in decoding, where it would wait for the GPU at each token
            check_numbers(score)
            in_order = self.length == self.seen
            self.keep(
                indices(
                    top(score, budget) if in_order else rank(score, self.pos) < budget
                )
            )

    def bytes(self) -> tuple[int, int]:
        """Return (live, allocated) bytes of this layer. Live bytes leave out unused and empty slots."""
        stored = self.stored()
        return sum(x.live * x.tensor.element_size() for x in stored), sum(
            x.tensor.nbytes for x in stored
        )

    def stored(self) -> list["Stored"]:
        """Return every tensor that `bytes` counts: the slots, and those of `beside`."""
        live = 0
        if self.slots:
            live = int((self.pos != NEVER).sum()) if self.ragged else self.pos.numel()
        slots = [
            Stored(x, live * math.prod(x.shape[3:]), model_dtype=name in ("k", "v"))
            for name, x in self.slots.items()
        ]
        # a tensor with a fourth axis, D, holds keys, values or queries; others hold scores
        return slots + [
            Stored(x, x.numel(), model_dtype=x.dim() > 3) for x in self.beside()
        ]

    def beside(self) -> list[Tensor]:
        """Return the tensors that a method stores beside its slots."""
        return []


class Stored(NamedTuple):
    """A tensor of a cache, and how many of its numbers are live.

    model_dtype: its numbers have the model's dtype. Scores, for example, always have 32 bits.
    """

    tensor: Tensor
    live: int
    model_dtype: bool


@dataclass(eq=False)
class ScoredCache(LayerCache):
    """A method defined by a score: after the prompt each head keeps its highest scores."""

    budget: int  # entries that each key/value head may keep

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget, 1, "one slot")

    def score(self) -> Tensor:
        """Return a score (B, H, S), ±inf allowed. The lowest are evicted, the oldest among equals."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a method score(self) -> (B, H, S)"
        )

    def evict(self):
        if self.length > self.budget:
            self.shrink(self.score(), self.budget)


# ---- a list of caches, one per layer
# ---------------------------------------------------------------------


def make_cache(model, Method=LayerCache, **options) -> list[LayerCache]:
    """Return one cache per layer of the decoder. ValueError if an option of the method is wrong."""
    caches = []
    for layer in range(len(model.blocks)):
        cache = constructed(Method, options)
        cache.link(model, layer)
        caches.append(cache)
    return caches


@torch.no_grad()
def compress(model, tokens: Tensor, caches: list[LayerCache]):
    """Compress caches that have read tokens (B, T): the whole prompt, or the conversation so far.

    Until the next `begin_turn`, methods that evict while they decode do so after each piece.
    """
    if caches[0].seen != tokens.shape[1]:
        raise ValueError(
            f"the caches have seen {caches[0].seen} tokens, but the prompt has "
            f"{tokens.shape[1]}; give the whole prompt that the caches have seen"
        )
    type(caches[0]).compress(model, tokens, caches)
    for cache in caches:
        cache.forget_prompt()
        cache.prompt_done = True


def begin_turn(caches: list[LayerCache]):
    """Read on as in a prompt: the tokens of a conversation's next turn, which `compress` ends again."""
    for cache in caches:
        cache.prompt_done = False


def crop(caches: list[LayerCache], n: int):
    """Let every layer forget the newest tokens, so that n are left."""
    for cache in caches:
        cache.crop(n)


def copied(caches: list[LayerCache]) -> list[LayerCache]:
    """Return an independent copy of the caches. Both refer to the same decoder."""
    return deepcopy(caches, {id(cache.model): cache.model for cache in caches})


def cache_bytes(caches: list[LayerCache]) -> tuple[int, int]:
    """Return (live, allocated) bytes of all layers."""
    live, allocated = zip(*(cache.bytes() for cache in caches))
    return sum(live), sum(allocated)


def bytes_in_16_bits(caches: list[LayerCache]) -> int:
    """Return all layers' live bytes as if the model's numbers had 16 bits. Tables compare these."""
    width = lambda x: (
        2 if x.model_dtype and x.tensor.is_floating_point() else x.tensor.element_size()
    )
    return sum(x.live * width(x) for cache in caches for x in cache.stored())
