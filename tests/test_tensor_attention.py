"""Tensor attention: pairs and all three caches against plain loops over pairs of tokens; what the caches hold; and Count,
against numbers counted by hand and against formulas for one query."""
from collections import Counter
import copy
from functools import cache as once
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from methods.tensor_attention import FactoredFourCache, FourCache, TwoCache, learn, match3, pairs, tensor_attention
from nanollm.cache import cache_bytes, full_cache_bytes, make_cache
from nanollm.generate import generate
from nanollm.model import Config, Decoder
from nanollm.speed import Count

B, H, G, D = 2, 2, 3, 5
N = 13

CACHES = {"four": (FourCache, {}), "two": (TwoCache, {}), "factored": (FactoredFourCache, {})}
TILES = {f"factored in tiles of {tile}": (FactoredFourCache, dict(tile=tile)) for tile in (1, 7, 26, 40, N * N, N * N + 1)}
each_cache = pytest.mark.parametrize("cache", CACHES)
each_cache_and_tile = pytest.mark.parametrize("cache", CACHES | TILES)
each_chunk = pytest.mark.parametrize("chunk", [1, 5, N])


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- loops ---


def attend_to(these, q, k1, k2, v1, v2, scale):
    """Lists of rows, q one row: softmax over `these` pairs (a, b) of k₁ₐ ∘ k₂ᵦ, and the mean of v₁ₐ ∘ v₂ᵦ."""
    score = {(a, b): scale * math.fsum(x * y * z for x, y, z in zip(q, k1[a], k2[b])) for a, b in these}
    top = max(score.values())
    weight = {pair: math.exp(s - top) for pair, s in score.items()}
    total = math.fsum(weight.values())
    return [math.fsum(w * v1[a][j] * v2[b][j] for (a, b), w in weight.items()) / total for j in range(len(q))]


def text(n=N, kind="normal"):
    """q (B, H·G, n, D), k and v (B, H, n, 2D), laid out as the decoder has them: heads inside tokens."""
    q, k, v = (random(B, n, heads, width, seed=seed).transpose(1, 2)
               for seed, (heads, width) in enumerate(((H * G, D), (H, 2 * D), (H, 2 * D))))
    if kind == "integer":  # exact even in float32, and exp of most scores would overflow, or all of a query be 0
        q, k = (8 * q).round(), (3 * k).round()
    return q, k, v


