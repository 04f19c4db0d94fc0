"""What a step of tensor attention costs; the Index game, and Match-3."""
from itertools import product
import math

import pytest
import torch

from exact import F64, random, seeded
from methods.tensor_attention import FactoredFourCache, FourCache, TwoCache, pair_decoder, pairs
from methods.theory import index_game as theory
from methods.theory.index_game import (Count, deal, distortion, index_game_four, keep_rows, learn, match3,
                                       play, separation, simple_rules, spread_out)
from nanollm.cache import LayerCache

G = 3
CACHES = {"four": FourCache, "two": TwoCache, "factored": FactoredFourCache}


def under(mode, cache, n, width, batch=1, heads=1, group=G):
    """Run a cache's n-th token under this mode, and return the mode."""
    shapes = (heads * group, width), (heads, 2 * width), (heads, 2 * width)
    q, k, v = (random(batch, count, n, size, seed=seed).float() for seed, (count, size) in enumerate(shapes))
    pos = torch.arange(n)[None]
    for part in (slice(n - 2), slice(n - 2, n - 1)):
        cache.write(k[:, :, part], v[:, :, part], pos[:, part])
    slots = dict(cache.slots)
    with mode:
        cache.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], pos[:, -1:])
    assert all(cache.slots[name] is x for name, x in slots.items())  # nothing had to grow
    return mode


x34, y45, y34, row, column = (random(*shape).float() for shape in ((3, 4), (4, 5), (3, 4), (1, 4), (3, 1)))
batched = random(2, 3, 6, 5), random(2, 3, 5, 7)

COUNTED = {  # what runs: multiplications, bytes
    "bmm": (lambda: torch.bmm(x34.view(2, 3, 2), y45.view(2, 2, 5)), 60, (12 + 20 + 30) * 4),
    "leading dimensions": (lambda: batched[0] @ batched[1], 2 * 3 * 6 * 5 * 7, (180 + 210 + 252) * 8),
    "mul of a row and a column": (lambda: column * row, 12, (3 + 4 + 12) * 4),
    "mul in place": (lambda: x34.clone().mul_(y34), 12, (24 + 36) * 4),  # x and y read and x written
    "div, exp and softmax": (lambda: (x34 / column).exp().softmax(-1), 36, (27 + 24 + 24) * 4),
    "largest and where, int64": (lambda: x34.max(-1), 0, 15 * 4 + 3 * 8),
    "cat of a list": (lambda: torch.cat([x34, row, row]), 0, (12 + 8 + 20) * 4),
    "a copy reads its source": (lambda: x34.clone().copy_(y34), 0, (24 + 24) * 4),
    "a new tensor reads nothing": (lambda: x34.new_zeros(3), 0, 3 * 4),
    "views": (lambda: (x34.view(6, 2), x34.mT, x34[1:], x34.expand(5, 3, 4), x34.chunk(2)), 0, 0),
}


@pytest.mark.claim("T4")
@pytest.mark.parametrize("what", COUNTED)
def test_count_gives_what_is_counted_by_hand(what):
    run, multiplications, moved = COUNTED[what]
    with Count() as count:
        run()
    run()  # not counted
    assert (count.multiplications, count.bytes) == (multiplications, moved)


