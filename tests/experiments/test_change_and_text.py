"""CriticalKV's claims about a trained model, on the shipped one: answers, and the stored rows of 64 texts."""
from itertools import product

import numpy as np
import pytest
import torch

from common import tasks
from experiments import change_and_text
from experiments.change_and_text import (ALL_OF_CODE, CODE, COMPARED, METHODS, ONE_OPTION, RULES, KEEP_RATIOS,
                                         WINDOW_METHODS, WINDOW, CodeOptions, OtherNorms,
                                         correlation_of_change_and_kl, l2_norms, long_answer, needles_found,
                                         stored)
from experiments.claims.rules import P5, P8
from experiments.claims.subject import HOLDS, OPEN, Subject, above, below, mean
from methods.critical_kv import Critical, CriticalCode, PooledCritical
from methods.snap_kv import SnapKV
from nanollm import TINY
from nanollm.hf import checkpoint
from nanollm.measure.evaluate import reference, standard_error, text_windows


# ---- numbers of the stored rows ---


def difference(name: str, base: str, keep_ratio: float, key: str) -> tuple[float, float]:
    """Return the mean difference of two stored rows, text by text, and its standard error."""
    d = stored()[name, keep_ratio][key] - stored()[base, keep_ratio][key]
    return d.mean(), d.std(ddof=1) / len(d) ** 0.5


def change(name: str, base: str, keep_ratio: float) -> tuple[float, float]:
    """Return `difference` of L in units of the base's mean L."""
    unit = stored()[base, keep_ratio]["L"].mean()
    return tuple(x / unit for x in difference(name, base, keep_ratio, "L"))


def saved(name: str, base: str, keep_ratio: float, key: str = "kl") -> tuple[float, float]:
    """Return the share of the budget that a method saves, and its standard error (Fig. 1).

    It is compared with the budget at which the base has the same score; 0.2 saves a fifth. The base's
    budget is interpolated, as in the figure. The standard error comes from drawing the texts anew. Beyond the
    base's scores at all KEEP_RATIOS, the nearest keep ratio counts.
    """
    mine, base_rows = stored()[name, keep_ratio][key], np.stack([stored()[base, x][key] for x in KEEP_RATIOS])

    def part(texts) -> float:
        enough = np.interp(mine[texts].mean(), base_rows[:, texts].mean(1), np.log2(KEEP_RATIOS))
        return 1 - keep_ratio / 2 ** enough

    resampled = np.random.default_rng(0).integers(0, len(mine), (200, len(mine)))
    return part(slice(None)), np.std([part(texts) for texts in resampled])


def lower(name: str, base: str, keep_ratio: float) -> float:
    """Return the share of heads whose L is lower than the base's."""
    return (stored()[name, keep_ratio]["heads"] < stored()[base, keep_ratio]["heads"]).mean()


def last_layer(name: str, base: str, keep_ratio: float) -> tuple[float, float]:
    """Return the last layer's change relative to the base's, with all layers and it alone compressed.

    −0.1 is a tenth less.
    """
    row, other = stored()[name, keep_ratio], stored()[base, keep_ratio]
    together = row["layers"][-1] / other["layers"][-1] - 1
    return together, row["heads"][-1].mean() / other["heads"][-1].mean() - 1


# ---- answers: needles and pairs in 24 documents of 256 tokens each ---


@pytest.fixture(scope="module")
def on():
    return Subject(checkpoint.from_hf(TINY), tasks("test"), documents=24)


@pytest.mark.claim("P5")
@pytest.mark.parametrize("rule", [Rule.__name__ for Rule in RULES])
def test_the_papers_rule_loses_answers_and_pooled_norms_gain_on_two_of_three(on, rule, note):
    found = P5(on)
    plain, paper, pooled, code = (found.numbers[name] for name in (
        rule, f"change of {rule}, paper's rule", f"change of {rule}, pooled",
        f"change of {rule}, authors' code"))
    assert found.verdict == OPEN and below(paper) == HOLDS  # PyramidKV leaves it open
    assert above(pooled) == above(code) == (OPEN if rule == "PyramidKV" else HOLDS)
    note("P5", **{rule: 100 * paper[0], f"{rule}_pooled": 100 * pooled[0], f"{rule}_plain": 100 * plain[0]})


