"""Who retrieves: importance against a forward in which one head streams; what calibration gives."""
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from common import ENCODING, decoder, dense, tasks
from methods import duo_attention
from methods.duo_attention import DuoAttention
from methods.theory.duo_attention import importance, retrieval_heads
from nanollm import TINY, weights
from nanollm.cache import LayerCache, make_cache
from nanollm.select import calibrated, pick

SIZE = dict(vocab_size=2048, n_layers=2, n_heads=4, n_kv_heads=2, max_len=200)


class Masked(LayerCache):
    """Attention to the tokens that `visible` (H, T, T) shows to each key/value head."""
    def attend(self, q, k, v, pos):
        return dense(q, k, v, self.visible.expand(len(q), -1, -1, -1))


def nats(model, tokens, answer, visible):
    """−log p of the answer; visible (L, H, T, T)."""
    caches = make_cache(model, Masked)
    for cache, of_layer in zip(caches, visible):
        cache.visible = of_layer
    logits = model(tokens, caches)[:, answer.start - 1:answer.stop - 1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, answer].flatten())


@pytest.mark.parametrize("given", [dict(), dict(sinks=3, window=9, seed=5, of=("copy",))])
@torch.no_grad()
def test_importance_is_what_is_lost_when_one_head_streams(given):
    model, T = decoder(**SIZE), 150
    sinks, window, of = given.get("sinks", 4), given.get("window", 16), given.get("of", ("needle", "recall"))
    expected = torch.zeros(2, 2)
    for task in of:
        batch = tasks("test").batch(task, given.get("seed", 0), 3, T)
        tokens, answer = torch.from_numpy(batch.tokens), batch.answers[0]
        causal = torch.ones(2, 2, T, T, dtype=torch.bool).tril()
        full = nats(model, tokens, answer, causal)
        for layer in range(2):
            for h in range(2):
                seen = causal.clone()
                seen[layer, h, batch.question:, sinks:batch.question - (window - sinks)] = False
                expected[layer, h] += (nats(model, tokens, answer, seen) - full) / len(of)
    got = importance(model, tasks("test"), documents=3, T=T, **given)
    assert got.shape == (2, 2) and expected.abs().min() > 1e-4
    assert torch.allclose(got, expected, atol=5e-6)
    assert importance(model, tasks("test"), documents=2, T=T, window=1000).abs().max() < 1e-6


def test_retrieval_heads_lose_more_than_the_least_and_come_in_order():
    lost = torch.tensor([[0.25, 0.5, -3.0, 0.0], [0.75, 0.5, 0.125, 2.0]])
    assert retrieval_heads(lost, 0.25) == ((1, 3), (1, 0), (0, 1), (1, 1))
    assert retrieval_heads(lost) == ((1, 3), (1, 0), (0, 1), (1, 1), (0, 0), (1, 2))
    every = tuple((i, j) for i in range(3) for j in range(20))  # ties in the decoder's order
    assert retrieval_heads(torch.full((3, 20), 0.101)) == every
    assert retrieval_heads(torch.full((3, 20), 0.099)) == ()


@pytest.fixture(scope="module")
def shipped():
    return weights.from_hf(TINY)


@pytest.fixture
def asked(monkeypatch):
    """What calibration asks for; it is given two short documents of the test split, which is loaded."""
    asked = []

    def batch(split, *what):
        asked.append((split, *what))
        return tasks("test").batch(what[0], what[1], 2, 160)

    tasks_of = lambda encoding, split: SimpleNamespace(batch=partial(batch, split))
    monkeypatch.setattr(duo_attention, "Tasks", tasks_of)
    return asked


def test_it_retrieves_in_layer_1_alone_also_for_other_tasks(shipped):
    lost = importance(shipped, tasks("test"), documents=4, T=512, of=("few_shot",))
    assert lost[1].min() > 4 * lost[[0, 2, 3, 4, 5]].abs().max()


def test_calibrate_and_the_command_line_give_the_decoder_s_heads(shipped, asked):
    DuoAttention.calibrate(decoder(**SIZE | dict(max_len=170)), ENCODING)  # of short texts
    found = DuoAttention.calibrate(shipped, ENCODING)
    assert asked == [("train", task, 0, 32, T) for T in (170, 512) for task in ("needle", "recall")]
    assert found.keys() == {"heads"} and sorted(found["heads"]) == [(1, 0), (1, 1), (1, 2)]
    (Method,) = pick(["duo_attention"]).values()
    assert Method is DuoAttention
    assert calibrated(Method, shipped, ENCODING) == found and calibrated(LayerCache, shipped, ENCODING) == {}


def test_calibration_without_the_tokenizer_of_the_tasks_is_refused():
    with pytest.raises(ValueError, match="need a tiktoken tokenizer; give DuoAttention its heads"):
        DuoAttention.calibrate(None, object())
