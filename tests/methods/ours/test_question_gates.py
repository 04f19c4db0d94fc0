"""Check the training of gates by questions: choice and derivative; it evicts for real."""

import math

import pytest
import torch

from common import decoder, end, tasks
from methods.baselines.kvzip_fast import FastKVzip
from methods.ours import question_gates
from methods.ours.question_gates import (
    QuestionGates,
    ask,
    chosen,
    surprise,
    taught,
)
from nanollm import TINY, checkpoint
from nanollm.bridge import Bridged
from nanollm.cache import make_cache
from nanollm.generate import prefill

SIZE = dict(
    vocab_size=2048,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    max_len=200,
)


def soft(s, share, tau, free):
    """Return σ((s − θ)/τ) of the free entries, a function of s: θ moves so that the sum stays."""
    ranked = s.masked_fill(~free, math.inf)
    theta = ranked.flatten().topk(int(share * s.numel())).values[-1]
    total = ((s - theta) / tau).sigmoid()[free].sum()

    def choice(x):
        low = torch.tensor([-50.0], dtype=x.dtype)
        high = torch.tensor([50.0], dtype=x.dtype)
        for _ in range(200):  # bisection
            middle = (low + high) / 2
            if ((x - middle) / tau).sigmoid()[free].sum() > total:
                low = middle
            else:
                high = middle
        return ((x - low) / tau).sigmoid()

    return choice


@pytest.mark.parametrize("sinks, recent", [(0, 0), (2, 3)])
def test_the_highest_stay_and_the_derivative_is_that_of_a_soft_choice_of_one_size(
    sinks, recent
):
    g = torch.Generator().manual_seed(0)
    s = torch.randn(1, 2, 2, 9, generator=g, dtype=torch.double) * 3
    free = torch.ones_like(s, dtype=torch.bool)
    free[..., :sinks] = False
    free[..., 9 - recent :] = False
    keep = chosen(s, 0.7, sinks, recent, tau=1.5)
    best = s.masked_fill(~free, math.inf).flatten().topk(int(0.7 * 36)).indices
    assert keep.flatten().nonzero().flatten().tolist() == sorted(best.tolist())

    found = torch.autograd.functional.jacobian(
        lambda x: chosen(x, 0.7, sinks, recent, 1.5), s
    ).view(36, 36)
    choice = soft(s, 0.7, 1.5, free)
    step = 1e-4
    for i in range(36):
        expected = torch.zeros_like(s)
        if free.flatten()[i]:
            move = torch.zeros(36, dtype=torch.double)
            move[i] = step
            move = move.view_as(s)
            slope = (choice(s + move) - choice(s - move)) / (2 * step)
            expected = slope.masked_fill(~free, 0)
        mine = found[:, i].view_as(s)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


def scores_of(asked, gates):
    """Return the gates' scores of a context's entries, (B, L, H, T)."""
    rows = []
    for x, gate in zip(asked.context, gates):
        rows.append((x.float() @ gate[:-1] + gate[-1]).mT)
    return torch.stack(rows, 1)


@torch.no_grad()
def test_a_question_of_the_training_meets_what_eviction_leaves():
    """The loss equals −log p of the answer behind FastKVzip's cache with these gates and budget."""
    model = decoder(**SIZE)
    g = torch.Generator().manual_seed(1)
    gates = torch.randn(2, 8 * model.config.head_dim + 1, 2, generator=g)
    batch = tasks("test").batch("needle", 0, 3, 150)
    tokens = torch.from_numpy(batch.tokens)
    context = tokens[:, : batch.question]
    (asked,) = ask(model, tasks("test"), ("needle",), 3, 150, 0, 3)
    budget = context.shape[1] // 4
    s = scores_of(asked, gates)

    caches = make_cache(model, FastKVzip, budget=budget, gates=gates)
    prefill(model, context, caches)
    end(*caches)
    questions = tokens[:, batch.question : batch.answers[0].stop]
    log_p = model(questions[:, :-1], caches, last=asked.n).log_softmax(-1)
    expected = -log_p.gather(-1, questions[:, -asked.n :, None]).mean()
    share = budget / context.shape[1] + 1e-9
    keep = chosen(s, share, FastKVzip.sinks, FastKVzip.recent)
    keep.requires_grad_()
    derivatives = []
    for twin in (
        Bridged(checkpoint.as_hf(model)),
        model,
    ):  # the bridge's first call is by a method
        (asked,) = ask(twin, tasks("test"), ("needle",), 3, 150, 0, 3)
        with torch.enable_grad():
            found = surprise(twin, asked, keep)
            derivatives += torch.autograd.grad(found, keep)
        # keys and values had 16 bits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(*derivatives, rtol=1e-3, atol=1e-6)
    assert derivatives[0].abs().max() > 1e-4


def test_gates_learn_to_keep_what_answers_need_and_from_the_seed_alone():
    model = checkpoint.from_hf(TINY)
    c = model.config
    n = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    given = torch.zeros(c.n_layers, n + 1, c.n_kv_heads)
    g = torch.Generator().manual_seed(2)
    given[:, :-1] = torch.randn(given[:, 1:].shape, generator=g) / 30
    options = dict(
        documents=4,
        T=160,
        rows=4,
        shares=(0.25,),
        task_names=("needle",),
    )
    state = torch.get_rng_state()
    gates = taught(
        model,
        tasks("test"),
        given,
        steps=40,
        rate=0.01,
        **options,
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert not gates.requires_grad
    assert all(p.grad is None for p in model.parameters())

    (asked,) = ask(model, tasks("test"), ("needle",), 4, 160, 0, 4)

    @torch.no_grad()
    def loss(gates):
        keep = chosen(scores_of(asked, gates), 0.25, 4, 8)
        return surprise(model, asked, keep).item()

    assert loss(gates) < 0.2 * loss(given)
    untaught = taught(model, tasks("test"), given, steps=0, **options)
    torch.testing.assert_close(untaught, given, rtol=1e-3, atol=1e-3)
    twice = [taught(model, tasks("test"), given, steps=2, **options) for _ in range(2)]
    assert torch.equal(*twice)


def test_calibration_begins_with_the_gates_of_a_few_texts(monkeypatch):
    def lessons(model, tasks, documents):
        return documents, tasks

    monkeypatch.setattr(question_gates, "lessons", lessons)
    monkeypatch.setattr(question_gates, "fit", lambda *x: x)
    monkeypatch.setattr(question_gates, "taught", lambda *x: x)
    gates = ("model", "tasks", (8, "tasks"))
    assert QuestionGates.calibrate("model", "tasks") == dict(gates=gates)
