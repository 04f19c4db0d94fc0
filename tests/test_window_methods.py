"""The window methods against loops written from their papers, and what their caches hold and return."""
from collections.abc import Callable
from copy import deepcopy
from dataclasses import make_dataclass
from fractions import Fraction
from functools import cache as once, partial
from itertools import pairwise, product
import math
from typing import NamedTuple

from hypothesis import given, settings, strategies as st
import pytest
import torch

from methods.ada_kv import AdaKV, shared
from methods.chunk_kv import ChunkKV, SemanticChunkKV
from methods.critical_kv import Critical, LeastTheta, part_of, value_norms
from methods.pyramid_kv import PyramidKV
from methods.residual_entry import Residual
from methods.snap_kv import SnapKV
from nanollm import cache as seam
from nanollm.cache import NEVER, LayerCache, finish_prompt, make_cache
from test_methods import TOKENS, decoder, reads_and_decodes_as_the_full_cache

B, D, LAYER, LAYERS = 2, 4, 1, 4
ENDS = torch.arange(50) % 6 == 0  # tokens that end a chunk


# ---- loops. Weights and norms are lists [g][i] of one key/value head; `out` tokens lie outside the window ---


def highest(score, n, but=()):
    """The n highest scores; of equals the newest."""
    return sorted(set(range(len(score))) - set(but), key=lambda i: (-score[i], -i))[:n]


