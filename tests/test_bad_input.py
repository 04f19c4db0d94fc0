"""What a user can get wrong with a cache is one line, said before anything is written, for every method."""
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import ClassVar, get_type_hints

import pytest
import torch

from methods.sub_gen import SubGen, SubGen4Cache
from nanollm.__main__ import given, has_budget, methods
from nanollm.cache import ALL, LayerCache, finish_prompt, make_cache
from nanollm.model import Config, Decoder

BUDGET = 24
METHODS = {name: Method for name, Method in methods()[0].items() if isinstance(Method, type)}
ENDS = torch.arange(50) % 7 == 0


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    decoder = Decoder(Config(vocab_size=50, max_len=128, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=32))
    for p in decoder.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return decoder.eval()


def caches_of(model, name):
    Method = METHODS[name]
    return make_cache(model, Method, **given(Method, budget=BUDGET, window=4, ends=ENDS))


def texts(B, T, seed):
    return torch.randint(0, 50, (B, T), generator=torch.Generator().manual_seed(seed))


def one_line(error) -> str:
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    return str(error.value)


# ---- a refused call leaves everything as it was ---


@torch.no_grad()
@pytest.mark.parametrize("done", [False, True], ids=["prompt", "decoding"])
@pytest.mark.parametrize("name", METHODS)
def test_another_batch_is_refused_and_the_text_goes_on_as_if_nothing_had_been_said(model, name, done):
    caches = caches_of(model, name)
    model(texts(2, 40, 0), caches)
    if done:
        finish_prompt(caches)
    shared = {id(x): x for cache in caches for x in (cache.w_o, cache.freq)}
    untouched = deepcopy(caches, shared)
    for B in (1, 3):
        with pytest.raises(ValueError, match=f"{B} texts .* holds? 2") as error:
            model(texts(B, 1, 1), caches)
        one_line(error)
    if not done:
        finish_prompt(caches), finish_prompt(untouched)
    for token in texts(2, 3, 2).split(1, 1):
        assert torch.equal(model(token, caches), model(token, untouched))


@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
def test_saying_twice_that_the_prompt_is_over_is_refused_or_harmless(model, name):
    caches = caches_of(model, name)
    model(texts(1, 40, 0), caches)
    finish_prompt(caches)
    slots = [cache.pos.sort(-1).values for cache in caches]
    try:
        finish_prompt(caches)
    except ValueError as error:
        assert "the prompt is over" in str(error)
    assert all(torch.equal(cache.pos.sort(-1).values, before) for cache, before in zip(caches, slots))


@torch.no_grad()
@pytest.mark.parametrize("spoil, message", [
    (lambda caches: [caches[0]] * 2, "2 layers need a cache each, not 2 of which 1 differ; use make_cache"),
    (lambda caches: caches[:1], "2 layers need a cache each, not 1"),
    (lambda caches: [*caches, LayerCache()], "2 layers need a cache each, not 3"),
    (lambda caches: [], "2 layers need a cache each, not 0"),
    (lambda caches: [caches[0], LayerCache()], "seen 0 to 5 tokens and must agree")])
def test_each_layer_has_a_cache_of_its_own_in_step_with_the_others(model, spoil, message):
    caches = make_cache(model)
    model(texts(1, 5, 0), caches)
    with pytest.raises(ValueError, match=message):
        model(texts(1, 1, 0), spoil(caches))
    assert caches[0].seen == caches[0].length == 5


# q, k, v, pos: 2 texts, 2 key/value heads, 4 query heads, 3 tokens, head dim 8
@pytest.mark.parametrize("shapes, message", [
    (((2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 4, 8), (1, 3)), "q, k and v of shapes"),
    (((2, 4, 2, 8), (2, 2, 3, 8), (2, 2, 3, 8), (1, 3)), "q, k and v of shapes"),
    (((2, 3, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8), (1, 3)), "q, k and v of shapes"),
    (((1, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8), (1, 3)), "q, k and v of shapes"),
    (((2, 4, 8), (2, 2, 8), (2, 2, 8), (1, 3)), "q, k and v of shapes"),
    (((2, 4, 0, 8), (2, 2, 0, 8), (2, 2, 0, 8), (1, 0)), "with T at least 1"),
    (((2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8), (3, 3)), r"pos of shape \(3, 3\) must be \(2 or 1, 3\)"),
    (((2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8), (1, 2)), r"pos of shape \(1, 2\)"),
    (((2, 2, 3, 8), (2, 1, 3, 8), (2, 1, 3, 8), (1, 3)), "2 texts of 1 heads come to a cache that holds 2 of 2")])
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(shapes, message):
    cache = LayerCache()
    cache.attend(*map(torch.zeros, ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))), torch.arange(5)[None])
    q, k, v, pos = map(torch.zeros, shapes)
    with pytest.raises(ValueError, match=message) as error:
        cache.attend(q, k, v, pos.long())
    one_line(error)
    assert cache.seen == cache.length == 5


HALF, RIGHT = torch.zeros(2, 4, 3, 8).half(), (*map(torch.zeros, ((2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8))), torch.arange(3)[None])


@pytest.mark.parametrize("at, x, message", [
    (0, HALF, "must be of one floating dtype on one device"), (1, HALF[:, :2], "must be of one floating dtype"),
    (0, RIGHT[0].to("meta"), "torch.float32 on meta, torch.float32 on cpu"), (0, None, "q, k, v and pos must be tensors"),
    (0, torch.zeros(2, 4, 3, 6), "q, k and v of shapes"), (0, torch.zeros(2, 0, 3, 8), "q, k and v of shapes"),
    (3, torch.arange(3.)[None], "whole numbers and not torch.float32"), (3, [[0, 1, 2]], "must be tensors")])
