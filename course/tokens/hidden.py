"""The hidden tests, which a student's copy does not hold: more sizes, and edge cases."""
from fractions import Fraction
import math

import pytest
import torch
from torch import tensor

from course.expect import problem, same, wrong


def drawn(seed, *shape, values=None):
    g = torch.Generator().manual_seed(seed)
    if values is None:
        return torch.randn(*shape, generator=g)
    return torch.randint(values, shape, generator=g).float()


def highest(score, budget):
    """Return the indices of the `budget` highest scores, of equal scores the last."""
    return sorted(range(len(score)), key=lambda i: (-score[i], -i))[:budget]


def mask(chosen, n):
    return tensor([i in chosen for i in range(n)])


def by_head(f, B, H):
    """Stack f(b, h) of each row and head."""
    return torch.stack([torch.stack([torch.as_tensor(f(b, h)) for h in range(H)]) for b in range(B)])


def scores_of(q, k):
    """Return the window scores of q (w, D) and k (S, D), in Python's numbers."""
    w, D, S = len(q), len(q[0]), len(k)
    sums = [0.0] * (S - w)
    for t in range(w):
        seen = k[:S - w + t + 1]
        score = [math.exp(sum(a * b for a, b in zip(q[t], each)) / math.sqrt(D)) for each in seen]
        for i in range(S - w):
            sums[i] += score[i] / sum(score)
    return [x / w for x in sums]


def pooled(score, kernel):
    r = kernel // 2
    return [max(score[max(0, i - r):i + r + 1]) for i in range(len(score))]


def share(score, mean, floor):
    """Return how many entries AdaKV gives each head of a row."""
    H, S = len(score), len(score[0])
    ranked = sorted(((score[h][i], i, h) for h in range(H) for i in range(S)), reverse=True)[:H * mean]
    exact = [floor * mean + (1 - floor) * sum(each[2] == h for each in ranked) for h in range(H)]
    counts = [math.floor(x) for x in exact]
    for h in sorted(range(H), key=lambda h: (counts[h] - exact[h], h))[:H * mean - sum(counts)]:
        counts[h] += 1
    return counts


@problem("window_scores")
@pytest.mark.parametrize("B, H, G, w, S, D", [(1, 1, 1, 1, 2, 3), (2, 3, 2, 4, 11, 5), (2, 1, 4, 7, 9, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_a_loop(run, B, H, G, w, S, D, dtype):
    """Each query head's mean over the window; inside the window attention is causal."""
    q, k = 2 * drawn(0, B, H, G, w, D).to(dtype), drawn(1, B, H, S, D).to(dtype)
    expected = by_head(lambda b, h: tensor([scores_of(x, k[b, h].tolist()) for x in q[b, h].tolist()]), B, H)
    got = run("window_scores", q=q, k=k)
    same(got, expected, "the window scores", atol=1e-5)
    if got.dtype != dtype:
        wrong(f"expected window scores of {dtype}, got {got.dtype}")


@problem("window_scores")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(run, dtype):
    """Queries and keys of 16 bits: the mean is computed in 32."""
    q, k = torch.zeros(1, 2, 2, 48, 4, dtype=dtype), torch.zeros(1, 2, 50, 4, dtype=dtype)
    got = run("window_scores", q=q, k=k)
    if not isinstance(got, torch.Tensor) or got.dtype != torch.float32:
        wrong("expected window scores of torch.float32")
    same(got, torch.full((1, 2, 2, 2), sum(1 / n for n in range(3, 51)) / 48), "the window scores", atol=1e-4)


@problem("window_scores")
@pytest.mark.parametrize("kernel", [1, 5])
def test_snap_kv(run, kernel):
    """In SnapKV: the window stays, and the tokens with the highest pooled mean of a group's window scores."""
    B, H, G, S, D, w, budget = 2, 2, 2, 20, 4, 3, 9
    q, k = 2 * drawn(2, B, H * G, S, D), drawn(3, B, H, S, D)

    def expected(b, h):
        scores = [scores_of(q[b, h * G + g, -w:].tolist(), k[b, h].tolist()) for g in range(G)]
        mean = pooled([sum(each) / G for each in zip(*scores)], kernel)
        return tensor(sorted(highest(mean, budget - w)) + [*range(S - w, S)])

    got = run("kept", q=q, k=k, v=k.clone(), w_o=torch.ones(8, H * G, D), budget=budget, window_size=w,
              kernel_size=kernel)
    same(got, by_head(expected, B, H).int(), "the positions")


@problem("pool")
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 9), (2, 3, 2, 12)])
@pytest.mark.parametrize("kernel", [1, 3, 7, 15])
def test_windows(run, shape, kernel):
    """Several shapes, and widths beyond the text; the shape stays."""
    score = drawn(0, *shape).abs()
    rows = [pooled(row, kernel) for row in score.view(-1, shape[-1]).tolist()]
    same(run("pool", score=score, kernel_size=kernel), tensor(rows).view(shape), "the pooled scores")


