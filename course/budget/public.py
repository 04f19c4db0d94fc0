"""The public tests, which students have."""
import math

import pytest
import torch
from torch import tensor

from course.expect import problem, same, wrong


def near(got, expected, what, rtol=1e-6):
    """Fail unless `got` is a float within rtol of the expected one."""
    if type(got) is not float or not math.isclose(got, expected, rel_tol=rtol, abs_tol=1e-9):
        wrong(f"{what}: expected the float {expected:.8g}, got {got!r}")


def ints(*rows):
    """Return the rows as tensors of one head's positions."""
    return [tensor([[row]], dtype=torch.int32) for row in rows]


def kept(got, expected):
    for t, (one, right) in enumerate(zip(got, expected)):
        same(one, right, f"the positions kept after piece {t}")


def counting(n):
    """Return zero queries and keys, so that all weights are equal; token t has the value t."""
    x = torch.zeros(1, 1, n, 4)
    return dict(q=x, k=x, v=torch.arange(n).float()[None, None, :, None].expand(1, 1, n, 4))


@problem("room")
def test_two_leave_when_a_token_finds_no_room(run):
    """Budget 4, `evict` drops two, six single tokens. The fifth finds no room, and the two oldest leave."""
    got = run("attend", **counting(6), pieces=[1] * 6, budget=4, leave=2)
    kept(got["kept"], ints([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [2, 3, 4], [2, 3, 4, 5]))
    same(got["most"], 4, "the most slots ever in use")


@problem("room")
def test_a_token_sees_what_is_held_and_itself(run):
    """Budget 3, one leaves, equal weights: the outputs are means of the values held, 0 0.5 1 2 3 4."""
    expected = tensor([0, 0.5, 1, 2, 3, 4])[None, None, :, None].expand(1, 1, 6, 4)
    for pieces in [1] * 6, [6]:
        got = run("attend", **counting(6), pieces=pieces, budget=3, leave=1)
        same(got["y"], expected, f"the outputs of pieces {pieces}", atol=1e-6)
        same(got["most"], 3, "the most slots ever in use")


@problem("room")
def test_heads_on_their_own(run):
    """Importance 3 1 2 and 1 3 2, budget 3, one leaves: token 1 leaves head 0, token 0 leaves head 1."""
    x = {name: each.expand(1, 2, 4, 4) for name, each in counting(4).items()}
    marks = tensor([[[3., 1, 2, 0], [1, 3, 2, 0]]])
    got = run("attend", **x, pieces=[4], budget=3, leave=1, marks=marks)
    kept(got["kept"], [tensor([[[0, 2, 3], [1, 2, 3]]], dtype=torch.int32)])


STEPS = [[1.], [0.3, 0.7], [0.2, 0.5, 0.3]]


@problem("observe")
def test_three_steps(run):
    """Weights 1 / .3 .7 / .2 .5 .3. Below 1/s are .3 (1/2), then .2 and .3 (1/3): the counts are 2 0 1."""
    got = run("observe", p=[tensor(row).view(1, 1, 1, 1, -1) for row in STEPS], history=8)
    expected = [[0], [1, 0], [2, 0, 1]]
    for s, (count, right) in enumerate(zip(got, expected), 1):
        same(count, tensor([[right]], dtype=torch.int32), f"the counts after step {s}")


@problem("observe")
def test_the_same_steps_in_one_piece(run):
    """The same three tokens at once: steps before a token came do not count, though its weight is 0."""
    p = tensor([row + [0.] * (3 - len(row)) for row in STEPS]).view(1, 1, 1, 3, 3)
    expected = tensor([[[2, 0, 1]]], dtype=torch.int32)
    same(run("observe", p=[p], history=8)[0], expected, "the counts")


@problem("observe")
def test_old_steps_are_forgotten(run):
    """w = 2: after step 4 only steps 3 and 4 count. Token 0 was below at 2 and 3: its count is 1."""
    rows = [*STEPS, [0.4, 0.2, 0.1, 0.3]]
    got = run("observe", p=[tensor(row).view(1, 1, 1, 1, -1) for row in rows], history=2)
    same(got[-1], tensor([[[1, 1, 2, 0]]], dtype=torch.int32), "the counts after step 4")


@problem("observe")
def test_the_group_is_averaged(run):
    """Two query heads with the weights .6 .4 and .2 .8: the means are .4 .6, the counts 1 0."""
    p = [torch.ones(1, 1, 2, 1, 1), tensor([[0.6, 0.4], [0.2, 0.8]]).view(1, 1, 2, 1, 2)]
    same(run("observe", p=p, history=8)[-1], tensor([[[1, 0]]], dtype=torch.int32), "the counts")


@problem("share")
def test_the_smallest_of_five(run):
    """1 2 3 4 10 and β = 0.4: the largest two stay. The others hold 6 of 20."""
    same(run("share", v=tensor([1., 2, 3, 4, 10]), beta=0.4), tensor(0.3), "the share", atol=1e-6)


@problem("share")
def test_rows_on_their_own(run):
    """Two rows of four numbers, β = 0.5: 2 of 4 and 1 of 10."""
    v = tensor([[1., 1, 1, 1], [0, 1, 4, 5]])
    same(run("share", v=v, beta=0.5), tensor([0.5, 0.1]), "the shares", atol=1e-6)


@problem("share")
@pytest.mark.parametrize("beta, expected", [(0.45, 0.3), (0.5, 0.15)])
def test_rounded_as_python_rounds(run, beta, expected):
    """1 2 3 4 10: 0.55 · 5 rounds to 3, which hold 6 of 20; 0.5 · 5 rounds to 2, which hold 3."""
    same(run("share", v=tensor([1., 2, 3, 4, 10]), beta=beta), tensor(expected), "the share", atol=1e-6)


@problem("draw")
def test_the_law_turned_round(run):
    """k = 3, u = ∞: P(v ≤ x) = 1 − (x + 1)⁻². At each draw it equals the uniform number."""
    v = run("draw", shape=[4, 5], k=3, u=math.inf, seed=7)
    expected = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    if not isinstance(v, torch.Tensor) or v.dtype != torch.float64:
        wrong(f"expected a tensor of torch.float64, got {getattr(v, 'dtype', v)!r}")
    same(1 - (v + 1) ** -2, expected, "P(v ≤ x) at the drawn x", atol=1e-9)


@problem("draw")
def test_nothing_beyond_the_end(run):
    """u = 5: all of 1000 draws lie between 0 and 4, some above 3."""
    v = run("draw", shape=[1000], k=3, u=5, seed=0)
    if not isinstance(v, torch.Tensor) or not (0 <= v.min() and 3 < v.max() <= 4):
        wrong(f"expected draws from 0 to 4, some above 3, got {v!r:.200}")


@problem("mass")
@pytest.mark.parametrize("beta, expected", [(0.25, 0.25), (0.36, 0.16), (0.81, 0.01)])
def test_without_an_end(run, beta, expected):
    """k = 3, u = ∞: the lost fraction is (1 − √β)²."""
    near(run("mass", beta=beta, k=3), expected, f"the share lost at β = {beta}")


@problem("mass")
def test_an_end_at_five(run):
    """k = 3, u = 5, β = 1/16: γ + 1 = √10, and the lost fraction is (1 − 1/√10)² / (1 − 1/5)²."""
    near(run("mass", beta=1 / 16, k=3, u=5), (1 - 10 ** -0.5) ** 2 / 0.64, "the share lost")


@problem("slips")
def test_both_slips(run):
    """k = 3, β = 1/4, u = 5, ε = 0: γ = 1 and Δ = 2/3. line is 0.375, factored −1.125, printed −0.765."""
    got = run("steps", beta=0.25, k=3, u=5, eps=0)
    for name, right in dict(delta=2 / 3, line=0.375, factored=-1.125, printed=-0.75 / 0.98).items():
        near(got[name], right, name)


@problem("slips")
def test_with_eps(run):
    """k = 4, β = 0.3, u = 2, ε = 0.2: γ = 1 and Δ = 4/7. line is 0.4 / (0.64 Δ)."""
    got = run("steps", beta=0.3, k=4, u=2, eps=0.2)
    expected = dict(delta=4 / 7, line=0.4 * 7 / 4 / 0.64, factored=-1.4 * 7 / 4 / 0.64,
                    printed=-1.4 / 0.98 / 0.64)
    for name, right in expected.items():
        near(got[name], right, name)


@problem("slips")
def test_without_a_slip(run):
    """β = 1: nothing is lost, so line, factored and printed are 0."""
    got = run("steps", beta=1, k=3, u=5, eps=0)
    for name in ("line", "factored", "printed"):
        near(got[name], 0.0, name)


@problem("repaired")
def test_many_draws(run):
    """A billion draws, ε = 0.1: `failure` is 0; the bound is the tail mass at β′ = 4/9, divided by 0.9."""
    beta = 0.4 / 0.9
    y = (1 - (1 - beta) * (1 - 1 / 25)) ** -0.5
    near(run("repaired", beta=0.5, k=3, u=5, eps=0.1, n=10 ** 9), (1 - 1 / y) ** 2 / 0.64 / 0.9, "the bound")


@problem("repaired")
def test_some_draws(run):
    """150 draws: the tail mass at β′, divided by 1 − ε, is 1/3; add half of `failure`, 0.129859."""
    near(run("repaired", beta=0.5, k=3, u=5, eps=0.25, n=150), 0.3982627478, "the bound")


@problem("repaired")
def test_few_draws(run):
    """Ten draws: `failure` is too large to help, and the bound is 1 − β."""
    near(run("repaired", beta=0.5, k=3, u=50, eps=0.1, n=10), 0.5, "the bound")
