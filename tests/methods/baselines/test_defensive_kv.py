"""DefensiveKV keeps what a loop written from its paper keeps."""

import math

import pytest
import torch

from common import decoder, end, feed
from methods.baselines.defensive_kv import DefensiveKV, LayerDefensiveKV
from nanollm.cache import begin_turn, crop, make_cache
from stores import positions
from windows import highest, mean, pool

B, H, G, D, LAYERS, WINDOW, BUDGET = 2, 2, 3, 8, 3, 4, 12


def rows_of(q, k, places, seen):
    """Return the rows of weights that the window gives to the tokens `places`: q (G, T, D)."""
    rows = []
    for g in range(G):
        for t in range(seen - WINDOW, seen):
            earlier = [i for i in places if i <= t]
            score = k[earlier] @ q[g, t] / math.sqrt(D)
            later = len(places) - len(earlier)
            rows.append(score.softmax(0).tolist() + later * [0.0])
    return rows


def scores_of(rows, norms, room, mass, kernel_size):
    """Return the scores of the entries before the window, infinite in the first stage."""
    n = len(norms)
    worst = [max(column) for column in zip(*rows)]
    worst = pool(worst[:n], kernel_size)
    least = sum(worst) / n
    score = [max(x, least) * norm / sum(norms) for x, norm in zip(worst, norms)]
    weight = mean(rows)
    gathered = sum(weight[n:])
    for i in highest(weight[:n], room):
        gathered += weight[i]
        if gathered >= mass:
            break
        score[i] = math.inf
    return score


def kept_by_loop(row, w_o, held, seen, cropped, groups, **options):
    """Return the positions that stay, by layer and head; held[layer, h]: those before.

    row: each layer's q, k, v of a text. groups: the layers that are ranked together.
    """
    room = BUDGET - (WINDOW - cropped)
    kept = {}
    ranked = []
    for (layer, h), places in held.items():
        q, k, v = row[layer]
        before = places[:-WINDOW]
        group = slice(h * G, h * G + G)
        rows = rows_of(q[group], k[h], places, seen)
        own = w_o[layer][:, group]
        projected = torch.einsum("nd,mgd->gnm", v[h, before], own)
        norms = mean(projected.abs().sum(-1).tolist())
        for i, score in zip(before, scores_of(rows, norms, room, **options)):
            ranked.append((score, layer, h, i))
        kept[layer, h] = places[-WINDOW : len(places) - cropped]
    first = any(score == math.inf for score, *_ in ranked)
    assert first == (options["mass"] > 0)  # the first stage took part
    for group in groups:
        own = sorted(x for x in ranked if x[1] in group)
        for _, layer, h, i in own[-room * H * len(group) :]:
            kept[layer, h].append(i)
    return {key: sorted(places) for key, places in kept.items()}


@pytest.mark.parametrize("Method", [DefensiveKV, LayerDefensiveKV])
@pytest.mark.parametrize("mass, kernel_size", [(0.5, 3), (0.0, 1), (0.9, 7)])
@pytest.mark.parametrize("cropped, turns", [(0, (40, 9)), (1, (40,))])
@torch.no_grad()
def test_kept_entries_are_the_loops(Method, mass, kernel_size, cropped, turns):
    """Also after a second turn, and if the last token is forgotten before the compression."""
    g = torch.Generator().manual_seed(7)
    shapes = [(B, heads, sum(turns), D) for heads in (H * G, H, H)]
    layers = []
    for _ in range(LAYERS):
        layers.append([2 * torch.randn(shape, generator=g) for shape in shapes])
    options = dict(mass=mass, kernel_size=kernel_size)
    caches = make_cache(decoder(), Method, budget=BUDGET, window_size=WINDOW, **options)
    w_o = [layer.w_o for layer in caches]
    groups = [[layer] for layer in range(LAYERS)]
    if Method is LayerDefensiveKV:
        groups = [range(LAYERS)]
    rows = [[[x[b] for x in qkv] for qkv in layers] for b in range(B)]
    nothing = {(i, h): [] for i in range(LAYERS) for h in range(H)}
    held = [nothing, nothing]
    seen = 0
    for turn in turns:
        begin_turn(caches)
        for layer, qkv in zip(caches, layers):
            feed(layer, qkv, turn)
        new = range(seen, seen + turn)
        seen += turn
        crop(caches, seen - cropped)
        end(*caches)
        found = [positions(layer) for layer in caches]
        for b in range(B):
            places = {}
            for key, old in held[b].items():
                places[key] = [*old, *new]
            held[b] = kept_by_loop(
                rows[b], w_o, places, seen, cropped, groups, **options
            )
            assert held[b] == {(i, h): found[i][b][h] for i, h in places}


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="mass is 1.1"):
        DefensiveKV(12, 4, mass=1.1)
