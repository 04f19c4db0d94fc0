"""Functions that the tests of `chunks` call. They run in the submission's process and hold no answers."""
from types import SimpleNamespace

import torch

from methods import chunk_kv
from nanollm.cache import NEVER


def grid(place, size):
    return chunk_kv.grid(place, size)


def chunk_scores(scores, chunk, how):
    return list(chunk_kv.chunk_scores(scores, chunk, how))


def ranking(score):
    return chunk_kv.ranking(score)


def cut_to(score, chunk, budget):
    return chunk_kv.cut_to(score, chunk, budget)


def fit(score, length, budget):
    return chunk_kv.fit(score, length, budget)


def chosen(tokens, below, prompt_done=True):
    """Of a cache whose lower neighbour holds the positions `below` (B, H, n), NEVER as −1."""
    cache = chunk_kv.ChunkKV(budget=64, reuse=2)
    x = torch.zeros(*below.shape[:2], len(tokens), 4)
    cache.write(x, x, tokens[None].int())
    held = torch.where(below < 0, NEVER, below).int()
    cache.layer, cache.previous = 1, SimpleNamespace(pos=held, prompt_done=prompt_done)
    return cache.chosen()
