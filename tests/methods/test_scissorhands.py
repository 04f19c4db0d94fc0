"""Compare Scissorhands with a loop over tokens; check the budget and claims on counts."""

from functools import cache as once
import math
import random

import pytest
import torch

from common import B, D, G, H, SLOT, end, turn
from methods.scissorhands import Scissorhands

T = 64


def importance(j, past, history):
    """Return −I_j; past: {entry: weight} of steps 1, 2, …"""
    steps = range(max(1, len(past) - history + 1), len(past) + 1)
    there = [s for s in steps if j in past[s - 1]]
    return -sum(past[s - 1][j] < 1 / s for s in there)


def algorithm_1(q, k, v, history, budget, recent, m):
    """Return the kept tokens, importances and output at each token.

    One key/value head: q (G, T, D), k and v (T, D).
    """
    kept, past = [], []
    for t in range(len(k)):
        if len(kept) == budget:
            rank = lambda j: (importance(j, past, history), j)
            leave = sorted(kept[: budget - recent], key=rank)[:m]
            kept = [j for j in kept if j not in leave]
        kept = [*kept, t]
        alpha = (q[:, t] @ k[kept].T / math.sqrt(D)).softmax(-1)  # (G, n)
        past.append(dict(zip(kept, alpha.mean(0).tolist())))
        yield kept, [importance(j, past, history) for j in kept], alpha @ v[kept]


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
    return turn(3 * q, torch.arange(T)), turn(k, torch.arange(T)), v


@once
def expected(case):  # [b][h][t]
    budget, recent, m, history = CASES[case]
    q, k, v = (x.double() for x in text())
    heads = lambda b: [(q[b, h * G : (h + 1) * G], k[b, h], v[b, h]) for h in range(H)]
    loop = lambda head: [*algorithm_1(*head, history, budget, recent, m or budget // 2)]
    return [[*map(loop, heads(b))] for b in range(B)]


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("case", CASES)
def test_everything_equals_the_loop_however_the_text_is_cut(case, chunk):
    """Kept tokens, importance, positions, keys, values and outputs equal the loop's, however the
    text is cut.
    """
    (q, k, v), outputs = text(), []
    cache = Scissorhands(*CASES[case])
    for i in torch.arange(T).split(chunk):
        outputs.append(cache.attend(q[:, :, i], k[:, :, i], v[:, :, i], i[None]))
        if 20 in i:
            end(cache)
        kept, importances, _ = zip(
            *(head[i[-1]] for row in expected(case) for head in row)
        )
        pos, order = cache.pos.flatten(0, 1).sort(-1)
        assert pos.tolist() == [*kept], i
        found = cache.importance().flatten(0, 1).gather(-1, order)
        assert torch.allclose(
            found, torch.tensor(importances, dtype=torch.float32), atol=1e-5
        ), i
        at = cache.pos.long()[..., None].expand_as(cache.k)
        assert torch.equal(cache.k, k.gather(2, at)) and torch.equal(
            cache.v, v.gather(2, at)
        ), i
    dense = [
        [torch.stack([y for *_, y in head], 1) for head in row]
        for row in expected(case)
    ]
    assert torch.allclose(
        torch.cat(outputs, 2).double(), torch.stack([*map(torch.cat, dense)]), atol=1e-5
    )


@pytest.mark.claim("S2")
def test_a_stream_never_exceeds_the_budget_at_any_moment(note):
    """Slots, bytes and attended keys never exceed the budget, and late tokens cost as much as early
    ones."""
    budget, m, n, read_at, slot = 64, 20, 1000, {}, SLOT + 4 + 13

    class Watched(Scissorhands):
        def within(self):
            live, allocated = self.bytes()
            assert self.length <= budget
            assert (
                live == B * H * self.length * slot <= allocated <= B * H * budget * slot
            )

        def write(self, k, v, pos):
            super().write(k, v, pos)
            self.within()

        def observe(self, q, p):
            read_at[self.seen] = p.shape[-1]
            super().observe(q, p)
            self.within()

    cache, g = (
        Watched(budget=budget, at_a_time=m, history=100),
        torch.Generator().manual_seed(2),
    )
    for i in torch.arange(n).split([1, 90, 7, 102, *[1] * (n - 200)]):
        cache.attend(
            *(torch.randn(B, x, len(i), D, generator=g) for x in (H * G, H, H)), i[None]
        )
    # the text is cut into as few pieces as the room allows
    assert [*read_at][:11] == [1, 64, 84, 91, 98, 104, 124, 144, 164, 184, 200]
    early, late = (
        [read_at[t + 1] for t in range(*span)] for span in ((200, 400), (n - 200, n))
    )
    assert (
        cache.seen == n
        and early == late
        and sorted({*late}) == [*range(budget - m + 1, budget + 1)]
    )
    note("S2", tokens=n)


def weigh(cache, strength, group=2):
    """Give tokens weights in proportion to `strength` for every query; yield the kept tokens after each."""
    k = torch.zeros(1, 1, len(strength), D)
    k[..., 0] = torch.tensor(strength).log()
    q = torch.zeros(1, group, len(strength), D)
    q[..., 0] = math.sqrt(D)
    for t in range(len(strength)):
        cache.attend(*(x[:, :, t : t + 1] for x in (q, k, k)), torch.tensor([[t]]))
        yield cache.pos.sort(-1).values.flatten().tolist()


def largest_so_far(v, budget):
    """Yield, after each token, that token and the budget − 1 largest before it."""
    return [
        sorted([*sorted(range(t), key=v.__getitem__)[-(budget - 1) :], t])
        for t in range(len(v))
    ]


@pytest.mark.claim("S2")
@pytest.mark.parametrize("seed, history", [(0, 1), (1, 5), (2, 400)])
def test_counts_keep_the_largest_if_just_these_exceed_1_over_t(seed, history):
    budget, n, draw = 6, 60, random.Random(seed)
    counts = lambda v: [
        *weigh(Scissorhands(budget=budget, recent=0, at_a_time=1, history=history), v)
    ]
    strong = {0, *draw.sample(range(2 * budget, n), budget - 2)}
    v = [draw.uniform(1, 1.5) if t in strong else 1e-3 * (1 + t / n) for t in range(n)]
    for s, kept in enumerate(counts(v), 1):
        # the premise
        assert all(
            (v[j] / sum(v[i] for i in kept) >= 1 / s) == (j in strong) for j in kept
        )
    assert counts(v) == largest_so_far(v, budget)
    v = [1.0] + [1e-3 * 0.9**rank for rank in draw.sample(range(n - 1), n - 1)]
    newest = [[0, *range(max(1, t - budget + 2), t + 1)] for t in range(n)]
    assert counts(v) == newest != largest_so_far(v, budget)
