"""CriticalKV's claims about a trained model, on the shipped one: answers, and the stored rows of 64 texts."""
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from common import tasks
from methods.critical_kv import Critical, PooledCritical
from methods.theory import change_and_text
from methods.theory.change_and_text import (COMPARED, METHODS, RULES, SHARES, VOTING, OtherNorms, answers,
                                            change, correlation_of_change_and_kl, difference, last_layer,
                                            lower, stored)
from methods.snap_kv import SnapKV
from nanollm import TINY, weights
from nanollm.evaluate import Benchmark, reference, standard_error, text_windows


# ---- answers: needles and pairs in 24 documents of 256 tokens each, with an eighth of the entries ---


@pytest.fixture(scope="module")
@torch.no_grad()
def answered():
    model = weights.from_hf(TINY)
    bench = Benchmark.build(model, tasks("test"), 256, documents=24, seed=0)
    del bench.batches["few_shot"]

    @cache
    @torch.no_grad()
    def row(name, share=1 / 8, **knobs):
        Method, more = METHODS[name]
        return answers(model, bench, Method, share, **more | knobs)
    return row


def compare(row, base, setting="aware"):
    """Mean difference, document by document, and its standard error."""
    d = row[setting] - base[setting]
    return d.mean().item(), standard_error(d.flatten())


@pytest.mark.claim("P5")
@pytest.mark.parametrize("rule", [Rule.__name__ for Rule in RULES])
def test_the_papers_rule_loses_answers_and_the_codes_loses_none(answered, rule, note):
    base = answered(rule)
    lost, error = compare(answered(f"{rule}+critical"), base)
    assert lost < -1.5 * error
    note("P5", **{rule: 100 * lost})
    for setting in ("aware", "blind"):
        changed, _ = compare(answered(f"{rule}+critical_code"), base, setting)
        assert abs(changed) < 0.05
        note("P5", **{f"{rule}_code_{setting}": 100 * changed})


@pytest.mark.claim("P5")
def test_where_entries_are_few_the_norms_gain_answers_and_others_do_not(answered, note):
    plain, pooled, other = (answered("SnapKV", 1 / 16, select=select)
                            for select in (SnapKV.select, PooledCritical(), OtherNorms()))
    gained, error = compare(pooled, plain)
    assert gained > 0.1 and gained > 2 * error
    ahead, error = compare(pooled, other)
    assert ahead > 2 * error
    note("P5", few_gained=100 * gained, few_other=100 * compare(other, plain)[0])


@pytest.mark.claim("P8", "P10")
def test_without_stage_1_answers_are_lost_but_not_if_stage_2_pools(answered, note):
    """Without pooled votes too, though these lower L in all three rules, and streaming is far behind."""
    of = {"plain": answered("SnapKV"), "quarter": answered("SnapKV+critical"),
          "none": answered("SnapKV", select=Critical(0.0)), "streaming": answered("StreamingLLM"),
          "pooled": answered("SnapKV", select=PooledCritical(0.0))}
    for less, more in ("none", "quarter"), ("quarter", "plain"):
        lost, error = compare(of[less], of[more])
        assert lost < -2 * error
    changed, error = compare(of["pooled"], of["plain"])
    unpooled = answered("SnapKV, no pool")
    assert changed >= -error and abs(compare(answered("SnapKV+residual"), of["plain"])[0]) < 0.05
    assert max(compare(x, of["plain"])[0] for x in (of["streaming"], unpooled)) < -0.5
    note("P8", **{name: 100 * row["aware"].mean() for name, row in of.items()})
    note("P10", no_pool_answers=100 * unpooled["aware"].mean(),
         plain_answers=100 * of["plain"]["aware"].mean())


def spread(note, claim, factor, found):
    for name, x in found.items():
        note(claim, **{f"{name}_least": factor * np.min(x), f"{name}_most": factor * np.max(x)})


# ---- the rows of 64 texts that notebook and CLAIMS.md share ---


