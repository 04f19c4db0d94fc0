"""Functions that the tests of `cache` call. They run in the submission's process and hold no answers."""
import torch

from methods.baselines.h2o import H2O
from nanollm import attention, ranking
from nanollm.cache import LayerCache, PerEntry, compress


def visible(slot_pos, bias, pos):
    return attention.visible(slot_pos, bias, pos)


def probabilities(q, k, slot_pos, bias, pos):
    return attention.probabilities(q, k, slot_pos, bias, pos)


def indices(kept):
    return ranking.indices(kept)


def attended(q, k, v, pieces, watch=0):
    """Return the outputs of full attention that receives the tokens in pieces of these sizes."""
    cache, start, parts = LayerCache(), 0, []
    cache.watch = watch
    for n in pieces:
        here, pos = slice(start, start + n), torch.arange(start, start + n)[None]
        parts.append(cache.attend(q[:, :, here], k[:, :, here], v[:, :, here], pos))
        start += n
    return torch.cat(parts, 2)


class Declaring(LayerCache):
    flags = PerEntry(torch.uint8)


def written(steps, declares=False):
    """Return the cache after each step: a `write` of the step's tensors; {"forget": n} frees n slots.

    declares: the cache's class declares a tensor `flags` of torch.uint8.
    """
    cache, after = Declaring() if declares else LayerCache(), []
    for step in steps:
        if "forget" in step:
            cache.length -= step["forget"]
        else:
            given = {name: x.clone() for name, x in step.items()}
            cache.write(**given)
            for x in given.values():  # the caller may overwrite its tensors
                x.fill_(88)
        after.append(held(cache))
    return after


def kept(slots, i, **state):
    cache = filled(LayerCache(), slots, **state)
    cache.keep(i)
    return held(cache)


def dropped(slots, i, **state):
    cache = filled(LayerCache(), slots, **state)
    buffers = {name: x.data_ptr() for name, x in cache.slots.items()}
    cache.drop(i)
    in_place = all(cache.slots[name].data_ptr() == address for name, address in buffers.items())
    return held(cache) | dict(in_place=in_place)


def shrunk(slots, score, budget, **state):
    cache = filled(LayerCache(), slots, **dict(seen=99) | state)  # tokens have left: slots have any order
    cache.shrink(score, budget)
    return held(cache)


def evicted(slots, budget, recent, **state):
    """Return an H2O cache with these slots (`accumulated` included) after `evict`, which calls `score`."""
    cache = filled(H2O(budget=budget, recent=recent), slots, **state)
    cache.evict()
    return held(cache)


def h2o(q, k, v, budget, recent, pieces):
    """Feed a prompt in pieces, then single tokens. Return the positions after each step, and all outputs."""
    cache, start, parts, positions = H2O(budget=budget, recent=recent), 0, [], []
    for n in [*pieces, *[1] * (q.shape[2] - sum(pieces))]:
        here, pos = slice(start, start + n), torch.arange(start, start + n)[None]
        parts.append(cache.attend(q[:, :, here], k[:, :, here], v[:, :, here], pos))
        start += n
        if start == sum(pieces):
            compress(None, torch.zeros(q.shape[0], start), [cache])
        if start >= sum(pieces):
            positions.append(cache.pos.clone())
    return dict(positions=positions, outputs=torch.cat(parts, 2))


def filled(cache, slots, slack=0, ragged=False, seen=None):
    """Return the cache with these slots, in buffers with `slack` more slots that are not in use."""
    cache.slots = {name: torch.cat((x, x[:, :, :1].expand(-1, -1, slack, *x.shape[3:])), 2)
                   for name, x in slots.items()}
    cache.length, cache.ragged = slots["pos"].shape[2], ragged
    cache.seen = cache.length if seen is None else seen
    return cache


def held(cache):
    return dict(slots={name: cache.slot(name).clone() for name in cache.slots}, length=cache.length,
                seen=cache.seen, ragged=cache.ragged,
                allocated={name: x.shape[2] for name, x in cache.slots.items()})
