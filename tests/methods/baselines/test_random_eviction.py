"""Random eviction keeps a reservoir sample, drawn anew for each layer, head and row."""

import pytest
import torch

from common import TOKENS, B, H, decoder
from loops import PROMPT, check_kept, each_cut
from methods.baselines.random_eviction import RandomEviction
from nanollm.cache import make_cache
from nanollm.generate import generate


def reservoir(q, k, parts, budget, seed):
    """A reservoir sample: keep the highest of all priorities drawn so far."""
    generator = torch.Generator().manual_seed(1000 * seed)
    drawn = torch.empty(B, H, 0)
    for part in parts:
        for _ in part:
            drawn = torch.cat((drawn, torch.rand(B, H, 1, generator=generator)), 2)
        n = part.stop if part.stop < PROMPT else min(budget, part.stop)
        yield drawn.topk(n).indices.sort(-1).values.tolist()


@pytest.mark.parametrize("budget, seed", [(8, 0), (1, 3)])
@each_cut
def test_kept_tokens_and_bytes_equal_the_loop(cut, budget, seed):
    check_kept(cut, RandomEviction(budget, seed), reservoir, own=4)


def test_it_differs_by_seed_layer_head_and_row_and_by_nothing_else():
    def kept(seed):
        model = decoder()
        caches = make_cache(model, RandomEviction, budget=8, seed=seed)
        generate(model, TOKENS, 4, caches)
        # (L, B, H, 8)
        return torch.stack([layer.pos.sort(-1).values for layer in caches])

    one = kept(0)
    assert torch.equal(one, kept(0))
    both = torch.cat((one, kept(1))).flatten(0, 2)
    assert len(both.unique(dim=0)) == 2 * 3 * 2 * 2
