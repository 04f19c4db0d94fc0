"""The public tests, which students have."""
import math

import torch
from torch import tensor

from course.expect import problem, same, wrong


@problem("pairs")
def test_two_and_two(run):
    """Rows 1 2 / 3 4 and 5 6 / 7 8: products in the order (0,0) (0,1) (1,0) (1,1)."""
    got = run("pairs", x=tensor([[1., 2], [3, 4]]), y=tensor([[5., 6], [7, 8]]))
    same(got, tensor([[5., 12], [7, 16], [15, 24], [21, 32]]), "the pairs")


@problem("pairs")
def test_two_and_three(run):
    """x = 1 10, y = 1 2 3 (D = 1): row a·3 + b is x_a · y_b."""
    got = run("pairs", x=tensor([[1.], [10]]), y=tensor([[1.], [2], [3]]))
    same(got, tensor([[1.], [2], [3], [10], [20], [30]]), "the pairs")


@problem("pairs")
def test_heads(run):
    """Leading dimensions (2, 3) stay: ones (2, 3, 4, 5) give ones (2, 3, 16, 5)."""
    x = torch.ones(2, 3, 4, 5)
    same(run("pairs", x=x, y=x), torch.ones(2, 3, 16, 5), "the pairs")


@problem("dense")
def test_even_scores(run):
    """A query of zeros gives all four pairs the weight 1/4: the output is the mean of their values, 6."""
    one = torch.ones(2, 1)
    got = run("dense", q=torch.zeros(1, 1), k1=one, k2=one, v1=tensor([[1.], [3]]), v2=tensor([[2.], [4]]))
    same(got, tensor([[6.]]), "the output", atol=1e-6)


@problem("dense")
def test_no_scale(run):
    """D = 4. Only the pair (0, 1) has a score above 0, ln 3: weights 1 3 1 1 of 6, values 6 12 0 0, output 7."""
    k1, k2 = torch.zeros(2, 4), torch.zeros(2, 4)
    k1[0, 0] = k2[1, 0] = 1
    v1, v2 = tensor([[6.], [0]]).expand(2, 4), tensor([[1.], [2]]).expand(2, 4)
    got = run("dense", q=tensor([[math.log(3), 0, 0, 0]]), k1=k1, k2=k2, v1=v1, v2=v2)
    same(got, torch.full((1, 4), 7.0), "the output", atol=1e-5)


def counting(T, D=2):
    """Return zero queries, so that all weights are equal; both values of token t are t + 1."""
    x = torch.zeros(1, 1, T, D)
    v = torch.arange(1, T + 1).float()[None, None, :, None].expand(1, 1, T, 2 * D)
    return dict(q=x, k=torch.cat((x, x), -1), v=v)


MEANS = tensor([1., 1.5 ** 2, 2 ** 2])[None, None, :, None].expand(1, 1, 3, 2)


@problem("attention")
def test_a_pair_is_as_late_as_its_later_token(run):
    """Equal weights, values 1 2 3 and 1 2 3: query t sees (t + 1)² pairs; the outputs are 1, 1.5², 2²."""
    got = run("attention", **counting(3), pieces=[3])
    same(got["y"], MEANS, "the outputs", atol=1e-6)
    same(got["seen"], 3, "the tokens seen")


@problem("attention")
def test_pieces(run):
    """The same tokens in pieces of 2 and 1: the same outputs, and one call of one_query for each token."""
    got = run("attention", **counting(3), pieces=[2, 1])
    same(got["y"], MEANS, "the outputs", atol=1e-6)
    same(got["shapes"], [[[1, 1, 1, 2], [1, 1, n, 2]] for n in (1, 2, 3)], "shapes of q and k1")


@problem("attention")
def test_the_scale(run):
    """D = 4, four pairs, one with the product 4 ln 3: times 1/√4 it is ln 9, times 1/4 it is ln 3."""
    q = torch.zeros(1, 1, 2, 4)
    q[0, 0, 1, 0] = 4 * math.log(3)
    k, v = torch.zeros(1, 1, 2, 8), torch.ones(1, 1, 2, 8)
    k[0, 0, 0, 0] = k[0, 0, 0, 4] = 1  # so only the pair (0, 0) has a score
    v[0, 0, 1] = 0                     # and only its value is not 0
    for scale, expected in ((None, 9 / 12), (0.25, 3 / 6)):
        got = run("attention", q=q, k=k, v=v, pieces=[2], scale=scale)
        same(got["y"][:, :, 1], torch.full((1, 1, 4), expected), f"the output, scale {scale}", atol=1e-5)


