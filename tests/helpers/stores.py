"""Fill stores with random tokens, by default two rows, two key/value heads, six query heads."""

import torch

from common import SLOT, B, D, G, H
from nanollm.cache import NEVER

VECTORS = SLOT - 4  # bytes of a key and a value


def draw(T, seed=0, rows=B, groups=G):
    """Return random q, k, v; q as a view of another order, as from a decoder."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, T, H * groups, D, generator=g)
    k = torch.randn(rows, H, T, D, generator=g)
    v = torch.randn(rows, H, T, D, generator=g)
    return q.transpose(1, 2), k, v


def fill(layer, T, seed=0, **shape):
    """Feed T new tokens; return their q, k, v and the output."""
    q, k, v = draw(T, seed, **shape)
    stop = layer.seen + T
    pos = torch.arange(layer.seen, stop)
    y = layer.attend(q, k, v, pos[None])
    return q, k, v, y


def positions(layer) -> list[list[list[int]]]:
    """Return the positions that are held, [b][h], in order."""
    rows = []
    for row in layer.pos.sort(-1).values:
        heads = [head[head != NEVER] for head in row]
        rows.append([head.tolist() for head in heads])
    return rows


def sees(held, old, T) -> torch.Tensor:
    """Return which of `old` earlier tokens and T new ones the new ones see, (B, H, T, old + T).

    They see the earlier tokens that are held, [b][h], and the new ones up to themselves.
    """
    visible = torch.zeros(B, H, T, old + T)
    visible[..., old:] = torch.ones(T, T).tril()
    for b in range(B):
        for h in range(H):
            places = held[b][h]
            visible[b, h, :, places] = 1
    return visible.bool()
