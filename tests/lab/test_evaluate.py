"""Measurements against loops, on a random decoder and on a reader whose answers can be followed."""

from functools import cache as once
from itertools import product
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import decoder, tasks
from lab import evaluate
from lab.benchmark import build, excess, replayed_or_read
from lab.evaluate import (
    budget_for,
    continuation,
    maker,
    mean_and_error,
    perturbation,
    prompt_and_question,
    reading_within,
    reference,
    retrieve,
    text_windows,
)
from lab.registry import given, has_budget, pick
from lab.replay import CannotReplay, Recorder, feed, record, replay
from methods.baselines.h2o import H2O
from methods.baselines.random_eviction import RandomEviction
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.chunk_kv import ChunkKV, Chunks
from methods.ours.chunk_kv_semantic import SemanticChunkKV
from nanollm import TINY
from nanollm.cache import ALL, LayerCache, compress, crop, make_cache
from nanollm.checkpoint import from_hf
from nanollm.generate import tell_chunk_ends
from nanollm.model import Config, Decoder

V, L, B, H, G, D, T, NEW = 2048, 2, 3, 2, 2, 8, 80, 12
CUT = T - NEW - 1  # the prompt without its last token; read in two chunks
SLOT = 2 * D * 4 + 4
SIZE = dict(
    vocab_size=V, max_len=512, n_layers=L, n_heads=H * G, n_kv_heads=H, d_model=32
)
TOKENS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
WINDOW = dict(budget=12, window_size=5)
ENDS = torch.arange(V) % 4 == 0
METHODS = {
    "full": (LayerCache, {}),
    "h2o": (H2O, dict(budget=10)),
    "streaming_llm": (StreamingLLM, dict(budget=6)),
    "random": (RandomEviction, dict(budget=9)),
    **{
        name: (*pick([name]).values(), WINDOW)
        for name in ("ada_kv+critical", "snap_kv+residual")
    },
    "chunk_kv_reuse": (ChunkKV, WINDOW | dict(select=Chunks(3), reuse=2)),
    "semantic": (SemanticChunkKV, WINDOW),
}
every_method = pytest.mark.parametrize("Method, options", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def model():
    return decoder(**SIZE, d_ff=48)


@pytest.fixture(scope="module")
def full(model):
    return reference(model, TOKENS, NEW)


@pytest.fixture(scope="module")
def benchmarks(model):
    return build(model, tasks("test"), 320, 4)


def told(caches, prompt=TOKENS):
    tell_chunk_ends(caches, ENDS[prompt])
    return caches


def heard(model, Method, options, cut):
    """Every layer's q, k, v, y (B, heads, T − 1, D), and probabilities (B, NEW, V) of what follows."""

    class Spy(Method):
        def attend(self, q, k, v, pos):
            y = super().attend(q, k, v, pos)
            self.heard.append((q, k, v, y))
            return y

    caches = told(make_cache(model, Spy, **options))
    for cache in caches:
        cache.heard = []
    model(TOKENS[:, : cut + 1], caches)  # the last token is forgotten and fed again
    crop(caches, cut)
    compress(model, TOKENS[:, :cut], caches)
    for cache in caches:
        cache.heard = [[x[:, :, :cut] for x in cache.heard[0]]]
    logits = torch.cat(
        [model(TOKENS[:, i : i + 1], caches) for i in range(cut, T - 1)], 1
    )[:, -NEW:]
    return [
        [torch.cat(x, 2) for x in zip(*cache.heard)] for cache in caches
    ], logits.double().softmax(-1)


# ---- perplexity, KL, L1, bytes ---


@torch.inference_mode()
def test_an_evicting_method_is_measured_as_by_loops(model, full):
    before, p = heard(model, LayerCache, {}, 1)
    after, q = heard(model, H2O, dict(budget=10), CUT)
    row = continuation(model, full, maker(model, H2O, 10 / CUT))
    for layer, ((*_, y), (*_, other)) in enumerate(zip(before, after)):
        w_o = model.blocks[layer].attention.o.weight
        for b, h in product(range(B), range(H * G)):
            o = w_o[:, h * D : (h + 1) * D]
            change = [
                (o @ (y - other)[b, h, t]).abs().sum().item() for t in range(CUT, T - 1)
            ]
            assert row["l1"][b, layer, h].item() == pytest.approx(
                np.mean(change), rel=1e-4
            )
    kl = (p * (p / q).log()).sum(-1).mean(-1)
    assert (
        row["kl"].tolist() == pytest.approx(kl.tolist(), rel=1e-4) and kl.min() > 0.01
    )
    nll = -np.mean(
        [
            math.log(q[b, t, TOKENS[b, T - NEW + t]])
            for b in range(B)
            for t in range(NEW)
        ]
    )
    assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)


