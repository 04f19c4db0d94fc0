"""Compare SubGen's clusters with a loop, its attention in exact cases, and its memory with a count
by hand."""

from itertools import product
import math

from hypothesis import given, settings, strategies as st
import pytest
import torch

from common import clusters_of, feed
from exact import F64, random, seeded
from methods.baselines.sub_gen import Stream, SubGen, SubGen2Cache, SubGen4Cache
from methods.tensor_attention import tensor_attention
from nanollm.cache import LayerCache

CACHES = {"tokens": SubGen, "two": SubGen2Cache, "four": SubGen4Cache}
VECTORS = {"tokens": 1, "two": 2, "four": 2}  # keys, and values, of a token
each_cache = pytest.mark.parametrize("name", CACHES)
each_chunk = pytest.mark.parametrize("chunk", [1, 3, None])


def streamed(k, v=None, *, radius=0.0, samples=1, draws=1, chunk=None, seed=0):
    """Feed k, v (B, H, T, D) in chunks; return the stream and the cluster of each key."""
    stream, clusters = Stream(k, radius, samples, draws, seeded(seed)), []
    for x, y in zip(
        *(x.split(chunk or k.shape[2], 2) for x in (k, k if v is None else v))
    ):
        clusters.append(stream.join(x))
        stream.renew(x, clusters[-1])
        stream.draw(x, y)
    return stream, torch.cat(clusters, -1)


@pytest.mark.claim("T9")
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from([1, 5, None]),
    st.sampled_from([0.0, 1.0, 1.3, 2.0, 5.0, 100.0, math.inf]),
)
def test_a_key_joins_the_oldest_cluster_it_may_however_the_text_is_cut(
    seed, n, D, chunk, radius
):
    """A key joins the oldest cluster near it, however the text is cut; heads have their own clusters.

    Keys are whole numbers, so many distances equal the radius exactly.
    """
    k = torch.randint(-3, 4, (2, 2, n, D), generator=seeded(seed)).double()
    k[1, 1] *= 4
    stream, cluster = streamed(k, radius=radius, chunk=chunk)
    for at in product(range(2), range(2)):
        of, centres = clusters_of(k[at].tolist(), radius)
        m = len(centres)
        assert cluster[at].tolist() == of
        assert (
            stream.centre[at][:m].tolist() == centres and not stream.count[at][m:].any()
        )
        assert stream.count[at][:m].tolist() == [of.count(c) for c in range(m)]


@pytest.mark.claim("T9")
def test_texts_and_heads_are_drawn_apart():
    """Every text and head has its own random draws.

    theory/test_clustering.py checks means and variances of the draws.
    """
    held, _ = streamed(
        random(1, 1, 50, 1).expand(2, 2, -1, -1), radius=math.inf, samples=20, draws=20
    )
    for drawn in held.sample[:, :, 0], held.k:
        assert len(drawn.flatten(0, 1).unique(dim=0)) == 4


def text(name, B=2, H=2, G=3, n=9, D=3):
    """Return q, k, v in the decoder's layout, heads inside tokens."""
    q, both = random(B, n, H * G, D), random(2, B, n, H, VECTORS[name] * D, seed=1)
    return q.transpose(1, 2), *both.transpose(2, 3)


def exactly(q, k, v, scale, vectors):
    """Return causal attention, or tensor attention, by definition."""
    G, rows = q.shape[1] // k.shape[1], []
    for i in range(q.shape[2]):
        k_, v_ = (
            x[:, :, : i + 1].repeat_interleave(G, 1).chunk(vectors, -1) for x in (k, v)
        )
        one = scale * q[:, :, i : i + 1]
        rows.append(
            tensor_attention(one, *k_, *v_)
            if vectors == 2
            else (one @ k_[0].mT).softmax(-1) @ v_[0]
        )
    return torch.cat(rows, 2)