@problem("attention")
def test_groups_of_two(run):
    """Four query heads on two key/value heads: 0 and 1 read the first, 2 and 3 the second."""
    x = torch.zeros(1, 4, 1, 2)
    v = tensor([2., 3])[None, :, None, None].expand(1, 2, 1, 4)
    q = tensor([1., 2, 3, 4])[None, :, None, None].expand(1, 4, 1, 2)
    got = run("attention", q=q, k=x[:, :2].repeat(1, 1, 1, 2), v=v, pieces=[1])
    same(got["y"], tensor([4., 4, 9, 9])[None, :, None, None].expand(1, 4, 1, 2), "the outputs", atol=1e-5)


@problem("new")
def test_the_third_token(run):
    """x = 1 2 3, y = 10 20 30: every x with the last y, 30 60 90; then the last x with the other y, 30 60."""
    x, y = tensor([1., 2, 3]).view(1, 1, 3, 1), tensor([10., 20, 30]).view(1, 1, 3, 1)
    same(run("new_pairs", x=x, y=y), tensor([30., 60, 90, 30, 60]).view(1, 1, 5, 1), "the new pairs")


@problem("new")
def test_the_first_token(run):
    """One token makes one pair, with itself."""
    x, y = tensor([[[[2., 3]]]]), tensor([[[[5., 7]]]])
    same(run("new_pairs", x=x, y=y), tensor([[[[10., 21]]]]), "the new pairs")


@problem("factored")
def test_even_weights(run):
    """A query of zeros over the values 1 2 3 and 1 1 1: the output is the mean, 2, for tiles of 1, 6 and 100."""
    x, one = torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 3, 1)
    v = tensor([1., 2, 3]).view(1, 1, 3, 1)
    for tile in (1, 6, 100):
        got = run("one_query", q=torch.zeros(1, 1, 1, 1), k1=x, k2=x, v1=v, v2=one, tile=tile)
        same(got["y"], tensor([[[[2.]]]]), f"the output, tiles of {tile}", atol=1e-6)


@problem("factored")
def test_a_higher_tile_comes_later(run):
    """One row per tile: scores 0 0, then 1000 1000. The second row outweighs the first, without NaN."""
    k1, one = tensor([0., 1000]).view(1, 1, 2, 1), torch.ones(1, 1, 2, 1)
    v = tensor([5., 7]).view(1, 1, 2, 1)
    got = run("one_query", q=torch.ones(1, 1, 1, 1), k1=k1, k2=one, v1=v, v2=one, tile=1)
    same(got["y"], tensor([[[[7.]]]]), "the output", atol=1e-6)


@problem("factored")
def test_two_queries(run):
    """D = 4, a group of two. Query 0 has the scores 0, query 1 has ln 3 with row 0: outputs 6 and 5.5."""
    q, x = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)
    q[0, 0, 1, 0], x[0, 0, 0, 0], one = math.log(3), 1, torch.ones(1, 1, 2, 4)
    v = tensor([5., 7])[None, None, :, None].expand(1, 1, 2, 4)
    got = run("one_query", q=q, k1=x, k2=one, v1=v, v2=one, tile=2)
    same(got["y"], tensor([6., 5.5])[None, None, :, None].expand(1, 1, 2, 4), "the outputs", atol=1e-5)


@problem("factored")
def test_no_pair_is_formed(run):
    """32 tokens, D = 8, tiles of 64 pairs: no tensor has more than 2 · 32 · 8 numbers."""
    x = torch.ones(1, 1, 32, 8)
    got = run("one_query", q=torch.ones(1, 1, 1, 8), k1=x, k2=x, v1=x, v2=x, tile=64)
    same(got["y"], torch.ones(1, 1, 1, 8), "the output", atol=1e-5)
    if got["numbers"] > 512:
        wrong(f"you made a tensor of {got['numbers']} numbers; at most 512 are allowed")


@problem("causal")
def test_means_of_what_was_seen(run):
    """Equal weights, values 1 2 3 and 1 2 3: query t sees the pairs of tokens up to t: 1, 1.5², 2²."""
    got = run("causal", **counting(3))
    same(got, MEANS, "the outputs", atol=1e-6)


