"""The interface of methods: a score is a whole method, numbers travel with their entries."""

import pytest
import torch

from common import alone, end
from methods.baselines.h2o import H2O
from nanollm.cache import Scored
from stores import SLOT, fill, positions


class Marked(Scored):
    """Each entry stores how many queries came with it and since, and its position + 0.5, twice."""

    entry = {"age": torch.int32, "mark": (torch.float64, 2)}

    def observe(self, layer, q, p):
        layer.put("age", layer.slot("age") + q.shape[2])
        layer.put("mark", (layer.pos + 0.5)[..., None].expand(-1, -1, -1, 2))

    def score(self, layer):
        return (layer.pos * 7 % 11).float()  # leaves holes anywhere


class Listening(H2O):
    def observe(self, layer, q, p):
        self.heard = p.shape[3]


def test_numbers_of_an_entry_move_with_it():
    layer = alone(Marked(budget=6))
    fill(layer, 9)
    end(layer)
    for t in range(9, 20):
        fill(layer, 1)
        born = layer.pos.masked_fill(layer.pos < 9, 0)  # the prompt came at once
        assert torch.equal(layer.slot("age"), t + 1 - born)
        assert torch.equal(layer.slot("mark")[..., 1], layer.pos.double() + 0.5)
    assert layer.bytes()[0] == 4 * 6 * (SLOT + 4 + 16)
    assert Scored.entry == {}


def test_who_overrides_observe_forgets_nothing():
    """No super() is needed: it still evicts, by numbers that stay 0, so the newest stay."""
    layer = alone(Listening(budget=4))
    fill(layer, 12)
    end(layer)
    fill(layer, 1)
    assert positions(layer) == [[[9, 10, 11, 12]] * 2] * 2
    assert layer.method.heard == 1


def test_a_method_without_a_score_is_told():
    layer = alone(Scored(budget=2))
    fill(layer, 3)
    with pytest.raises(NotImplementedError, match="Scored needs score"):
        end(layer)