@pytest.mark.claim("T9", "T10")
@each_cache
@each_chunk
def test_with_a_cluster_for_each_key_and_one_value_attention_is_exact(name, chunk):
    """With a cluster for every key and a single nonzero value, SubGen's attention is exact.

    Then every draw is the same: only token 2 has a value, or for pairs token 2 a first and token 4
    a second one.
    """
    q, k, v = text(name)
    k[:, :, 5] = k[:, :, 3]  # a cluster of two
    for half, token in zip(v.chunk(VECTORS[name], -1), (2, 4)):
        half[:, :, torch.arange(9) != token] = 0
    for scale, sharp in (None, 1), (None, 1000), (0.3, 1):
        want = exactly(
            q * sharp, k, v, 3**-0.5 if scale is None else scale, VECTORS[name]
        )
        same = lambda *x: feed(CACHES[name](0.0, 2, 3, scale=scale), *x, chunk)
        y, single = (
            same(q * sharp, k, v),
            same((q * sharp).float(), k.float(), v.float()),
        )
        assert y.shape == q.shape and y.dtype == F64 and single.dtype == torch.float32
        assert (
            torch.allclose(y, want, rtol=1e-9, atol=1e-12)
            and (want[:, :, 4:].abs().amax(-1) > 0).any()
        )
        assert torch.allclose(single.double(), want, rtol=0, atol=1e-5 * sharp)


def of_pairs(k):
    """Return all pairs of k (B, H, n, 2D), in the order in which they are formed."""
    x, y = k.chunk(2, -1)
    order = sorted(
        product(range(k.shape[2]), repeat=2),
        key=lambda at: (max(at), at[0] == max(at) > at[1]),
    )
    return torch.stack([x[:, :, a] * y[:, :, b] for a, b in order], 2)


def holds(cache):
    """Return the bytes of every tensor of the cache, its streams and its caches."""
    inner = [x for x in vars(cache).values() if isinstance(x, LayerCache)]
    held = [x for one in (*cache.streams, cache) for x in vars(one).values()]
    held += [x for one in (cache, *inner) for x in one.slots.values()]
    return sum(x.nbytes for x in held if isinstance(x, torch.Tensor))


@pytest.mark.claim("T9", "T10")
@each_cache
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_bytes_of_clusters_samples_and_draws_are_counted_by_hand(name, dtype):
    """`bytes` equals a count by hand.

    A cluster has a centre, a count and t samples; a draw has a key and a value; a stream has
    ‖V‖_F².
    """
    t, s, n, number, D = 3, 4, 20, dtype.itemsize, 2
    k, v = random(2, 2, 2, n, D * VECTORS[name]).to(dtype)
    k[1] *= 0.1
    cache = CACHES[name](0.7, t, s)
    assert cache.bytes() == (0, 0)
    for i in range(1, n + 1):
        cache.write(k[:, :, i - 1 : i], v[:, :, i - 1 : i], torch.tensor([[i - 1]]))
        assert cache.seen == i
        if i in (1, 2, 9, n):
            sides = (
                [of_pairs(k[:, :, :i])]
                if name == "two"
                else k[:, :, :i].chunk(VECTORS[name], -1)
            )
            # all tokens
            by_hand = 2 * 2 * i * (4 * D * number + 4) if name == "two" else 0
            for keys in (
                keys for side in sides for keys in side.flatten(0, 1).tolist()
            ):
                clusters = len(clusters_of(keys, 0.7)[1])
                by_hand += (
                    clusters * (D * number + 8 + t * D * number)
                    + s * 2 * D * number
                    + 8
                )
            live, allocated = cache.bytes()
            assert live == by_hand and live <= allocated == holds(cache)
            for stream in cache.streams:
                assert (
                    stream.count.shape[2] <= 1.1 * (stream.count > 0).sum(-1).max() + 1
                )


@pytest.mark.claim("T9", "T10")
def test_a_text_of_known_keys_costs_four_nothing_and_two_its_tokens(note):
    """If keys repeat, SubGen4Cache's memory stays the same and SubGen2Cache's grows by the tokens.

    Each head has 4 different keys.
    """
    four, two, size = SubGen4Cache(0.1, 5, 6), SubGen2Cache(0.1, 5, 6), []
    for seed in range(4):
        token = torch.randint(4, (30,), generator=seeded(seed))
        k, v = random(1, 2, 4, 6, seed=99)[:, :, token], random(1, 2, 30, 6, seed=seed)
        for cache in (four, two):
            cache.write(k, v, torch.arange(30)[None])
        size.append((four.bytes(), two.bytes()[0]))
    assert len({held for held, _ in size}) == 1 and four.seen == two.seen == 120
    token = 2 * (4 * 3 * 8 + 4)  # k₁, k₂, v₁, v₂ and a position in each head
    assert [y - x for (_, x), (_, y) in zip(size, size[1:])] == 3 * [30 * token]
    assert (two.streams[0].count.sum(-1) == 120**2).all() and (
        four.streams[1].count.sum(-1) == 120
    ).all()
    note("T10", over_exact=size[-1][1] / (120 * token))
