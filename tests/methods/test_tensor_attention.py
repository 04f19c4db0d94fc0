"""Compare tensor attention with loops over pairs; check bytes and a decoder of pairs."""

from functools import partial
from itertools import product

import pytest
import torch

from exact import F64, random, seeded
from methods.tensor_attention import (
    FactoredFourCache,
    FourCache,
    PairAttention,
    TwoCache,
    pair_decoder,
    pairs,
    tensor_attention,
)
from methods.theory.index_game import rotated_scores
from nanollm.cache import make_cache
from nanollm.generate import generate
from nanollm.model import Config, rope, rope_frequencies

B, H, G, D = 2, 2, 3, 5
N = 13

STORES = FourCache, TwoCache, FactoredFourCache
TILES = [partial(FactoredFourCache, tile=tile) for tile in (1, 40)]
each_store = pytest.mark.parametrize("Store", STORES)
each_store_and_tile = pytest.mark.parametrize("Store", [*STORES, *TILES])
each_chunk = pytest.mark.parametrize("chunk", [1, 5, N])


def feed(store, q, k, v, chunk, first=0):
    """Return the output of a text fed in chunks, at positions from `first` on."""
    outputs = []
    for i in torch.arange(q.shape[2]).split(chunk):
        pos = first + i[None]
        outputs.append(store.attend(q[:, :, i], k[:, :, i], v[:, :, i], pos))
    return torch.cat(outputs, 2)


def equal(x, y, atol=1e-12):
    return torch.allclose(x.double(), y, rtol=0, atol=atol)


def seen(x, i):
    """Return x₁ₐ ∘ x₂ᵦ of the pairs (a, b) that query i sees, (B, H·G, pairs, D)."""
    a, b = zip(*product(range(i + 1), repeat=2))
    first, second = x.repeat_interleave(G, 1).chunk(2, -1)
    return first[:, :, [*a]] * second[:, :, [*b]]


def scores(q, k):
    """Return each query's scores, (B, H·G, 1, pairs)."""
    return [q[:, :, i : i + 1] @ seen(k, i).mT for i in range(q.shape[2])]


def attended(q, k, v, scale):
    """Return causal attention by a loop over pairs."""
    rows = []
    for i, score in enumerate(scores(scale * q, k)):
        p = score.softmax(-1)
        rows.append(p @ seen(v, i))
    return torch.cat(rows, 2)


def text(integer=False):
    """Return q (B, H·G, N, D), k and v (B, H, N, 2D) as from a decoder, heads inside tokens."""
    q = random(B, N, H * G, D, seed=0).transpose(1, 2)
    k = random(B, N, H, 2 * D, seed=1).transpose(1, 2)
    v = random(B, N, H, 2 * D, seed=2).transpose(1, 2)
    if integer:  # exact in float32; many exps overflow, or all exps of a query are 0
        return (8 * q).round(), (3 * k).round(), v
    return q, k, v


@pytest.mark.claim("T1")
@pytest.mark.parametrize("n, m", [(3, 4), (4, 4)])
def test_pairs_come_in_an_order_that_attention_does_not_see(n, m, note):
    """Both printed orders of pairs give the same attention.

    Def. 3.1 has row a + b·n, Def. 3.6 row a·m + b.
    """
    k1 = random(2, 3, n, D, seed=0)
    v1 = random(2, 3, n, D, seed=1)
    k2 = random(2, 3, m, D, seed=2)
    v2 = random(2, 3, m, D, seed=3)
    q = random(2, 3, 4, D, seed=9)
    K = pairs(k1, k2)
    V = pairs(v1, v2)
    y = tensor_attention(q, k1, k2, v1, v2)
    assert K.shape == (2, 3, n * m, D)
    for a, b in product(range(n), range(m)):
        assert torch.equal(K[..., a * m + b, :], k1[..., a, :] * k2[..., b, :])

    order = torch.tensor([a * m + b for b in range(m) for a in range(n)])  # row a + b·n
    permuted = (q @ K[..., order, :].mT).softmax(-1) @ V[..., order, :]
    assert equal(permuted, y)
    assert equal(tensor_attention(q, k2, k1, v2, v1), y)
    if n == m:
        note("T1", moved=(order != torch.arange(n * m)).sum())
        # not keys alone
        assert not equal(tensor_attention(q, k2, k1, v1, v2), y, atol=1e-2)


@pytest.mark.claim("T2", "T3")
@each_store_and_tile
@each_chunk
def test_every_store_equals_the_loop_over_pairs_however_a_text_is_cut(Store, chunk):
    # None: 1/√D; a text may begin anywhere
    for scale, first in (None, 0), (1.0, 0), (0.3, 1000):
        loop = attended(*text(), D**-0.5 if scale is None else scale)
        y = feed(Store(scale=scale), *text(), chunk, first)
        assert y.dtype == F64
        assert equal(y, loop)
        half = [x.float() for x in text()]
        single = feed(Store(scale=scale), *half, chunk)
        assert single.dtype == torch.float32
        assert equal(single, loop, atol=2e-6)
    # each row has its own positions
    rows = torch.arange(N).expand(B, N) + torch.tensor([[0], [7]])
    assert equal(Store().attend(*text(), rows), attended(*text(), D**-0.5))


