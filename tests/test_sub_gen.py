"""SubGen and its forms for pairs of tokens: clusters against a plain loop; samples and draws against their distribution; means,
variances and the ratio's bias against enumeration of all that can be sampled; the lemmas' sizes; memory counted by hand."""
import copy
from itertools import product
import math

from hypothesis import given, settings, strategies as st
import pytest
import torch

from methods.sub_gen import SubGen, SubGen2Cache, SubGen4Cache, Stream, estimates, exact, most_clusters, sizes, value_ratios
from methods.tensor_attention import pairs, tensor_attention
from nanollm.cache import LayerCache, make_cache
from nanollm.generate import generate, prefill
from nanollm.model import Config, Decoder

F64 = torch.float64
CACHES = {"tokens": SubGen, "two": SubGen2Cache, "four": SubGen4Cache}
each_cache = pytest.mark.parametrize("name", CACHES)
seeds = st.integers(0, 2**32 - 1)


def check(examples, *strategies):
    return lambda test: settings(max_examples=examples, deadline=None)(given(*strategies)(test))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def in_ball(n, D, seed=0):
    """n points, uniform in the unit ball."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g, dtype=F64)
    return x / x.norm(dim=1, keepdim=True) * torch.rand(n, 1, generator=g, dtype=F64) ** (1 / D)


class Told(Stream):
    """A stream that notes the cluster of each key."""

    def __init__(self, *knobs):
        super().__init__(*knobs)
        self.told = []

    def join(self, k):
        self.told.append(super().join(k))
        return self.told[-1]

    @property
    def of(self):
        return torch.cat(self.told, -1)


def streamed(k, v=None, *, radius=0.0, samples=1, draws=1, chunk=None, seed=0):
    """k, v (B, H, T, D) in chunks."""
    stream = Told(radius, samples, draws, torch.Generator().manual_seed(seed))
    for x, y in zip(*(x.split(chunk or k.shape[2], 2) for x in (k, k if v is None else v))):
        stream.add(x, y)
    return stream


def fed(cache, k, v, chunk=None):
    chunk = chunk or k.shape[2]
    for x, y, pos in zip(k.split(chunk, 2), v.split(chunk, 2), torch.arange(k.shape[2])[None].split(chunk, 1)):
        cache.write(x, y, pos)
    return cache


def near(runs, expected, errors=4.0):
    """The mean over runs (R, ...) is the expected (...), within so many standard errors."""
    return ((runs.mean(0) - expected).abs() <= errors * runs.std(0) / math.sqrt(len(runs)) + 1e-12 * (1 + abs(expected))).all()


def frequent(chosen, p):
    """So often as p (n,) is each of 0 … n − 1 among `chosen`, within 4.5 standard errors; what has no chance never."""
    count, n = torch.bincount(chosen.flatten(), minlength=len(p)), chosen.numel()
    assert len(count) == len(p) and not count[p == 0].any()
    assert ((count / n - p).abs() <= 4.5 * (p * (1 - p) / n).sqrt()).all()


# ---- clusters ---


def by_loop(keys, radius):
    """Of keys, a list of rows: the cluster of each, and the centres."""
    of, centres = [], []
    for key in keys:
        may = [c for c, centre in enumerate(centres) if math.dist(key, centre) <= radius]
        of.append(may[0] if may else len(centres))
        centres += [] if may else [key]
    return of, centres


def cluster(keys, radius):
    """Indices of the keys (n, D) of each cluster."""
    of, centres = by_loop(keys.tolist(), radius)
    return [[i for i, c in enumerate(of) if c == own] for own in range(len(centres))]


def check_clusters(k, radius, chunk):
    stream = streamed(k, radius=radius, chunk=chunk)
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            of, centres = by_loop(k[b, h].tolist(), radius)
            m = len(centres)
            assert stream.of[b, h].tolist() == of
            assert stream.centre[b, h, :m].tolist() == centres and not stream.count[b, h, m:].any()
            assert stream.count[b, h, :m].tolist() == [of.count(c) for c in range(m)]
            assert all(math.dist(x, centres[c]) <= radius for x, c in zip(k[b, h].tolist(), of))
            assert all(math.dist(x, y) > radius for i, x in enumerate(centres) for y in centres[:i])
    return stream


@pytest.mark.claim("T9")
@check(60, seeds, st.integers(1, 40), st.integers(1, 4), st.sampled_from([0.0, 1.0, 1.3, 2.0, 5.0, 100.0, math.inf]),
       st.sampled_from([1, 5, None]))
def test_a_key_joins_the_oldest_cluster_that_it_may_however_the_text_is_cut(seed, n, D, radius, chunk):
    """Whole numbers, so that many distances are the radius exactly."""
    k = torch.randint(-3, 4, (2, 2, n, D), generator=torch.Generator().manual_seed(seed)).double()
    k[1, 1] *= 4
    stream = check_clusters(k, radius, chunk)
    if radius == 0:
        assert (stream.count > 0).sum(-1).tolist() == [[len({*map(tuple, keys)}) for keys in heads] for heads in k.tolist()]
    if radius >= 100:
        assert stream.count.max() == stream.count.sum(-1).min() == n


@pytest.mark.claim("T9")
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("seed", range(3))
def test_heads_and_texts_open_clusters_of_their_own(seed, chunk):
    k = random(2, 2, 60, 3, seed=seed) * torch.tensor([[0.5, 1.0], [3.0, 0.0]], dtype=F64)[..., None, None]
    found = (check_clusters(k, 0.9, chunk).count > 0).sum(-1)
    assert found[1, 1] == 1 < found[0, 0] < found[0, 1] < found[1, 0]


def test_not_the_nearest_cluster_but_the_oldest():
    k = torch.tensor([0, 1.5, 1, 0.8]).view(1, 1, -1, 1)
    for chunk in (1, 2, None):
        assert streamed(k, radius=1, chunk=chunk).of.tolist() == [[[0, 1, 0, 0]]]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_key_at_the_very_edge_joins_or_not_however_the_text_is_cut(dtype):
    """Rounding must be the same for old centres and new ones."""
    for seed in range(60):
        k = random(1, 1, 8, 64, seed=seed).to(dtype)
        edge = torch.cdist(k[:, :, :1], k[:, :, 1:2], compute_mode="donot_use_mm_for_euclid_dist").item()
        assert torch.equal(streamed(k, radius=edge, chunk=1).of, streamed(k, radius=edge).of)


def test_keys_that_are_not_numbers_are_passed_on_and_end():
    k = random(1, 1, 6, 3)
    k[0, 0, 2, 1] = torch.nan
    assert streamed(k, radius=0.5, chunk=1).count.sum() == 6


# ---- samples and draws ---

KEYS = torch.tensor([0, 10, 10.1, 20, 10.2, 0.1, 20.1, 10.3, 10.4, 20.2]).view(1, 1, -1, 1)
CLUSTERS = [[0, 5], [1, 2, 4, 7, 8], [3, 6, 9]]


def which(x, of=KEYS):
    """Index of the key that x (..., 1) is."""
    at = (x == of.flatten()).long()
    assert (at.sum(-1) == 1).all()
    return at.argmax(-1)


@pytest.mark.claim("T9")
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_samples_of_a_cluster_are_uniform_and_independent(chunk):
    held = streamed(KEYS.expand(30_000, 2, -1, -1), radius=1, samples=3, chunk=chunk)
    assert held.count[:, :, :3].unique(dim=0).tolist() == [[[2, 5, 3]] * 2]
    place = torch.tensor([own.index(i) for i in range(10) for own in CLUSTERS if i in own])
    held = which(held.sample[:, :, :3])  # (runs, H, cluster, t)
    member = place[held]
    for c, own in enumerate(CLUSTERS):
        n, m = len(own), member[:, :, c]
        assert {*held[:, :, c].flatten().tolist()} == {*own}
        for x in (m[:, 0, 0], m[:, 1, 2], m):
            frequent(x, torch.full((n,), 1 / n))
        for x, y in ((m[..., 0], m[..., 1]), (m[..., 0], m[..., 2]), (m[..., 1], m[..., 2]), (m[:, 0], m[:, 1]), (m[1:], m[:-1])):
            frequent(x * n + y, torch.full((n * n,), 1 / n ** 2))
            frequent((x != y).long(), torch.tensor([1 / n, 1 - 1 / n]))
    frequent(member[:, :, 0] * 5 + member[:, :, 1], torch.full((10,), 1 / 10))


@pytest.mark.claim("T9")
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_keys_and_values_are_drawn_together_in_proportion_to_the_squared_norm(chunk):
    v = torch.tensor([[0, 0], [1, 2], [0, 0], [0, 1], [3, -1], [0, 0], [-2, 0], [0, 0], [2, 2], [0, 0]])[None, None].float()
    runs = 30_000
    held = streamed(KEYS.expand(runs, 2, -1, -1), v.expand(runs, 2, -1, -1), draws=3, chunk=chunk)
    p = v[0, 0].square().sum(-1) / 28
    assert (held.total == 28).all() and held.total.dtype == F64
    i = which(held.k)
    assert torch.equal(held.v, v[0, 0][i])
    frequent(i, p)
    for x, y in ((i[..., 0], i[..., 1]), (i[..., 1], i[..., 2]), (i[:, 0], i[:, 1]), (i[1:], i[:-1])):
        frequent(x * 10 + y, (p[:, None] * p).flatten())
    _, (drawn, weight) = held.kept()
    assert torch.equal(drawn, held.k) and torch.allclose(weight.exp(), (1 / p / 3)[i])


@pytest.mark.claim("T9")
def test_what_is_drawn_does_not_depend_on_what_is_sampled():
    k = KEYS.expand(60_000, 1, -1, -1)
    held = streamed(k, torch.ones_like(k), radius=1)
    frequent(which(held.sample[:, 0, 0, 0]) // 5 * 10 + which(held.k[:, 0, 0]), torch.full((20,), 1 / 20))


@pytest.mark.parametrize("number, new", [(0.0, True), (0.999, True), (1.0, False)])
def test_random_numbers_at_the_very_edge_of_what_they_decide(number, new):
    """0 draws no leading value of 0; a new key, or a new value of norm 1, comes in for numbers below 1."""
    stream, row = Stream(1.0, 1, 1, None), lambda *x: torch.tensor(x).view(1, 1, -1, 1)
    stream.uniform = lambda below, n: torch.zeros(*below.shape, n, dtype=F64)
    stream.add(row(0.25, 0.5), row(0.0, 1.0))
    kept = lambda: [x.flatten()[0].item() for x in (stream.sample, stream.k, stream.v)]
    assert kept() == [0.25, 0.5, 1.0]
    stream.uniform = lambda below, n: torch.full((*below.shape, n), number, dtype=F64)
    stream.add(row(0.75), row(-1.0))
    assert kept() == ([0.75, 0.75, -1.0] if new else [0.25, 0.5, 1.0])


def test_a_long_stream_loses_no_bits():
    """10⁸ + 1 is no float32, nor is a random number below it that tells its parts apart."""
    stream = streamed(torch.ones(1, 1, 2, 1), torch.tensor([1e4, 1]).view(1, 1, 2, 1))
    assert stream.total.item() == 10 ** 8 + 1
    u = stream.uniform(torch.tensor([2 ** 40, 3]), 1000)
    assert u.shape == (2, 1000) and u.dtype == F64 and (u[0].long() % 2 ** 16 != 0).sum() > 900
    assert (u >= 0).all() and u[0].amax() < 2 ** 40 and 2.9 < u[1].amax() < 3


@each_cache
@pytest.mark.parametrize("chunk", [1, None])
def test_values_of_nothing_but_zeros_give_zero(name, chunk):
    vectors = CACHES[name].vectors
    q, k, v = random(2, 4, 5, 3), random(2, 2, 5, 3 * vectors, seed=1), torch.zeros(2, 2, 5, 3 * vectors, dtype=F64)
    v[1] = random(2, 5, 3 * vectors, seed=2)  # another text is not disturbed
    cache = CACHES[name](0.5, 2, 3)
    parts = *(x.split(chunk or 5, 2) for x in (q, k, v)), torch.arange(5)[None].split(chunk or 5, 1)
    y = torch.cat([cache.attend(*x) for x in zip(*parts)], 2)
    assert (y[0] == 0).all() and y[1].isfinite().all() and (y[1] != 0).all()


# ---- T9, T10: means, variances, the ratio, against all that can be sampled and drawn ---


def sampled(ks, radius, q, t=1):
    """τ of t samples a cluster, for every choice of them, all as likely: (choices, G). ks: keys (n, D) of each side."""
    sides = []
    for k in ks:
        slots = [own for own in cluster(k, radius) for _ in range(t)]
        sides.append((k[torch.tensor([*product(*slots)])], torch.tensor([len(own) / t for own in slots], dtype=F64)))
    (k1, share1), *two = sides
    if not two:
        return torch.einsum("xig,i->xg", (k1 @ q.T).exp(), share1)
    (k2, share2), = two
    w = torch.einsum("xid,yjd,gd->xygij", k1, k2, q).exp()
    return torch.einsum("xygij,i,j->xyg", w, share1, share2).flatten(0, 1)


def drawn(ks, vs, q, s):
    """z of s draws (of either side), for every choice of them: (choices, G, D), and how likely it is."""
    sides = []
    for k, v in zip(ks, vs):
        p = v.square().sum(1) / v.square().sum()
        every = torch.tensor([*product(range(len(k)), repeat=s)])
        sides.append((k[every], v[every] / (s * p[every][..., None]), p[every].prod(1)))
    (k1, v1, p1), *two = sides
    if not two:
        return (k1 @ q.T).exp().mT @ v1, p1
    (k2, v2, p2), = two
    w = torch.einsum("xid,yjd,gd->xygij", k1, k2, q).exp()
    return torch.einsum("xygij,xid,yjd->xygd", w, v1, v2).flatten(0, 1), (p1[:, None] * p2).flatten()


def stream_of_pairs(x, y):
    """All pairs in the order in which they come, (n², D)."""
    order = [pair for n in range(len(x)) for pair in [*((a, n) for a in range(n + 1)), *((n, b) for b in range(n))]]
    return torch.stack([x[a] * y[b] for a, b in order])


def setting(name, n=5, D=2, G=2):
    """q (G, D), k and v (n, D or 2D) in a few wide clusters; keys and values (list of sides) of the streams they make."""
    centres = torch.tensor([[0.9, 0.2], [-0.5, 0.8]], dtype=F64)[:, :D]
    sides = [(centres[torch.arange(n) % (2 + i) // 2] + 0.35 * random(n, D, seed=i), 1 + random(n, D, seed=2 + i))
             for i in range(CACHES[name].vectors)]
    k, v = (torch.cat(x, 1) for x in zip(*sides))
    ks, vs = ([stream_of_pairs(*x)] if name == "two" else [*x] for x in zip(*sides))
    return random(G, D, seed=5) * 3, k, v, ks, vs


RADIUS, RUNS = 0.8, 20_000


@pytest.mark.parametrize("name", CACHES)
def test_the_enumeration_has_the_exact_sums_as_its_means(name):
    q, k, v, ks, vs = setting(name, 4 if name == "two" else 5)
    tau, (z, p) = sampled(ks, RADIUS, q), drawn(ks, vs, q, 1 if name == "two" else 2)
    K, V = (x[0] if len(x) == 1 else pairs(*x) for x in (ks, vs))
    assert max(len(c) for x in ks for c in cluster(x, RADIUS)) > 1 and (tau.std(0) > 0.2 * tau.mean(0)).all()
    assert torch.allclose(tau.mean(0), (q @ K.T).exp().sum(1)) and p.sum() == pytest.approx(1)
    assert torch.allclose(torch.einsum("r,rgd->gd", p, z), (q @ K.T).exp() @ V)
    if name == "two":
        assert torch.equal(K.sort(0).values, pairs(*k.chunk(2, 1)).sort(0).values)


@pytest.mark.claim("T9")
@pytest.mark.claim("T10")
@each_cache
@pytest.mark.parametrize("samples, chunk", [(1, None), (2, 1), (2, 2)])
def test_numerator_and_normaliser_have_the_mean_and_the_variance_of_the_enumeration_and_are_uncorrelated(name, samples, chunk):
    n = 4 if name == "two" else 5
    q, k, v, ks, vs = setting(name, n)
    many = lambda x: x.expand(RUNS, 1, *x.shape)
    z, tau, top = fed(CACHES[name](RADIUS, samples, 2, seed=samples), many(k), many(v), chunk).estimate(many(q))
    assert (z.shape, tau.shape, top.shape) == ((RUNS, 1, 2, 2), (RUNS, 1, 2, 1), (RUNS, 1, 2, 1))
    z, tau = (z * top.exp())[:, 0], (tau * top.exp())[:, 0, :, 0]
    crossed = samples if name == "four" else 1  # every left sample with every right one
    every = sampled(ks, RADIUS, q, crossed)
    K, V = (x[0] if len(x) == 1 else pairs(*x) for x in (ks, vs))
    T, Z = (q @ K.T).exp().sum(1), (q @ K.T).exp() @ V
    assert near(tau, T) and near(z, Z)
    assert near((tau - T).square(), (every - T).square().mean(0) * crossed / samples)
    rows, p = drawn(ks, vs, q, 2)
    assert near((z - Z).square(), torch.einsum("r,rgd->gd", p, (rows - Z).square()))
    assert near((z - Z) * (tau - T)[..., None], torch.zeros_like(Z))
    if samples == 1:  # z and 1/τ are independent
        inverse = (1 / every).mean(0)
        assert near(z / tau[..., None], Z * inverse[:, None]) and (inverse * T > 1.02).all()


@pytest.mark.claim("T9")
def test_a_pair_of_clusters_is_sampled_by_all_t_squared_pairs_of_samples():
    """Neither key alone says anything: all of the variance is that of the pair."""
    t = 4
    k = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=F64).expand(RUNS, 1, 4, 2)
    _, tau, top = fed(SubGen4Cache(2.0, t, 1), k, k).estimate(torch.ones(RUNS, 1, 1, 1, dtype=F64))
    tau = (tau * top.exp()).flatten() / 16
    assert near(tau, math.cosh(1)) and near((tau - math.cosh(1)).square(), (math.sinh(1) / t) ** 2)


@pytest.mark.claim("T10")
def test_the_ratio_is_too_large_by_about_the_relative_variance_of_the_normaliser():
    """One cluster, half its scores +a and half −a: of t samples a binomial number is +a."""
    a, n = 0.6, 16
    k = torch.tensor([a, -a], dtype=F64).repeat(n // 2).view(n, 1) * torch.tensor([1.0, 0.0], dtype=F64)
    v = 1 + 0.2 * random(n, 2, seed=1)
    o = k[:, 0].softmax(0) @ v
    q = torch.tensor([[1.0, 0.0]], dtype=F64)
    many = lambda x: x.expand(RUNS, 1, *x.shape)
    biases = []
    for t in (1, 2, 4, 8, 16):
        ratio = SubGen(2 * a, t, 16, seed=t, scale=1.0)
        fed(ratio, many(k[:-1]), many(v[:-1]))
        ratio = ratio.attend(many(q), many(k[-1:]), many(v[-1:]), torch.tensor([[n - 1]]))[:, 0, 0] / o - 1
        variance = math.tanh(a) ** 2 / t  # of τ, by τ²
        exact = sum(math.comb(t, j) / 2 ** t * math.cosh(a) * t / (j * math.exp(a) + (t - j) * math.exp(-a))
                    for j in range(t + 1)) - 1
        assert near(ratio, torch.tensor([exact, exact], dtype=F64))
        assert (ratio.mean(0) > 8 * ratio.std(0) / math.sqrt(RUNS)).all()
        assert 0 < exact - variance < 4 * variance ** 2
        biases.append(ratio.mean().item())
    assert all(1.9 < x / y < 2.6 for x, y in zip(biases, biases[1:]))


# ---- the lemmas' sizes ---


def clustered(name):
    """Keys in three tight clusters a side and values about a mean: the radius, q, k, v, and t and s for ε."""
    n, radius, eps = (16, 0.05, 0.5) if name == "two" else (32, 0.02, 0.75)
    centres = torch.tensor([[0.6, 0.5], [-0.7, 0.4], [0.1, -0.8]], dtype=F64)
    of = torch.randint(3, (2, n), generator=torch.Generator().manual_seed(0))
    k = torch.cat([centres[i] + radius / 4 * in_ball(n, 2, seed) for seed, i in enumerate(of)], 1)
    v = torch.tensor([1.0, 0.2], dtype=F64).repeat(2) + 0.2 * random(n, 4, seed=3)
    assert max(x.norm(dim=1).max() for x in k.chunk(2, 1)) <= 1
    values = (pairs(*v.chunk(2, 1)),) if name == "two" else v.chunk(2, 1)
    return radius, 2.0 * torch.tensor([[0.8, 0.6]], dtype=F64), k, v, eps, sizes(eps, 2.0 * radius, *values)


def errors(name, t, s, runs=1000, rows=1000):
    """‖z/τ − o‖ in the lemmas' unit, (runs,)."""
    radius, q, k, v, *_ = clustered(name)
    z, tau, unit = exact(q, k, v)
    found = []
    for seed in range(runs // rows):
        zs, taus, _ = estimates(CACHES[name], q.float(), k.float(), v.float(), rows, radius=radius, samples=t, draws=s, seed=seed)
        found.append((zs / taus - z / tau).norm(dim=-1) / unit)
    return torch.cat(found)


def standard_error(name, s):
    """√E‖z − E z‖²/τ in that unit: of draws of pairs, or of both sides, each of which meets all of the other."""
    _, q, k, v, *_ = clustered(name)
    (k1, k2), (v1, v2) = k.chunk(2, 1), v.chunk(2, 1)
    e = torch.einsum("ad,bd,d->ab", k1, k2, q[0]).exp()
    p1, p2 = (x.square().sum(1) / x.square().sum() for x in (v1, v2))
    V = v1[:, None] * v2
    if name == "two":
        variance = (V.square().sum() * e.square().sum() - (e[..., None] * V).sum((0, 1)).square().sum()) / s
    else:  # Hoeffding: what one side does, what the other does, and what only both do together
        f = e[..., None] * V / (p1[:, None] * p2)[..., None]
        one, two = torch.einsum("b,abd->ad", p2, f), torch.einsum("a,abd->bd", p1, f)
        mean = p1 @ one
        both = f - one[:, None] - two + mean
        variance = (p1 @ (one - mean).square().sum(1) + p2 @ (two - mean).square().sum(1)) / s
        variance += torch.einsum("a,b,abd->", p1, p2, both.square()) / s ** 2
    _, tau, unit = exact(q, k, v)
    return (variance.sqrt() / tau / unit).item()


@pytest.mark.parametrize("name", ["two", "four"])
def test_the_exact_output_and_the_unit_of_error_are_those_of_the_pairs_formed(name):
    _, q, k, v, *_ = clustered(name)
    z, tau, unit = exact(q, k, v)
    K, V = (pairs(*x.chunk(2, 1)) for x in (k, v))
    softmax = (q @ K.T).softmax(1)
    assert torch.allclose(z / tau, softmax @ V) and torch.allclose(tau, (q @ K.T).exp().sum())
    assert unit.item() == pytest.approx((softmax.norm() * torch.linalg.matrix_norm(V, 2)).item())


@pytest.mark.claim("T9")
@pytest.mark.claim("T10")
@pytest.mark.parametrize("name, rows, expected", [("two", 100, 0.0204), ("four", 20, 0.0087)])
def test_at_the_sizes_of_the_lemmas_the_error_is_the_standard_error_of_the_draws_far_below_eps(name, rows, expected):
    """That no run is beyond ε could hardly fail; that the error is as large as predicted, and no less, can."""
    *_, eps, (t, s) = clustered(name)
    error, predicted = errors(name, t, s, runs=400, rows=rows), standard_error(name, s)
    assert predicted == pytest.approx(expected, abs=5e-5)
    assert error.square().mean().sqrt().item() == pytest.approx(predicted, rel=0.1)  # ± 3 %
    assert len(error) == 400 and error.max() < eps / 5


@pytest.mark.claim("T9")
@pytest.mark.claim("T10")
@pytest.mark.parametrize("name, enough, too_few", [("two", (64, 0.002), (128, 0.031)), ("four", (256, 0.003), (512, 0.022))])
def test_the_promise_is_broken_only_at_a_small_part_of_those_sizes(name, enough, too_few):
    """The sizes over so many, and the share of 1000 runs beyond ε: 0.01 are promised."""
    *_, eps, (t, s) = clustered(name)
    for divisor, share in (enough, too_few):
        error = errors(name, max(1, round(t / divisor)), round(s / divisor))
        assert (error > eps).double().mean().item() == pytest.approx(share, abs=0.003)
    assert enough[1] < 0.01 < too_few[1]


@pytest.mark.parametrize("eps, half, sides, p", [(0.5, 0.4, 1, 0.01), (0.75, 0.2, 2, 0.01), (0.1, 1.0, 2, 0.1)])
def test_sizes_are_the_least_at_which_chebyshev_leaves_p(eps, half, sides, p):
    vs = [1 + random(6, 3, seed=side) for side in range(sides)]
    t, s = sizes(eps, half, *vs, p=p)
    e2 = eps / 8
    e1 = eps * (1 - e2) - e2
    assert (e1 + e2) / (1 - e2) == pytest.approx(eps)  # of z/τ, if z is wrong by ε₁ and τ by ε₂
    x, y = (math.sinh(half) ** 2, 0) if sides == 1 else (2 * math.sinh(half) ** 2, math.sinh(2 * half) ** 2)
    first, second = value_ratios(*vs)
    miss2 = lambda t: (x / t + y / t ** 2) / e2 ** 2
    miss1 = lambda s: (first / s + second / s ** 2) / e1 ** 2
    assert miss2(t) <= p / 4 < miss2(t - 1) and miss1(s) <= 3 * p / 4 < miss1(s - 1)
    assert sizes(eps, half, *vs) == sizes(eps, half, *vs, p=0.01)


@pytest.mark.claim("T9")
@pytest.mark.claim("T10")
@check(60, seeds, st.integers(1, 5), st.integers(1, 3), st.floats(0.1, 2), st.floats(0.1, 4), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_the_variance_of_the_normaliser_is_at_most_that_of_sizes(seed, n, D, radius, r, sides, t):
    ks = [in_ball(n, D, seed + side) for side in range(sides)]
    q = random(1, D, seed=seed + 2)
    tau = sampled(ks, radius, r * q / q.norm(), t)
    half = radius * r
    bound = math.sinh(half) ** 2 / t if sides == 1 else 2 * math.sinh(half) ** 2 / t + math.sinh(2 * half) ** 2 / t ** 2
    assert tau.var(0, unbiased=False) <= bound * tau.mean(0) ** 2 * (1 + 1e-9) + 1e-12


@pytest.mark.claim("T9")
def test_the_variance_comes_as_near_to_that_as_one_likes():
    """Of the keys of a cluster a quarter at its edge towards q, the others at the other edge, where e^(2·spread) = 3."""
    k = torch.tensor([0.0] + 300 * [1.0, -1.0, -1.0, -1.0], dtype=F64)[:, None]
    spread = math.log(3) / 2
    tau = sampled([k], 1.0, torch.tensor([[spread]], dtype=F64))
    assert 0.99 < tau.var(unbiased=False) / tau.mean() ** 2 / math.sinh(spread) ** 2 <= 1


@pytest.mark.claim("T9")
@pytest.mark.claim("T10")
@check(60, seeds, st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([1, 2]),
       st.sampled_from([0.0, 1.0, 3.0]))
def test_the_variance_of_the_numerator_is_at_most_that_of_value_ratios(seed, n, D, sides, s, sharp):
    ks, vs = ([random(n, D, seed=seed + i + side) + i for side in range(sides)] for i in (0, 1))
    q = sharp * random(1, D, seed=seed + 9)
    K, V = (x[0] if sides == 1 else pairs(*x) for x in (ks, vs))
    z, p = drawn(ks, vs, q, s)
    variance = (p * (z[:, 0] - (q @ K.T).exp() @ V).square().sum(1)).sum()
    first, second = value_ratios(*vs)
    assert variance <= (first / s + second / s ** 2) * ((q @ K.T).exp().norm() * torch.linalg.matrix_norm(V, 2)) ** 2 * (1 + 1e-9)


def test_what_value_ratios_bounds_is_reached():
    v, q = torch.eye(4, dtype=F64), torch.zeros(1, 4, dtype=F64)
    z, p = drawn([v], [v], q, 1)
    assert value_ratios(v) == pytest.approx((4, 0))
    assert (p * z[:, 0].square().sum(1)).sum() == pytest.approx(4 * 4)  # E‖z‖² = first · n · 1
    assert value_ratios(torch.ones(7, 1), torch.ones(7, 1)) == pytest.approx((2, 1))


@check(40, seeds, st.integers(1, 7), st.integers(1, 7), st.integers(1, 4))
def test_value_ratios_are_those_of_the_pairs_formed(seed, n, m, D):
    v1, v2 = random(n, D, seed=seed), random(m, D, seed=seed + 1)
    V = pairs(v1, v2)
    spectral = lambda x: torch.linalg.svdvals(x)[0].item()
    frobenius = lambda x: math.sqrt(sum(a * a for row in x.tolist() for a in row))
    one, rest = value_ratios(V)
    assert rest == 0 and one == pytest.approx((frobenius(V) / spectral(V)) ** 2) and one <= D + 1e-9
    assert value_ratios(v1, v2) == pytest.approx((
        ((frobenius(v1) * spectral(v2)) ** 2 + (spectral(v1) * frobenius(v2)) ** 2) / spectral(V) ** 2,
        (frobenius(v1) * frobenius(v2) / spectral(V)) ** 2))


def test_the_sizes_of_two_sides_have_no_bound_and_values_whose_products_are_0_are_refused():
    v1, v2 = torch.tensor([[1.0, 0.01]]), torch.tensor([[0.01, 1.0]])
    assert value_ratios(v1, v2)[0] > 1000
    for zero in ((torch.zeros(3, 2),), (torch.tensor([[1.0, 0]]), torch.tensor([[0, 1.0]]))):
        with pytest.raises(ValueError, match="are 0"):
            sizes(0.5, 0.1, *zero)


# ---- memory ---


def by_hand(sides, radius, t, s, number):
    """Live bytes of streams of keys (B, H, T, D): clusters with centre, count, t samples; draws of key and value, and ‖V‖_F²."""
    total = 0
    for k in sides:
        D = k.shape[-1]
        for keys in k.flatten(0, 1).tolist():
            total += len(by_loop(keys, radius)[1]) * (D * number + 8 + t * D * number) + s * 2 * D * number + 8
    return total


def holds(cache):
    """Bytes of every tensor that the cache or its streams hold."""
    tensors = [x for stream in cache.streams for x in vars(stream).values()] + [*vars(cache).values(), *cache.slots.values()]
    inner = [x for x in vars(cache).values() if isinstance(x, LayerCache)]
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor)) + sum(x.nbytes for c in inner for x in c.slots.values())


