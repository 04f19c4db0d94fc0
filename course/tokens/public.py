"""The public tests, which students have."""
from math import log

import torch
from torch import tensor

from course.expect import problem, same


@problem("window_scores")
def test_keys_alike(run):
    """Four equal keys, w = 2: the first query gives three keys 1/3 each, the second four keys 1/4 each.

    The two keys before the window have the mean of these as window score, 7/24.
    """
    got = run("window_scores", q=torch.ones(1, 1, 1, 2, 4), k=torch.zeros(1, 1, 4, 4))
    same(got, tensor([[[[7 / 24, 7 / 24]]]]), "the window scores", atol=1e-6)


@problem("window_scores")
def test_two_query_heads(run):
    """D = 4, w = 1. Query head 0 is zero: 1/3 1/3. Head 1 has the scores ln 3, 0 and 0: 3/5 1/5."""
    q, k = tensor([0., 1]).view(1, 1, 2, 1, 1), tensor([log(3) / 2, 0, 0]).view(1, 1, 3, 1)
    got = run("window_scores", q=q.expand(1, 1, 2, 1, 4), k=k.expand(1, 1, 3, 4))
    same(got, tensor([[[[1 / 3, 1 / 3], [3 / 5, 1 / 5]]]]), "the window scores", atol=1e-6)


@problem("window_scores")
def test_32_bits(run):
    """Queries and keys of 16 bits: the window scores have 32."""
    q, k = torch.zeros(1, 1, 1, 1, 2).bfloat16(), torch.zeros(1, 1, 4, 2).bfloat16()
    same(run("window_scores", q=q, k=k), torch.full((1, 1, 1, 3), 0.25), "the window scores")


@problem("pool")
def test_three_neighbours(run):
    """Window scores 1 5 2 0 3, width 3: each becomes the largest of itself and its neighbours, 5 5 5 3 3."""
    got = run("pool", score=tensor([[[1., 5, 2, 0, 3]]]), kernel_size=3)
    same(got, tensor([[[5., 5, 5, 3, 3]]]), "the pooled scores")


@problem("pool")
def test_no_pool(run):
    """Width 1 changes nothing."""
    score = tensor([[[1., 5, 2], [4, 0, 3]]])
    same(run("pool", score=score, kernel_size=1), score, "the pooled scores")


@problem("pool")
def test_heads_are_pooled_apart(run):
    """Two heads, width 5: pooling one head never reads the other's scores."""
    got = run("pool", score=tensor([[[9., 1, 1, 1], [2, 2, 2, 7]]]), kernel_size=5)
    same(got, tensor([[[9., 9, 9, 1], [2, 7, 7, 7]]]), "the pooled scores")


@problem("top")
def test_highest(run):
    """Scores 3 1 4 1 5, budget 2: 4 and 5 stay."""
    got = run("top", score=tensor([3., 1, 4, 1, 5]), budget=2)
    same(got, tensor([0, 0, 1, 0, 1]).bool(), "the mask")


@problem("top")
def test_of_equals_the_newest(run):
    """Scores 2 2 5 2, budget 3: 5 stays, and the newest two of the equal scores."""
    got = run("top", score=tensor([2., 2, 5, 2]), budget=3)
    same(got, tensor([0, 1, 1, 1]).bool(), "the mask")


@problem("top")
def test_a_budget_for_each_head(run):
    """Two heads with a tensor of budgets: the first keeps 1, the second 2."""
    got = run("top", score=tensor([[[3., 1, 2], [3, 1, 2]]]), budget=tensor([[1, 2]]))
    same(got, tensor([[[1, 0, 0], [1, 0, 1]]]).bool(), "the mask")


@problem("top")
def test_more_than_there_are(run):
    """Three scores: a budget of 5 keeps all, a budget of 0 none."""
    score = tensor([[1., 2, 3], [1, 2, 3]])
    got = run("top", score=score, budget=tensor([5, 0]))
    same(got, tensor([[1, 1, 1], [0, 0, 0]]).bool(), "the mask")


@problem("shares")
def test_without_a_floor(run):
    """Scores 9 8 7 and 6 1 0, two entries per head: of the four highest scores, head 0 has three: 3 1."""
    got = run("shared", score=tensor([[[9., 8, 7], [6, 1, 0]]]), mean=2, floor=0.0)
    same(got, tensor([[3, 1]]), "the entries of each head")


@problem("shares")
def test_half_is_dealt_out(run):
    """Floor 0.5, four per head, n_h = 6 2: half of 4 for each, plus half of 6 and of 2: 5 3."""
    score = tensor([[[9., 9, 9, 9, 9, 9], [1, 1, 0, 0, 0, 0]]])
    same(run("shared", score=score, mean=4, floor=0.5), tensor([[5, 3]]), "the entries of each head")


@problem("shares")
def test_remainders(run):
    """Floor 0.2, two per head, n_h = 4 1 1: exactly 3.6 1.2 1.2, so 3 1 1, and one more for head 0."""
    score = tensor([[[9., 9, 9, 9], [5, 0, 0, 0], [5, 0, 0, 0]]])
    same(run("shared", score=score, mean=2, floor=0.2), tensor([[4, 1, 1]]), "the entries of each head")