@torch.inference_mode()
def test_a_stored_row_is_what_the_code_measures():
    """Every 16th text; and every method is stored at every share, its heads in agreement with L."""
    model, tokens = weights.from_hf(TINY), text_windows(tasks("test"), 64, 512)
    row = change_and_text.measured(model, reference(model, tokens[::16], 64), "SnapKV+critical", 0.0625)
    for key in ("L", "kl", "nll"):
        assert row[key] == pytest.approx(stored()["SnapKV+critical", 0.0625][key][::16], rel=2e-3, abs=1e-3)
    assert list(stored()) == [(name, share) for name in METHODS for share in SHARES]
    for row in stored().values():
        assert row["heads"].mean() == pytest.approx(row["L"].mean(), rel=1e-3) and len(row["L"]) == 64


@pytest.mark.claim("P7")
def test_most_heads_change_less_with_and_without_norms(note):
    bases = "SnapKV", "AdaKV"
    critical = {(base, share): lower(f"{base}+critical", base, share) for base in bases for share in SHARES}
    some = [critical[base, share] for base in bases for share in (0.25, 0.0625)]
    note("P7", critical=100 * np.mean(some))
    unpooled = [lower(f"{base}, no pool", base, share) for base in bases for share in SHARES]
    pooled = [lower("SnapKV+critical, stage 2 pooled", "SnapKV", share) for share in SHARES]
    neither = [lower("SnapKV+critical, no pool", "SnapKV, no pool", share) for share in SHARES]
    assert min(*unpooled, *critical.values()) >= 0.75 and max(pooled) < 0.5
    assert neither[0] > 0.5 > max(neither[1:])
    spread(note, "P7", 100, dict(unpooled=unpooled, pooled=pooled, neither=neither))


@pytest.mark.claim("P7")
def test_the_advantage_of_the_last_layer_does_not_accumulate(note):
    together, alone = -np.array([[last_layer(f"{base}+critical", base, share) for share in SHARES]
                                 for base in ("SnapKV", "AdaKV")]).transpose(2, 0, 1)
    assert ((0 < together) & (together < 0.05)).all() and (alone > together + 0.03).all()
    spread(note, "P7", 100, dict(together=together[0], alone=alone[0]))


@pytest.mark.claim("P10")
def test_lower_changes_come_with_worse_text_and_large_repairs_buy_little(note):
    found = {"no_pool_L": [], "no_pool_nll": [], "residual_L": [], "residual_nll": [], "residual_kl": []}
    for share, base in product(SHARES, (Rule.__name__ for Rule in RULES)):
        unpooled, residual = f"{base}, no pool", f"{base}+residual"
        L, error = change(unpooled, base, share)
        assert L < -2 * error
        found["no_pool_L"].append(-100 * L)
        if share < 0.5:
            nll, error = difference(unpooled, base, share, "nll")
            assert nll > 1.9 * error
            found["no_pool_nll"].append(nll)
        found["residual_L"].append(-100 * change(residual, base, share)[0])
        found["residual_nll"].append(abs(difference(residual, base, share, "nll")[0]))
        kl = difference(residual, base, share, "kl")[0] / stored()[base, share]["kl"].mean()
        found["residual_kl"].append(-100 * kl)
    assert all(17 < x < 31 for x in found["residual_L"]) and max(found["residual_nll"]) < 0.0075
    spread(note, "P10", 1, found)


@pytest.mark.claim("P10")
def test_within_a_budget_the_sign_of_the_rank_correlation_hangs_on_methods(note):
    over_budgets, low, _ = correlation_of_change_and_kl(COMPARED, SHARES)
    assert low > 0.85
    note("P10", over_budgets=over_budgets)
    for share in SHARES:
        everything, voting = (correlation_of_change_and_kl(names, [share]) for names in (COMPARED, VOTING))
        assert share == 0.5 or voting[2] < -0.4
        assert {0.5: everything[1] > 0, 0.25: everything[2] < 0, 0.0625: everything[2] > 0}.get(share, True)
        percent = int(100 * share)
        note("P10", **{f"all_{percent}": everything[0], f"voting_{percent}": voting[0]})