@pytest.mark.claim("T9")
@pytest.mark.claim("T10")
@each_cache
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_bytes_are_those_of_clusters_samples_and_draws_counted_by_hand(name, dtype):
    t, s, n, number, D = 3, 4, 30, dtype.itemsize, 2
    k, v = random(2, 2, n, D * CACHES[name].vectors).to(dtype), random(2, 2, n, D * CACHES[name].vectors, seed=1).to(dtype)
    k[1] *= 0.1
    cache = CACHES[name](0.7, t, s)
    assert cache.bytes() == (0, 0)
    for i in range(1, n + 1):
        fed(cache, k[:, :, i - 1:i], v[:, :, i - 1:i])
        assert cache.seen == i
        if i in (1, 2, 9, n):
            sides = [x[:, :, :i] for x in k.chunk(CACHES[name].vectors, -1)]
            if name == "two":
                sides = [torch.stack([stream_of_pairs(*x) for x in zip(*(x.flatten(0, 1) for x in sides))]).unflatten(0, (2, 2))]
            tokens = 2 * 2 * i * (4 * D * number + 4) if name == "two" else 0
            live, allocated = cache.bytes()
            assert live == by_hand(sides, 0.7, t, s, number) + tokens
            assert live <= allocated == holds(cache)
            for stream in cache.streams:
                assert stream.count.shape[2] <= 1.1 * (stream.count > 0).sum(-1).max() + 1


