"""Test SubGen's lemmas: means and variances over all choices; sizes; how many clusters."""

from itertools import product
import math

from hypothesis import strategies as st
from pytest import approx, mark, raises
import torch

from common import clusters_of
from exact import F64, check, near, random, seeded, seeds
from methods.baselines.sub_gen import Stream, SubGen, SubGen2Cache, SubGen4Cache
from methods.tensor_attention import pairs
from methods.theory.clustering import (
    exact,
    most_clusters,
    sizes,
    value_ratios,
)

RADIUS, RUNS = 0.8, 20_000


def with_ones(sides):
    """Return two sides (n, D): one side alone meets a token of ones."""
    ones = torch.ones_like(sides[0][:1])
    return [*sides, ones][:2]


def joined(sides):
    """Return the pairs of two sides, or one side as it is."""
    return pairs(*sides) if len(sides) == 2 else sides[0]


def squared_shares(v):
    """Return ‖v_i‖²/‖V‖² of each row of v (n, D)."""
    square = v.square()
    return square.sum(1) / square.sum()


def sampled(ks, radius, q, t=1):
    """Return τ of t samples a cluster for every equally likely choice, (choices, G).

    ks: each side's keys.
    """
    keys, shares = [], []
    for k in with_ones(ks):
        cluster, centres = clusters_of(k.tolist(), radius)
        cluster = torch.tensor(cluster)
        slots = []
        for c in range(len(centres)):
            slots += [(cluster == c).nonzero()[:, 0].tolist()] * t
        share = [len(members) / t for members in slots]
        choices = torch.tensor([*product(*slots)])
        keys.append(k[choices])  # (choices, slots, D)
        shares.append(torch.tensor(share, dtype=F64))
    w = torch.einsum("xid,yjd,gd->xygij", *keys, q).exp()
    tau = torch.einsum("xygij,i,j->xyg", w, *shares)
    return tau.flatten(0, 1)


def drawn(ks, vs, q, s):
    """Return z of s draws for every choice, (choices, G, D), and each choice's probability."""
    keys, values = [], []
    chances = []
    for k, v in zip(with_ones(ks), with_ones(vs)):
        choices = torch.tensor([*product(range(len(k)), repeat=s)])
        chance = squared_shares(v)[choices]
        keys.append(k[choices])
        values.append(v[choices] / (s * chance[..., None]))
        chances.append(chance.prod(1))
    w = torch.einsum("xid,yjd,gd->xygij", *keys, q).exp()
    z = torch.einsum("xygij,xid,yjd->xygd", w, *values)
    left, right = chances
    chance = left[:, None] * right
    return z.flatten(0, 1), chance.flatten()


def in_ball(n, D, seed):
    """Return n points (n, D), uniform in the unit ball."""
    x = random(n, D, seed=seed)
    length = torch.rand(n, 1, generator=seeded(seed + 1), dtype=F64)
    direction = x / x.norm(dim=1, keepdim=True)
    return direction * length ** (1 / D)


def estimates(
    cache,
    q,
    k,
    v,
    runs,
    chunk=None,
):
    """Return z (runs, G, D) and τ (runs, G, 1) of an empty cache after the tokens.

    The runs are a batch.
    """
    many = lambda x: x.expand(runs, 1, *x.shape)
    for part in torch.arange(len(k)).split(chunk or len(k)):
        cache.write(many(k[part]), many(v[part]), part[None])
    z, tau, top = cache.estimate(many(q))
    scale = top.exp()
    return (z * scale)[:, 0], (tau * scale)[:, 0]


