"""A prompt is recorded once and replayed to caches, which then are as if they had read it."""

from types import SimpleNamespace

import pytest
import torch

from common import reading_within, tasks
from lab import retrieval
from lab.benchmark import Benchmark, replayed_or_read
from lab.continuation import continuation, reference
from lab.replay import CannotReplay, Recorder, feed, record, replay
from lab.retrieval import maker, prompt_and_question, retrieve
from methods.baselines.h2o import H2O
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical
from methods.ours.chunk_kv_semantic import SemanticChunkKV
from methods.scissorhands import Scissorhands
from nanollm.cache import ALL, Method, Slots, cache_bytes, make_cache

V, T, NEW = 2048, 80, 12
TOKENS = torch.randint(0, V, (3, T), generator=torch.Generator().manual_seed(1))
ENDS = torch.arange(V) % 4 == 0
WINDOW = dict(budget=12, window_size=5)
METHODS = {
    "h2o": (H2O, dict(budget=10)),
    "streaming_llm": (StreamingLLM, dict(budget=6)),
    "critical": (SnapKV, WINDOW | dict(select=Critical())),
    "reuse": (ChunkKV, WINDOW | dict(select=Chunks(3), reuse=2)),
    "semantic": (SemanticChunkKV, WINDOW | dict(ends=ENDS)),
}


@pytest.fixture(scope="module")
def full(model):
    return reference(model, TOKENS, NEW)


def test_without_tokens_there_is_no_recording(model):
    assert record(model, make_cache(model, store=Recorder), TOKENS[:, :0]) == []


# ---- replay ----


def same_state(ones, others):
    """Compare the slots, notes and counts of caches, but not the slack of their slots."""
    for one, other in zip(ones, others, strict=True):
        assert one.slots.keys() == other.slots.keys()
        for name in one.slots:
            close(one.slot(name), other.slot(name))
        for name in "seen", "length", "ragged", "prompt_done":
            assert getattr(one, name) == getattr(other, name), name
        assert one.notes.keys() == other.notes.keys()
        for name, x in one.notes.items():
            close(x, other.notes[name])
        assert (one.forgotten is None) == (other.forgotten is None)
        if one.forgotten is not None:
            close(one.forgotten, other.forgotten)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def recorded(model):
    """Return documents with their recordings; the question of the first is one token."""
    batch = SimpleNamespace(tokens=TOKENS.numpy(), question=70, answers=[slice(71, 73)])
    documents = dict(short=batch, needle=tasks("test").batch("needle", 0, 4, 320))
    part = Benchmark.read(model, documents)
    return [(batch, part.recordings[name]) for name, batch in documents.items()]


@pytest.mark.parametrize("kind, options", METHODS.values(), ids=METHODS)
def test_a_recording_leaves_every_cache_as_reading_does(
    model, recorded, monkeypatch, kind, options
):
    """And the cache that is agnostic shares nothing with the one that reads the question."""

    def make(tokens):
        return make_cache(model, kind, **options)

    monkeypatch.setattr(retrieval, "answer", lambda *given: given[3:5])
    for batch, recordings in recorded:
        read = retrieve(model, batch, make)
        with monkeypatch.context() as patch:
            patch.setattr(retrieval, "feed", None)
            replayed = retrieve(model, batch, make, recordings)
        for setting, (fed, caches) in read.items():
            assert replayed[setting][0] == fed == caches[0].seen
            same_state(replayed[setting][1], caches)
        assert read["aware"][0] == batch.answers[0].start - 1
        alone = make(batch.question)
        feed(model, prompt_and_question(model, batch)[1], alone)
        same_state(alone, read["agnostic"][1])


class Watchful(Method):
    watch = ALL


def shows(change):
    """Return a store whose `read` shows something else than what was written."""

    class Shows(Slots):
        def read(self):
            return change(self.seen, *super().read())

    return Shows


def forgets(after):
    """Return a store that keeps the last 20 tokens as soon as it has seen more than `after`."""

    class Forgets(Slots):
        def write(self, k, v, pos):
            super().write(k, v, pos)
            if self.seen > after:
                self.shrink(self.pos.float(), 20)

    return Forgets


def without_context(seen, k, v, pos, bias):
    return k.where(pos[..., None] >= seen - 70, 0), v, pos, bias


def first_token_alone(seen, k, v, pos, bias):
    n = 1 if seen <= 64 else None
    return k[:, :, :n], v[:, :, :n], pos[:, :, :n], bias


OTHERWISE = {
    "forgets the context": forgets(70),  # the question is there as it was
    "keys": shows(lambda seen, k, v, pos, bias: (1.1 * k, v, pos, bias)),
    "the context's keys, later": shows(without_context),
    "values": shows(lambda seen, k, v, pos, bias: (k, 1.1 * v, pos, bias)),
    "positions": shows(lambda seen, k, v, pos, bias: (k, v, pos // 2, bias)),
    "bias": shows(lambda seen, k, v, pos, bias: (k, v, pos, -0.1 * (pos % 3))),
    "less at first": shows(first_token_alone),
}


@pytest.mark.parametrize("store", OTHERWISE.values(), ids=OTHERWISE)
def test_a_store_that_shows_something_else_reads_for_itself(model, full, store):
    recorders = make_cache(model, store=Recorder)
    caches = make_cache(model, Watchful, store)
    parts = []
    with pytest.raises(CannotReplay):
        for part in TOKENS[:, :70], TOKENS[:, 70:]:
            parts.append(record(model, recorders, part))
            replay(parts, caches)

    make = maker(model, Watchful, None, store)
    recording = full.recording
    replayed = replayed_or_read(continuation, model, full, make, recording)
    read = continuation(model, full, make)
    for name in "nll", "kl", "l1", "live":
        close(replayed[name], read[name])


def test_a_peak_is_what_was_allocated_before_tokens_left(model):
    caches = make_cache(model, store=forgets(70))
    peak = feed(model, TOKENS, caches)
    assert peak > cache_bytes(caches)[1]


def test_what_evicts_while_it_reads_cannot_replay(model, full):
    within = reading_within(maker(model, H2O, 0.25))(60)
    for caches in within, make_cache(model, Scissorhands, budget=30):
        with pytest.raises(CannotReplay):
            replay([full.recording], caches)
    roomy = make_cache(model, Scissorhands, budget=T)
    replay([full.recording], roomy)
    read = make_cache(model, Scissorhands, budget=T)
    feed(model, full.prompt, read)
    same_state(roomy, read)