@problem("shares")
def test_equal_remainders(run):
    """Floor 0.5, one per head, n_h = 2 0: exactly 1.5 0.5. The lower head gets the missing entry: 2 0."""
    score = tensor([[[9., 9], [1, 1]], [[1, 1], [9, 9]]])
    same(run("shared", score=score, mean=1, floor=0.5), tensor([[2, 0], [1, 1]]), "the entries of each head")


@problem("norms")
def test_one_head(run):
    """The value (1, 2) and the rows (1, 0), (0, −1), (1, 1) of W_O: the product is 1 −2 3, its norm 6."""
    got = run("value_norms", v=tensor([1., 2]).view(1, 1, 1, 2),
              w_o=tensor([[1., 0], [0, -1], [1, 1]]).view(3, 1, 2))
    same(got, tensor([[[[6.]]]]), "the norms", atol=1e-6)


@problem("norms")
def test_norms_of_a_group(run):
    """Two texts, two value heads, four query heads with W_O = 1 2 3 4: heads 0 and 1 read value head 0."""
    v = tensor([[[1.], [-2]], [[10], [20]]])
    got = run("value_norms", v=torch.stack((v, 2 * v)), w_o=tensor([1., 2, 3, 4]).view(1, 4, 1))
    expected = tensor([[[1., 2], [2, 4]], [[30, 60], [40, 80]]])
    expected = torch.stack((expected, 2 * expected))
    same(got, expected, "the norms", atol=1e-5)


@problem("norms")
def test_norms_of_16_bits(run):
    """Values of 16 bits: the norms have 32."""
    got = run("value_norms", v=torch.ones(1, 1, 2, 1).bfloat16(), w_o=torch.ones(300, 1, 1).bfloat16())
    same(got, torch.full((1, 1, 1, 2), 300.0), "the norms")


@problem("two_stage")
def test_the_first_stage_stays(run):
    """Stage 1 took token 0, which has the lowest score. The two highest of the others fill a budget of 3."""
    got = run("two_stage", first=tensor([1, 0, 0, 0, 0]).bool(), score=tensor([0., 3, 1, 2, 5]), budget=3)
    same(got, tensor([1, 1, 0, 0, 1]).bool(), "the mask")


@problem("two_stage")
def test_equal_scores(run):
    """Equal scores; stage 1 took token 1. The newest of the others fill budgets of 2 and 3."""
    got = run("two_stage", first=tensor([[0, 1, 0, 0]] * 2).bool(), score=torch.full((2, 4), 1e9),
              budget=tensor([2, 3]))
    same(got, tensor([[0, 1, 0, 1], [0, 1, 1, 1]]).bool(), "the mask")


@problem("critical")
def test_scores_times_norms(run):
    """Window scores 4 3 2 1, values 0 1 1 9, budget 2, α = 0.5: stage 1 takes token 0, stage 2 token 3."""
    got = run("selected", scores=tensor([4., 3, 2, 1]).view(1, 1, 1, 4),
              v=tensor([0., 1, 1, 9, 50, 50]).view(1, 1, 6, 1), w_o=torch.ones(1, 1, 1), budget=2, alpha=0.5)
    same(got, tensor([[[1, 0, 0, 1]]]).bool(), "the mask")


@problem("critical")
def test_rounded_down(run):
    """The same with α = 0.25: a quarter of 2 rounds down to 0. Stage 2 takes tokens 1 and 3."""
    got = run("selected", scores=tensor([4., 3, 2, 1]).view(1, 1, 1, 4),
              v=tensor([0., 1, 1, 9, 50, 50]).view(1, 1, 6, 1), w_o=torch.ones(1, 1, 1), budget=2,
              alpha=0.25)
    same(got, tensor([[[0, 1, 0, 1]]]).bool(), "the mask")


@problem("critical")
def test_only_stage_1_is_pooled(run):
    """Window scores 0 9 0 0 0 3, pool width 3, budget 2, α = 0.5. Stage 1 pools and takes token 2, the newest
    of three with 9. Stage 2 does not pool and takes token 1, though token 0 has a larger value.
    """
    got = run("selected", scores=tensor([0., 9, 0, 0, 0, 3]).view(1, 1, 1, 6),
              v=tensor([2., 1, 1, 1, 1, 1, 1]).view(1, 1, 7, 1), w_o=torch.ones(1, 1, 1), budget=2, alpha=0.5,
              kernel_size=3)
    same(got, tensor([[[0, 1, 1, 0, 0, 0]]]).bool(), "the mask")


@problem("theta")
def test_half_the_weight(run):
    """Weights ½ ¼ ¼, norms 2 4 8, the first stays: C = 4, M = 1, S = ½, so 2 − 1/S = 0 and θ = 4."""
    got = run("theta", weights=tensor([0.5, 0.25, 0.25]), norms=tensor([2., 4, 8]),
              kept=tensor([1, 0, 0]).bool())
    same(got, tensor(4.), "θ", atol=1e-6)


@problem("theta")
def test_three_quarters(run):
    """The first and the last of the same stay: M = 3, S = ¾, 2 − 1/S = ⅔, and θ = 4 − ⅔ · 3 = 2.

    Another head has the weights ¼ ½ ¼: C = 4½, M = 2½, S = ½, and θ = 4½.
    """
    got = run("theta", weights=tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]), norms=tensor([[2., 4, 8]] * 2),
              kept=tensor([[1, 0, 1]] * 2).bool())
    same(got, tensor([2., 4.5]), "θ", atol=1e-6)
