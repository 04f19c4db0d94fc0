"""What a method decides, and the order in which everything is called.

A *method* decides which entries stay: one object for all of its layers. Its options are its
dataclass fields. A *store* keeps the entries of one layer (slots.py). `make_cache` (cache.py) makes
one method and a store for each layer; the decoder calls `store.attend(q, k, v, pos)`.

    attend, for each piece of the new tokens:     compress, once, after the whole prompt:
        store.room       how many tokens fit          method.compress   each layer evicts
        store.write      append their entries         store.end_prompt  drop the notes
        store.attention  attend to the entries
        method.observe   look at the probabilities
        store.evict      after the prompt

A subclass may override these names; a method here overrides at most five of them:

    Method.watch       how many of the latest queries' probabilities `observe` receives
    Method.entry       numbers stored with each entry
    Method.store       the kind of store that the method cannot do without
    Method.observe     look at queries and probabilities, after each piece
    Method.compress    evict in all layers, when the prompt has ended
    Method.evict       evict in one layer, at the prompt's end and after each later piece
    Scored.score       in place of `compress` and `evict`: the lowest scores leave
    calibrate          of the class: return the options that depend on the decoder
    Slots.room         how many new tokens to take at once; Scissorhands' store evicts here
    Slots.capacity     how many slots to allocate
    Slots.write        append entries
    Slots.read         what Slots.attention sees
    Slots.attention    attention over the entries
    Slots.evict        call method.evict, at the prompt's end and after each later piece
    Slots.keep         keep some slots; so do keep_chosen, by a mask, and drop, all but one
    Slots.crop         undo the newest writes
    Slots.put          replace the numbers of all slots
    Slots.end_prompt   drop the notes; a store of few bits rounds here
    Slots.stored       the tensors whose bytes count

Shapes: B batch, T new tokens, S slots, H key/value heads, G query heads per key/value head, D head
dim, w window. A slot is a place in a store's tensors. It holds one entry, a token's key and value,
or is empty.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanollm.check import check_budget

if TYPE_CHECKING:
    from nanollm.slots import Slots

# the position of an empty slot: no query ever sees it
NEVER = torch.iinfo(torch.int32).max
ALL = NEVER  # observe every query


@dataclass
class Method:
    """Full attention: every entry stays. Subclasses add options as dataclass fields."""

    watch = 0  # the latest queries whose probabilities `observe` receives: 0, a number, or ALL
    entry = {}  # numbers stored with each entry: name → dtype, or (dtype, how many)
    store = None  # the class of its stores; None: any store that holds entries

    def observe(self, layer: "Slots", q: Tensor, p: Tensor | None):
        """Look at a piece's queries and attention probabilities.

        q is (B, H·G, T, D). p (B, H, G, w, S) belongs to the last w queries, and is None if `watch`
        is 0. w is `watch`, or the piece's length if that is less. Reduce p by p.sum(2) or
        p.mean(2), because a GPU kernel may return only the mean over a group's G query heads. Do
        not write to p. `layer.notes` keeps tensors until the prompt is compressed, `layer.state`
        for good, and `layer.put` changes the numbers of `entry`.
        """

    def compress(self, model, tokens: Tensor, layers: list["Slots"]):
        """Evict in all layers, which have read the prompt, tokens (B, T). Here each evicts."""
        for layer in layers:
            layer.evict()

    def evict(self, layer: "Slots"):
        """Evict in one layer: at the prompt's end, and after each later piece. Here nothing."""

    @property
    def appends(self) -> bool:
        """Whether tokens after the prompt are only appended, so that several may come at once."""
        return type(self).evict is Method.evict


@dataclass
class Scored(Method):
    """A method that is a score and a budget: each head keeps its highest scores.

    So it does at the prompt's end and while decoding. A method that evicts only at the prompt's end
    overrides `compress` of Method instead.
    """

    budget: int  # entries that each key/value head may keep

    def __post_init__(self):
        check_budget(self.budget, 1, "one slot")

    def score(self, layer: "Slots") -> Tensor:
        """Return a score (B, H, S), ±inf allowed. The lowest leave, the oldest among equals."""
        raise NotImplementedError(
            f"{type(self).__name__} needs score(self, layer) -> (B, H, S)"
        )

    def evict(self, layer: "Slots"):
        if layer.length > self.budget:
            layer.shrink(self.score(layer), self.budget)
