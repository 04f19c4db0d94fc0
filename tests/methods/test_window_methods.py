"""Compare SnapKV, PyramidKV, AdaKV and their selections with loops; check options and limits."""
from fractions import Fraction
from functools import partial
from itertools import product
import math

import pytest
import torch

from common import TOKENS, decoder
from methods.ada_kv import AdaKV, shared
from methods.chunk_kv import ChunkKV, Chunks
from methods.compress_again import again
from methods.critical_kv import Critical, CriticalCode, PooledCritical, part_of, value_norms
from methods.ours.chunk_kv_semantic import SemanticChunkKV
from methods.ours.residual import Residual
from methods.ours.theta import LeastTheta
from methods.pyramid_kv import PyramidKV
from methods.snap_kv import SnapKV
from nanollm.cache import NEVER, end_prefill, make_cache
from nanollm.measure.evaluate import slots
from windows import (B, D, GROUPED, PROMPTS, TIED, Case, by_depth, by_head, check_again, check_walk, compress,
                     highest, mean, name_of, pool, uneven)


# ---- loops: weights and norms [g][i] of one key/value head; `out` tokens lie outside the window ---


def in_two_stages(A, norms, out, b, kernel_size, alpha, pooled=False, epsilon=0, of_means=False, **_):
    """Algorithm 1 with Algorithm 2, lines 8 to 10."""
    A = [a[:out] for a in A]
    first = highest(pool(mean(A), kernel_size), math.floor(Fraction(str(alpha)) * b))
    A = [[x + epsilon for x in (pool(a, kernel_size) if pooled else a)] for a in A]
    if of_means:
        A, norms = [mean(A)], [mean(norms)]
    score = mean([[x * y for x, y in zip(a, norm)] for a, norm in zip(A, norms)])
    return first + highest(score, b - len(first), but=first)


as_the_code = partial(in_two_stages, pooled=True, epsilon=1e-4, of_means=True)


def by_least_theta(A, norms, out, b, kernel_size, steps, pooled=True, **_):
    """Return the set with the lowest θ of: by weight, in two stages, and `steps` improvements."""
    if pooled:
        A = [pool(a[:out], kernel_size) + a[out:] for a in A]
        A = [[x / sum(a) for x in a] for a in A]

    def gathered(a, norm, kept):
        all_kept = [*kept, *range(out, len(a))]
        return sum(a[i] for i in all_kept), sum(a[i] * norm[i] for i in all_kept)

    def theta(kept):
        total = 0
        for a, norm in zip(A, norms):
            S, W = gathered(a, norm, kept)
            total += sum(x * y for x, y in zip(a, norm)) - (2 - 1 / S) * W
        return total

    by_weight = highest(mean(A)[:out], b)
    staged = in_two_stages(A, norms, out, b, 1, alpha=0.25)
    sets = [by_weight, staged]
    kept = min(sets, key=theta)
    for _ in range(steps):
        gain = [0] * out
        for a, norm in zip(A, norms):
            S, W = gathered(a, norm, kept)
            gain = [gain[i] + a[i] * ((2 - 1 / S) * norm[i] + W / S ** 2) for i in range(out)]
        kept = highest(gain, b)
        sets.append(kept)
    return min(sets, key=theta)


CASES = {
    "snap": Case(SnapKV),
    "pyramid": Case(PyramidKV, dict(beta=20), None, by_depth),
    "ada": Case(AdaKV, {}, None, by_head),
    "ada floor 0": Case(AdaKV, dict(floor=0.0), None, by_head),
    "critical": Case(SnapKV, {}, Critical(), choose=in_two_stages),
    "critical pooled": Case(SnapKV, {}, PooledCritical(0.5), choose=partial(in_two_stages, pooled=True)),
    "critical code": Case(SnapKV, {}, CriticalCode(), choose=as_the_code),
    "critical on ada": Case(AdaKV, dict(floor=0.1), Critical(), by_head, in_two_stages),
    "critical on pyramid": Case(PyramidKV, {}, Critical(), by_depth, in_two_stages),
    "theta": Case(SnapKV, {}, LeastTheta(steps=4), choose=by_least_theta),
    "theta 0": Case(SnapKV, {}, LeastTheta(steps=0), choose=by_least_theta),
    "theta unpooled": Case(SnapKV, {}, LeastTheta(steps=1, pooled=False), choose=by_least_theta),
    "theta on pyramid": Case(PyramidKV, {}, LeastTheta(steps=2), by_depth, by_least_theta),
    "theta on ada": Case(AdaKV, {}, LeastTheta(steps=2), by_head, by_least_theta),
    "residual 3": Case(SnapKV, {}, Residual(entries=3, share=0.5)),
    "residual clusters": Case(SnapKV, {}, Residual(entries=3, rounds=2)),
    "residual on ada": Case(AdaKV, dict(floor=0.0), Residual(entries=3), by_head),
    "residual on critical on ada": Case(AdaKV, {}, Residual(Critical(), entries=1), by_head, in_two_stages),
}
WALKS = [*product(CASES, [GROUPED, TIED]),
         *product(["critical on ada", "theta on pyramid", "residual 3"], PROMPTS[2:])]


