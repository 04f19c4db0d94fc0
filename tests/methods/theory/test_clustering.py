"""Test SubGen's lemmas: means and variances over all choices; sizes; how many clusters."""

from itertools import product
import math

from hypothesis import strategies as st
from pytest import approx, mark, raises
import torch

from exact import F64, close, near, random, seeded, vector
from methods.tensor_attention import new_pairs, pairs
from methods.theory.clustering import (
    crossed,
    estimate,
    exact,
    most_clusters,
    sizes,
    sub_gen,
    value_ratios,
)

RADIUS, RUNS = 0.8, 20_000


def pair_stream(x, y):
    """Return all pairs of x and y (n, D), (n², D), in the order in which the tokens form them."""
    return torch.cat([new_pairs(x[:n], y[:n]) for n in range(1, len(x) + 1)])


def clusters_of(keys, radius):
    """Return each key's cluster, the nearest; keys: a list of rows."""
    clusters = []
    centres = []
    for key in keys:
        distances = [math.dist(key, x) for x in centres]
        if min(distances, default=math.inf) > radius:
            centres.append(key)
            distances.append(0.0)
        clusters.append(distances.index(min(distances)))
    return clusters


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


def weights(keys, q):
    """Return e^⟨q, k₁ ∘ k₂⟩ of two sides' keys (choices, slots, D)."""
    return torch.einsum("xid,yjd,gd->xygij", *keys, q).exp()


def sampled(
    ks,
    radius,
    q,
    t=1,
):
    """Return τ of t samples a cluster for every equally likely choice, (choices, G).

    ks: each side's keys.
    """
    keys = []
    shares = []
    for k in with_ones(ks):
        cluster = torch.tensor(clusters_of(k.tolist(), radius))
        slots = []
        for c in cluster.unique():
            slots += [(cluster == c).nonzero()[:, 0].tolist()] * t
        share = [len(members) / t for members in slots]
        choices = torch.tensor([*product(*slots)])
        keys.append(k[choices])  # (choices, slots, D)
        shares.append(torch.tensor(share, dtype=F64))
    tau = torch.einsum("xygij,i,j->xyg", weights(keys, q), *shares)
    return tau.flatten(0, 1)


def drawn(
    ks,
    vs,
    q,
    s,
):
    """Return z of s draws for every choice, (choices, G, D), and each choice's probability."""
    keys = []
    values = []
    chances = []
    for k, v in zip(with_ones(ks), with_ones(vs)):
        choices = torch.tensor([*product(range(len(k)), repeat=s)])
        chance = squared_shares(v)[choices]
        keys.append(k[choices])
        values.append(v[choices] / (s * chance[..., None]))
        chances.append(chance.prod(1))
    z = torch.einsum("xygij,xid,yjd->xygd", weights(keys, q), *values)
    left, right = chances
    chance = left[:, None] * right
    return z.flatten(0, 1), chance.flatten()


def in_ball(n, D, seed):
    """Return n points (n, D), uniform in the unit ball."""
    x = random(n, D, seed=seed)
    length = torch.rand(n, 1, generator=seeded(seed + 1), dtype=F64)
    direction = x / x.norm(dim=1, keepdim=True)
    return direction * length ** (1 / D)


def sample_of(ks, vs, *options, runs=RUNS):
    """Return SubGen's sample of one stream, or of two crossed."""
    generator = seeded(0)
    samples = [sub_gen(k, v, *options, generator, runs) for k, v in zip(ks, vs)]
    return crossed(*samples) if len(samples) == 2 else samples[0]


@mark.claim("T9", "T10")
@mark.parametrize("kind", ["tokens", "pairs", "sides"])
@mark.parametrize("samples", [1, 2])
def test_numerator_and_normaliser_have_mean_and_variance_of_all_choices(kind, samples):
    """Means and variances equal those over all choices; z and τ are uncorrelated."""
    n = 4 if kind == "pairs" else 5
    # keys of one wide cluster, and of two
    centres = torch.tensor([[0.9, 0.2], [-0.5, 0.8]], dtype=F64)
    ks = []
    vs = []
    for side in range(1 if kind == "tokens" else 2):
        cluster = torch.arange(n) % (2 + side) // 2
        ks.append(centres[cluster] + 0.35 * random(n, 2, seed=side))
        vs.append(1 + random(n, 2, seed=2 + side))
    if kind == "pairs":
        ks, vs = [pair_stream(*ks)], [pair_stream(*vs)]
    q = random(2, 2, seed=5) * 3
    e = (q @ joined(ks).T).exp()
    T = e.sum(1)
    Z = e @ joined(vs)

    # every left sample meets every right one
    t = samples if kind == "sides" else 1
    every = sampled(ks, RADIUS, q, t)
    assert torch.allclose(every.mean(0), T)
    assert (every.std(0) > 0.12 * T).all()
    rows, p = drawn(ks, vs, q, 2)
    mean = lambda x: torch.einsum("r,rgd->gd", p, x)
    assert torch.allclose(mean(rows), Z)

    z, tau = estimate(q, sample_of(ks, vs, RADIUS, samples, 2))
    tau = tau[..., 0]
    assert near(tau, T)
    assert near(z, Z)
    tau_error = tau - T
    variance = (every - T).square().mean(0)
    assert near(tau_error.square(), variance * t / samples)
    z_error = z - Z
    assert near(z_error.square(), mean((rows - Z).square()))
    assert near(z_error * tau_error[..., None], torch.zeros_like(Z))
    if samples == 1:  # z and 1/τ are independent
        assert near(z / tau[..., None], Z * (1 / every).mean(0)[:, None])


