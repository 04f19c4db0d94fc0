"""Functions that the tests of `tokens` call. They run in the submission's process and hold no answers."""
from types import SimpleNamespace

import torch

from methods import critical_kv
from methods.baselines import ada_kv
from methods.baselines.snap_kv import HighestScores, SnapKV
from methods.ours.theta import theta as sum_of_theta
from nanollm import ranking, window
from nanollm.cache import compress

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
    """Return the mask of a selection on a cache with the values v (B, H, n + w, D)."""
    cache = SnapKV(budget=64, kernel_size=kernel_size)
    cache.write(v, v, torch.arange(v.shape[2])[None])
    cache.link(decoder(w_o), 0)
    return SELECTIONS[how](alpha=alpha)(cache, scores, budget)


def kept(q, k, v, w_o, budget, window_size, kernel_size, floor=None, how="scores"):
    """Return the positions (B, H, n) in SnapKV at the prompt's end; with a floor, in AdaKV."""
    options = dict(budget=budget, window_size=window_size, kernel_size=kernel_size, select=SELECTIONS[how]())
    cache = SnapKV(**options) if floor is None else ada_kv.AdaKV(**options, floor=floor)
    cache.link(decoder(w_o), 0)
    cache.attend(q, k, v, torch.arange(k.shape[2])[None])
    compress(cache.model, torch.zeros(k.shape[0], k.shape[2]), [cache])
    return cache.pos
