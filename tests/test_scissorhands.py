"""Scissorhands: what stays against loops over single tokens, what attention sees then, and that the budget always holds;
Algorithm 2 on weights whose ranking is stable: where counts keep the largest, and where they cannot."""
from collections import defaultdict, deque
from functools import cache as once
from itertools import pairwise
import math
import random
from typing import NamedTuple

import pytest
import torch

from methods.scissorhands import BudgetCache, MeanWeight, Scissorhands
from nanollm.cache import finish_prompt, make_cache
from nanollm.generate import generate
from test_methods import B, D, G, H, SLOT, TOKENS, decoder, reads_and_decodes_as_the_full_cache, turn

T = 80


# ---- Algorithm 1 token by token: one key/value head, its group's query heads share its entries ---


class Counts:
    """I_j: at how many of the last w steps entry j was there and had less than 1/s of the attention."""

    def __init__(self, history):
        self.last = deque(maxlen=history)

    def see(self, s, alpha):
        self.last.append({j for j, weight in alpha.items() if weight < 1 / s})

    def __call__(self, j):
        return -sum(j in unimportant for unimportant in self.last)


class Means:
    """The mean of all weights that an entry has had, its own query's included."""

    def __init__(self):
        self.had = defaultdict(list)

    def see(self, s, alpha):
        for j, weight in alpha.items():
            self.had[j].append(weight)

    def __call__(self, j):
        return sum(self.had[j]) / len(self.had[j])


class Token(NamedTuple):
    kept: list         # positions, itself included
    importance: list
    y: torch.Tensor    # (G, D)


def algorithm_1(q, k, v, importance, budget, recent, at_a_time):
    """q (G, T, D), k and v (T, D); each token finds room, then attends to what is there."""
    kept = []
    for t in range(len(k)):
        if len(kept) == budget:
            old = kept[:budget - recent]
            leave = sorted(old, key=lambda j: (importance(j), j))[:at_a_time]
            kept = [j for j in kept if j not in leave]
        kept = [*kept, t]
        alpha = (q[:, t] @ k[kept].T / math.sqrt(D)).softmax(-1)  # (G, n)
        importance.see(t + 1, dict(zip(kept, alpha.mean(0).tolist())))
        yield Token(kept, [importance(j) for j in kept], alpha @ v[kept])


# budget, recent, at_a_time, and history for counts
SCISSORHANDS = {
    "all history": (12, 3, 4, 400),
    "history of 10": (12, 3, 4, 10),
    "history below m": (12, 2, 6, 5),
    "history of 1": (9, 3, 2, 1),
    "one at a time": (10, 0, 1, 16),
    "one at a time, short": (10, 4, 1, 7),
    "r + m = B": (10, 4, 6, 13),
    "all but the newest": (8, 1, 7, 3),
    "everything leaves": (8, 0, 8, 8),
    "one slot": (1, 0, 1, 4),
    "half": (24, 5, None, 31),
}
MEAN_WEIGHT = {
    "default m": (12, 3),
    "one at a time": (10, 0, 1),
    "r + m = B": (10, 4, 6),
    "everything leaves": (8, 0, 8),
    "large": (30, 5, 3),
}
CASES = {("counts", name): (Scissorhands, dict(zip(("budget", "recent", "at_a_time", "history"), knobs)))
         for name, knobs in SCISSORHANDS.items()}
CASES |= {("means", name): (MeanWeight, dict(zip(("budget", "recent", "at_a_time"), knobs)))
          for name, knobs in MEAN_WEIGHT.items()}
each_case = pytest.mark.parametrize("case", CASES, ids=" ".join)
# prompt tokens, how many come at a time before its end, and after it
each_walk = pytest.mark.parametrize("prompt, chunk, block", [(35, 1, 1), (35, 7, 7), (T, T, T), (35, 35, T), (1, 1, 16)])


@once
def text():
    """Rotated q and k, and v; sharp attention, so that counts differ."""
    g = torch.Generator().manual_seed(0)
    q, k, v = [torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H)]
    return turn(3 * q, torch.arange(T)), turn(k, torch.arange(T)), v