def pool(score, kernel):
    return [max(score[max(0, i - kernel // 2):i + kernel // 2 + 1]) for i in range(len(score))]


def mean(heads):
    return [sum(column) / len(heads) for column in zip(*heads)]


def fair(exact):
    """Whole numbers with the same sum: the largest remainders are rounded up, of equals the first."""
    counts = [math.floor(x) for x in exact]
    while sum(counts) < sum(exact):
        counts[max(range(len(exact)), key=lambda i: exact[i] - counts[i])] += 1
    return counts


def same_for_all(scores, b, **_):
    return [b] * len(scores)


def by_depth(scores, b, beta=20, layer=LAYER, layers=LAYERS, **_):
    top = min(2 * b - Fraction(b, beta), len(scores[0]))
    step = Fraction(2 * (top - b), layers - 1)  # the layers' mean is b, so the last lies as far below b as the first above
    budgets = fair([top - i * step for i in range(layers)])
    return [budgets[layer]] * len(scores)


def by_head(scores, b, floor=0.2, **_):
    H, floor = len(scores), Fraction(str(floor))
    everywhere = sorted((-score, -i, -h) for h in range(H) for i, score in enumerate(scores[h]))[:H * b]
    return fair([floor * b + (1 - floor) * sum(h == -minus for *_, minus in everywhere) for h in range(H)])


def by_weight(A, norms, out, b, kernel, **_):
    """Algorithm 2, line 6."""
    return highest(pool(mean(A)[:out], kernel), b)


def in_two_stages(A, norms, out, b, kernel, alpha=0.25, pool_second=False, epsilon=0, product_of_means=False, **_):
    """Algorithm 1 with Algorithm 2, lines 8 to 10."""
    A = [a[:out] for a in A]
    first = highest(pool(mean(A), kernel), math.floor(Fraction(str(alpha)) * b))
    A = [[x + epsilon for x in (pool(a, kernel) if pool_second else a)] for a in A]
    times = lambda xs, ys: [x * y for x, y in zip(xs, ys)]
    score = times(mean(A), mean(norms)) if product_of_means else mean([times(a, norm) for a, norm in zip(A, norms)])
    return first + highest(score, b - len(first), but=first)


def by_least_theta(A, norms, out, b, kernel, steps, pooled=True, **_):
    """The best of: by weight, in two stages, and `steps` times the entries that lower θ most."""
    if pooled:
        A = [pool(a[:out], kernel) + a[out:] for a in A]
        A = [[x / sum(a) for x in a] for a in A]

    def gathered(a, norm, kept):
        there = [*kept, *range(out, len(a))]
        return sum(a[i] for i in there), sum(a[i] * norm[i] for i in there)

    def theta(kept):
        total = 0
        for a, norm in zip(A, norms):
            S, W = gathered(a, norm, kept)
            total += sum(x * y for x, y in zip(a, norm)) - (2 - 1 / S) * W
        return total

    first = highest(mean(A)[:out], b // 4)
    gain = mean([[x * y for x, y in zip(a, norm)] for a, norm in zip(A, norms)])[:out]
    sets = [highest(mean(A)[:out], b), first + highest(gain, b - len(first), but=first)]
    kept = min(sets, key=theta)
    for _ in range(steps):
        gain = [0] * out
        for a, norm in zip(A, norms):
            S, W = gathered(a, norm, kept)
            gain = [gain[i] + a[i] * ((2 - 1 / S) * norm[i] + W / S ** 2) for i in range(out)]
        kept = highest(gain, b)
        sets.append(kept)
    return min(sets, key=theta)


def chunks_of(n, longest, tokens=(), ends=()):
    """Tokens 0 … n − 1 in chunks of `longest`, the last perhaps shorter; one also ends at each token that is in `ends`."""
    chunks = [[]]
    for i in range(n):
        if len(chunks[-1]) == longest or i and len(ends) and ends[tokens[i - 1]]:
            chunks.append([])
        chunks[-1].append(i)
    return chunks


def by_chunk(A, norms, out, b, kernel, layer, tokens, chunk=10, score="sum", per_head=True, fill=False, ends=(), **_):
    """Down the ranking, each chunk that fits whole; then single tokens, if `fill`."""
    votes = mean([pool(mean(a)[:out], kernel) for a in ([A] if per_head else layer)])
    of = {"sum": math.fsum, "mean": lambda x: math.fsum(x) / len(x), "max": max}[score]
    kept, chunks = [], chunks_of(out, chunk, tokens, ends)
    for part in sorted(chunks, key=lambda part: (-of([votes[i] for i in part]), -part[0])):
        if len(kept) + len(part) <= b:
            kept += part
    return kept + (highest(votes, b - len(kept), but=kept) if fill else [])


class Slots(NamedTuple):
    pos: list[int]
    k: torch.Tensor     # (n, D)
    v: torch.Tensor
    bias: torch.Tensor  # (n)


def residual(gone, q, k, v, rows, entries, rounds=0, share=1.0):
    """Slots that stand for the tokens `gone` of one head: q (G, w, D), k and v (T, D), rows (G, w, T)."""
    groups = [[] for _ in range(entries)]
    for j, i in enumerate(gone):
        groups[j * entries // len(gone)].append(i)
    votes, (G, w, T) = rows.mean((0, 1)), rows.shape
    for _ in range(rounds):
        centres = [(votes[group, None] * k[group]).sum(0) / votes[group].sum() for group in groups]
        groups = [[] for _ in range(entries)]
        for i in gone:
            groups[min(range(entries), key=lambda e: (k[i] - centres[e]).norm())].append(i)
    for group in sorted(groups, key=max):
        key, value = [(votes[group, None] * x[group]).sum(0) / votes[group].sum() for x in (k, v)]
        reach = 0
        for g in range(G):
            for t in range(w):
                Z = (k[:T - w + t + 1] @ q[g, t] / math.sqrt(D)).exp().sum()
                reach += (q[g, t] @ key / math.sqrt(D)).exp() / Z
        yield group[-1], key, value, math.log(share * rows[..., group].sum() / reach)


# ---- every method through one walk ---


def on(*bases):
    return make_dataclass("On", [], bases=bases, eq=False)


class Case(NamedTuple):
    Method: type
    knobs: dict = {}
    deal: Callable = same_for_all  # entries per head, from [h][i] pooled votes
    choose: Callable = by_weight   # entries of a head


CASES = {
    "snap": Case(SnapKV),
    "pyramid": Case(PyramidKV, dict(beta=20), by_depth),
    "pyramid 3": Case(PyramidKV, dict(beta=3), by_depth),
    "ada": Case(AdaKV, {}, by_head),
    "ada floor 0": Case(AdaKV, dict(floor=0.0), by_head),
    "ada floor 0.7": Case(AdaKV, dict(floor=0.7), by_head),
    "critical": Case(Critical, {}, choose=in_two_stages),
    "critical alpha 0": Case(Critical, dict(alpha=0.0), choose=in_two_stages),
    "critical pooled": Case(Critical, dict(pool_second=True, alpha=0.5), choose=in_two_stages),
    "critical epsilon": Case(Critical, dict(epsilon=0.0625), choose=in_two_stages),
    "critical means": Case(Critical, dict(product_of_means=True), choose=in_two_stages),
    "critical on ada": Case(on(Critical, AdaKV), dict(floor=0.1), by_head, in_two_stages),
    "critical on pyramid": Case(on(Critical, PyramidKV), {}, by_depth, in_two_stages),
    "theta": Case(LeastTheta, dict(steps=4), choose=by_least_theta),
    "theta 0": Case(LeastTheta, dict(steps=0), choose=by_least_theta),
    "theta unpooled": Case(LeastTheta, dict(steps=1, pooled=False), choose=by_least_theta),
    "theta on pyramid": Case(on(LeastTheta, PyramidKV), dict(steps=2), by_depth, by_least_theta),
    "theta on ada": Case(on(LeastTheta, AdaKV), dict(steps=2), by_head, by_least_theta),
    "residual": Case(Residual, dict(entries=1)),
    "residual 3": Case(Residual, dict(entries=3, share=0.5)),
    "residual clusters": Case(Residual, dict(entries=2, rounds=2)),
    "residual on ada": Case(on(Residual, AdaKV), dict(entries=3, floor=0.0), by_head),
    "residual on critical on ada": Case(on(Residual, Critical, AdaKV), dict(entries=1), by_head, in_two_stages),
    "chunk": Case(ChunkKV, dict(chunk=3), choose=by_chunk),
    "chunk mean": Case(ChunkKV, dict(chunk=4, score="mean"), choose=by_chunk),
    "chunk max": Case(ChunkKV, dict(chunk=2, score="max"), choose=by_chunk),
    "chunk per layer": Case(ChunkKV, dict(chunk=5, per_head=False), choose=by_chunk),
    "chunk fill": Case(ChunkKV, dict(chunk=5, fill=True), choose=by_chunk),
    "chunk fill per layer": Case(ChunkKV, dict(chunk=4, score="mean", per_head=False, fill=True), choose=by_chunk),
    "chunk on ada": Case(on(ChunkKV, AdaKV), dict(chunk=3, floor=0.1), by_head, by_chunk),
    "chunk fill on ada": Case(on(ChunkKV, AdaKV), dict(chunk=4, per_head=False, fill=True), by_head, by_chunk),
    "chunk on pyramid": Case(on(ChunkKV, PyramidKV), dict(chunk=3, score="mean"), by_depth, by_chunk),
    "semantic": Case(SemanticChunkKV, dict(chunk=6, ends=ENDS), choose=partial(by_chunk, score="mean")),
    "semantic per layer": Case(SemanticChunkKV, dict(chunk=5, ends=ENDS, per_head=False, score="sum"), choose=by_chunk),
    "semantic on ada": Case(on(SemanticChunkKV, AdaKV), dict(ends=ENDS, chunk=20, fill=True), by_head,
                            partial(by_chunk, score="mean")),
    "residual on chunk": Case(on(Residual, ChunkKV), dict(chunk=2, entries=2), choose=by_chunk),
}


class Prompt(NamedTuple):
    T: int
    chunk: int
    H: int
    G: int
    window: int
    budget: int
    kernel: int = 7
    tied: bool = False  # the window's probabilities are a few exact numbers, and so are the norms


PROMPTS = [Prompt(53, 53, 2, 2, 8, 20), Prompt(53, 1, 2, 2, 8, 20), Prompt(53, 5, 2, 2, 8, 20),
           Prompt(37, 37, 3, 1, 4, 13, 1), Prompt(37, 34, 2, 4, 4, 9, 3),
           Prompt(37, 9, 2, 4, 5, 6), Prompt(38, 38, 4, 1, 7, 37), Prompt(9, 2, 3, 2, 1, 4),
           Prompt(13, 13, 2, 2, 4, 14), Prompt(13, 4, 2, 1, 8, 13), Prompt(5, 3, 2, 2, 8, 9),  # room for all
           Prompt(53, 53, 2, 2, 8, 20, 7, True), Prompt(37, 37, 4, 1, 4, 13, 1, True), Prompt(37, 36, 2, 4, 4, 17, 3, True)]
each_case = pytest.mark.parametrize("case", CASES)
each_prompt = pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: "-".join(str(int(x)) for x in p))


def knobs_of(case, prompt):
    """Those of the case, but for a chunk that has no room."""
    knobs = CASES[case].knobs
    if "chunk" not in knobs or knobs.get("fill") and "ends" not in knobs:
        return knobs
    return knobs | dict(chunk=min(knobs["chunk"], prompt.budget - prompt.window))


def slots_by_loop(case, q, k, v, w_o, rows, tokens, prompt) -> list[list[Slots]]:
    """[b][h]; rows (B, H, G, w, T) are the window's probabilities, lines 2 and 3 of Algorithm 2."""
    T, G, w = prompt.T, prompt.G, prompt.window
    out, knobs = T - w, knobs_of(case, prompt)
    heads = []
    for b in range(B):
        A = rows[b].mean(2).tolist()
        budgets = CASES[case].deal([pool(mean(a)[:out], prompt.kernel) for a in A], prompt.budget - w, **knobs)
        for h, n in enumerate(budgets):
            norms = [(v[b, h] @ w_o[:, h * G + g].T).abs().sum(-1).tolist() for g in range(G)]
            entries = knobs.get("entries", 0) if knobs.get("entries", 0) <= n < out else 0
            kept = CASES[case].choose(A[h], norms, out, n - entries, prompt.kernel, layer=A, tokens=tokens[b], **knobs)
            slots = [(i, k[b, h, i], v[b, h, i], 0) for i in [*kept, *range(out, T)]]
            if entries:
                how = {name: knobs[name] for name in ("entries", "rounds", "share") if name in knobs}
                gone = sorted(set(range(out)) - set(kept))
                slots += residual(gone, q[b, h * G:h * G + G, out:], k[b, h], v[b, h], rows[b, h], **how)
            pos, keys, values, bias = zip(*sorted(slots, key=lambda slot: slot[0]))
            heads.append(Slots(list(pos), torch.stack(keys), torch.stack(values), torch.tensor(bias).float()))
    return [heads[b * prompt.H:(b + 1) * prompt.H] for b in range(B)]


class Walk(NamedTuple):
    slots: list[list[Slots]]  # by the loop
    cache: list               # copies of the cache: when the prompt ends, and after each later part
    raw: tuple                # q, k, v
    y: torch.Tensor
    parts: list               # edges of the later parts


@once
def walk(case: str, prompt: Prompt) -> Walk:
    T, chunk, H, G, window, budget, kernel, tied = prompt
    g = torch.Generator().manual_seed(T)
    q, k, v = [torch.randn(B, heads, T + 6, D, generator=g) for heads in (H * G, H, H)]
    w_o, q = torch.randn(6, H * G, D, generator=g), 2 * q
    if tied:
        v, w_o = v.round(), w_o.round()
    rows = torch.zeros(B, H, G, min(window, T), T)
    for b, h, j, t in torch.cartesian_prod(*(torch.arange(n) for n in rows.shape[:4])).tolist():
        n = T - rows.shape[3] + t + 1
        rows[b, h, j, t, :n] = (k[b, h, :n] @ q[b, h * G + j, n - 1] / math.sqrt(D)).softmax(0)
    if tied:
        rows = torch.randint(0, 4, rows.shape, generator=g) / 16
    tokens = torch.randint(len(ENDS), (B, T + 6), generator=g)
    cache = CASES[case].Method(budget=budget, window=window, kernel=kernel, **knobs_of(case, prompt))
    cache.link(LAYER, LAYERS, None, w_o, None)
    y, copies, edges = [], [], [*range(0, T, chunk), T, T + 1, T + 2, T + 5, T + 6]
    for a, z in pairwise(edges):
        cache.hear(tokens[:, a:z])
        y.append(cache.attend(q[:, :, a:z], k[:, :, a:z], v[:, :, a:z], torch.arange(a, z)[None]))
        if z == T:
            assert torch.allclose(cache.rows, rows, atol=1e-6) or tied
            with pytest.MonkeyPatch.context() as patch:  # ties are not to be broken by rounding
                patch.setattr(seam, "window_rows", lambda q, k: rows)
                cache.finish_prompt()
        if z >= T:
            copies.append(deepcopy(cache))
    everything = [[Slots([*range(T)], k[b, h, :T], v[b, h, :T], torch.zeros(T)) for h in range(H)] for b in range(B)]
    slots = everything if T <= budget else slots_by_loop(case, q, k[:, :, :T], v[:, :, :T], w_o, rows, tokens, prompt)
    return Walk(slots, copies, (q, k, v), torch.cat(y, 2), edges[-5:])


def live(cache, b, h):
    """Positions, keys, values and biases of one head."""
    bias = cache.slot("bias") if "bias" in cache.slots else torch.zeros(cache.pos.shape)
    return [x[b, h, cache.pos[b, h] != NEVER] for x in (cache.pos, cache.k, cache.v, bias)]


@each_case
@each_prompt
def test_slots_equal_the_loop(case, prompt):
    slots, (cache, *_), *_ = walk(case, prompt)
    for b, h in product(range(B), range(prompt.H)):
        pos, *rest = live(cache, b, h)
        assert pos.tolist() == slots[b][h].pos
        assert all(torch.allclose(got, expected, atol=1e-5) for got, expected in zip(rest, slots[b][h][1:]))


@each_case
@each_prompt
def test_output_is_full_attention_in_the_prompt_and_then_dense_attention_over_exactly_the_slots(case, prompt):
    slots, _, (q, k, v), y, _ = walk(case, prompt)
    T, G, H = prompt.T, prompt.G, prompt.H
    for b, h, t in product(range(B), range(H), range(T + 6)):
        keys, values, bias, new = k[b, h, :t + 1], v[b, h, :t + 1], torch.zeros(t + 1), slice(T, t + 1)
        if t >= T:
            _, *head = slots[b][h]
            keys, values, bias = map(torch.cat, zip(head, (k[b, h, new], v[b, h, new], torch.zeros(t + 1 - T))))
        p = (q[b, h * G:h * G + G, t] @ keys.T / math.sqrt(D) + bias).softmax(-1)
        assert torch.allclose(y[b, h * G:h * G + G, t], p @ values, atol=1e-5), t


@each_case
@each_prompt
def test_slots_and_bytes_are_the_budget_or_less_than_a_chunk_below_it_and_decoding_only_adds(case, prompt):
    slots, copies, *_, edges = walk(case, prompt)
    T, H, deal, knobs = prompt.T, prompt.H, CASES[case].deal, knobs_of(case, prompt)
    most = min(T, prompt.budget)
    unused = knobs["chunk"] - 1 if "chunk" in knobs and not knobs.get("fill") and T > most else 0
    slot = 2 * 4 * D + 4 + 4 * ("bias" in copies[0].slots)
    table = 8 * B * H if len({len(head.pos) for row in slots for head in row}) > 1 else 0
    for cache, seen in zip(copies, edges):
        count = (cache.pos != NEVER).sum(-1) - (seen - T)
        if deal is not by_depth:
            assert ((H * (most - unused) <= count.sum(-1)) & (count.sum(-1) <= H * most)).all()
        if deal is same_for_all:
            assert ((most - unused <= count) & (count <= most)).all()
        assert (cache.pos[:, :, cache.length - (seen - T):] == torch.arange(T, seen)).all()  # absolute positions go on
        assert cache.seen == seen and cache.length == copies[0].length + seen - T
        live, allocated = cache.bytes()
        assert live == slot * (int(count.sum()) + B * H * (seen - T)) + table
        assert live <= allocated <= 1.1 * live + table


@each_case
def test_the_same_prompt_gives_the_same_cache(case):
    one, again = walk(case, PROMPTS[0]).cache[-1], walk.__wrapped__(case, PROMPTS[0]).cache[-1]
    assert torch.equal(one.pos, again.pos) and torch.equal(one.k, again.k) and torch.equal(one.v, again.v)


# ---- in the decoder ---


@each_case
@pytest.mark.parametrize("chunk", [30, 7, 1])
@torch.inference_mode()
def test_room_for_the_prompt_is_full_attention(case, chunk):
    reads_and_decodes_as_the_full_cache(CASES[case].Method, CASES[case].knobs | dict(budget=30, window=8), chunk)


@each_case
@torch.inference_mode()
def test_whatever_the_chunks_the_decoder_keeps_the_same_at_absolute_positions(case):
    model, full = decoder(), make_cache(decoder())
    model(TOKENS, full)
    runs = []
    for chunk in (35, 6, 1):
        caches = make_cache(model, CASES[case].Method, budget=14, window=5, **CASES[case].knobs)
        for part in TOKENS[:, :35].split(chunk, 1):
            model(part, caches)
        finish_prompt(caches)
        y = torch.cat([model(TOKENS[:, i:i + 1], caches) for i in range(35, 40)], 1)
        runs.append((y, [cache.pos for cache in caches]))
        assert torch.allclose(y, runs[0][0], atol=1e-4)
        assert all(torch.equal(pos, same) for pos, same in zip(runs[-1][1], runs[0][1]))
        first = caches[0]  # further up, tokens after the prompt have seen less
        exact = (first.pos != NEVER) & (first.slot("bias") == 0 if "bias" in first.slots else True)
        k = full[0].k.gather(2, first.pos.where(exact, 0).long()[..., None].expand(*first.k.shape))
        assert torch.allclose(first.k[exact], k[exact], atol=1e-5)  # rotated as if nothing had gone


# ---- budgets ---


def compress(cache, q, k, v, w_o=None, layer=0, layers=1):
    """The whole prompt at once."""
    cache.link(layer, layers, None, w_o, None)
    cache.attend(q, k, v, torch.arange(q.shape[2])[None])
    cache.finish_prompt()
    return cache


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
@pytest.mark.parametrize("beta", [1, 2, 3, 20])
def test_pyramid_keeps_what_snap_kv_keeps_in_all_layers_together(layers, beta, budget=12, window=3):
    for T in range(budget + 1, 4 * budget + 2):
        x = torch.zeros(1, 1, T, 2)
        counts = [compress(PyramidKV(budget, window, beta=beta), x, x, x, None, i, layers).length for i in range(layers)]
        assert sum(counts) == layers * budget
        assert all(a >= b for a, b in pairwise(counts)) and window <= counts[-1] and counts[0] <= T
        if layers > 1:
            scores = [[0] * (T - window)]
            assert counts == [window + by_depth(scores, budget - window, beta, i, layers)[0] for i in range(layers)]


def uneven(cache, T, H=4, G=2, d=2):
    """Head 0 attends to every token alike, the others give all their weight to token 5, exactly 0 to the rest."""
    q, k, v = torch.zeros(B, H * G, T, d), torch.zeros(B, H, T, d), torch.randn(B, H, T, d)
    q[..., 0], k[:, 1:, 5, 0] = 1, 1000
    return compress(cache, q, k, v, torch.randn(3, H * G, d))


@pytest.mark.parametrize("Method", [AdaKV, on(Critical, AdaKV), on(LeastTheta, AdaKV)])
def test_heads_of_different_length_are_not_padded(Method, d=16):
    cache, slot, table = uneven(Method(budget=40, window=8, kernel=1), 300, d=d), 2 * 4 * d + 4, B * 4 * 8
    # 0.2 · 32 = 6.4 for each, and 0.8 of the 4 · 32 highest votes: 125 of head 0 and one of each other
    assert (cache.counts == 8 + torch.tensor([107, 7, 7, 7])).all()
    for step in range(60):
        live, allocated = cache.bytes()
        padded = B * 4 * cache.length * slot
        assert live == B * 4 * (40 + step) * slot + table
        assert allocated <= 1.1 * live + table and padded > 1.3 * live
        cache.attend(torch.ones(B, 8, 1, d), *[torch.ones(B, 4, 1, d)] * 2, torch.tensor([[300 + step]]))


# ---- knobs ---


def kept(Method, **knobs):
    w_o = torch.randn(6, 4, D, generator=torch.Generator().manual_seed(0))
    cache = compress(Method(budget=20, window=8, **knobs), *walk("snap", PROMPTS[0]).raw, w_o, LAYER, LAYERS)
    return cache.pos.tolist()


@pytest.mark.parametrize("Method, knobs", [
    (Critical, dict(alpha=1.0)), (AdaKV, dict(floor=1.0)), (PyramidKV, dict(beta=1)),
    (on(Critical, AdaKV), dict(alpha=1.0, floor=1)),
])
def test_at_the_end_of_a_knob_is_snap_kv(Method, knobs):
    assert kept(Method, **knobs) == kept(SnapKV) != kept(Method)


@pytest.mark.parametrize("Method, knobs, message", [
    (SnapKV, dict(budget=8), "budget 8 must exceed the window 8"),
    (LeastTheta, dict(budget=7), "budget 7 must exceed the window 8"),
    (SnapKV, dict(window=0), "window 0"), (AdaKV, dict(kernel=2), "kernel 2"), (AdaKV, dict(kernel=-1), "kernel -1"),
    (PyramidKV, dict(beta=0), "beta 0"), (AdaKV, dict(floor=1.5), "floor 1.5"), (AdaKV, dict(floor=-0.1), "floor -0.1"),
    (Critical, dict(alpha=1.5), "alpha 1.5"), (on(Critical, AdaKV), dict(alpha=-0.5), "alpha -0.5"),
    (Residual, dict(entries=0), "entries 0"), (Residual, dict(rounds=-1), "rounds -1"),
    (Residual, dict(rounds=10**9), "rounds 1000000000 must be"), (LeastTheta, dict(steps=10**9), "steps 1000000000 must be"),
    (Residual, dict(share=0), "share 0"), (on(Residual, Critical, AdaKV), dict(share=1.5), "share 1.5"),
    (ChunkKV, dict(chunk=0), "chunk 0 .* must be at least 1"), (ChunkKV, dict(reuse=0), "reuse 0 must be at least 1"),
    (ChunkKV, dict(first=-1), "first -1 at least 0"),
    (ChunkKV, dict(score="median"), "score 'median' must be 'sum', 'mean' or 'max'"),
    (ChunkKV, dict(chunk=13), "budget 20 has no room for a chunk of 13 beside the window 8; make it at least 21, or"),
    (on(ChunkKV, AdaKV), dict(chunk=13), "budget 20 has no room for a chunk of 13"),
    (on(ChunkKV, AdaKV), dict(reuse=2), "reuse 2 needs the same budget in every layer and nothing on top"),
    (on(ChunkKV, PyramidKV), dict(reuse=2), "reuse 2 needs the same budget in every layer"),
    (on(Residual, ChunkKV), dict(reuse=2), "nothing on top of the chunks; use reuse=1 with On"),
    (SemanticChunkKV, {}, "ends must be a tensor .V,. of bool, the tokens that end a chunk; give tokenizer.boundaries"),
    (SemanticChunkKV, dict(ends=[True]), "ends .*must"), (SemanticChunkKV, dict(ends=ENDS.float()), "ends must"),
    (SemanticChunkKV, dict(ends=ENDS[None]), "ends must"),
    (SemanticChunkKV, dict(ends=ENDS, chunk=0), "chunk 0"), (SemanticChunkKV, dict(ends=ENDS, score="min"), "score 'min'"),
])
def test_bad_knobs_are_refused_at_construction(Method, knobs, message):
    with pytest.raises(ValueError, match=message):
        Method(**dict(budget=20, window=8) | knobs)


@pytest.mark.parametrize("n, H, G", [(1, 1, 1), (37, 2, 3), (601, 3, 2), (1024, 2, 1)])
def test_value_norms_are_those_of_the_projected_values_which_are_never_there_whole(n, H, G, monkeypatch):
    parts, plain = [], torch.sum
    monkeypatch.setattr(torch, "sum", lambda x, *more, **how: (parts.append(x.shape), plain(x, *more, **how))[1])
    v, w_o = torch.randn(B, H, n, D), torch.randn(40, H * G, D)
    norms = value_norms(v, w_o)
    assert norms.shape == (B, H, G, n) and max(parts) <= (1024, 40)
    for h in range(H * G):
        assert torch.allclose(norms[:, h // G, h % G], (v[:, h // G] @ w_o[:, h].T).abs().sum(-1), atol=1e-4)


# ---- residual entries ---


@pytest.mark.parametrize("case, share", [("residual", 1), ("residual 3", 0.5), ("residual on critical on ada", 1)])
def test_residual_entries_take_at_the_windows_queries_the_weight_that_the_evicted_had(case, share, T=53, w=8, G=2):
    _, (cache, *_), (q, k, v), *_ = walk(case, PROMPTS[0])
    for b in range(B):
        for h in range(2):
            pos, keys, _, biases = live(cache, b, h)
            made = biases != 0
            gone, before = set(range(T)) - set(pos[~made].tolist()), -1
            for at, key, bias in zip(pos[made].tolist(), keys[made], biases[made]):
                group, before, takes, had = [i for i in gone if before < i <= at], at, 0, 0
                for t in range(T - w, T):
                    for g in range(h * G, h * G + G):
                        logits = k[b, h, :t + 1] @ q[b, g, t] / math.sqrt(D)
                        takes += (q[b, g, t] @ key / math.sqrt(D) + bias - logits.logsumexp(0)).exp()
                        had += logits.softmax(0)[group].sum()
                assert torch.allclose(takes, share * had, rtol=1e-4)
            assert before == max(gone) and made.sum() == CASES[case].knobs["entries"]


@pytest.mark.parametrize("Method, strong, knobs", [
    (Residual, 7, {}), (Residual, 9, dict(entries=3)), (on(Residual, Critical), 7, dict(entries=2)),
    (on(Residual, AdaKV), 7, dict(entries=2, floor=0.8)),
    (Residual, 9, dict(entries=3, rounds=1)),  # k-means leaves clusters empty
])
def test_nothing_is_lost_where_the_evicted_are_all_alike(Method, strong, knobs, T=40):
    g = torch.Generator().manual_seed(0)
    q, k, v = [torch.randn(B, heads, T + 3, D, generator=g) for heads in (6, 2, 2)]
    k[:, :, strong:32], v[:, :, strong:32] = k[:, :, 31:32], v[:, :, 31:32]
    k[:, :, :strong, 0], q[..., 0] = 9, 3  # these are sure to stay
    y = []
    for cache in (Method(budget=20, window=8, kernel=1, **knobs), SnapKV(budget=T, window=8)):
        compress(cache, q[:, :, :T], k[:, :, :T], v[:, :, :T], torch.ones(6, 6, D))
        away = q[:, :, T:] * torch.tensor([-1, 1, 1, 1])  # from those that stay
        y.append(cache.attend(away, k[:, :, T:], v[:, :, T:], torch.arange(T, T + 3)[None]))
    assert torch.allclose(*y, atol=1e-5)


@pytest.mark.parametrize("T, expected", [(60, [3, 0, 0, 0]), (42, [0, 3, 3, 3])])
def test_heads_with_too_small_a_budget_and_heads_that_evict_nothing_have_no_residual_entry(T, expected):
    """Of 48 entries, head 0 gets 45 of 52 and the others 1 each; or all 34 that there are, and the others 4 or 5."""
    cache = uneven(on(Residual, AdaKV)(budget=20, window=8, kernel=1, floor=0.0, entries=3), T)
    assert ((cache.slot("bias") != 0) & (cache.pos != NEVER)).sum(-1).tolist() == [expected] * B
    assert (cache.pos != NEVER).sum((1, 2)).tolist() == [4 * 20] * B


@pytest.mark.parametrize("entries", [2, 4])
def test_a_round_of_k_means_never_widens_the_groups(entries):
    g = torch.Generator().manual_seed(0)
    k, (votes, gone) = torch.randn(B, 2, 41, D, generator=g), torch.rand(2, B, 2, 41, generator=g)
    gone = gone < 0.7
    widths = []
    for rounds in range(6):
        cache = Residual(budget=20, window=8, entries=entries, rounds=rounds)
        cache.write(k, k, torch.arange(41)[None])
        member = cache.groups(gone, votes)
        assert torch.equal(member.sum(2), gone.long())  # each evicted token in one group, no other in any
        width = 0
        for b in range(B):
            for h in range(2):
                for group in member[b, h]:
                    keys, weight = k[b, h, group], votes[b, h, group, None]
                    width += (weight * (keys - (weight * keys).sum(0) / weight.sum()) ** 2).sum().item()
        widths.append(width)
    assert all(after <= before + 1e-5 for before, after in pairwise(widths)) and widths[-1] < 0.9 * widths[0]


def test_shares_of_a_budget_are_exact_and_do_not_overflow():
    assert part_of(0.29, 100) == 29 and part_of(1 / 3, 3000) == 1000
    assert part_of(1 / 3, torch.tensor([3000, 6001])).tolist() == [1000, 2000]
    for floor in (1 / 3, 0.1 + 0.2):
        assert shared(torch.rand(1, 3, 5000), 1000, floor).sum() == 3000


# ---- whole chunks ---


@pytest.mark.claim("C1")
@pytest.mark.parametrize("kernel", [1, 7])
@pytest.mark.parametrize("score", ["sum", "mean", "max"])
def test_chunks_of_one_token_are_snap_kv(kernel, score):
    knobs = dict(kernel=kernel, score=score)
    assert kept(ChunkKV, chunk=1, **knobs) == kept(SnapKV, kernel=kernel) != kept(ChunkKV, chunk=2, **knobs)


def test_chunk_kv_sums_over_ten_unpooled_votes_and_the_semantic_one_averages_over_up_to_32_pooled_ones():
    for cache, expected in ((ChunkKV(20, 8), [1, 10, "sum"]), (SemanticChunkKV(99, 8, ends=ENDS), [7, 32, "mean"])):
        assert [cache.kernel, cache.chunk, cache.score] == expected


def test_a_chunk_may_take_all_the_room_but_more_only_where_tokens_fill_it_and_semantic_ones_are_cut_to_it():
    assert len(kept(ChunkKV, chunk=12)[0][0]) == len(kept(ChunkKV, chunk=13, fill=True)[0][0]) == 20
    assert SemanticChunkKV(20, 8, chunk=13, ends=ENDS).chunk == 12


@pytest.mark.claim("C1")
@given(st.integers(1, 40), st.integers(1, 12), st.lists(st.integers(0, 40), min_size=4, max_size=4), st.booleans(),
       st.sampled_from(["sum", "mean", "max"]), st.integers(0, 3), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_whole_chunks_are_kept_as_long_as_there_is_room(n, longest, budgets, semantic, score, grain, seed):
    g = torch.Generator().manual_seed(seed)
    votes, tokens = torch.rand(2, 2, 1, n, generator=g), torch.randint(len(ENDS), (2, n), generator=g)
    votes = (grain * votes).round() if grain else votes  # many ties, or none
    Method, ends = (SemanticChunkKV, ENDS) if semantic else (ChunkKV, ())
    cache = Method(budget=99, window=1, kernel=1, chunk=longest, score=score, **dict(ends=ENDS) if semantic else {})
    cache.hear(tokens)
    cache.seen = n
    stay = cache.select(votes, torch.tensor(budgets).view(2, 2))
    for b, h in product(range(2), range(2)):
        room = budgets[2 * b + h] - int(stay[b, h].sum())
        assert room >= 0
        for part in chunks_of(n, longest, tokens[b].tolist(), ends):
            inside = stay[b, h, part]
            assert inside.all() or not inside.any() and len(part) > room


@pytest.mark.parametrize("knobs, expected", [
    (dict(score="sum"), [*range(50, 60)]),  # the last chunk, 60 … 62, has less to sum up, and then no room
    (dict(score="mean"), [*range(55, 63)]), (dict(score="max"), [*range(55, 63)]),
    (dict(score="sum", per_head=False, fill=True), [*range(50, 60), 61, 62]),
    (dict(score="max", fill=True), [*range(51, 63)]), (dict(chunk=14, fill=True), [*range(51, 63)]),
    (dict(chunk=12), [*range(48, 60)]),
])
def test_of_equal_chunks_and_tokens_the_newest_stay(knobs, expected, T=64):
    """Every token has a vote of 1/64, exactly."""
    x = torch.zeros(1, 2, T, D)
    cache = compress(ChunkKV(**dict(budget=13, window=1, chunk=5) | knobs), x, x, x)
    assert cache.pos.tolist() == [[[*expected, 63]] * 2]


def test_a_head_whose_share_is_less_than_a_chunk_keeps_the_window_alone():
    knobs = dict(budget=40, window=8, kernel=1, chunk=8)  # 37 chunks, none of them short
    assert (uneven(on(ChunkKV, AdaKV)(**knobs), 304).counts == 8 + torch.tensor([104, 0, 0, 0])).all()  # of 107 and 7
    assert (uneven(on(ChunkKV, AdaKV)(**knobs, fill=True), 304).counts == 8 + torch.tensor([107, 7, 7, 7])).all()


# ---- indices that serve several layers ---


PROMPT, ROOM = TOKENS[:, :35], dict(budget=14, window=5)


def reads(Method, parts=PROMPT.split(11, 1), **knobs):
    """The caches of five layers once they have read the prompt."""
    model = decoder(n_layers=5)
    caches = make_cache(model, Method, **knobs)
    with torch.inference_mode():
        for part in parts:
            model(part, caches)
    return caches


@pytest.mark.parametrize("reuse, first, leaders", [
    (1, 0, [0, 1, 2, 3, 4]), (1, 2, [0, 1, 2, 3, 4]), (2, 0, [0, 0, 2, 2, 4]), (2, 1, [0, 1, 1, 3, 3]),
    (2, 2, [0, 1, 2, 2, 4]), (2, 9, [0, 1, 2, 3, 4]), (4, 0, [0, 0, 0, 0, 4]), (4, 1, [0, 1, 1, 1, 1]),
    (4, 2, [0, 1, 2, 2, 2]), (9, 0, [0, 0, 0, 0, 0])])
@pytest.mark.parametrize("Method, more", [(ChunkKV, dict(chunk=4)), (ChunkKV, dict(chunk=2, fill=True, per_head=False)),
                                          (SemanticChunkKV, dict(chunk=5, ends=ENDS))])
@torch.inference_mode()
def test_layers_of_a_group_take_the_lowest_ones_indices_without_scores(reuse, first, leaders, Method, more, monkeypatch):
    selects = [leader == layer for layer, leader in enumerate(leaders)]
    alone, calls, plain = reads(Method, **ROOM, **more), [], seam.probabilities
    monkeypatch.setattr(seam, "probabilities", lambda *x: calls.append(x) or plain(*x))
    caches = reads(Method, **ROOM, **more, reuse=reuse, first=first)
    assert [cache.voters for cache in caches] == [5 * own for own in selects]
    assert [cache.queries is not None for cache in caches] == selects
    full = reads(LayerCache)
    finish_prompt(alone)
    calls.clear()
    finish_prompt(caches)
    for layer, (cache, memory) in enumerate(zip(caches, full)):
        assert torch.equal(cache.pos, alone[leaders[layer]].pos)  # up to here all have read the same
        i = torch.where(cache.pos == NEVER, -1, cache.pos).long()
        assert bool(cache.packed) == ("ends" in more)  # then heads keep unlike numbers
        memory.keep(i)
    assert len({str(alone[layer].pos.tolist()) for layer in {*leaders}}) == len({*leaders})
    model = decoder(n_layers=5)
    for t in range(35, 40):  # each layer's own keys and values at these places
        assert torch.allclose(model(TOKENS[:, t:t + 1], caches), model(TOKENS[:, t:t + 1], full), atol=1e-4)
    assert len(calls) == sum(selects)


@pytest.mark.parametrize("chunk", [30, 7, 1])
@pytest.mark.parametrize("reuse, first", [(2, 0), (4, 1)])
@torch.inference_mode()
def test_layers_that_follow_evict_nothing_where_there_is_room(chunk, reuse, first):
    knobs = dict(budget=30, window=8, chunk=5, reuse=reuse, first=first)
    reads_and_decodes_as_the_full_cache(ChunkKV, knobs, chunk)


# ---- chunks that end where the text says ---


@pytest.mark.parametrize("chunk", [35, 6, 1])
def test_each_row_has_its_own_cuts_whatever_it_is_read_with(chunk):
    knobs = ROOM | dict(ends=ENDS, chunk=5)
    together = reads(SemanticChunkKV, PROMPT.split(chunk, 1), **knobs)
    finish_prompt(together)
    cuts = [chunks_of(30, 5, row, ENDS) for row in PROMPT.tolist()]
    assert cuts[0] != cuts[1]
    for b, parts in enumerate(cuts):
        alone = reads(SemanticChunkKV, [PROMPT[b:b + 1]], **knobs)
        finish_prompt(alone)
        for cache, own in zip(together, alone):
            assert cache.heard == own.heard == []
            for h in range(2):
                there = live(cache, b, h)[0].tolist()
                assert there == live(own, 0, h)[0].tolist() and there[-5:] == [*range(30, 35)]
                assert all(len({*part} & {*there}) in (0, len(part)) for part in parts)


def test_what_is_written_after_the_prompt_is_not_heard():
    cache = SemanticChunkKV(budget=20, window=8, ends=ENDS)
    cache.hear(TOKENS[:, :9])
    cache.hear(TOKENS[:, 9:10])
    assert torch.equal(torch.cat(cache.heard, 1), TOKENS[:, :10] % 6 == 0)
    cache.finish_prompt()
    cache.hear(TOKENS[:, 10:11])
    assert cache.heard == []


@pytest.mark.parametrize("times", [0, 2])
def test_chunks_are_not_cut_by_a_text_that_was_not_heard_once(times):
    cache = SemanticChunkKV(budget=20, window=8, ends=ENDS)
    for _ in range(times):
        cache.hear(TOKENS[:, :35])
    cache.attend(*torch.randn(3, B, 2, 35, D), torch.arange(35)[None])
    with pytest.raises(ValueError, match=f"{35 * times} tokens were heard and 35 seen; call cache.hear"):
        cache.finish_prompt()


def test_a_layer_that_follows_cannot_finish_before_the_one_below():
    caches = reads(ChunkKV, chunk=4, reuse=2, **ROOM)
    with pytest.raises(ValueError, match="layer 1 takes the indices of layer 0, whose prompt is not over"):
        caches[1].finish_prompt()


@torch.inference_mode()
def test_a_text_may_begin_anywhere_for_layers_that_follow():
    model, knobs = decoder(n_layers=2), dict(chunk=4, reuse=2, **ROOM)
    caches = make_cache(model, ChunkKV, **knobs)
    model(PROMPT, caches, pos=torch.arange(9, 44)[None])
    k = caches[1].k
    finish_prompt(caches)
    for b, h in product(range(2), range(2)):
        pos, keys, *_ = live(caches[1], b, h)
        assert pos.tolist() == live(caches[0], b, h)[0].tolist() and torch.equal(keys, k[b, h, pos.long() - 9])
