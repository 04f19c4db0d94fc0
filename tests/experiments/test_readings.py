"""Readings of the papers beside the first ones: CaM at the prompt's end, what each label stands for."""
import json

import pytest
import torch

from common import TOKENS, decoder
from experiments.readings import (LONG, READINGS, EndCaM, HeadByHead, MeanAttention, NoCovariance, NoFloor,
                                  NoNorms, show, summary)
from methods.defensive_kv import DefensiveKV
from methods.h2o import H2O
from methods.kv_reviver_mean import MeanReviver
from methods.moment_kv import MomentKV
from methods.ours.scissorhands_weight import MeanWeight
from methods.theory.persistence_measured import Padded, Rate
from nanollm.cache import NEVER, cache_bytes, end_prefill, make_cache


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


@torch.inference_mode()
def test_what_each_row_of_defensive_kv_and_moment_kv_leaves_out(budget=20):
    rows = torch.rand(2, 2, 3, 4, 40)
    risk = lambda Method: Method(budget, window_size=4, kernel_size=1).risk(rows)
    highest, mean = rows.amax((2, 3)), rows.mean((2, 3))
    assert torch.equal(risk(NoFloor), highest)
    assert torch.equal(risk(DefensiveKV), highest.clamp(min=highest.mean(-1, keepdim=True)))
    assert torch.allclose(risk(MeanAttention), mean.clamp(min=mean.mean(-1, keepdim=True)))
    model, found = decoder(), {}
    few = dict(window_size=4, mass=0)
    for Method in DefensiveKV, NoNorms, HeadByHead, MomentKV, NoCovariance:
        options = few if issubclass(Method, DefensiveKV) else {}
        found[Method] = make_cache(model, Method, budget=budget, **options)
        model(TOKENS, found[Method])
        end_prefill(found[Method])
    held = {Method: [(cache.pos != NEVER).sum(2) for cache in caches] for Method, caches in found.items()}
    assert all((n == budget).all() for n in held[HeadByHead])
    assert all((n.sum(1) == 2 * budget).all() for n in held[DefensiveKV])
    assert not all(torch.equal(*x) for x in zip(held[DefensiveKV], held[NoNorms]))
    for cache, other in zip(found[MomentKV][:1], found[NoCovariance]):
        assert cache.moments["C"].any() and not other.moments["C"].any()
        assert all(torch.equal(cache.moments[name], other.moments[name]) for name in "kv")


def test_changes_are_paired_with_the_first_reading():
    found = {"first": dict(KL=torch.tensor([1.0, 2.0, 3.0]), most=6.0, last=5.0),
             "other": dict(KL=torch.tensor([2.0, 3.0, 4.5]), most=4.0, last=3.0)}
    first, other = json.loads(json.dumps(summary("group", found)))
    assert first["means"]["KL"] == pytest.approx([2, 1 / 3 ** 0.5]) and first["changes"] == {}
    assert other["changes"]["KL"] == pytest.approx([3.5 / 3, 1 / 6]) and other["kib"] == [4, 3]
    assert "+1.167 ± 0.167" in show([dict(decoder="built") | row for row in (first, other)])


NAMED = {Rate: "rate", Padded: "absent step", MeanWeight: "mean weight", MeanReviver: "means of slots",
         MeanAttention: "mean attention", NoFloor: "raised", NoNorms: "no norms",
         HeadByHead: "each head alone", NoCovariance: "no covariance"}


@torch.inference_mode()
@pytest.mark.parametrize("title", READINGS)
def test_the_caches_of_a_group_are_what_their_labels_say(title, budget=36, T=39):
    model, held = decoder(), {}
    for label, (Method, options) in READINGS[title].items():
        options = {option: x for option, x in options.items() if option != "tilt"}
        caches = make_cache(model, Method, budget=budget, **options)
        for part in TOKENS[:, :T].split(13, 1):
            model(part, caches)
        read = caches[0].length
        end_prefill(caches)
        left = torch.stack([(cache.pos != NEVER).float().mean((0, 1)).sum() for cache in caches]).mean()
        held[label] = read, left.item(), type(caches[0]), getattr(caches[0], "history", None)
    assert len({str(x) for x in READINGS[title].values()}) == len(READINGS[title]) > 1
    for label, (read, left, Method, history) in held.items():
        assert left <= budget and history == (50 if "w = 50" in label else history)
        if title == "CaM":
            assert read == (T if "at the prompt's end" in label else budget)
        if title == "ChunkKV":
            assert (left < budget) == ("empty" in label)
        assert [Kind for Kind, name in NAMED.items() if name in label] == [Method] * (Method in NAMED)
    assert [name for name, how in LONG.items() if not how] == ["SnapKV"]  # what others differ from
