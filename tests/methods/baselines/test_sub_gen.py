"""Compare SubGen's clusters with a loop, its attention in exact cases, its memory with a count."""

from itertools import product
import math

from hypothesis import strategies as st
import pytest
import torch

from common import clusters_of, feed
from exact import F64, check, random, seeded, seeds
from methods.baselines.sub_gen import (
    Stream,
    SubGen,
    SubGen2Cache,
    SubGen4Cache,
)
from methods.tensor_attention import tensor_attention
from nanollm.cache import Slots

each_store = pytest.mark.parametrize("Store", [SubGen, SubGen2Cache, SubGen4Cache])
each_chunk = pytest.mark.parametrize("chunk", [1, 3, None])


def streamed(
    k,
    radius,
    samples=1,
    draws=1,
    chunk=None,
):
    """Feed keys k (B, H, T, D) in chunks; return the stream and the cluster of each key."""
    stream = Stream(k, radius, samples, draws, seeded(0))
    clusters = []
    for x in k.split(chunk or k.shape[2], 2):
        clusters.append(stream.join(x))
        stream.renew(x, clusters[-1])
        stream.draw(x, x)
    return stream, torch.cat(clusters, -1)


@check(
    "T9",
    seeds,
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from([1, 5, None]),
    st.sampled_from([0.0, 1.0, 1.3, 2.0, 5.0, 100.0, math.inf]),
    examples=60,
)
def test_a_key_joins_the_oldest_cluster_it_may_however_the_text_is_cut(
    seed,
    n,
    D,
    chunk,
    radius,
):
    """Heads have their own clusters. Keys are whole numbers, so many distances equal the radius."""
    k = torch.randint(-3, 4, (2, 2, n, D), generator=seeded(seed)).double()
    k[1, 1] *= 4
    stream, cluster = streamed(k, radius, chunk=chunk)
    for head in product(range(2), range(2)):
        expected, centres = clusters_of(k[head].tolist(), radius)
        m = len(centres)
        assert cluster[head].tolist() == expected
        assert stream.centre[head][:m].tolist() == centres
        count = [expected.count(c) for c in range(m)]
        assert stream.count[head][:m].tolist() == count
        assert not stream.count[head][m:].any()


@pytest.mark.claim("T9")
def test_texts_and_heads_are_drawn_apart():
    """theory/test_clustering.py checks means and variances of the draws."""
    k = random(1, 1, 50, 1).expand(2, 2, -1, -1)
    stream, _ = streamed(k, radius=math.inf, samples=20, draws=20)
    for drawn in stream.sample[:, :, 0], stream.k:
        assert len(drawn.flatten(0, 1).unique(dim=0)) == 4


def text(vectors):
    """Return q, k, v of 9 tokens in the decoder's layout, heads inside tokens."""
    q = random(2, 9, 6, 3).transpose(1, 2)
    k, v = random(2, 2, 9, 2, vectors * 3, seed=1).transpose(2, 3)
    return q, k, v


def exactly(q, k, v, scale, vectors):
    """Return causal attention, or tensor attention, by definition."""
    G = q.shape[1] // k.shape[1]
    rows = []
    for i in range(q.shape[2]):
        seen = [x[:, :, : i + 1].repeat_interleave(G, 1) for x in (k, v)]
        keys, values = (x.chunk(vectors, -1) for x in seen)
        one = scale * q[:, :, i : i + 1]
        if vectors == 2:
            rows.append(tensor_attention(one, *keys, *values))
        else:
            rows.append((one @ keys[0].mT).softmax(-1) @ values[0])
    return torch.cat(rows, 2)


