"""The caches of a decoder: one method, and a store for each layer.

    caches = make_cache(model, SnapKV, budget=64)
    prefill(model, prompt, caches)
    compress(model, prompt, caches)                 # once, after the whole prompt
    logits = model(token, caches)                   # goes on from the compressed cache

method.py says in which order everything is called, and what a method or a store may override.
"""

from collections.abc import Callable
from copy import copy, deepcopy

import torch
from torch import Tensor

from nanollm.check import constructed, whole
from nanollm.method import ALL, NEVER, Method, Scored
from nanollm.packed import PackedSlots
from nanollm.sliding import SlidingSlots, full_layers
from nanollm.slots import Slots

__all__ = ["ALL", "NEVER", "Method", "PackedSlots", "Scored", "Slots"]


def make_cache(
    model, Kind: type[Method] = Method, store: Callable | None = None, **options
) -> list[Slots]:
    """Return one store per layer of the decoder, with one method, Kind(**options).

    store: a class of stores, by default the one that the method needs, or packed slots; with
    options of its own, partial(RoundedSlots, bits=3). A layer that sees the last tokens alone has
    `SlidingSlots` (or the store's `sliding`), without the method. If every layer slides, only full
    attention has these. Any other method or store then gets the same stores as in layers that see
    everything, and `Memory` refuses texts longer than the layers see. ValueError if an option is
    wrong, or if a store is given to a method that has its own.
    """
    method = constructed(Kind, options)
    whole(f"watch of {Kind.__name__}", method.watch, 0)
    if store is not None and method.store is not None:
        raise ValueError(
            f"{Kind.__name__} keeps its entries in a store of its own, {method.store.__name__}; "
            "leave the other store out"
        )
    make = store or method.store or PackedSlots
    slide = getattr(model, "windows", [None] * len(model.blocks))
    if None not in slide and (Kind is not Method or store is not None):
        slide = [None] * len(slide)
    caches = []
    of = slide.count(None)
    index = 0
    for block, sliding in enumerate(slide):
        if sliding is not None:
            Store = getattr(make, "sliding", SlidingSlots)
            caches.append(Store(sliding, model, block))
        else:
            caches.append(make(method, model, index, block))
            caches[-1].of = of
            index += 1
    return caches


@torch.no_grad()
def compress(model, tokens: Tensor, caches: list[Slots], again: bool = False):
    """Compress caches that have read tokens (B, T): the whole prompt, or the conversation so far.

    Either the prompt's own logits, computed before, give the first new token. Or the last token is
    fed `again`, and sees the compressed cache: then its entry is forgotten first, but what its
    query looked at still counts. Until the next `begin_turn`, methods may evict after each piece.
    """
    if caches[0].seen != tokens.shape[1]:
        raise ValueError(
            f"the caches have seen {caches[0].seen} tokens, but the prompt has "
            f"{tokens.shape[1]}; give the whole prompt that the caches have seen"
        )
    ids = caches[0].ids
    if ids is not None and ids.shape == tokens.shape and not ids.equal(tokens):
        raise ValueError(
            "the caches have read another text than these tokens; give what they have read"
        )
    if again:
        crop(caches, tokens.shape[1] - 1)
        tokens = tokens[:, :-1]
    layers = full_layers(caches)
    layers[0].method.compress(rereading(model, caches), tokens, layers)
    for layer in caches:
        layer.end_prompt()


def rereading(model, caches: list[Slots]):
    """Return a model that a method may call with the caches of its own layers only.

    The layers that slide then use copies of their caches.
    """
    sliding = [layer for layer in caches if isinstance(layer, SlidingSlots)]
    if not sliding:
        return model
    model = copy(model)
    model.sliding = sliding
    return model


def begin_turn(caches: list[Slots]):
    """Read on as in a prompt: the tokens of a conversation's next turn, which `compress` ends."""
    for layer in caches:
        layer.prompt_done = False


def evict_while_reading(caches: list[Slots]):
    """Treat the prompt as if it were decoded: methods may evict after each of its pieces."""
    for layer in caches:
        layer.end_prompt()


def crop(caches: list[Slots], n: int):
    """Let every layer forget the prompt's newest tokens, so that n are left.

    What their queries looked at still counts. With `again`, `compress` forgets the last token's
    entry in this way, and the caller then feeds that token again.
    """
    for layer in caches:
        layer.check_crop(n)
    for layer in caches:
        layer.forget(n)


def copied(caches: list[Slots]) -> list[Slots]:
    """Return an independent copy of the caches. Both refer to the same decoder and method."""
    shared = [x for layer in caches for x in (layer.model, layer.method)]
    return deepcopy(caches, {id(x): x for x in shared})


def cache_bytes(caches: list[Slots]) -> tuple[int, int]:
    """Return (live, allocated) bytes of all layers."""
    each = [layer.bytes() for layer in caches]
    return sum(live for live, _ in each), sum(allocated for _, allocated in each)


def bytes_in_16_bits(caches: list[Slots]) -> int:
    """Return all layers' live bytes as if the model's numbers had 16 bits, as in most tables."""
    total = 0
    for stored in [x for layer in caches for x in layer.stored()]:
        rounded = stored.model_dtype and stored.tensor.is_floating_point()
        total += stored.live * (2 if rounded else stored.tensor.element_size())
    return total
