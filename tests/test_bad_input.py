"""What a user can get wrong with a cache is one line, said before anything is written, for every method."""
from dataclasses import dataclass, fields
from typing import ClassVar, get_type_hints

import numpy as np
import pytest
import torch

from common import TOKENS, decoder
from methods.sub_gen import SubGen, SubGen4Cache
from nanollm.cache import LayerCache, copied, make_cache
from nanollm.commands.registry import given, has_budget, methods
from nanollm.generate import end_prompt, tell_chunk_ends

BUDGET, OPTIONS = 24, dict(budget=np.int64(24), window_size=4)  # NumPy's whole numbers are some
METHODS, ADDITIONS = ({name: x for name, x in found.items() if isinstance(x, type | dict)}
                      for found in methods()[:2])
ENDS = torch.arange(50) % 7 == 0


@pytest.fixture(scope="module")
def model():
    return decoder(n_layers=2, max_len=128)


def one_line(error) -> str:
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    return str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("done", [False, True], ids=["prompt", "decoding"])
@pytest.mark.parametrize("name", METHODS)
def test_another_batch_and_a_second_end_of_the_prompt_change_nothing(model, name, done):
    Method = METHODS[name]
    caches = make_cache(model, Method, **given(Method, **OPTIONS))
    tell_chunk_ends(caches, ENDS[TOKENS])
    model(TOKENS, caches)
    if done:
        end_prompt(model, TOKENS, caches)
    untouched = copied(caches)
    for B in (1, 3):
        with pytest.raises(ValueError, match=f"{B} texts .* holds? 2") as error:
            model(torch.ones(B, 1, dtype=torch.int64), caches)
        one_line(error)
    if not done:
        end_prompt(model, TOKENS, untouched)
    try:
        end_prompt(model, TOKENS, caches)
    except ValueError as error:
        assert done and "already" in str(error)
    for token in TOKENS[:, :3].split(1, 1):
        assert torch.equal(model(token, caches), model(token, untouched))


@torch.no_grad()
@pytest.mark.parametrize("name", ["full", "kvzip"])
def test_the_prompt_that_ends_is_the_one_that_was_read(model, name):
    caches = make_cache(model, METHODS[name], **given(METHODS[name], **OPTIONS))
    model(TOKENS, caches)
    with pytest.raises(ValueError, match="have seen .* tokens, but the prompt has 9") as error:
        end_prompt(model, TOKENS[:, :9], caches)
    one_line(error)
    assert not caches[0].prompt_done


@torch.no_grad()
@pytest.mark.parametrize("spoil, message", [
    (lambda caches: [caches[0]] * 2, "2 layers need a cache each; the list has 2, 1 of them different; use"),
    (lambda caches: caches[:1], "2 layers need a cache each; the list has 1"),
    (lambda caches: [caches[0], LayerCache()], "seen 0 to 5 tokens and must agree"),
    *((lambda caches, x=x: x, "is not a list of caches; use make_cache")
      for x in (LayerCache(), [LayerCache, LayerCache]))])
def test_each_layer_has_a_cache_of_its_own_in_step_with_the_others(model, spoil, message):
    caches = make_cache(model)
    model(TOKENS[:, :5], caches)
    with pytest.raises(ValueError, match=message):
        model(TOKENS[:, :1], spoil(caches))
    assert caches[0].seen == caches[0].length == 5


# 2 texts, 2 key/value heads, 4 query heads, 3 tokens, head dim 8
Q, K, POS = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 3, 8), torch.arange(3)[None]
SHAPES = "q, k and v of shapes"
NO_INDEX = torch.zeros(2, 2, dtype=torch.int64)


