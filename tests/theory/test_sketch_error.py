"""KVReviver's lemmas and bounds, what a sketch can tell, budgets by layer, and claims about a decoder."""
from collections import Counter
from copy import copy
from functools import cache as once
from itertools import product
import math
from types import SimpleNamespace

from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from common import TOKENS, decoder, tasks
from exact import F64, check, near, random
from experiments.change_and_text import right_answers
from experiments.claims.rules import R10, R14, R15, R4, R9
from experiments.claims.subject import HOLDS, NOT, Subject, above
from methods.count_sketch import Sketch
from methods.duo_attention import DuoAttention
from methods.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.kv_reviver_mean import MeanReviver, MeanSketch
from methods.ours.kv_reviver_shrunk import MEDIAN, ShrunkReviver, ShrunkSketch, SignedSketch
from methods.snap_kv import SnapKV
from methods.theory.least_squares import solve
from methods.theory.sketch_error import (collision_variance, fisher_shares, load, printed_bound,
                                         relative_error, share_out, shifted, take_out)
from nanollm import TINY
from nanollm.cache import LayerCache, make_cache
from nanollm.hf import checkpoint
from nanollm.measure import evaluate
from nanollm.measure.benchmark import Benchmark
from nanollm.measure.replay import Recorder, record
from nanollm.measure.tasks import Batch

each_rows = pytest.mark.parametrize("rows", MEDIAN)


def unit(*shape, seed=0):
    """Return random numbers with mean 0 and variance 1, exactly."""
    x = random(*shape, seed=seed)
    return (x - x.mean()) / x.std(correction=0)


def errors(kind, rows, width, x, runs):
    """Return estimate minus truth of the vectors x (a, 2D) by seed, (runs, a, 2D)."""
    (k, v), J, found = (y[None, None] for y in x.chunk(2, -1)), torch.arange(len(x)).view(1, 1, -1), []
    for seed in range(runs):
        sketch = kind(k, rows, width, seed)
        sketch.insert(J, k, v)
        found.append(torch.cat(sketch.query(J), -1)[0, 0])
    return torch.stack(found) - x


@pytest.mark.claim("R6")
def test_the_printed_density_of_the_median_is_half_of_one(note):
    """The printed density 3 Φ(1 − Φ)φ of Lemmas 1 and 2 integrates to 1/2; the factor must be 6.

    Lemma 3: independent logit errors of variance σ_A² give attention weights errors of variance
    σ_A² [p_i²(1 − p_i)² + Σ_{j ≠ i} p_j² p_i²], to first order.
    """
    x = torch.linspace(-10, 10, 200_001, dtype=F64)
    below = torch.special.ndtr(x)

    def moments(factor):
        density = factor * below * (1 - below) * (-x ** 2 / 2).exp() / math.sqrt(2 * math.pi)
        return torch.trapezoid(density, x).item(), torch.trapezoid(x ** 2 * density, x).item()

    (mass, printed), true = moments(3), moments(6)
    assert (mass, printed) == pytest.approx((1 / 2, MEDIAN[3] / 2), abs=1e-9) and MEDIAN[1] == 1
    assert true == pytest.approx((1, 1 - math.sqrt(3) / math.pi), abs=1e-9)
    note("R6", mass=mass, printed=printed, true=true[1])

    logits, variance = 2 * random(3, 6), 1e-4  # of attention weights under small noise
    p, noise = logits.softmax(-1), math.sqrt(variance) * random(50_000, 3, 6, seed=1)
    expected = ((logits + noise).softmax(-1) - p).square().mean(0)
    lemma = p ** 2 * (1 - p) ** 2 + p ** 2 * ((p ** 2).sum(-1, keepdim=True) - p ** 2)
    assert torch.allclose(variance * lemma, expected, rtol=0.04)


@check("R6", st.lists(st.tuples(st.integers(0, 40), st.integers(1, 100)), min_size=1, max_size=4))
def test_the_median_of_three_varies_no_more_than_one_if_symmetric(half):
    """The median of three varies at most as one value; for coins equally, against the proof's 3/4."""
    p = Counter([sign * x for x, w in half for sign in (1, -1) for _ in range(w)])
    one = sum(w * x * x for x, w in p.items()) * p.total() ** 2
    median = sum(p[x] * p[y] * p[z] * sorted((x, y, z))[1] ** 2 for x, y, z in product(p, repeat=3))
    assert median == one if len(half) == 1 else median <= one


