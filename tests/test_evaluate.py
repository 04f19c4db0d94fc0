"""Measurements against loops, on a random decoder and on a reader whose answers and whose reading can be followed."""
from itertools import product
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from test_data import tasks
import torch
import torch.nn.functional as F

from methods.chunk_kv import ChunkKV, SemanticChunkKV
from methods.h2o import H2O
from methods.random_eviction import RandomEviction
from methods.streaming_llm import StreamingLLM
from methods.sub_gen import SubGen
from nanollm import evaluate
from nanollm.__main__ import given, has_budget, pick
from nanollm.cache import ALL, LayerCache, cache_bytes, finish_prompt, make_cache
from nanollm.evaluate import (Benchmark, ReadsOtherwise, Recorder, bits_per_byte, continuation, exact_match, excess, feed,
                              head_outputs, maker, ngram_bits, paired, perturbation, prompt_and_question, reading_within, record,
                              reference, replay, retrieve, text_windows, told_or_read)
from nanollm.generate import generate
from nanollm.model import Config, Decoder

V, L, B, H, G, D, T, NEW = 2048, 2, 3, 2, 2, 8, 80, 12
CUT = T - NEW - 1  # the prompt without its last token; read in two chunks
SLOT = 2 * D * 4 + 4
TOKENS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
METHODS = {"full": (LayerCache, {}), "h2o": (H2O, dict(budget=10)), "streaming_llm": (StreamingLLM, dict(budget=6)),
           "random": (RandomEviction, dict(budget=9)),
           **{name: (Method, dict(budget=12, window=5))
              for name, Method in pick(["snap_kv", "ada_kv+critical", "snap_kv+residual"]).items()},
           "chunk_kv": (ChunkKV, dict(budget=12, window=5, chunk=3)),
           "chunk_kv_reuse": (ChunkKV, dict(budget=12, window=5, chunk=3, reuse=2)),
           "chunk_kv_semantic": (SemanticChunkKV, dict(budget=12, window=5, chunk=5, ends=torch.arange(V) % 4 == 0))}
every_method = pytest.mark.parametrize("Method, knobs", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    decoder = Decoder(Config(vocab_size=V, max_len=512, n_layers=L, n_heads=H * G, n_kv_heads=H, d_model=32, d_ff=48)).eval()
    for p in decoder.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    return decoder


@pytest.fixture(scope="module")
def full(model):
    return reference(model, TOKENS, NEW)


@pytest.fixture(scope="module")
def benchmark(model):
    return Benchmark.build(model, tasks("test"), 320, 4)


def heard(model, Method, knobs, cut):
    """Every layer's q, k, v, y (B, heads, T − 1, D), and next-token probabilities (B, NEW, V) over the continuation."""
    class Spy(Method):
        def attend(self, q, k, v, pos):
            y = super().attend(q, k, v, pos)
            self.heard.append((q, k, v, y))
            return y

    caches = make_cache(model, Spy, **knobs)
    for cache in caches:
        cache.heard = []
    model(TOKENS[:, :cut], caches)
    finish_prompt(caches)
    logits = torch.cat([model(TOKENS[:, i:i + 1], caches) for i in range(cut, T - 1)], 1)[:, -NEW:]
    return [[torch.cat(x, 2) for x in zip(*cache.heard)] for cache in caches], logits.double().softmax(-1)


# ---- perplexity, KL, L1, bytes ---


@torch.inference_mode()
def test_the_full_cache_costs_nothing(model, full):
    make = maker(model, LayerCache, None)
    row = continuation(model, full, make)
    loss = F.cross_entropy(model(TOKENS)[:, -NEW - 1:-1].flatten(0, 1), TOKENS[:, -NEW:].flatten()).item()
    assert row["kl"].shape == (B,) and row["kl"].abs().max() < 1e-6
    assert row["l1"].shape == perturbation(full, make).shape == (B, L, H * G)
    assert row["l1"].max() < 1e-4 and perturbation(full, make).max() < 1e-4
    assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("Method, budget", [(H2O, 10), (StreamingLLM, 6)])
@torch.inference_mode()
def test_an_evicting_method_is_measured_as_by_loops(model, full, Method, budget):
    before, p = heard(model, LayerCache, {}, 1)
    after, q = heard(model, Method, dict(budget=budget), CUT)
    row = continuation(model, full, maker(model, Method, budget / CUT))
    for layer, ((*_, y), (*_, other)) in enumerate(zip(before, after)):
        w_o = model.blocks[layer].attention.o.weight
        for b, h in product(range(B), range(H * G)):
            change = [(w_o[:, h * D:(h + 1) * D] @ (y - other)[b, h, t]).abs().sum().item() for t in range(CUT, T - 1)]
            assert row["l1"][b, layer, h].item() == pytest.approx(np.mean(change), rel=1e-4)
    kl = (p * (p / q).log()).sum(-1).mean(-1)
    assert row["kl"].tolist() == pytest.approx(kl.tolist(), rel=1e-4) and kl.min() > 0.01
    nll = -np.mean([math.log(q[b, t, TOKENS[b, T - NEW + t]]) for b in range(B) for t in range(NEW)])
    assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)


