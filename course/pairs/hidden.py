"""The hidden tests, which a student's copy does not hold: more sizes, and edge cases."""
import math

import pytest
import torch
from torch import tensor

from course.expect import problem, same, wrong

F64 = torch.float64


def drawn(seed, *shape, dtype=F64):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def read(q, k1, k2, v1, v2):
    """Return one query's output (D,) over all pairs of n tokens, (n, D) each, by loops; no scale."""
    pairs = [(a, b) for a in range(len(k1)) for b in range(len(k1))]
    q, k1, k2, x, y = (z.tolist() for z in (q, k1, k2, v1, v2))
    score = {(a, b): sum(q[i] * k1[a][i] * k2[b][i] for i in range(len(q))) for a, b in pairs}
    top = max(score.values())
    weight = {pair: math.exp(s - top) for pair, s in score.items()}
    out = [sum(w * x[a][i] * y[b][i] for (a, b), w in weight.items()) for i in range(v1.shape[-1])]
    return (tensor(out, dtype=F64) / sum(weight.values())).to(v1)


def reads(q, k, v, scale):
    """Return the outputs of q (B, H·G, T, D), each over the pairs up to its token; k, v (B, H, T, 2D)."""
    y, G = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            k1, k2 = k[b, h // G].chunk(2, -1)
            v1, v2 = v[b, h // G].chunk(2, -1)
            for t in range(q.shape[2]):
                n = t + 1
                y[b, h, t] = read(scale * q[b, h, t], k1[:n], k2[:n], v1[:n], v2[:n])
    return y


# ---- pairs and tensor attention ----------------------------------------------------------------------------


@problem("pairs")
@pytest.mark.parametrize("lead, n, m, D",
                         [((), 3, 5, 2), ((2, 3), 4, 1, 3), ((2, 1, 2), 1, 4, 1), ((), 1, 1, 4)])
def test_row_by_row(run, lead, n, m, D):
    """Several leading dimensions, n and m: row a·m + b is x_a ∘ y_b."""
    x, y = drawn(0, *lead, n, D), drawn(1, *lead, m, D)
    expected = torch.stack([x[..., a, :] * y[..., b, :] for a in range(n) for b in range(m)], -2)
    same(run("pairs", x=x, y=y), expected, f"pairs of {n} and {m} rows")


@problem("dense")
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_by_loops(run, lead):
    """Three queries over five tokens, with and without leading dimensions; no scale, no mask."""
    q, x = drawn(2, *lead, 3, 4), [drawn(3 + i, *lead, 5, 4) for i in range(4)]
    expected = torch.zeros_like(q)
    flat = [each.reshape(-1, 5, 4) for each in x]
    for i, (rows, out) in enumerate(zip(q.reshape(-1, 3, 4), expected.view(-1, 3, 4))):
        for t in range(3):
            out[t] = read(rows[t], *(each[i] for each in flat))
    got = run("dense", q=q, **dict(zip(("k1", "k2", "v1", "v2"), x)))
    same(got, expected, "the outputs", atol=1e-9)


# ---- caches ------------------------------------------------------------------------------------------------


def text(seed, B, H, G, T, D):
    k, v = (drawn(seed + i, B, H, T, 2 * D) for i in (1, 2))
    return dict(q=drawn(seed, B, H * G, T, D), k=k, v=v)


@problem("attention")
@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 1, 3]])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_pieces_and_scales(run, pieces, scale):
    """Batch 2, two heads, groups of three, D = 4: a query sees all pairs of the tokens up to its own."""
    x = text(10, 2, 2, 3, 7, 4)
    got = run("attention", **x, pieces=pieces, scale=scale)
    same(got["y"], reads(**x, scale=0.5 if scale is None else scale), f"the outputs of {pieces}", atol=1e-8)
    same(got["seen"], 7, "the tokens seen")
    same(got["k"], x["k"], "the keys held")
    same(got["v"], x["v"], "the values held")


@problem("attention")
def test_one_query_is_asked(run):
    """Each query calls one_query with q (B, H, G, D) and the tokens up to its own."""
    got = run("attention", **text(20, 2, 2, 3, 4, 5), pieces=[3, 1])
    same(got["shapes"], [[[2, 2, 3, 5], [2, 2, n, 5]] for n in (1, 2, 3, 4)], "the shapes of q and k1")


@problem("attention")
def test_nothing_is_written(run):
    """The same queries once more: the same outputs, None for the probabilities, and no token more."""
    got = run("attention", **text(21, 1, 2, 2, 5, 4), pieces=[3, 2])
    same(got["again"], got["y"][:, :, 3:], "the outputs of the last two queries")
    same(got["probabilities"], None, "the second result")
    same(got["seen"], 5, "the tokens seen")


@problem("new")
@pytest.mark.parametrize("B, H, n, D", [(1, 1, 2, 1), (2, 3, 6, 4), (2, 1, 1, 3)])
def test_in_their_order(run, B, H, n, D):
    """Every x with the last y, then the last x with every y but the last."""
    x, y = drawn(30, B, H, n, D), drawn(31, B, H, n, D)
    rows = [(a, n - 1) for a in range(n)] + [(n - 1, b) for b in range(n - 1)]
    expected = torch.stack([x[:, :, a] * y[:, :, b] for a, b in rows], 2)
    same(run("new_pairs", x=x, y=y), expected, "the new pairs")


