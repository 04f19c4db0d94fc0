"""What a user or an author of a method can get wrong with a cache is one line, before anything is
written."""

from dataclasses import dataclass, fields
from typing import get_type_hints

import numpy as np
import pytest
import torch

from common import TOKENS, decoder
from lab.registry import given, pick
from nanollm.cache import LayerCache, ScoredCache, compress, copied, make_cache
from nanollm.generate import tell_chunk_ends

OPTIONS = dict(budget=np.int64(24), window_size=4)  # NumPy's whole numbers are some
METHODS = {
    name: Method for name, Method in pick([]).items() if isinstance(Method, type)
}


@pytest.fixture(scope="module")
def model():
    return decoder(n_layers=2, max_len=128)


@torch.no_grad()
@pytest.mark.parametrize("done", [False, True], ids=["prompt", "decoding"])
@pytest.mark.parametrize("name", METHODS)
def test_another_batch_and_another_prompt_change_nothing(model, name, done):
    caches = make_cache(model, METHODS[name], **given(METHODS[name], **OPTIONS))
    tell_chunk_ends(caches, TOKENS % 7 == 0)
    model(TOKENS, caches)
    if done:
        compress(model, TOKENS, caches)
    untouched = copied(caches)
    for B in (1, 3):
        with pytest.raises(ValueError, match=f"{B} texts .* holds? 2"):
            model(torch.ones(B, 1, dtype=torch.int64), caches)
    with pytest.raises(ValueError, match="have seen 40 tokens, but the prompt has 9"):
        compress(model, TOKENS[:, :9], caches)
    for token in TOKENS[:, :3].split(1, 1):
        assert torch.equal(model(token, caches), model(token, untouched))


@torch.no_grad()
def test_each_layer_has_a_cache_in_step_with_the_others(model):
    caches = make_cache(model)
    model(TOKENS[:, :5], caches)
    for wrong, message in (
        (caches[:1], "2 layers need a cache each; the list has 1"),
        ([caches[0], LayerCache()], "seen 0 to 5 tokens and must agree"),
    ):
        with pytest.raises(ValueError, match=message):
            model(TOKENS[:, :1], wrong)
    assert caches[0].seen == caches[0].length == 5


# 2 texts, 2 key/value heads, 4 query heads, 3 tokens, head dim 8
Q, K, POS = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 3, 8), torch.arange(3)[None]
SHAPES = "q, k and v of shapes"
SLOTS = torch.zeros(2, 2, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    "call, tensors, message",
    [
        ("attend", (Q, K, torch.zeros(2, 2, 4, 8), POS), SHAPES),
        *(
            ("attend", (q, K, K, POS), SHAPES)
            for q in (Q[:, :, :2], Q[:, :3], Q[..., :6])
        ),
        (
            "attend",
            (Q[:, :, :0], K[:, :, :0], K[:, :, :0], POS[:, :0]),
            "with T at least 1",
        ),
        (
            "attend",
            (Q, K, K, POS[:, :2]),
            r"pos of shape \(1, 2\) must be \(2 or 1, 3\)",
        ),
        ("attend", (Q, K, K, POS.float()), "and not torch.float32"),
        (
            "attend",
            (Q[:, :2], K[:, :1], K[:, :1], POS),
            "2 texts of 1 heads do not fit .* 2 texts of 2 heads",
        ),
        ("keep", (SLOTS[:1],), r"\(1, 2, 1\) must be an int64 tensor \(2, 2, n\)"),
        ("keep", (SLOTS + 3,), "slot 3 does not exist; .* in 0 … 2"),
        (
            "shrink",
            (torch.zeros(2, 4, 3), 2),
            r"scores \(2, 4, 3\) must be \(2, 2, 3\)",
        ),
        (
            "shrink",
            (torch.zeros(2, 2, 3) / torch.tensor([1, 0, 1]), 1),
            "4 of 12 scores are NaN; give",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(
    call, tensors, message
):
    cache = LayerCache()
    cache.attend(Q, K, K, POS)
    with pytest.raises(ValueError, match=message):
        getattr(cache, call)(*tensors)
    assert cache.seen == cache.length == 3


@pytest.mark.parametrize("name", METHODS)
def test_an_option_of_another_type_is_refused_by_name(model, name):
    Method = METHODS[name]
    for option in [option.name for option in fields(Method)]:
        if (kind := get_type_hints(Method)[option]) in (int, float, bool):
            for x in (
                [float("nan"), "12", None]
                + [True] * (kind is not bool)
                + [2.5] * (kind is int)
            ):
                with pytest.raises(ValueError, match=f"{option} .*must be"):
                    make_cache(model, Method, **given(Method, **OPTIONS) | {option: x})


def test_a_class_that_declares_wrongly_is_told(model):
    class Plain(ScoredCache):
        share: int = 3

    with pytest.raises(
        ValueError, match="Plain declares share but is not a dataclass; put @dataclass"
    ):
        make_cache(model, Plain, budget=3)
    assert len(make_cache(model, dataclass(eq=False)(Plain), budget=3)) == 2
    with pytest.raises(
        ValueError, match="'unknown'; a method's options are its dataclass fields"
    ):
        make_cache(model, Plain, unknown=3)
    with pytest.raises(ValueError, match="watch of Watching -1 must be a whole number"):
        make_cache(
            model, dataclass(eq=False)(type("Watching", (LayerCache,), {"watch": -1}))
        )