@pytest.mark.parametrize(
    "Method, options", [METHODS[name] for name in ("ada_kv+critical", "semantic")]
)
@torch.inference_mode()
def test_perturbation_is_definition_1_of_every_layer_alone(
    model, full, Method, options
):
    """Softmax over the kept and the new token, the full cache having the queries, keys and values."""
    total, caches = torch.zeros(B, L, H * G), told(make_cache(model, Method, **options))
    full_cache, _ = heard(model, LayerCache, {}, 1)

    def feed(layer, start, stop):
        qkv = (x[:, :, start:stop] for x in full_cache[layer][:3])
        caches[layer].attend(*qkv, torch.arange(start, stop)[None])

    for layer in range(L):
        feed(layer, 0, CUT + 1)
    crop(caches, CUT)
    compress(model, TOKENS[:, :CUT], caches)
    for layer, (q, k, v, _) in enumerate(full_cache):
        cache, w_o = caches[layer], model.blocks[layer].attention.o.weight

        def o(b, h, t, seen):
            weight = (k[b, h // G, seen] @ q[b, h, t] / math.sqrt(D)).softmax(0)
            return w_o[:, h * D : (h + 1) * D] @ (weight @ v[b, h // G, seen])

        for t in range(CUT, T - 1):
            for b, h in product(range(B), range(H * G)):
                # others are empty slots
                kept = [i for i in cache.pos[b, h // G].tolist() if i < t]
                total[b, layer, h] += (
                    (o(b, h, t, [*range(t + 1)]) - o(b, h, t, [*kept, t])).abs().sum()
                )
            feed(layer, t, t + 1)
    found = perturbation(
        model, full, lambda *_: told(make_cache(model, Method, **options))
    )
    torch.testing.assert_close(found, total / NEW)
    assert total.min() > 0.01


def test_bytes_are_counted(model, full):
    row = continuation(model, full, lambda *_: make_cache(model, H2O, budget=10))
    # H2O adds a number; the last token is read, too
    slot, read = L * B * H * (SLOT + 4), CUT + 1
    # 12 is 11 and a tenth; the second chunk of the prompt made the slots grow
    assert (row["live"], row["allocated"], row["peak"]) == (
        10 * slot,
        12 * slot,
        (read + read // 10) * slot,
    )
    # written at once
    row = continuation(model, full, maker(model, LayerCache, None), full.recording)
    assert (row["live"], row["peak"]) == (
        (T - 1) * L * B * H * SLOT,
        read * L * B * H * SLOT,
    )
    assert (
        continuation(model, full, maker(model, LayerCache, None), chunk_size=read)[
            "peak"
        ]
        == row["peak"]
    )


# ---- one reading for all methods ---


def state(caches):
    """Everything that a cache holds, without the slack of its slots."""
    slots = [{name: cache.slot(name) for name in cache.slots} for cache in caches]
    other = [
        {
            name: x
            for name, x in vars(cache).items()
            if isinstance(x, int | torch.Tensor)
        }
        for cache in caches
    ]
    return [*zip(slots, other)]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@every_method
def test_a_record_leaves_every_cache_as_reading_does(
    model, benchmarks, monkeypatch, Method, options
):
    """And the cache that is agnostic shares nothing with the one that reads the question."""

    def make(n, prompt):
        return told(make_cache(model, Method, **options), prompt)

    recorders = make_cache(model, Recorder)
    # one whose question is one token
    last = SimpleNamespace(tokens=TOKENS.numpy(), question=70, answers=[slice(71, 73)])
    recorded = [
        (
            last,
            [
                record(model, recorders, part)
                for part in prompt_and_question(model, last)[1:]
            ],
        )
    ]
    recorded += [
        (batch, one.recordings[task])
        for one in benchmarks
        for task, batch in one.batches.items()
    ]
    monkeypatch.setattr(evaluate, "answer", lambda *args: args[3:5])
    for batch, recordings in recorded:
        read = retrieve(model, batch, make)
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "feed", None)
            replayed = retrieve(model, batch, make, recordings)
        for setting, (fed, caches) in read.items():
            assert replayed[setting][0] == fed == caches[0].seen
            same(state(replayed[setting][1]), state(caches))
        assert read["aware"][0] == batch.answers[0].start - 1
        tokens, context, _ = prompt_and_question(model, batch)
        feed(
            model,
            context,
            alone := make(batch.question, tokens[:, : batch.answers[0].start]),
        )
        same(state(alone), state(read["agnostic"][1]))


def shows(change, watch=0):
    """A method whose `read` gives something else than what was written."""
    read = lambda self: change(self.seen, *LayerCache.read(self))
    return type("Shows", (LayerCache,), dict(read=read, watch=watch))


def forgets(after):
    """A method that keeps the last 20 tokens as soon as it has seen more than `after`."""
    observe = lambda self, q, p: self.seen > after and self.shrink(self.pos, 20)
    return type("Forgets", (LayerCache,), dict(observe=observe, watch=1))


OTHERWISE = {
    # the question is there as it was
    "evicts": forgets(0),
    "forgets the context": forgets(70),
    "keys": shows(lambda seen, k, v, at, bias: (1.1 * k, v, at, bias)),
    "the context's keys, later": shows(
        lambda seen, k, v, at, bias: (
            torch.where(at[..., None] < seen - 70, 0, k),
            v,
            at,
            bias,
        )
    ),
    "values": shows(lambda seen, k, v, at, bias: (k, 1.1 * v, at, bias)),
    "positions": shows(lambda seen, k, v, at, bias: (k, v, at // 2, bias)),
    "bias": shows(lambda seen, k, v, at, bias: (k, v, at, -0.1 * (at % 3))),
    "less at first": shows(
        lambda seen, *shown: [
            *(x[:, :, : 1 if seen <= 64 else None] for x in shown[:3]),
            None,
        ],
        ALL,
    ),
    "attend": type(
        "Answers",
        (LayerCache,),
        dict(attend=lambda *given: 1.1 * LayerCache.attend(*given)),
    ),
}


@pytest.mark.parametrize("Method", OTHERWISE.values(), ids=OTHERWISE)
def test_a_method_that_shows_something_else_reads_for_itself(model, full, Method):
    recorders, caches = make_cache(model, Recorder), make_cache(model, Method)
    with pytest.raises(CannotReplay):
        parts = []
        for part in (TOKENS[:, :70], TOKENS[:, 70:]):
            parts.append(record(model, recorders, part))
            replay(parts, caches)
    make = maker(model, Method, None)
    replayed, read = (
        replayed_or_read(continuation, model, full, make, full.recording),
        continuation(model, full, make),
    )
    for key in ("perplexity", "kl", "l1", "live"):
        same(replayed[key], read[key])


# ---- what a row holds beyond its budget ---

NeverEvicts = type("NeverEvicts", (RandomEviction,), dict(evict=lambda self: None))
EvictsHalf = type(
    "EvictsHalf", (H2O,), dict(evict=lambda self: self.layer and H2O.evict(self))
)
ForgetsSuper = type("ForgetsSuper", (H2O,), dict(observe=lambda *_: None))


@once
def LONG():
    """A decoder with heads as large as the checkpoint's, and texts as long as those of `compare`."""
    # KVzip reads twice
    decoder = Decoder(Config(**SIZE | dict(max_len=1024), head_dim=32, d_ff=32)).eval()
    tokens = torch.randint(0, V, (2, 456), generator=torch.Generator().manual_seed(2))
    return decoder, reference(decoder, tokens, 8)


def measured(Method, keep_ratio):
    decoder, full = LONG()
    make = maker(
        decoder,
        Method,
        keep_ratio,
        ENDS,
        **given(Method, window_size=8, heads=((1, 0),)),
    )
    return replayed_or_read(continuation, decoder, full, make, full.recording) | dict(
        keep_ratio=keep_ratio
    )


@pytest.mark.parametrize(
    "Method, slots, message",
    [
        (
            NeverEvicts,
            447,
            "holds 447 slots a head after a prompt, and its budget is 112",
        ),
        (
            EvictsHalf,
            (447 + 112) / 2,
            "holds 279.5 slots a head after a prompt, and its budget is 112",
        ),
        (ForgetsSuper, 112, "does its observe call super"),
    ],
)
def test_a_method_that_holds_more_is_found_out(Method, slots, message):
    row = measured(Method, 0.25)
    assert row["slots"] == slots and message in excess(row)
    assert excess(row | dict(keep_ratio=None)) == ""


@pytest.mark.parametrize(
    "name", [name for name in pick([]) if has_budget(pick([name])[name])]
)
def test_no_method_is_said_to_hold_more_than_its_budget(name):
    row = measured(pick([name])[name], 0.0625)
    assert row["prompt"] == 447 and excess(row) == ""
    assert 0 < row["slots"] <= 28
    if name in ("h2o", "ada_kv"):
        assert (row["slots"], row["slots_end"]) == (28, 28 + 8 * (name != "h2o"))


def test_slots_are_those_of_the_text_that_has_the_most():
    one, other = LayerCache(), LayerCache()
    for cache in (one, other):
        cache.write(
            torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 6, 4), torch.arange(6)[None]
        )
    one.keep(torch.tensor([[[0, 1, -1], [0, -1, -1]], [[0, 1, 2], [0, -1, -1]]]))
    assert evaluate.slots([one, other]) == (3 + 1 + 6 + 6) / 4


# ---- retrieval ---


def answers_by_loop(model, make, batch, cut):
    """[document][question]: which tokens of the answer are right, the first `cut` ones being compressed."""
    right = []
    for tokens in torch.from_numpy(batch.tokens).split(1):
        caches, fed = make(batch.question, tokens), cut
        # aware: the last token is fed again
        model(tokens[:, : cut + (cut > batch.question)], caches)
        crop(caches, cut)
        compress(model, tokens[:, :cut], caches)
        right.append([])
        for span in batch.answers:
            for t in range(fed, span.start):
                logits = model(tokens[:, t : t + 1], caches)
            exact = []
            for t in range(span.start, span.stop):
                exact.append(logits.argmax().item() == tokens[0, t])
                logits = model(logits.argmax(-1), caches)
            right[-1].append(exact)
            fed = span.stop
    return right


@torch.inference_mode()
def test_aware_compresses_all_but_one_token_and_agnostic_the_context():
    """An answer that was given stays, right or wrong; then come the true tokens up to the next one."""
    batch, model = (
        tasks("test").batch("needle", 0, 6, 200, questions=3, numbers=2),
        from_hf(TINY),
    )
    make = maker(model, SnapKV, 0.4, window_size=8)
    found = retrieve(model, batch, make)
    for setting, cut in dict(
        aware=batch.answers[0].start - 1, agnostic=batch.question
    ).items():
        right = answers_by_loop(model, make, batch, cut)
        shares = [np.mean([all(exact) for exact in answers]) for answers in right]
        assert (
            found[setting].tolist() == pytest.approx(shares) and 0 < np.mean(shares) < 1
        )
        # half right is wrong
        assert any(0 < sum(exact) < 4 for answers in right for exact in answers)


@pytest.mark.parametrize("Method, options", [(LayerCache, {}), (H2O, dict(budget=40))])
@torch.no_grad()
def test_questions_and_answers_are_fed_once_and_the_last_token_never(
    model, Method, options
):
    batch = tasks("test").batch("needle", 0, 2, 200, questions=3)
    tokens, context, _ = prompt_and_question(model, batch)
    caches = make_cache(model, Method, **options)
    feed(model, context, caches)
    compress(model, context, caches)
    said = evaluate.answers(model, tokens, batch.answers, batch.question, caches)
    assert [x.shape[1] for x in said] == [
        span.stop - span.start for span in batch.answers
    ]
    assert caches[0].seen == batch.answers[-1].stop - 1


# ---- rows ---


def test_mean_and_error_is_the_standard_error_of_the_mean():
    assert mean_and_error(torch.tensor([1.0, 2.0, 3.0, 6.0])) == pytest.approx(
        (3, math.sqrt(14 / 3 / 4))
    )


# ---- what cannot be measured ---


def test_hooks_are_taken_out_again(model):
    with pytest.raises(KeyError), evaluate.head_outputs(model):
        raise KeyError
    assert not any(block.attention.o._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize(
    "message, ask",
    [
        (
            "documents 1 must be a .* at least 2",
            lambda model: build(model, None, 320, 1),
        ),
        ("T 320.0 must be", lambda model: build(model, None, 320.0, 4)),
        (
            "513 tokens exceed the model's length of 512",
            lambda model: build(model, None, 513, 4),
        ),
        (
            "520 prompt .* exceed",
            lambda model: retrieve(
                model, tasks("test").batch("needle", 0, 2, 520), None
            ),
        ),
        (
            "560 prompt tokens .* exceed .* length of 512",
            lambda model: reference(model, TOKENS.repeat(1, 7), 8),
        ),
        *(
            (
                "keep_ratio .* of the prompt must lie above 0",
                lambda model, x=x: maker(model, H2O, x),
            )
            for x in (0, 1.01, math.nan, "0.5")
        ),
        *(
            (
                "(windows 0|T 1|T 1000000000) must be",
                lambda model, x=x: text_windows(tasks("test"), *x),
            )
            for x in ((0, 50), (4, 1), (4, 10**9))
        ),
        *(
            (
                f"continuation of {x} tokens must be shorter than .* {T} by",
                lambda model, x=x: reference(model, TOKENS, x),
            )
            for x in (0, T - 1)
        ),
        (
            "no question; take a",
            lambda model: retrieve(
                model, tasks("test").batch("plain", 0, 2, 320), None
            ),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(
    model, monkeypatch, message, ask
):
    monkeypatch.setattr(Decoder, "forward", None)
    with pytest.raises(ValueError, match=message) as error:
        ask(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bos, first", [(None, []), (7, []), (2047, [2047])])
def test_texts_begin_as_the_model_s_do(model, monkeypatch, bos, first):
    # 2047 is what the tokenizer calls BOS
    monkeypatch.setattr(model.config, "bos", bos)
    stream = tasks("test").stream[tasks("test").stream != tasks("test").bos].tolist()
    n, rows = 24 - len(first), text_windows(tasks("test"), 5, 24, model)
    starts = [int(x) for x in np.linspace(0, len(stream) - n, 5)]
    assert (
        rows.tolist() == [first + stream[i : i + n] for i in starts]
        and rows.dtype == torch.int64
    )
    assert text_windows(tasks("test"), 5, 24)[0].tolist() == stream[:24]


def test_caches_that_read_within_their_budget_never_hold_more(model, full):
    make = reading_within(maker(model, H2O, 0.25))
    caches = make(CUT)
    assert len(caches) == L and all(
        cache.budget == round(0.25 * CUT) for cache in caches
    )
    with torch.no_grad():
        for part in TOKENS.split(7, 1):
            model(part, caches)
            assert all(
                cache.length == min(cache.seen, cache.budget) for cache in caches
            )
    with pytest.raises(CannotReplay):
        replay([full.recording], make(CUT))
    row, after = continuation(model, full, make, chunk_size=7), make(CUT)
    assert row["slots"] == row["slots_end"] == budget_for(0.25, CUT)
    with torch.no_grad():
        for part in TOKENS[:, :CUT].split(7, 1):
            model(part, after)
        log_p = torch.cat(
            [model(token, after) for token in TOKENS[:, CUT:-1].split(1, 1)], 1
        ).log_softmax(-1)
    expected = -log_p.gather(-1, TOKENS[:, CUT + 1 :, None])[..., 0].mean(-1)
    assert torch.allclose(row["nll"], expected, rtol=1e-5)
    batch = tasks("test").batch("needle", 0, 2, 320)
    everything = retrieve(
        model, batch, reading_within(maker(model, H2O, 1.0)), chunk_size=7
    )
    assert all(
        torch.equal(x, retrieve(model, batch, maker(model, LayerCache, None))[setting])
        for setting, x in everything.items()
    )
