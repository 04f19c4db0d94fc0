"""Which tokens caches hold, exact or rounded, and how many slots and bytes they have."""

from functools import partial
from types import SimpleNamespace

import torch

from common import TOKENS, decoder
from lab.kept import full_cache_bytes, held, slots_per_head
from methods.baselines.h2o import H2O
from methods.baselines.rounded import RoundedSlots
from nanollm.cache import Method, Slots, compress, make_cache


@torch.no_grad()
def read(kind=Method, store=None, **options):
    """Return caches that have read a text, are compressed, and have read one token more."""
    model = decoder()
    caches = make_cache(model, kind, store, **options)
    model(TOKENS[:, :30], caches)
    compress(model, TOKENS[:, :30], caches)
    model(TOKENS[:, 30:31], caches)
    return caches


def test_slots_are_those_of_the_text_that_has_the_most():
    x = torch.zeros(2, 2, 6, 4)
    one = Slots()
    other = Slots()
    for layer in one, other:
        layer.write(x, x, torch.arange(6)[None])
    kept = [[[0, 1, -1], [0, -1, -1]], [[0, 1, 2], [0, -1, -1]]]
    one.keep(torch.tensor(kept))
    assert slots_per_head([one, other]) == (3 + 1 + 6 + 6) / 4


def test_a_head_holds_the_tokens_whose_positions_it_has():
    caches = read(H2O, budget=8)
    found = held(caches, 31)
    assert found.shape == (2, 3, 2, 31)
    for layer, heads in zip(caches, found.unbind(1)):
        for row, own in zip(layer.pos.flatten(0, 1), heads.flatten(0, 1)):
            assert own.nonzero().flatten().tolist() == sorted(row.tolist())
    assert held(caches, 10).equal(found[..., :10])


def test_a_layer_that_slides_holds_what_it_sees():
    config = SimpleNamespace(n_layers=3, n_kv_heads=2, head_dim=4)
    windows = [None, SimpleNamespace(size=5), None]
    model = SimpleNamespace(config=config, windows=windows)
    for tokens, entries in (3, 9), (7, 19):
        assert full_cache_bytes(model, tokens, 2) == 32 * entries


def test_rounded_entries_count_as_exact_ones_do():
    caches = read(store=partial(RoundedSlots, bits=4))
    assert held(caches, 31).all()
    assert slots_per_head(caches) == 31
    assert caches[0].new("pos").shape[2] == 1  # 30 of them are rounded