@problem("causal")
def test_groups(run):
    """Four query heads on two key/value heads: 0 and 1 read the first, 2 and 3 the second."""
    x = counting(2)
    v = torch.cat((x["v"], 10 * x["v"]), 1)
    got = run("causal", q=torch.zeros(1, 4, 2, 2), k=torch.zeros(1, 2, 2, 4), v=v)
    first = MEANS[0, 0, :2]
    same(got, torch.stack((first, first, 100 * first, 100 * first))[None], "the outputs", atol=1e-4)


@problem("causal")
def test_scores_are_scaled(run):
    """D = 4, four pairs; (0, 0) has the product 2 ln 9, scaled by 1/√4 ln 9, so the weight 9/12."""
    q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 8), torch.ones(1, 1, 2, 8)
    q[0, 0, 1, 0], k[0, 0, 0, 0], k[0, 0, 0, 4], v[0, 0, 1] = 2 * math.log(9), 1, 1, 0
    same(run("causal", q=q, k=k, v=v)[:, :, 1], torch.full((1, 1, 4), 9 / 12), "the outputs", atol=1e-5)


BITS, KEYS = tensor([[True, False], [False, True]]), torch.eye(2, dtype=torch.float64)


@problem("alice")
def test_what_alice_stores(run):
    """Bits 1 0 / 0 1, keys e₁ e₂: K₁ = keys, V₁ = bits, K₂ = V₂ = 1, in a FactoredFourCache."""
    got, ones = run("alice", bits=BITS, keys=KEYS, C=3.0), torch.ones(2, 2, dtype=torch.float64)
    same(got["k"], torch.cat((KEYS, ones), 1)[None, None], "K₁ and K₂ side by side")
    same(got["v"], torch.cat((BITS.double(), ones), 1)[None, None], "V₁ and V₂ side by side")
    same(got["kind"], "FactoredFourCache", "the cache")
    same(got["scale"], 1.0, "its scale")


@problem("play")
def test_one_round(run):
    """Keys e₁ e₂, C = 2 ln 2 by default. Of nine pairs two weigh 4, the others 1."""
    one = torch.ones(2, 2, dtype=torch.float64)
    k, v = torch.cat((KEYS, one), 1), torch.cat((BITS.double(), one), 1)
    got = run("play", k=k, v=v, keys=KEYS)
    expected = tensor([[8., 2], [2, 8]], dtype=torch.float64) / 15
    same(got["read"], expected, "what Bob reads", atol=1e-9)
    same(got["seen"], 2, "tokens in Alice's own cache (Bob asks copies)")


@problem("play")
def test_a_plain_cache(run):
    """The same with a plain store, Slots: weights 4 1 1. Bob reads 4/6 for a 1, at most 1/6 for a 0."""
    got = run("play", k=KEYS, v=torch.eye(2, dtype=torch.float64), keys=KEYS)
    same(got["read"], tensor([[4., 1], [1, 4]], dtype=torch.float64) / 6, "what Bob reads", atol=1e-6)
    same(tensor([got["zero"], got["one"]]), tensor([1 / 6, 4 / 6]), "zero and one", atol=1e-6)


@problem("play")
def test_noise(run):
    """η = 0.1: each number read is multiplied by 1.1 or 0.9, `zero` by 1.1, `one` by 0.9."""
    one = torch.ones(2, 2, dtype=torch.float64)
    args = dict(k=torch.cat((KEYS, one), 1), v=torch.cat((one, one), 1), keys=KEYS, C=math.log(4))
    exact, noisy = run("play", **args), run("play", **args, eta=0.1, seed=1)
    chance = torch.randint(0, 2, (2, 2), generator=torch.Generator().manual_seed(1))
    same(noisy["read"] / exact["read"], 0.9 + 0.2 * chance.double(), "noisy over exact", atol=1e-6)
    same(tensor([noisy["zero"] / exact["zero"], noisy["one"] / exact["one"]]), tensor([1.1, 0.9]),
         "zero and one, noisy over exact", atol=1e-6)


@problem("play")
def test_evicted(run):
    """Alice keeps the second of two tokens. Bob reads four pairs: its bit 1 as 1/4, then as 4/7."""
    one = torch.ones(2, 2, dtype=torch.float64)
    k, v = torch.cat((KEYS, one), 1), torch.cat((BITS.double(), one), 1)
    got = run("play", k=k, v=v, keys=KEYS, C=math.log(4), kept=tensor([1]))
    expected = tensor([[0, 1 / 4], [0, 4 / 7]], dtype=torch.float64)
    same(got["read"], expected, "what Bob reads", atol=1e-9)
