"""Compare the gated forward and the training of gates with loops; check calibration."""
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from common import decoder, dense, end, tasks
from methods.baselines import duo_attention
from methods.baselines.duo_attention import DuoAttention
from methods.baselines.duo_gates import ask, gates, predictions, retrieval_heads
from methods.baselines.streaming_llm import StreamingLLM
from nanollm import TINY, checkpoint
from nanollm.cache import LayerCache, make_cache
from nanollm.generate import prefill

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
        end(*caches)
        expected = model(asked.tokens[:, :-1], caches, last=asked.n).log_softmax(-1)
        assert torch.allclose(predictions(model, asked, alpha, sinks, window), expected, atol=2e-5)


def test_gates_are_the_loop_s():
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


def test_a_large_penalty_closes_every_gate():
    closed = gates(decoder(**SIZE), tasks("test"), 2, 150, steps=30, penalty=(1000.0, 1000.0), rate=0.05)
    assert closed.allclose(torch.tensor(9.5 / 30), atol=5e-3)  # the mean of 0.95, 0.9 … 0, then 0


def test_retrieval_heads_score_more_than_the_least_and_come_in_order():
    """Retrieval heads score above `least`, the highest first; ties in the decoder's order."""
    score = torch.tensor([[0.25, 0.5, -3.0, 0.0], [0.75, 0.5, 0.125, 2.0]])
    assert retrieval_heads(score, 0.25) == ((1, 3), (1, 0), (0, 1), (1, 1))
    every = tuple((i, j) for i in range(3) for j in range(20))
    assert retrieval_heads(torch.full((3, 20), 0.101)) == every


def test_calibration_finds_the_built_retrieval_heads(monkeypatch):
    """Two short documents and a few large steps are enough."""
    batches = []

    def batch(*what):
        batches.append(what)
        return tasks("test").batch(what[0], what[1], 2, 160)

    monkeypatch.setattr(duo_attention, "gates", partial(gates, steps=70, rate=0.06))
    found = DuoAttention.calibrate(checkpoint.from_hf(TINY), SimpleNamespace(batch=batch))
    assert batches == [("needle", 0, 32, 512), ("pairs", 0, 32, 512)] and found.keys() == {"heads"}
    heads = found["heads"]
    assert {*heads[:3]} == {(1, 0), (1, 1), (1, 2)} and len(heads) == 3