@once
def expected(n, scale, kind="normal"):
    """(B, H·G, n, D): query i attends to the pairs a, b ≤ i."""
    q, k, v = (x.tolist() for x in text(n, kind))
    halves = lambda rows: ([row[:D] for row in rows], [row[D:] for row in rows])
    return torch.tensor([[[attend_to([(a, b) for a in range(i + 1) for b in range(i + 1)],
                                     q[z][h][i], *halves(k[z][h // G]), *halves(v[z][h // G]), scale)
                           for i in range(n)] for h in range(H * G)] for z in range(B)], dtype=torch.float64)


def feed(cache, q, k, v, chunk, first=0):
    """The outputs (B, H·G, n, D) of a text that comes in chunks, at positions from `first` on."""
    pos = torch.arange(first, first + q.shape[2])[None]
    return torch.cat([cache.attend(*x) for x in zip(*(x.split(chunk, 2) for x in (q, k, v)), pos.split(chunk, 1))], 2)


def new(name, **more):
    Method, knobs = (CACHES | TILES)[name]
    return Method(**knobs, **more)


# ---- T1: pairs ---


@pytest.mark.claim("T1")
@pytest.mark.parametrize("n, m", [(3, 4), (4, 3), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_row_a_m_plus_b_of_pairs_is_the_product_of_rows_a_and_b(n, m, batch):
    x, y = random(*batch, n, D), random(*batch, m, D, seed=1)
    z = pairs(x, y)
    assert z.shape == (*batch, n * m, D)
    for a in range(n):
        for b in range(m):
            assert torch.equal(z[..., a * m + b, :], x[..., a, :] * y[..., b, :])


@pytest.mark.claim("T1")
@pytest.mark.parametrize("n, m", [(6, 6), (4, 7)])
def test_the_order_of_definition_3_1_is_a_permutation_of_the_rows_and_attention_does_not_see_any(n, m):
    k1, v1, k2, v2 = (random(2, rows, D, seed=seed) for seed, rows in enumerate((n, n, m, m)))
    q = random(2, 3, D, seed=9)
    K, V, y = pairs(k1, k2), pairs(v1, v2), tensor_attention(q, k1, k2, v1, v2)
    order = torch.tensor([a * m + b for b in range(m) for a in range(n)])  # row a + b·n
    for a in range(n):
        for b in range(m):
            assert torch.equal(K[:, order][:, a + b * n], k1[:, a] * k2[:, b])
    assert sorted(order.tolist()) == [*range(n * m)] and order.tolist() != sorted(order.tolist())
    for rows in (order, torch.randperm(n * m, generator=torch.Generator().manual_seed(0))):
        assert torch.allclose((q @ K[:, rows].mT).softmax(-1) @ V[:, rows], y, rtol=0, atol=1e-12)
        assert not torch.allclose((q @ K[:, rows].mT).softmax(-1) @ V, y, atol=1e-2)
    assert torch.allclose(tensor_attention(q, k2, k1, v2, v1), y, rtol=0, atol=1e-12)  # Def. 3.1's order, by the other one
    if n == m:
        assert not torch.allclose(tensor_attention(q, k2, k1, v1, v2), y, atol=1e-2)  # keys alone is something else


# ---- T2, T3: every cache equals the definition ---


@pytest.mark.claim("T2")
@pytest.mark.parametrize("n, m", [(6, 6), (4, 7), (1, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_tensor_attention_of_several_queries_is_the_loop_over_all_pairs(n, m, scale):
    k1, v1, k2, v2 = (random(2, 3, rows, D, seed=seed) for seed, rows in enumerate((n, n, m, m)))
    q = random(2, 3, 4, D, seed=9)
    y = tensor_attention(q if scale is None else q * scale, k1, k2, v1, v2)
    every = [(a, b) for a in range(n) for b in range(m)]
    for i in range(2):
        for j in range(3):
            for t in range(4):
                loop = attend_to(every, q[i, j, t].tolist(), *(x[i, j].tolist() for x in (k1, k2, v1, v2)), scale or 1)
                assert torch.allclose(y[i, j, t], torch.tensor(loop, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.claim("T2")
@pytest.mark.claim("T3")
@each_cache_and_tile
@each_chunk
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_every_cache_equals_the_loop_over_pairs_however_the_text_is_cut(cache, chunk, scale):
    loop = expected(N, D ** -0.5 if scale is None else scale)
    cut = [new(cache, scale=scale), new(cache, scale=scale)]
    y, single = feed(cut[0], *text(), chunk), feed(cut[1], *(x.float() for x in text()), chunk)
    assert y.dtype == torch.float64 and single.dtype == torch.float32
    assert torch.allclose(y, loop, rtol=0, atol=1e-12)
    assert torch.allclose(single.double(), loop, rtol=0, atol=2e-6)


@each_cache
def test_the_default_scale_is_that_of_the_decoder(cache):
    assert new(cache).scale is None
    assert torch.allclose(feed(new(cache), *text(), N), expected(N, D ** -0.5), rtol=0, atol=1e-12)


@pytest.mark.claim("T2")
@pytest.mark.claim("T3")
@each_cache_and_tile
def test_one_token_gives_the_product_of_its_values(cache):
    q, k, v = text(1)
    y = feed(new(cache), q, k, v, 1)
    assert torch.allclose(y, (v[..., :D] * v[..., D:]).repeat_interleave(G, 1), rtol=0, atol=1e-14)
    assert torch.allclose(y, expected(1, 1.0), rtol=0, atol=1e-12)


@each_cache_and_tile
@each_chunk
@pytest.mark.parametrize("dtype, within", [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_scores_whose_exp_overflows_or_vanishes_are_harmless(cache, chunk, dtype, within):
    """Integer scores: exact in either type, so that tolerances stay tight. But fused attention (two) scales them: some
    processors round a score s there, by up to |s|·ε, which changes its weight in that proportion."""
    q, k, v = text(kind="integer")
    k1, k2 = (x.repeat_interleave(G, 1) for x in k.chunk(2, -1))
    score = torch.einsum("zhid,zhad,zhbd->zhiab", q, k1, k2)
    score = [score[:, :, i, :i + 1, :i + 1].flatten(2) for i in range(N)]
    assert score[-1].amax() > 1000 and score[-1].amin() < -1000  # 88 overflows in float32, 709 in float64
    assert any((s.amax(-1) < -110).any() for s in score)  # all of one query's would be 0 in float32
    y = feed(new(cache, scale=1.0), *(x.to(dtype) for x in (q, k, v)), chunk)
    assert y.isfinite().all()
    if cache == "two":
        within = max(s.abs().max() for s in score).item() * torch.finfo(dtype).eps
    assert torch.allclose(y.double(), expected(N, 1.0, "integer"), rtol=0, atol=within)


@each_cache
@each_chunk
def test_positions_may_start_anywhere_and_be_given_for_every_row(cache, chunk):
    q, k, v = text()
    late, rows = new(cache), new(cache)
    assert torch.allclose(feed(late, q, k, v, chunk, first=1000), expected(N, D ** -0.5), rtol=0, atol=1e-12)
    assert late.pos.amin() == 1000 and late.pos.amax() == 1000 + N - 1
    pos = torch.arange(N).expand(B, N) + torch.tensor([[0], [7]])
    assert torch.allclose(rows.attend(q, k, v, pos), expected(N, D ** -0.5), rtol=0, atol=1e-12)
    assert torch.equal(rows.pos.amax(-1), torch.tensor([[N - 1] * H, [N + 6] * H]))


@each_cache
def test_a_copy_and_its_original_go_on_alike_and_apart(cache):
    q, k, v = text()
    cut = lambda i, j: [x[:, :, i:j] for x in (q, k, v)]
    one = new(cache)
    feed(one, *cut(0, 6), 5)
    two, three = copy.deepcopy(one), copy.deepcopy(one)
    feed(three, *(-x for x in cut(6, N)), 1)  # another text disturbs neither
    after = expected(N, D ** -0.5)[:, :, 6:]
    assert torch.equal(feed(two, *cut(6, N), 2, first=6), y := feed(one, *cut(6, N), 2, first=6))
    assert torch.allclose(y, after, rtol=0, atol=1e-12)
    assert (two.seen, two.length, two.bytes()) == (one.seen, one.length, one.bytes())


# ---- what they hold ---


@pytest.mark.claim("T2")
@pytest.mark.parametrize("cache", ["four", "factored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_after_i_tokens_the_four_matrices_hold_4_i_d_numbers_and_i_positions(cache, dtype):
    q, k, v = (x.to(dtype) for x in text())
    held = new(cache)
    for i in range(1, N + 1):
        feed(held, *(x[:, :, i - 1:i] for x in (q, k, v)), 1, first=i - 1)
        assert (held.length, held.seen) == (i, i)
        assert torch.equal(held.k, k[:, :, :i]) and torch.equal(held.v, v[:, :, :i])
        assert held.k.numel() + held.v.numel() == B * H * 4 * i * D
        assert (held.pos == torch.arange(i)).all() and held.pos.shape == (B, H, i)
        live, allocated = held.bytes()
        assert live == B * H * i * (4 * D * dtype.itemsize + 4)
        assert live <= allocated <= 1.1 * live
        assert allocated == sum(x.nbytes for x in held.slots.values())


@pytest.mark.claim("T3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_chunk
def test_after_i_tokens_the_two_matrices_hold_i_squared_pairs_and_the_four_they_are_made_of(dtype, chunk):
    q, k, v = (x.to(dtype) for x in text())
    held = TwoCache()
    assert held.bytes() == (0, 0)
    for part in torch.arange(N).split(chunk):
        feed(held, *(x[:, :, part] for x in (q, k, v)), chunk, first=int(part[0]))
        i = int(part[-1]) + 1
        assert (held.length, held.seen) == (i * i, i)
        assert held.k.shape == held.v.shape == (B, H, i * i, D) and held.pos.shape == (B, H, i * i)
        live, allocated = held.bytes()
        assert live == B * H * (i * i * (2 * D * dtype.itemsize + 4) + i * (4 * D * dtype.itemsize + 4))
        assert allocated == sum(x.nbytes for x in (*held.slots.values(), *held.tokens.slots.values()))
        assert live <= allocated <= 1.1 * live
        assert torch.equal(held.tokens.k, k[:, :, :i]) and torch.equal(held.tokens.v, v[:, :, :i])


@pytest.mark.claim("T3")
@each_chunk
def test_token_i_adds_the_2i_minus_1_pairs_whose_later_token_it_is_each_once_and_older_ones_stay(chunk):
    q, k, v = text()
    held = TwoCache()
    feed(held, q, k, v, chunk)
    later = [(i, a, b) for i in range(N) for a in range(N) for b in range(N) if max(a, b) == i]
    assert [*Counter(i for i, *_ in later).values()] == [2 * i - 1 for i in range(1, N + 1)]
    assert (held.pos == torch.tensor([i for i, *_ in later])).all()
    k1, k2, v1, v2 = (x for both in (k, v) for x in both.chunk(2, -1))
    for z in range(B):
        for h in range(H):
            rows = torch.cat((held.k[z, h], held.v[z, h]), -1).tolist()
            pair = lambda a, b: [*(k1[z, h, a] * k2[z, h, b]).tolist(), *(v1[z, h, a] * v2[z, h, b]).tolist()]
            for i in range(N):
                assert sorted(rows[i * i:(i + 1) ** 2]) == sorted(pair(a, b) for j, a, b in later if j == i)


# ---- memory while attending ---


class Largest(TorchDispatchMode):
    """The most numbers that one operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if not op.is_view:
            self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def room_for_one(cache, n, width, batch=1, heads=1, group=G):
    """A cache of n − 1 tokens with room for one more, and that one, (q, k, v, pos)."""
    q, k, v = (random(batch, count, n, size, seed=seed).float()
               for seed, (count, size) in enumerate(((heads * group, width), (heads, 2 * width), (heads, 2 * width))))
    pos = torch.arange(n)[None]
    cache.write(k[:, :, :n - 2], v[:, :, :n - 2], pos[:, :n - 2])
    cache.write(k[:, :, n - 2:n - 1], v[:, :, n - 2:n - 1], pos[:, n - 2:n - 1])
    return cache, [*(x[:, :, n - 1:] for x in (q, k, v)), pos[:, n - 1:]]


def largest(cache, n, **shape):
    cache, last = room_for_one(cache, n, **shape)
    with Largest() as made:
        cache.attend(*last)
    return made.numbers


@pytest.mark.claim("T4")
@pytest.mark.parametrize("n", [300, 111])
@pytest.mark.parametrize("tile", [1, 64, 299, 300, 301, 3000, 3299])
def test_the_factored_form_makes_no_more_scores_at_once_than_a_tile_or_a_row_of_them(tile, n):
    made = largest(FactoredFourCache(tile=tile), n, width=8)
    assert made == G * max(1, tile // n) * n <= G * max(tile, n)


@pytest.mark.claim("T4")
def test_the_factored_form_never_makes_i_squared_numbers_and_the_described_one_makes_d_times_as_many():
    n, width = 300, 8
    assert largest(FourCache(), n, width=width) == n * n * width
    assert largest(FactoredFourCache(tile=64), n, width=width) <= G * (64 + n) < n * n / 80
    several = dict(batch=B, heads=H, width=width)
    assert largest(FourCache(), n, **several) == B * H * n * n * width
    assert largest(FactoredFourCache(tile=64), n, **several) <= B * H * G * n * width < B * H * n * n / 10


# ---- T4: Count ---


x34, y45, y34, row, column = (random(*shape).float() for shape in ((3, 4), (4, 5), (3, 4), (1, 4), (3, 1)))
x34d, y34d = x34.double(), y34.double()
NUMBER = 4  # bytes

COUNTED = {  # what runs: multiplications, bytes
    "mm": (lambda: x34 @ y45, 3 * 4 * 5, (12 + 20 + 15) * NUMBER),
    "mm of a transpose": (lambda: x34.T @ y34, 4 * 3 * 4, (12 + 12 + 16) * NUMBER),
    "bmm": (lambda: torch.bmm(x34.view(2, 3, 2), y45.view(2, 2, 5)), 2 * 3 * 2 * 5, (12 + 20 + 30) * NUMBER),
    "mul": (lambda: x34 * y34, 12, 36 * NUMBER),
    "mul of a row and a column": (lambda: column * row, 12, (3 + 4 + 12) * NUMBER),
    "mul by a number": (lambda: x34 * 2.5, 12, 24 * NUMBER),
    "mul in place": (lambda: x34.clone().mul_(y34), 12,  # clone, then x and y read and x written
                     (24 + 36) * NUMBER),
    "div": (lambda: x34 / y34, 12, 36 * NUMBER),
    "div by a column": (lambda: x34 / column, 12, 27 * NUMBER),
    "exp": (lambda: x34.exp(), 12, 24 * NUMBER),
    "exp in place": (lambda: x34.clone().exp_(), 12, 48 * NUMBER),
    "softmax": (lambda: x34.softmax(-1), 12, 24 * NUMBER),
    "add": (lambda: x34 + y34, 0, 36 * NUMBER),
    "sub of a column": (lambda: x34 - column, 0, 27 * NUMBER),
    "largest": (lambda: x34.amax(-1), 0, 15 * NUMBER),
    "largest and where, int64": (lambda: x34.max(-1), 0, 15 * NUMBER + 3 * 8),
    "cat of a list": (lambda: torch.cat([x34, row, row]), 0, (12 + 8 + 20) * NUMBER),
    "float64": (lambda: x34d * y34d, 12, 36 * 8),
    "float64 by float32": (lambda: x34d * y34, 12, 12 * (8 + 4 + 8)),
    "three things": (lambda: (x34 @ y45).exp() + 1, 60 + 15, (47 + 30 + 30) * NUMBER),
    "nothing": (lambda: None, 0, 0),
}


@pytest.mark.claim("T4")
@pytest.mark.parametrize("what", COUNTED)
def test_count_gives_what_is_counted_by_hand(what):
    run, multiplications, moved = COUNTED[what]
    with Count() as count:
        run()
    assert (count.multiplications, count.bytes) == (multiplications, moved)
    run()
    assert (count.multiplications, count.bytes) == (multiplications, moved)  # only what runs under it


def test_views_move_nothing():
    x = random(2, 3, 4)
    with Count() as count:
        x.view(6, 4), x.mT, x[1:], x[:, 1], x.unsqueeze(0).expand(5, 2, 3, 4), x.chunk(2, -1), x.split(1, 2), x.flatten(0, 1)
        x.detach(), x.permute(2, 0, 1), x.narrow(1, 0, 2), x.select(0, 1), x.squeeze(), x.unbind(0)
    assert (count.multiplications, count.bytes) == (0, 0)


@pytest.mark.parametrize("queries", [1, 6])
def test_a_product_with_leading_dimensions_counts_every_one_of_them(queries):
    with Count() as count:
        random(2, 3, queries, 5) @ random(2, 3, 5, 7)
        random(2, 3, queries, 5) @ random(1, 1, 5, 7)
    assert count.multiplications == 2 * 2 * 3 * queries * 5 * 7


def test_fused_attention_counts_its_two_products():
    q, k, v = random(2, 3, 4, 8), random(2, 3, 11, 8), random(2, 3, 11, 8)
    with Count() as count:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert count.multiplications == 2 * (2 * 3) * 4 * 11 * 8
    assert count.bytes >= (q.numel() + k.numel() + v.numel() + q.numel()) * 8


def counted(cache, n, **shape):
    cache, last = room_for_one(cache, n, **shape)
    slots = dict(cache.slots)
    with Count() as count:
        cache.attend(*last)
    assert all(cache.slots[name] is x for name, x in slots.items())  # nothing had to grow
    return count


each_batch = pytest.mark.parametrize("batch, heads", [(1, 1), (2, 3)])


@pytest.mark.claim("T4")
@each_batch
@pytest.mark.parametrize("n, d", [(32, 16), (22, 5)])
def test_the_four_matrices_as_described_take_2_n_squared_d_to_form_the_pairs_and_as_many_per_query(n, d, batch, heads):
    form, products = 2 * n * n * d, G * 2 * n * n * d
    small = G * n * n + G * d  # the softmax; q by the scale
    assert counted(FourCache(), n, batch=batch, heads=heads, width=d).multiplications == batch * heads * (form + products + small)


@pytest.mark.claim("T4")
@each_batch
@pytest.mark.parametrize("n, d", [(32, 16), (22, 5)])
def test_the_two_matrices_take_2_n_squared_d_per_query_and_the_new_pairs(n, d, batch, heads):
    products, form = G * 2 * n * n * d, 2 * (2 * n - 1) * d
    shape = dict(batch=batch, heads=heads, width=d)
    assert counted(TwoCache(), n, **shape).multiplications == batch * heads * (products + form)
    assert counted(TwoCache(scale=1.0), n, **shape).multiplications == batch * heads * (products + form + G * d)


@pytest.mark.claim("T4")
@each_batch
@pytest.mark.parametrize("n, d", [(32, 16), (22, 5)])
@pytest.mark.parametrize("tile", [1, 64, 100, 2 ** 18, 2 ** 22])
def test_the_factored_form_takes_2_n_squared_d_per_query_and_lower_order(n, d, tile, batch, heads):
    tiles = math.ceil(n / max(1, tile // n))
    products = 2 * n * n * d
    exp = n * n
    rows = 2 * n * d                               # K₁ ∘ q, V₁ ∘ (P V₂)
    ends = 2 * d                                   # q by the scale, out by the total
    rescale = tiles * 2 + 1 + (tiles - 1) * d      # keep, total · keep, out · keep: at first a single 0
    made = counted(FactoredFourCache(tile=tile), n, batch=batch, heads=heads, width=d)
    assert made.multiplications == batch * heads * G * (products + exp + rows + ends + rescale)


@pytest.mark.claim("T4")
@pytest.mark.parametrize("n, d", [(32, 16), (64, 64)])
def test_one_query_costs_the_described_form_twice_the_others_and_these_as_good_as_the_same(n, d):
    one = lambda cache: counted(cache, n, width=d).multiplications / (2 * n * n * d * G)
    four, two, factored = one(FourCache()), one(TwoCache()), one(FactoredFourCache())
    assert 1 + 1 / G < four < 1 + 1 / G + 1.1 / d     # forming the pairs is shared by the group
    assert 1 < two < 1 + 2.1 / n / G
    assert 1 < factored < 1 + 0.6 / d + 1.2 / n + 0.01


@pytest.mark.claim("T4")
@pytest.mark.parametrize("n, part", [(64, 8), (256, 12)])
def test_the_factored_form_moves_far_fewer_bytes_than_the_two_matrices_and_these_than_the_described_form(n, part):
    """Θ(n² + nD) numbers against 2n²D: at n = D the lower order is half of it."""
    moved = {name: counted(new(name), n, width=64, group=1).bytes for name in CACHES}
    assert moved["two"] > part * moved["factored"]
    assert moved["four"] > 1.5 * moved["two"] > 1.5 * 2 * n * n * 64 * NUMBER


@pytest.mark.parametrize("name", CACHES)
def test_in_inference_mode_the_same_is_counted(name):
    """There operations that are made of others arrive whole."""
    outside = counted(new(name), 32, batch=2, width=8)
    with torch.inference_mode():
        inside = counted(new(name), 32, batch=2, width=8)
    assert (inside.multiplications, inside.bytes) == (outside.multiplications, outside.bytes) and inside.bytes > inside.multiplications > 0


def test_a_copy_reads_its_source_and_a_new_tensor_nothing():
    with Count() as count:
        torch.zeros(5).copy_(torch.ones(5))
    before = count.bytes
    with count:
        torch.ones(7).new_zeros(3)
    assert (before, count.bytes - before) == ((5 + 5 + 10) * 4, (7 + 3) * 4)  # zeros, ones, the copy; ones, zeros


# ---- knobs ---


@pytest.mark.parametrize("tile", [0, -1])
def test_a_tile_of_no_pairs_is_refused_at_construction(tile):
    with pytest.raises(ValueError, match=f"tile {tile} must be at least 1 pair"):
        FactoredFourCache(tile=tile)


def test_by_default_a_tile_of_scores_takes_a_mebibyte():
    assert FactoredFourCache().tile * 4 == 2 ** 20


# ---- T13: a decoder, and Match-3 ---


@once
def decoder(family):
    torch.manual_seed(0)
    model = Decoder(Config(vocab_size=40, max_len=64, n_layers=2, n_heads=6, n_kv_heads=2, d_model=48, d_ff=48, vectors=2, family=family))
    for p in model.parameters():
        p.data.mul_(4)  # sharp attention
    return model.double()


TOKENS = torch.randint(40, (2, 21), generator=torch.Generator().manual_seed(1))


@pytest.mark.claim("T13")
@each_cache_and_tile
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_a_decoder_of_pairs_gives_the_same_logits_with_every_cache_as_without(cache, family):
    model, (Method, knobs) = decoder(family), (CACHES | TILES)[cache]
    whole = model(TOKENS)
    for chunk in (1, 8, 21):
        caches = make_cache(model, Method, **knobs)
        assert torch.allclose(torch.cat([model(part, caches) for part in TOKENS.split(chunk, 1)], 1), whole, rtol=0, atol=1e-11)
    if Method is not TwoCache:  # four matrices of numbers, and a position each
        assert cache_bytes(caches)[0] - sum(c.pos.nbytes for c in caches) == 2 * full_cache_bytes(model.config, 21, 8)


@pytest.mark.claim("T13")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_decoder_of_pairs_writes_the_same_text_with_every_cache(family):
    model = decoder(family)
    texts = [generate(model, TOKENS, 12, make_cache(model, Method), chunk=5) for Method, _ in CACHES.values()]
    loop = TOKENS
    with torch.no_grad():
        for _ in range(12):  # no cache at all
            loop = torch.cat((loop, model(loop)[:, -1:].argmax(-1)), 1)
    assert all(torch.equal(text, loop[:, 21:]) for text in texts) and len(loop[:, 21:].unique()) > 4


@pytest.mark.claim("T13")
def test_match_3_is_the_loop_over_pairs():
    x, answers = match3(50, 6, 7, torch.Generator().manual_seed(0))
    assert x.shape == (50, 7) and (x[:, 0] == 7).all() and x[:, 1:].max() == 6 and answers.shape == (50, 6)
    for text, said in zip(x[:, 1:].tolist(), answers.tolist()):
        for i in range(6):
            found = any((text[a] + text[b] + text[i]) % 7 == 0 for a in range(i + 1) for b in range(i + 1))
            assert said[i] == (9 if found else 8)


@pytest.mark.claim("T13")
def test_one_layer_of_tensor_attention_learns_match_3_and_ordinary_attention_of_as_many_parameters_stays_with_tokens():
    """What one can tell from the place and from pairs with a = b or b = i is all that the latter learns."""
    common = dict(steps=300, T=8, p=23, every=300, d_model=64, n_layers=1, d_ff=64)
    pair, log = learn(**common, n_heads=1, n_kv_heads=1, head_dim=64, vectors=2)
    single, ordinary = learn(**common, n_heads=3, n_kv_heads=3, head_dim=32)
    assert sum(p.numel() for p in pair.parameters()) == sum(p.numel() for p in single.parameters())
    x, answers = match3(20_000, 8, 23, torch.Generator().manual_seed(3))
    x = x[:, 1:]
    near = torch.stack([((2 * x[:, :i + 1] + x[:, i:i + 1]) % 23 == 0).any(1) | ((x[:, :i + 1] + 2 * x[:, i:i + 1]) % 23 == 0).any(1)
                        for i in range(8)], 1)
    yes = answers == 25
    rule = sum((near[:, i] | ((yes & ~near)[:, i].sum() * 2 > (~near)[:, i].sum()) == yes[:, i]).double().mean().item() for i in range(8)) / 8
    assert log[-1][0] == 300 and log[-1][1] > 0.94
    assert rule - 0.02 < ordinary[-1][1] < rule + 0.01 < log[-1][1] - 0.05
    same = learn(**common | dict(steps=3, every=2), n_heads=1, n_kv_heads=1, head_dim=64, vectors=2)
    assert [step for step, _ in same[1]] == [2, 3]
