"""Test the Index game, the cost of a step of tensor attention, and a task about pairs."""

from itertools import product
import math

from pytest import approx, mark
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
from nanollm.cache import Slots
from nanollm.model import Config, Decoder


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Count(TorchDispatchMode):
    """Count multiplications, and the bytes that operations read and write; a view moves nothing."""

    multiplications = moved = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **kwargs or {})
        name = op.overloadpacket.__name__.strip("_")
        if op.is_view or name == "unsafe_view":
            return out
        read, made = tensors(args), tensors(out)
        for x in read + made:
            self.moved += x.numel() * x.element_size()
        if name in ("mm", "bmm"):
            self.multiplications += made[0].numel() * read[0].shape[-1]
        elif "scaled_dot_product" in name:
            q, k, *_ = read
            self.multiplications += 2 * q.numel() * k.shape[-2]
        elif name in ("mul", "div", "exp", "softmax"):
            self.multiplications += made[0].numel()
        return out


def step(cache, n, d):
    """Return the `Count` of a cache's n-th token."""
    k = random(1, 1, n, 2 * d).float()
    q = random(1, 1, 1, d).float()
    pos = torch.arange(n)[None]
    # in two pieces, so that no buffer has to grow in the last step
    for part in (slice(n - 2), slice(n - 2, n - 1)):
        x = k[:, :, part]
        cache.write(x, x, pos[:, part])
    last = k[:, :, -1:]
    with Count() as count:
        cache.attend(q, last, last, pos[:, -1:])
    return count


@mark.claim("T4")
def test_the_factored_form_multiplies_as_two_matrices_and_moves_less(note):
    """The factored form multiplies as two matrices do; Figure 1's four take twice as much."""
    n = d = 64
    caches = FourCache(), TwoCache(), FactoredFourCache()
    four, two, factored = (step(cache, n, d) for cache in caches)
    saved = (four.multiplications - two.multiplications) / (2 * n * n * d)
    ratio = factored.multiplications / two.multiplications
    assert 1 - 5 / n < saved < 1
    assert abs(ratio - 1) < 0.01
    assert four.moved > 1.5 * two.moved
    assert two.moved > 8 * factored.moved
    note("T4", saved=saved, multiplied=ratio)


def won(game, bits):
    """Check that all guesses are right, and that what Bob reads is within the margins."""
    assert game.right(bits) == 1
    assert game.zero < game.one  # Δ > δ
    assert game.read[~bits].max() <= game.zero
    assert game.read[bits].min() >= game.one


@mark.claim("T5")
def test_projections_come_closer_to_orthonormal_like_1_over_root_d(note):
    assert distortion(torch.tensor([[1.0, 0], [0.6, 0.5]])) == approx(0.6)
    ratios = []
    for n, d in product((4, 16, 64, 256), (16, 128, 1024)):
        total = sum(distortion(deal(n, d, seed)[1]) for seed in range(20))
        ratios.append(total / 20 * math.sqrt(d / math.log(n)))
    # ε² d / ln n hardly moves
    assert 1.6 < min(ratios) < max(ratios) < 2.4
    note("T5", least=min(ratios), most=max(ratios))


@mark.claim("T6")
def test_every_bit_comes_back_from_four_matrices_within_the_margins(note):
    for n, d in (16, 1024), (32, 2048):
        games = 10
        for seed in range(games):
            bits, keys = deal(n, d, seed)
            game = index_game_four(bits, keys)
            won(game, bits)
        # the zero key pairs with all: (n + 1)² − n² pairs of weight 1, which the paper leaves out
        eps = distortion(keys)
        own = n * n ** (2 - 2 * eps)  # C is 2 ln n
        others = n * (n - 1) * n ** (2 * eps)
        total = own + others + 2 * n + 1
        assert game.zero == approx(others / total)
        assert game.one == approx(own / total)
        note("T6", games=games)


@mark.claim("T6")
def test_bob_reads_the_rows_that_are_kept_and_guesses_the_others(note):
    """One bit for each stored number is enough."""
    n, d = 32, 2048
    bits, keys = deal(n, d)
    for kept, precision in (32, 1), (16, None), (8, 1):
        compress = keep_rows(slice(kept), n, precision)
        game = index_game_four(bits, keys, compress=compress)
        rows = (game.guesses() == bits).double().mean(1)  # right of each row
        assert (rows[:kept] == 1).all()
        assert rows[kept:].sum() == approx((n - kept) / 2, abs=0.2)
    note("T6", others=rows[kept:].mean().item())


@mark.claim("T7", "T8")
def test_rows_that_come_back_from_two_matrices_are_no_kronecker_product(note):
    """All bits come back, but the rows are not a K₁ ⊘ K₂, so the bound is one of the format."""
    n = 8
    for seed in range(3):
        bits, keys = deal(n**2, 2048, seed)
        values = bits.to(keys)
        game = play(Slots(), keys, values, keys)
        won(game, bits)
    eps = distortion(keys)
    C = 2 * math.log(n**2)
    own = math.exp(C * (1 - eps))
    others = (n**2 - 1) * math.exp(C * eps)
    # Bob's zero key once, not in pairs
    assert game.one == approx(own / (own + others + 1), rel=1e-12)

    def cross(rows):
        (a, b, *_), (c, d, *_), *_ = rows.unflatten(0, (n, n))
        return (a * d - b * c).abs().max().item()

    k1, k2 = torch.randn(2, n, 16, dtype=F64, generator=seeded(0))
    assert cross(pairs(k1, k2)) < 1e-12
    assert cross(keys) > 1e-4
    note("T7", rows=cross(keys))