def of_known_keys(n, seed, D=3):
    """k, v (1, 2, n, 2D): the keys are 4 in each head."""
    token = torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed))
    return random(1, 2, 4, 2 * D, seed=99)[:, :, token], random(1, 2, n, 2 * D, seed=seed)


@pytest.mark.claim("T9")
@pytest.mark.claim("T10")
def test_a_text_of_known_keys_costs_four_nothing_and_two_its_tokens():
    four, two = SubGen4Cache(0.1, 5, 6), SubGen2Cache(0.1, 5, 6)
    size = {}
    for seed in range(4):
        for cache in (four, two):
            fed(cache, *of_known_keys(30, seed))
            size[cache, seed] = cache.bytes()
    assert len({size[four, seed] for seed in range(4)}) == 1 and four.seen == two.seen == 120
    grown = [size[two, seed][0] - size[two, seed - 1][0] for seed in range(1, 4)]
    assert grown == 3 * [2 * 30 * (4 * 3 * 8 + 4)]  # 2 heads: k₁, k₂, v₁, v₂ and a position
    assert all((two.streams[0].count.sum(-1) == 120 ** 2).flatten()) and all((x.count.sum(-1) == 120).all() for x in four.streams)


# ---- T11, T12: how many clusters ---


def clusters(k, radius):
    """How many clusters k (n, D) make."""
    return int((streamed(k[None, None], radius=radius).count > 0).sum())


