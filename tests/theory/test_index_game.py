"""The Index game, the multiplications of a step of tensor attention, and a task that asks about pairs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exact import F64, random, seeded
from methods.tensor_attention import (
    FactoredFourCache,
    FourCache,
    TwoCache,
    pair_decoder,
    pairs,
)
from methods.theory.index_game import (
    deal,
    distortion,
    index_game_four,
    keep_rows,
    play,
    separation,
)
from nanollm.cache import LayerCache
from nanollm.model import Config, Decoder


class Count(TorchDispatchMode):
    """Count multiplications, and the bytes that operations read and write; a view moves nothing."""

    multiplications = moved = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out, name = op(*args, **kwargs or {}), op.overloadpacket.__name__.strip("_")
        if op.is_view or name == "unsafe_view":
            return out
        read, made = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for tree in (args, out)
        )
        self.moved += sum(x.numel() * x.element_size() for x in read + made)
        if name in ("mm", "bmm"):
            self.multiplications += made[0].numel() * read[0].shape[-1]
        elif "scaled_dot_product" in name:
            q, k, *_ = read
            self.multiplications += 2 * q.numel() * k.shape[-2]
        elif name in ("mul", "div", "exp", "softmax"):
            self.multiplications += made[0].numel()
        return out


def step(cache, n, d, group):
    """Return the `Count` of a cache's n-th token, with `group` query heads."""
    k, v, q = (
        random(1, heads, n, size, seed=size).float()
        for heads, size in ((1, 2 * d), (1, 2 * d), (group, d))
    )
    pos = torch.arange(n)[None]
    # so that no buffer has to grow in the last step
    for part in (slice(n - 2), slice(n - 2, n - 1)):
        cache.write(k[:, :, part], v[:, :, part], pos[:, part])
    with Count() as count:
        cache.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], pos[:, -1:])
    return count


@pytest.mark.claim("T4")
@pytest.mark.parametrize("n, d, group", [(32, 16, 3), (22, 5, 1)])
def test_a_step_takes_the_multiplications_of_the_formulas(n, d, group):
    """A step takes 2n²d products a query, and four matrices as many again to form the pairs."""
    products = group * 2 * n * n * d
    four, two = (
        step(Cache(), n, d, group).multiplications for Cache in (FourCache, TwoCache)
    )
    # the softmax, and q times the scale
    assert four == products + 2 * n * n * d + group * (n * n + d)
    assert two == products + 2 * (2 * n - 1) * d  # the new pairs


@pytest.mark.claim("T4")
def test_the_factored_form_multiplies_as_two_matrices_and_moves_less(note):
    """The factored form multiplies as two matrices do; Figure 1's four take twice as much."""
    n = d = 64
    four, two, factored = (
        step(Cache(), n, d, 1) for Cache in (FourCache, TwoCache, FactoredFourCache)
    )
    saved, ratio = (
        four.multiplications - two.multiplications,
        factored.multiplications / two.multiplications,
    )
    assert 1 - 5 / n < saved / (2 * n * n * d) < 1 and abs(ratio - 1) < 0.01
    assert (
        four.moved > 1.5 * two.moved > 1.5 * 2 * n * n * d * 4
        and two.moved > 8 * factored.moved
    )
    note(
        "T4",
        saved=saved / (2 * n * n * d),
        multiplied=ratio,
        moved=two.moved / factored.moved,
    )


def rows_right(game, bits):
    """Return each row's share of right guesses."""
    return (game.guesses() == bits).double().mean(1)


@pytest.mark.claim("T5")
def test_projections_come_closer_to_orthonormal_like_1_over_root_d(note):
    assert distortion(torch.tensor([[1.0, 0], [0.6, 0.5]])) == pytest.approx(0.6)
    ratios = [
        sum(distortion(deal(n, d, seed)[1]) for seed in range(20))
        / 20
        * math.sqrt(d / math.log(n))
        for n in (4, 16, 64, 256)
        for d in (16, 128, 1024)
    ]
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
            assert (
                game.read[~bits].max() <= game.zero
                and game.read[bits].min() >= game.one
            )
            eps = distortion(keys)
        # the zero key pairs with all: (n + 1)² − n² pairs of weight 1, which the paper leaves out
        # C is 2 ln n
        own, others = n * n ** (2 - 2 * eps), n * (n - 1) * n ** (2 * eps)
        assert [game.zero, game.one] == pytest.approx(
            [x / (own + others + 2 * n + 1) for x in (others, own)]
        )
        note("T6", games=games)


@pytest.mark.claim("T6")
def test_bob_reads_the_rows_that_are_kept_and_guesses_the_others(note):
    """One bit for each number of V₁ is enough."""
    n, d = 32, 2048
    bits, keys = deal(n, d)
    for kept, precision in (32, 1), (16, None), (8, 1):
        game = index_game_four(
            bits, keys, compress=keep_rows(slice(kept), n, precision)
        )
        rows = rows_right(game, bits)
        assert (rows[:kept] == 1).all() and rows[kept:].sum() == pytest.approx(
            (n - kept) / 2, abs=0.2
        )
    note("T6", others=rows[kept:].mean().item())


