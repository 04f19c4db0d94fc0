"""The Index game: Alice's bits come back from an exact cache, within the predicted margins, and not from one that was compressed
below them."""
from itertools import product
import math

import pytest
import torch

from methods.tensor_attention import (FourCache, TwoCache, distortion, index_game_four, index_game_two, learned, pairs, projected_basis, quantise,
                                      separation, spread_out, tensor_attention)


def deal(n, d, seed=0):
    """Alice's bits and her keys."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, d, generator=g) < 0.5, projected_basis(n, d, g)


def right(game, bits):
    return (game.guesses() == bits).double().mean(1)  # per row


@pytest.mark.claim("T5")
def test_projections_come_closer_to_an_orthonormal_basis_like_one_over_the_root_of_d_and_farther_with_log_n():
    assert distortion(torch.eye(5, dtype=torch.float64)) == 0
    assert distortion(torch.tensor([[1.0, 0], [0.6, 0.5]])) == pytest.approx(0.6)

    def mean(n, d):
        return sum(distortion(deal(n, d, seed)[1]) for seed in range(20)) / 20

    for n in (16, 64):
        assert mean(n, 256) / mean(n, 4096) == pytest.approx(4, rel=0.1)
    assert 1.05 < mean(64, 1024) / mean(16, 1024) < math.sqrt(2)  # ln 64 = 1.5 ln 16, and more pairs to exceed it
    for n, d in product((4, 16, 64, 256), (16, 128, 1024)):
        assert 1.6 < mean(n, d) * math.sqrt(d / math.log(n)) < 2.4  # ε² d / ln n hardly moves
    g = torch.Generator().manual_seed(0)
    assert projected_basis(50, 400, g).square().sum(1).mean() == pytest.approx(1, abs=0.03)


@pytest.mark.claim("T6")
@pytest.mark.parametrize("n, d", [(16, 1024), (32, 2048)])
@pytest.mark.parametrize("seed", range(20))
def test_every_bit_comes_back_from_four_matrices_within_the_predicted_margins(n, d, seed):
    bits, keys = deal(n, d, seed)
    game = index_game_four(bits, keys)
    assert (right(game, bits) == 1).all()
    assert game.zero < game.one  # Δ > δ
    assert game.read[~bits].max() <= game.zero and game.read[bits].min() >= game.one
    if n == 32:
        assert distortion(keys) < 0.1


@pytest.mark.claim("T6")
def test_the_margins_are_reached_by_keys_as_bad_as_eps_allows():
    """Key 0 is short by ε, all others lean towards it by ε; bits of row 0 are all 0, or alone 1."""
    n, eps, C = 6, 0.05, 2 * math.log(6)
    gram = torch.eye(n, dtype=torch.float64) + eps * (1 - torch.eye(n, dtype=torch.float64))
    gram[0, 0] = 1 - eps
    keys = torch.linalg.cholesky(gram)
    assert distortion(keys) == pytest.approx(eps)
    bits = torch.ones(n, n).bool()
    bits[0] = torch.tensor([0, 1, 0, 1, 0, 1]).bool()
    bits[1:, 1::2] = False  # in odd columns only row 0 has a 1
    game = index_game_four(bits, keys, C)
    # the zero key pairs with all: (n + 1)² − n² pairs of weight 1, of which the paper's δ and Δ know nothing
    assert game.read[0, 0] == pytest.approx(game.zero, rel=1e-12) and game.read[0, 1] == pytest.approx(game.one, rel=1e-12)
    own, others = n * math.exp(C * (1 - eps)), n * (n - 1) * math.exp(C * eps)
    assert (game.zero, game.one) == pytest.approx((others / (own + others + 13), own / (own + others + 13)), rel=1e-12)


@pytest.mark.claim("T6")
@pytest.mark.parametrize("Cache", [FourCache, TwoCache])
def test_any_exact_cache_plays_the_same(Cache):
    bits, keys = deal(5, 64)
    assert torch.allclose(index_game_four(bits, keys, Cache=Cache).read, index_game_four(bits, keys).read, atol=1e-12)


@pytest.mark.claim("T6")
def test_with_too_few_dimensions_the_margins_cross_and_bits_are_lost():
    found = {}
    for d in (256, 64, 16, 4):
        games = [(index_game_four(*deal(16, d, seed)), deal(16, d, seed)[0]) for seed in range(20)]
        found[d] = torch.stack([right(game, bits).mean() for game, bits in games]).mean()
        assert all(game.zero < game.one for game, _ in games) == (d == 256)
    assert found[256] == 1 > found[16] > found[4] > 0.5


def test_vectors_are_spread_out_as_far_as_asked_or_refused():
    code, cosine = spread_out(2, 3, -0.5, torch.Generator().manual_seed(0))
    assert (code.norm(dim=1) - 1).abs().max() < 1e-12 and cosine == pytest.approx((code[0] @ code[1]).item()) and cosine <= -0.5
    with pytest.raises(ValueError, match="20 unit vectors of 2 dimensions with cosines up to 0.9"):
        spread_out(20, 2, 0.9, torch.Generator().manual_seed(0))


@pytest.mark.claim("T12")
def test_e_to_the_d_rows_need_other_keys_than_the_proof_s_and_longer_queries():
    def mean(n, d):
        games = [(deal(n, d, seed), index_game_four(*deal(n, d, seed))) for seed in range(5)]
        return [sum(x) / 5 for x in zip(*((right(game, bits).mean().item(), distortion(keys)) for (bits, keys), game in games))]

    for d in (3, 4, 5, 6):
        n = math.ceil(math.e ** d)
        found, eps = mean(n, d)
        assert 0.55 < found < 0.75 and eps > 1  # the proof needs less than 1/2
        code, cosine = spread_out(n, d, 0.93, torch.Generator().manual_seed(0))
        bits = deal(n, d)[0]
        assert cosine == pytest.approx((code @ code.T - torch.eye(n)).max().item()) and cosine <= 0.93
        game = index_game_four(bits, code, C=math.log(4 * n) / (1 - cosine))
        assert (right(game, bits) == 1).all()


@pytest.mark.claim("T6")
def test_what_is_evicted_is_lost_and_what_stays_comes_back():
    bits, keys = deal(32, 2048)
    for kept in (24, 16, 8):
        rows = right(index_game_four(bits, keys, compress=lambda cache: cache.keep(torch.arange(kept)[None, None])), bits)
        assert (rows[:kept] == 1).all() and rows[kept:].mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.claim("T6")
def test_bob_learns_as_many_bits_as_are_kept():
    bits, keys = deal(32, 2048)

    def told(kept, precision):
        def compress(cache):
            cache.keep(torch.arange(kept)[None, None])
            quantise(cache, precision)
        return learned(index_game_four(bits, keys, compress=compress), bits) / bits.numel()

    for kept in (32, 24, 16, 8, 1):
        for precision in (8, 2, 1):
            assert told(kept, precision) == pytest.approx(kept / 32, abs=0.001)  # of guesses, 0.7 bits a row are luck
    game = index_game_four(bits, keys)
    for share in (0.5, 0.75, 0.9, 1.0):
        wrong = torch.arange(2048) >= share * 2048
        a = 1 - wrong.double().mean().item()
        entropy = -sum(x * math.log2(x) for x in (a, 1 - a) if x)
        assert learned(game._replace(read=(bits ^ wrong).double()), bits) == pytest.approx(32 * 2048 * (1 - entropy), abs=1e-6)


@pytest.mark.claim("T6")
def test_fewer_bits_a_number_lose_no_bits_of_the_message_as_long_as_a_value_keeps_its_own():
    """n·d bits are what the theorem asks for: one for each number of V₁ is enough."""
    bits, keys = deal(32, 2048)
    for precision in (8, 4, 2, 1):
        assert (right(index_game_four(bits, keys, compress=lambda cache: quantise(cache, precision)), bits) == 1).all()

    def forget_half(cache):  # of the values, below one bit a number
        cache.v[..., :1024] = 0.5

    assert right(index_game_four(bits, keys, compress=forget_half), bits).mean() == pytest.approx(0.75, abs=0.02)


def test_quantise_rounds_each_vector_to_its_own_levels():
    bits, keys = deal(4, 8)

    def check(cache):
        before = cache.k.clone()
        quantise(cache, 3)
        for new, old in zip(cache.k.view(-1, 8), before.view(-1, 8)):
            levels = torch.linspace(old.min().item(), old.max().item(), 8, dtype=old.dtype)
            nearest = levels[(old[:, None] - levels).abs().argmin(1)]
            assert torch.allclose(new, nearest, atol=1e-12)

    index_game_four(bits, keys, compress=check)


@pytest.mark.claim("T7")
@pytest.mark.parametrize("seed", range(5))
def test_every_bit_comes_back_from_n_squared_rows_in_the_format_of_two_matrices(seed):
    n = 8
    bits, keys = deal(n ** 2, 2048, seed)
    game = index_game_two(bits, keys)
    assert (right(game, bits) == 1).all() and game.zero < game.one
    assert game.read[~bits].max() <= game.zero and game.read[bits].min() >= game.one
    eps, C = distortion(keys), 2 * math.log(n ** 2)
    own, others = math.exp(C * (1 - eps)), (n ** 2 - 1) * math.exp(C * eps)
    assert game.one == pytest.approx(own / (own + others + 1), rel=1e-12)  # Bob's zero key once, not in pairs
    rows = right(index_game_two(bits, keys, compress=lambda cache: cache.keep(torch.arange(40)[None, None])), bits)
    assert (rows[:40] == 1).all() and rows[40:].mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.claim("T7")
@pytest.mark.claim("T8")
def test_those_rows_are_no_kronecker_product_so_the_bound_is_one_of_the_format():
    """So Corollary 4.5 falls with Theorem 4.2: what is exact is right up to any 1 ± η. In K₁ ⊘ K₂ the rows (a, b) ∘ (c, d) equal (a, d) ∘ (c, b); four matrices of n·d numbers answer for all of them."""
    def cross(rows):
        square = rows.unflatten(0, (8, 8))
        return (square[0, 0] * square[1, 1] - square[0, 1] * square[1, 0]).abs().max()

    g = torch.Generator().manual_seed(0)
    k1, k2, v1, v2 = torch.randn(4, 8, 16, dtype=torch.float64, generator=g)
    assert cross(pairs(k1, k2)) < 1e-12 and cross(deal(64, 2048)[1]) > 1e-4
    q = torch.randn(3, 16, dtype=torch.float64, generator=g)
    exact = torch.stack([sum(w * v1[a] * v2[b] for (a, b), w in zip(((a, b) for a in range(8) for b in range(8)), weights))
                         for weights in torch.einsum("td,ad,bd->tab", q, k1, k2).flatten(1).softmax(1)])
    assert torch.allclose(tensor_attention(q, k1, k2, v1, v2), exact, atol=1e-12)


@pytest.mark.claim("T8")
@pytest.mark.parametrize("factor", [2, 3])
def test_bits_survive_relative_noise_as_long_as_the_margins_do_and_larger_queries_let_them(factor):
    """C = 2 ln n as in the proof, and 3 ln n."""
    bits, keys = deal(32, 2048)
    C = factor * math.log(32)
    zero, one = separation(32, distortion(keys), C, four=True)
    exact, noisy = (index_game_four(bits, keys, C, eta=eta, generator=torch.Generator().manual_seed(1)).read for eta in (0, 0.25))
    assert set((noisy / exact).round(decimals=9).unique().tolist()) == {0.75, 1.25}
    limit = (one - zero) / (one + zero)
    for eta in (0.1, 0.5, limit - 0.01):
        game = index_game_four(bits, keys, C, eta=eta, generator=torch.Generator().manual_seed(1))
        assert (right(game, bits) == 1).all() and game.zero < game.one
    game = index_game_four(bits, keys, C, eta=0.999, generator=torch.Generator().manual_seed(1))
    assert game.zero > game.one and right(game, bits).mean() < 0.9
    assert limit == pytest.approx({2: 0.843, 3: 0.991}[factor], abs=0.001)
