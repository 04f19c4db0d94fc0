"""DefensiveKV keeps what a loop written from its paper keeps."""

import math

import pytest
import torch

from common import decoder, end, feed
from methods.baselines.defensive_kv import (
    DefensiveKV,
    LayerDefensiveKV,
)
from nanollm.cache import NEVER, begin_turn, crop, make_cache

B, H, G, D, LAYERS, WINDOW, BUDGET = 2, 2, 3, 8, 3, 4, 12


def rows_of(
    q,
    k,
    held,
    seen,
):
    """Return the rows (G·w) of the window's weights for the tokens in `held`: q (G, T, D)."""
    rows = []
    for g in range(G):
        for t in range(seen - WINDOW, seen):
            weight = [0.0] * len(held)
            for j, i in enumerate(held):
                if i <= t:
                    weight[j] = math.exp(float(q[g, t] @ k[i]) / math.sqrt(D))
            rows.append([x / sum(weight) for x in weight])
    return rows


def scores_of(
    rows,
    v,
    w_o,
    before,
    room,
    mass,
    kernel_size,
):
    """Return the scores of the entries before the window, infinite in the first stage.

    v (before, D): their values. w_o (d_model, G, D). Returns also how many the first stage takes.
    """
    worst = [max(row[i] for row in rows) for i in range(before)]
    half = kernel_size // 2
    worst = [max(worst[max(0, i - half) : i + half + 1]) for i in range(before)]
    worst = [max(x, sum(worst) / before) for x in worst]
    norms = []
    for i in range(before):
        each = [(w_o[:, g] @ v[i]).abs().sum().item() for g in range(G)]
        norms.append(sum(each) / G)
    score = [x * norm / sum(norms) for x, norm in zip(worst, norms)]

    mean = [sum(column) / len(rows) for column in zip(*rows)]
    gathered = sum(mean[before:])
    first = []
    for i in sorted(range(before), key=lambda i: -mean[i]):
        if gathered + mean[i] >= mass or len(first) == room:
            break
        gathered += mean[i]
        first.append(i)
    for i in first:
        score[i] = math.inf
    return score, len(first)


def kept_by_loop(
    layers,
    w_o,
    held,
    seen,
    n,
    across,
    mass,
    kernel_size,
):
    """Return the positions that stay by layer and head, and the largest first stage.

    held[layer, h]: the positions before. Of `seen` tokens n are left. layers: q, k, v of a row.
    """
    room = BUDGET - (WINDOW - (seen - n))
    ranked = []
    most = 0
    for layer, h in held:
        q, k, v = layers[layer]
        places = held[layer, h]
        rows = rows_of(q[h * G : h * G + G], k[h], places, seen)
        before = len(places) - WINDOW
        own = w_o[layer][:, h * G : h * G + G]
        values = v[h, places[:before]]
        score, first = scores_of(rows, values, own, before, room, mass, kernel_size)
        most = max(most, first)
        for i in range(before):
            ranked.append((score[i], layer, h, places[i]))
    kept = {
        key: places[-WINDOW : len(places) - (seen - n)] for key, places in held.items()
    }
    for group in [range(LAYERS)] if across else [[layer] for layer in range(LAYERS)]:
        own = sorted(x for x in ranked if x[1] in group)
        for _, layer, h, i in own[-room * H * len(group) :]:
            kept[layer, h] = sorted([*kept[layer, h], i])
    return kept, most


@pytest.mark.parametrize("Method", [DefensiveKV, LayerDefensiveKV])
@pytest.mark.parametrize("mass, kernel_size", [(0.5, 3), (0.0, 1), (0.9, 7)])
@pytest.mark.parametrize("cropped, turns", [(0, (40, 9)), (1, (40,))])
@torch.no_grad()
def test_kept_entries_are_the_loops(
    Method,
    mass,
    kernel_size,
    cropped,
    turns,
):
    """Also after a second turn, and if the last token is forgotten before the compression."""
    g = torch.Generator().manual_seed(7)
    shapes = [(B, heads, sum(turns), D) for heads in (H * G, H, H)]
    layers = [[2 * torch.randn(x, generator=g) for x in shapes] for _ in range(LAYERS)]
    options = dict(mass=mass, kernel_size=kernel_size)
    caches = make_cache(
        decoder(),
        Method,
        budget=BUDGET,
        window_size=WINDOW,
        **options,
    )
    w_o = [cache.w_o for cache in caches]
    held = [{(i, h): [] for i in range(LAYERS) for h in range(H)} for _ in range(B)]
    start = 0
    for turn in turns:
        seen = start + turn
        n = seen - cropped
        begin_turn(caches)
        for cache, qkv in zip(caches, layers):
            feed(cache, qkv, turn)
        crop(caches, n)
        end(*caches)
        for b in range(B):
            places = {key: [*old, *range(start, seen)] for key, old in held[b].items()}
            row = [[x[b] for x in qkv] for qkv in layers]
            across = Method is LayerDefensiveKV
            rest = places, seen, n, across, mass, kernel_size
            held[b], most = kept_by_loop(row, w_o, *rest)
            assert (most > 0) == (mass > 0)  # the first stage took part
            for (layer, h), kept in held[b].items():
                pos = caches[layer].pos[b, h]
                assert pos[pos != NEVER].tolist() == kept
        start = seen
    assert not any("window" in cache.notes for cache in caches)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="mass is 1.1"):
        DefensiveKV(12, 4, mass=1.1)
