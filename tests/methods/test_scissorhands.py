"""Compare Scissorhands with a loop over tokens; check the budget and claims on counts."""

from functools import cache as once
import math
import random

import pytest
import torch

from common import SLOT, B, D, G, H, alone, end, feed, turn
from methods.scissorhands import BudgetSlots, Scissorhands

T = 64


def importance(j, past, history):
    """Return −I_j; past: {entry: weight} of steps 1, 2, …"""
    last = len(past)
    steps = range(max(1, last - history + 1), last + 1)
    there = [s for s in steps if j in past[s - 1]]
    return -sum(past[s - 1][j] < 1 / s for s in there)


def algorithm_1(
    q,
    k,
    v,
    budget,
    recent,
    m,
    history,
):
    """Return the kept tokens, importances and output at each token.

    One key/value head: q (G, T, D), k and v (T, D).
    """
    kept = []
    past = []
    steps = []
    for t in range(len(k)):
        if len(kept) == budget:
            old = kept[: budget - recent]
            old = sorted(
                old,
                key=lambda j: (importance(j, past, history), j),
            )
            kept = [j for j in kept if j not in old[:m]]
        kept = [*kept, t]
        alpha = (q[:, t] @ k[kept].T / math.sqrt(D)).softmax(-1)  # (G, n)
        past.append(dict(zip(kept, alpha.mean(0).tolist())))
        scores = [importance(j, past, history) for j in kept]
        steps.append((kept, scores, alpha @ v[kept]))
    return steps


# budget, recent, at_a_time, and history for counts
CASES = {
    "all history": (12, 3, 4, 400),
    "history below m": (12, 2, 6, 5),
    "history of 1": (9, 3, 2, 1),
    "one at a time": (10, 0, 1, 16),
    "everything leaves": (8, 0, 8, 8),
    "one slot": (1, 0, 1, 4),
    "half": (24, 5, None, 31),
}


@once
def text():
    """Return rotated q and k, and v, with sharp attention, so counts differ."""
    g = torch.Generator().manual_seed(0)
    q, k, v = [torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H)]
    return (
        turn(3 * q, torch.arange(T)),
        turn(k, torch.arange(T)),
        v,
    )


@once
def expected(case):
    """Return the loop's steps of each head, {(b, h): [...]}."""
    budget, recent, m, history = CASES[case]
    q, k, v = (x.double() for x in text())
    heads = {}
    for b in range(B):
        for h in range(H):
            head = q[b, h * G : (h + 1) * G], k[b, h], v[b, h]
            leave = m or budget // 2
            heads[b, h] = algorithm_1(*head, budget, recent, leave, history)
    return heads


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("case", CASES)
def test_everything_equals_the_loop_however_the_text_is_cut(case, chunk):
    """Kept tokens, importance, positions, keys, values and outputs."""
    q, k, v = text()
    layer = alone(Scissorhands(*CASES[case]))
    outputs = []
    for i in torch.arange(T).split(chunk):
        outputs.append(feed(layer, (q, k, v), len(i)))
        if 20 in i:
            end(layer)
        for (b, h), steps in expected(case).items():
            kept, scores, _ = steps[i[-1]]
            pos, order = layer.pos[b, h].sort()
            assert pos.tolist() == kept, i
            found = -layer.slot("count")[b, h, order]
            assert found.tolist() == pytest.approx(scores), i
            assert torch.equal(layer.k[b, h, order], k[b, h, kept])
            assert torch.equal(layer.v[b, h, order], v[b, h, kept])
    y = torch.cat(outputs, 2).double()
    for (b, h), steps in expected(case).items():
        dense = torch.stack([y for *_, y in steps], 1)
        assert torch.allclose(y[b, h * G : (h + 1) * G], dense, atol=1e-5)


class Watched(BudgetSlots):
    """Checks after each write and step that slots and bytes are within the budget."""

    def within(self):
        live, allocated = self.bytes()
        budget = self.method.budget
        slot = SLOT + 4 + 13
        assert self.length <= budget
        assert live == B * H * self.length * slot
        assert live <= allocated <= B * H * budget * slot

    def write(self, k, v, pos):
        super().write(k, v, pos)
        self.within()

    def attention(self, q, pos):
        self.reads[self.seen] = self.length
        return super().attention(q, pos)

    def step(self, q, k, v, pos):
        y = super().step(q, k, v, pos)
        self.within()
        return y


@pytest.mark.claim("S2")
def test_a_stream_never_exceeds_the_budget_at_any_moment(note):
    """Slots, bytes and attended keys keep to the budget; late tokens see as many as early ones."""
    budget, m = 64, 20
    n = 1000
    method = Scissorhands(budget=budget, at_a_time=m, history=100)
    layer = alone(method, store=Watched)
    layer.reads = {}
    g = torch.Generator().manual_seed(2)
    shapes = [(B, heads, n, D) for heads in (H * G, H, H)]
    stream = [torch.randn(shape, generator=g) for shape in shapes]
    for i in [1, 90, 7, 102, *[1] * (n - 200)]:
        feed(layer, stream, i)
    # the text is cut into as few pieces as the room allows
    pieces = [1, 64, 84, 91, 98, 104, 124, 144, 164, 184, 200]
    assert [*layer.reads][:11] == pieces
    early = [layer.reads[t + 1] for t in range(200, 400)]
    late = [layer.reads[t + 1] for t in range(n - 200, n)]
    assert layer.seen == n
    assert early == late
    assert sorted({*late}) == [*range(budget - m + 1, budget + 1)]
    note("S2", tokens=n)


def weigh(strength, **options):
    """Return the kept tokens after each, if queries weigh tokens in proportion to `strength`."""
    layer = alone(Scissorhands(**options))
    k = torch.zeros(1, 1, len(strength), D)
    k[..., 0] = torch.tensor(strength).log()
    q = torch.zeros(1, 2, len(strength), D)
    q[..., 0] = math.sqrt(D)
    kept = []
    for _ in strength:
        feed(layer, (q, k, k), 1)
        kept.append(layer.pos.sort(-1).values.flatten().tolist())
    return kept


def largest_so_far(v, budget):
    """Return, after each token, that token and the budget − 1 largest before it."""
    kept = []
    for t in range(len(v)):
        largest = sorted(range(t), key=v.__getitem__)[-(budget - 1) :]
        kept.append(sorted([*largest, t]))
    return kept


@pytest.mark.claim("S2")
@pytest.mark.parametrize("seed, history", [(0, 1), (1, 5), (2, 400)])
def test_counts_keep_the_largest_if_just_these_exceed_1_over_t(seed, history):
    budget, n = 6, 60
    draw = random.Random(seed)
    options = dict(budget=budget, recent=0, at_a_time=1, history=history)
    strong = {0, *draw.sample(range(2 * budget, n), budget - 2)}
    v = [draw.uniform(1, 1.5) if t in strong else 1e-3 * (1 + t / n) for t in range(n)]
    found = weigh(v, **options)
    for s, kept in enumerate(found, 1):
        total = sum(v[i] for i in kept)
        # the premise
        assert all((v[j] / total >= 1 / s) == (j in strong) for j in kept)
    assert found == largest_so_far(v, budget)
    v = [1.0] + [1e-3 * 0.9**rank for rank in draw.sample(range(n - 1), n - 1)]
    newest = [[0, *range(max(1, t - budget + 2), t + 1)] for t in range(n)]
    assert weigh(v, **options) == newest != largest_so_far(v, budget)