@mark.claim("T9", "T10")
@mark.parametrize("Store", [SubGen, SubGen2Cache, SubGen4Cache])
@mark.parametrize("samples, chunk", [(1, 9), (2, 2)])
def test_numerator_and_normaliser_have_mean_and_variance_of_all_choices(
    Store, samples, chunk
):
    """Means and variances equal those over all choices; z and τ are uncorrelated."""
    n = 4 if Store is SubGen2Cache else 5
    # keys of one wide cluster, and of two
    centres = torch.tensor([[0.9, 0.2], [-0.5, 0.8]], dtype=F64)
    ks, vs = [], []
    for side in range(Store.vectors):
        cluster = torch.arange(n) % (2 + side) // 2
        ks.append(centres[cluster] + 0.35 * random(n, 2, seed=side))
        vs.append(1 + random(n, 2, seed=2 + side))
    q = random(2, 2, seed=5) * 3
    k = torch.cat(ks, 1)
    v = torch.cat(vs, 1)
    K = joined(ks)
    V = joined(vs)
    if Store is SubGen2Cache:  # one stream, of pairs in the order in which they come
        order = sorted(range(n * n), key=lambda i: (max(divmod(i, n)), i % n < i // n))
        ks, vs = [K[order]], [V[order]]
    e = (q @ K.T).exp()
    T = e.sum(1)
    Z = e @ V

    # every left sample meets every right one
    crossed = samples if Store is SubGen4Cache else 1
    every = sampled(ks, RADIUS, q, crossed)
    assert torch.allclose(every.mean(0), T)
    assert (every.std(0) > 0.12 * T).all()
    rows, p = drawn(ks, vs, q, 2)
    mean = lambda x: torch.einsum("r,rgd->gd", p, x)
    assert torch.allclose(mean(rows), Z)

    cache = Store(radius=RADIUS, samples=samples, draws=2, seed=samples)
    z, tau = estimates(cache, q, k, v, RUNS, chunk)
    tau = tau[..., 0]
    assert near(tau, T)
    assert near(z, Z)
    tau_error = tau - T
    variance = (every - T).square().mean(0)
    assert near(tau_error.square(), variance * crossed / samples)
    z_error = z - Z
    assert near(z_error.square(), mean((rows - Z).square()))
    assert near(z_error * tau_error[..., None], torch.zeros_like(Z))
    if samples == 1:  # z and 1/τ are independent
        inverse = (1 / every).mean(0)
        assert near(z / tau[..., None], Z * inverse[:, None])


@mark.claim("T10")
def test_the_ratio_is_too_large_by_the_normaliser_s_relative_variance(note):
    """The bias is exact for a cluster of scores ±a, whose +a are binomial."""
    a = 0.6
    plus = [1.0, 0, a, 0]
    minus = [1.0, 0, -a, 0]
    k = torch.tensor([plus, minus] * 2, dtype=F64)
    v = 1 + 0.2 * random(4, 4, seed=1)
    q = torch.tensor([[1.0, 0]], dtype=F64)
    z, tau, _ = exact(q, k, v)
    for t in (1, 8):
        expected = 0.0
        for j in range(t + 1):  # j of t samples are +a
            chance = math.comb(t, j) / 2**t
            total = math.exp(a) * j + math.exp(-a) * (t - j)
            expected += chance * math.cosh(a) * t / total
        variance = math.tanh(a) ** 2 / t
        assert 0 < expected - 1 - variance < 4 * variance**2

        cache = SubGen2Cache(radius=2 * a, samples=t, draws=16, scale=1.0)
        zs, taus = estimates(cache, q, k, v, RUNS)
        ratio = (zs / taus).sum((1, 2)) / (z / tau).sum()
        assert near(ratio, expected)
        note("T10", **{f"bias_{t}": 100 * (ratio.mean() - 1)})


def standard_error(
    Store,
    q,
    k,
    v,
    s,
):
    """Return √E‖z − E z‖²/τ in the lemmas' unit: for draws of pairs, or of both sides crossed."""
    k1, k2 = k.chunk(2, 1)
    v1, v2 = v.chunk(2, 1)
    e = torch.einsum("ad,bd,d->ab", k1, k2, q[0]).exp()
    V = v1[:, None] * v2
    terms = e[..., None] * V
    z, tau, unit = exact(q, k, v)
    if Store is SubGen2Cache:
        square = V.square().sum() * e.square().sum()
        variance = (square - z.square().sum()) / s
    # Hoeffding: what one side does, what the other does, and what only both do together
    else:
        p1, p2 = squared_shares(v1), squared_shares(v2)
        one = terms.sum(1) / p1[:, None] - z
        other = terms.sum(0) / p2[:, None] - z
        alone = p1 @ one.square().sum(1) + p2 @ other.square().sum(1)
        every = (terms.square().sum(2) / p1[:, None] / p2).sum() - z.square().sum()
        variance = alone / s + (every - alone) / s**2
    return (variance.sqrt() / tau / unit).item()


@mark.claim("T9", "T10")
@mark.parametrize(
    "Store, claim, eps, part",
    [
        (SubGen2Cache, "T10", 0.5, 1),
        (SubGen4Cache, "T9", 0.75, 4),
    ],
)
def test_at_the_lemmas_sizes_the_error_is_that_of_the_draws(
    Store, claim, eps, part, note
):
    """Four tight clusters a side; a `part` of the draws that the lemma needs."""
    cluster = torch.arange(32) % 4
    sides = []
    for seed in (0, 2):
        centres = 0.8 * in_ball(4, 2, seed)
        sides.append(centres[cluster] + 0.01 * in_ball(32, 2, seed + 9))
    k = torch.cat(sides, 1)
    v = 1 + random(32, 4)
    q = torch.tensor([[1.2, 1.6]], dtype=F64)
    radius = 0.02
    values = v.chunk(2, 1)
    if Store is SubGen2Cache:
        values = [pairs(*values)]
    most = sizes(eps, 2 * radius, *values)  # the query has norm 2
    t, s = (math.ceil(n / part) for n in most)

    cache = Store(radius=radius, samples=t, draws=s, scale=1.0)
    zs, taus = estimates(cache, q, k, v, 200)
    z, tau, unit = exact(q, k, v)
    difference = zs / taus - z / tau
    error = difference.norm(dim=-1) / unit
    rms = error.square().mean().sqrt().item()
    predicted = standard_error(Store, q, k, v, s)
    assert rms == approx(predicted, rel=0.12)  # ± 4 %
    assert error.max() < eps / 5
    note(claim, rms=rms, predicted=predicted)


@mark.parametrize(
    "eps, half, sides, p",
    [
        (0.5, 0.4, 1, 0.01),
        (0.1, 1, 2, 0.1),
    ],
)
@mark.claim("T9")
def test_sizes_are_the_least_at_which_chebyshev_leaves_p(eps, half, sides, p, note):
    vs = [1 + random(6, 3, seed=side) for side in range(sides)]
    t, s = sizes(eps, half, *vs, p=p)
    e2 = eps / 8
    # an error of ε₁ in z and ε₂ in τ makes (ε₁ + ε₂)/(1 − ε₂) = ε in z/τ
    e1 = eps * (1 - e2) - e2
    x, y = math.sinh(half) ** 2, 0
    if sides == 2:
        x, y = 2 * x, math.sinh(2 * half) ** 2
    miss = lambda first, second, n, e: (first / n + second / n**2) / e**2
    assert miss(x, y, t, e2) <= p / 4 < miss(x, y, t - 1, e2)
    ratios = value_ratios(*vs)
    assert miss(*ratios, s, e1) <= 3 * p / 4 < miss(*ratios, s - 1, e1)

    # with two sides there is no bound
    one = torch.tensor([[1.0, 0.01]])
    other = torch.tensor([[0.01, 1.0]])
    ratio, _ = value_ratios(one, other)
    assert ratio > 1000
    note("T9", unbounded=ratio)
    with raises(ValueError, match="are 0"):
        sizes(0.5, 0.1, one.round(), other.round())


@check(
    "T9 T10",
    seeds,
    st.integers(1, 4),
    st.integers(1, 3),
    st.floats(0.1, 2),
    st.floats(0.1, 4),
    st.integers(1, 2),
    st.integers(1, 2),
)
def test_variances_are_at_most_those_of_sizes_and_value_ratios(
    seed, n, D, radius, r, sides, m
):
    ks, vs = [], []
    for side in range(sides):
        ks.append(in_ball(n, D, seed + side))
        vs.append(random(n, D, seed=seed + side))
    q = random(1, D, seed=seed + 2)
    q = r * q / q.norm()
    half = radius * r
    tau = sampled(ks, radius, q, m)
    x = math.sinh(half) ** 2 / m
    if sides == 2:
        x = 2 * x + math.sinh(2 * half) ** 2 / m**2
    variance = tau.var(0, unbiased=False)
    bound = x * tau.mean(0) ** 2
    assert variance <= bound * (1 + 1e-9) + 1e-12

    K = joined(ks)
    V = joined(vs)
    e = (q @ K.T).exp()
    z, p = drawn(ks, vs, q, m)
    error = (z[:, 0] - e @ V).square().sum(1)
    first, second = value_ratios(*vs)
    unit = e.norm() * torch.linalg.matrix_norm(V, 2)
    bound = (first / m + second / m**2) * unit**2
    assert (p * error).sum() <= bound * (1 + 1e-9)


few = st.integers(1, 7)


@check("T9", seeds, few, few, st.integers(1, 4))
def test_value_ratios_are_those_of_the_pairs_formed(seed, n, m, D):
    v1 = random(n, D, seed=seed)
    v2 = random(m, D, seed=seed + 1)
    squares = [torch.linalg.svdvals(x) ** 2 for x in (v1, v2, pairs(v1, v2))]
    f1, f2, f = (x.sum().item() for x in squares)
    s1, s2, s = (x.max().item() for x in squares)
    assert value_ratios(pairs(v1, v2)) == approx((f / s, 0))
    assert value_ratios(v1, v2) == approx(((f1 * s2 + s1 * f2) / s, f1 * f2 / s))


def clusters(k, radius):
    """Return the number of clusters of the keys k (n, D)."""
    stream = Stream(k[None, None], radius, 1, 1, None)
    stream.add(k[None, None], k[None, None])
    return int((stream.count > 0).sum())


@mark.claim("T11")
def test_the_papers_covering_number_is_not_e_to_the_d(note):
    for radius in (1.999, 0.9999, 0.6666, 0.4999):  # on a line the bound is reached
        step = radius + 1e-6
        k = torch.arange(-1, 1 + 1e-9, step, dtype=F64)[:, None]
        number = clusters(k, radius)
        assert number == math.floor(2 / step) + 1
        assert number > most_clusters(1, radius) - 1
    # (3/δ)^D is (9/e)^D; e^D it is at δ = 3/e, where one ball covers all
    delta = math.e / 3
    for D in range(1, 9):
        assert math.e**D < most_clusters(D, delta) < (3 / delta) ** D
    assert most_clusters(3, 0.5) == 125
    note("T11", theirs=3 / delta, ours=most_clusters(1, delta))


@mark.claim("T12")
def test_in_few_dimensions_clusters_stop_growing_with_the_text(note):
    radius = math.e / 3
    for D in (2, 3, 16):
        k = in_ball(4096, D, D)
        few = clusters(k[:512], radius)
        many = clusters(k, radius)
        if D < 16:
            assert few <= many <= few + 3
        else:
            assert many > 1.8 * few
        assert many <= most_clusters(D, radius)
        note("T12", **{f"few_{D}": few, f"many_{D}": many})