@each_store_and_tile
@pytest.mark.parametrize("chunk", [1, N])
@pytest.mark.parametrize("dtype, within", [(torch.float32, 5e-6), (F64, 1e-12)])
def test_scores_whose_exp_overflows_or_vanishes_are_harmless(
    Store,
    chunk,
    dtype,
    within,
):
    """Scores whose exp overflows or vanishes give the loop's outputs.

    Integer scores are exact in both types, so tolerances are tight. But fused attention
    (TwoCache) scales them: some processors round a score s there by up to |s|·ε, and its weight
    changes in that proportion.
    """
    q, k, v = text(integer=True)
    y = feed(
        Store(scale=1.0),
        *(x.to(dtype) for x in (q, k, v)),
        chunk,
    )
    if Store is TwoCache:
        largest = max(
            s.abs().max().item() for s in scores(q, k)
        )  # 88 overflows in float32
        within = largest * torch.finfo(dtype).eps
    assert equal(y, attended(q, k, v, 1.0), atol=within)


@pytest.mark.claim("T2", "T3")
@each_store
@each_chunk
def test_i_tokens_are_4_i_d_numbers_and_two_matrices_2_i_i_d_beside(Store, chunk, note):
    """i tokens take 4·i·D numbers, and in TwoCache 2·i²·D more.

    A pair is formed with its later token, and stays.
    """
    q, k, v = text()
    store = Store()
    for part in torch.arange(N).split(chunk):
        new_tokens = [x[:, :, part] for x in (q, k, v)]
        feed(store, *new_tokens, chunk, first=int(part[0]))
        i = int(part[-1]) + 1
        four = store.tokens if Store is TwoCache else store
        assert torch.equal(four.k, k[:, :, :i])
        assert torch.equal(four.v, v[:, :, :i])
        assert store.seen == i
        live, allocated = store.bytes()
        pairs_too = i * i * (2 * D * 8 + 4) if Store is TwoCache else 0
        assert live == B * H * (i * (4 * D * 8 + 4) + pairs_too)
        assert live <= allocated <= 1.1 * live
    numbers = (store.k.numel() + store.v.numel()) // B // H
    note("T3" if Store is TwoCache else "T2", numbers=numbers)
    positions = [*range(N)]
    if Store is TwoCache:
        positions = [i for i in range(N) for _ in range(2 * i + 1)]
    assert (store.pos == torch.tensor(positions)).all()


def model_of_pairs(family="llama", head_dim=8):
    torch.manual_seed(0)
    config = Config(
        vocab_size=40,
        max_len=64,
        n_layers=2,
        n_heads=6,
        n_kv_heads=2,
        d_model=48,
        d_ff=48,
        head_dim=head_dim,
        family=family,
    )
    model = pair_decoder(config).double().eval()
    for p in model.parameters():
        p.data.mul_(4)  # sharp attention
    return model


TOKENS = torch.randint(40, (2, 13), generator=seeded(1))
each_family = pytest.mark.parametrize("family", ["llama", "gpt2"])


@pytest.mark.claim("T13")
@each_family
def test_its_attention_is_the_loop_over_pairs_from_its_own_weights(family):
    """PairAttention equals the loop over pairs computed from its weights, without rotation.

    The rows of qkv are: H·G queries, then k₁ and k₂ of head 0, of head 1, then v in the same order.
    """
    attention = model_of_pairs(family, head_dim=4).blocks[0].attention
    assert isinstance(attention, PairAttention)
    x = random(2, 5, 48, seed=1)
    parts = attention.qkv.weight.split((24, 16, 16))
    heads = [(x @ w.T).unflatten(2, (n, -1)) for w, n in zip(parts, (6, 2, 2))]
    y = attended(*(x.transpose(1, 2) for x in heads), 1 / 2)
    y = y.transpose(1, 2).flatten(2)
    pos = torch.arange(5)[None]
    angles = None
    if family == "llama":
        angles = rope(rope_frequencies(attention.config), pos)
    assert equal(attention(x, angles, pos), y @ attention.o.weight.T)


@pytest.mark.claim("T13")
def test_a_product_of_three_rotated_vectors_sees_where_the_text_begins():
    """It depends on absolute positions; a Llama of pairs does not."""
    x = torch.randn(3, 1, 1, 16, generator=seeded(0))
    unshifted = rotated_scores(*x, 0)
    for shift in (1, 10, 100):
        shifted = rotated_scores(*x, shift)
        two, three = (abs(a - b) for a, b in zip(shifted, unshifted))
        assert two < 1e-5
        assert three > 0.05

    model = model_of_pairs()
    tokens = TOKENS[:, :9]
    assert torch.equal(
        model(tokens, pos=torch.arange(9)[None] + 5),
        model(tokens),
    )


@pytest.mark.claim("T13")
@each_family
@torch.no_grad()
def test_a_decoder_of_pairs_says_the_same_with_every_store(family):
    model = model_of_pairs(family)
    whole = model(TOKENS)
    loop = TOKENS
    for _ in range(8):  # without a cache
        loop = torch.cat((loop, model(loop)[:, -1:].argmax(-1)), 1)
    assert len(loop[:, 13:].unique()) > 4
    for store in STORES:
        caches = make_cache(model, store=store)
        parts = [model(part, caches) for part in TOKENS.split(8, 1)]
        assert equal(torch.cat(parts, 1), whole, atol=1e-11)
        caches = make_cache(model, store=store)
        assert torch.equal(generate(model, TOKENS, 8, caches), loop[:, 13:])
