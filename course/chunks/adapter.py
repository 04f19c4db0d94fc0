"""Functions that the tests of `chunks` call. They run in the submission's process and hold no answers."""
import torch

from methods import chunk_kv


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


def compressed(choices, tokens, reuse, budget=64):
    """Return the positions (B, H, n) that each layer keeps, and the layers whose `chosen` was called.

    Layer i would choose the slots choices[i] (B, H, n); −1 stands for no slot. All layers have read `tokens`
    tokens, whose positions are their slots.
    """
    asked = []

    class Given(chunk_kv.ChunkKV):
        def chosen(self):
            asked.append(self.layer)
            return (choices[self.layer][..., None] == torch.arange(tokens)).any(2)

    caches = []
    for layer, choice in enumerate(choices):
        cache = Given(budget=budget, reuse=reuse)
        cache.layer = layer
        x = torch.zeros(*choice.shape[:2], tokens, 4)
        cache.write(x, x, torch.arange(tokens)[None])
        caches.append(cache)
    Given.compress(None, torch.zeros(len(choices[0]), tokens), caches)
    return dict(kept=[cache.pos.clone() for cache in caches], asked=asked)
