"""Measurements against loops, on a random decoder and on a reader whose answers and whose reading can be followed."""
from itertools import product
import math
from types import SimpleNamespace

import numpy as np
import pytest
from test_data import tasks
import torch
import torch.nn.functional as F

from methods.h2o import H2O
from methods.streaming_llm import StreamingLLM
from nanollm import evaluate
from nanollm.cache import LayerCache, finish_prompt, make_cache
from nanollm.evaluate import (Benchmark, bits_per_byte, continuation, exact_match, head_outputs, maker, ngram_bits,
                              reference, retrieve, text_windows)
from nanollm.generate import generate
from nanollm.model import Config, Decoder

V, L, B, H, G, D, T, NEW = 2048, 2, 3, 2, 2, 8, 40, 12
CUT = T - NEW - 1  # the prompt without its last token
SLOT = 2 * D * 4 + 4
TOKENS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    decoder = Decoder(Config(vocab_size=V, max_len=512, n_layers=L, n_heads=H * G, n_kv_heads=H, d_model=32, d_ff=48)).eval()
    for p in decoder.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    return decoder


# ---- perplexity, KL, L1, bytes ---


@torch.inference_mode()
def test_the_full_cache_costs_nothing(model):
    row = continuation(model, reference(model, TOKENS, NEW), maker(model, LayerCache, None))
    loss = F.cross_entropy(model(TOKENS)[:, -NEW - 1:-1].flatten(0, 1), TOKENS[:, -NEW:].flatten()).item()
    assert abs(row["kl"]) < 1e-6 and np.array(row["l1"]).shape == (L, H * G) and np.max(row["l1"]) < 1e-4
    assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("Method, budget", [(H2O, 10), (StreamingLLM, 6)])
@torch.inference_mode()
def test_an_evicting_method_is_measured_as_by_loops(model, Method, budget):
    def outputs(Method, knobs, cut):
        """The heads' outputs (L, B, H·G, NEW, D) and next-token probabilities (B, NEW, V) over the continuation."""
        class Recorded(Method):
            def attend(self, *args):
                y = super().attend(*args)
                self.heard.append(y)
                return y

        caches = make_cache(model, Recorded, **knobs)
        for cache in caches:
            cache.heard = []
        model(TOKENS[:, :cut], caches)
        finish_prompt(caches)
        logits = torch.cat([model(TOKENS[:, i:i + 1], caches) for i in range(cut, T - 1)], 1)[:, -NEW:]
        return torch.stack([torch.cat(cache.heard, 2)[:, :, -NEW:] for cache in caches]), logits.double().softmax(-1)

    y, p = outputs(LayerCache, {}, 1)
    other, q = outputs(Method, dict(budget=budget), CUT)
    row = continuation(model, reference(model, TOKENS, NEW), lambda n: make_cache(model, Method, budget=budget))
    for layer in range(L):
        w_o = model.blocks[layer].attention.o.weight
        for h in range(H * G):
            change = [(w_o[:, h * D:(h + 1) * D] @ (y - other)[layer, b, h, t]).abs().sum().item()
                      for b in range(B) for t in range(NEW)]
            assert row["l1"][layer][h] == pytest.approx(np.mean(change), rel=1e-4)
    assert row["kl"] == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4) and row["kl"] > 0.01
    nll = -np.mean([math.log(q[b, t, TOKENS[b, T - NEW + t]]) for b in range(B) for t in range(NEW)])
    assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)


def test_bytes_and_speed_are_counted(model, monkeypatch):
    full = reference(model, TOKENS, NEW)
    seconds = iter((5.0, 7.0))
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    row = continuation(model, full, lambda n: make_cache(model, H2O, budget=10))
    monkeypatch.undo()
    slot = L * B * H * (SLOT + 4)  # H2O adds a number
    assert (row["live"], row["allocated"], row["peak"]) == (10 * slot, 12 * slot, CUT * slot)  # 12: 11, and an eighth
    assert row["tokens_per_s"] == B * NEW / 2
    row = continuation(model, full, maker(model, LayerCache, None))
    assert (row["live"], row["peak"]) == ((T - 1) * L * B * H * SLOT, CUT * L * B * H * SLOT)


def test_the_budget_is_a_share_of_the_prompt(model):
    full, asked = reference(model, TOKENS, NEW), []
    make = maker(model, H2O, 0.3)
    continuation(model, full, lambda n: asked.append(n) or make(n))
    assert asked == [CUT] and [cache.budget for cache in make(CUT)] == [round(0.3 * CUT)] * L
    assert maker(model, StreamingLLM, 0.5, sinks=1)(20)[1].sinks == 1


def test_hooks_are_taken_out_again(model):
    with pytest.raises(KeyError), head_outputs(model):
        raise KeyError
    assert not any(block.attention.o._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("new", [0, T])
def test_a_continuation_longer_than_the_text_is_refused(model, new):
    with pytest.raises(ValueError, match=f"continuation of {new} tokens must be shorter than the text's 40"):
        reference(model, TOKENS, new)


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
    config, blocks, embed = SimpleNamespace(vocab_size=V, max_len=1024), [None], torch.nn.Embedding(1, 1)

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


def test_a_row_of_the_benchmark_has_means_and_standard_errors(monkeypatch):
    batch = tasks("test").batch("needle", 0, 10, 200)
    monkeypatch.setattr(evaluate, "continuation", lambda *_: dict(kl=1.5))
    row = Benchmark({"needle": batch}, None).run(Reader(), lambda n: [Notes()])
    right = retrieve(Reader(), batch, lambda n: [Notes()])["blind"].numpy()
    assert 0 < right.mean() < 1 and row["kl"] == 1.5
    assert row["needle_blind"] == pytest.approx(right.mean())
    assert row["needle_blind_se"] == pytest.approx(math.sqrt(right.mean() * (1 - right.mean()) / 9))


def test_every_method_gets_the_same_documents(model):
    one, again, other = (Benchmark.build(model, tasks("test"), 320, 4, seed=seed) for seed in (0, 0, 1))
    assert set(one.batches) == {"needle", "recall", "few_shot"} and one.full.new == 64
    assert torch.equal(one.full.tokens, text_windows(tasks("test"), 2, 320))
    for task, batch in one.batches.items():
        assert (batch.tokens == again.batches[task].tokens).all() and (batch.tokens != other.batches[task].tokens).any()
    with pytest.raises(ValueError, match="documents 1 must be at least 2"):
        Benchmark.build(model, tasks("test"), 320, 1)


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