@pytest.mark.claim("T11")
@check(60, seeds, st.integers(1, 5), st.sampled_from([0.25, 0.5, math.e / 3, 1.0, 1.9, 2.0]),
       st.sampled_from(["ball", "sphere", "grid", "far"]))
def test_never_more_clusters_than_balls_of_half_the_radius_that_do_not_overlap(seed, D, radius, kind):
    k = in_ball(150, D, seed)
    if kind == "sphere":
        k = (k / k.norm(dim=1, keepdim=True)) * (1 - 1e-12)
    if kind == "grid":  # steps just longer than the radius
        step = torch.arange(-4, 5) * (radius * (1 + 1e-9))
        k = torch.cartesian_prod(*[step[step.abs() <= 1]] * D).view(-1, D).double()
        k = k[k.norm(dim=1) <= 1]
    if kind == "far":  # each as far as possible from those before
        rest, far = k, k[:1]
        for _ in range(100):
            far = torch.cat((far, rest[torch.cdist(rest, far).amin(1).argmax()][None]))
        k = far
    m = clusters(k, radius)
    assert 1 <= m <= most_clusters(D, radius) and most_clusters(D, radius) == pytest.approx((1 + 2 / radius) ** D)
    assert k.norm(dim=1).max() <= 1


@pytest.mark.claim("T11")
@pytest.mark.parametrize("radius", [1.999, 0.9999, 0.6666, 0.4999])
def test_on_a_line_the_bound_is_reached(radius):
    k = torch.arange(-1, 1 + 1e-9, radius + 1e-6, dtype=F64)[:, None]
    assert clusters(k, radius) == math.floor(2 / (radius + 1e-6)) + 1 > most_clusters(1, radius) - 1


