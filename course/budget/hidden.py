"""The hidden tests, which a student's copy does not hold: more sizes, and edge cases."""
import math

import pytest
import torch
from torch import tensor

from course.budget.public import near
from course.expect import problem, raises, same, wrong

F64 = torch.float64


def drawn(seed, *shape):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def texts(seed, B, H, G, T, D=4):
    shapes = dict(q=(B, H * G, T, D), k=(B, H, T, D), v=(B, H, T, D))
    return {name: 2 * drawn(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def by_token(q, k, v, budget, recent, m, worth):
    """Feed one head token by token. Return outputs (G, T, D), the entries held after each token, weights.

    worth(held, t, weights so far): a number for each entry held; the lowest leave, of equal ones the oldest.
    """
    held, after, outputs, weights = [], [], torch.zeros_like(q), []
    for t in range(q.shape[1]):
        if len(held) == budget:
            mark = worth(held, t, weights)
            free = [j for j in held if j < t - recent]
            leave = sorted(free, key=lambda j: (mark[j], j))[:m]
            held = [j for j in held if j not in leave]
        held = held + [t]
        p = (q[:, t] @ k[held].T / q.shape[-1] ** 0.5).softmax(-1)
        outputs[:, t] = p @ v[held]
        weights.append(dict(zip(held, p.mean(0).tolist())))
        after.append(held)
    return outputs, after, weights


def everywhere(q, k, v, pieces, budget, recent, m, worth):
    """Return by_token of all rows and heads: outputs, positions after each piece, entries and weights."""
    B, H, G = *k.shape[:2], q.shape[1] // k.shape[1]
    y, ends = torch.zeros_like(q), [sum(pieces[:i + 1]) - 1 for i in range(len(pieces))]
    kept, weights = [[] for _ in ends], []
    for b in range(B):
        for h in range(H):
            one = slice(h * G, (h + 1) * G)
            y[b, one], after, seen = by_token(q[b, one], k[b, h], v[b, h], budget, recent, m,
                                              lambda held, t, past: worth(b, h, held, t, past))
            weights.append((after, seen))
            for at, end in zip(kept, ends):
                at.append(after[end])
    return y, [tensor(at, dtype=torch.int32).view(B, H, -1) for at in kept], weights


# ---- room --------------------------------------------------------------------------------------------------


@problem("room")
@pytest.mark.parametrize("pieces", [[1] * 29, [29], [5, 11, 1, 12], [8, 8, 13]])
@pytest.mark.parametrize("budget, leave", [(8, 3), (8, 8), (5, 1), (1, 1)])
def test_as_single_tokens(run, pieces, budget, leave):
    """Batch 2, two heads, groups of three, many ties: pieces give the outputs of single tokens."""
    x = texts(0, 2, 2, 3, 29)
    marks = torch.randint(4, (2, 2, 29), generator=torch.Generator().manual_seed(3)).float()
    y, kept, _ = everywhere(**x, pieces=pieces, budget=budget, recent=0, m=leave,
                            worth=lambda b, h, held, t, past: marks[b, h].tolist())
    got = run("attend", **x, pieces=pieces, budget=budget, leave=leave, marks=marks)
    for i, (one, right) in enumerate(zip(got["kept"], kept)):
        same(one, right, f"the positions kept after piece {i} of {pieces}")
    same(got["y"], y, "the outputs", atol=1e-5)
    same(got["seen"], 29, "the tokens seen")
    if got["most"] > budget:
        wrong(f"{got['most']} slots were in use; the budget is {budget}")


@problem("room")
def test_room_for_all(run):
    """A budget beyond the text: nothing leaves, and the outputs are those of full attention."""
    x = texts(10, 1, 2, 2, 9)
    y, kept, _ = everywhere(**x, pieces=[4, 5], budget=50, recent=0, m=2, worth=None)
    got = run("attend", **x, pieces=[4, 5], budget=50, leave=2)
    same(got["y"], y, "the outputs", atol=1e-6)
    same(got["kept"][-1], kept[-1], "the positions kept")


@problem("room")
def test_full_is_not_yet_too_much(run):
    """A piece that fills the store exactly drops nothing; the next token makes room."""
    x = texts(11, 1, 1, 1, 7)
    got = run("attend", **x, pieces=[6, 1], budget=6, leave=4)
    same(got["kept"][0], torch.arange(6, dtype=torch.int32)[None, None], "the positions kept by a full store")
    same(got["kept"][1], tensor([[[4, 5, 6]]], dtype=torch.int32), "the positions kept one token later")


# ---- observe -----------------------------------------------------------------------------------------------


def probabilities(seed, B, H, G, sizes, history):
    """Draw p for pieces of these sizes: causal weights of the last `history` queries."""
    p, start = [], 0
    for n in sizes:
        score = 2 * drawn(seed + start, B, H, G, n, start + n)
        hidden = torch.ones(n, start + n, dtype=torch.bool).triu(start + 1)
        p.append(score.masked_fill(hidden, -math.inf).softmax(-1)[:, :, :, -history:].float())
        start += n
    return p


def counts(p, sizes, history):
    """Return the counts after each piece, by loops over steps and tokens."""
    B, H, below, after, end = *p[0].shape[:2], set(), [], 0
    for one, n in zip(p, sizes):
        end += n
        w, mean = one.shape[3], one.double().mean(2)
        for s in range(end - w + 1, end + 1):
            for b in range(B):
                for h in range(H):
                    row = mean[b, h, s - 1 - (end - w)].tolist()
                    below |= {(b, h, s, j) for j in range(s) if row[j] < 1 / s}
        count = torch.zeros(B, H, end, dtype=torch.int32)
        for b, h, s, j in below:
            if s > end - history:
                count[b, h, j] += 1
        after.append(count)
    return after


@problem("observe")
@pytest.mark.parametrize("history", [1, 3, 8, 13, 400])
@pytest.mark.parametrize("sizes", [[1] * 20, [20], [3, 1, 9, 1, 1, 5]])
def test_counts(run, sizes, history):
    """Batch 2, two heads, groups of three; single tokens and pieces, also pieces longer than the history."""
    p = probabilities(20, 2, 2, 3, sizes, history)
    got = run("observe", p=p, history=history)
    for i, (count, right) in enumerate(zip(got, counts(p, sizes, history))):
        same(count, right, f"the counts after piece {i} of {sizes}, w = {history}")


@problem("observe")
def test_even_weights(run):
    """At each step s ≤ 41 all s tokens have a weight of exactly 1/s, and none is below it."""
    p = [torch.full((1, 1, 1, 1, s), 1 / s) for s in range(1, 42)]
    same(run("observe", p=p, history=50)[-1], torch.zeros(1, 1, 41, dtype=torch.int32), "the counts")


@problem("observe")
def test_the_mean_is_taken_in_float32(run):
    """Weights in bfloat16: the mean of .25 .25 .249 is below 1/4; bfloat16 would round it up to 1/4."""
    low = [0.25, 0.25, 0.2490234375]
    rows = [[x, 0.25, 0.25, 1 - 0.5 - x] for x in low]
    p = tensor(rows, dtype=torch.bfloat16).view(1, 1, 3, 1, 4)
    expected = tensor([[[1, 0, 0, 0]]], dtype=torch.int32)
    same(run("observe", p=[p], history=9)[0], expected, "the counts")


@problem("observe")
@pytest.mark.parametrize("history, m", [(6, 1), (20, 4)])
def test_the_rule_as_a_whole(run, history, m):
    """In a cache: the entries most often below 1/s in the last w steps leave, of equal counts the oldest."""
    x, pieces, budget, recent = texts(30, 2, 2, 2, 40), [3, 1, 1, 9, 1, 1, 1, 12, 11], 10, 3

    def worth(b, h, held, t, past):
        steps = range(max(0, t - history), t)
        return {j: -sum(past[s][j] < 1 / (s + 1) for s in steps if j in past[s]) for j in held}

    _, kept, weights = everywhere(**x, pieces=pieces, budget=budget, recent=recent, m=m, worth=worth)
    got = run("scissorhands_kept", **x, pieces=pieces, budget=budget, recent=recent, at_a_time=m,
              history=history)
    for i, ((at, count), right) in enumerate(zip(got, kept)):
        same(at, right, f"the positions kept after piece {i}")
        end = sum(pieces[:i + 1])
        worths = [worth(0, 0, after[end - 1], end, seen) for after, seen in weights]
        expected = [[-each[j] for j in sorted(each)] for each in worths]
        same(count, tensor(expected, dtype=torch.int32).view(right.shape), f"the counts after piece {i}")


# ---- the theorem -------------------------------------------------------------------------------------------


def integral(order, y, k, points=40_001):
    """Integrate x^order (x + 1)^−k from 0 to y − 1 by Simpson's rule over ln(x + 1); y may be inf."""
    end = math.log(y) if y < math.inf else 45 / (k - 1 - order)
    s = torch.linspace(0, end, points, dtype=F64)
    f = torch.expm1(s) ** order * torch.exp((1 - k) * s)
    return float((f[0] + f[-1] + 4 * f[1:-1:2].sum() + 2 * f[2:-1:2].sum()) * end / (points - 1) / 3)


def below(x, k, u):
    """Return P(v ≤ x)."""
    return integral(0, x + 1, k) / integral(0, u, k)


def lost(beta, k, u):
    """Return the mass below the x with P(v ≤ x) = 1 − β, found by bisection."""
    low, high = 0.0, min(u - 1, 1e9)
    for _ in range(80):
        x = (low + high) / 2
        less = (1 - (x + 1) ** (1 - k)) / (1 - u ** (1 - k)) < 1 - beta
        low, high = (x, high) if less else (low, x)
    return integral(1, x + 1, k) / integral(1, u, k)


@problem("share")
@pytest.mark.parametrize("beta", [0.1, 0.3, 0.55, 0.9, 1])
def test_any_shape(run, beta):
    """Sorted draws (2, 3, 17); (1 − β) · 17 is rounded."""
    v = drawn(40, 2, 3, 17).abs().sort(-1).values
    expected = torch.zeros(2, 3, dtype=F64)
    for i in range(2):
        for j in range(3):
            row = v[i, j].tolist()
            expected[i, j] = sum(row[:round((1 - beta) * 17)]) / sum(row)
    same(run("share", v=v, beta=beta), expected, f"the shares for β = {beta}", atol=1e-9)


@problem("share")
@pytest.mark.parametrize("n, m", [(5, 2), (7, 4), (9, 4)])
def test_halves_are_rounded_to_even(run, n, m):
    """β = 0.5 and n = 5, 7, 9: 2.5, 3.5 and 4.5 round to 2, 4 and 4."""
    got = run("share", v=torch.arange(1, n + 1).double(), beta=0.5)
    same(got, tensor(m * (m + 1) / (n * (n + 1)), dtype=F64), f"the share of {n}", atol=1e-9)


@problem("share")
def test_one_row(run):
    """v of shape (n,) gives a single number of its dtype."""
    v = torch.arange(1, 11).float()
    got = run("share", v=v, beta=0.5)
    same(got, tensor(15 / 55), "the share", atol=1e-6)
    if got.dtype != torch.float32:
        wrong(f"expected torch.float32 as v has, got {got.dtype}")


@problem("draw")
@pytest.mark.parametrize("k, u", [(2.5, 5), (3, 50), (1.5, 20), (5, 1000), (2.1, math.inf)])
def test_from_uniform_numbers(run, k, u):
    """Each draw is the x at which P(v ≤ x) is the uniform number; float64, of the given shape."""
    v = run("draw", shape=[3, 7], k=k, u=u, seed=11)
    uniform = torch.rand(3, 7, dtype=F64, generator=torch.Generator().manual_seed(11))
    if not isinstance(v, torch.Tensor) or v.shape != (3, 7) or v.dtype != F64:
        wrong(f"expected (3, 7) numbers of torch.float64, got {v!r:.200}")
    expected = tensor([below(x, k, u) for x in v.flatten().tolist()], dtype=F64).view(3, 7)
    same(expected, uniform, "P(v ≤ x) of the draws", atol=1e-6)


@problem("draw")
def test_no_law(run):
    """k = 2 with u = ∞ has no mean: a ValueError."""
    raises(run, "draw", shape=[3], k=2, u=math.inf, seed=0)


@problem("mass")
@pytest.mark.parametrize("k", [2.3, 3, 4.5])
@pytest.mark.parametrize("u", [5, 200, math.inf])
def test_by_integration(run, k, u):
    """Numerical integration gives the same fraction, for β = 0.05, 0.5 and 0.9."""
    for beta in (0.05, 0.5, 0.9):
        near(run("mass", beta=beta, k=k, u=u), lost(beta, k, u), f"k = {k}, u = {u}, β = {beta}", rtol=1e-4)


@problem("mass")
def test_exponents_below_two(run):
    """With a finite u, k may lie between 1 and 2."""
    near(run("mass", beta=0.3, k=1.5, u=30), lost(0.3, 1.5, 30), "k = 1.5, u = 30, β = 0.3", rtol=1e-4)


@problem("mass")
def test_all_kept(run):
    """β = 1 loses nothing; β = 0 is not allowed: a ValueError."""
    near(run("mass", beta=1, k=3, u=20), 0.0, "the share lost at β = 1")
    raises(run, "mass", beta=0, k=3, u=20)


@problem("slips")
@pytest.mark.parametrize("beta, k, u, eps", [(0.25, 3, 50, 0.1), (0.8, 2.5, 5, 0.2), (0.5, 4, 1000, 0.01),
                                             (0.6, 2.1, 7, 0)])
def test_line_by_line(run, beta, k, u, eps):
    """Δ by numerical integration; the other fields by the handout's formulas."""
    got = run("steps", beta=beta, k=k, u=u, eps=eps)
    gamma = ((1 - eps) / (beta - eps)) ** (1 / (k - 1)) - 1
    delta = (k - 2) * integral(1, u, k) / integral(0, u, k)
    square = (1 - eps) ** 2
    expected = dict(
        delta=delta,
        line=(1 - beta - (k - 1) * (beta - eps) * gamma) / (delta * square),
        factored=(1 - beta) * (1 - (k - 1) * gamma) / (delta * square),
        printed=(1 - beta) * (k - (k - 1) * ((1 - eps) / (beta - eps)) ** (1 / (k - 1))) / (0.98 * square))
    for name, right in expected.items():
        near(got[name], right, name, rtol=1e-5)


@problem("slips")
def test_no_eps(run):
    """ε = −0.1 is below 0: a ValueError."""
    raises(run, "steps", beta=0.2, k=3, u=5, eps=-0.1)


def bound(beta, k, u, eps, n):
    mean, square = (integral(order, u, k) / integral(0, u, k) for order in (1, 2))
    failed = math.exp(-n * (eps * mean) ** 2 / (2 * square)) \
        + math.exp(-2 * n * (eps * (1 - beta) / (1 - eps)) ** 2)
    return min(1 - beta, lost((beta - eps) / (1 - eps), k, u) / (1 - eps) + (1 - beta) * failed)


@problem("repaired")
@pytest.mark.parametrize("beta, k, u, eps, n", [
    (0.5, 3, 50, 0.1, 3000), (0.5, 3, 50, 0.1, 5000), (0.25, 2.5, 20, 0.05, 8000), (0.25, 2.5, 20, 0.2, 400),
    (0.5, 3, 5, 0.2, 200), (0.5, 3, 5, 0.25, 150), (0.8, 4, 5, 0.3, 300),
    (0.8, 4, 5, 0.01, 100), (0.3, 5, 10, 0.1, 2000)])
def test_both_terms(run, beta, k, u, eps, n):
    """Cases where `failure` is small, where it matters, and where the bound is 1 − β."""
    got = run("repaired", beta=beta, k=k, u=u, eps=eps, n=n)
    near(got, bound(beta, k, u, eps, n), "the bound", rtol=1e-4)


@problem("repaired")
@pytest.mark.parametrize("eps", [0.2, 1.0, -0.1])
def test_no_budget_left(run, eps):
    """ε = β, ε = 1 above β, and ε = −0.1: a ValueError."""
    raises(run, "repaired", beta=0.2, k=3, u=50, eps=eps, n=1000)
