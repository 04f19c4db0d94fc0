"""Every cache of a batch answers as it does alone, read by the decoder and not from a recording."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from foreign import SHAPE
from lab import answering
from lab.answering import Job, answered
from lab.methods_by_name import pick
from lab.question_file import Encoder, Question
from lab.retrieval import maker
from methods.baselines.kvzip import KVzip
from nanollm import TINY, tokenizer
from nanollm.bridge import Bridged
from nanollm.cache import bytes_in_16_bits, compress, copied
from nanollm.checkpoint import from_hf
from nanollm.generate import prefill

NAMES = (
    "full snap_kv ada_kv+critical kvzip kvzip@4 scissorhands h2o kv_reviver_shrunk random "
    "full@2"
).split()
TEXT = "The first line says little. The code of table is 4810. " + "And so on. " * 20
ASKED = [
    Question(TEXT, "Q:", ["4810"], "Q: The code of table is", max_new_tokens=9, line=1),
    Question(TEXT, "Q: And", ["so", "no"], "And", max_new_tokens=4, line=2),
]


@pytest.fixture(scope="module")
def built():
    return from_hf(TINY)


@pytest.fixture(scope="module")
def encoder(built):
    return Encoder(tokenizer.load(TINY / "tokenizer.tiktoken"), built.config)


def jobs_of(model, *names, ratio=0.25):
    jobs = []
    for name, variant in pick([*names]).items():
        own = ratio if variant.takes("budget") else None
        options = variant.given(window_size=8)
        make = maker(model, variant.kind, own, variant.store, **options)
        jobs.append(Job(name, own, make))
    return jobs


@torch.no_grad()
def alone(model, encoder, question, setting, job):
    """Return reply, −log p of the right answer, and KiB of one cache."""
    context = encoder.context(question.context)
    asked, lead, answer = encoder.question(question)
    fed = torch.cat((asked, lead), 1)
    if setting == "aware":
        context, fed = torch.cat((context, asked), 1), lead
    caches = job.make(context.shape[1])
    prefill(model, context, caches)
    compress(model, context, caches)
    kib = bytes_in_16_bits(caches) / 1024
    logits = model(fed, caches, last=1)[0]
    after = model(answer, copied(caches))[0]
    log_p = torch.cat((logits, after[:-1])).log_softmax(-1)
    nats = [-log_p[i, token].item() for i, token in enumerate(answer[0].tolist())]

    said = [logits[0].argmax().item()]
    while len(said) < question.max_new_tokens:
        if question.scored(encoder.encoding.decode(said)) == 1:
            break
        logits = model(torch.tensor([said[-1:]]), caches)
        said.append(logits[0, -1].argmax().item())
    return encoder.encoding.decode(said), sum(nats) / len(nats), kib


@pytest.mark.parametrize("setting", ["agnostic", "aware"])
def test_each_cache_answers_as_alone(built, encoder, setting):
    jobs = jobs_of(built, *NAMES)
    records = answered(built, encoder, ASKED, {setting: jobs})
    assert len(records) == len(NAMES) * len(ASKED)
    scores = set()
    for record in records:
        job = next(job for job in jobs if job.method == record["method"])
        question = ASKED[record["line"] - 1]
        reply, nats, kib = alone(built, encoder, question, setting, job)
        assert record["reply"] == reply, job.method
        assert record["surprise"] == pytest.approx(nats, abs=2e-3), job.method
        assert record["kib"] == kib
        assert record["score"] == question.scored(reply)
        assert record["setting"] == setting
        assert record["context"] == 1
        assert record["keep_ratio"] == job.keep_ratio
        scores.add(record["score"])
    assert {0, 1} <= scores


def test_a_batch_may_be_divided(built, encoder, monkeypatch):
    jobs = dict(agnostic=jobs_of(built, "full", "snap_kv", "h2o"))
    whole = answered(built, encoder, ASKED, jobs)
    monkeypatch.setattr(answering, "ROWS", 2)
    for row, same in zip(answered(built, encoder, ASKED, jobs), whole, strict=True):
        # a batch of another size may round otherwise
        assert row.pop("surprise") == pytest.approx(same.pop("surprise"), abs=2e-3)
        assert row == same


def test_kvzip_scores_a_prompt_once_for_all_budgets(built, encoder, monkeypatch):
    scored = []
    scores = KVzip.scores
    note = lambda *of: scored.append(1) or scores(*of)
    monkeypatch.setattr(KVzip, "scores", note)
    jobs = jobs_of(built, "kvzip", "kvzip@4")
    jobs += jobs_of(built, "kvzip", ratio=0.5)
    other = Job("other", 0.25, maker(built, KVzip, 0.25, piece=9))
    jobs = dict(agnostic=[*jobs, other])
    first, rounded, second, last = answered(built, encoder, ASKED[:1], jobs)
    assert len(scored) == 2
    assert rounded["kib"] < first["kib"] < second["kib"]
    assert last["surprise"] != first["surprise"]  # its own scores


def test_a_reply_ends_at_a_special_token_or_after_its_most_tokens(built, encoder):
    jobs = dict(agnostic=jobs_of(built, "full"))
    long = Question(TEXT, "Q: And", ["never"], max_new_tokens=6)
    (record,) = answered(built, encoder, [long], jobs)
    said = encoder.encoding.encode_ordinary(record["reply"])
    assert len(said) == 6
    decode = encoder.encoding.decode
    ends = SimpleNamespace(decode=decode, special={said[2]})
    stops = SimpleNamespace(
        encoding=ends, context=encoder.context, question=encoder.question
    )
    (record,) = answered(built, stops, [long], jobs)
    assert record["reply"] == decode(said[:2])


def test_a_method_that_fails_is_named(built, encoder):
    def broken(tokens):
        raise IndexError("no slot")

    jobs = [*jobs_of(built, "full"), Job("mine", 0.25, broken)]
    failed, *records = answered(built, encoder, ASKED, dict(agnostic=jobs))
    error = "IndexError: no slot"
    assert failed == dict(method="mine", keep_ratio=0.25, error=error, context=1)
    assert len(records) == len(ASKED)


def test_layers_that_slide_answer_as_alone():
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    shape = SHAPE | dict(num_hidden_layers=2, head_dim=16, layer_types=kinds)
    config = Gemma3TextConfig(**shape, sliding_window=16)
    model = Bridged(AutoModelForCausalLM.from_config(config).eval())
    some = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(3, model.config.vocab_size, (1, n), generator=some)
    context, asked, lead, answer = draw(40), draw(12), draw(3), draw(4)
    stub = SimpleNamespace(
        encoding=SimpleNamespace(decode=str, special=set()),
        context=lambda text: context,
        question=lambda question: (asked, lead, answer),
    )
    question = Question("c", "q", ["nothing"], max_new_tokens=20)
    jobs = jobs_of(model, "full", "snap_kv", "kvzip")
    for record, job in zip(
        answered(model, stub, [question], dict(agnostic=jobs)), jobs, strict=True
    ):
        reply, nats, kib = alone(model, stub, question, "agnostic", job)
        assert record["reply"] == reply
        assert record["surprise"] == pytest.approx(nats, abs=2e-3)
        assert record["kib"] == kib
