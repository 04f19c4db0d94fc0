"""DefensiveKV keeps what a loop written from its paper keeps."""

import math

import pytest
import torch

from common import decoder, end, feed
from methods.baselines.defensive_kv import DefensiveKV
from nanollm.cache import NEVER, crop, make_cache

B, H, G, D, T, LAYERS, WINDOW, BUDGET = 2, 2, 3, 8, 40, 3, 4, 12
BEFORE = T - WINDOW  # entries before the window


def rows_of(q, k, b, h):
    """Return the window's probabilities of one head: a list of rows (G·w), each over T entries."""
    rows = []
    for g in range(G):
        for t in range(BEFORE, T):
            weight = [
                math.exp(float(q[b, h * G + g, t] @ k[b, h, i]) / math.sqrt(D))
                for i in range(t + 1)
            ]
            rows.append([x / sum(weight) for x in weight] + [0.0] * (T - t - 1))
    return rows


def defensive(q, k, v, w_o, b, h, mass, kernel_size, room):
    """Return the scores of the entries before the window; the first stage's are infinite."""
    rows, half = rows_of(q, k, b, h), kernel_size // 2
    worst = [max(row[i] for row in rows) for i in range(BEFORE)]
    worst = [max(worst[max(0, i - half) : i + half + 1]) for i in range(BEFORE)]
    worst = [max(x, sum(worst) / BEFORE) for x in worst]
    norms = [
        sum((w_o[:, h * G + g] @ v[b, h, i]).abs().sum().item() for g in range(G)) / G
        for i in range(BEFORE)
    ]
    score = [x * norm / sum(norms) for x, norm in zip(worst, norms)]

    mean = [sum(column) / len(rows) for column in zip(*rows)]
    gathered, first = sum(mean[BEFORE:]), []
    for i in sorted(range(BEFORE), key=lambda i: -mean[i]):
        if gathered + mean[i] >= mass or len(first) == room:
            break
        gathered += mean[i]
        first.append(i)
    return [math.inf if i in first else x for i, x in enumerate(score)], len(first)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("mass, kernel_size", [(0.5, 3), (0.0, 1), (0.9, 7)])
@pytest.mark.parametrize("cropped", [0, 1])
@torch.no_grad()
def test_defensive_kv_is_the_loop(across, mass, kernel_size, cropped):
    """Kept entries equal the loop's, also if the prompt's last token is forgotten before the
    compression."""
    g, n, room = (
        torch.Generator().manual_seed(7),
        T - cropped,
        BUDGET - (WINDOW - cropped),
    )
    layers = [
        [2 * torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H)]
        for _ in range(LAYERS)
    ]
    options = dict(
        budget=BUDGET,
        window_size=WINDOW,
        across=across,
        mass=mass,
        kernel_size=kernel_size,
    )
    caches = make_cache(decoder(), DefensiveKV, **options)
    for cache, qkv in zip(caches, layers):
        feed(cache, *qkv)
    crop(caches, n)
    end(*caches)

    most = 0  # entries of a head's first stage
    for b in range(B):
        scores = {}
        for layer, (cache, qkv) in enumerate(zip(caches, layers)):
            for h in range(H):
                scores[layer, h], first = defensive(
                    *qkv, cache.w_o, b, h, mass, kernel_size, room
                )
                most = max(most, first)
        groups = (
            [[*scores]]
            if across
            else [[(layer, h) for h in range(H)] for layer in range(LAYERS)]
        )
        for group in groups:
            every = sorted(
                (scores[key][i], *key, i) for key in group for i in range(BEFORE)
            )
            for layer, h in group:
                chosen = [
                    i
                    for *_, i in (
                        x for x in every[-room * len(group) :] if x[1:3] == (layer, h)
                    )
                ]
                pos = caches[layer].pos[b, h]
                assert sorted(pos[pos != NEVER].tolist()) == sorted(chosen) + [
                    *range(BEFORE, n)
                ]
    assert (most > 0) == (mass > 0)  # the first stage took part
    assert all(cache.queries is None for cache in caches)