@pytest.mark.claim("T11")
def test_the_papers_covering_number_is_not_e_to_the_d():
    delta = math.e / 3
    for D in range(1, 9):
        assert (3 / delta) ** D == pytest.approx((9 / math.e) ** D) and math.ceil((9 / math.e) ** D) > math.ceil(math.e ** D)
        assert math.e ** D < most_clusters(D, delta) < (3 / delta) ** D
    assert 9 / math.e == pytest.approx(3.311, abs=1e-3) and most_clusters(1, delta) == pytest.approx(3.207, abs=1e-3)
    assert 3 / (3 / math.e) == pytest.approx(math.e) and 3 / math.e > 1  # e it is at 3/e: there one ball covers all


@pytest.mark.claim("T11")
def test_two_keys_of_a_cluster_are_within_twice_the_radius_and_not_once():
    k = torch.tensor([[0.0, 0], [1, 0], [-1, 0]])
    assert clusters(k, 1.0) == 1 and torch.dist(k[1], k[2]) == 2
    k = in_ball(400, 2, 1)
    widest = [torch.pdist(k[own]).max() for own in cluster(k, 0.4) if len(own) > 1]
    assert 0.4 < max(widest) <= 0.8


@pytest.mark.claim("T11")
def test_e_to_the_d_sets_of_diameter_e_over_3_are_enough_for_d_1_and_2():
    """Three pieces of [−1, 1]; eight discs, one in the middle and seven around it."""
    assert math.ceil(math.e) == 3 and 2 / 3 < math.e / 3
    r = 1 / (1 + 2 * math.cos(2 * math.pi / 7))
    assert math.ceil(math.e ** 2) == 8 and r == pytest.approx(0.44504, abs=1e-5) and 2 * r < math.e / 3
    around = 2 * math.pi / 7 * torch.arange(7, dtype=F64)
    ring = 2 * r * math.cos(math.pi / 7) * torch.stack((around.cos(), around.sin()), 1)
    centres = torch.cat((torch.zeros(1, 2, dtype=F64), ring))
    step = torch.linspace(-1, 1, 801, dtype=F64)
    points = torch.cartesian_prod(step, step)
    angle = torch.linspace(0, 2 * math.pi, 10_000, dtype=F64)
    edge = torch.stack((angle.cos(), angle.sin()), 1)
    for x in (points[points.norm(dim=1) <= 1], edge, r * edge):
        assert torch.cdist(x, centres).amin(1).max() <= r + 1e-9
    assert torch.cdist(edge, centres[:-1]).amin(1).max() > r  # none can be spared


