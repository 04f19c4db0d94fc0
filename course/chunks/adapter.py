"""Functions that the tests of `chunks` call. They run in the submission's process and hold no answers."""
import torch

from methods import chunk_kv
from nanollm.cache import PackedSlots


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
    """Return the positions (B, H, n) that each layer keeps, and [layer, budget] of each call of `select`.

    Layer i would choose the slots choices[i] (B, H, n) beside the window of 4 tokens; −1 stands for no slot.
    All layers have read `tokens` tokens, whose positions are their slots.
    """
    asked = []

    class Given(chunk_kv.Chunks):
        def __call__(self, window, scores, budget):
            asked.append([window.layer.index, budget])
            return (choices[window.layer.index][..., None] == torch.arange(window.n)).any(2)

    method = chunk_kv.ChunkKV(budget=budget, window_size=4, reuse=reuse, select=Given())
    layers = [PackedSlots(method, None, i) for i in range(len(choices))]
    for layer, choice in zip(layers, choices):
        x = torch.zeros(*choice.shape[:2], tokens, 4)
        layer.attend(x, x, x, torch.arange(tokens)[None])
    method.compress(None, torch.zeros(len(choices[0]), tokens), layers)
    return dict(kept=[layer.pos.clone() for layer in layers], asked=asked)
