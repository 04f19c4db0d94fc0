"""Compare DuoAttention with loops: kept tokens of each head, and the split of the budget."""
from functools import cache as once
from itertools import pairwise

import pytest
import torch

from common import decoder as random_decoder, end
from lab.evaluate import held
from methods.baselines.duo_attention import DuoAttention
from nanollm.cache import make_cache
from nanollm.generate import prefill

B, L, H, G, D, T = 2, 3, 3, 2, 8, 34
SLOT = 2 * D * 4 + 4  # bytes of k, v and a position
SINKS, LEAST = 2, 6
ORDER = (2, 2), (0, 1), (0, 0), (2, 0), (0, 2), (1, 1)  # m = 5: layer 0 whole, none of 1
ALL_HEADS = tuple((layer, head) for head in (1, 2, 0) for layer in range(L))
TOKENS = torch.randint(50, (B, T), generator=torch.Generator().manual_seed(0))


@once
def decoder():
    size = dict(n_heads=H * G, n_kv_heads=H, head_dim=D, tie_embeddings=False)
    return random_decoder(**size).requires_grad_(False)


def by_hand(n: int, budget: int, order, every=L * H, least=LEAST):
    """Return the heads that keep everything, and the entries w of the others.

    One head, then one entry, is added at a time as long as the total allows it.
    """
    total, m, w = budget * every, 0, least
    while m < len(order) and (m + 1) * n + (every - m - 1) * least <= total:
        m += 1
    while m < every and m * n + (every - m) * (w + 1) <= total and w < budget:
        w += 1
    return order[:m], w


def walk(prompt: int, chunk_size: int, block: int, budget: int, order):
    """Return the parts of the text, and the tokens of a head before and after each: [part][layer][head]."""
    parts = [range(a, b) for a, b in pairwise([*range(0, prompt, chunk_size), *range(prompt, T, block), T])]
    (whole, w), held = by_hand(prompt, budget, order), [[[[]] * H] * L]
    for part in parts:
        n = part.stop
        streams = [*range(SINKS), *range(n - (w - SINKS), n)] if n >= prompt and n > w else [*range(n)]
        held.append([[[*range(n)] if n < prompt or (layer, head) in whole else streams for head in range(H)]
                     for layer in range(L)])
    return parts, held


# tokens of the prompt; tokens per part in the prompt and after it; budget; retrieval heads
@pytest.mark.parametrize("prompt, chunk, block, budget, order", [
    (20, 7, 1, 14, ORDER), (20, 8, 5, 14, ORDER),           # m = 5 keep everything, the others w = 6
    (20, 6, 4, 8, ORDER), (20, 6, 1, 6, ORDER),             # 1, 6 and 0, 6
    (20, 20, 4, 19, ORDER), (20, 9, 1, 19, ALL_HEADS),      # 6, 17 and 8, 11
    (20, 9, 1, 20, ALL_HEADS), (20, 20, 2, 9, ()),          # 9 and 0, 9
    (20, 7, 4, T, ORDER),                                   # a budget of all tokens is full attention
    (10, 4, 5, 14, ORDER), (3, 1, 6, 7, ALL_HEADS[:8])])  # prompts within the budget
def test_held_tokens_and_bytes_are_the_loops(prompt, chunk, block, budget, order):
    model, (parts, held_by_hand) = decoder(), walk(prompt, chunk, block, budget, order)
    caches = make_cache(model, DuoAttention, budget=budget, heads=order, sinks=SINKS, least=LEAST)
    for part, (before, after) in zip(parts, pairwise(held_by_hand)):
        model(TOKENS[:, part.start:part.stop], caches)
        if part.stop == prompt:
            end(*caches)
            assert sum(map(len, sum(after, []))) <= L * H * budget

        expected = torch.zeros(L, H, part.stop, dtype=torch.bool)
        for layer, cache in enumerate(caches):
            for h, there in enumerate(after[layer]):
                expected[layer, h, there] = True
            n, room = (sum(map(len, of[layer])) for of in (after, before))
            live, allocated = cache.bytes()
            assert live == B * SLOT * n <= allocated <= B * SLOT * 1.1 * max(n, room + H * len(part))
            assert part.stop != prompt or live == allocated
        assert torch.equal(held(caches, part.stop), expected.expand(B, -1, -1, -1)), part
        assert [cache.length for cache in caches] == [max(map(len, of_layer)) for of_layer in after]


def test_heads_that_the_decoder_does_not_have_are_refused():
    caches = make_cache(decoder(), DuoAttention, budget=16, heads=((1, 1), (L, 0)))
    prefill(decoder(), TOKENS[:, :9], caches)
    with pytest.raises(ValueError, match="must be among 3 layers of 3 key/value heads"):
        end(*caches)