@pytest.mark.claim("T12")
@pytest.mark.parametrize("D", [2, 3, 16])
def test_in_few_dimensions_clusters_stop_growing_with_the_text(D):
    found = [clusters(in_ball(4096, D, seed)[:n], math.e / 3) for seed in range(2) for n in (512, 4096)]
    for few, many in (found[:2], found[2:]):
        assert few <= many <= few + 2 if D < 16 else many > 1.8 * few
        assert many <= most_clusters(D, math.e / 3)


# ---- as caches ---


def text(name, B=2, H=2, G=3, n=9, D=3):
    """q, k, v as the decoder lays them out, heads inside tokens."""
    vectors = CACHES[name].vectors
    return (random(B, n, heads, width, seed=seed).transpose(1, 2)
            for seed, (heads, width) in enumerate(((H * G, D), (H, vectors * D), (H, vectors * D))))


def run(cache, q, k, v, chunk=None, first=0):
    pos = torch.arange(first, first + q.shape[2])[None]
    parts = zip(*(x.split(chunk or q.shape[2], 2) for x in (q, k, v)), pos.split(chunk or q.shape[2], 1))
    return torch.cat([cache.attend(*x) for x in parts], 2)


def exactly(q, k, v, scale, vectors):
    """Causal (tensor) attention, as defined."""
    G, rows = q.shape[1] // k.shape[1], []
    for i in range(q.shape[2]):
        k_, v_ = ([x[:, :, :i + 1].repeat_interleave(G, 1) for x in both.chunk(vectors, -1)] for both in (k, v))
        one = scale * q[:, :, i:i + 1]
        rows.append(tensor_attention(one, *k_, *v_) if vectors == 2 else (one @ k_[0].mT).softmax(-1) @ v_[0])
    return torch.cat(rows, 2)


