"""Compare KVReviver and our repairs with loops: sketch, cache, hashes and memory."""

from functools import cache as once
from itertools import combinations, pairwise, product
import math

import numpy as np
import pytest
import torch

from common import TOKENS, decoder, end
from exact import F64, near, random
from methods.baselines.count_sketch import PRIME, Sketch
from methods.kv_reviver import KVReviver
from methods.ours.kv_reviver_shrunk import (
    MeanReviver,
    MeanSketch,
    ShrunkReviver,
    ShrunkSketch,
    SignedReviver,
    SignedSketch,
)
from nanollm.cache import LayerCache, make_cache
from nanollm.generate import generate

B, H, G, D = 2, 2, 3, 4
EACH = list(product(range(B), range(H)))


class Lists:
    """Algorithms 1 and 2 for one head: r rows of b slots; a slot is an array of 2D numbers."""

    def __init__(self, sketch):
        self.kind, self.r, self.b = type(sketch), sketch.rows, sketch.width
        self.x, self.total, self.inside = (
            np.zeros((self.r, self.b, 2 * D)),
            np.zeros(2 * D),
            set(),
        )
        by = sketch.bucket_by.T.tolist(), sketch.sign_by.T.tolist()
        number = lambda c, J: (c[0] * J**3 + c[1] * J**2 + c[2] * J + c[3]) % PRIME
        self.h = once(lambda i, J: number(by[0][i], J) % self.b)
        self.g = once(lambda i, J: (1, -1)[number(by[1][i], J) % 2])

    def signed(self, i, J, x):
        sign = self.g(i, J)
        return np.concatenate(
            (x[:D] * (1 if self.kind in (Sketch, MeanSketch) else sign), x[D:] * sign)
        )

    def insert(self, J, x, times=1):
        for i in range(self.r):
            self.x[i, self.h(i, J)] += times * self.signed(i, J, x)
        self.total += times * x
        self.inside ^= {J}

    def query(self, J):
        mean, factor, rows = 0.0, 1.0, []
        if self.kind is ShrunkSketch:
            variance = 1 if self.r == 1 else 1 - math.sqrt(3) / math.pi
            factor = 1 / (1 + variance * (len(self.inside) - 1) / self.b)
            mean = self.total / len(self.inside)
        for i in range(self.r):
            slot = self.h(i, J)
            there = [other for other in self.inside if self.h(i, other) == slot]
            x = self.x[i, slot] / (len(there) if self.kind is MeanSketch else 1)
            rows.append(
                self.signed(i, J, x - sum(self.g(i, other) for other in there) * mean)
            )
        return mean + factor * np.sort(rows, 0)[self.r // 2]

    def is_in(self, x):
        return np.allclose(x, self.x.reshape(-1, 2 * D), rtol=0, atol=1e-9)


@pytest.mark.claim("R1")
def test_over_the_seeds_pairs_fall_independently_and_signs_apart():
    """Over the seeds, slots and signs are uniform and pairwise independent, within and between rows."""
    like, J, width = (
        torch.zeros(1, 1, 1, 1),
        torch.tensor([[[0, 1, 2, 7, 100, 101, 2000]]]),
        5,
    )
    drawn = [Sketch(like, 3, width, seed) for seed in range(1500)]
    bucket = torch.stack(
        [s.bucket(J)[0, 0].T - width * torch.arange(3)[:, None] for s in drawn]
    )
    sign = torch.stack([1.0 - 2 * s.sign_bit(J)[0, 0].T for s in drawn])
    assert near(sign, 0) and all(
        near((bucket == slot).float(), 1 / width) for slot in range(width)
    )
    for i, j in combinations(range(7), 2):
        together, apart = (
            (bucket[..., i] == bucket[..., j]).float(),
            sign[..., i] * sign[..., j],
        )
        assert (
            near(together, 1 / width) and near(apart, 0) and near(together * apart, 0)
        )
        assert near(sign[..., i] * (bucket[..., j] == 0), 0) and near(
            sign[..., j] * (bucket[..., j] == 0), 0
        )
    for row, other in combinations(range(3), 2):
        assert near((bucket[:, row] == bucket[:, other]).float(), 1 / width)
        assert near(sign[:, row] * sign[:, other], 0)


@pytest.mark.claim("R1")
def test_linear_hashes_would_bias_what_is_read(note):
    """With linear hashes the median of a sketch is biased over the seeds; with cubic hashes it is not.

    Twelve ones are in one slot per row, with signs.
    """
    J, ones, error = (
        torch.arange(12).view(1, 1, -1),
        torch.ones(1, 1, 12, 1, dtype=F64),
        [],
    )
    for seed, cubic in product(range(800), (False, True)):
        sketch = SignedSketch(ones, 3, 1, seed)
        sketch.sign_by[:2] *= cubic
        sketch.insert(J, ones, ones)
        error.append(sketch.query(J)[1].mean() - 1)
    error = torch.stack(error).view(-1, 2)
    (linear, cubic), (spread, around) = (
        error.mean(0).tolist(),
        (error.std(0) / math.sqrt(800)).tolist(),
    )
    assert linear < -5 * spread and abs(cubic) < 4 * around
    note("R1", linear=linear, cubic=cubic, around=around)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits_the_mean_is_exact_and_the_budget_holds(dtype):
    """In 16 bits the stored mean is exact, and a head's bytes stay within its budget."""
    J, k = torch.arange(600).view(1, 1, -1), (1 + random(1, 1, 600, 4) / 4).to(dtype)
    sketch = ShrunkSketch(k, 1, 3, 0)
    for one, x in zip(J.split(1, 2), k.split(1, 2)):
        sketch.insert(one, x, -x)
    assert torch.allclose(
        sketch.sum[0, 0, :4].double() / 600, k[0, 0].double().mean(0), atol=1e-4
    )
    q, k, v = texts(66, dtype)
    for Method in (KVReviver, MeanReviver, ShrunkReviver):
        cache = Method(40, slack=0)
        for part in parts_of(66, 60):
            step(cache, q, k, v, part, 60)
        # 20 bytes per entry
        assert 40 * 20 - 20 - 3 * 16 < cache.bytes()[0] / B / H <= 40 * 20


# ---- the cache against Algorithm 3 ---


def by_hand(seen, Method, budget, vague=0.1, recent=0.45, rows=3, slack=8, **_):
    """Return the slots of a row, of Recent and of Candidate, and the sketch's bytes; a number has 8
    bytes."""
    vector, entry = 2 * D * 8, 2 * D * 8 + 4
    width = max(1, math.floor(vague * budget * entry / (rows * vector))) if vague else 0
    sketch = rows * width * vector + (
        vector if Method is ShrunkReviver and width else 0
    )
    slots = math.floor((budget * entry - sketch - 4 * seen) / entry) - slack
    newest = round(slots * recent / (1 - vague))
    return width, newest, slots - newest, sketch


class Head:
    """Algorithms 3 and 4 for one head, token by token. Recent is cut back when all exact slots are full."""

    def __init__(self, Method, options):
        self.Method, self.options, self.lists, self.swaps = Method, options, None, 0
        self.recent, self.candidate, self.vague, self.exact, self.score, self.seen = (
            [],
            [],
            [],
            {},
            {},
            {},
        )

    def attend(self, q, x, part):
        """Return the outputs (G, T, D) of a part's tokens: q (G, T, D), x = [k, v] (T, 2D)."""
        self.recent += part
        for what in self.exact, self.seen:
            what |= dict(zip(part, x))
        self.score |= dict.fromkeys(part, 0.0)
        at, x, y = (
            np.array([*self.seen]),
            np.stack([*self.seen.values()]),
            np.zeros(q.shape),
        )
        for g, (n, t) in product(range(len(q)), enumerate(part)):
            weight = np.exp(x[:, :D] @ q[g, n] / math.sqrt(D)) * (at <= t)
            weight /= weight.sum()
            y[g, n] = weight @ x[:, D:]
            for J, w in zip(at, weight):
                self.score[J] += w
        return y

    def rank(self, J):
        return self.score[J], J

    def compress(self, seen, sketch):
        _, newest, candidates, _ = by_hand(seen, self.Method, **self.options)
        if len(self.exact) > newest + candidates + self.options["slack"]:
            n = max(len(self.recent) - newest, 0)
            self.candidate = sorted(self.candidate + self.recent[:n], key=self.rank)
            self.recent = self.recent[n:]
            while len(self.candidate) > candidates:
                J = self.candidate.pop(0)
                x = self.exact.pop(J)
                if self.options["vague"]:
                    self.lists = self.lists or Lists(sketch)
                    self.lists.insert(J, x)
                    self.vague.append(J)
        while self.vague:
            J, best = min(self.candidate, key=self.rank), max(self.vague, key=self.rank)
            if not self.score[J] * self.options["replace_rate"] < self.score[best]:
                break
            x = self.lists.query(best)
            self.lists.insert(best, x, -1)
            self.lists.insert(J, self.exact.pop(J))
            self.exact[best] = x
            (
                self.candidate[self.candidate.index(J)],
                self.vague[self.vague.index(best)],
            ) = best, J
            self.swaps += 1
        self.seen = self.exact | {J: self.lists.query(J) for J in self.vague}


def texts(T, dtype=F64):
    """Return random q, k, v; from token 36 on, queries attend to tokens that earlier queries avoided."""
    q, k, v = [
        random(B, heads, T, D, seed=seed) for seed, heads in enumerate((H * G, H, H))
    ]
    k[:, :, :20:2] += 1
    q += torch.where(torch.arange(T) < 36, -1, 2).unsqueeze(1)
    return [x.to(dtype) for x in (q, k, v)]


def parts_of(T, prompt, chunk=None, block=1):
    starts = *range(0, prompt, chunk or prompt), *range(prompt, T, block), T
    return [range(a, b) for a, b in pairwise(starts)]


def step(cache, q, k, v, part, prompt):
    i = slice(part.start, part.stop)
    y = cache.attend(
        q[:, :, i], k[:, :, i], v[:, :, i], torch.arange(part.start, part.stop)[None]
    )
    if part.stop == prompt:
        end(cache)
    return y


OPTIONS = dict(budget=26, vague=0.3, recent=0.3, slack=2, replace_rate=1.1, rows=3)
# tokens of the prompt; per part in it; after it
WHOLE, PARTS, SHORT = (36, 36, 1), (36, 7, 3), (3, 2, 1)
WALKS = [
    (KVReviver, WHOLE, {}),
    (KVReviver, PARTS, dict(rows=1, replace_rate=1.0, slack=0)),
    (KVReviver, SHORT, {}),
    (KVReviver, WHOLE, dict(vague=0.0)),
    (MeanReviver, WHOLE, {}),
    (MeanReviver, PARTS, dict(rows=1)),
    (SignedReviver, PARTS, dict(replace_rate=1.5)),
    (SignedReviver, WHOLE, dict(rows=1)),
    (ShrunkReviver, SHORT, dict(vague=0.02)),
    (ShrunkReviver, PARTS, {}),
    (ShrunkReviver, WHOLE, dict(rows=1, slack=4)),
]


@pytest.mark.parametrize("Method, walk, changed", WALKS)
@pytest.mark.claim("R2", "R3")
def test_the_cache_is_the_loop_at_every_step(Method, walk, changed, note, T=50):
    """After every step, exact and vague tokens, outputs, scores, sketch and bytes equal the loop's."""
    note("R2", walks=len(WALKS))
    options, (q, k, v), prompt = OPTIONS | changed, texts(T), walk[0]
    cache, heads, entry = (
        Method(**options),
        {at: Head(Method, options) for at in EACH},
        2 * D * 8 + 4,
    )
    for part in parts_of(T, *walk):
        y = step(cache, q, k, v, part, prompt).unflatten(1, (H, G))
        assert cache.cached_vague is None  # `bytes` does not count it
        keys, values, pos, bias = cache.read()
        for at, head in heads.items():
            asked, x = (
                x[at][..., part, :].numpy()
                for x in (q.unflatten(1, (H, G)), torch.cat((k, v), -1))
            )
            assert np.allclose(y[at], head.attend(asked, x, part), atol=1e-5), part
            if part.stop >= prompt:
                head.compress(part.stop, cache.sketch)
            assert sorted(cache.pos[at].tolist()) == sorted(head.exact)
            assert not head.lists or cache.vague_tokens()[at].tolist() == sorted(
                head.vague
            )
            assert not head.lists or head.lists.is_in(cache.sketch.x[at])
            read = dict(zip(pos[at].tolist(), torch.cat((keys, values), -1)[at]))
            assert head.seen.keys() == read.keys() and (
                not options["vague"] or len(read) == part.stop
            )
            assert all(np.allclose(x, read[J], atol=1e-9) for J, x in head.seen.items())
            score = [head.score[J] for J in range(part.stop)]
            assert cache.score[at][: part.stop].tolist() == pytest.approx(
                score, abs=1e-4
            )
        live, allocated = cache.bytes()
        width, newest, candidates, sketch = by_hand(part.stop, Method, **options)
        sketch *= cache.sketch is not None
        assert (
            live == B * H * (cache.length * entry + 4 * part.stop + sketch)
            and bias is None
        )
        held = [*cache.slots.values(), cache.score, *cache.beside()]
        held += [cache.sketch.sum] if isinstance(cache.sketch, ShrunkSketch) else []
        assert live <= allocated == sum(x.nbytes for x in held)
        if part.stop >= prompt:
            assert live <= B * H * 26 * entry and cache.sizes() == (
                width,
                newest,
                candidates,
            )
            exact = newest + candidates
            assert min(part.stop, exact) <= cache.length <= exact + options["slack"]
    assert (cache.sketch is None) == (not options["vague"])
    assert bool(sum(head.swaps for head in heads.values())) == bool(options["vague"])


@pytest.mark.claim("R1", "R3")
def test_where_nothing_collides_compressed_attention_is_exact(note):
    text, full, cache = (
        texts(40),
        LayerCache(),
        KVReviver(8000, vague=0.9985, recent=0.0006, slack=1),
    )
    error = max(
        (step(cache, *text, part, 30) - step(full, *text, part, 30)).abs().max()
        for part in parts_of(40, 30)
    )
    most = 2e-6  # because weights have 32 bits
    assert error < most and cache.length < 12
    bucket = cache.sketch.bucket(torch.arange(40).view(1, 1, -1))[0, 0]
    assert all(len(row.unique()) == 40 for row in bucket.T)
    note("R3", most=most)


def test_seed_and_layer_decide_the_hashes_also_after_one_token():
    def buckets(seed):
        caches = make_cache(
            decoder(), KVReviver, budget=24, vague=0.2, slack=2, rows=1, seed=seed
        )
        # nothing is cached yet when the prompt ends
        generate(decoder(), TOKENS[:, :1], 30, caches)
        return [
            str(cache.sketch.bucket(torch.arange(30).view(1, 1, -1)).tolist())
            for cache in caches
        ]

    assert buckets(0) == buckets(0) and len({*buckets(0), *buckets(1)}) == 6


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rows=2), "rows 2 must be 1 or 3"),
        (dict(vague=0.5, recent=0.5), "their sum below 1"),
        (dict(replace_rate=0.9), "replace_rate 0.9"),
        (dict(budget=10), "budget 10 has no room"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        step(
            KVReviver(**dict(budget=40) | options),
            *texts(30, torch.float32),
            range(30),
            30,
        )