@once
def expected(case):
    """[b][h][t]: what the loop has at each token."""
    Method, knobs = CASES[case]
    knobs = dict(knobs)
    m = knobs.pop("at_a_time", 8)
    importance = (lambda: Counts(knobs["history"])) if Method is Scissorhands else Means
    q, k, v = (x.double() for x in text())
    return [[[*algorithm_1(q[b, h * G:(h + 1) * G], k[b, h], v[b, h], importance(), knobs["budget"], knobs["recent"],
                           knobs["budget"] // 2 if m is None else m)] for h in range(H)] for b in range(B)]


class Step(NamedTuple):
    part: range
    pos: torch.Tensor         # slots in the order of their tokens
    importance: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    y: torch.Tensor


@once
def walk(case, prompt, chunk, block):
    """Feed the text in parts, and look at the cache after each."""
    q, k, v = text()
    Method, knobs = CASES[case]
    cache, steps = Method(**knobs), []
    for part in parts(prompt, chunk, block):
        i = slice(part.start, part.stop)
        y = cache.attend(q[:, :, i], k[:, :, i], v[:, :, i], torch.arange(part.start, part.stop)[None])
        if part.stop == prompt:
            cache.finish_prompt()
        pos, order = cache.pos.sort(-1)
        wide = order[..., None].expand(B, H, len(order[0, 0]), D)
        steps.append(Step(part, pos, cache.importance().gather(-1, order), cache.k.gather(2, wide), cache.v.gather(2, wide), y))
    return steps


def parts(prompt, chunk, block):
    edges = sorted({*range(0, prompt, chunk), *range(prompt, T, block), T})
    return [range(a, b) for a, b in pairwise(edges)]


@each_case
@each_walk
def test_kept_tokens_and_their_importance_equal_the_loop_however_the_text_is_cut(case, prompt, chunk, block):
    for step in walk(case, prompt, chunk, block):
        now = [[head[step.part.stop - 1] for head in row] for row in expected(case)]
        assert step.pos.tolist() == [[token.kept for token in row] for row in now], step.part
        importance = torch.tensor([[token.importance for token in row] for row in now], dtype=torch.float32)
        assert torch.allclose(step.importance, importance, atol=1e-5), step.part


@each_case
@each_walk
def test_every_query_attends_to_exactly_the_entries_of_the_loop_and_itself(case, prompt, chunk, block):
    y = torch.cat([step.y for step in walk(case, prompt, chunk, block)], 2).double()
    dense = torch.stack([torch.cat([torch.stack([token.y for token in head], 1) for head in row]) for row in expected(case)])
    assert torch.allclose(y, dense, atol=1e-5)


@each_case
@each_walk
def test_positions_and_rotated_keys_stay_those_of_the_text(case, prompt, chunk, block):
    _, k, v = text()
    for step in walk(case, prompt, chunk, block):
        at = step.pos.long()[..., None].expand_as(step.k)
        assert torch.equal(step.k, k.gather(2, at)) and torch.equal(step.v, v.gather(2, at)), step.part


# ---- in the decoder ---


each_method = pytest.mark.parametrize("Method, knobs", [(Scissorhands, {}), (Scissorhands, dict(history=5)), (MeanWeight, {})])


@each_method
@pytest.mark.parametrize("chunk", [30, 7, 1])
@torch.inference_mode()
def test_room_for_everything_is_full_attention(Method, knobs, chunk):
    reads_and_decodes_as_the_full_cache(Method, knobs | dict(budget=40), chunk)


def read(model, chunk, *method, **knobs):
    """TOKENS, logits and caches."""
    caches = make_cache(model, *method, **knobs)
    return torch.cat([model(part, caches) for part in TOKENS.split(chunk, 1)], 1), caches


@each_method
@torch.inference_mode()
def test_all_layers_read_in_chunks_what_they_read_token_by_token_and_the_first_keeps_the_full_caches_keys(Method, knobs):
    model = decoder()
    for block in model.blocks:
        block.attention.split(block.attention.qkv.weight)[0].mul_(8)  # sharp attention: else all counts are 0
    knobs = knobs | dict(budget=9, recent=2, at_a_time=3)
    alone, caches = read(model, 1, Method, **knobs)
    _, full = read(model, 40)
    at = caches[0].pos.long()[..., None].expand_as(caches[0].k)
    assert all((cache.pos < 31).any() for cache in caches)  # not just the newest 9
    assert torch.allclose(caches[0].k, full[0].k.gather(2, at), atol=1e-5)
    for chunk in (7, 40):
        together, others = read(model, chunk, Method, **knobs)
        assert torch.allclose(together, alone, atol=1e-5)
        assert all(torch.equal(x.pos, y.pos) for x, y in zip(caches, others))


@each_method
def test_a_prompt_of_one_token(Method, knobs):
    model = decoder()
    full = generate(model, TOKENS[:, :1], 12)
    assert torch.equal(generate(model, TOKENS[:, :1], 12, make_cache(model, Method, budget=20, **knobs)), full)
    caches = make_cache(model, Method, **knobs | dict(budget=6, recent=1, at_a_time=3))
    assert generate(model, TOKENS[:, :1], 12, caches).shape == (2, 12)
    assert [(cache.length, cache.seen) for cache in caches] == [(6, 12)] * 3  # 6, 4 5 6, 4 5 6


@pytest.mark.parametrize("Method, knobs, slot", [(Scissorhands, dict(history=100), SLOT + 4 + 13),
                                                 (Scissorhands, dict(history=8), SLOT + 4 + 1), (MeanWeight, {}, SLOT + 4)])
@torch.inference_mode()
def test_a_stream_never_exceeds_the_budget_at_any_moment_and_costs_the_same_late_as_early(Method, knobs, slot):
    budget, m, heads = 64, 20, 2

    class Watched(Method):
        """Looks at itself before attention, after it, and at how many slots each query attends to."""

        def __post_init__(self):
            super().__post_init__()
            self.read_at = {}

        def within(self):
            live, allocated = self.bytes()
            assert self.length <= budget
            assert live == heads * self.length * slot <= allocated <= heads * budget * slot

        def write(self, k, v, pos):
            super().write(k, v, pos)
            self.within()

        def read(self):
            seen = super().read()
            self.read_at[self.seen] = seen[0].shape[2]
            return seen

        def observe(self, q, p):
            assert p.shape[-1] == self.length
            super().observe(q, p)
            self.within()

    model = decoder(max_len=2048, n_layers=1)
    tokens = torch.randint(0, 50, (1, 2000), generator=torch.Generator().manual_seed(2))
    caches = make_cache(model, Watched, budget=budget, at_a_time=m, **knobs)
    for part in tokens.split([1, 90, 7, 102, *[1] * 1800], 1):
        model(part, caches)
        caches[0].within()
    assert [*caches[0].read_at][:12] == [1, 64, 84, 91, 98, 104, 124, 144, 164, 184, 200, 201]  # as few pieces as room allows
    early, late = ([caches[0].read_at[t + 1] for t in range(*span)] for span in ((200, 600), (1600, 2000)))
    assert caches[0].seen == 2000 and early == late and sorted({*late}) == [*range(budget - m + 1, budget + 1)]


# ---- ties ---


def weigh(cache, strength, group=2, chunk=1):
    """Tokens whose weights are in proportion to `strength`, whatever the query; yields what is kept after each part."""
    k = torch.zeros(1, 1, len(strength), D)
    k[..., 0] = torch.tensor(strength).log()
    q = torch.zeros(1, group, len(strength), D)
    q[..., 0] = math.sqrt(D)
    for part in torch.arange(len(strength)).split(chunk):
        cache.attend(q[:, :, part], k[:, :, part], k[:, :, part], part[None])
        yield cache.pos.sort(-1).values.flatten().tolist()


@pytest.mark.parametrize("chunk", [1, 5, 40])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_of_equal_counts_the_oldest_leave_and_the_newest_stay(m, chunk):
    """All weights are 1/n, never below 1/s: no count ever differs from 0."""
    cache, kept, expected = Scissorhands(budget=8, recent=0, at_a_time=m), [], []
    for t in range(40):
        kept = [*kept[m if len(kept) == 8 else 0:], t]
        expected.append(kept)
    for n, kept in enumerate(weigh(cache, [1.0] * 40, chunk=chunk), 1):
        assert kept == expected[min(chunk * n, 40) - 1]
        assert (cache.importance() == 0).all()


@pytest.mark.parametrize("m", [1, 3])
def test_of_equal_mean_weights_the_oldest_leave_and_the_newest_stay(m):
    """All weight goes to token 2, to the others exactly 0; tokens 0 and 1 had theirs before it came."""
    strength = [1e-30, 1e-30, 1e30] + [1e-30] * 20
    *_, kept = weigh(MeanWeight(budget=6 + m, recent=0, at_a_time=m), strength)
    assert kept[:3] == [0, 1, 2] and kept[3:] == [*range(23 - len(kept) + 3, 23)] and len(kept) > 6


# ---- Algorithm 2, m = 1: weights α_{t,j} ∝ v_j, whose ranking is stable ---


def largest_so_far(v, budget):
    """After each token: it and, of those before, the budget − 1 largest."""
    return [sorted([*sorted(range(t), key=v.__getitem__)[-(budget - 1):], t]) for t in range(len(v))]


@pytest.mark.claim("S2")
@pytest.mark.parametrize("history", [1, 5, 400])
@pytest.mark.parametrize("seed", range(4))
def test_counts_keep_exactly_the_largest_where_these_lie_above_1_over_t_and_the_others_below(seed, history):
    budget, n = 6, 60
    strong = {0, *random.Random(seed).sample(range(2 * budget, n), budget - 2)}
    v = [random.Random(100 * seed + t).uniform(1, 1.5) if t in strong else 1e-3 * (1 + t / n) for t in range(n)]
    kept = [*weigh(Scissorhands(budget=budget, recent=0, at_a_time=1, history=history), v)]
    for s, entries in enumerate(kept, 1):
        total = sum(v[j] for j in entries)
        assert all((v[j] / total >= 1 / s) == (j in strong) for j in entries)  # the premise
    assert kept == largest_so_far(v, budget)


@pytest.mark.claim("S2")
@pytest.mark.parametrize("history", [1, 5, 400])
@pytest.mark.parametrize("seed", range(4))
def test_counts_keep_the_newest_where_all_but_one_lie_below_1_over_t(seed, history):
    """Mean weights keep the largest here, where strengths are far apart; not in general, as earlier entries had larger shares."""
    budget, n = 6, 60
    order = random.Random(seed).sample(range(n - 1), n - 1)
    v = [1.0] + [1e-3 * 0.9 ** rank for rank in order]
    counts = [*weigh(Scissorhands(budget=budget, recent=0, at_a_time=1, history=history), v)]
    means = [*weigh(MeanWeight(budget=budget, recent=0, at_a_time=1), v)]
    assert counts == [[0, *range(max(1, t - budget + 2), t + 1)] for t in range(n)]
    assert means == largest_so_far(v, budget) != counts


# ---- knobs ---


def test_defaults_are_the_papers():
    cache = Scissorhands(budget=101)
    assert (cache.recent, cache.at_a_time, cache.history) == (10, 50, 400)
    assert (Scissorhands(budget=14).at_a_time, Scissorhands(budget=1, recent=0).at_a_time) == (4, 1)  # the newest stay


@torch.inference_mode()
def test_a_budget_cache_by_itself_is_a_sliding_window():
    _, caches = read(decoder(), 7, BudgetCache, budget=9, recent=2, at_a_time=1)
    assert all((cache.pos.sort(-1).values == torch.arange(31, 40)).all() for cache in caches)


@pytest.mark.parametrize("Method, knobs, message", [
    (Scissorhands, dict(budget=20, recent=-1), "recent -1 must be at least 0"),
    (Scissorhands, dict(budget=20, at_a_time=0), "at_a_time 0 at least 1"),
    (Scissorhands, dict(budget=0, recent=0), "budget 0 must be at least 1: the newest 0 stay and 1 leave"),
    (Scissorhands, dict(budget=10), "budget 10 must be at least 11: the newest 10 stay and 1 leave"),
    (Scissorhands, dict(budget=20, history=0), "history 0 must be at least 1"),
    (MeanWeight, dict(budget=17), "budget 17 must be at least 18: the newest 10 stay and 8 leave"),
    (MeanWeight, dict(budget=20, recent=-1), "recent -1 must be at least 0"),
])
def test_bad_knobs_are_refused_at_construction(Method, knobs, message):
    with pytest.raises(ValueError, match=message):
        Method(**knobs)
