"""Measurements against loops, on a random decoder and on a reader whose answers can be followed."""
from dataclasses import replace
from itertools import product
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common import ENCODING, decoder, tasks
from methods.chunk_kv import ChunkKV, Chunks
from methods.h2o import H2O
from methods.ours.chunk_kv_semantic import SemanticChunkKV, SemanticChunks
from methods.random_eviction import RandomEviction
from methods.streaming_llm import StreamingLLM
from methods.sub_gen import SubGen
from nanollm.cache import ALL, LayerCache, end_prefill, make_cache
from nanollm.commands.registry import given, has_budget, pick
from nanollm.generate import generate
from nanollm.measure import evaluate
from nanollm.measure.benchmark import Benchmark, Slices, excess, replayed_or_read, summary
from nanollm.measure.evaluate import (bits_per_byte, continuation, exact_match, maker, ngram_bits,
                                      perturbation, prompt_and_question, reading_within, reference, retrieve,
                                      text_windows)
from nanollm.measure.replay import CannotReplay, Recorder, feed, record, replay
from nanollm.model import Config, Decoder

V, L, B, H, G, D, T, NEW = 2048, 2, 3, 2, 2, 8, 80, 12
CUT = T - NEW - 1  # the prompt without its last token; read in two chunks
SLOT = 2 * D * 4 + 4
SIZE = dict(vocab_size=V, max_len=512, n_layers=L, n_heads=H * G, n_kv_heads=H, d_model=32)
TOKENS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
WINDOW = dict(budget=12, window_size=5)
ENDS = torch.arange(V) % 4 == 0
METHODS = {"full": (LayerCache, {}), "h2o": (H2O, dict(budget=10)),
           "streaming_llm": (StreamingLLM, dict(budget=6)), "random": (RandomEviction, dict(budget=9)),
           **{name: (*pick([name]).values(), WINDOW) for name in ("ada_kv+critical", "snap_kv+residual")},
           "chunk_kv_reuse": (ChunkKV, WINDOW | dict(select=Chunks(3), reuse=2)),
           "semantic": (SemanticChunkKV, WINDOW | dict(select=SemanticChunks(5, ends=ENDS[TOKENS])))}
every_method = pytest.mark.parametrize("Method, knobs", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def model():
    return decoder(**SIZE, d_ff=48)


@pytest.fixture(scope="module")
def full(model):
    return reference(model, TOKENS, NEW)


@pytest.fixture(scope="module")
def benchmark(model):
    return Benchmark.build(model, tasks("test"), 320, 4)


def heard(model, Method, knobs, cut):
    """Every layer's q, k, v, y (B, heads, T − 1, D), and probabilities (B, NEW, V) of what follows."""
    class Spy(Method):
        def attend(self, q, k, v, pos):
            y = super().attend(q, k, v, pos)
            self.heard.append((q, k, v, y))
            return y

    caches = make_cache(model, Spy, **knobs)
    for cache in caches:
        cache.heard = []
    model(TOKENS[:, :cut], caches)
    end_prefill(caches)
    logits = torch.cat([model(TOKENS[:, i:i + 1], caches) for i in range(cut, T - 1)], 1)[:, -NEW:]
    return [[torch.cat(x, 2) for x in zip(*cache.heard)] for cache in caches], logits.double().softmax(-1)


# ---- perplexity, KL, L1, bytes ---


@torch.inference_mode()
def test_an_evicting_method_is_measured_as_by_loops(model, full):
    before, p = heard(model, LayerCache, {}, 1)
    after, q = heard(model, H2O, dict(budget=10), CUT)
    row = continuation(model, full, maker(model, H2O, 10 / CUT))
    for layer, ((*_, y), (*_, other)) in enumerate(zip(before, after)):
        w_o = model.blocks[layer].attention.o.weight
        for b, h in product(range(B), range(H * G)):
            o = w_o[:, h * D:(h + 1) * D]
            change = [(o @ (y - other)[b, h, t]).abs().sum().item() for t in range(CUT, T - 1)]
            assert row["l1"][b, layer, h].item() == pytest.approx(np.mean(change), rel=1e-4)
    kl = (p * (p / q).log()).sum(-1).mean(-1)
    assert row["kl"].tolist() == pytest.approx(kl.tolist(), rel=1e-4) and kl.min() > 0.01
    nll = -np.mean([math.log(q[b, t, TOKENS[b, T - NEW + t]]) for b in range(B) for t in range(NEW)])
    assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)


