"""Fill stores with random tokens: two rows, two key/value heads, three query heads each, D = 8."""

import torch

from common import B, D, G, H
from nanollm.cache import NEVER

VECTORS = 2 * D * 4  # bytes of a key and a value
SLOT = VECTORS + 4


def draw(
    T,
    seed=0,
    rows=B,
    groups=G,
):
    """Return random q, k, v; q as a view of another order, as from a decoder."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, T, H * groups, D, generator=g).transpose(1, 2)
    k = torch.randn(rows, H, T, D, generator=g)
    v = torch.randn(rows, H, T, D, generator=g)
    return q, k, v


def fill(layer, T, seed=0, **shape):
    """Feed T new tokens; return their q, k, v and the output."""
    q, k, v = draw(T, seed, **shape)
    pos = torch.arange(layer.seen, layer.seen + T)[None]
    return q, k, v, layer.attend(q, k, v, pos)


def positions(layer) -> list[list[list[int]]]:
    """Return the positions that are held, [b][h], in order."""
    rows = layer.pos.sort(-1).values.tolist()
    return [[[i for i in head if i != NEVER] for head in row] for row in rows]


def sees(
    held,
    old,
    T,
) -> torch.Tensor:
    """Return which of `old` earlier tokens and T new ones the new ones see, (B, H, T, old + T).

    They see the earlier tokens that are held, [b][h], and the new ones up to themselves.
    """
    visible = torch.zeros(B, H, T, old + T, dtype=torch.bool)
    visible[..., old:] = torch.ones(T, T).tril()
    for b, row in enumerate(held):
        for h, places in enumerate(row):
            visible[b, h, :, places] = True
    return visible