@problem("new")
def test_a_cache_of_pairs(run):
    """After four tokens TwoCache holds 16 pairs, each once, at the position of its later token."""
    k, v = drawn(32, 1, 2, 4, 6), drawn(33, 1, 2, 4, 6)
    order = [pair for t in range(4)
             for pair in [*((a, t) for a in range(t + 1)), *((t, b) for b in range(t))]]
    got = run("two_caches", k=k, v=v)
    for name, pairs, x in (("keys", got[0], k), ("values", got[1], v)):
        expected = torch.stack([x[:, :, a, :3] * x[:, :, b, 3:] for a, b in order], 2)
        same(pairs, expected, f"the {name} of the pairs")
    same(got[2], tensor([max(pair) for pair in order], dtype=torch.int32).expand(1, 2, 16), "their positions")


def tiles(seed, B, H, G, n, D, tile, sharp=1.0):
    x = [drawn(seed + i, B, H, n, D) for i in range(4)]
    args = dict(q=sharp * drawn(seed + 4, B, H, G, D), **dict(zip(("k1", "k2", "v1", "v2"), x)))
    expected = torch.zeros(B, H, G, D, dtype=F64)
    for b in range(B):
        for h in range(H):
            for g in range(G):
                expected[b, h, g] = read(args["q"][b, h, g], *(each[b, h] for each in x))
    return args | dict(tile=tile), expected


@problem("factored")
@pytest.mark.parametrize("tile", [1, 10, 11, 29, 30, 77, 100, 2 ** 18])
def test_tiles(run, tile):
    """Eleven tokens, batch 2, two heads, groups of three: short last tiles, tiles below a row, one tile."""
    args, expected = tiles(40, 2, 2, 3, 11, 4, tile)
    same(run("one_query", **args)["y"], expected, f"the outputs, tiles of {tile}", atol=1e-8)


@problem("factored")
@pytest.mark.parametrize("seed", range(3))
def test_large_scores(run, seed):
    """Scores in the thousands, the largest in any tile: no overflow, no NaN."""
    args, expected = tiles(50 + 10 * seed, 1, 2, 2, 9, 3, 18, sharp=1000.0)
    same(run("one_query", **args)["y"], expected, "the outputs", atol=1e-8)


@problem("factored")
def test_low_scores(run):
    """All scores near −2000: with a maximum of 0 all weights would vanish."""
    one = torch.ones(1, 1, 5, 2)
    v = drawn(80, 1, 1, 5, 2, dtype=torch.float32)
    got = run("one_query", q=torch.full((1, 1, 1, 2), -1000.), k1=one, k2=one, v1=v, v2=one, tile=10)
    same(got["y"], v.mean(2, keepdim=True), "the outputs", atol=1e-5)


@problem("factored")
@pytest.mark.parametrize("G, n, D, tile", [(1, 64, 8, 256), (2, 48, 8, 1), (3, 40, 4, 400)])
def test_memory(run, G, n, D, tile):
    """No tensor has more than 2·B·H·G·max(tile, n·D) numbers."""
    args, expected = tiles(90, 1, 2, G, n, D, tile)
    got, most = run("one_query", **args), 2 * 2 * G * max(tile, n * D)
    same(got["y"], expected, "the outputs", atol=1e-8)
    if got["numbers"] > most:
        wrong(f"you made a tensor of {got['numbers']} numbers; tiles of {tile} allow at most {most}")


@problem("factored")
def test_float32(run):
    """The output has the dtype of q."""
    args, expected = tiles(95, 1, 1, 2, 6, 4, 12)
    args = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
    y = run("one_query", **args)["y"]
    same(y, expected, "the outputs", atol=1e-4)
    if y.dtype != torch.float32:
        wrong(f"expected torch.float32, got {y.dtype}")


@problem("causal")
@pytest.mark.parametrize("B, H, G, T, D", [(1, 1, 1, 1, 3), (2, 2, 3, 6, 4), (1, 3, 1, 5, 2)])
def test_whole_texts(run, B, H, G, T, D):
    """Rows, heads, groups: query t sees the pairs of tokens up to t; scores are scaled by 1/√D."""
    x = text(100, B, H, G, T, D)
    same(run("causal", **x), reads(**x, scale=D ** -0.5), "the outputs", atol=1e-9)


@problem("causal")
def test_the_future_is_nothing(run):
    """Another last token does not change the outputs before it."""
    x = text(110, 1, 2, 1, 5, 4)
    other = {name: each.clone() for name, each in x.items()}
    for each in other.values():
        each[:, :, -1] = 50
    got, expected = run("causal", **other), reads(**x, scale=0.5)
    same(got[:, :, :-1], expected[:, :, :-1], "the outputs of the others", atol=1e-9)


# ---- the game ----------------------------------------------------------------------------------------------


