"""Head budgets: a head's share of the entries, the keys that stay in it, and what calibration measures."""

from types import SimpleNamespace

import torch

from common import TOKENS, decoder
from methods.baselines.key_diff import likeness
from methods.baselines.kvzip import KVzip
from methods.ours.head_budgets import HeadBudgets
from nanollm.cache import compress, make_cache
from nanollm.generate import prefill

N = TOKENS.shape[1]


def test_a_head_keeps_its_share_and_in_it_the_keys_least_like_the_others():
    model, shares = decoder(), torch.tensor([[2.0, 0.5], [1.5, 0.0], [1.0, 1.0]])
    caches = make_cache(model, HeadBudgets, budget=10, recent=0, sinks=0, shares=shares)
    prefill(model, TOKENS, caches)
    unlike = [likeness(cache.k).argsort(-1) for cache in caches]
    compress(model, TOKENS, caches)
    assert sum((cache.pos < N).sum() for cache in caches) == 2 * 10 * shares.numel()
    for share, cache, order in zip(shares, caches, unlike):
        for b, h in ((b, h) for b in range(2) for h in range(2)):
            kept = {i for i in cache.pos[b, h].tolist() if i < N}
            assert (
                kept == {*order[b, h, : len(kept)].tolist()}
                and abs(len(kept) - 10 * share[h]) <= 1
            )


def test_calibration_counts_the_entries_of_kvzip_among_its_highest_quarter():
    model = decoder()
    tasks = SimpleNamespace(
        batch=lambda *_: SimpleNamespace(tokens=TOKENS[:1, :28].numpy())
    )
    shares = HeadBudgets.calibrate(model, tasks)["shares"]
    caches = make_cache(model, KVzip, budget=7)
    prefill(model, TOKENS[:1, :28], caches)
    compress(model, TOKENS[:1, :28], caches)
    count = torch.stack([(cache.pos[0] < 28).sum(-1) for cache in caches]).float()
    assert torch.equal(shares, count / 7) and shares.std() > 0