@pytest.mark.claim("T7", "T8")
def test_rows_that_come_back_from_two_matrices_are_no_kronecker_product(note):
    """All bits come back, but the rows are not a K₁ ⊘ K₂, so the bound is one of the format."""
    n = 8
    for seed in range(3):
        bits, keys = deal(n**2, 2048, seed)
        game = play(LayerCache(), keys, bits.to(keys), keys)
        assert game.right(bits) == 1 and game.zero < game.one
        assert game.read[~bits].max() <= game.zero and game.read[bits].min() >= game.one
    eps, C = distortion(keys), 2 * math.log(n**2)
    own, others = math.exp(C * (1 - eps)), (n**2 - 1) * math.exp(C * eps)
    # Bob's zero key once, not in pairs
    assert game.one == pytest.approx(own / (own + others + 1), rel=1e-12)
    part = play(
        LayerCache(), keys, bits.to(keys), keys, compress=keep_rows(slice(40), n**2)
    )
    rows = rows_right(part, bits)
    assert (rows[:40] == 1).all() and rows[40:].mean() == pytest.approx(0.5, abs=0.02)

    def cross(rows):
        square = rows.unflatten(0, (n, n))
        return (
            (square[0, 0] * square[1, 1] - square[0, 1] * square[1, 0])
            .abs()
            .max()
            .item()
        )

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


def spread_out(n, d, most, generator):
    """Return n unit vectors (n, d), no two with a cosine above `most`; and the largest cosine.

    With C = ln(4n)/(1 − cosine) every other key weighs less than 1/4n of Bob's own. Some e^d of
    them fit if most² = 1 − 1/e², so most = 0.93 (Gilbert and Varshamov).
    """
    keys = torch.empty(0, d, dtype=torch.float64)
    while len(keys) < n:
        key = F.normalize(
            torch.randn(1, d, dtype=torch.float64, generator=generator), dim=1
        )
        if not len(keys) or (keys @ key.T).max() <= most:
            keys = torch.cat((keys, key))
    return keys, (keys @ keys.T - 2 * torch.eye(n)).max().item()


@pytest.mark.claim("T12")
def test_e_to_the_d_rows_need_other_keys_than_the_proof_s(note):
    d, n = 5, math.ceil(math.e**5)
    deals = [deal(n, d, seed) for seed in range(3)]
    right = sum(index_game_four(*dealt).right(dealt[0]) for dealt in deals) / 3
    # the proof: below 1/2
    assert 0.55 < right < 0.75 and min(distortion(keys) for _, keys in deals) > 1
    code, cosine = spread_out(n, d, 0.93, seeded(0))
    C = math.log(4 * n) / (1 - cosine)
    assert index_game_four(deals[0][0], code, C).right(deals[0][0]) == 1
    note("T12", game_d=d, game_rows=n, game_right=right, game_C=C / math.log(n))


def match3(n, T, p, generator):
    """Return n texts (n, T + 1) of numbers below p behind a first token p, and answers (n, T).

    Match-3 (Sanford et al., arXiv 2306.02896) asks at each number x_i whether two numbers a, b up
    to it have a + b + x_i ≡ 0 mod p.
    """
    x = torch.randint(p, (n, T), generator=generator)
    # (n, i, a, b)
    hit = (x[:, :, None, None] + x[:, None, :, None] + x[:, None, None]) % p == 0
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    return F.pad(x, (1, 0), value=p), (hit & seen[:, :, None] & seen[:, None]).flatten(
        2
    ).any(-1)


def learned(build, steps=120, T=6, p=13, **shape):
    """Train a decoder of one layer on Match-3; return its parameters and right answers on new texts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(
            Config(
                vocab_size=p + 3,
                max_len=T + 1,
                d_model=64,
                n_layers=1,
                d_ff=64,
                **shape,
            )
        )
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(4)  # a product of three small numbers learns slowly
    rate = lambda i: (
        min(1, (i + 1) / 50) * (1 + math.cos(math.pi * i / (steps + 1))) / 2
    )
    optimizer, generator = (
        torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0),
        seeded(0),
    )
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * rate(i)
        tokens, yes = match3(64, T, p, generator)
        logits = model(tokens)[:, 1:]
        F.cross_entropy(logits.flatten(0, 1), p + 1 + yes.flatten().long()).backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens, yes = match3(1000, T, p, seeded(1))
    with torch.no_grad():
        right = model(tokens)[:, 1:].argmax(-1) == p + 1 + yes.long()
    return sum(x.numel() for x in model.parameters()), right.double().mean().item()


@pytest.mark.claim("T13")
def test_a_layer_of_pairs_learns_match_3_and_ordinary_attention_does_not(note):
    tokens, yes = match3(50, 6, 7, seeded(0))
    for (_, *text), found in zip(tokens.tolist(), yes.tolist()):
        assert found == [
            any(
                (a + b + text[i]) % 7 == 0 for a in text[: i + 1] for b in text[: i + 1]
            )
            for i in range(6)
        ]
    size, right = learned(pair_decoder, n_heads=1, n_kv_heads=1, head_dim=64)
    same, ordinary = learned(Decoder, n_heads=3, n_kv_heads=3, head_dim=32)
    assert size == same and right > ordinary + 0.05
    note("T13", pairs=100 * right, single=100 * ordinary)