@pytest.mark.claim("P5")
def test_the_norms_of_other_tokens_gain_no_answers(on):
    plain, pooled, other = (on.facts("SnapKV", select=x)
                            for x in (SnapKV.select, PooledCritical(), OtherNorms()))
    assert above(mean(pooled - other)) == HOLDS and above(mean(other - plain)) != HOLDS


def test_the_options_are_those_of_the_rule_and_the_code():
    g = torch.Generator().manual_seed(0)
    scores, norms = torch.rand(2, 2, 2, 3, 20, generator=g)
    cache = SnapKV(20, window_size=8)
    for select, same in {Critical(): CodeOptions(), PooledCritical(): CodeOptions(pooled=True),
                         CriticalCode(): CodeOptions(**ALL_OF_CODE)}.items():
        assert torch.allclose(select.second(cache, scores, norms), same.second(cache, scores, norms))
        assert select.alpha == same.alpha
    assert len({*ONE_OPTION.values()}) == len(ONE_OPTION) == 2 * (2 + len(CODE))
    v, w_o = torch.randn(2, 2, 5, 4, generator=g), torch.randn(12, 6, 4, generator=g)
    norms = (v.unsqueeze(2) @ w_o.unflatten(1, (2, 3)).permute(1, 2, 3, 0)).norm(dim=-1)
    assert torch.allclose(l2_norms(v, w_o), norms, rtol=1e-4)


@pytest.mark.claim("P5")
def test_of_the_options_of_the_code_the_pool_or_a_larger_stage_1_saves_answers(on, note):
    base, code = (on.facts(f"SnapKV+{name}", 1 / 8) for name in ("critical", "critical_code"))
    gain = {option: on.facts("SnapKV", 1 / 8, select=ONE_OPTION[f"critical, {option}"]) - base
            for option in (*CODE, "L2 norms")}
    for name, x in zip(("alpha", "pool", "epsilon", "means", "l2"), gain.values()):
        note("P5", **{f"option_{name}": 100 * mean(x)[0]})
    pool, half = gain.pop("stage 2 pooled"), gain.pop("α = 0.5")
    assert (code - base - pool).mean().abs() < 0.03 and half.mean() > 5 * standard_error(half) > 0
    assert all(x.mean().abs() < 0.03 for x in gain.values())


def test_a_difference_is_paired_and_has_its_standard_error(monkeypatch):
    x, y = np.random.default_rng(0).normal(size=(2, 30)) + [[3], [2]]
    rows = {("a", 0.5): dict(L=x), ("b", 0.5): dict(L=y)}
    monkeypatch.setitem(globals(), "stored", lambda: rows)
    expected = (x - y).mean(), standard_error(torch.from_numpy(x - y))
    assert difference("a", "b", 0.5, "L") == pytest.approx(expected)
    assert change("a", "b", 0.5) == pytest.approx([n / y.mean() for n in expected])


@pytest.mark.claim("P11")
def test_equal_scores_by_the_papers_rule_save_no_budget(note, monkeypatch):
    with monkeypatch.context() as patch:  # the base scores as well as that between 50 and 25 %
        rows = {("a", keep_ratio): dict(kl=np.full(3, n)) for n, keep_ratio in enumerate(KEEP_RATIOS, 1)}
        patch.setitem(globals(), "stored", lambda: rows | {("b", 0.25): dict(kl=np.full(3, 1.5))})
        assert saved("b", "a", 0.25) == (pytest.approx(1 - 0.5 ** 0.5), 0) and saved("a", "a", 0.25)[0] == 0
    for base, addition in product((Rule.__name__ for Rule in RULES), ("critical", "critical_code")):
        part, error = saved(f"{base}+{addition}", base, 0.25)
        assert part + 2 * error < 0.1  # the paper: 0.21 to 0.34
        note("P11", **{f"{base}_{addition}": 100 * part, f"{base}_{addition}_error": 100 * error})