def test_tensors_of_another_kind_are_refused_before_anything_is_written(at, x, message):
    cache = LayerCache()
    with pytest.raises(ValueError, match=message) as error:
        cache.attend(*RIGHT[:at], x, *RIGHT[at + 1:])
    one_line(error)
    assert not cache.slots


@pytest.mark.parametrize("caches", [3, "ab", LayerCache(), [None, None], [LayerCache, LayerCache]])
def test_what_are_no_caches_is_refused(model, caches):
    with pytest.raises(ValueError, match="is no list of caches; use make_cache"):
        model(texts(1, 1, 0), caches)


def test_ends_of_another_vocabulary_are_refused(model):
    caches = make_cache(model, METHODS["chunk_kv_semantic"], budget=BUDGET, window=4, ends=ENDS[:5])
    with pytest.raises(ValueError, match="token 49 lies beyond the 5 of ends; give tokenizer.boundaries"):
        model(torch.tensor([[3, 49]]), caches)


@pytest.mark.parametrize("i, message", [
    ([[0]], "slots to keep are a list; give an int64 tensor"), (torch.zeros(1, 2, 3, dtype=torch.int64), r"of shape \(1, 2, 3\), torch.int64, must be \(2, 2, n\)"),
    (torch.zeros(2, 1, 3, dtype=torch.int64), "must be"), (torch.zeros(2, 2, dtype=torch.int64), "must be"),
    (torch.zeros(2, 2, 3), "torch.float32, must be"), (torch.full((2, 2, 1), 5), "slot 5 is to be kept, but there are 5")])
def test_keep_refuses_slots_that_are_not_there(i, message):
    cache = LayerCache()
    cache.attend(*map(torch.zeros, ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))), torch.arange(5)[None])
    with pytest.raises(ValueError, match=message):
        cache.keep(i)
    assert cache.length == 5


# ---- knobs ---


@pytest.mark.parametrize("name", [name for name in METHODS if name != "full"])
def test_a_knob_of_another_type_is_refused_by_name(model, name):
    Method, hints = METHODS[name], get_type_hints(METHODS[name])
    right = given(Method, budget=BUDGET, window=4, ends=ENDS)
    for knob in fields(Method):
        wrong = [float("nan"), "12", [4], {}] + [True] * (hints[knob.name] is not bool) + [2.5] * (hints[knob.name] is int)
        for x in wrong:
            if isinstance(x, hints[knob.name] if isinstance(hints[knob.name], type) else ()) and x == x:
                continue  # a string where one is wanted, which the method itself looks at
            with pytest.raises(ValueError, match=f"{knob.name} .*must be") as error:
                make_cache(model, Method, **right | {knob.name: x})
            one_line(error)


@pytest.mark.parametrize("Method, knobs", [
    *((METHODS[name], dict(budget=BUDGET)) for name in ("random", "cam", "kv_reviver")),
    (SubGen, dict(radius=1.0, samples=1, draws=1)), (SubGen4Cache, dict(radius=1.0, samples=1, draws=1))])
def test_a_seed_is_one_for_every_layer_or_refused_before_it_is_used(Method, knobs):
    for seed in (-1, 2 ** 62, 10 ** 30):
        with pytest.raises(ValueError, match="seed .*must be") as error:
            Method(seed=seed, **knobs)
        one_line(error)
    torch.Generator().manual_seed(1000 * Method(seed=2 ** 63 // 1000 - 1, **knobs).seed + 99)


@pytest.mark.parametrize("shares", [(10.0, 10.0), (-1.0, 2.0), ()])
def test_shares_of_all_budgets_add_up_to_one(model, shares):
    with pytest.raises(ValueError, match="shares .* of all budgets together must be at least 0 and add up to 1"):
        make_cache(model, METHODS["kv_reviver"], budget=BUDGET, shares=shares)


def test_whole_numbers_of_numpy_and_for_floats_are_welcome(model):
    import numpy as np
    cache, _ = make_cache(model, METHODS["h2o"], budget=np.int64(9), recent=1)
    assert cache.budget == 9


@pytest.mark.parametrize("watch", [True, -1, 2.0, None, "all"])
def test_watch_is_a_number_of_queries(model, watch):
    Watching = dataclass(eq=False)(type("Watching", (LayerCache,), {"watch": watch}))
    with pytest.raises(ValueError, match=f"watch {watch!r} of Watching must be a number of queries"):
        make_cache(model, Watching)
    Watching.watch = ALL
    assert len(make_cache(model, Watching)) == 2


def test_a_class_that_is_no_dataclass_is_told_so(model):
    class Plain(LayerCache):
        budget: int = 3
        shared: ClassVar[int] = 4

    with pytest.raises(ValueError, match="Plain declares budget but is no dataclass; put @dataclass"):
        make_cache(model, Plain)
    assert has_budget(dataclass(eq=False)(Plain)) and len(make_cache(model, dataclass(eq=False)(Plain))) == 2


def test_a_class_that_forgets_to_begin_as_its_base_does_is_told_so(model):
    @dataclass(eq=False)
    class Forgetful(LayerCache):
        def __post_init__(self):
            self.score = 0

    with pytest.raises(ValueError, match="__post_init__ of Forgetful must begin with super"):
        make_cache(model, Forgetful)