@pytest.mark.parametrize("case, prompt", WALKS, ids=lambda x: x if isinstance(x, str) else name_of(x))
def test_slots_and_bytes_equal_the_loops(case, prompt):
    """A head keeps exactly the loop's tokens, and `bytes` counts them."""
    check_walk(CASES[case], prompt)


def by_chunk_of_text(A, norms, out, b, kernel_size, at, chunk_size, fill, **_):
    """Choose by the chunks of the text, even if only part of a chunk is left."""
    scores, chunks = pool(mean(A)[:out], kernel_size), {}
    for i in range(out):
        chunks.setdefault(at[i] // chunk_size, []).append(i)
    kept = []
    for _, part in sorted(chunks.items(), key=lambda x: (-math.fsum(scores[i] for i in x[1]), -x[0])):
        if fill or len(kept) + len(part) <= b:
            kept += part
    return kept[:b]


AGAIN = {name: case for name, case in CASES.items() if "theta" not in name and "residual" not in name} | {
    "critical code on ada": Case(AdaKV, dict(floor=0.0), CriticalCode(), by_head, as_the_code),
    "chunk": Case(ChunkKV, {}, Chunks(3), choose=by_chunk_of_text),
    "whole chunks": Case(ChunkKV, {}, Chunks(3, fill=False), choose=by_chunk_of_text),
    "chunk on ada": Case(AdaKV, dict(floor=0.1), Chunks(3), by_head, by_chunk_of_text),
    "whole chunks on ada": Case(AdaKV, dict(floor=0.1), Chunks(3, fill=False), by_head, by_chunk_of_text)}
STEPS = {"a token": [1] * 30, "parts": [1, 2, 17, 1, 9]}


@pytest.mark.parametrize("case", AGAIN)
@pytest.mark.parametrize("T, every, parts", [
    (3, 5, "a token"), (3, 1, "a token"), (30, 5, "a token"), (14, 9, "a token"), (3, 5, "parts"),
    (30, 1, "parts"), (12, 3, "parts")])
def test_compressed_again_slots_and_outputs_equal_the_loops(case, T, every, parts):
    """Methods that compress again keep the loop's tokens and give the loop's outputs."""
    check_again(AGAIN[case], T, every, STEPS[parts])


@pytest.mark.parametrize("H, G, budget", [(1, 4, 12), (3, 1, 9), (4, 2, 6)])
@pytest.mark.parametrize("case", ["snap", "critical on ada"])
def test_compressed_again_with_other_heads_and_budgets(case, H, G, budget):
    """The same holds for other numbers of heads and other budgets."""
    check_again(AGAIN[case], 8, 4, STEPS["a token"], H=H, G=G, budget=budget)


def test_compressed_again_empty_slots_take_no_room_from_tokens_that_nobody_looks_at(every=8):
    """Empty slots never win over tokens without any attention when a method compresses again.

    Heads have 53 and 9 entries. Then the whole window attends to its first token only, so all other tokens
    have a window score of 0.
    """
    cache = uneven(again(AdaKV)(20, 8, kernel_size=1, floor=0.0, every=every), 60)
    q, k = torch.zeros(B, 8, every, 2), torch.zeros(B, 4, every, 2)
    q[..., 1], k[:, :, 0, 1] = 1, 1000
    cache.attend(q, k, k, torch.arange(60, 60 + every)[None])
    assert (cache.pos != NEVER).sum((1, 2)).tolist() == [4 * 20] * B


@pytest.mark.parametrize("Method", [SnapKV, PyramidKV, AdaKV, ChunkKV])
@torch.inference_mode()
def test_compressed_again_no_step_of_a_decoder_holds_more_than_budget_and_every(Method, budget=14, every=6):
    """A head never has more than `budget` + `every` slots, mean over heads and layers.

    All layers compress at the same tokens.
    """
    model, highest, times = decoder(n_layers=4), 0, set()
    caches = make_cache(model, again(Method), budget=budget, window_size=5, every=every)
    model(TOKENS[:, :3], caches)
    end_prefill(caches)
    for t in range(3, TOKENS.shape[1]):
        before = slots(caches)
        model(TOKENS[:, t:t + 1], caches)
        times |= {t} if slots(caches) < before else set()
        highest = max(highest, before + 1)
    assert highest == budget + every and min(times) == budget + every - 1
    assert {b - a for a, b in zip(sorted(times), sorted(times)[1:])} == {every}
    assert slots(caches) <= budget + every and caches[0].seen == TOKENS.shape[1]


def test_without_every_nothing_is_compressed_again_and_no_query_is_kept():
    """A plain window method appends after the prompt and keeps no queries."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, B, 2, 60, D, generator=g)
    cache = compress(SnapKV(20, window_size=8), q[:, :, :9], k[:, :, :9], v[:, :, :9])
    cache.attend(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], torch.arange(9, 60)[None])
    assert cache.length == 60 and cache.queries is None


def test_the_authors_code_adds_a_little_to_scores_and_takes_half_by_weight():
    """CriticalCode adds 1e-4 to the scores, multiplies the means and has α = 0.5."""
    scores, norms = torch.tensor([[[[0, 0.5, 0], [0, 0.1, 0.2]]], [[[2, 1, 4.0], [4, 3, 2.0]]]])[:, None]
    second = CriticalCode().second(SnapKV(20, window_size=8, kernel_size=1), scores, norms)
    assert torch.allclose(second, torch.tensor([[[1e-4 * 3, 0.3001 * 2, 0.1001 * 3]]]), atol=0)
    assert CriticalCode().alpha == 0.5 and Critical().alpha == PooledCritical().alpha == 0.25


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
@pytest.mark.parametrize("beta", [1, 3, 20])
def test_pyramid_keeps_what_snap_kv_keeps_over_all_layers(layers, beta, budget=12, window_size=3):
    """PyramidKV keeps as many entries over all layers as SnapKV, and they fall linearly."""
    for T in (budget + 1, 2 * budget, 2 * budget + 5, 4 * budget + 1):
        x, scores = torch.zeros(1, 1, T, 2), [[0] * (T - window_size)]
        counts = [compress(PyramidKV(budget, window_size, beta=beta), x, x, x, None, i, layers).length
                  for i in range(layers)]
        assert sum(counts) == layers * budget
        assert layers == 1 or counts == [
            window_size + by_depth(scores, budget - window_size, beta, i, layers)[0] for i in range(layers)]


def test_shares_of_a_budget_are_exact_and_do_not_overflow():
    """Fractions of a budget are exact, and AdaKV's numbers add up for large inputs."""
    assert part_of(0.29, 100) == 29 and part_of(1 / 3, 3000) == 1000
    assert part_of(1 / 3, torch.tensor([3000, 6001])).tolist() == [1000, 2000]
    for floor in (1 / 3, 0.1 + 0.2):
        assert shared(torch.rand(1, 3, 5000), 1000, floor).sum() == 3000


@pytest.mark.parametrize("make, message", [
    (partial(SnapKV, 8, 8), "budget 8 must exceed the window 8"), (partial(SnapKV, 20, 0), "window_size 0"),
    (partial(AdaKV, 20, 8, 2), "kernel_size 2"), (partial(PyramidKV, 20, 8, beta=0), "beta is 0"),
    (partial(AdaKV, 20, 8, floor=1.5), "floor is 1.5"), (partial(SnapKV, 20, 8, select=Critical), "select"),
    (partial(Critical, alpha=math.nan), "alpha nan of Critical"),
    (partial(CriticalCode, alpha=-0.5), "alpha is -0.5"),
    (partial(LeastTheta, steps=-1), "steps -1"), (partial(LeastTheta, steps=10**9), "steps 1000000000 must"),
    (partial(again(SnapKV), 20, 8, every=0), "every 0 must be a whole number of at least 1"),
    (partial(again(AdaKV), 20, 8, every=2.5), "every 2.5"),
    (partial(again(SnapKV), 20, 8, select=LeastTheta()), "LeastTheta cannot be applied to its own output"),
    (partial(again(SemanticChunkKV), 20, 8), "SemanticChunks cannot be applied to its own output"),
    (partial(again(ChunkKV), 20, 8, every=4, reuse=2), "reuse is 2; it must be 1 if"),
    (partial(Residual, entries=0), "entries 0"), (partial(Residual, rounds=10**9), "rounds 1000000000 must"),
    (partial(Residual, share=0), "share is 0"), (partial(Residual, inner=SnapKV), "inner")])
def test_bad_options_are_refused_at_construction(make, message):
    """A wrong option raises ValueError when the cache or selection is made."""
    with pytest.raises(ValueError, match=message):
        make()


def test_norms_are_added_up_in_32_bits():
    """Norms of 16-bit values are right even if their sum exceeds 16 bits."""
    v, w_o = torch.full((B, 2, 3, D), 8.0).half(), torch.ones(4000, 4, D).half()
    assert torch.equal(value_norms(v, w_o), torch.full((B, 2, 2, 3), 8.0 * D * 4000))


def test_projected_values_are_never_there_whole(monkeypatch):
    """`value_norms` projects at most 1024 tokens at a time.

    test_window_kernels.py checks that its norms are right.
    """
    parts, plain = [], torch.sum
    monkeypatch.setattr(torch, "sum", lambda x, *more, **how: parts.append(x.shape) or plain(x, *more, **how))
    value_norms(torch.randn(B, 2, 1025, D), torch.randn(40, 2, D))
    assert max(parts) <= (1024, 40)


def test_nothing_is_lost_where_the_evicted_are_all_alike(strong=9, T=40):
    """If all evicted entries are equal, residual entries restore the full output.

    K-means then leaves clusters empty.
    """
    g, select = torch.Generator().manual_seed(0), Residual(entries=3, rounds=1)
    q, k, v = [torch.randn(B, heads, T + 3, D, generator=g) for heads in (6, 2, 2)]
    k[:, :, strong:32], v[:, :, strong:32] = k[:, :, 31:32], v[:, :, 31:32]
    k[:, :, :strong, 0], q[..., 0] = 9, 3  # these certainly stay
    y = []
    for cache in (SnapKV(budget=20, window_size=8, kernel_size=1, select=select), SnapKV(T, window_size=8)):
        compress(cache, q[:, :, :T], k[:, :, :T], v[:, :, :T], torch.ones(6, 6, D))
        away = q[:, :, T:] * torch.tensor([-1, 1, 1, 1])  # away from the kept keys
        y.append(cache.attend(away, k[:, :, T:], v[:, :, T:], torch.arange(T, T + 3)[None]))
    assert torch.allclose(*y, atol=1e-5)


@pytest.mark.parametrize("T, expected", [(60, [3, 0, 0, 0]), (42, [0, 3, 3, 3])])
def test_heads_with_too_little_room_or_nothing_to_evict_have_no_residual(T, expected):
    """A head with too little room, or with nothing to evict, gets no residual entry.

    Of 48 entries, head 0 gets 45 of 52 and the others 1 each (T = 60); or head 0 gets all 34 and the others 4
    or 5 (T = 42).
    """
    select = Residual(entries=3, share=0.5)
    cache = uneven(AdaKV(20, window_size=8, kernel_size=1, floor=0.0, select=select), T)
    assert ((cache.slot("bias") != 0) & (cache.pos != NEVER)).sum(-1).tolist() == [expected] * B
    assert (cache.pos != NEVER).sum((1, 2)).tolist() == [4 * 20] * B


def test_state_that_changes_is_not_packed():
    """A method that changes a per-slot tensor in `observe` is stored unpacked, so the change is not lost."""
    class Counting(AdaKV):
        def write(self, k, v, pos):
            super().write(k, v, pos, steps=torch.zeros(k.shape[:3]))

        def observe(self, q, p):
            self.slot("steps").add_(1)
            super().observe(q, p)

    g = torch.Generator().manual_seed(0)
    q, k, v = (4 * torch.randn(1, heads, 42, 8, generator=g) for heads in (4, 2, 2))
    cache = Counting(budget=12, window_size=4)
    cache.attend(q[:, :, :40], k[:, :, :40], v[:, :, :40], torch.arange(40)[None])
    cache.end_prefill()
    assert cache.ragged and not cache.packed
    for t in (40, 41):
        cache.attend(q[:, :, t:t + 1], k[:, :, t:t + 1], v[:, :, t:t + 1], torch.tensor([[t]]))
    assert cache.slot("steps").max() == 3 and (cache.pos == NEVER).any()
