"""The interface of methods: a score is a whole method, numbers travel with their entries."""

from dataclasses import dataclass

import pytest
import torch

from common import alone, end
from methods.baselines.h2o import H2O
from methods.baselines.kvzip import KVzip
from methods.baselines.snap_kv import SnapKV
from nanollm.cache import Method, Scored
from stores import SLOT, fill, positions


class Oldest(Scored):
    """The whole of a method: a score."""

    def score(self, layer):
        return -layer.pos


class Marked(Scored):
    """Each entry remembers how many queries came since it did, and its position + 0.5."""

    entry = {"age": torch.int32, "mark": (torch.float64, 2)}

    def observe(self, layer, q, p):
        layer.put("age", layer.slot("age") + q.shape[2])
        layer.put("mark", (layer.pos + 0.5)[..., None].expand(*layer.pos.shape, 2))

    def score(self, layer):
        return (layer.pos * 7 % 11).float()  # leaves holes anywhere


def test_a_method_is_a_score_and_a_budget():
    layer = alone(Oldest(budget=5))
    fill(layer, 12)
    assert layer.length == 12  # all of the prompt, until it is compressed
    end(layer)
    for _ in range(3):
        fill(layer, 1)
        assert (layer.pos.sort(-1).values == torch.arange(5)).all()
    assert layer.seen == 15


def test_numbers_of_an_entry_move_with_it():
    """And a method that looks at every step needs nothing else to hold its budget."""
    layer = alone(Marked(budget=6))
    fill(layer, 9)
    assert (layer.slot("age") == 9).all()
    end(layer)
    for t in range(9, 20):
        fill(layer, 1)
        for head, ages in zip(layer.pos.flatten(0, 1), layer.slot("age").flatten(0, 1)):
            for i, age in zip(head.tolist(), ages.tolist()):
                assert age == t + 1 - (0 if i < 9 else i)
        mark = (layer.pos + 0.5).double()
        assert torch.equal(layer.slot("mark")[..., 1], mark)
        assert layer.length == 6
    assert layer.slot("age").dtype == torch.int32
    assert layer.bytes()[0] == 4 * 6 * (SLOT + 4 + 16)
    assert Oldest.entry == {}


class Listening(H2O):
    def observe(self, layer, q, p):
        self.heard = p.shape[3]


def test_who_overrides_observe_forgets_nothing():
    """No super() is needed: the method still evicts, by numbers that stay 0, so the newest stay."""
    layer = alone(Listening(budget=4))
    fill(layer, 12)
    end(layer)
    fill(layer, 1)
    assert positions(layer) == [[[9, 10, 11, 12]] * 2] * 2
    assert layer.method.heard == 1


class Evicting(Method):
    def evict(self, layer):
        pass


@pytest.mark.parametrize(
    "method, appends",
    [
        (Method(), True),
        (SnapKV(64), True),
        (KVzip(64), True),
        (H2O(64), False),
        (Oldest(64), False),
        (Evicting(), False),
    ],
)
def test_a_method_that_evicts_while_decoding_does_not_append(method, appends):
    assert method.appends == appends


@dataclass
class Unfinished(Scored):
    pass


def test_a_method_without_a_score_is_told():
    layer = alone(Unfinished(budget=2))
    fill(layer, 3)
    with pytest.raises(NotImplementedError, match="Unfinished needs score"):
        end(layer)
    with pytest.raises(ValueError, match="budget 0 must be at least 1"):
        Unfinished(budget=0)