@mark.claim("T10")
def test_the_ratio_is_too_large_by_the_normaliser_s_relative_variance(note):
    """The bias is exact for a cluster of scores ±a, whose +a are binomial."""
    a = 0.6
    k2 = vector(a, -a, a, -a)[:, None]
    k = pair_stream(torch.ones_like(k2), k2)
    v = 1 + 0.2 * random(16, 1, seed=1)
    q = vector(1)
    z, tau, _ = exact(q, k, v)
    for t in (1, 8):
        expected = 0.0
        for j in range(t + 1):  # j of t samples are +a
            chance = math.comb(t, j) / 2**t
            total = math.exp(a) * j + math.exp(-a) * (t - j)
            expected += chance * math.cosh(a) * t / total
        variance = math.tanh(a) ** 2 / t
        assert 0 < expected - 1 - variance < 4 * variance**2

        zs, taus = estimate(q[None], sub_gen(k, v, 2 * a, t, 16, seeded(0), RUNS))
        ratio = (zs / taus).sum((1, 2)) / (z / tau).sum()
        assert near(ratio, expected)
        note("T10", **{f"bias_{t}": 100 * (ratio.mean() - 1)})


def standard_error(q, ks, vs, s):
    """Return √E‖z − E z‖²/τ in the lemmas' unit: for draws of one stream, or of two crossed."""
    z, tau, unit = exact(q[0], joined(ks), joined(vs))
    rows, p = drawn(ks, vs, q, 1)
    p = p.view(len(ks[0]), -1)
    error = (rows - z).view(*p.shape, -1)
    # Hoeffding: what one side does, what the other does, and what only both do together
    p1 = p.sum(1)
    p2 = p.sum(0)
    one = torch.einsum("b,abd->ad", p2, error)
    other = torch.einsum("a,abd->bd", p1, error)
    alone = p1 @ one.square().sum(1) + p2 @ other.square().sum(1)
    every = (p * error.square().sum(2)).sum()
    variance = alone / s + (every - alone) / s**2
    return (variance.sqrt() / tau / unit).item()


@mark.claim("T9", "T10")
@mark.parametrize(
    "claim, eps, part",
    [
        ("T10", 0.5, 1),
        ("T9", 0.75, 8),
    ],
)
def test_at_the_lemmas_sizes_the_error_is_that_of_the_draws(claim, eps, part, note):
    """Four tight clusters a side; `part` times fewer samples and draws than `sizes` asks for."""
    cluster = torch.arange(12) % 4
    ks = []
    vs = []
    for seed in (0, 2):
        centres = 0.8 * in_ball(4, 2, seed)
        ks.append(centres[cluster] + 0.01 * in_ball(12, 2, seed + 9))
        vs.append(1 + random(12, 2, seed=seed))
    if claim == "T10":
        ks, vs = [pair_stream(*ks)], [pair_stream(*vs)]
    q = vector(1.2, 1.6)[None]
    radius = 0.02
    # the query has norm 2
    t, s = (math.ceil(n / part) for n in sizes(eps, 2 * radius, *vs))

    zs, taus = estimate(q, sample_of(ks, vs, radius, t, s, runs=200))
    z, tau, unit = exact(q[0], joined(ks), joined(vs))
    error = (zs / taus - z / tau).norm(dim=-1) / unit
    rms = error.square().mean().sqrt().item()
    predicted = standard_error(q, ks, vs, s)
    assert rms == approx(predicted, rel=0.12)  # ± 4 %
    assert error.max() < eps / 4
    note(claim, rms=rms, predicted=predicted)


def test_a_value_of_norm_0_is_never_drawn():
    x = vector(0, 3, 0)[:, None]
    sample = sub_gen(x, x, 0.0, 1, 5, seeded(0))
    assert (sample.drawn == 3).all()
    assert close(sample.rows, 3 / 5)


@mark.claim("T9", "T10")
def test_memory_stops_growing_if_keys_repeat_but_pairs_need_all_tokens(note):
    x, y = random(2, 9, 3)
    stream = pair_stream(x, y)
    for n in 4, 9:
        assert sorted(stream[: n * n].tolist()) == sorted(pairs(x[:n], y[:n]).tolist())

    sides = random(2, 4, 3)
    held = []
    for n in (15, 60):
        token = torch.arange(n) % 4
        for keys in (sides[0, token], pair_stream(*sides[:, token])):
            sample = sub_gen(keys, keys, 0.1, 5, 6, seeded(0))
            centres = len(sample.shares) // 5 * 3
            held.append(centres + sum(x.numel() for x in sample))
    assert held[:2] == held[2:]
    note("T10", over_exact=1 + held[3] / (4 * 3 * n))


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


few = st.integers(1, 7)


def clusters(k, radius):
    """Return how many keys of k (n, D) are in each cluster."""
    return sub_gen(k, k, radius, 1, 1, seeded(0)).shares[:, 0].tolist()


@mark.claim("T11")
def test_the_papers_covering_number_is_not_e_to_the_d(note):
    for radius in (1.999, 0.9999, 0.6666, 0.4999):  # on a line the bound is reached
        step = radius + 1e-6
        k = torch.arange(-1, 1 + 1e-9, step, dtype=F64)[:, None]
        number = len(clusters(k, radius))
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
        found = []
        for seed in range(3):
            k = in_ball(4096, D, seed)
            few = len(clusters(k[:512], radius))
            many = len(clusters(k, radius))
            if D < 16:
                assert few <= many <= few + 3
            else:
                assert many > 1.8 * few
            assert many <= most_clusters(D, radius)
            found.append((few, many))
        for name, numbers in zip(("few", "many"), zip(*found)):
            values = {
                f"{name}_{D}_least": min(numbers),
                f"{name}_{D}_most": max(numbers),
            }
            note("T12", **values)