def with_one_value(v, vectors):
    """Every draw is then the same, and z exact: only token 2 has a value, or a first and token 4 a second one."""
    v = v.clone()
    for half, token in zip(v.chunk(vectors, -1), (2, 4)):
        half[:, :, torch.arange(v.shape[2]) != token] = 0
    return v


@pytest.mark.claim("T9")
@pytest.mark.claim("T10")
@each_cache
@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
@pytest.mark.parametrize("sharp", [1, 1000])
def test_where_every_key_is_a_cluster_and_one_token_has_a_value_attention_is_exact(name, chunk, scale, sharp):
    Method = CACHES[name]
    q, k, v = text(name)
    q, v = q * sharp, with_one_value(v, Method.vectors)
    k[:, :, 5] = k[:, :, 3]  # a cluster of two
    expected = exactly(q, k, v, 3 ** -0.5 if scale is None else scale, Method.vectors)
    y, single = (run(Method(0.0, 2, 3, scale=scale), *(x.to(dtype) for x in (q, k, v)), chunk) for dtype in (F64, torch.float32))
    assert y.shape == q.shape and y.dtype == F64 and single.dtype == torch.float32
    assert torch.allclose(y, expected, rtol=1e-9, atol=1e-12) and (expected[:, :, 4:].abs().amax(-1) > 0).any()
    assert torch.allclose(single.double(), expected, rtol=0, atol=1e-5 * sharp)


