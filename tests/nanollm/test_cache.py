"""A decoder's caches: a store for each layer, numbers of tokens that do not fit, and memory."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from common import TOKENS, decoder
from lab.kept import full_cache_bytes
from methods.baselines.streaming_llm import StreamingLLM
from methods.baselines.rounded import RoundedSlots
from nanollm.cache import Slots, cache_bytes, crop, make_cache
from nanollm.model import Config


@pytest.mark.parametrize("store", [Slots, partial(RoundedSlots, bits=4)])
def test_a_store_for_a_method_that_has_its_own_is_refused(store):
    message = "StreamingLLM keeps its entries in a store of its own"
    with pytest.raises(ValueError, match=message):
        make_cache(decoder(), StreamingLLM, store=store, budget=64)


@torch.no_grad()
def test_wrong_numbers_of_tokens_are_refused():
    """`crop` leaves 0 to 9 of 9 tokens."""
    model = decoder()
    caches = make_cache(model)
    model(TOKENS[:1, :9], caches)
    for n in (-1, 10):
        message = f"{n} tokens cannot be left of 9; give 0 to 9"
        with pytest.raises(ValueError, match=message):
            crop(caches, n)
    crop(caches, 8)
    assert [layer.seen for layer in caches] == [8, 8, 8]


@pytest.mark.claim("R8")
@torch.no_grad()
def test_the_memory_formula_counts_what_is_allocated(note):
    llama = Config(
        vocab_size=32_000,
        max_len=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        d_model=4096,
        d_ff=11_008,
    )
    llama = SimpleNamespace(config=llama)
    assert full_cache_bytes(llama, 2048) == 2**30
    note("R8", llama_2_7b_gib=full_cache_bytes(llama, 2048) / 2**30)
    model = decoder()
    caches = make_cache(model)
    model(TOKENS[:1, :30], caches)
    # this cache also remembers where its tokens stood
    positions = sum(layer.pos.nbytes for layer in caches)
    expected = full_cache_bytes(model, 30, bytes_per_number=4)
    assert cache_bytes(caches)[0] - positions == expected
