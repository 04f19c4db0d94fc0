"""Compare the gated forward, `importance` and the training of gates with loops; check calibration."""
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from common import ENCODING, decoder, dense, tasks
from experiments.inside import importance
from methods import duo_attention
from methods.duo_attention import DuoAttention
from methods.duo_gates import ask, gates, heads_by_kvzip, predictions, retrieval_heads
from methods.kvzip import KVzip
from methods.streaming_llm import StreamingLLM
from nanollm import TINY
from nanollm.cache import LayerCache, end_prefill, make_cache
from nanollm.commands.registry import calibrated, pick
from nanollm.generate import prefill, reread
from nanollm.hf import checkpoint

SIZE = dict(vocab_size=2048, n_layers=2, n_heads=4, n_kv_heads=2, max_len=200)


class Mixture(LayerCache):
    """Per key/value head: alpha (H,) of full attention, the rest of attention masked by `visible` (T, T)."""
    def attend(self, q, k, v, pos):
        B, H, T, _ = k.shape
        full, streaming = (dense(q, k, v, mask.expand(B, H, -1, -1))
                           for mask in (torch.ones(T, T, dtype=torch.bool).tril(), self.visible))
        alpha = self.alpha.repeat_interleave(q.shape[1] // H).view(-1, 1, 1)
        return alpha * full + (1 - alpha) * streaming


def mixed(model, batch, alpha, sinks, window):
    """Return log p of the answer (B, n, V), in one pass over the documents; alpha (L, H)."""
    tokens, answer, T = torch.from_numpy(batch.tokens), batch.answers[0], batch.tokens.shape[1]
    caches, visible = make_cache(model, Mixture), torch.ones(T, T, dtype=torch.bool).tril()
    visible[batch.question:, sinks:max(sinks, batch.question - (window - sinks))] = False
    for cache, of_layer in zip(caches, alpha):
        cache.alpha, cache.visible = of_layer, visible
    return model(tokens, caches)[:, answer.start - 1:answer.stop - 1].log_softmax(-1)


@pytest.mark.parametrize("given", [dict(), dict(sinks=3, window=9, seed=5, of=("copy",))])
@torch.no_grad()
def test_importance_is_what_is_lost_when_one_head_streams(given):
    """A head's importance is the loss in nats if this head alone streams."""
    model, T = decoder(**SIZE), 150
    sinks, window, of = given.get("sinks", 4), given.get("window", 16), given.get("of", ("needle", "pairs"))
    expected = torch.zeros(2, 2)
    for task in of:
        batch = tasks("test").batch(task, given.get("seed", 0), 3, T)
        right = torch.from_numpy(batch.tokens[:, batch.answers[0]])
        nats = lambda alpha: F.nll_loss(mixed(model, batch, alpha, sinks, window).mT, right)
        for layer in range(2):
            for h in range(2):
                alpha = torch.ones(2, 2)
                alpha[layer, h] = 0
                expected[layer, h] += (nats(alpha) - nats(torch.ones(2, 2))) / len(of)
    got = importance(model, tasks("test"), documents=3, T=T, **given)
    assert got.shape == (2, 2) and expected.abs().min() > 1e-4
    assert torch.allclose(got, expected, atol=5e-6)
    assert importance(model, tasks("test"), documents=2, T=T, window=1000).abs().max() < 1e-6


@pytest.mark.parametrize("sinks, window", [(4, 16), (3, 9), (0, 1), (4, 1000)])
@torch.no_grad()
def test_the_gated_forward_is_a_mixture_of_full_and_streaming_attention(sinks, window):
    """Gated predictions equal dense masked attention; gates of 1 and 0 equal full and streaming caches."""
    model, T = decoder(**SIZE), 150
    (asked,) = ask(model, tasks("test"), ("needle",), 3, T, 0, 3)
    batch = tasks("test").batch("needle", 0, 3, T)
    ones, some = torch.ones(2, 2), torch.tensor([[.25, 1.], [.5, 0.]])
    for alpha in (ones, some, 0 * ones):
        found = predictions(model, asked, alpha, sinks, window)
        assert torch.allclose(found, mixed(model, batch, alpha, sinks, window), atol=2e-5)

    # with gates of 1 or 0, predictions equal those of a full or a streaming cache
    context = torch.from_numpy(batch.tokens[:, :batch.question])
    streaming = partial(StreamingLLM, window, sinks, relative=False)
    for alpha, Method in ((ones, LayerCache), (0 * ones, streaming)):
        caches = make_cache(model, Method)
        prefill(model, context, caches)
        end_prefill(caches)
        expected = model(asked.tokens[:, :-1], caches, last=asked.n).log_softmax(-1)
        assert torch.allclose(predictions(model, asked, alpha, sinks, window), expected, atol=2e-5)


def test_gates_are_the_loop_s():
    """The trained gates equal those of a plain training loop."""
    model, train = decoder(**SIZE).requires_grad_(False), tasks("test")
    given = dict(sinks=3, window=9, seed=5, task_names=("copy", "needle"))
    batches = [train.batch(task, 5, 3, 150) for task in given["task_names"]]
    parts = [(batch, rows) for rows in (slice(0, 2), slice(2, 3)) for batch in batches]
    alpha = torch.ones(2, 2, requires_grad=True)
    adam = torch.optim.Adam([alpha], 0.1)
    mean = torch.zeros(2, 2)
    for i, (batch, rows) in enumerate([*parts, *parts]):
        full, now = (mixed(model, batch, x, 3, 9)[rows] for x in (torch.ones(2, 2), alpha))
        kl = (full.exp() * (full - now)).sum(-1).mean()
        adam.zero_grad()
        (kl + 0.2 * 4 ** (i / 7) * alpha.abs().sum() / 4).backward()
        adam.step()
        with torch.no_grad():
            mean += alpha.clamp_(0, 1) / 8
    found = gates(model, train, 3, 150, **given, steps=8, penalty=(0.2, 0.8), rate=0.1, rows=2)
    assert torch.allclose(found, mean, atol=1e-4) and found.min() < 0.7 and not found.requires_grad


def test_gates_leave_the_weights_alone_and_depend_on_the_seed_alone():
    """Training gates changes no weight, needs no grad mode and depends only on its seed."""
    model = decoder(**SIZE)
    model.norm.weight.requires_grad_(False)
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    found = []
    for seed, grad in ((0, True), (0, False), (1, True)):
        torch.manual_seed(len(found))
        with torch.set_grad_enabled(grad):
            found.append(gates(model, tasks("test"), 2, 150, seed=seed, steps=6))
            assert torch.is_grad_enabled() == grad
    for name, p in model.named_parameters():
        assert p.grad is None and torch.equal(p, before[name][0]) and p.requires_grad == before[name][1]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_gates_of_the_built_heads_stay_and_a_larger_penalty_leaves_fewer(shipped):
    """The gates of the built retrieval heads stay open; a larger penalty closes gates earlier."""
    on = lambda *penalty, steps=60: gates(shipped, tasks("test"), 4, 200, steps=steps, penalty=penalty)
    found, closed, rest = on(0.05, 10.0), on(1000.0, 1000.0), [0, 2, 3, 4, 5]
    assert {*retrieval_heads(found, 0.6)} == {(1, 0), (1, 1), (1, 2)} and found[rest].max() < 0.5
    assert (on(1.0, 10.0)[1] < found[1] - 0.02).all()
    assert closed.allclose(torch.tensor(24.5 / 60), atol=5e-3)  # mean of 0.98, 0.96 … 0, then 0
    assert on(1.0, 1.0, steps=1).allclose(torch.tensor(0.98))  # at 1 the KL is flat


def test_retrieval_heads_score_more_than_the_least_and_come_in_order():
    """Retrieval heads score above `least`, the highest first; ties in the decoder's order."""
    lost = torch.tensor([[0.25, 0.5, -3.0, 0.0], [0.75, 0.5, 0.125, 2.0]])
    assert retrieval_heads(lost, 0.25) == ((1, 3), (1, 0), (0, 1), (1, 1))
    assert retrieval_heads(lost) == ((1, 3), (1, 0), (0, 1), (1, 1), (0, 0), (1, 2))
    every = tuple((i, j) for i in range(3) for j in range(20))  # ties in the decoder's order
    assert retrieval_heads(torch.full((3, 20), 0.101)) == every
    assert retrieval_heads(torch.full((3, 20), 0.099)) == ()


@pytest.fixture(scope="module")
def shipped():
    return checkpoint.from_hf(TINY)


@pytest.fixture
def asked(monkeypatch):
    """Record the batches that calibration asks for, and give it two short documents of the test split."""
    asked = []

    def batch(split, *what):
        asked.append((split, *what))
        return tasks("test").batch(what[0], what[1], 2, 160)

    tasks_of = lambda encoding, split: SimpleNamespace(batch=partial(batch, split))
    monkeypatch.setattr(duo_attention, "Tasks", tasks_of)
    return asked


def test_it_retrieves_in_layer_1_alone_also_for_other_tasks(shipped):
    """In the built decoder only layer 1's heads are important, also for few-shot labels."""
    lost = importance(shipped, tasks("test"), documents=4, T=512, of=("few_shot",))
    assert lost[1].min() > 4 * lost[[0, 2, 3, 4, 5]].abs().max()


def test_calibrate_and_the_command_line_give_the_decoder_s_heads(shipped, asked):
    """Calibration through the command line's registry finds the built heads."""
    DuoAttention.calibrate(decoder(**SIZE | dict(max_len=170)), ENCODING)  # asks for texts of 170
    (Method,) = pick(["duo_attention"]).values()
    found = calibrated(Method, shipped, ENCODING)
    assert Method is DuoAttention and calibrated(LayerCache, shipped, ENCODING) == {}
    assert asked == [("train", task, 0, 32, T) for T in (170, 512) for task in ("needle", "pairs")]
    assert found.keys() == {"heads"} and sorted(found["heads"]) == [(1, 0), (1, 1), (1, 2)]


def test_calibration_without_the_tokenizer_of_the_tasks_is_refused():
    """Calibration without a tiktoken tokenizer raises ValueError."""
    with pytest.raises(ValueError, match="need a tiktoken tokenizer; give DuoAttention its heads"):
        DuoAttention.calibrate(None, object())


def test_the_heads_whose_entries_kvzip_ranks_highest_are_the_built_ones(shipped, asked):
    """The three heads that KVzip scores highest are the built retrieval heads."""
    (Method,) = pick(["duo_attention_kvzip"]).values()
    assert issubclass(Method, DuoAttention)
    heads = calibrated(Method, shipped, ENCODING)["heads"]
    assert asked == [("train", "plain", 0, 16, 512)] and {*heads[:3]} == {(1, 0), (1, 1), (1, 2)}
    assert sorted(heads) == [(layer, head) for layer in range(6) for head in range(3)]


@torch.no_grad()
def test_heads_by_kvzip_are_in_the_order_of_their_mean_scores():
    """`heads_by_kvzip` orders heads by the mean of KVzip's scores."""
    model, T = decoder(**SIZE), 96
    caches = make_cache(model, KVzip, budget=T)
    tokens = torch.from_numpy(tasks("test").batch("plain", 2, 4, T).tokens)
    prefill(model, tokens, caches)
    reread(caches, lambda part: prefill(model, tokens[:, part], caches))
    mean = {(layer, h): cache.scores()[:, h].mean() for layer, cache in enumerate(caches) for h in (0, 1)}
    assert heads_by_kvzip(model, tasks("test"), 4, T, 2, rows=3) == tuple(sorted(mean, key=mean.get)[::-1])
