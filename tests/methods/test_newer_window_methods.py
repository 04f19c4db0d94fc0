"""DefensiveKV, DropKV and R-KV keep what loops written from their papers keep."""
import math

import pytest
import torch

from common import decoder
from methods.defensive_kv import DefensiveKV
from methods.drop_kv import DropKV
from methods.r_kv import RKV, Unlike, redundancy
from methods.snap_kv import SnapKV
from nanollm.cache import NEVER, end_prefill, make_cache

B, H, G, D, T, LAYERS, WINDOW, BUDGET = 2, 2, 3, 8, 40, 3, 4, 12


@torch.no_grad()
def compressed(Method, **options):
    """Return caches after a prompt, each layer's q, k, v, and the kept positions by (row, layer, head)."""
    g = torch.Generator().manual_seed(7)
    draw = lambda heads: 2 * torch.randn(B, heads, T, D, generator=g)
    layers = [[draw(H * G), draw(H), draw(H)] for _ in range(LAYERS)]
    caches = make_cache(decoder(), Method, budget=BUDGET, window_size=WINDOW, **options)
    for cache, qkv in zip(caches, layers):
        cache.attend(*qkv, torch.arange(T)[None])
    end_prefill(caches)
    kept = {(b, layer, h): sorted(cache.pos[b, h][cache.pos[b, h] != NEVER].tolist())
            for layer, cache in enumerate(caches) for b in range(B) for h in range(H)}
    return caches, layers, kept


def rows_of(q, k, b, h):
    """Return the window's probabilities of one head: a list of rows (G·w), each over T entries."""
    rows = []
    for g in range(G):
        for t in range(T - WINDOW, T):
            weight = [math.exp(float(q[b, h * G + g, t] @ k[b, h, i]) / math.sqrt(D)) for i in range(t + 1)]
            rows.append([x / sum(weight) for x in weight] + [0.0] * (T - t - 1))
    return rows


def defensive(q, k, v, w_o, b, h, mass, kernel_size):
    """Return the scores of the entries before the window; the first stage's are infinite."""
    rows, n = rows_of(q, k, b, h), T - WINDOW
    worst, half = [max(row[i] for row in rows) for i in range(n)], kernel_size // 2
    worst = [max(worst[max(0, i - half):i + half + 1]) for i in range(n)]
    worst = [max(x, sum(worst) / n) for x in worst]
    norms = [sum((w_o[:, h * G + g] @ v[b, h, i]).abs().sum().item() for g in range(G)) / G for i in range(n)]
    score = [x * norm / sum(norms) for x, norm in zip(worst, norms)]

    mean = [sum(column) / len(rows) for column in zip(*rows)]
    gathered, first = sum(mean[n:]), []
    for i in sorted(range(n), key=lambda i: -mean[i]):
        if gathered + mean[i] >= mass or len(first) == BUDGET - WINDOW:
            break
        gathered += mean[i]
        first.append(i)
    return [math.inf if i in first else x for i, x in enumerate(score)], len(first)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("mass, kernel_size", [(0.5, 3), (0.0, 1), (0.9, 7)])
def test_defensive_kv_is_the_loop(across, mass, kernel_size):
    caches, layers, kept = compressed(DefensiveKV, across=across, mass=mass, kernel_size=kernel_size)
    first = 0
    for b in range(B):
        scores = {}
        for layer, (cache, qkv) in enumerate(zip(caches, layers)):
            for h in range(H):
                scores[layer, h], n = defensive(*qkv, cache.w_o, b, h, mass, kernel_size)
                first += n
        groups = [[*scores]] if across else [[(layer, h) for h in range(H)] for layer in range(LAYERS)]
        for group in groups:
            every = sorted((scores[key][i], *key, i) for key in group for i in range(T - WINDOW))
            best = every[-(BUDGET - WINDOW) * len(group):]
            for key in group:
                chosen = [i for _, *owner, i in best if tuple(owner) == key]
                assert kept[b, *key] == sorted(chosen) + [*range(T - WINDOW, T)]
    assert (first > 0) == (mass > 0)  # the first stage took part
    assert all(cache.scores is None for cache in caches)


@pytest.mark.parametrize("kernel_size", [1, 5])
def test_drop_kv_evicts_what_changes_the_output_least(kernel_size):
    """The score is the squared change of each query's output when the entry is left out, exactly."""
    _, layers, kept = compressed(DropKV, kernel_size=kernel_size)
    for layer, (q, k, v) in enumerate(layers):
        for b in range(B):
            for h in range(H):
                change, values = [0.0] * (T - WINDOW), v[b, h].double()
                for row in torch.tensor(rows_of(q, k, b, h), dtype=torch.float64):
                    for i in range(T - WINDOW):
                        without = row.clone()
                        without[i] = 0
                        change[i] += ((without / without.sum() - row) @ values).square().sum().item()
                half = kernel_size // 2
                pooled = [max(change[max(0, i - half):i + half + 1]) for i in range(T - WINDOW)]
                best = sorted(range(T - WINDOW), key=lambda i: (-pooled[i], -i))[:BUDGET - WINDOW]
                assert kept[b, layer, h] == sorted(best) + [*range(T - WINDOW, T)]


@pytest.mark.parametrize("mass", [-0.1, 1.1])
def test_a_mass_that_is_no_part_is_refused(mass):
    with pytest.raises(ValueError, match=f"mass is {mass}; it is a part of the attention"):
        DefensiveKV(budget=12, window_size=4, mass=mass)


def unlike(q, k, b, h, weight, alike, kernel_size):
    """Return Z of the entries before the window, by R-KV's definition."""
    rows, n, half = rows_of(q, k, b, h), T - WINDOW, kernel_size // 2
    mean = [sum(row[i] for row in rows) / len(rows) for i in range(n)]
    importance = [max(mean[max(0, i - half):i + half + 1]) for i in range(n)]
    cos = [[0.0 if i == j else float(torch.cosine_similarity(k[b, h, i], k[b, h, j], dim=0))
            for i in range(n)] for j in range(n)]
    for row in cos:
        like = [i for i in range(n) if row[i] > alike]
        if like:
            row[like[-1]] = 0.0
    total = [math.exp(sum(row[i] for row in cos) / n) for i in range(n)]
    return [weight * x - (1 - weight) * y / sum(total) for x, y in zip(importance, total)]


@pytest.mark.parametrize("weight, alike", [(0.1, 0.3), (0.5, -1.0), (1.0, 0.5)])
@torch.no_grad()
def test_r_kv_keeps_what_is_attended_to_and_unlike_the_rest(weight, alike):
    _, layers, kept = compressed(RKV, select=Unlike(weight, alike), kernel_size=3)
    for (b, layer, h), held in kept.items():
        q, k, _ = layers[layer]
        z = unlike(q, k, b, h, weight, alike, 3)
        best = sorted(range(T - WINDOW), key=lambda i: (-z[i], -i))[:BUDGET - WINDOW]
        assert held == sorted([*best, *range(T - WINDOW, T)])
    if weight == 1:
        assert kept == compressed(SnapKV, kernel_size=3)[2]


@torch.no_grad()
def test_of_repeated_keys_r_kv_keeps_the_newest():
    k = torch.randn(1, 1, 8, D, generator=torch.Generator().manual_seed(0))
    repeated = torch.cat((k, k, k), 2)
    score = redundancy(repeated, 0.9)[0, 0]
    assert (score[16:] < score[:8]).all() and (score[16:] < score[8:16]).all()
    with pytest.raises(ValueError, match="weight 1.5 must lie between 0 and 1"):
        Unlike(weight=1.5)