@pytest.mark.claim("T9", "T10")
@each_store
@each_chunk
def test_with_a_cluster_for_each_key_and_one_value_attention_is_exact(Store, chunk):
    """With a cluster for every key and a single nonzero value, SubGen's attention is exact.

    Then every draw is the same: only token 2 has a value, or for pairs token 2 a first and token 4
    a second one.
    """
    q, k, v = text(Store.vectors)
    k[:, :, 5] = k[:, :, 3]  # a cluster of two
    for half, token in zip(v.chunk(Store.vectors, -1), (2, 4)):
        half[:, :, torch.arange(9) != token] = 0
    for scale, sharp in (None, 1), (None, 1000), (0.3, 1):
        factor = 3**-0.5 if scale is None else scale
        expected = exactly(q * sharp, k, v, factor, Store.vectors)
        for dtype, within in (F64, 1e-12), (torch.float32, 1e-5 * sharp):
            store = Store(radius=0.0, samples=2, draws=3, scale=scale)
            y = feed(store, [x.to(dtype) for x in (q * sharp, k, v)], chunk=chunk)
            assert y.dtype == dtype
            assert torch.allclose(y.double(), expected, rtol=1e-9, atol=within)
        assert (expected[:, :, 4:].abs().amax(-1) > 0).any()


def pairs_of(k):
    """Return all pairs of k (B, H, n, 2D), in the order in which they are formed."""
    x, y = k.chunk(2, -1)
    a, b = [], []
    for new in range(k.shape[2]):
        a += [*range(new + 1)] + [new] * new
        b += [new] * (new + 1) + [*range(new)]
    return x[:, :, a] * y[:, :, b]


def held_bytes(store):
    """Return the bytes of every tensor of the store, its streams and the stores in it."""
    inner = [x for x in vars(store).values() if isinstance(x, Slots)]
    tensors = []
    for part in (store, *store.streams):
        tensors += vars(part).values()
    for part in (store, *inner):
        tensors += part.slots.values()
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


@pytest.mark.claim("T9", "T10")
@each_store
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_bytes_of_clusters_samples_and_draws_are_counted_by_hand(Store, dtype):
    """A cluster has a centre, a count and t samples; a draw has a key and a value.

    A stream has ‖V‖_F².
    """
    t, s = 3, 4
    n, D = 20, 2
    vector = D * dtype.itemsize
    k, v = random(2, 2, 2, n, D * Store.vectors).to(dtype)
    k[1] *= 0.1
    store = Store(radius=0.7, samples=t, draws=s)
    assert store.bytes() == (0, 0)
    for i in range(1, n + 1):
        new = slice(i - 1, i)
        store.write(k[:, :, new], v[:, :, new], torch.tensor([[i - 1]]))
        if i not in (1, 2, 9, n):
            continue
        seen = k[:, :, :i]
        sides = seen.chunk(Store.vectors, -1)
        expected = 0
        if Store is SubGen2Cache:
            sides = [pairs_of(seen)]
            expected = 2 * 2 * i * (4 * vector + 4)  # all tokens
        for keys in torch.cat(sides).flatten(0, 1).tolist():
            _, centres = clusters_of(keys, 0.7)
            expected += len(centres) * (vector + 8 + t * vector)
            expected += s * 2 * vector + 8
        live, allocated = store.bytes()
        assert live == expected
        assert live <= allocated == held_bytes(store)
        for stream in store.streams:
            most = (stream.count > 0).sum(-1).max()
            assert stream.count.shape[2] <= 1.1 * most + 1


@pytest.mark.claim("T9", "T10")
def test_a_text_of_known_keys_costs_four_nothing_and_two_its_tokens(note):
    """If keys repeat, SubGen4Cache's memory stays the same and SubGen2Cache's grows by the tokens.

    Each head has 4 different keys.
    """
    options = dict(radius=0.1, samples=5, draws=6)
    four = SubGen4Cache(**options)
    two = SubGen2Cache(**options)
    sizes = []
    for seed in range(4):
        token = torch.randint(4, (30,), generator=seeded(seed))
        k = random(1, 2, 4, 6, seed=99)[:, :, token]
        v = random(1, 2, 30, 6, seed=seed)
        for store in (four, two):
            store.write(k, v, torch.arange(30)[None])
        sizes.append((four.bytes(), two.bytes()[0]))
    assert len({size for size, _ in sizes}) == 1
    assert four.seen == two.seen == 120
    token = 2 * (4 * 3 * 8 + 4)  # k₁, k₂, v₁, v₂ and a position in each head
    grown = [after - before for (_, before), (_, after) in zip(sizes, sizes[1:])]
    assert grown == 3 * [30 * token]
    note("T10", over_exact=sizes[-1][1] / (120 * token))


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="radius nan must be at least 0"):
        SubGen4Cache(radius=math.nan, samples=1, draws=1)
