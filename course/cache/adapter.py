"""Functions that the tests of `cache` call. They run in the submission's process and hold no answers."""
import torch

from methods.baselines.h2o import H2O
from nanollm import attention, ranking
from nanollm.cache import Method, Slots, compress


def visible(slot_pos, bias, pos):
    return attention.visible(slot_pos, bias, pos)


def probabilities(q, k, mask):
    return attention.probabilities(q, k, mask)


def indices(kept):
    return ranking.indices(kept)


def attended(q, k, v, pieces, watch=0):
    """Return the outputs of full attention that receives the tokens in pieces of these sizes."""
    layer = Slots()
    layer.watch = watch
    return torch.cat([fed(layer, q, k, v, start, n) for start, n in starts(pieces)], 2)


def starts(pieces):
    return [(sum(pieces[:i]), n) for i, n in enumerate(pieces)]


def fed(layer, q, k, v, start, n):
    """Return the outputs of the n tokens from `start` on."""
    here, pos = slice(start, start + n), torch.arange(start, start + n)[None]
    return layer.attend(q[:, :, here], k[:, :, here], v[:, :, here], pos)


class Counting(Method):
    """Stores two more tensors with each entry."""
    entry = dict(score=torch.float64, bits=(torch.uint8, 5))


def written(steps, more=False):
    """Return a layer after each step.

    A step is a `write` of k, v and pos; {"forget": n} frees n slots; {"fill": x} makes all numbers x that a
    method stores with the slots in use. more: the method stores `score` and `bits` with each entry.
    """
    layer, after = Slots(Counting() if more else None), []
    for step in steps:
        if "forget" in step:
            layer.length -= step["forget"]
        elif "fill" in step:
            for name in layer.slots.keys() - {"k", "v", "pos"}:
                layer.put(name, torch.full_like(layer.slot(name), step["fill"]))
        else:
            given = {name: x.clone() for name, x in step.items()}
            layer.write(**given)
            for x in given.values():  # the caller may overwrite its tensors
                x.fill_(88)
        after.append(held(layer))
    return after


def kept(slots, i, **state):
    layer = filled(Slots(), slots, **state)
    layer.keep(i)
    return held(layer)


def dropped(slots, i, **state):
    layer = filled(Slots(), slots, **state)
    buffers = {name: x.data_ptr() for name, x in layer.slots.items()}
    layer.drop(i)
    in_place = all(layer.slots[name].data_ptr() == address for name, address in buffers.items())
    return held(layer) | dict(in_place=in_place)


def shrunk(slots, score, budget, **state):
    layer = filled(Slots(), slots, **dict(seen=99) | state)  # tokens have left: slots have any order
    layer.shrink(score, budget)
    return held(layer)


def evicted(slots, budget, recent, **state):
    """Return a layer of H2O with these slots (`accumulated` included) after `evict`, which calls `score`."""
    layer = filled(Slots(H2O(budget=budget, recent=recent)), slots, **state)
    layer.evict()
    return held(layer)


def h2o(q, k, v, budget, recent, pieces):
    """Feed a prompt in pieces, then single tokens. Return all outputs, and the positions from its end on."""
    layer, outputs, positions = Slots(H2O(budget=budget, recent=recent)), [], []
    prompt = sum(pieces)
    for start, n in starts([*pieces, *[1] * (q.shape[2] - prompt)]):
        outputs.append(fed(layer, q, k, v, start, n))
        if start + n == prompt:
            compress(None, torch.zeros(q.shape[0], prompt), [layer])
        if start + n >= prompt:
            positions.append(layer.pos.clone())
    return dict(positions=positions, outputs=torch.cat(outputs, 2))


def filled(layer, slots, slack=0, ragged=False, seen=None):
    """Return the layer with these slots, in buffers with `slack` more slots that are not in use."""
    layer.slots = {name: torch.cat((x, x[:, :, :1].expand(-1, -1, slack, *x.shape[3:])), 2)
                   for name, x in slots.items()}
    layer.length, layer.ragged = slots["pos"].shape[2], ragged
    layer.seen = layer.length if seen is None else seen
    return layer


def held(layer):
    return dict(slots={name: layer.slot(name).clone() for name in layer.slots}, length=layer.length,
                seen=layer.seen, ragged=layer.ragged,
                allocated={name: x.shape[2] for name, x in layer.slots.items()})