@pytest.mark.parametrize("call, tensors, message", [
    ("attend", (Q, K, torch.zeros(2, 2, 4, 8), POS), SHAPES),
    *(("attend", (q, K, K, POS), SHAPES) for q in (Q[:, :, :2], Q[:, :3], Q[..., :6])),
    ("attend", (Q[:, :, :0], K[:, :, :0], K[:, :, :0], POS[:, :0]), "with T at least 1"),
    ("attend", (Q, K, K, POS[:, :2]), r"pos of shape \(1, 2\) must be \(2 or 1, 3\)"),
    ("attend", (Q, K, K, POS.float()), "and not torch.float32"),
    ("attend", (Q[:, :2], K[:, :1], K[:, :1], POS), "2 texts of 1 heads do not fit .* 2 texts of 2 heads"),
    ("attend", (Q.half(), K, K, POS), "must be of one floating dtype on one device"),
    ("attend", (None, K, K, POS), "q, k, v and pos must be"),
    ("keep", ([[0]],), r"slots to keep \[\[0\]\] must be an int64 tensor"),
    ("keep", (NO_INDEX[:1, :, None],), r"\(1, 2, 1\), torch.int64, must be an int64 tensor \(2, 2, n\)"),
    ("keep", (NO_INDEX[..., None].float(),), "torch.float32, must be"),
    ("keep", (NO_INDEX[..., None] + 3,), "slot 3 does not exist; .* in 0 … 2"),
    ("shrink", (torch.zeros(2, 4, 3), 2), r"scores \(2, 4, 3\) must be a tensor \(2, 2, 3\)"),
    ("shrink", (torch.zeros(2, 2, 3) / torch.tensor([1, 0, 1]), 1), "4 of 12 scores are NaN; give")])
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(call, tensors, message):
    cache = LayerCache()
    cache.attend(Q, K, K, POS)
    with pytest.raises(ValueError, match=message) as error:
        getattr(cache, call)(*tensors)
    one_line(error)
    assert cache.seen == cache.length == 3


@pytest.mark.parametrize("name", [name for name in [*METHODS, *ADDITIONS] if name != "full"])
def test_an_option_of_another_type_is_refused_by_name(model, name):
    if name in METHODS:
        of, make = METHODS[name], lambda **option: make_cache(model, of, **given(of, **OPTIONS) | option)
    else:
        of = type(ADDITIONS[name]["select"])
        make = of
    for option in fields(of):
        kind = get_type_hints(of)[option.name]
        for x in [float("nan"), "12", [4], {}, ((0,),)] + [True] * (kind is not bool) + [2.5] * (kind is int):
            if kind is str and x == "12":
                continue  # which the method itself looks at
            with pytest.raises(ValueError, match=f"{option.name} .*must be") as error:
                make(**{option.name: x})
            one_line(error)


@pytest.mark.parametrize("Method, options", [
    *((METHODS[name], dict(budget=BUDGET)) for name in ("random", "cam", "kv_reviver")),
    (SubGen, dict(radius=1.0, samples=1, draws=1)), (SubGen4Cache, dict(radius=1.0, samples=1, draws=1))])
def test_a_seed_is_one_for_every_layer_or_refused_before_it_is_used(Method, options):
    for seed in (-1, 2 ** 62):
        with pytest.raises(ValueError, match="seed .*must be") as error:
            Method(seed=seed, **options)
        one_line(error)
    torch.Generator().manual_seed(1000 * Method(seed=2 ** 63 // 1000 - 1, **options).seed + 99)


@pytest.mark.parametrize("watch", [True, -1, 2.0])
def test_watch_is_a_number_of_queries(model, watch):
    Watching = dataclass(eq=False)(type("Watching", (LayerCache,), {"watch": watch}))
    with pytest.raises(ValueError, match=f"watch {watch!r} of Watching must be a number of queries"):
        make_cache(model, Watching)


def test_a_class_that_is_no_dataclass_or_does_not_begin_as_its_base_is_told(model):
    class Plain(LayerCache):
        budget: int = 3
        shared: ClassVar[int] = 4

    with pytest.raises(ValueError, match="Plain declares budget but is not a dataclass; put @dataclass"):
        make_cache(model, Plain)
    assert has_budget(dataclass(eq=False)(Plain)) and len(make_cache(model, dataclass(eq=False)(Plain))) == 2
    Plain.__post_init__ = lambda self: None
    with pytest.raises(ValueError, match="__post_init__ of Plain must begin with super"):
        make_cache(model, Plain)