@problem("pool")
def test_below_0(run):
    """Negative scores: do not pad the ends with 0."""
    got = run("pool", score=tensor([[[-5., -3, -9]]]), kernel_size=3)
    same(got, tensor([[[-3., -3, -3]]]), "the pooled numbers")


@problem("top")
@pytest.mark.parametrize("shape", [(7,), (2, 3, 10), (2, 2, 2, 33)])
@pytest.mark.parametrize("budget", [0, 1, 4, 7, 50])
def test_ties(run, shape, budget):
    """Many ties, several shapes: exactly min(budget, S) stay, of equal scores the newest."""
    score = drawn(0, *shape, values=4)
    rows = [mask(highest(row, budget), shape[-1]) for row in score.view(-1, shape[-1]).tolist()]
    same(run("top", score=score, budget=budget), torch.stack(rows).view(shape), "the mask")


@problem("top")
def test_budgets(run):
    """A budget for each row and head, with ties, and scores of +∞."""
    score, budget = drawn(1, 2, 3, 9, values=3), tensor([[0, 1, 5], [8, 9, 12]])
    score[0, 1, [2, 6]], score[1, 0, :3] = math.inf, math.inf
    expected = by_head(lambda b, h: mask(highest(score[b, h].tolist(), int(budget[b, h])), 9), 2, 3)
    same(run("top", score=score, budget=budget), expected, "the mask")


