"""Head budgets: a head's share of the entries, the keys that stay, what calibration measures."""

from types import SimpleNamespace

from pytest import raises
import torch

from common import B, H, TOKENS, decoder
from methods.baselines.key_diff import likeness
from methods.baselines.kvzip import KVzip
from methods.ours.head_budgets import HeadBudgets
from nanollm.cache import compress, make_cache
from nanollm.generate import prefill

N = TOKENS.shape[1]


def test_a_head_keeps_its_share_and_in_it_the_keys_least_like_the_others():
    model = decoder()
    shares = torch.tensor([[2.0, 0.5], [1.5, 0.0], [1.0, 1.0]])
    options = dict(budget=10, recent=0, sinks=0, shares=shares)
    caches = read_with(model, options)
    order = torch.stack([likeness(layer).argsort(-1) for layer in caches])
    compress(model, TOKENS, caches)
    total = 0
    for i, layer in enumerate(caches):
        for b in range(B):
            for h in range(H):
                kept = {x for x in layer.pos[b, h].tolist() if x < N}
                assert kept == {*order[i, b, h, : len(kept)].tolist()}
                assert abs(len(kept) - 10 * shares[i, h]) <= 1
                total += len(kept)
    assert total == B * 10 * shares.numel()
    for wrong, message in (
        (shares[:2], r"\(3, 2\), layers"),
        (shares * torch.nan, "NaN"),
    ):
        with raises(ValueError, match=message):
            compress(model, TOKENS, read_with(model, options | dict(shares=wrong)))


def read_with(model, options):
    caches = make_cache(model, HeadBudgets, **options)
    prefill(model, TOKENS, caches)
    return caches


def test_calibration_counts_the_entries_of_kvzip_among_its_highest_quarter():
    model = decoder()
    text = TOKENS[:1, :28]
    tasks = SimpleNamespace(batch=lambda *_: SimpleNamespace(tokens=text.numpy()))
    shares = HeadBudgets.calibrate(model, tasks)["shares"]
    caches = make_cache(model, KVzip, budget=7)
    prefill(model, text, caches)
    compress(model, text, caches)
    count = torch.stack([(layer.pos[0] < 28).sum(-1) for layer in caches]).float()
    assert torch.equal(shares, count / 7)
    assert shares.std() > 0
