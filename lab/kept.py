"""What caches hold: which tokens, how many slots; and how many bytes a full cache has."""

import torch
from torch import Tensor

from nanollm.cache import NEVER, Slots, full_layers


def held(caches: list[Slots], tokens: int) -> Tensor:
    """Return (B, L, H, tokens) of bool: which of the first `tokens` tokens a head still holds.

    Of the L layers that a method compresses: layers that slide are left out, unless all slide.
    """
    token = torch.arange(tokens, device=caches[0].pos.device)
    layers = []
    for layer in full_layers(caches):
        heads = []
        for pos in layer.pos.unbind(1):  # (B, S)
            there = pos[..., None] == token
            heads.append(there.any(-2))
        layers.append(torch.stack(heads, 1))
    return torch.stack(layers, 1)


def slots_per_head(caches: list[Slots]) -> float:
    """Return live slots per key/value head: the mean over heads, in the text with the most.

    The mean allows heads and layers to share budgets. Rounded entries count as exact ones do.
    Layers that slide do not count, unless all slide.
    """
    slots = 0  # of each text
    heads = 0
    for layer in full_layers(caches):
        live = layer.pos != NEVER  # (B, H, S)
        slots = slots + live.sum((1, 2))
        heads += live.shape[1]
    return slots.max().item() / heads


def full_cache_bytes(model, tokens: int, bytes_per_number: int = 2) -> int:
    """Return the bytes of a full cache's keys and values (KVReviver, Eq. 1).

    They are 2 · layers · key/value heads · tokens · head dim · bytes. A layer that slides holds no
    more than it sees.
    """
    config = model.config
    held = 0
    for sliding in getattr(model, "windows", [None] * config.n_layers):
        held += tokens if sliding is None else min(tokens, sliding.size)
    return 2 * config.n_kv_heads * held * config.head_dim * bytes_per_number
