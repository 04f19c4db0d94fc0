"""The worth of an entry is what the answer loses without it; scores are those of the methods."""
import pytest
import torch

from common import tasks
from experiments import worth
from experiments.worth import WINDOW, from_queries, highest, rank_correlation, ranks, removed, scores, sums
from methods.critical_kv import value_norms
from methods.h2o import H2O
from methods.snap_kv import SnapKV
from nanollm import LEARNED, TINY, tokenizer
from nanollm.attention import probabilities
from nanollm.cache import copied, make_cache
from nanollm.generate import prefill
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.replay import Recorder, record
from nanollm.ranking import indices


@pytest.fixture(scope="module")
def read():
    """A decoder in 64 bits, one document's tokens, its caches after the context, and that length."""
    model, batch = from_hf(TINY).double(), tasks("test").batch("needle", 0, 1, 120)
    tokens, caches = torch.from_numpy(batch.tokens)[:, :batch.answers[0].stop], make_cache(model)
    prefill(model, tokens[:, :batch.question], caches)
    return model, tokens, caches, batch.question


@torch.no_grad()
def test_a_removal_is_a_cache_without_these_entries(read):
    model, tokens, caches, S = read
    rest = tokens[:, S:]
    absent = torch.rand(5, 6, 3, S, generator=torch.Generator().manual_seed(0)) < 0.7
    absent[0, :, :, S // 8:] = True
    absent[1] = False
    absent[2], absent[2, 1, 0, 7] = False, True
    loss, full = removed(model, caches, rest, 2, absent), None
    for row in (1, 0, 2, 3, 4):
        left = copied(caches)
        for cache, gone in zip(left, absent[row]):
            if gone.any():
                cache.keep(indices(~gone[None]))
        logits = torch.cat([model(token[:, None], left) for token in rest[:, :-1].unbind(1)], 1)
        log_p = logits.log_softmax(-1)
        full = log_p if full is None else full
        said = [x[0, [-2, -1], rest[0, -2:]].sum() for x in (full, log_p)]
        assert loss.worth[row].item() == pytest.approx((said[0] - said[1]).item(), abs=1e-9)
        kl = (full.exp() * (full - log_p)).sum(-1).mean().item()
        assert loss.kl[row].item() == pytest.approx(kl, abs=1e-9)
        assert loss.right[row] == (log_p[0, -2:].argmax(-1) == rest[0, -2:]).all()
    assert abs(loss.worth[1]) < 1e-12 and loss.worth[0] > 1 and not loss.right[0]
    assert all(cache.length == S and not cache.ragged for cache in caches)  # the caches are as before


@torch.no_grad()
def test_scores_are_those_of_the_methods(read):
    _, tokens, _, S = read
    model = from_hf(TINY)
    gates = dict(gates=torch.randn(6, 12 * 32 + 1, 3, generator=torch.Generator().manual_seed(0)))
    found = scores(model, tokens, S, gates)
    assert {x.shape for x in found.values()} == {(6, 3, S)}

    caches = make_cache(model, H2O, budget=S)
    prefill(model, tokens[:, :S], caches)
    summed = torch.cat([cache.accumulated for cache in caches])
    assert torch.allclose(found["attention"], summed / 2, atol=1e-5)  # the mean over G = 2 query heads
    for name, n in (("window", S // 3), ("reread", S // 3)):
        assert not torch.equal(highest(found[name], n), highest(found["attention"], n))
    window = make_cache(model, SnapKV, budget=S // 2, window_size=WINDOW, kernel_size=1)
    prefill(model, tokens[:, :S], window)
    for cache, score in zip(window, found["window"]):
        cache.end_prefill()
        chosen = score[:, :-WINDOW].topk(S // 2 - WINDOW).indices.sort().values
        assert torch.equal(cache.pos[0, :, :-WINDOW].sort().values.long(), chosen)


@torch.no_grad()
def test_one_removal_is_the_change_of_the_heads_output(read):
    model, tokens, _, S = read
    layer = record(model, make_cache(model, Recorder), tokens)[2]
    w_o = model.blocks[2].attention.w_o
    found = from_queries(layer, w_o, S)
    q, k, v, pos = layer
    p = probabilities(q, k, pos[:, None], None, pos)[0]  # (H, G, T, T)
    for h, i in ((0, 3), (2, 40), (1, S - 20)):
        without = p[h].clone()
        without[..., i] = 0
        without /= without.sum(-1, keepdim=True)
        change = torch.einsum("gtd,ogd->to", (without - p[h]) @ v[0, h], w_o[:, 2 * h:2 * h + 2])
        for name, rows in (("one removal", slice(S - WINDOW, S)), ("one removal, question", slice(S, None))):
            expected = change[rows].norm(dim=-1).mean().item()
            assert found[name][h, i].item() == pytest.approx(expected, rel=1e-4)
        norms = value_norms(v[:, :, :S], w_o)[0, h, :, i]
        mean = p[h, :, S - WINDOW:S, i].mean(1)
        assert found["window × norm"][h, i].item() == pytest.approx((mean * norms).mean().item(), rel=1e-4)


def test_ranks_share_equal_values_and_correlation_is_spearmans():
    assert ranks(torch.tensor([5., 1, 5, 3, 5])).tolist() == [3, 0, 3, 1, 3]
    x = torch.tensor([1., 2, 3, 4, 5])
    assert rank_correlation(x, x ** 3) == pytest.approx(1) and rank_correlation(x, -x) == pytest.approx(-1)
    assert rank_correlation(x, torch.tensor([2., 1, 4, 3, 5])) == pytest.approx(0.8)  # 1 − 6·4/(5·24)


@torch.no_grad()
def test_sums_add_single_worths_and_remove_the_set_at_once(read, monkeypatch):
    model, tokens, caches, S = read
    monkeypatch.setattr(worth, "SIZES", (2, 9))
    single = torch.randn(6, 3, S, generator=torch.Generator().manual_seed(1)).double()
    result = sums(model, caches, tokens[:, S:], 2, single, torch.Generator().manual_seed(0))
    assert [*result] == [(chosen, n) for n in (2, 9) for chosen in ("random", "highest", "lowest")]
    for chosen, n, mask in (("highest", 9, highest(single, 9)), ("lowest", 2, highest(-single, 2))):
        alone, together = result[chosen, n]
        assert alone == pytest.approx(single[mask].sum().item())
        expected = removed(model, caches, tokens[:, S:], 2, mask[None]).worth.item()
        assert together == pytest.approx(expected, abs=1e-9)


@torch.no_grad()
def test_rows_of_a_small_run(monkeypatch):
    monkeypatch.setattr(worth.FastKVzip, "calibrate", staticmethod(lambda *_: {}))
    monkeypatch.setattr(worth, "ASKED", ("needle",))
    rows = worth.measured(from_hf(LEARNED), tokenizer.load(TINY / "tokenizer.tiktoken"), 2, 150)
    kept = {(row["task"], row["score"]): [mean for mean, _ in row["right"]]
            for row in rows if row["table"] == "kept"}
    assert kept["needle", "worth"][0] == 1 > max(kept["needle", "random"][2:])
    assert kept["needle", "one removal, question"][0] == 1 > kept["needle", "newest"][0]
    correlations = {(row["task"], row["score"]): row for row in rows if row["table"] == "scores"}
    assert correlations["needle", "worth"]["worth"][0] == correlations["needle", "worth"]["top"][0] == 1
    assert abs(correlations["needle", "random"]["worth"][0]) < 0.1
    told = correlations["needle", "one removal, question"]
    assert told["size"][0] > 0.4 and told["kl"][0] > 0.6 and abs(told["worth"][0]) < 0.3
    text = worth.show([dict(decoder="learned") | row for row in rows])
    assert text.count("one removal, question") == 2 and "lowest" in text
