"""Check the training of gates by questions: its choice, its derivative, and that its eviction is real."""

import math

import pytest
import torch

from common import decoder, end, tasks
from methods.baselines.kvzip_fast import FastKVzip
from methods.ours import question_gates
from methods.ours.question_gates import QuestionGates, ask, chosen, surprise, taught
from nanollm import TINY, checkpoint
from nanollm.cache import make_cache
from nanollm.generate import prefill

SIZE = dict(vocab_size=2048, n_layers=2, n_heads=4, n_kv_heads=2, max_len=200)


def soft(s, share, tau, free):
    """Return σ((s − θ)/τ) of the free entries, a function of s: θ moves so that the sum stays."""
    ranked = s.masked_fill(~free, math.inf)
    theta = ranked.flatten().topk(int(share * s.numel())).values[-1]
    total = ((s - theta) / tau).sigmoid()[free].sum()

    def choice(x):
        low, high = (
            torch.tensor([-50.0], dtype=x.dtype),
            torch.tensor([50.0], dtype=x.dtype),
        )
        for _ in range(200):  # bisection
            middle = (low + high) / 2
            more = ((x - middle) / tau).sigmoid()[free].sum() > total
            low, high = (middle, high) if more else (low, middle)
        return ((x - low) / tau).sigmoid()

    return choice


@pytest.mark.parametrize("sinks, recent", [(0, 0), (2, 3)])
def test_the_highest_stay_and_the_derivative_is_that_of_a_soft_choice_of_one_size(
    sinks, recent
):
    s = (
        torch.randn(
            1, 2, 2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.double
        )
        * 3
    )
    free = torch.ones_like(s, dtype=torch.bool)
    free[..., :sinks] = free[..., 9 - recent :] = False
    n = chosen(s, 0.7, sinks, recent, tau=1.5)
    best = s.masked_fill(~free, math.inf).flatten().topk(int(0.7 * 36)).indices
    assert n.flatten().nonzero().flatten().tolist() == sorted(best.tolist())

    found = torch.autograd.functional.jacobian(
        lambda x: chosen(x, 0.7, sinks, recent, 1.5), s
    )
    choice, step = soft(s, 0.7, 1.5, free), 1e-4
    for i in range(36):
        move = torch.zeros(36, dtype=torch.double)
        move[i] = step
        slope = (choice(s + move.view_as(s)) - choice(s - move.view_as(s))) / (2 * step)
        expected = (
            slope.masked_fill(~free, 0) if free.flatten()[i] else torch.zeros_like(s)
        )
        torch.testing.assert_close(
            found.view(36, 36)[:, i].view_as(s), expected, rtol=1e-4, atol=1e-6
        )


@torch.no_grad()
def test_a_question_of_the_training_meets_what_eviction_leaves():
    """The loss equals −log p of the answer behind FastKVzip's cache with the same gates and budget."""
    model = decoder(**SIZE)
    gates = torch.randn(
        2, 8 * model.config.head_dim + 1, 2, generator=torch.Generator().manual_seed(1)
    )
    batch = tasks("test").batch("needle", 0, 3, 150)
    context = torch.from_numpy(batch.tokens[:, : batch.question])
    (asked,) = ask(model, tasks("test"), ("needle",), 3, 150, 0, 3)
    budget = context.shape[1] // 4
    s = torch.stack(
        [
            (x.float() @ gates[i, :-1] + gates[i, -1]).mT
            for i, x in enumerate(asked.context)
        ],
        1,
    )

    caches = make_cache(model, FastKVzip, budget=budget, gates=gates)
    prefill(model, context, caches)
    end(*caches)
    questions = torch.from_numpy(
        batch.tokens[:, batch.question : batch.answers[0].stop]
    )
    log_p = model(questions[:, :-1], caches, last=asked.n).log_softmax(-1)
    expected = -log_p.gather(-1, questions[:, -asked.n :, None]).mean()
    share = budget / context.shape[1] + 1e-9
    found = surprise(model, asked, chosen(s, share, FastKVzip.sinks, FastKVzip.recent))
    # keys and values had 16 bits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_gates_learn_to_keep_what_answers_need_and_from_the_seed_alone():
    model = checkpoint.from_hf(TINY)
    c = model.config
    given = torch.zeros(
        c.n_layers, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim + 1, c.n_kv_heads
    )
    given[:, :-1] = (
        torch.randn(given[:, 1:].shape, generator=torch.Generator().manual_seed(2)) / 30
    )
    options = dict(documents=4, T=160, rows=4, shares=(0.25,), task_names=("needle",))
    state = torch.get_rng_state()
    gates = taught(model, tasks("test"), given, steps=40, rate=0.01, **options)
    assert torch.equal(torch.get_rng_state(), state) and not gates.requires_grad
    assert all(p.grad is None for p in model.parameters())

    (asked,) = ask(model, tasks("test"), ("needle",), 4, 160, 0, 4)

    @torch.no_grad()
    def loss(gates):
        s = [
            (x.float() @ gates[i, :-1] + gates[i, -1]).mT
            for i, x in enumerate(asked.context)
        ]
        return surprise(model, asked, chosen(torch.stack(s, 1), 0.25, 4, 8)).item()

    assert loss(gates) < 0.2 * loss(given)
    torch.testing.assert_close(
        taught(model, tasks("test"), given, steps=0, **options),
        given,
        rtol=1e-3,
        atol=1e-3,
    )
    once = [taught(model, tasks("test"), given, steps=2, **options) for _ in range(2)]
    assert torch.equal(*once)


def test_steps_take_turns_among_questions_and_shares(monkeypatch):
    model, seen = decoder(**SIZE), []

    def surprise(model, asked, keep):
        seen.append(
            (
                asked.tokens[:, 0].tolist(),
                asked.tokens.shape,
                round(keep.mean().item(), 1),
            )
        )
        return (keep * 0).sum()

    monkeypatch.setattr(question_gates, "surprise", surprise)
    given, names = torch.zeros(2, 8 * model.config.head_dim + 1, 2), ("copy", "needle")
    given[:, :-1] = 1
    taught(
        model,
        tasks("test"),
        given,
        documents=2,
        T=150,
        steps=7,
        rows=1,
        shares=(0.5, 0.3, 0.2),
        seed=3,
        task_names=names,
    )
    asked = ask(model, tasks("test"), names, 2, 150, 3, 1)
    assert len(asked) == 4 and asked[0].tokens.shape != asked[1].tokens.shape
    assert seen == [
        (
            asked[i % 4].tokens[:, 0].tolist(),
            asked[i % 4].tokens.shape,
            (0.5, 0.3, 0.2)[i % 3],
        )
        for i in range(7)
    ]


def test_calibration_begins_with_the_gates_of_a_few_texts(monkeypatch):
    monkeypatch.setattr(
        question_gates, "lessons", lambda model, tasks, documents: (documents, tasks)
    )
    monkeypatch.setattr(question_gates, "fit", lambda *x: x)
    monkeypatch.setattr(question_gates, "taught", lambda *x: x)
    assert QuestionGates.calibrate("model", "tasks") == dict(
        gates=("model", "tasks", (8, "tasks"))
    )