@pytest.mark.parametrize("Method, knobs", [METHODS[name] for name in ("ada_kv+critical", "semantic")])
@torch.inference_mode()
def test_perturbation_is_definition_1_of_every_layer_alone(model, full, Method, knobs):
    """Softmax over the kept and the new token, the full cache having the queries, keys and values."""
    total, caches = torch.zeros(B, L, H * G), make_cache(model, Method, **knobs)
    told, _ = heard(model, LayerCache, {}, 1)

    def feed(layer, start, stop):
        caches[layer].attend(*(x[:, :, start:stop] for x in told[layer][:3]), torch.arange(start, stop)[None])

    for layer in range(L):
        feed(layer, 0, CUT)
    end_prefill(caches)
    for layer, (q, k, v, _) in enumerate(told):
        cache, w_o = caches[layer], model.blocks[layer].attention.o.weight

        def o(b, h, t, seen):
            weight = (k[b, h // G, seen] @ q[b, h, t] / math.sqrt(D)).softmax(0)
            return w_o[:, h * D:(h + 1) * D] @ (weight @ v[b, h // G, seen])

        for t in range(CUT, T - 1):
            for b, h in product(range(B), range(H * G)):
                kept = [i for i in cache.pos[b, h // G].tolist() if i < t]  # others are empty slots
                total[b, layer, h] += (o(b, h, t, [*range(t + 1)]) - o(b, h, t, [*kept, t])).abs().sum()
            feed(layer, t, t + 1)
    found = perturbation(model, full, lambda *_: make_cache(model, Method, **knobs))
    torch.testing.assert_close(found, total / NEW)
    assert total.min() > 0.01


def test_bytes_and_speed_are_counted(model, full, monkeypatch):
    seconds = iter((5.0, 7.0))
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    row = continuation(model, full, lambda *_: make_cache(model, H2O, budget=10))
    monkeypatch.undo()
    slot = L * B * H * (SLOT + 4)  # H2O adds a number
    # 12 is 11 and a tenth; the second chunk of the prompt made the slots grow
    assert (row["live"], row["allocated"], row["peak"]) == (10 * slot, 12 * slot, (CUT + CUT // 10) * slot)
    assert row["tokens_per_s"] == B * NEW / 2
    row = continuation(model, full, maker(model, LayerCache, None), full.recording)  # written at once
    assert (row["live"], row["peak"]) == ((T - 1) * L * B * H * SLOT, CUT * L * B * H * SLOT)
    assert continuation(model, full, maker(model, LayerCache, None), chunk_size=CUT)["peak"] == row["peak"]
    end = evaluate.end_prompt
    monkeypatch.setattr(evaluate, "end_prompt", lambda *given: end(*given) + 10 ** 9)
    assert continuation(model, full, maker(model, LayerCache, None))["peak"] == 10 ** 9
    assert [Benchmark.continuation_length(T) for T in (20, 100, 512)] == [10, 50, 64]


def test_the_budget_is_a_share_of_the_prompt(model, full):
    asked, make = [], maker(model, H2O, 0.3)
    continuation(model, full, lambda n, prompt: asked.append((n, prompt.shape)) or make(n))
    perturbation(model, full, lambda n, prompt: asked.append((n, prompt.shape)) or make(n))
    assert asked == [(CUT, (B, CUT))] * 2 and [cache.budget for cache in make(CUT)] == [round(0.3 * CUT)] * L
    assert maker(model, StreamingLLM, 0.5, sinks=1)(20)[1].sinks == 1


# ---- one reading for all methods ---


def state(caches):
    """Everything that a cache holds, without the slack of its slots."""
    slots = [{name: cache.slot(name) for name in cache.slots} for cache in caches]
    other = [{name: x for name, x in vars(cache).items() if isinstance(x, int | torch.Tensor)}
             for cache in caches]
    return [*zip(slots, other)]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@every_method
def test_a_record_leaves_every_cache_as_reading_does(model, benchmark, monkeypatch, Method, knobs):
    """And the cache that is blind shares nothing with the one that reads the question."""
    def make(n, prompt):
        made.append((n, prompt.shape[1]))
        if Method is SemanticChunkKV:
            return make_cache(model, Method, **WINDOW, select=replace(knobs["select"], ends=ENDS[prompt]))
        return make_cache(model, Method, **knobs)

    made, recorders = [], make_cache(model, Recorder)
    # one whose question is one token
    last = SimpleNamespace(tokens=TOKENS.numpy(), question=70, answers=[slice(71, 73)])
    recordings = dict(last=[record(model, recorders, part) for part in prompt_and_question(model, last)[1:]])
    monkeypatch.setattr(evaluate, "answer", lambda model, tokens, spans, fed, caches: (fed, caches))
    for task, batch in (benchmark.batches | {"last": last}).items():
        read = retrieve(model, batch, make)
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "feed", None)
            told = retrieve(model, batch, make, (benchmark.recordings | recordings)[task])
        for setting, (fed, caches) in read.items():
            assert told[setting][0] == fed == caches[0].seen
            same(state(told[setting][1]), state(caches))
        assert made[-2:] == [(batch.question, read["aware"][0])] * 2
        assert read["aware"][0] == batch.answers[0].start - 1
        tokens, context, _ = prompt_and_question(model, batch)
        feed(model, context, alone := make(batch.question, tokens[:, :read["aware"][0]]))
        same(state(alone), state(read["blind"][1]))


def shows(change, watch=0):
    """A method whose `read` gives something else than what was written."""
    read = lambda self: change(self.seen, *LayerCache.read(self))
    return type("Shows", (LayerCache,), dict(read=read, watch=watch))


def forgets(after):
    """A method that keeps the last 20 tokens as soon as it has seen more than `after`."""
    observe = lambda self, q, p: self.seen > after and self.shrink(self.pos, 20)
    return type("Forgets", (LayerCache,), dict(observe=observe, watch=1))


OTHERWISE = {
    "evicts": forgets(0), "forgets the context": forgets(70),  # the question is there as it was
    "keys": shows(lambda seen, k, v, at, bias: (1.1 * k, v, at, bias)),
    "the context's keys, later": shows(
        lambda seen, k, v, at, bias: (torch.where(at[..., None] < seen - 70, 0, k), v, at, bias)),
    "values": shows(lambda seen, k, v, at, bias: (k, 1.1 * v, at, bias)),
    "positions": shows(lambda seen, k, v, at, bias: (k, v, at // 2, bias)),
    "bias": shows(lambda seen, k, v, at, bias: (k, v, at, -0.1 * (at % 3))),
    "less at first": shows(
        lambda seen, *shown: [*(x[:, :, :1 if seen <= 64 else None] for x in shown[:3]), None], ALL),
    "attend": type("Answers", (LayerCache,), dict(attend=lambda *told: 1.1 * LayerCache.attend(*told)))}


@pytest.mark.parametrize("Method", OTHERWISE.values(), ids=OTHERWISE)
def test_a_method_that_shows_something_else_reads_for_itself(model, full, Method):
    recorders, caches = make_cache(model, Recorder), make_cache(model, Method)
    with pytest.raises(CannotReplay):
        parts = []
        for part in (TOKENS[:, :70], TOKENS[:, 70:]):
            parts.append(record(model, recorders, part))
            replay(parts, caches)
    make = maker(model, Method, None)
    told = replayed_or_read(continuation, model, full, make, full.recording)
    read = continuation(model, full, make)
    for key in ("perplexity", "kl", "l1", "live"):
        same(told[key], read[key])


def test_the_benchmark_lets_such_a_method_read_and_no_other(model, benchmark, monkeypatch):
    make = maker(model, forgets(0), None)
    row, read = benchmark.run(model, make), continuation(model, benchmark.full, make)
    assert row["each"]["kl"] == pytest.approx(read["kl"].tolist()) and row["live"] == read["live"]
    assert min(row["each"]["kl"]) > 0.01
    monkeypatch.setattr(evaluate, "feed", None)
    assert benchmark.run(model, maker(model, H2O, 0.1))["kl"] > 0.01


# ---- what a row holds beyond its budget ---


NeverEvicts = type("NeverEvicts", (RandomEviction,), dict(evict=lambda self: None))
EvictsHalf = type("EvictsHalf", (H2O,), dict(evict=lambda self: self.layer and H2O.evict(self)))
ForgetsSuper = type("ForgetsSuper", (H2O,), dict(observe=lambda *_: None))


@pytest.fixture(scope="module")
def long(model):
    """A decoder with heads as large as the checkpoint's, and texts as long as those of `compare`."""
    decoder = Decoder(Config(**SIZE | dict(max_len=1024), head_dim=32, d_ff=32)).eval()  # KVzip reads twice
    tokens = torch.randint(0, V, (2, 456), generator=torch.Generator().manual_seed(2))
    return decoder, reference(decoder, tokens, 8)


def measured(long, Method, fraction):
    ends = torch.arange(V) % 9 == 0
    make = maker(long[0], Method, fraction, ends, **given(Method, window_size=8, heads=((1, 0),)))
    return replayed_or_read(continuation, *long, make, long[1].recording) | dict(fraction=fraction)


@pytest.mark.parametrize("Method, slots, message", [
    (NeverEvicts, 447, "evicts nothing: holds all 447 tokens of a prompt, and its budget is 112"),
    (EvictsHalf, (447 + 112) / 2, "holds 279.5 slots a head after a prompt, and its budget is 112"),
    (ForgetsSuper, 112, "does its observe call super")])
def test_a_method_that_holds_more_is_found_out(long, Method, slots, message):
    row = measured(long, Method, 0.25)
    assert row["slots"] == slots and message in excess(row)
    assert excess(row | dict(fraction=None)) == ""


@pytest.mark.parametrize("name", [name for name in pick([]) if has_budget(pick([name])[name])])
def test_no_method_is_said_to_hold_more_than_its_budget(long, name):
    row = measured(long, pick([name])[name], 0.0625)
    if name == "quest":  # its budget is of what is read
        assert row["slots"] == row["prompt"] == 447 and excess(row) == ""
        return
    assert row["prompt"] == 447 and 0 < row["slots"] <= 28 and excess(row) == ""
    if name in ("h2o", "ada_kv"):
        assert (row["slots"], row["slots_end"]) == (28, 28 + 8 * (name != "h2o"))


def test_slots_are_those_of_the_text_that_has_the_most():
    one, other, without = LayerCache(), LayerCache(), SubGen(radius=1.0, samples=1, draws=1)
    for cache in (one, other):
        cache.write(torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 6, 4), torch.arange(6)[None])
    one.keep(torch.tensor([[[0, 1, -1], [0, -1, -1]], [[0, 1, 2], [0, -1, -1]]]))
    assert evaluate.slots([one, other]) == (3 + 1 + 6 + 6) / 4
    assert evaluate.slots([one, without]) is None and excess(dict(fraction=0.5, slots=None)) == ""


# ---- retrieval ---


class Notes(LayerCache):
    """Remembers the tokens themselves, and shares a diary with its copies."""
    def __init__(self, diary=None):
        super().__init__()
        self.tokens, self.diary = torch.zeros(0, 0, dtype=torch.long), diary

    def __deepcopy__(self, memo):
        copy = Notes(self.diary)
        copy.tokens, copy.seen = self.tokens, self.seen
        return copy

    def end_prefill(self):
        super().end_prefill()
        if self.diary is not None:
            self.diary.append(self.seen)


class Reader:
    """A "model" that continues as the last time it saw the same two tokens: right now and then."""
    config, blocks = SimpleNamespace(vocab_size=V, max_len=1024, n_layers=1), [None]
    embed = torch.nn.Embedding(1, 1)

    def __call__(self, tokens, caches=None, last=None):
        (cache,) = caches or [Notes()]
        cache.tokens = torch.cat((cache.tokens, tokens), 1) if cache.seen else tokens
        cache.seen += tokens.shape[1]
        assert tokens.shape[1] == 1 or not cache.prompt_done  # decoding feeds single tokens
        if cache.diary is not None:
            cache.diary += tokens.T.tolist()
        guesses = torch.tensor([self.follow(row)[-tokens.shape[1]:] for row in cache.tokens.tolist()])
        return F.one_hot(guesses, V).float()

    def follow(self, row: list[int]) -> list[int]:
        after, out = {}, []
        for i in range(len(row)):
            if i > 1:
                after[tuple(row[i - 2:i])] = row[i]
            out.append(after.get(tuple(row[i - 1:i + 1]), row[i]))
        return out


def greedy(prefix: list[int], n: int) -> list[int]:
    row = list(prefix)
    for _ in range(n):
        row.append(Reader().follow(row)[-1])
    return row[len(prefix):]


def test_an_answer_with_one_wrong_token_is_wrong():
    """After 1 2 comes 5 6; the second document says so only of the first token."""
    batch = SimpleNamespace(tokens=np.array([[1, 2, 5, 6, 9, 1, 2, 5, 6], [1, 2, 5, 7, 9, 1, 2, 5, 6]]),
                            question=5, answers=[slice(7, 9)])
    right = retrieve(Reader(), batch, lambda *_: [Notes()])
    assert right["aware"].tolist() == right["blind"].tolist() == [1, 0]
    assert exact_match(Reader(), SimpleNamespace(batch=lambda *_: batch), "needle", 9, 2) == 0.5


def test_aware_compresses_all_but_one_token_and_blind_the_context():
    batch, diary = tasks("test").batch("needle", 0, 8, 200, questions=3), []
    right = retrieve(Reader(), batch, lambda n, _: diary.append(n) or [Notes(diary)])
    tokens, question, spans = batch.tokens.tolist(), batch.question, batch.answers

    columns = lambda rows, start, stop: [[row[i] for row in rows] for i in range(start, stop)]

    def answered(fed):
        """The diary from the end of the prompt on: what is given up to each answer, then the own guesses."""
        rows, correct = [row[:fed] for row in tokens], []
        for span in spans:
            for row, true in zip(rows, tokens):
                row += true[len(row):span.start]
                row += greedy(row, span.stop - span.start)
            correct.append([row[span] == true[span] for row, true in zip(rows, tokens)])
        return [fed, *columns(rows, fed, spans[-1].stop)], np.mean(correct, 0)

    (aware, aware_right), (blind, blind_right) = answered(spans[0].start - 1), answered(question)
    assert diary == [question, *columns(tokens, 0, spans[0].start - 1), *aware, *blind]
    assert right["aware"].tolist() == pytest.approx(aware_right)
    assert right["blind"].tolist() == pytest.approx(blind_right)
    assert 0 < aware_right.mean() < 1


def test_a_row_of_the_benchmark_has_means_and_standard_errors(monkeypatch):
    batch, kl, (l1, alone) = tasks("test").batch("needle", 0, 10, 200), torch.rand(5), torch.rand(2, 5, L, 4)
    text = dict(kl=kl, nll=2 * kl, l1=l1, live=7, live_16=4, allocated=8, peak=9, device=None, slots=2,
                slots_end=3, prompt=5, evicts=True, keeps_all=False, tokens_per_s=100)
    monkeypatch.setattr(evaluate, "continuation", lambda *_: text)
    monkeypatch.setattr(evaluate, "perturbation", lambda *_: alone)
    measured = Benchmark({"needle": batch}, {"needle": None}, SimpleNamespace(recording=None))
    row = measured.run(Reader(), lambda *_: [Notes()])
    right = {setting: x.numpy() for setting, x in retrieve(Reader(), batch, lambda *_: [Notes()]).items()}
    for setting, x in right.items():
        assert row[f"needle_{setting}"] == pytest.approx(x.mean())
        assert row["each"][f"needle_{setting}"] == x.tolist()
        assert row[f"needle_{setting}_se"] == pytest.approx(math.sqrt(x.mean() * (1 - x.mean()) / 9))
    assert 0 < right["blind"].mean() < 1 and row["live"] == 7
    assert row["kl"] == pytest.approx(sum(kl.tolist()) / 5) and row["each"]["kl"] == kl.tolist()
    assert row["each"]["nll"] == (2 * kl).tolist() and "nll" not in row
    assert row["perplexity"] == pytest.approx(math.exp(2 * sum(kl.tolist()) / 5))
    assert np.allclose(row["l1"], l1.numpy().mean(0)) and np.allclose(row["l1_alone"], alone.numpy().mean(0))
    assert row["each"]["l1_alone"] == pytest.approx([text.mean().item() for text in alone])

    text |= dict(l1_alone=alone)
    one = text | {key: text[key][:1] for key in ("kl", "nll", "l1", "l1_alone")} | dict(tokens_per_s=10)
    row = summary([({}, text), ({}, one)])
    assert row["tokens_per_s"] == pytest.approx(6 / (5 / 100 + 1 / 10))  # a part counts by its texts
    assert (row["live"], row["peak"], row["slots"], row["slots_end"]) == (14, 18, 2, 3)


@pytest.mark.parametrize("keep", [0, 1e9])
def test_slices_make_the_row_of_all_documents_at_once(model, benchmark, monkeypatch, keep):
    """A document at a time of four, and a text of two: recorded once, or for each row."""
    read, times = Benchmark.read, []
    monkeypatch.setattr(Benchmark, "read", lambda *a: times.append(len(times)) or read(*a))
    make, parts = maker(model, H2O, 0.25), Slices(model, tasks("test"), 320, 4, 0, 1, keep)
    whole = benchmark.run(model, make)
    for _ in range(2):
        row = parts.run(model, make)
    assert len(times) == (14 if keep else 28) and row.keys() == whole.keys()
    both = summary([(right, text | dict(device=5)) for right, text in (
        parts.benchmark(model, i).measured(model, make) for i in (12, 13))])
    assert both["device"] == 10 and both["live"] == whole["live"]  # bytes are those of all texts
    for key in row.keys() - {"tokens_per_s", "device", "each", "l1", "l1_alone"}:
        assert row[key] == pytest.approx(whole[key], rel=1e-4), key
    for key, each in row["each"].items():
        assert each == pytest.approx(whole["each"][key], rel=1e-4, abs=1e-6), key
    each = 4 * L * (SIZE["n_heads"] + 2 * SIZE["n_kv_heads"]) * model.config.head_dim
    assert parts.bytes == (3 * 4 + 2) * 320 * each and ("again" in str(parts)) == (not keep)


def test_a_recording_is_handed_to_the_device_of_the_cache(model, full):
    (part,) = full.recording[0].split(1000, "meta")
    assert all(x.is_meta for x in part) and not full.recording[0].q.is_meta


def test_exact_match_equals_greedy_decoding():
    documents, right = 52, []  # at 320 tokens more than one pass takes
    batch = tasks("test").batch("needle", 1, documents, 320, questions=3)
    for row in batch.tokens:
        for a in batch.answers:
            new = generate(Reader(), torch.tensor(row[None, :a.start]), a.stop - a.start, [Notes()])
            right.append(new[0].tolist() == row[a].tolist())
    got = exact_match(Reader(), tasks("test"), "needle", 320, documents, questions=3)
    assert got == pytest.approx(np.mean(right)) and 0 < got < 1


# ---- what cannot be measured ---


def test_hooks_are_taken_out_again(model):
    with pytest.raises(KeyError), evaluate.head_outputs(model):
        raise KeyError
    assert not any(block.attention.o._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("message, ask", [
    *(("documents .* must be a .* at least 2", lambda model, x=x: Benchmark.build(model, None, 320, x))
      for x in (1, 2.5)),
    *(("fraction .* of the prompt must lie above 0", lambda model, x=x: maker(model, H2O, x))
      for x in (0, 1.01, math.nan, "0.5")),
    *(("(windows 0|T 1|T 1000000000) must be", lambda model, x=x: text_windows(tasks("test"), *x))
      for x in ((0, 50), (4, 1), (4, 10 ** 9))),
    ("discount .* must be", lambda model: ngram_bits(*[symbols([0, 1])] * 2, 1, 2, 1.5)),
    *((f"continuation of {x} tokens must be shorter than .* {T} by", lambda model, x=x: reference(
        model, TOKENS, x)) for x in (0, T - 1)),
    ("ask nothing; take a", lambda model: exact_match(model, tasks("test"), "plain", 320, 2)),
    ("ask nothing; take a", lambda model: retrieve(model, tasks("test").batch("plain", 0, 2, 320), None)),
    ("513 tokens exceed the model's length of 512", lambda model: Benchmark.build(model, None, 513, 4)),
    ("513 tokens exceed", lambda model: exact_match(model, None, "needle", 513, 4)),
    ("520 prompt .* exceed", lambda model: retrieve(model, tasks("test").batch("needle", 0, 2, 520), None)),
    ("560 prompt tokens .* exceed .* length of 512", lambda model: reference(model, TOKENS.repeat(1, 7), 8)),
    ("documents 0 must be a .* at least 1", lambda model: exact_match(model, None, "needle", 320, 0)),
    ("chunk 0 must be", lambda model: feed(model, TOKENS, [], 0)),
    ("T 320.0 must be", lambda model: Benchmark.build(model, None, 320.0, 4))])
def test_what_cannot_be_measured_is_refused_before_any_work(model, monkeypatch, message, ask):
    monkeypatch.setattr(Decoder, "forward", None)
    with pytest.raises(ValueError, match=message) as error:
        ask(model)
    assert "\n" not in str(error.value)


# ---- bits per byte ---


@torch.inference_mode()
def test_bits_per_byte_equal_a_sum_over_tokens(model):
    bits = size = 0
    stream = tasks("test").stream[tasks("test").stream != tasks("test").bos]
    for start in np.linspace(0, len(stream) - 24, 20):
        row = torch.tensor(stream[int(start):int(start) + 24])
        p = model(row[None])[0].double().softmax(-1)
        bits -= sum(math.log2(p[i, row[i + 1]]) for i in range(23))
        size += len(tasks("test").encoding.decode_bytes(row[1:].tolist()))
    assert bits_per_byte(model, tasks("test"), 20, 24) == pytest.approx(bits / size, rel=1e-6)


@pytest.mark.parametrize("bos, first", [(None, []), (7, []), (2047, [2047])])
def test_texts_begin_as_the_model_s_do(model, monkeypatch, bos, first):
    monkeypatch.setattr(model.config, "bos", bos)  # 2047 is what the tokenizer calls BOS
    stream = tasks("test").stream[tasks("test").stream != tasks("test").bos].tolist()
    n, rows = 24 - len(first), text_windows(tasks("test"), 5, 24, model)
    starts = [int(x) for x in np.linspace(0, len(stream) - n, 5)]
    assert rows.tolist() == [first + stream[i:i + n] for i in starts] and rows.dtype == torch.int64
    assert torch.equal(Benchmark.text(model, tasks("test"), 24, 10), rows)
    assert text_windows(tasks("test"), 5, 24)[0].tolist() == stream[:24]
    bits = -model(rows[:, :-1]).log_softmax(-1).gather(-1, rows[:, 1:, None]).sum() / math.log(2)
    size = sum(len(ENCODING.decode_bytes(row)) for row in rows[:, 1:].tolist())
    assert bits_per_byte(model, tasks("test"), 5, 24) == pytest.approx(bits.item() / size, rel=1e-5)


def symbols(stream, n_vocab=3):
    """Tasks over a tiny alphabet, a byte a symbol."""
    encoding = SimpleNamespace(n_vocab=n_vocab, decode_bytes=lambda ids: b"x" * len(ids))
    return SimpleNamespace(stream=np.array(stream), bos=-1, encoding=encoding)


def test_n_grams_equal_hand_counts():
    training = symbols([0, 1, 0, 1, 0, 2])
    p0 = {0: (3 - .75) / 6 + .75 * 3 / 6 / 3, 1: (2 - .75) / 6 + .75 * 3 / 6 / 3}
    after_0 = (2 - .75) / 3 + .75 * 2 / 3 * p0[1]  # 0 is followed by 1 twice, by 2 once
    after_1 = (2 - .75) / 2 + .75 * 1 / 2 * p0[0]  # 1 is followed by 0 twice
    after_01 = (2 - .75) / 2 + .75 * 1 / 2 * after_1
    bits = ngram_bits(training, symbols([0, 1, 0]), 1, 3)
    assert bits["2-gram"] == pytest.approx(-math.log2(after_0 * after_1) / 2)
    assert bits["3-gram"] == bits["4-gram"] == pytest.approx(-math.log2(after_0 * after_01) / 2)
    after_10 = .25 / 2 + .75 * after_0  # and so is 1, 0 by 1 and by 2, once each; so is 0, 1, 0
    after_010 = .25 / 2 + .75 * after_10
    four = ngram_bits(training, symbols([0, 1, 0, 1]), 1, 4)["4-gram"]
    assert four == pytest.approx(-math.log2(after_0 * after_01 * after_010) / 3)
    unseen = ngram_bits(training, symbols([2, 1]), 1, 2)  # nothing follows 2 in training
    assert unseen == pytest.approx(dict.fromkeys(unseen, -math.log2(p0[1])))


def test_caches_that_read_within_their_budget_never_hold_more():
    model = Decoder(Config(**SIZE | dict(max_len=T), d_ff=32))
    caches = reading_within(maker(model, H2O, 0.25))(CUT)
    assert len(caches) == L and all(cache.budget == round(0.25 * CUT) for cache in caches)
    with torch.no_grad():
        for part in TOKENS.split(7, 1):
            model(part, caches)
            assert all(cache.length == min(cache.seen, cache.budget) for cache in caches)
