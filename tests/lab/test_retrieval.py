"""Questions are answered as by a loop, on a decoder whose answers are partly right."""

import math

import pytest
import torch

from common import reading_within, tasks
from lab.retrieval import answers, budget_for, maker, retrieve
from methods.baselines.h2o import H2O
from methods.baselines.snap_kv import SnapKV
from methods.baselines.rounded import RoundedSlots
from nanollm import TINY
from nanollm.cache import Method, compress, crop, make_cache
from nanollm.checkpoint import from_hf
from nanollm.model import Decoder


def needles(documents=2, T=200, **options):
    return tasks("test").batch("needle", 0, documents, T, **options)


# ---- the caches to measure ----


def test_a_budget_is_a_share_of_the_tokens_it_is_made_for(model):
    make = maker(model, SnapKV, 0.25, RoundedSlots, window_size=8)
    assert budget_for(0.25, 203) == 51
    for tokens, budget in (100, 25), (203, 51):
        layer, *_ = make(tokens)
        assert layer.method == SnapKV(budget, window_size=8)
        assert isinstance(layer, RoundedSlots)
    with pytest.raises(ValueError, match="budget 0 must be at least 1"):
        maker(model, H2O, 0.01)(20)


@pytest.mark.parametrize("keep_ratio", [0, 1.01, math.nan, "0.5"])
def test_a_keep_ratio_is_a_share(model, keep_ratio):
    with pytest.raises(
        ValueError, match="keep_ratio .* of the prompt must lie above 0"
    ):
        maker(model, H2O, keep_ratio)


def test_caches_that_read_within_room_for_all_answer_as_the_full_cache(model):
    batch = needles(T=320)
    full = retrieve(model, batch, maker(model, Method, None))
    roomy = reading_within(maker(model, H2O, 1.0))
    found = retrieve(model, batch, roomy, chunk_size=7)
    assert all(found[setting].equal(x) for setting, x in full.items())


# ---- answers ----


def right_by_a_loop(caches, model, batch, row, cut):
    """Return the share of a row's answers that are right; the first `cut` tokens are compressed.

    All others come one by one. An answer that was given stays, right or wrong; then come the true
    tokens up to the next one.
    """
    tokens = torch.from_numpy(batch.tokens[row : row + 1])
    aware = cut > batch.question  # the last token is forgotten and fed again
    model(tokens[:, : cut + aware], caches)
    crop(caches, cut)
    compress(model, tokens[:, :cut], caches)
    exact = []
    fed = cut
    for span in batch.answers:
        for t in range(fed, span.start):
            logits = model(tokens[:, t : t + 1], caches)
        right = []
        for t in range(span.start, span.stop):
            said = logits.argmax(-1)
            right.append(said.item() == tokens[0, t])
            logits = model(said, caches)
        exact.append(all(right))
        fed = span.stop
    return sum(exact) / len(exact)


@torch.inference_mode()
def test_each_of_several_questions_comes_after_the_answer_given_before():
    batch = needles(6, questions=3, numbers=2)
    model = from_hf(TINY)
    make = maker(model, SnapKV, 0.4, window_size=8)
    found = retrieve(model, batch, make)
    cuts = dict(aware=batch.answers[0].start - 1, agnostic=batch.question)
    for setting, cut in cuts.items():
        for row, share in enumerate(found[setting].tolist()):
            caches = make(batch.question)
            right = right_by_a_loop(caches, model, batch, row, cut)
            assert share == pytest.approx(right)
        assert 0 < found[setting].mean() < 1
        (alone,) = retrieve(model, batch, make, settings=(setting,)).values()
        assert alone.equal(found[setting])


def test_the_decoder_reads_its_own_wrong_answer_and_not_the_right_one(model):
    batch = needles(questions=2)
    tokens = torch.from_numpy(batch.tokens)
    read = []

    def reader(part, caches, **options):
        read.append(part)
        return model(part, caches, **options)

    first, second = batch.answers
    fed = batch.question
    said = answers(reader, tokens, batch.answers, fed, make_cache(model))
    between = tokens[:, first.stop : second.start]
    parts = tokens[:, fed : first.start], said[0], between, said[1][:, :-1]
    assert torch.cat(read, 1).equal(torch.cat(parts, 1))


@pytest.mark.parametrize(
    "task, T, message",
    [("needle", 520, "520 prompt .* exceed"), ("plain", 320, "no question; take a")],
)
def test_what_cannot_be_answered_is_refused_before_any_work(
    model, monkeypatch, task, T, message
):
    monkeypatch.setattr(Decoder, "forward", None)
    with pytest.raises(ValueError, match=message) as error:
        retrieve(model, tasks("test").batch(task, 0, 2, T), None)
    assert "\n" not in str(error.value)