@mark.claim("T8")
@mark.parametrize("factor", [2, 3])
def test_bits_survive_relative_noise_as_long_as_the_margins_do(factor, note):
    """Bits survive a relative error up to the margin, with C = 2 ln n and 3 ln n."""
    C = factor * math.log(32)
    limits = []
    for seed in range(5):
        bits, keys = deal(32, 2048, seed)
        zero, one = separation(32, distortion(keys), C, four=True)
        limits.append((one - zero) / (one + zero))
    limit = limits[-1]

    def noisy(eta):
        return index_game_four(bits, keys, C, eta=eta, generator=seeded(1))

    game = noisy(limit - 0.01)
    assert game.right(bits) == 1
    assert game.zero < game.one
    game = noisy(0.999)
    assert game.zero > game.one
    assert game.right(bits) < 0.9
    note("T8", **{f"least_{factor}": min(limits), f"most_{factor}": max(limits)})


def spread_out(n, d, most, generator):
    """Return n unit vectors (n, d), no two with a cosine above `most`; and the largest cosine.

    With C = ln(4n)/(1 − cosine) every other key weighs at most 1/4n of Bob's own. Some e^d of
    them fit if most² = 1 − 1/e², so most = 0.93 (Gilbert and Varshamov).
    """
    keys = torch.empty(0, d, dtype=F64)
    while len(keys) < n:
        key = torch.randn(1, d, dtype=F64, generator=generator)
        key = F.normalize(key, dim=1)
        if not len(keys) or (keys @ key.T).max() <= most:
            keys = torch.cat((keys, key))
    cosines = keys @ keys.T - 2 * torch.eye(n)  # a key's own is 1 − 2
    return keys, cosines.max().item()


@mark.claim("T12")
def test_e_to_the_d_rows_need_other_keys_than_the_proof_s(note):
    d, n = 5, math.ceil(math.e**5)
    right = 0.0
    for seed in range(3):
        bits, keys = deal(n, d, seed)
        right += index_game_four(bits, keys).right(bits) / 3
        assert distortion(keys) > 1  # the proof: below 1/2
    assert 0.55 < right < 0.75
    code, cosine = spread_out(n, d, 0.93, seeded(0))
    C = math.log(4 * n) / (1 - cosine)
    assert index_game_four(bits, code, C).right(bits) == 1
    note("T12", game_d=d, game_rows=n, game_right=right, game_C=C / math.log(n))


def match3(n, T, p, generator):
    """Return n texts (n, T + 1) of numbers below p behind a first token p, and answers (n, T).

    Match-3 (Sanford et al., arXiv 2306.02896) asks at each number x_i whether two numbers a, b up
    to it have a + b + x_i ≡ 0 mod p.
    """
    x = torch.randint(p, (n, T), generator=generator)
    answers = torch.zeros(n, T, dtype=torch.long)
    for text, answer in zip(x.tolist(), answers):
        for i, last in enumerate(text):
            two = product(text[: i + 1], repeat=2)
            answer[i] = any((a + b + last) % p == 0 for a, b in two)
    return F.pad(x, (1, 0), value=p), answers


def learned(build, heads, head_dim, steps=120, T=6, p=13):
    """Train a decoder of one layer on Match-3.

    Return its number of parameters, and the fraction of right answers on new texts.
    """
    config = Config(
        vocab_size=p + 3,
        max_len=T + 1,
        d_model=64,
        n_layers=1,
        d_ff=64,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=head_dim,
    )
    torch.manual_seed(0)
    model = build(config)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(4)  # a product of three small numbers learns slowly
    weights = [*model.parameters()]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0)
    generator = seeded(0)
    for i in range(steps):
        warm_up = min(1, (i + 1) / 50)
        decay = (1 + math.cos(math.pi * i / (steps + 1))) / 2
        optimizer.param_groups[0]["lr"] = 1e-2 * (warm_up * decay)
        tokens, yes = match3(64, T, p, generator)
        logits = model(tokens)[:, 1:].flatten(0, 1)
        F.cross_entropy(logits, p + 1 + yes.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    tokens, yes = match3(1000, T, p, seeded(1))
    with torch.no_grad():
        guesses = model(tokens)[:, 1:].argmax(-1)
    right = guesses == p + 1 + yes
    return sum(x.numel() for x in weights), right.double().mean().item()


@mark.claim("T13")
def test_a_layer_of_pairs_learns_match_3_and_ordinary_attention_does_not(note):
    size, right = learned(pair_decoder, 1, 64)
    same, ordinary = learned(Decoder, 3, 32)
    assert size == same
    assert right > ordinary + 0.05
    note("T13", pairs=100 * right, single=100 * ordinary)