@each_rows
@pytest.mark.claim("R6")
def test_signs_make_estimates_unbiased_and_keys_without_are_off(rows):
    x = 1 + 0.3 * random(9, 4)
    keys, values = errors(Sketch, rows, 3, x, 200).chunk(2, -1)
    others = (x.sum(0) - x)[:, :2] / 3  # of a key, what shares its slot
    assert near(values, 0) and near(errors(SignedSketch, rows, 3, x, 200), 0)
    assert near(keys, others) if rows == 1 else (keys.mean() / others.mean() - 1).abs() < 0.2


@pytest.mark.parametrize("ratio, N", [(0.1, 600), (1, 120), (5, 24), (20, 12)])  # a/N and N
@pytest.mark.claim("R6")
def test_squared_errors_of_numbers_of_mean_0(ratio, N, note):
    """Above one token a slot, reading 0 has a smaller error, and one row is better than three."""
    a = round(ratio * N)
    one, three = (errors(SignedSketch, r, N // r, unit(a, 32), 100).square().mean((1, 2)) for r in MEDIAN)
    assert near(one, collision_variance(a, N, 1)) and (one.mean() > three.mean()) == (ratio < 1)
    assert (three.mean() > 1) == (ratio >= 1)
    if ratio > 1:
        assert three.mean() == pytest.approx(collision_variance(a, N // 3, 3), rel=0.1)
        bound, p = printed_bound(a, N)
        assert (bound, p) == pytest.approx((math.pi * ratio, math.exp(-ratio))) and (three > bound).sum() == 0
    note("R6", **{f"error_{N}": three.mean()})


@pytest.mark.claim("R6")
def test_the_printed_bound_is_not_one_of_keys_that_have_a_mean(note):
    keys = errors(Sketch, 3, 40, 1 + unit(120, 16), 60)[..., :8]  # a/N = 1
    assert keys.mean() == pytest.approx(2.7, rel=0.1)
    error = errors(Sketch, 3, 4, 1 + unit(60, 16), 100).square().mean((1, 2))
    bound, p = printed_bound(60, 12)
    exceeded = int((error > bound).sum())
    assert exceeded == 100 and p < 0.01
    note("R6", exceeded=exceeded)


@each_rows
@pytest.mark.parametrize("a, width, mean", [(2, 3, 0.0), (13, 1, 5.0), (40, 12, -2.0)])
@pytest.mark.claim("R7")
def test_what_is_shrunk_is_on_average_nearer_than_the_mean(rows, a, width, mean):
    x, ratio = mean + random(a, 6), (a - 1) / width
    alone = (x - x.mean(0)).square().mean()
    error = errors(ShrunkSketch, rows, width, x, 200).square().mean((1, 2))
    # of one row whatever the vectors are
    assert error.mean() < alone if rows == 3 else near(error, alone * ratio / (1 + ratio))


@pytest.mark.claim("R7")
def test_a_single_token_may_be_farther_off_than_the_mean_of_all():
    x = 1 + random(12, 8)
    above = errors(ShrunkSketch, 1, 3, x, 200).square().mean(2) > (x - x.mean(0)).square().mean(1)
    assert above.double().mean().item() == pytest.approx(0.24, abs=0.03)


def rank(sketch, J, slots):
    """Return the number of independent tokens among J in a sketch with this many slots."""
    pattern = torch.zeros(J.shape[2], slots, dtype=F64)
    pattern.scatter_add_(1, sketch.bucket(J)[0, 0], sketch.sign(J)[0, 0, ..., -1].double())
    return int(torch.linalg.matrix_rank(pattern))


@pytest.mark.parametrize("kind, rows, width", [(SignedSketch, 3, 30), (Sketch, 3, 4), (ShrunkSketch, 3, 2),
                                               (SignedSketch, 1, 4), (ShrunkSketch, 1, 4)])
@pytest.mark.claim("R2")
def test_least_squares_is_exact_while_tokens_are_independent(kind, rows, width):
    J, k, v = torch.arange(12).view(1, 1, -1), random(1, 1, 12, 400) + 3, random(1, 1, 12, 400, seed=1) - 2
    sketch, again = kind(k, rows, width, 0), kind(k, rows, width, 0)
    sketch.insert(J, k, v), again.insert(J, *solve(sketch, J))
    assert torch.allclose(again.x, sketch.x, atol=1e-9)  # they would give this sketch
    told, lost = rank(sketch, J, rows * width), v - solve(sketch, J)[1]
    assert lost.square().mean() < 1e-18 if told == 12 else lost.square().mean() > 0.3 * (1 - told / 12)
    if kind is ShrunkSketch:  # numbers have a variance of 11/12 about their own mean
        assert lost.square().mean() == pytest.approx(1 - told / 12, abs=0.15)


@pytest.mark.claim("R2")
def test_least_squares_needs_a_tenth_more_slots_than_tokens(note):
    exact = {}
    for ratio in (0.85, 0.9, 0.95):
        J, one = torch.arange(round(300 * ratio)).view(1, 1, -1), torch.zeros(1, 1, 1, 1, dtype=F64)
        ranks = [rank(SignedSketch(one, 3, 100, seed), J, 300) for seed in range(20)]
        exact[ratio] = ranks.count(J.shape[2])
        note("R2", **{f"at_{100 * ratio:.0f}": exact[ratio]})
    assert exact[0.85] == 20 and 15 <= exact[0.9] < 20 and exact[0.95] == 0


@once
def shipped():
    """Return the decoder with 4 texts of 447 + 16 tokens and 6 needle documents of 512."""
    on = Subject(checkpoint.from_hf(TINY), tasks("test"), documents=6, T=512)
    on.text = evaluate.reference(on.model, evaluate.text_windows(tasks("test"), 4, 512)[:, :464], 16)
    return on


def told(note, claim, differences):
    for name, x in differences.items():
        note(claim, **{name: x.mean(), f"{name}_se": evaluate.standard_error(x)})


@pytest.mark.claim("R4")
def test_the_smallest_sketch_is_best_and_none_is_better(note):
    found = R4(shipped())
    (paper, _), (more, _), (most, _), gone, (shrunk, _), none = found.numbers.values()
    note("R4", paper=paper, more=more, most=most, gone=-gone[0], none=none[0], none_se=none[1])
    assert found.verdict == HOLDS and above(gone) == NOT and none[0] < 0 and paper > 5 * shrunk


@pytest.mark.claim("R15")
def test_recent_and_candidate_may_share_otherwise(note):
    found = R15(shipped())
    _, few, many = found.numbers.values()
    note("R15", few=few[0], few_se=few[1], many=many[0], many_se=many[1])
    assert found.verdict != NOT and above(few) == HOLDS  # in this decoder


@pytest.mark.claim("R14")
def test_swaps_harm_the_papers_sketch(note):
    found = R14(shipped())
    _, often, seldom = found.numbers.values()
    note("R14", often=often[0], often_se=often[1], seldom=seldom[0], seldom_se=seldom[1])
    assert found.verdict == NOT and above(often) == HOLDS


@pytest.mark.claim("R4")
@pytest.mark.parametrize("budget", [0.0625, 0.1, 0.25, 0.5])
def test_a_slot_of_memory_never_has_fewer_tokens_than_one_over_the_budget(budget, note, n=16_000):
    for vague in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0):
        slots = round(vague * budget * n)
        exact = round(budget * n) - slots
        assert load(budget, vague) == pytest.approx((n - exact) / slots)
        assert load(budget, vague) >= 1 / budget * (1 + 1e-9) or vague == 1
    assert load(budget, 1.0) == pytest.approx(1 / budget)
    note("R4", **{f"load_{100 * budget:.0f}": load(budget, 0.1)})


def of_a_head(Method, budget, head_dim, dtype, **options):
    """Return a cache of one head after a prompt of 2048 tokens; budget: a fraction of these."""
    cache, x = Method(round(budget * 2048), **options), torch.zeros(1, 1, 2048, head_dim, dtype=dtype)
    cache.write(x, x, torch.arange(2048)[None])
    cache.end_prefill()
    return cache


@pytest.mark.claim("R4")
@pytest.mark.parametrize("head_dim, dtype", [(32, torch.float32), (128, torch.float16)])
def test_positions_and_scores_only_add_to_what_shares_a_slot(head_dim, dtype):
    for budget, vague in product((0.1, 0.25, 0.5), (0.05, 0.1, 0.4, 0.8)):
        cache = of_a_head(KVReviver, budget, head_dim, dtype, vague=vague, recent=0.1, slack=0)
        slots = cache.sketch.rows * cache.sketch.width
        in_each = (2048 - cache.length) / slots
        assert 1 / budget < load(budget, slots / 2048 / budget) < in_each


@pytest.mark.claim("R12")
@pytest.mark.parametrize("head_dim, dtype, size", [(32, torch.float32, 4), (128, torch.float16, 2)])
def test_scores_take_a_larger_part_of_a_budget_of_shorter_keys(head_dim, dtype, size):
    for budget in (0.0625, 0.1, 0.25):
        cache, h2o = (of_a_head(Method, budget, head_dim, dtype, **options)
                      for Method, options in ((KVReviver, dict(slack=0)), (H2O, {})))
        entries, entry = round(budget * 2048), 2 * head_dim * size + 4
        assert entries * entry - entry < cache.bytes()[0] <= entries * entry
        assert cache.bytes()[0] - cache.length * entry - cache.sketch.x.nbytes == 4 * 2048
        assert (h2o.length, h2o.bytes()[0]) == (entries, entries * (entry + 4))  # scores of what it keeps


@pytest.mark.claim("R4")
def test_means_lose_little_and_an_offset_of_the_logits_makes_the_sums_as_good(note):
    kl, offsets = shipped().kl, (0.0, -3.0, -10.0)
    sums, none = [kl(shifted(KVReviver, c)) for c in offsets], kl(KVReviver, vague=0.0)
    means, same = (kl(shifted(MeanReviver, c)) for c in (0.0, -10.0))
    assert (means - same).abs().max() < 1e-3 and sums[0].mean() > 5 * kl(MeanReviver).mean()
    assert sums[0].mean() > 4 * sums[1].mean() > 4 * sums[2].mean() and (sums[2] - none).mean().abs() < 0.1
    note("R4", **{f"at_{abs(c):.0f}": x.mean() for c, x in zip(offsets, sums)})
    told(note, "R4", dict(means=kl(MeanReviver) - none))


@pytest.mark.claim("R7")
def test_all_that_a_shrunk_sketch_gains_is_the_mean(note):
    kl = shipped().kl
    mean, shrunk, none = kl(ShrunkReviver, vague=1e-9), kl(ShrunkReviver), kl(KVReviver, vague=0.0)
    assert mean.mean() < shrunk.mean() and abs((shrunk - none).mean()) < 0.04
    told(note, "R7", dict(over_none=shrunk - none, over_mean=shrunk - mean))


@once
def real(n):
    """Return n tokens (L, H, n) of the decoder's text, and their keys and values (L, H, n, D)."""
    model, text = shipped().model, evaluate.text_windows(tasks("test"), 1, 1024)
    recording = record(model, make_cache(model, Recorder), text)
    k, v = (torch.cat([getattr(layer, name) for layer in recording])[:, :, :n] for name in "kv")
    return torch.arange(n).expand(k.shape[:3]), k, v


@pytest.mark.claim("R7")
def test_of_real_keys_the_shrunk_are_nearest_and_sums_farther_than_the_mean(note):
    """Of real tokens the shrunk sketch errs least, and the paper's more than the mean."""
    J, *true = real(1024)
    for N in 1536, 192:
        error = {}
        for name, kind, rows in (("paper", Sketch, 3), ("means", MeanSketch, 3), ("signed", SignedSketch, 3),
                                 ("three", ShrunkSketch, 3), ("one", ShrunkSketch, 1)):
            sketch = kind(true[0], rows, N // rows, 0)
            sketch.insert(J, *true)
            error[name] = [relative_error(*pair) for pair in zip(sketch.query(J), true)]
            note("R7", **{f"{name}_{N}": error[name][0]})
        for one, three, means in zip(error["one"], error["three"], error["means"]):
            assert one < three < means < 1  # 1 is the error of the mean of all tokens
        assert 1 < error["signed"][0] < error["paper"][0]
    assert relative_error(true[0].mean(2, keepdim=True), true[0]) == pytest.approx(1)


@pytest.mark.claim("R2", "R7")
@pytest.mark.parametrize("claim, kind, rows, N", [("R2", SignedSketch, 3, 180), ("R7", ShrunkSketch, 1, 30)])
def test_deleted_estimates_leave_their_errors_to_those_who_stay(claim, kind, rows, N, note):
    (J, k, v), last = real(120), {}
    for what in "true", "estimate":
        sketch = kind(k, rows, N // rows, 0)
        sketch.insert(J, k, v)
        before, (curve, deleted) = sketch.x.clone(), take_out(sketch, J, k, v, 100, what == "true")
        sketch.insert(J[:, :, :100], *deleted)
        assert torch.allclose(sketch.x, before, atol=1e-4) and len(curve) == 100
        last[what] = curve[-1]
    assert last["estimate"] > 3 * last["true"]
    note(claim, **last)


@pytest.mark.claim("R5")
def test_fisher_shares_are_mean_squared_gradients_of_keys_and_values():
    model, text = decoder(), TOKENS[:, :12]
    c, expected = model.config, torch.zeros(3)
    for one in text:
        log_p = model(one[None, :-1])[0].log_softmax(-1)
        model.zero_grad()
        sum(log_p[i, one[i + 1]] for i in range(11)).backward()
        for layer, block in enumerate(model.blocks):
            rows = block.attention.qkv.weight.grad.unflatten(0, (-1, c.head_dim))[c.n_heads:]
            expected[layer] += rows.square().mean() / 2  # as many of keys as of values
    model.zero_grad()
    alone = fisher_shares(model, text)
    assert alone == pytest.approx((expected / expected.sum()).tolist(), rel=1e-4)
    assert fisher_shares(model, text, 0.75) == pytest.approx([x / 4 + 0.25 for x in alone], rel=1e-5)
    assert max(alone) > 1.2 * min(alone) and all(p.grad is None for p in model.parameters())


@pytest.mark.claim("R5")
def test_fisher_shares_starve_layers_unless_a_part_is_even(note):
    kl, text = shipped().kl, evaluate.text_windows(tasks("test"), 15, 256)[1::2]
    alone, mixed = (fisher_shares(shipped().model, text, even) for even in (0.0, 0.5))
    note("R5", largest_two=alone[0] + alone[1])
    assert alone[0] + alone[1] > 0.8
    with pytest.raises(ValueError, match="no room"):
        kl(KVReviver, shares=alone, slack=8)
    kinds = dict(shrunk=(ShrunkReviver, {}), none=(KVReviver, dict(vague=0.0)))
    change = {name: kl(Method, shares=mixed, **options) - kl(Method, **options)
              for name, (Method, options) in kinds.items()}
    assert all(x.mean() < -0.02 for x in change.values())
    told(note, "R5", change)

    fresh = lambda: make_cache(decoder(), KVReviver, budget=41)  # the total stays
    assert [cache.budget for cache in share_out(fresh(), (0.5, 0.2, 0.3))] == [62, 25, 37]
    with pytest.raises(ValueError, match="add up to 1"):
        share_out(fresh(), (0.5, 0.2, 0.2))


@pytest.mark.claim("R9")
def test_many_are_activated_later_but_chance_leaves_hardly_more(note):
    on = copy(shipped())
    on.text = SimpleNamespace(tokens=evaluate.text_windows(tasks("test"), 4, 512)[::2])
    found = R9(on)
    often, often_chance, much, much_chance, *_ = (x for x, _ in found.numbers.values())
    assert 0.45 < often < often_chance < 0.65 and 0.08 < much < much_chance < 0.18 and found.verdict == HOLDS
    note("R9", often=often, often_chance=often_chance)


@pytest.mark.claim("R9", "R10")
def test_a_quarter_of_the_bytes_finds_needles_in_two_bits_alone(note):
    """Query-agnostic, DuoAttention and 2 bits find all needles; SnapKV, KVReviver, H2O do not."""
    right = shipped().row("needle", SnapKV, 0.25, window_size=8)
    aware, agnostic = (right[setting].mean().item() for setting in ("aware", "agnostic"))
    assert aware > 0.9 and agnostic < 0.3
    note("R9", aware=aware, agnostic=agnostic)

    paper, h2o, _, _, shrunk, _, bits = (x for x, _ in R10(shipped()).numbers.values())
    duo = shipped().agnostic(DuoAttention, heads=((1, 0), (1, 1), (1, 2))).mean().item()
    assert paper == 0 and max(shrunk, h2o) < 0.3 and duo == bits == 1
    note("R10", paper=paper, shrunk=shrunk, h2o=h2o, duo=duo, bits=bits)


# ---- the paper's claims on accuracy, in small ---

@pytest.mark.claim("R11")
def test_a_tenth_of_2048_tokens_is_not_the_full_cache(note):
    """At a tenth of 2048 tokens the KL of the next 16 exceeds 0.05, even without a sketch."""
    model, text = shipped().model, evaluate.text_windows(tasks("test"), 3, 2065)
    full, kl = evaluate.reference(model, text, 16), {}
    for name, Method, options in (("paper", KVReviver, {}), ("means", MeanReviver, {}),
                                ("none", KVReviver, dict(vague=0.0))):
        make = evaluate.maker(model, Method, 0.1, **options)
        kl[name] = evaluate.continuation(model, full, make, full.recording)["kl"]
    assert kl["paper"].mean() > 3 * kl["means"].mean() and all(x.min() > 0.05 for x in kl.values())
    told(note, "R11", kl)


@pytest.mark.claim("R12")
def test_a_quarter_of_the_bytes_loses_more_than_two_of_a_hundred_answers(note):
    """Query-aware, KVReviver at a quarter of the bytes loses over half of each task's answers."""
    for task in ("needle", "pairs", "few_shot"):
        full, paper, means, h2o = (shipped().row(task, Method, share)["aware"].mean() for Method, share in (
            (LayerCache, None), (KVReviver, 0.25), (MeanReviver, 0.25), (H2O, 0.25)))
        assert full - paper > 0.5
        note("R12", **{f"{task}_full": full, f"{task}": paper, f"{task}_means": means, f"{task}_h2o": h2o})


def at_depths(depths, each, T):
    """Return needle documents of T tokens: for every depth (0: start, 1: end) `each`, in order."""
    parts = [tasks("test").batch("needle", 7, each, T, depth=depth) for depth in depths]  # they align
    tokens, roles = (np.concatenate([getattr(part, x) for part in parts]) for x in ("tokens", "roles"))
    return Batch(tokens, roles, parts[0].question, parts[0].answers)


@pytest.mark.claim("R13")
def test_with_the_question_in_the_prompt_needles_between_the_ends_are_lost(note):
    model, depths = shipped().model, (0.0, 0.25, 0.5, 0.75, 1.0)
    bench = Benchmark.read(model, dict(needle=at_depths(depths, 3, 512)), None)
    for name, Method, options in (("paper", KVReviver, {}), ("means", MeanReviver, {}), ("h2o", H2O, {}),
                                ("snap", SnapKV, dict(window_size=8))):
        make = evaluate.maker(model, Method, 0.25, **options)
        found = right_answers(model, bench, make)["aware"][0].view(5, 3).mean(1)
        note("R13", **{name: found.mean(), f"{name}_inside": found[1:4].mean()})
        assert found[1:4].mean() == 1 if name == "snap" else found[1:4].mean() < 0.3


def test_at_every_depth_lies_what_is_asked_for():
    batch = at_depths((0.0, 0.5, 1.0), 2, 256)
    first, middle, last = (batch.stated[i:i + 2] for i in (0, 2, 4))
    assert batch.tokens.shape == (6, 256) and (first < 20).all() and (abs(middle - 122) < 20).all()
    assert (last > 210).all() and all((batch.tokens[:, a] >= 256).all() for a in batch.answers)
