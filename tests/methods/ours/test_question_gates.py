"""Check the training of gates by questions: choice, derivative, losses, and what is learned."""

import math
from types import SimpleNamespace

import pytest
import torch

from common import decoder, tasks
from methods.ours import question_gates
from lab.lessons import Asked, of_task
from methods.ours.question_gates import (
    QuestionGates,
    edged,
    chosen,
    learn_from,
    surprise,
    taught,
)
from nanollm import TINY, checkpoint
from nanollm.bridge import Bridged
from nanollm.cache import compress, make_cache
from nanollm.generate import prefill

SIZE = dict(
    vocab_size=2048,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    max_len=200,
)


@pytest.mark.parametrize("sinks, recent", [(0, 0), (2, 3)])
def test_the_highest_stay_and_the_derivative_is_that_of_a_soft_choice_of_one_size(
    sinks, recent
):
    """∂keep_i/∂s_j is w_i (δ_ij − w_j/Σw). The slope w is 0 for entries that always stay."""
    g = torch.Generator().manual_seed(0)
    s = torch.randn(1, 2, 2, 9, generator=g, dtype=torch.double) * 3
    free = torch.ones_like(s, dtype=torch.bool)
    free[..., :sinks] = False
    free[..., 9 - recent :] = False
    keep = chosen(s, 0.7, sinks, recent, tau=1.5)
    best = s.masked_fill(~free, math.inf).flatten().topk(int(0.7 * 36))
    assert keep.flatten().nonzero()[:, 0].tolist() == sorted(best.indices.tolist())

    soft = ((s - best.values[-1]) / 1.5).sigmoid()
    w = (soft * (1 - soft) / 1.5 * free).flatten()
    found = torch.autograd.functional.jacobian(
        lambda x: chosen(x, 0.7, sinks, recent, 1.5), s
    )
    torch.testing.assert_close(found.view(36, 36), w.diag() - w.outer(w) / w.sum())


def test_the_first_and_the_newest_entries_have_weights_of_their_own():
    edges = torch.arange(1.0, 13).view(2, 2, 3)
    added = edged(edges, torch.arange(20), 20)
    assert added.shape == (2, 3, 20)
    for layer in range(2):
        for head in range(3):
            first, newest = edges[:, layer, head].tolist()
            expected = [first] * 4 + [0] * 8 + [newest] * 8
            assert added[layer, head].tolist() == expected
    both = edged(edges, torch.tensor([2, 3]), 10)
    assert (both == edges.sum(0)[..., None]).all()


def scores_of(lesson, gates, edges):
    """Return the gates' scores of a context's entries, (1, L, H, T)."""
    s = lesson.inputs.float() @ gates[:, :-1] + gates[:, -1:]
    T = s.shape[1]
    return s.mT[None] + edged(edges, torch.arange(T), T)


def keep_of(lesson, gates, edges, share):
    s = scores_of(lesson, gates, edges)
    return chosen(s, share, QuestionGates.sinks, QuestionGates.recent)


@torch.no_grad()
def test_a_question_of_the_training_meets_what_eviction_leaves(monkeypatch):
    """The loss equals −log p of the answer behind the method's cache with the same budget."""
    monkeypatch.setattr(question_gates, "HARD", 99)
    model = decoder(**SIZE)
    g = torch.Generator().manual_seed(1)
    gates = torch.randn(2, 8 * model.config.head_dim + 1, 2, generator=g)
    edges = torch.randn(2, 2, 2, generator=g)
    batch = tasks("test").batch("needle", 0, 1, 150, questions=2)
    asked = of_task(batch, 0)
    T = asked.context.shape[1]
    budget = T // 4

    options = dict(budget=budget, gates=gates, edges=edges)
    caches = make_cache(model, QuestionGates, **options)
    prefill(model, asked.context, caches)
    compress(model, asked.context, caches)
    log_p = model(asked.tokens[:, :-1], caches).log_softmax(-1)
    right = asked.tokens[:, 1:, None]
    nats = -log_p.gather(-1, right)[..., 0]
    expected = nats[asked.right[:, 1:]].mean()
    found = []
    derivatives = []
    # the bridge's first call is by a method
    for twin in Bridged(checkpoint.as_hf(model)), model:
        lesson = learn_from(twin, asked)
        keep = keep_of(lesson, gates, edges, budget / T + 1e-9)
        keep.requires_grad_()
        with torch.enable_grad():
            loss = surprise(twin, lesson, keep)
            derivatives += torch.autograd.grad(loss.sum(), keep)
        found.append(loss)
    # keys and values had 16 bits
    for loss in found:
        torch.testing.assert_close(loss, expected[None], rtol=0, atol=1e-3)
    torch.testing.assert_close(*derivatives, rtol=1e-3, atol=1e-6)
    assert derivatives[0].abs().max() > 1e-4


