"""Readings of the papers beside the first ones: CaM at the prompt's end, and the lines of the table."""
from types import SimpleNamespace

import pytest
import torch

from common import TOKENS, decoder
from experiments import readings
from experiments.readings import LONG, READINGS, EndCaM, show
from methods.h2o import H2O
from methods.kv_reviver_mean import MeanReviver
from methods.ours.scissorhands_weight import MeanWeight
from methods.theory.persistence_measured import Padded, Rate
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


NAMED = {Rate: "rate", Padded: "absent step", MeanWeight: "mean weight", MeanReviver: "means of slots"}


@torch.inference_mode()
@pytest.mark.parametrize("title", READINGS)
def test_the_caches_of_a_group_are_what_their_labels_say(title, budget=36, T=39):
    model, held = decoder(), {}
    for label, (Method, knobs) in READINGS[title].items():
        knobs = {knob: x for knob, x in knobs.items() if knob != "tilt"}
        caches = make_cache(model, Method, budget=budget, **knobs)
        for part in TOKENS[:, :T].split(13, 1):
            model(part, caches)
        read = caches[0].length
        end_prefill(caches)
        held[label] = read, caches[0].length, type(caches[0]), getattr(caches[0], "history", None)
    assert len({str(x) for x in READINGS[title].values()}) == len(READINGS[title]) > 1
    for label, (read, left, Method, history) in held.items():
        assert left <= budget and history == (50 if "w = 50" in label else history)
        if title == "CaM":
            assert read == (T if "at the prompt's end" in label else budget)
        if title == "ChunkKV":
            assert (left < budget) == ("empty" in label)
        assert [Kind for Kind, name in NAMED.items() if name in label] == [Method] * (Method in NAMED)
    assert [name for name, how in LONG.items() if not how] == ["SnapKV"]  # what others differ from


def test_a_reading_is_measured_aware_with_its_budget_or_one_that_rises_by_layer(monkeypatch):
    monkeypatch.setattr(readings, "right_answers", lambda model, bench, make: dict(
        aware=torch.tensor([[1.0], [0.0]]), blind=torch.tensor([[0.0], [0.0]])))
    monkeypatch.setattr(readings, "replayed_or_read", lambda measure, model, full, make, recording: dict(
        kl=[cache.budget for cache in make(160)]))
    rows = {label: readings.measured(decoder(), None, SimpleNamespace(recording=None), Method, 0.25, **knobs)
            for label, (Method, knobs) in READINGS["Scissorhands"].items()}
    assert all(row["answers"].tolist() == [1, 0] for row in rows.values())
    later, lower = (rows.pop(f"{which} layers more")["KL"] for which in ("later", "lower"))
    assert later == lower[::-1] == [28, 40, 52] and all(row["KL"] == [40] * 3 for row in rows.values())


def test_groups_show_what_was_measured_under_its_name(monkeypatch):
    row = dict(answers=torch.tensor([1.0]), L=torch.tensor([2.0]), kl=torch.tensor([3.0]))
    monkeypatch.setattr(readings, "READINGS", {"title": {"label": ("Method", dict(knob=1))}})
    monkeypatch.setattr(readings, "measured", lambda model, bench, full, *asked, **knobs: (asked, knobs))
    for name, x in dict(reference=None, text_windows=None, long_answer=dict(kl=row["kl"], most=6.0, last=5.0),
                        one_knob_at_a_time=dict.fromkeys(["critical, a", "critical_code, b"], row)).items():
        monkeypatch.setattr(readings, name, lambda *_, x=x, **knobs: x)
    monkeypatch.setattr(readings.Benchmark, "build", lambda *_, **__: None)
    own, (_, paper), (_, code), (title, rows) = readings.groups(None, SimpleNamespace(batch=lambda *_: None))
    assert own == ("title", {"label": (("Method", 0.25), dict(knob=1))})
    assert paper == {"a": dict(answers=1, KL=3, L=2)} and code == {"b": paper["a"]}
    assert title.endswith("KiB at most, at the end: " + ", ".join(f"{name} 6, 5" for name in LONG))
    assert rows == dict.fromkeys(LONG, dict(kl=3))