@each_cache
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_where_every_key_is_a_cluster_the_normaliser_is_exact(name, chunk):
    q, k, v = text(name)
    cache = fed(CACHES[name](0.0, 3, 2), k, v, chunk)
    one = q[:, :, -1].unflatten(1, (2, 3))
    z, tau, top = cache.estimate(one)
    K = k if cache.vectors == 1 else pairs(*k.chunk(2, -1))
    assert torch.allclose(tau * top.exp(), (one @ K.mT).exp().sum(-1, keepdim=True), rtol=1e-10)
    assert (z.abs().amax() <= 1e3) and (tau >= 0).all()


@pytest.mark.claim("T9")
@each_cache
def test_one_token_is_its_own_answer(name):
    q, k, v = text(name, n=1)
    value = v if CACHES[name].vectors == 1 else v[..., :3] * v[..., 3:]
    assert torch.allclose(run(CACHES[name](0.5, 4, 7), q, k, v), value.repeat_interleave(3, 1), rtol=1e-12)


@each_cache
@pytest.mark.parametrize("sign", [1, -1])
def test_terms_whose_exp_overflows_are_finite_even_where_the_sample_and_the_draw_are_far_apart(name, sign):
    vectors = CACHES[name].vectors
    k = torch.tensor([0.0, 1000, -1000]).view(1, 1, 3, 1)
    k = (k if vectors == 1 else torch.cat((k, torch.ones_like(k)), -1)).expand(300, -1, -1, -1)
    z, tau, top = fed(CACHES[name](3000.0, 1, 1), k, torch.ones_like(k)).estimate(torch.full((300, 1, 1, 1), float(sign)))
    assert z.isfinite().all() and tau.isfinite().all() and top.isfinite().all()
    assert torch.maximum(z.abs(), tau).amin() > 0.1 and {round(x, -2) for x in top.flatten().tolist()} == {0, 1000, -1000}


@each_cache
def test_the_seed_and_the_layer_decide_what_is_kept(name):
    def one(layer=0, **knobs):
        cache = CACHES[name](2.0, 2, 3, **knobs)
        cache.layer = layer
        return run(cache, *text(name))

    assert torch.equal(one(), one(seed=0)) and torch.equal(one(seed=3), one(seed=3))
    for x, y in ((one(), one(seed=1)), (one(), one(layer=1)), (one(layer=1), one(seed=1))):
        assert not torch.allclose(x, y)


@each_cache
def test_a_copy_and_its_original_go_on_alike_and_apart(name):
    q, k, v = text(name)
    cache = CACHES[name](1.0, 2, 3)
    run(cache, *(x[:, :, :5] for x in (q, k, v)))
    two, three = copy.deepcopy(cache), copy.deepcopy(cache)
    run(three, *(-x[:, :, 5:] for x in (q, k, v)), first=5)  # another text disturbs neither
    y, again = (run(one, *(x[:, :, 5:] for x in (q, k, v)), first=5) for one in (cache, two))
    assert torch.equal(y, again) and (cache.seen, cache.bytes()) == (two.seen, two.bytes())


@each_cache
@pytest.mark.parametrize("knobs", [dict(radius=-0.1), dict(radius=math.nan), dict(samples=0), dict(draws=0)])
def test_bad_knobs_are_refused_at_construction(name, knobs):
    with pytest.raises(ValueError, match="must be"):
        CACHES[name](**dict(radius=1.0, samples=1, draws=1) | knobs)
    assert CACHES[name](radius=0, samples=1, draws=1).seen == 0


@each_cache
def test_in_a_decoder(name):
    torch.manual_seed(0)
    vectors = CACHES[name].vectors
    config = dict(vocab_size=20, max_len=40, n_layers=2, n_heads=4, n_kv_heads=2, d_model=16, d_ff=16)
    model = Decoder(Config(**config, vectors=vectors)).eval()
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    prompt = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
    fresh = lambda model=model, **knobs: make_cache(model, CACHES[name], **dict(radius=0.5, samples=4, draws=8) | knobs)
    assert prefill(model, prompt, fresh(), chunk=5).isfinite().all()
    new = generate(model, prompt, 10, fresh())
    assert new.shape == (2, 10) and torch.equal(new, generate(model, prompt, 10, fresh()))
    with torch.no_grad():
        exact = model(prompt)[:, -1]
    few, many = ((prefill(model, prompt, fresh(radius=0.0, draws=draws)) - exact).norm() / exact.norm()
                 for draws in (8, dict(tokens=100, two=20_000, four=800)[name]))
    assert many < 0.2 < few
    with pytest.raises(ValueError, match=f"{CACHES[name].__name__} is for {vectors} key and value vectors"):
        fresh(Decoder(Config(**config, vectors=3 - vectors)))
