"""Questions are answered as by a loop, on a decoder whose answers are partly right."""

import math

import pytest
import torch

from common import decoder, tasks
from lab import retrieval
from lab.replay import feed
from lab.retrieval import (
    budget_for,
    maker,
    prompt_and_question,
    reading_within,
    retrieve,
)
from methods.baselines.h2o import H2O
from methods.baselines.snap_kv import SnapKV
from nanollm import TINY
from nanollm.cache import Method, compress, crop, make_cache
from nanollm.checkpoint import from_hf
from nanollm.model import Decoder
from nanollm.rounded import RoundedSlots


@pytest.fixture(scope="module")
def model():
    size = dict(vocab_size=2048, max_len=512, n_layers=2, n_heads=4)
    return decoder(**size, d_model=32, d_ff=48)


def needles(documents=2, T=200, **options):
    return tasks("test").batch("needle", 0, documents, T, **options)


# ---- the caches to measure ----


def test_a_budget_is_a_share_of_the_tokens_it_is_made_for(model):
    make = maker(model, SnapKV, 0.25, window_size=8)
    assert [make(n)[0].method.budget for n in (100, 203)] == [25, 51]
    assert budget_for(0.25, 203) == 51
    method = make(100)[0].method
    assert (type(method), method.window_size) == (SnapKV, 8)


def test_a_store_may_be_chosen_with_and_without_a_budget(model):
    for kind, keep_ratio in ((Method, None), (SnapKV, 0.5)):
        layer, *_ = maker(model, kind, keep_ratio, RoundedSlots)(100)
        assert isinstance(layer, RoundedSlots)
        assert type(layer.method) is kind


@pytest.mark.parametrize("keep_ratio", [0, 1.01, math.nan, "0.5"])
def test_a_keep_ratio_is_a_share(model, keep_ratio):
    with pytest.raises(
        ValueError, match="keep_ratio .* of the prompt must lie above 0"
    ):
        maker(model, H2O, keep_ratio)


def test_a_share_of_few_tokens_may_be_no_budget(model):
    with pytest.raises(ValueError, match="budget 0 must be at least 1"):
        maker(model, H2O, 0.01)(20)


def test_caches_that_read_within_their_budget_never_hold_more(model):
    tokens = torch.from_numpy(needles().tokens)
    caches = reading_within(maker(model, H2O, 0.25))(80)
    assert [layer.method.budget for layer in caches] == [20, 20]
    with torch.no_grad():
        for part in tokens[:, :80].split(7, 1):
            model(part, caches)
            assert all(layer.length == min(layer.seen, 20) for layer in caches)


def test_caches_that_read_within_room_for_all_answer_as_the_full_cache(model):
    batch = needles(T=320)
    full = retrieve(model, batch, maker(model, Method, None))
    roomy = reading_within(maker(model, H2O, 1.0))
    found = retrieve(model, batch, roomy, chunk_size=7)
    assert all(found[setting].equal(x) for setting, x in full.items())


# ---- answers ----


def right_by_a_loop(model, make, batch, row, cut):
    """Return for each question which tokens of the answer are right.

    The first `cut` tokens of a document are compressed; all others come one by one. An answer that
    was given stays, right or wrong; then come the true tokens up to the next one.
    """
    tokens = torch.from_numpy(batch.tokens[row : row + 1])
    caches = make(batch.question)
    if cut > batch.question:  # aware: the last token is forgotten and fed again
        model(tokens[:, : cut + 1], caches)
    else:
        model(tokens[:, :cut], caches)
    crop(caches, cut)
    compress(model, tokens[:, :cut], caches)
    answers = []
    fed = cut
    for span in batch.answers:
        for t in range(fed, span.start):
            logits = model(tokens[:, t : t + 1], caches)
        right = []
        for t in range(span.start, span.stop):
            right.append(logits.argmax().item() == tokens[0, t])
            logits = model(logits.argmax(-1), caches)
        answers.append(right)
        fed = span.stop
    return answers


@torch.inference_mode()
def test_aware_compresses_all_but_one_token_and_agnostic_the_context():
    batch = needles(6, questions=3, numbers=2)
    model = from_hf(TINY)
    make = maker(model, SnapKV, 0.4, window_size=8)
    found = retrieve(model, batch, make)
    cuts = dict(aware=batch.answers[0].start - 1, agnostic=batch.question)
    for setting, cut in cuts.items():
        half_right = False
        for row, share in enumerate(found[setting].tolist()):
            answers = right_by_a_loop(model, make, batch, row, cut)
            exact = [all(right) for right in answers]
            assert share == pytest.approx(sum(exact) / 3)
            half_right |= any(0 < sum(right) < 4 for right in answers)
        assert half_right  # which counts as wrong
        assert 0 < found[setting].mean() < 1
        (alone,) = retrieve(model, batch, make, settings=(setting,)).values()
        assert alone.equal(found[setting])


@pytest.mark.parametrize("kind, options", [(Method, {}), (H2O, dict(budget=40))])
@torch.no_grad()
def test_questions_and_answers_are_fed_once_and_the_last_token_never(
    model, kind, options
):
    batch = needles(questions=3)
    tokens, context, _ = prompt_and_question(model, batch)
    caches = make_cache(model, kind, **options)
    feed(model, context, caches)
    compress(model, context, caches)
    said = retrieval.answers(model, tokens, batch.answers, batch.question, caches)
    lengths = [span.stop - span.start for span in batch.answers]
    assert [x.shape[1] for x in said] == lengths
    assert caches[0].seen == batch.answers[-1].stop - 1


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
