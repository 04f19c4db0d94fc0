"""What a user or an author of a method gets wrong is refused before anything is written."""

from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest
import torch

from common import TOKENS, caches_of, decoder
from lab.methods_by_name import pick
from methods.baselines.snap_kv import SnapKV
from methods.critical_kv import Critical
from nanollm.cache import Slots, compress, copied, make_cache

VARIANTS = {name: x for name, x in pick([]).items() if not x.options}


@pytest.fixture(scope="module")
def model():
    return decoder(n_layers=2, max_len=128)


def new_caches(model, name, **changed):
    """Return caches with those options that the method takes; budget is a NumPy number."""
    small = dict(budget=np.int64(24), window_size=4)
    return caches_of(model, VARIANTS[name], **small | changed)


@torch.no_grad()
@pytest.mark.parametrize("done", [False, True], ids=["prompt", "decoding"])
@pytest.mark.parametrize("name", VARIANTS)
def test_another_batch_and_another_prompt_change_nothing(model, name, done):
    caches = new_caches(model, name)
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
    for wrong, message in ((caches[:1], "2 layers need a cache each; the list has 1"),):
        with pytest.raises(ValueError, match=message):
            model(TOKENS[:, :1], wrong)
    assert caches[0].seen == caches[0].length == 5


# 2 texts, 2 key/value heads, 4 query heads, 3 tokens, head dim 8
Q = torch.zeros(2, 4, 3, 8)
K = torch.zeros(2, 2, 3, 8)
POS = torch.arange(3)[None]
ONE_HEAD = Q[:, :2], K[:, :1], K[:, :1], POS
SLOTS = torch.zeros(2, 2, 1, dtype=torch.int64)
NAN = torch.zeros(2, 2, 3) / torch.tensor([1, 0, 1])


@pytest.mark.parametrize(
    "call, tensors, message",
    [
        ("attend", ONE_HEAD, "2 texts of 1 heads do not fit .* 2 texts of 2 heads"),
        ("keep", (SLOTS[:1],), r"\(1, 2, 1\) must be an int64 tensor \(2, 2, n\)"),
        ("keep", (SLOTS + 3,), "slot 3 does not exist; .* in 0 … 2"),
        (
            "shrink",
            (torch.zeros(2, 4, 3), 2),
            r"scores \(2, 4, 3\) must be \(2, 2, 3\)",
        ),
        ("shrink", (NAN, 1), "4 of 12 scores are NaN; give"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(
    call, tensors, message
):
    layer = Slots()
    layer.attend(Q, K, K, POS)
    with pytest.raises(ValueError, match=message):
        getattr(layer, call)(*tensors)
    assert layer.seen == layer.length == 3


@pytest.mark.parametrize("name", VARIANTS)
def test_an_option_of_another_type_is_refused_by_name(model, name):
    kind = VARIANTS[name].kind
    for option in [field.name for field in fields(kind)]:
        wrong = {int: [True, 2.5], float: [True], bool: []}
        hint = get_type_hints(kind)[option]
        if hint in wrong:
            for x in [float("nan"), "12", None, *wrong[hint]]:
                with pytest.raises(ValueError, match=f"{option} .*must be"):
                    new_caches(model, name, **{option: x})


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(budgt=64), "SnapKV has no option 'budgt'; did you mean 'budget'"),
        (dict(zzz=1), "SnapKV has no option 'zzz'; known are budget, window_size"),
        (dict(), "SnapKV needs the option 'budget'"),
        (dict(budget=64, select=Critical), "select .* of SnapKV must be Selection"),
    ],
)
def test_unknown_and_missing_options_are_told(model, options, message):
    with pytest.raises(ValueError, match=message):
        make_cache(model, SnapKV, **options)
