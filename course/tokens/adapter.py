"""Functions that the tests of `tokens` call. They run in the submission's process and hold no answers."""
from types import SimpleNamespace

import torch

from methods import critical_kv
from methods.baselines import ada_kv
from methods.baselines.snap_kv import HighestScores, SnapKV
from methods.theory.perturbation import theta as sum_of_theta
from nanollm import ranking, window
from nanollm.cache import PackedSlots, Slots, compress

SELECTIONS = dict(scores=HighestScores, critical=critical_kv.Critical, pooled=critical_kv.PooledCritical,
                  code=critical_kv.CriticalCode)


def window_scores(q, k):
    return window.window_scores(q, k)


def pool(score, kernel_size):
    return window.max_pool(score, kernel_size)


def top(score, budget):
    return ranking.top(score, budget)


def shared(score, mean, floor):
    return ada_kv.shared(score, mean, floor)


def value_norms(v, w_o):
    return critical_kv.value_norms(v, w_o)


def two_stage(first, score, budget):
    return critical_kv.two_stage(first, score, budget)


def theta(weights, norms, kept):
    return sum_of_theta(weights, norms, kept)


def decoder(w_o):
    """Return the part of a decoder of one layer that CriticalKV reads: W_O (d, H·G, D)."""
    return SimpleNamespace(blocks=[SimpleNamespace(attention=SimpleNamespace(w_o=w_o))])


def selected(scores, v, w_o, budget, alpha, kernel_size=1, how="critical"):
    """Return the mask of a selection on a layer with the values v (B, H, n + w, D)."""
    B, H, S, D = v.shape
    layer = Slots(SnapKV(budget=64, kernel_size=kernel_size), decoder(w_o))
    layer.write(v, v, torch.arange(S)[None])
    layer.notes["window"] = v.new_zeros(B, H, 1, S - scores.shape[3], D)
    seen = window.Window(layer.method, layer, torch.zeros(B, S))
    return SELECTIONS[how](alpha=alpha)(seen, scores, budget)


def kept(q, k, v, w_o, budget, window_size, kernel_size, floor=None, how="scores"):
    """Return the positions (B, H, n) in SnapKV at the prompt's end; with a floor, in AdaKV."""
    options = dict(budget=budget, window_size=window_size, kernel_size=kernel_size, select=SELECTIONS[how]())
    method = SnapKV(**options) if floor is None else ada_kv.AdaKV(**options, floor=floor)
    layer = PackedSlots(method, decoder(w_o))
    layer.attend(q, k, v, torch.arange(k.shape[2])[None])
    compress(layer.model, torch.zeros(k.shape[0], k.shape[2]), [layer])
    return layer.pos