@pytest.mark.claim("T4")
@pytest.mark.parametrize("n, d, batch, heads", [(32, 16, 1, 1), (22, 5, 2, 3)])
def test_a_step_takes_the_multiplications_of_the_formulas(n, d, batch, heads):
    """A step takes 2n²d products a query, and pairs as many a group (new ones 2(2n − 1)d)."""
    products = G * 2 * n * n * d
    counted = lambda cache: under(Count(), cache, n, d, batch, heads).multiplications / batch / heads
    assert counted(FourCache()) == products + 2 * n * n * d + G * n * n + G * d  # the softmax; q by the scale
    assert counted(TwoCache()) == products + 2 * (2 * n - 1) * d
    assert counted(TwoCache(scale=1.0)) == products + 2 * (2 * n - 1) * d + G * d
    for tile in (1, 100, 2 ** 18):
        tiles = math.ceil(n / max(1, tile // n))
        rescale = tiles * 2 + 1 + (tiles - 1) * d    # keep, total · keep, out · keep: at first a single 0
        # exp; K₁ ∘ q and V₁ ∘ (P V₂); q by the scale, out by the total
        assert counted(FactoredFourCache(tile=tile)) == products + G * (n * n + 2 * n * d + 2 * d + rescale)


@pytest.mark.claim("T4")
def test_the_factored_form_multiplies_as_two_matrices_and_moves_less(note):
    """The factored form multiplies as two matrices do; Figure 1's four take twice as much."""
    n = d = 64
    four, two, factored = (under(Count(), CACHES[name](), n, d, group=1) for name in CACHES)
    saved = four.multiplications - two.multiplications
    assert 1 - 5 / n < saved / (2 * n * n * d) < 1
    assert abs(factored.multiplications / two.multiplications - 1) < 0.01
    assert four.bytes > 1.5 * two.bytes > 1.5 * 2 * n * n * d * 4 and two.bytes > 8 * factored.bytes
    note("T4", saved=saved / (2 * n * n * d), multiplied=factored.multiplications / two.multiplications,
         moved=two.bytes / factored.bytes)


def rows_right(game, bits):
    """Return each row's share of right guesses."""
    return (game.guesses() == bits).double().mean(1)


@pytest.mark.claim("T5")
def test_projections_come_closer_to_orthonormal_like_1_over_root_d(note):
    assert distortion(torch.tensor([[1.0, 0], [0.6, 0.5]])) == pytest.approx(0.6)
    ratios = [sum(distortion(deal(n, d, seed)[1]) for seed in range(20)) / 20 * math.sqrt(d / math.log(n))
              for n in (4, 16, 64, 256) for d in (16, 128, 1024)]
    assert 1.6 < min(ratios) and max(ratios) < 2.4  # ε² d / ln n hardly moves
    note("T5", least=min(ratios), most=max(ratios))


@pytest.mark.claim("T6")
def test_every_bit_comes_back_from_four_matrices_within_the_margins(note):
    for n, d in (16, 1024), (32, 2048):
        games = 10
        for seed in range(games):
            bits, keys = deal(n, d, seed)
            game = index_game_four(bits, keys)
            assert game.right(bits) == 1 and game.zero < game.one  # Δ > δ
            assert game.read[~bits].max() <= game.zero and game.read[bits].min() >= game.one
            eps = distortion(keys)
        # the zero key pairs with all: (n + 1)² − n² pairs of weight 1, which the paper leaves out
        own, others = n * n ** (2 - 2 * eps), n * (n - 1) * n ** (2 * eps)  # C is 2 ln n
        assert [game.zero, game.one] == pytest.approx([x / (own + others + 2 * n + 1) for x in (others, own)])
        note("T6", games=games)


@pytest.mark.claim("T6")
def test_bob_learns_as_many_bits_as_are_kept(note):
    """Bob learns one bit for each number of V₁ that is kept: n·d in all, as Theorem 4.1 says."""
    n, d = 32, 2048
    bits, keys = deal(n, d)
    for kept, precision in (32, 1), (16, None), (8, 1):
        game = index_game_four(bits, keys, compress=keep_rows(slice(kept), n, precision))
        rows = rows_right(game, bits)
        assert (rows[:kept] == 1).all() and rows[kept:].sum() == pytest.approx((n - kept) / 2, abs=0.2)
        assert game.learned(bits) == pytest.approx(kept / n, abs=0.001)  # of guesses, 0.7 bits a row are luck
    note("T6", learned=game.learned(bits), others=rows[kept:].mean().item())


@pytest.mark.claim("T7", "T8")
def test_rows_that_come_back_from_two_matrices_are_no_kronecker_product(note):
    """All bits come back, but the rows are not a K₁ ⊘ K₂, so the bound is one of the format."""
    n = 8
    for seed in range(3):
        bits, keys = deal(n ** 2, 2048, seed)
        game = play(LayerCache(), keys, bits.to(keys), keys)
        assert game.right(bits) == 1 and game.zero < game.one
        assert game.read[~bits].max() <= game.zero and game.read[bits].min() >= game.one
    eps, C = distortion(keys), 2 * math.log(n ** 2)
    own, others = math.exp(C * (1 - eps)), (n ** 2 - 1) * math.exp(C * eps)
    assert game.one == pytest.approx(own / (own + others + 1), rel=1e-12)  # Bob's zero key once, not in pairs
    part = play(LayerCache(), keys, bits.to(keys), keys, compress=keep_rows(slice(40), n ** 2))
    rows = rows_right(part, bits)
    assert (rows[:40] == 1).all() and rows[40:].mean() == pytest.approx(0.5, abs=0.02)

    def cross(rows):
        square = rows.unflatten(0, (n, n))
        return (square[0, 0] * square[1, 1] - square[0, 1] * square[1, 0]).abs().max().item()

    k1, k2 = torch.randn(2, n, 16, dtype=F64, generator=seeded(0))
    assert cross(pairs(k1, k2)) < 1e-12 and cross(keys) > 1e-4
    note("T7", rows=cross(keys))


@pytest.mark.claim("T8")
@pytest.mark.parametrize("factor", [2, 3])
def test_bits_survive_relative_noise_as_long_as_the_margins_do(factor, note):
    """Bits survive a relative error up to the margin, with C = 2 ln n and 3 ln n."""
    bits, keys = deal(32, 2048)
    C = factor * math.log(32)
    zero, one = separation(32, distortion(keys), C, four=True)
    limit = (one - zero) / (one + zero)

    def noisy(eta):
        return index_game_four(bits, keys, C, eta=eta, generator=seeded(1))

    game = noisy(limit - 0.01)
    assert game.right(bits) == 1 and game.zero < game.one
    game = noisy(0.999)
    assert game.zero > game.one and game.right(bits) < 0.9
    assert limit == pytest.approx({2: 0.843, 3: 0.991}[factor], abs=0.001)
    note("T8", **{f"limit_{factor}": limit})


@pytest.mark.claim("T12")
def test_e_to_the_d_rows_need_other_keys_than_the_proof_s(note):
    d, n = 5, math.ceil(math.e ** 5)
    deals = [deal(n, d, seed) for seed in range(3)]
    right = sum(index_game_four(*dealt).right(dealt[0]) for dealt in deals) / 3
    assert 0.55 < right < 0.75 and min(distortion(keys) for _, keys in deals) > 1  # the proof: below 1/2
    code, cosine = spread_out(n, d, 0.93, seeded(0))
    C = math.log(4 * n) / (1 - cosine)
    assert index_game_four(deals[0][0], code, C).right(deals[0][0]) == 1
    note("T12", game_d=d, game_rows=n, game_right=right, game_C=C / math.log(n))


@pytest.mark.claim("T13")
def test_match_3_and_its_simple_rules_are_loops():
    n, T, p = 50, 6, 7
    x, answers = match3(n, T, p, seeded(0))
    assert x.shape == (n, T + 1) and (x[:, 0] == p).all() and x[:, 1:].max() == p - 1
    yes, near = (torch.zeros(n, T, dtype=torch.bool) for _ in range(2))
    for j, i in product(range(n), range(T)):
        text = x[j, 1:].tolist()
        hits = [(a, b) for a, b in product(range(i + 1), repeat=2) if (text[a] + text[b] + text[i]) % p == 0]
        assert answers[j, i] == (p + 2 if hits else p + 1)
        yes[j, i], near[j, i] = bool(hits), any(a == b or i in (a, b) for a, b in hits)
    common = [bool(yes[:, i].double().mean() > 0.5) for i in range(T)]
    rest = [bool(yes[~near[:, i], i].double().mean() > 0.5) for i in range(T)]
    guesses = near | torch.tensor(rest), torch.tensor(common)
    for found, guess in zip(simple_rules(x, answers, p).values(), guesses):
        assert found == pytest.approx((guess == yes).double().mean().item())


@pytest.mark.claim("T13")
def test_a_layer_of_pairs_learns_match_3_and_ordinary_attention_does_not(note, monkeypatch):
    """A layer of pairs beats ordinary attention, which learns only pairs with a = b or b = i."""
    common = dict(T=6, p=13, lr=1e-2, d_model=64, n_layers=1, d_ff=64)
    of_pairs = dict(n_heads=1, n_kv_heads=1, head_dim=64, build=pair_decoder)
    made = []
    monkeypatch.setattr(theory, "match3", lambda *of: made.append(match3(*of)) or made[-1])
    pair, log = learn(120, every=120, **common, **of_pairs)
    test, *training = ({*map(tuple, tokens.tolist())} for tokens, _ in made)
    assert len(test & set().union(*training)) < 10  # of 13⁶ texts chance repeats a few
    single, ordinary = learn(120, every=120, **common, n_heads=3, n_kv_heads=3, head_dim=32)
    assert sum(p.numel() for p in pair.parameters()) == sum(p.numel() for p in single.parameters())
    rule = simple_rules(*match3(20_000, 6, 13, seeded(3)), 13)["hits among two numbers (a = b or b = i)"]
    assert log[-1][0] == 120 and log[-1][1] > rule + 0.05
    assert rule - 0.02 < ordinary[-1][1] < rule + 0.01
    note("T13", pairs=100 * log[-1][1], single=100 * ordinary[-1][1], rule=100 * rule)
