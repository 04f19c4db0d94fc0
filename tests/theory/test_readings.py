"""Readings of the papers beside the first ones: CaM at the prompt's end, and the lines of the table."""
import pytest
import torch

from common import TOKENS, decoder
from methods.h2o import H2O
from methods.theory.readings import LONG, READINGS, EndCaM, show
from nanollm.cache import cache_bytes, end_prefill, make_cache


@torch.inference_mode()
def test_cam_at_the_prompts_end_keeps_what_h2o_keeps_and_its_budget_from_then_on(budget=12, T=35):
    model = decoder()
    cam, h2o = (make_cache(model, Method, budget=budget) for Method in (EndCaM, H2O))
    for caches in cam, h2o:
        for part in TOKENS[:, :T].split(8, 1):
            model(part, caches)
        assert all(cache.length == T for cache in caches)
        end_prefill(caches)
    for a, b in zip(cam, h2o):
        assert torch.equal(a.pos, b.pos) and torch.equal(a.k, b.k) and not torch.equal(a.v, b.v)
    for token in TOKENS[:, T:].unbind(1):
        model(token[:, None], cam)
        assert all(cache.length == budget for cache in cam)
    assert cache_bytes(cam)[0] <= cache_bytes(h2o)[0]


def test_a_line_has_means_and_paired_changes_against_the_first():
    rows = {"first": dict(KL=torch.tensor([1.0, 2.0, 3.0])), "other": dict(KL=torch.tensor([2.0, 3.0, 4.5]))}
    first, other = show(rows).splitlines()
    assert first.split() == ["first", "KL", "2.000", "±", "0.577"]
    assert other.split() == ["other", "KL", "3.167", "±", "0.726", "(+1.167", "±", "0.167)"]


@pytest.mark.parametrize("title", READINGS)
def test_every_group_compares_unlike_caches_of_one_model(title):
    model = decoder()
    for Method, knobs in READINGS[title].values():
        make_cache(model, Method, budget=48, **{knob: x for knob, x in knobs.items() if knob != "tilt"})
    assert len({str(x) for x in READINGS[title].values()}) == len(READINGS[title]) > 1
    assert [name for name, how in LONG.items() if not how] == ["SnapKV"]  # what others differ from