@torch.no_grad()
def test_hard_questions_do_not_teach(
    monkeypatch,
):
    model = decoder(**SIZE)
    g = torch.Generator().manual_seed(3)
    context = torch.randint(2048, (1, 40), generator=g)
    tokens = torch.randint(2048, (3, 9), generator=g)
    right = torch.zeros(3, 9, dtype=torch.bool)
    right[0, 5:7] = right[1, 3:9] = right[2, 8:] = True
    everything = torch.ones(1, 2, 2, 40)

    monkeypatch.setattr(question_gates, "HARD", 99)
    lesson = learn_from(model, Asked(context, tokens, right))
    nats = surprise(model, lesson, everything)
    limit = nats.sort().values[:2].mean().item()
    monkeypatch.setattr(question_gates, "HARD", limit)
    easy = learn_from(model, Asked(context, tokens, right))
    i = nats.argmin()
    assert torch.equal(easy.tokens, tokens[i : i + 1])
    assert torch.equal(easy.right, right[i : i + 1])
    monkeypatch.setattr(question_gates, "HARD", 0)
    hard = Asked(context, tokens, right)
    assert learn_from(model, hard) is None
    with pytest.raises(ValueError, match="answers none of the questions"):
        taught(model, [hard], torch.zeros(2, 1, 2))


def test_gates_learn_to_keep_what_answers_need_and_from_the_seed_alone(monkeypatch):
    model = checkpoint.from_hf(TINY)
    c = model.config
    n = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    given = torch.zeros(c.n_layers, n + 1, c.n_kv_heads)
    g = torch.Generator().manual_seed(2)
    given[:, :-1] = torch.randn(given[:, 1:].shape, generator=g) / 30
    batch = tasks("test").batch("needle", 0, 4, 160)
    asked = [of_task(batch, i) for i in range(4)]
    state = torch.get_rng_state()
    learned = taught(model, asked, given, steps=60, rate=0.01, shares=(0.25,))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(x.requires_grad for x in learned.values())
    assert all(p.grad is None for p in model.parameters())
    lessons = [learn_from(model, x) for x in asked]

    @torch.no_grad()
    def loss(gates, edges):
        total = 0
        for lesson in lessons:
            keep = keep_of(lesson, gates, edges, 0.25)
            total += surprise(model, lesson, keep).item()
        return total

    untaught = taught(model, asked, given, steps=0)
    torch.testing.assert_close(untaught["gates"], given, rtol=1e-3, atol=1e-3)
    assert loss(**learned) < 0.2 * loss(**untaught)
    assert (learned["edges"] != untaught["edges"]).any()
    twice = [taught(model, asked, given, steps=2) for _ in range(2)]
    for name in "gates", "edges":
        assert torch.equal(*(x[name] for x in twice))

    rates = []

    def note(adam, *_):
        rates.append([group["lr"] for group in adam.param_groups])
        adam.step()

    monkeypatch.setattr(question_gates, "descend", note)
    taught(model, asked, given, steps=4, rate=8, edges_rate=4)
    assert rates == [[8, 4], [6, 3], [4, 2], [2, 1]]


def test_calibration_begins_with_the_gates_of_a_few_texts(monkeypatch):
    def lessons(model, tasks, documents):
        return documents, tasks.name

    class Training:
        name = "tasks"

        def asked(self, config):
            return f"asked of {config}"

    model = SimpleNamespace(config="shape")
    monkeypatch.setattr(question_gates, "lessons", lessons)
    monkeypatch.setattr(question_gates, "fit", lambda *x: x)
    monkeypatch.setattr(question_gates, "taught", lambda *x: x)
    expected = model, "asked of shape", (8, "tasks")
    assert QuestionGates.calibrate(model, Training()) == expected
