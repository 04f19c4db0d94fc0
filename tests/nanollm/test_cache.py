"""A decoder's caches: one method, a store for each layer, and when the prompt ends."""

from functools import partial

import pytest
import torch

from common import TOKENS, decoder
from lab.kept import full_cache_bytes
from methods.baselines.cam import CaM
from methods.baselines.h2o import H2O
from methods.baselines.quantized import Quantized
from methods.baselines.streaming_llm import StreamingLLM
from methods.kv_reviver import KVReviver
from methods.scissorhands import Scissorhands
from nanollm.cache import (
    Method,
    PackedSlots,
    Slots,
    begin_turn,
    cache_bytes,
    compress,
    copied,
    crop,
    make_cache,
)
from nanollm.model import Config
from nanollm.rounded import RoundedSlots


def test_layers_share_a_method_and_have_a_store_each():
    model = decoder()
    caches = make_cache(model, H2O, budget=8)
    assert [layer.index for layer in caches] == [0, 1, 2]
    assert {id(layer.method) for layer in caches} == {id(caches[0].method)}
    assert all(type(layer) is PackedSlots for layer in caches)
    few = make_cache(model, H2O, store=partial(RoundedSlots, bits=3), budget=8)
    assert [layer.bits for layer in few] == [3, 3, 3]
    assert type(make_cache(model)[0].method) is Method


@pytest.mark.parametrize(
    "Kind", [KVReviver, Scissorhands, CaM, StreamingLLM, Quantized]
)
@pytest.mark.parametrize("store", [Slots, partial(RoundedSlots, bits=4)])
def test_a_store_for_a_method_that_has_its_own_is_refused(Kind, store):
    options = {} if Kind is Quantized else dict(budget=64)
    with pytest.raises(
        ValueError, match=f"{Kind.__name__} keeps its entries in .* own"
    ):
        make_cache(decoder(), Kind, store=store, **options)


class Ends(Method):
    """Notes the prompts that were compressed."""

    def compress(self, model, tokens, layers):
        super().compress(model, tokens, layers)
        self.prompts = [*getattr(self, "prompts", ()), tokens.shape[1]]


@torch.no_grad()
def test_a_prompt_ends_once_and_a_turn_begins_another():
    model = decoder()
    caches = make_cache(model, Ends)
    model(TOKENS[:, :9], caches)
    compress(model, TOKENS[:, :9], caches)
    assert all(layer.prompt_done for layer in caches)
    begin_turn(caches)
    assert not any(layer.prompt_done for layer in caches)
    model(TOKENS[:, 9:12], caches)
    compress(model, TOKENS[:, :12], caches)
    assert caches[0].method.prompts == [9, 12]


@torch.no_grad()
def test_a_copy_goes_its_own_way():
    model = decoder()
    caches = make_cache(model, H2O, budget=8)
    model(TOKENS[:, :9], caches)
    compress(model, TOKENS[:, :9], caches)
    copy = copied(caches)
    expected = model(TOKENS[:, 9:10], caches)
    model(TOKENS[:, 12:13], caches)
    assert torch.equal(model(TOKENS[:, 9:10], copy), expected)
    assert copy[0].method is caches[0].method
    assert copy[0].model is model


@torch.no_grad()
def test_wrong_numbers_of_tokens_are_refused():
    """`crop` leaves 0 to all tokens; `compress` needs exactly the tokens that were read."""
    model = decoder()
    tokens = TOKENS[:1, :9]
    caches = make_cache(model)
    model(tokens, caches)
    for n in (-1, 10):
        message = f"{n} tokens cannot be left of 9; give 0 to 9"
        with pytest.raises(ValueError, match=message):
            crop(caches, n)
    crop(caches, 8)
    assert [layer.seen for layer in caches] == [8, 8, 8]
    with pytest.raises(ValueError, match="seen 8 tokens, but the prompt has 9"):
        compress(model, tokens, caches)


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
    assert full_cache_bytes(llama, 2048) == 2**30
    note("R8", llama_2_7b_gib=full_cache_bytes(llama, 2048) / 2**30)
    model = decoder()
    caches = make_cache(model)
    model(TOKENS[:1, :30], caches)
    # this cache also remembers where its tokens stood
    positions = sum(layer.pos.nbytes for layer in caches)
    expected = full_cache_bytes(model.config, 30, bytes_per_number=4)
    assert cache_bytes(caches)[0] - positions == expected