def dealt(seed, n, d):
    return drawn(seed, n, d) > 0, drawn(seed + 1, n, d) / d ** 0.5


def four(bits, keys):
    one = torch.ones_like(keys)
    return torch.cat((keys, one), 1), torch.cat((bits.double(), one), 1)


def bob(k, v, keys, C):
    """Return what Bob reads from k, v (n, 2d), by loops over pairs; his own token is zero."""
    d = keys.shape[1]
    k, v = (torch.cat((x, torch.zeros(1, 2 * d, dtype=F64))) for x in (k, v))
    return torch.stack([read(C * key, k[:, :d], k[:, d:], v[:, :d], v[:, d:]) for key in keys])


def expectations(n, keys, C, repeats, nothing):
    eps = float((keys @ keys.T - torch.eye(n, dtype=F64)).abs().max())
    own, others = repeats * math.exp(C * (1 - eps)), repeats * (n - 1) * math.exp(C * eps)
    return tensor([others, own], dtype=F64) / (own + others + nothing)


@problem("alice")
@pytest.mark.parametrize("n, d, C", [(5, 12, 3.0), (4, 8, None), (1, 3, 2.0)])
def test_what_bob_reads(run, n, d, C):
    """Random bits and keys: what Alice stores, and what Bob reads."""
    bits, keys = dealt(120, n, d)
    got = run("alice", bits=bits, keys=keys, C=C)
    k, v = four(bits, keys)
    same(got["k"], k[None, None], "the keys stored")
    same(got["v"], v[None, None], "the values stored")
    same(got["read"], bob(k, v, keys, 2 * math.log(n) if C is None else C), "what Bob reads", atol=1e-8)
    same(got["kind"], "FactoredFourCache", "the cache")


@problem("alice")
def test_keys_in_float32(run):
    """Bits become numbers of the keys' dtype."""
    bits, keys = dealt(130, 3, 6)
    got = run("alice", bits=bits, keys=keys.float(), C=2.0)
    k, v = four(bits, keys)
    same(got["v"], v.float()[None, None], "the values stored")
    same(got["k"], k.float()[None, None], "the keys stored")


@problem("play")
@pytest.mark.parametrize("C", [None, 1.5])
def test_four_matrices(run, C):
    """Random numbers in all four matrices: Bob's readings, `zero`, `one`; no question stays in the cache."""
    n, d = 5, 6
    keys = drawn(140, n, d) / 4
    k, v = drawn(141, n, 2 * d), drawn(142, n, 2 * d)
    got = run("play", k=k, v=v, keys=keys, C=C)
    C = 2 * math.log(n) if C is None else C
    same(got["read"], bob(k, v, keys, C), "what Bob reads", atol=1e-8)
    same(tensor([got["zero"], got["one"]], dtype=F64), expectations(n, keys, C, n, 2 * n + 1), "zero and one",
         atol=1e-9)
    same(got["seen"], n, "tokens in Alice's own cache")


@problem("play")
def test_ordinary_attention(run):
    """k and v (n, d) in a plain store, Slots: it divides scores by √d, and Bob's query compensates."""
    n, d, C = 6, 5, 2.5
    keys, v = drawn(150, n, d) / 3, drawn(151, n, d)
    got = run("play", k=keys, v=v, keys=keys, C=C)
    weight = torch.cat((torch.exp(C * keys @ keys.T), torch.ones(n, 1, dtype=F64)), 1)
    expected = weight[:, :n] @ v / weight.sum(1, keepdim=True)
    same(got["read"], expected, "what Bob reads", atol=1e-7)
    bounds = tensor([got["zero"], got["one"]], dtype=F64)
    same(bounds, expectations(n, keys, C, 1, 1), "zero and one", atol=1e-9)


@problem("play")
def test_what_is_kept(run):
    """`compress` sees all of Alice's tokens and keeps three; Bob reads these only."""
    n, d, C, kept = 6, 8, 3.0, tensor([1, 2, 5])
    bits, keys = dealt(160, n, d)
    k, v = four(bits, keys)
    got = run("play", k=k, v=v, keys=keys, C=C, kept=kept)
    same(got["read"], bob(k[kept], v[kept], keys, C), "what Bob reads", atol=1e-8)
    same(got["compressed"], [n], "the tokens seen at each call of compress")
    same(got["pos"], kept.int()[None, None], "the positions that Alice's cache holds")


@problem("play")
def test_chance(run):
    """η = 0.3: a factor 1 ± η for each number, from one torch.randint of the generator."""
    n, d, C = 4, 7, 2.0
    bits, keys = dealt(170, n, d)
    k, v = four(bits, keys)
    got = run("play", k=k, v=v, keys=keys, C=C, eta=0.3, seed=5)
    up = torch.randint(0, 2, (n, d), generator=torch.Generator().manual_seed(5))
    same(got["read"], bob(k, v, keys, C) * (0.7 + 0.6 * up), "what Bob reads", atol=1e-6)
    same(tensor([got["zero"], got["one"]], dtype=F64),
         expectations(n, keys, C, n, 2 * n + 1) * tensor([1.3, 0.7], dtype=F64), "zero and one", atol=1e-7)