@torch.inference_mode()
def test_needles_stand_at_the_depths_asked_for(on):
    needles = needles_found(on.model, on.tasks, ["SnapKV", "StreamingLLM"], depths=(0, 1), lengths=(128,))
    assert needles.tolist() == [[[1], [1]], [[0], [1]]]  # recent tokens alone have what stands at the end


@pytest.mark.claim("P12")
def test_long_answers_compressed_while_they_are_written_are_no_better_for_the_norms(on, note):
    texts, batch = text_windows(on.tasks, 64, 256), on.tasks.batch("needle", 0, 4, 256)
    plain, norms = (long_answer(on.model, texts, asked, select=select) for select, asked in (
        (SnapKV.select, {"needle": batch}), (Critical(), {})))
    change, error = mean(norms["kl"] - plain["kl"])
    assert change > 2 * error
    c, w = on.model.config, WINDOW["window_size"]
    queries = c.n_layers * c.n_heads * w * c.head_dim * 2 / 1024
    slot = c.n_layers * c.n_kv_heads * (2 * c.head_dim * 2 + 4) / 1024  # a position has 4 bytes
    once = long_answer(on.model, texts[:4], {"needle": batch}, again=False)
    assert once["kl"].abs().max() < 1e-5 and once["needle"].tolist() == [1] * 4
    assert plain["kl"].min() > 1e-3 and plain["needle"].mean() < 1
    assert once["most"] == once["last"] == pytest.approx(255 * slot)
    # 32 slots stay of 128 after tokens 128 and 224
    for row in plain, norms:
        assert (row["most"], row["last"]) == pytest.approx((127 * slot + queries, 63 * slot + queries))
    note("P12", kl=plain["kl"].mean(), change=change, error=error)


@pytest.mark.claim("P8")
def test_without_stage_1_answers_are_lost_but_not_if_stage_2_pools(on, note):
    found = P8(on)
    plain, quarter, none, streaming, quarter_paper, none_paper = (100 * x for x, _ in found.numbers.values())
    assert found.verdict == HOLDS and none_paper < quarter_paper - 20 < plain - 20
    note("P8", plain=plain, quarter=quarter, none=none, streaming=streaming, quarter_paper=quarter_paper,
         none_paper=none_paper)


@pytest.mark.claim("P10")
def test_window_scores_that_are_never_pooled_lose_answers_and_a_residual_entry_loses_none(on, note):
    """Though these window scores lower L in all three rules; an eighth of the entries."""
    plain, unpooled, residual = (on.facts(f"SnapKV{more}", 1 / 8).mean().item()
                                 for more in ("", ", no pool", "+residual"))
    assert abs(residual - plain) < 0.05 and unpooled < plain - 0.5
    note("P10", no_pool_answers=100 * unpooled, plain_answers=100 * plain)


def spread(note, claim, factor, found):
    for name, x in found.items():
        note(claim, **{f"{name}_least": factor * np.min(x), f"{name}_most": factor * np.max(x)})


# ---- the rows of 64 texts that notebook and CLAIMS.md share ---


@torch.inference_mode()
def test_a_stored_row_is_what_the_code_measures():
    """Every 16th text; and every method is stored at every keep ratio, its heads in agreement with L."""
    model, tokens = checkpoint.from_hf(TINY), text_windows(tasks("test"), 64, 512)
    row = change_and_text.measured(model, reference(model, tokens[::16], 64), "SnapKV+critical", 0.0625)
    for key in ("L", "kl", "nll"):
        assert row[key] == pytest.approx(stored()["SnapKV+critical", 0.0625][key][::16], rel=2e-3, abs=1e-3)
    assert list(stored()) == [(name, keep_ratio) for name in METHODS for keep_ratio in KEEP_RATIOS]
    for row in stored().values():
        assert row["heads"].mean() == pytest.approx(row["L"].mean(), rel=1e-3) and len(row["L"]) == 64