@problem("shares")
@pytest.mark.parametrize("floor", [0.0, 0.2, 0.29, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("B, H, S, mean, values", [(1, 1, 4, 2, None), (2, 3, 9, 4, 4), (3, 7, 12, 5, None),
                                                   (2, 5, 6, 6, 3), (2, 4, 30, 1, None)])
def test_by_fractions(run, floor, B, H, S, mean, values):
    """Exact fractions: the sum is always mean × heads; ties and remainders as specified."""
    score = drawn(0, B, H, S, values=values) * (1 + torch.arange(H)).view(H, 1) ** 0.5
    expected = tensor([share(row, mean, Fraction(str(floor))) for row in score.tolist()])
    same(run("shared", score=score, mean=mean, floor=floor), expected, f"a floor of {floor}: the entries")


@problem("shares")
@pytest.mark.parametrize("mean", [1, 2, 3])
def test_equal_scores(run, mean):
    """Equal scores: the newest token comes first; for the same token, the larger head index."""
    score = torch.ones(1, 4, 5)
    expected = tensor([share(score[0].tolist(), mean, Fraction(0))])
    same(run("shared", score=score, mean=mean, floor=0.0), expected, "the entries")
    score = tensor([[[2., 1, 1, 0], [2, 0, 0, 1], [1, 0, 0, 1]]])
    expected = tensor([share(score[0].tolist(), mean, Fraction("0.2"))])
    same(run("shared", score=score, mean=mean, floor=0.2), expected, "the entries")


@problem("shares")
def test_ada_kv(run):
    """In AdaKV: each head keeps the window and as many of its own highest tokens as `shared` gives it."""
    B, H, G, S, D, w, budget = 2, 3, 2, 24, 4, 3, 9
    q, k = drawn(1, B, H * G, S, D), drawn(2, B, H, S, D) * tensor([0.3, 1, 3]).view(3, 1, 1)
    got = run("kept", q=q, k=k, v=k.clone(), w_o=torch.ones(8, H * G, D), budget=budget, window_size=w,
              kernel_size=3, floor=0.2)
    for b in range(B):
        score = []
        for h in range(H):
            scores = [scores_of(q[b, h * G + g, -w:].tolist(), k[b, h].tolist()) for g in range(G)]
            score.append(pooled([sum(each) / G for each in zip(*scores)], 3))
        counts = share(score, budget - w, Fraction("0.2"))
        for h in range(H):
            expected = sorted(highest(score[h], counts[h])) + [*range(S - w, S)]
            same([x for x in got[b, h].tolist() if x < S], expected, f"row {b}, head {h}: the positions")


@problem("norms")
@pytest.mark.parametrize("B, H, G, n, D, d", [(1, 1, 1, 1, 1, 1), (2, 3, 2, 7, 4, 10), (3, 2, 4, 5, 8, 6),
                                              (1, 1, 1, 1500, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_l1(run, B, H, G, n, D, d, dtype):
    """The L1 norm of each value times its query head's part of W_O."""
    v, w_o = drawn(0, B, H, n, D).to(dtype), drawn(1, d, H * G, D).to(dtype)
    expected = torch.zeros(B, H, G, n, dtype=dtype)
    for h in range(H):
        for g in range(G):
            for o in range(d):
                expected[:, h, g] += sum(v[:, h, :, i] * w_o[o, h * G + g, i] for i in range(D)).abs()
    got = run("value_norms", v=v, w_o=w_o)
    same(got, expected, "the norms", atol=1e-4)
    if got.dtype != dtype:
        wrong(f"expected norms of {dtype}, got {got.dtype}")


@problem("norms")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_32_bits(run, dtype):
    """Values of 16 bits: sum over d in 32 bits, so that 4099 ones are 4099, not 4096 or 4100."""
    got = run("value_norms", v=torch.ones(2, 1, 3, 1, dtype=dtype), w_o=torch.ones(4099, 2, 1, dtype=dtype))
    same(got, torch.full((2, 1, 2, 3), 4099.0), "the norms")


@problem("two_stage")
@pytest.mark.parametrize("shape", [(8,), (2, 3, 12)])
@pytest.mark.parametrize("budget", [2, 4, 8])
def test_both_stages(run, shape, budget):
    """All of stage 1 stays, whatever its scores; the highest of the others fill the budget; many ties."""
    score, n = drawn(0, *shape, values=3), shape[-1]
    first = torch.zeros(shape, dtype=torch.bool)
    first[..., 1], first[..., 4] = True, True
    rows = []
    for row in score.view(-1, n).tolist():
        chosen = {1, 4}
        chosen |= set([i for i in highest(row, n) if i not in chosen][:budget - 2])
        rows.append(mask(chosen, n))
    same(run("two_stage", first=first, score=score, budget=budget), torch.stack(rows).view(shape), "the mask")


@problem("two_stage")
def test_large_scores(run):
    """Scores of any size: stage 1's entry stays even before a score of 1e30. Budgets differ."""
    score, first = tensor([[1e30, 5, 1e30], [-1e30, 0, 2]]), tensor([[0, 1, 0], [1, 0, 0]]).bool()
    got = run("two_stage", first=first, score=score, budget=tensor([1, 2]))
    same(got, tensor([[0, 1, 0], [1, 0, 1]]).bool(), "the mask")


def critical(scores, norms, budget, alpha, kernel, how):
    """Return both stages' choice of one head; window scores and norms are (G, n) lists."""
    G, n = len(scores), len(scores[0])
    mean = [sum(each) / G for each in zip(*scores)]
    chosen = highest(pooled(mean, kernel), math.floor(Fraction(str(alpha)) * budget))
    products = [[a * b for a, b in zip(*each)] for each in zip(scores, norms)]
    second = [sum(each) / G for each in zip(*products)]
    if how == "pooled":
        products = [[a * b for a, b in zip(pooled(x, kernel), y)] for x, y in zip(scores, norms)]
        second = [sum(each) / G for each in zip(*products)]
    if how == "code":
        many = [sum(each) / G for each in zip(*(pooled(x, kernel) for x in scores))]
        second = [(a + 1e-4) * sum(each) / G for a, each in zip(many, zip(*norms))]
    others = [i for i in highest(second, n) if i not in chosen]
    return mask(chosen + others[:budget - len(chosen)], n)


@problem("critical")
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.29, 0.5, 1.0])
@pytest.mark.parametrize("budget, kernel, how", [(7, 1, "critical"), (10, 5, "critical"), (8, 3, "pooled"),
                                                 (8, 3, "code")])
def test_by_stages(run, alpha, budget, kernel, how):
    """Rows, heads and groups differ; the window's values are left out; a subclass's `second` is called."""
    B, H, G, n, w, D, d = 2, 3, 2, 20, 4, 3, 5
    scores, v = drawn(0, B, H, G, n).double().exp(), drawn(1, B, H, n + w, D).double()
    w_o = drawn(2, d, H * G, D).double()
    v[:, :, n:] *= 1000

    def expected(b, h):
        norms = [(v[b, h, :n] @ w_o[:, h * G + g].T).abs().sum(-1).tolist() for g in range(G)]
        return critical(scores[b, h].tolist(), norms, budget, alpha, kernel, how)

    got = run("selected", scores=scores, v=v, w_o=w_o, budget=budget, alpha=alpha, kernel_size=kernel,
              how=how)
    same(got, by_head(expected, B, H), "the mask")


@problem("critical")
@pytest.mark.parametrize("budget", [100, tensor([[100, 7], [0, 3]])])
def test_budgets_of_heads(run, budget):
    """One budget, or one per row and head as in AdaKV: ⌊α · budget⌋ of each; 0.29 of 100 is 29."""
    scores, v = drawn(3, 2, 2, 1, 120).double().exp(), drawn(4, 2, 2, 123, 3).double()
    w_o, budgets = drawn(5, 4, 2, 3).double(), torch.as_tensor(budget).expand(2, 2)
    for b in range(2):
        for h in range(2):  # stage 2 never takes the last that stage 1 takes
            v[b, h, highest(scores[b, h, 0].tolist(), 29)[-1]] = 0

    def expected(b, h):
        norms = [(v[b, h, :120] @ w_o[:, h].T).abs().sum(-1).tolist()]
        return critical(scores[b, h].tolist(), norms, int(budgets[b, h]), 0.29, 1, "critical")

    got = run("selected", scores=scores, v=v, w_o=w_o, budget=budget, alpha=0.29)
    same(got, by_head(expected, 2, 2), "the mask")


@problem("critical")
def test_in_a_cache(run):
    """In SnapKV, at the end of a prompt: the window and the tokens of both stages stay."""
    B, H, G, S, D, w, budget = 2, 2, 2, 20, 4, 3, 11
    q, k, v = (x.double() for x in (2 * drawn(6, B, H * G, S, D), drawn(7, B, H, S, D), drawn(8, B, H, S, D)))
    w_o = drawn(9, 6, H * G, D).double()

    def expected(b, h):
        scores = [scores_of(q[b, h * G + g, -w:].tolist(), k[b, h].tolist()) for g in range(G)]
        norms = [(v[b, h, :S - w] @ w_o[:, h * G + g].T).abs().sum(-1).tolist() for g in range(G)]
        stay = critical(scores, norms, budget - w, 0.25, 3, "critical")
        return torch.cat((stay.nonzero()[:, 0], torch.arange(S - w, S)))

    got = run("kept", q=q, k=k, v=v, w_o=w_o, budget=budget, window_size=w, kernel_size=3, how="critical")
    same(got, by_head(expected, B, H).int(), "the positions")


@problem("theta")
@pytest.mark.parametrize("shape", [(6,), (2, 3, 2, 9)])
def test_theta_by_a_loop(run, shape):
    """θ of each head, with and without leading dimensions."""
    weights, norms = drawn(0, *shape).double().softmax(-1), drawn(1, *shape).double().abs()
    kept = drawn(2, *shape, values=2).bool()
    kept[..., 0] = True
    rows = []
    for A, V, N in zip(*(x.view(-1, shape[-1]).tolist() for x in (weights, norms, kept))):
        S, W = sum(a for a, n in zip(A, N) if n), sum(a * v for a, v, n in zip(A, V, N) if n)
        rows.append(sum(a * v for a, v in zip(A, V)) - (2 - 1 / S) * W)
    same(run("theta", weights=weights, norms=norms, kept=kept), tensor(rows).view(shape[:-1]), "θ", atol=1e-6)


@problem("theta")
def test_one_set_for_a_group(run):
    """`kept` (B, 1, n) serves all query heads of weights (B, G, n)."""
    weights, norms = drawn(3, 2, 3, 8).softmax(-1), drawn(4, 2, 3, 8).abs()
    kept = tensor([[1, 0, 1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1, 1, 1]]).bool().view(2, 1, 8)
    S, W = (weights * kept).sum(-1), (weights * norms * kept).sum(-1)
    same(run("theta", weights=weights, norms=norms, kept=kept), (weights * norms).sum(-1) - (2 - 1 / S) * W,
         "θ", atol=1e-5)


@problem("theta")
def test_all_stay(run):
    """Everything stays: the output does not change, and θ is 0."""
    weights, norms = drawn(5, 2, 8).softmax(-1), drawn(6, 2, 8).abs()
    got = run("theta", weights=weights, norms=norms, kept=torch.ones(2, 8, dtype=torch.bool))
    same(got, torch.zeros(2), "θ", atol=1e-5)