@pytest.mark.parametrize("Method, knobs", [(StreamingLLM, dict(budget=6, relative=False)), METHODS["h2o"],
                                           METHODS["ada_kv+critical"], METHODS["chunk_kv_reuse"],
                                           METHODS["chunk_kv_semantic"]])
@torch.inference_mode()
def test_perturbation_is_definition_1_of_every_layer_alone(model, full, Method, knobs):
    """Of the kept and the new token by softmax over them, the full cache having the queries, keys and values."""
    total, told, caches = torch.zeros(B, L, H * G), heard(model, LayerCache, {}, 1)[0], make_cache(model, Method, **knobs)

    def feed(layer, start, stop):
        caches[layer].hear(TOKENS[:, start:stop])
        caches[layer].attend(*(x[:, :, start:stop] for x in told[layer][:3]), torch.arange(start, stop)[None])

    for layer in range(L):
        feed(layer, 0, CUT)
    finish_prompt(caches)
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
    torch.testing.assert_close(perturbation(full, lambda n: make_cache(model, Method, **knobs)), total / NEW)
    assert total.min() > 0.01


def test_bytes_and_speed_are_counted(model, full, monkeypatch):
    seconds = iter((5.0, 7.0))
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    row = continuation(model, full, lambda n: make_cache(model, H2O, budget=10))
    monkeypatch.undo()
    slot = L * B * H * (SLOT + 4)  # H2O adds a number
    # 12 is 11 and a tenth; the second chunk of the prompt made the slots grow
    assert (row["live"], row["allocated"], row["peak"]) == (10 * slot, 12 * slot, (CUT + CUT // 10) * slot)
    assert row["tokens_per_s"] == B * NEW / 2
    row = continuation(model, full, maker(model, LayerCache, None))
    assert (row["live"], row["peak"]) == ((T - 1) * L * B * H * SLOT, (CUT + CUT // 10) * L * B * H * SLOT)


def test_the_budget_is_a_share_of_the_prompt(model, full):
    asked, make = [], maker(model, H2O, 0.3)
    continuation(model, full, lambda n: asked.append(n) or make(n))
    perturbation(full, lambda n: asked.append(n) or make(n))
    assert asked == [CUT, CUT] and [cache.budget for cache in make(CUT)] == [round(0.3 * CUT)] * L
    assert maker(model, StreamingLLM, 0.5, sinks=1)(20)[1].sinks == 1


def test_hooks_are_taken_out_again(model):
    with pytest.raises(KeyError), head_outputs(model):
        raise KeyError
    assert not any(block.attention.o._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("new", [0, T - 1, T])
def test_a_continuation_longer_than_the_text_is_refused(model, new):
    with pytest.raises(ValueError, match=f"continuation of {new} tokens must be shorter than the text's {T} by at least 2"):
        reference(model, TOKENS, new)


def test_a_prompt_of_one_token_is_long_enough(model):
    assert reference(model, TOKENS, T - 2).prompt.tolist() == TOKENS[:, :1].tolist()


# ---- one reading for all methods ---


def state(caches):
    """Everything that a cache holds, without the slack of its slots."""
    return [{name: cache.slot(name) for name in cache.slots}
            | {name: x for name, x in vars(cache).items() if isinstance(x, int | torch.Tensor)}
            | {"heard": torch.cat(getattr(cache, "heard", None) or [TOKENS[:, :0] > 0], 1)} for cache in caches]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", [70, T])
@every_method
def test_replay_leaves_every_cache_as_reading_does(model, Method, knobs, context):
    recorders, read, told = make_cache(model, Recorder), *(make_cache(model, Method, **knobs) for _ in range(2))
    parts = []
    for part in TOKENS.split(context, 1):
        feed(model, part, read)
        parts.append(record(model, recorders, part))
        assert replay(parts, told) == cache_bytes(told)[1]
        same(state(told), state(read))
    assert told[0].seen == T and record(model, recorders, TOKENS[:, :0]) == [] and replay([[]], told) == 0


@every_method
def test_a_record_gives_the_row_that_reading_gives(model, full, monkeypatch, Method, knobs):
    def make(n):
        return make_cache(model, Method, **knobs)

    read = continuation(model, full, make)
    monkeypatch.setattr(evaluate, "feed", None)  # the record is all that is needed
    told = continuation(model, full, make, full.told)
    for key in ("perplexity", "kl", "l1", "live"):
        same(told[key], read[key])
    assert read["live"] <= told["peak"] <= read["peak"] or Method is LayerCache


@every_method
def test_a_record_asks_the_caches_that_reading_asks(model, benchmark, monkeypatch, Method, knobs):
    def asked(batch, *told):
        return retrieve(model, batch, lambda n: made.append(n) or make_cache(model, Method, **knobs), *told)

    made, recorders = [], make_cache(model, Recorder)
    last = SimpleNamespace(tokens=TOKENS.numpy(), question=70, answers=[slice(71, 73)])  # its question is one token
    records = benchmark.told | {"last": [record(model, recorders, part) for part in prompt_and_question(model, last)[1:]]}
    monkeypatch.setattr(evaluate, "answer", lambda model, tokens, spans, fed, caches: (fed, caches))
    for task, batch in (benchmark.batches | {"last": last}).items():
        read = asked(batch)
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "feed", None)
            told = asked(batch, records[task])
        for setting, (fed, caches) in read.items():
            assert told[setting][0] == fed == caches[0].seen
            same(state(told[setting][1]), state(caches))
        assert made[-2:] == [batch.question] * 2 and read["aware"][0] == batch.answers[0].start - 1


@pytest.mark.parametrize("watch", [0, ALL])
@pytest.mark.parametrize("measure", [continuation, perturbation, "told"])
def test_every_cache_hears_each_token_once_and_before_it_is_asked_about_it(model, full, measure, watch):
    def make(n):
        caches.extend(make_cache(model, Hears))
        for cache in caches:
            cache.words = []
        return caches

    Hears, caches = type("Hears", (LayerCache,), dict(
        watch=watch, hear=lambda self, tokens: self.words.append((self.seen, tokens)))), []
    if measure is perturbation:
        perturbation(full, make)
    else:
        continuation(model, full, make, full.told if measure == "told" else None)
    parts = [0] if measure == "told" and not watch else [0, 64]  # probabilities are made for 64 at a time
    for cache in caches:
        assert torch.equal(torch.cat([tokens for _, tokens in cache.words], 1), TOKENS[:, :-1])
        assert [seen for seen, _ in cache.words] == [*parts, *range(CUT, T - 1)]


def shows(change, watch=0):
    """A method whose `read` gives something else than what was written."""
    return type("Shows", (LayerCache,), dict(read=lambda self: change(self.seen, *LayerCache.read(self)), watch=watch))


def forgets(after):
    """A method that keeps the last 20 tokens as soon as it has seen more than `after`."""
    return type("Forgets", (LayerCache,), dict(observe=lambda self, q, p: self.seen > after and self.shrink(self.pos, 20)))


OTHERWISE = {
    "forgets": forgets(0), "forgets the context": forgets(70),  # the question is there as it was
    "keys": shows(lambda seen, k, v, at, bias: (1.1 * k, v, at, bias)),
    "the context's keys, later": shows(lambda seen, k, v, at, bias: (torch.where(at[..., None] < seen - 70, 0, k), v, at, bias)),
    "values": shows(lambda seen, k, v, at, bias: (k, 1.1 * v, at, bias)),
    "positions": shows(lambda seen, k, v, at, bias: (k, v, at // 2, bias)),
    "bias": shows(lambda seen, k, v, at, bias: (k, v, at, -0.1 * (at % 3))),
    "less at first": shows(lambda seen, *shown: [*(x[:, :, :1 if seen <= 64 else None] for x in shown[:3]), None], ALL),
    "attend": type("Answers", (LayerCache,), dict(attend=lambda self, *told: 1.1 * LayerCache.attend(self, *told)))}


@pytest.mark.parametrize("Method", OTHERWISE.values(), ids=OTHERWISE)
def test_a_method_that_shows_something_else_reads_for_itself(model, full, Method):
    recorders, caches = make_cache(model, Recorder), make_cache(model, Method)
    with pytest.raises(ReadsOtherwise):
        parts = []
        for part in (TOKENS[:, :70], TOKENS[:, 70:]):
            parts.append(record(model, recorders, part))
            replay(parts, caches)
    make = maker(model, Method, None)
    told, read = told_or_read(continuation, model, full, make, full.told), continuation(model, full, make)
    for key in ("perplexity", "kl", "l1", "live"):
        same(told[key], read[key])


def test_the_benchmark_lets_such_a_method_read(model, benchmark):
    make = maker(model, forgets(0), None)
    row, read = benchmark.run(model, make), continuation(model, benchmark.full, make)
    assert row["each"]["kl"] == pytest.approx(read["kl"].tolist()) and row["live"] == read["live"]
    assert min(row["each"]["kl"]) > 0.01


def test_the_benchmark_reads_for_no_other_method(model, benchmark, monkeypatch):
    monkeypatch.setattr(evaluate, "feed", None)
    assert benchmark.run(model, maker(model, H2O, 0.1))["kl"] > 0.01


# ---- what a row holds beyond its budget ---


class NeverEvicts(RandomEviction):
    def forget(self):
        pass


class EvictsHalf(H2O):
    """One layer of two."""
    def forget(self):
        if self.layer:
            super().forget()


class ForgetsSuper(H2O):
    """Compresses at the prompt's end, and then grows."""
    def observe(self, q, p):
        self.slot("accumulated").add_(p.sum((2, 3)))


@pytest.fixture(scope="module")
def long(model):
    """A decoder with heads that are as large as those of the checkpoint, and texts with a prompt as long as `compare` has it."""
    decoder = Decoder(Config(vocab_size=V, max_len=512, n_layers=L, n_heads=H * G, n_kv_heads=H, head_dim=32, d_model=32,
                             d_ff=32)).eval()
    return decoder, reference(decoder, torch.randint(0, V, (2, 456), generator=torch.Generator().manual_seed(2)), 8)


def measured(long, Method, fraction, **knobs):
    known = dict(window=8, ends=torch.arange(V) % 9 == 0, heads=((1, 0),))
    make = maker(long[0], Method, fraction, **given(Method, **known) | knobs)
    return told_or_read(continuation, *long, make, long[1].told) | dict(fraction=fraction)


@pytest.mark.parametrize("name", [*pick([])])
def test_no_method_holds_more_than_its_budget(long, name):
    Method = pick([name])[name]
    for fraction in (1.0, 0.5, 0.25, 0.125, 0.0625) if has_budget(Method) else [None]:
        row = measured(long, Method, fraction)
        budget = row["prompt"] if fraction is None else round(fraction * 447)
        assert row["prompt"] == 447 and 0 < row["slots"] <= budget and excess(row) == ""
        if name in ("h2o", "snap_kv", "ada_kv", "pyramid_kv"):
            assert (row["slots"], row["slots_end"]) == (budget, budget + 8 * (name != "h2o"))


@pytest.mark.parametrize("Method, slots, message", [
    (NeverEvicts, 447, "evicts nothing: holds all 447 tokens of a prompt, and its budget is 112"),
    (EvictsHalf, (447 + 112) / 2, "holds 279.5 slots a head after a prompt, and its budget is 112"),
    (ForgetsSuper, 112, "grows to 120 slots a head after the prompt, and its budget is 112; does its observe call super")])
def test_a_method_that_holds_more_is_found_out(long, Method, slots, message):
    row = measured(long, Method, 0.25)
    assert row["slots"] == slots and message in excess(row)
    assert excess(row | dict(fraction=None)) == ""


def test_slots_are_those_of_the_text_that_has_the_most_and_empty_ones_do_not_count():
    one, other, without = LayerCache(), LayerCache(), SubGen(radius=1.0, samples=1, draws=1)
    for cache in (one, other):
        cache.write(torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 6, 4), torch.arange(6)[None])
    one.keep(torch.tensor([[[0, 1, 2], [0, -1, -1]], [[0, 1, -1], [0, -1, -1]]]))
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

    def finish_prompt(self):
        super().finish_prompt()
        if self.diary is not None:
            self.diary.append(self.seen)


class Reader:
    """A "model" that continues as the last time it saw the same two tokens: right on some documents, for a reason."""
    config, blocks, embed = SimpleNamespace(vocab_size=V, max_len=1024, n_layers=1), [None], torch.nn.Embedding(1, 1)

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


@pytest.mark.parametrize("task, knobs", [("needle", {}), ("needle", dict(questions=3)), ("few_shot", dict(shots=6))])
def test_aware_compresses_all_but_one_token_and_blind_the_context(task, knobs):
    batch, diary = tasks("test").batch(task, 0, 8, 200, **knobs), []
    right = retrieve(Reader(), batch, lambda n: diary.append(n) or [Notes(diary)])
    tokens, question, spans = batch.tokens.tolist(), batch.question, batch.answers

    def columns(rows, start, stop):
        return [[row[i] for row in rows] for i in range(start, stop)]

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
    assert right["aware"].tolist() == pytest.approx(aware_right) and right["blind"].tolist() == pytest.approx(blind_right)
    assert 0 < aware_right.mean() < 1


@pytest.mark.parametrize("told", [True, False])
def test_the_blind_cache_shares_nothing_with_the_one_that_reads_the_question(model, benchmark, monkeypatch, told):
    """H2O would show it: with every query that reads them, the scores of its slots grow."""
    def spy(*asked):
        ended.append((answer(*asked), state(asked[-1])))
        return ended[-1][0]

    make, batch, answer, ended = maker(model, H2O, 0.25), benchmark.batches["recall"], evaluate.answer, []
    monkeypatch.setattr(evaluate, "answer", spy)
    retrieve(model, batch, make, benchmark.told["recall"] if told else None)
    tokens, context, _ = prompt_and_question(model, batch)
    feed(model, context, alone := make(batch.question))
    spy(model, tokens, batch.answers, batch.question, alone)
    _, (blind, left), (expected, left_alone) = ended
    assert torch.equal(blind, expected) and all(torch.equal(a["pos"], b["pos"]) for a, b in zip(left, left_alone, strict=True))
    same(left, left_alone)


def test_a_row_of_the_benchmark_has_means_and_standard_errors(monkeypatch):
    batch, kl, l1, alone = tasks("test").batch("needle", 0, 10, 200), torch.rand(5), torch.rand(5, L, 4), torch.rand(5, L, 4)
    monkeypatch.setattr(evaluate, "continuation", lambda *_: dict(kl=kl, nll=2 * kl, l1=l1, live=7))
    monkeypatch.setattr(evaluate, "perturbation", lambda *_: alone)
    row = Benchmark({"needle": batch}, {"needle": None}, SimpleNamespace(told=None)).run(Reader(), lambda n: [Notes()])
    right = {setting: x.numpy() for setting, x in retrieve(Reader(), batch, lambda n: [Notes()]).items()}
    for setting, x in right.items():
        assert row[f"needle_{setting}"] == pytest.approx(x.mean()) and row["each"][f"needle_{setting}"] == x.tolist()
        assert row[f"needle_{setting}_se"] == pytest.approx(math.sqrt(x.mean() * (1 - x.mean()) / 9))
    assert 0 < right["blind"].mean() < 1 and row["live"] == 7
    assert row["kl"] == pytest.approx(sum(kl.tolist()) / 5) and row["each"]["kl"] == kl.tolist()
    assert row["each"]["nll"] == (2 * kl).tolist() and "nll" not in row
    assert np.allclose(row["l1"], l1.numpy().mean(0)) and np.allclose(row["l1_alone"], alone.numpy().mean(0))
    assert row["each"]["l1_alone"] == pytest.approx([text.mean().item() for text in alone])


def test_rows_are_paired_document_by_document():
    row = dict(each=dict(needle=[1.0, 0.0, 1.0], recall=[1.0, 0.5, 0.0], kl=[0.25, 0.75]))
    base = dict(each=dict(needle=[0.0, 1.0, 1.0], recall=[0.0, 0.0, 0.0], kl=[0.0, 1.5]))
    # differences 1, −1, 0, 1, 0.5, 0: mean 0.25, squared deviations 2.875 in all
    assert paired(row, base, ["needle", "recall"]) == pytest.approx((0.25, math.sqrt(2.875 / 5 / 6)))
    assert paired(row, base, ["kl"]) == pytest.approx((-0.25, 0.5))  # 0.25 and −0.75
    assert paired(base, row, ["kl"]) == pytest.approx((0.25, 0.5))


def test_every_method_gets_the_same_documents(model, benchmark):
    one, again, other = benchmark, *(Benchmark.build(model, tasks("test"), 320, 4, seed=seed) for seed in (0, 1))
    assert set(one.batches) == set(one.told) == {"needle", "recall", "few_shot"} and one.full.new == 64
    assert torch.equal(one.full.tokens, text_windows(tasks("test"), 2, 320))
    for task, batch in one.batches.items():
        assert (batch.tokens == again.batches[task].tokens).all() and (batch.tokens != other.batches[task].tokens).any()


@pytest.mark.parametrize("task, knobs", [("recall", dict(pairs=3)), ("needle", dict(facts=3)), ("few_shot", {}),
                                         ("needle", dict(questions=3))])
def test_exact_match_equals_greedy_decoding(task, knobs):
    documents = 60  # at 320 tokens more than one pass takes
    batch = tasks("test").batch(task, 1, documents, 320, **knobs)
    right = []
    for row in batch.tokens:
        for a in batch.answers:
            new = generate(Reader(), torch.tensor(row[None, :a.start]), a.stop - a.start, [Notes()])
            right.append(new[0].tolist() == row[a].tolist())
    got = exact_match(Reader(), tasks("test"), task, 320, documents, **knobs)
    assert got == pytest.approx(np.mean(right)) and 0 < got < 1


# ---- what cannot be measured ---


class Breaks(H2O):
    def forget(self):
        if self.seen == 290:
            raise ArithmeticError
        super().forget()


def test_a_method_that_breaks_leaves_the_benchmark_as_it_was(model, benchmark):
    before, broken, after = (maker(model, Method, 0.25) for Method in (H2O, Breaks, H2O))
    before = benchmark.run(model, before)
    with pytest.raises(ArithmeticError):
        benchmark.run(model, broken)
    after = benchmark.run(model, after)
    assert json.dumps(before | dict(tokens_per_s=0)) == json.dumps(after | dict(tokens_per_s=0))
    assert before["slots"] == 64 and excess(before | dict(fraction=0.25)) == ""


@pytest.mark.parametrize("ask, message", [
    *((lambda model, documents=documents: Benchmark.build(model, None, 320, documents), f"documents {documents} must be a .* at least 2")
      for documents in (1, 0, -1, 2.5, math.nan, True)),
    (lambda model: Benchmark.build(model, None, 320.0, 4), "T 320.0 must be"),
    (lambda model: Benchmark.build(model, None, 513, 4), "513 tokens exceed the model's length of 512"),
    (lambda model: exact_match(model, None, "needle", 513, 4), "513 tokens exceed the model's length of 512"),
    (lambda model: exact_match(model, None, "needle", 320, 0), "documents 0 must be a .* at least 1"),
    (lambda model: exact_match(model, tasks("test"), "plain", 320, 2), "ask nothing; take a task with questions"),
    (lambda model: retrieve(model, tasks("test").batch("plain", 0, 2, 320), None), "ask nothing; take a task with questions"),
    (lambda model: retrieve(model, tasks("test").batch("needle", 0, 2, 520), None), "520 prompt tokens .* exceed .* length of 512"),
    (lambda model: reference(model, TOKENS.repeat(1, 7), 8), "560 prompt tokens .* exceed .* length of 512"),
    *((lambda model, fraction=fraction: maker(model, H2O, fraction), f"fraction {fraction} of the prompt must lie above 0")
      for fraction in (0, -0.5, 1.01, math.inf, math.nan, "0.5")),
    (lambda model: reference(model, TOKENS, 2.5), "continuation of 2.5 tokens must be shorter"),
    (lambda model: feed(model, TOKENS, [], 0), "chunk 0 must be"),
    *((lambda model, size=size: text_windows(tasks("test"), *size), "(windows 0|T 1|T 1000000000) must be")
      for size in ((0, 50), (4, 1), (4, 10 ** 9))),
    (lambda model: exact_match(model, tasks("test"), "nope", 320, 2), "task 'nope' is unknown"),
    *((lambda model, d=d: ngram_bits(symbols([0, 1]), symbols([0, 1]), 1, 2, d), f"discount {d} must be") for d in (0, 1.5, math.nan))])
def test_what_cannot_be_measured_is_refused_before_any_work(model, monkeypatch, ask, message):
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


def test_windows_span_the_text_and_hold_no_special_token():
    rows, test = text_windows(tasks("test"), 7, 50), tasks("test")
    stream = test.stream[test.stream != test.bos]
    assert rows.shape == (7, 50) and (rows != test.bos).all()
    assert (rows[0].numpy() == stream[:50]).all() and (rows[-1].numpy() == stream[-50:]).all()


def symbols(stream, n_vocab=3):
    """Tasks over a tiny alphabet, a byte a symbol."""
    return SimpleNamespace(stream=np.array(stream), bos=-1,
                           encoding=SimpleNamespace(n_vocab=n_vocab, decode_bytes=lambda ids: b"x" * len(ids)))


def test_n_grams_are_probability_distributions():
    """Over all texts that start with a given symbol, also one that training has not seen."""
    training = symbols(np.random.default_rng(0).choice(2, 60))
    for first in range(3):
        total = dict.fromkeys(("2-gram", "3-gram", "4-gram"), 0.0)
        for rest in product(range(3), repeat=4):
            for name, bits in ngram_bits(training, symbols([first, *rest]), 1, 5).items():
                total[name] += 2 ** (-4 * bits)
        assert total == pytest.approx(dict.fromkeys(total, 1.0))


def test_n_grams_equal_hand_counts():
    training = symbols([0, 1, 0, 1, 0, 2])
    p0 = {0: (3 - .75) / 6 + .75 * 3 / 6 / 3, 1: (2 - .75) / 6 + .75 * 3 / 6 / 3}
    after_0 = (2 - .75) / 3 + .75 * 2 / 3 * p0[1]  # 0 is followed by 1 twice, by 2 once
    after_1 = (2 - .75) / 2 + .75 * 1 / 2 * p0[0]  # 1 is followed by 0 twice
    after_01 = (2 - .75) / 2 + .75 * 1 / 2 * after_1
    bits = ngram_bits(training, symbols([0, 1, 0]), 1, 3)
    assert bits["2-gram"] == pytest.approx(-math.log2(after_0 * after_1) / 2)
    assert bits["3-gram"] == bits["4-gram"] == pytest.approx(-math.log2(after_0 * after_01) / 2)


def test_caches_that_read_within_their_budget_never_hold_more_than_it_and_the_last_piece():
    model = Decoder(Config(vocab_size=V, max_len=T, n_layers=L, n_heads=H * G, n_kv_heads=H, d_model=32, d_ff=32))
    caches = reading_within(maker(model, H2O, 0.25))(CUT)
    assert len(caches) == L and all(cache.budget == round(0.25 * CUT) for cache in caches)
    with torch.no_grad():
        for part in TOKENS.split(7, 1):
            model(part, caches)
            assert all(cache.length == min(cache.seen, cache.budget) for cache in caches)