@pytest.mark.claim("P7")
def test_most_heads_change_less_with_and_without_norms(note):
    bases = "SnapKV", "AdaKV"
    critical = {(base, keep_ratio): lower(f"{base}+critical", base, keep_ratio)
                for base in bases for keep_ratio in KEEP_RATIOS}
    some = [critical[base, keep_ratio] for base in bases for keep_ratio in (0.25, 0.0625)]
    note("P7", critical=100 * np.mean(some))
    unpooled = [lower(f"{base}, no pool", base, keep_ratio) for base in bases for keep_ratio in KEEP_RATIOS]
    pooled = [lower("SnapKV+critical, stage 2 pooled", "SnapKV", keep_ratio) for keep_ratio in KEEP_RATIOS]
    neither = [lower("SnapKV+critical, no pool", "SnapKV, no pool", keep_ratio) for keep_ratio in KEEP_RATIOS]
    assert min(*unpooled, *critical.values()) >= 0.75 and max(pooled) < 0.5
    assert neither[0] > 0.5 > max(neither[1:])
    spread(note, "P7", 100, dict(unpooled=unpooled, pooled=pooled, neither=neither))


@pytest.mark.claim("P13")
def test_the_advantage_of_the_last_layer_does_not_accumulate(note, monkeypatch):
    with monkeypatch.context() as patch:  # two layers of two heads
        rows = dict(a=dict(heads=np.array([[9, 9], [1, 2]]), layers=[9, 4]),
                    b=dict(heads=np.array([[7, 7], [2, 4]]), layers=[7, 5]))
        patch.setitem(globals(), "stored", lambda: {(name, 0.5): row for name, row in rows.items()})
        assert last_layer("a", "b", 0.5) == pytest.approx((-0.2, -0.5))
    together, alone = -np.array([[last_layer(f"{base}+critical", base, keep) for keep in KEEP_RATIOS]
                                 for base in ("SnapKV", "AdaKV")]).transpose(2, 0, 1)
    assert ((0 < together) & (together < 0.05)).all() and (alone > together + 0.03).all()
    spread(note, "P13", 100, dict(together=together[0], alone=alone[0]))


@pytest.mark.claim("P10")
def test_lower_changes_come_with_worse_text_and_large_repairs_buy_little(note):
    found = {"no_pool_L": [], "no_pool_nll": [], "residual_L": [], "residual_nll": [], "residual_kl": []}
    for keep_ratio, base in product(KEEP_RATIOS, (Rule.__name__ for Rule in RULES)):
        unpooled, residual = f"{base}, no pool", f"{base}+residual"
        L, error = change(unpooled, base, keep_ratio)
        assert L < -2 * error
        found["no_pool_L"].append(-100 * L)
        if keep_ratio < 0.5:
            nll, error = difference(unpooled, base, keep_ratio, "nll")
            assert nll > 1.9 * error
            found["no_pool_nll"].append(nll)
        found["residual_L"].append(-100 * change(residual, base, keep_ratio)[0])
        found["residual_nll"].append(abs(difference(residual, base, keep_ratio, "nll")[0]))
        kl = difference(residual, base, keep_ratio, "kl")[0] / stored()[base, keep_ratio]["kl"].mean()
        found["residual_kl"].append(-100 * kl)
    assert all(17 < x < 31 for x in found["residual_L"]) and max(found["residual_nll"]) < 0.0075
    spread(note, "P10", 1, found)


@pytest.mark.claim("P10")
def test_within_a_budget_the_sign_of_the_rank_correlation_hangs_on_methods(note):
    over_budgets, low, _ = correlation_of_change_and_kl(COMPARED, KEEP_RATIOS)
    assert low > 0.85
    note("P10", over_budgets=over_budgets)
    for keep_ratio in KEEP_RATIOS:
        everything, window_methods = (correlation_of_change_and_kl(names, [keep_ratio])
                                      for names in (COMPARED, WINDOW_METHODS))
        assert keep_ratio == 0.5 or window_methods[2] < -0.4
        expected = {0.5: everything[1] > 0, 0.25: everything[2] < 0, 0.0625: everything[2] > 0}
        assert expected.get(keep_ratio, True)
        percent = int(100 * keep_ratio)
        note("P10", **{f"all_{percent}": everything[0], f"window_{percent}": window_methods[0]})
