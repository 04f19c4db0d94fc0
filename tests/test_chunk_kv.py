"""ChunkKV: the theory on small tables in float64, by brute force, and where the paper's Eq. 12 and 15 stop; what is kept
against sets, how chunks are cut, scored and taken against loops, and the paper's claims on the shipped model."""
from collections import defaultdict
from functools import cache
from itertools import product
from math import log

from hypothesis import given, settings, strategies as st
import pytest
import torch

from methods.chunk_kv import (ChunkKV, PlacedChunkKV, SemanticChunkKV, answer_bound, at_the_answer, chunk_noise,
                              cut, distance_bound, divergence, examples, fisher, fit, jaccard, kept_whole, markov,
                              scores, token_divergences, token_noise)
from methods.snap_kv import SnapKV
from nanollm import TINY, tokenizer, weights
from nanollm.cache import LayerCache, finish_prompt, held, make_cache
from nanollm.data import Tasks, Unmarked
from nanollm.evaluate import (Recorder, feed, maker, prompt_and_question, record, retrieve, standard_error,
                              text_windows)
from test_window_methods import chunks_of

F64 = torch.float64
seeds, sizes, noises = st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.3])
thetas = st.tuples(*[st.floats(0.05, 0.95)] * 2)


def check(*strategies):
    return lambda test: settings(max_examples=50, deadline=None)(given(*strategies)(test))


def vector(*values):
    return torch.tensor(values, dtype=F64)


def close(x, y, tolerance=1e-12):
    return torch.allclose(x, torch.as_tensor(y, dtype=F64), rtol=tolerance, atol=tolerance)


def at_most(x, y):
    return bool(torch.as_tensor(x <= y * (1 + 1e-12) + 1e-12).all())


def tables(seed, k):
    """Two tables of k tokens, of 2 to 4 values each; the first has zeros."""
    g = torch.Generator().manual_seed(seed)
    shape = torch.randint(2, 5, (k,), generator=g).tolist()
    p, q = torch.rand(2, *shape, generator=g, dtype=F64)**3 + 1e-3
    p = p * (torch.rand(shape, generator=g) > 0.2)
    p[(0,) * k] += 0.1
    return p / p.sum(), q / q.sum()


def subset(seed, k):
    return [j for j in range(k) if seed >> j & 1]


def marginal(p, kept):
    """{values of the kept tokens: probability}, by enumeration."""
    out = defaultdict(float)
    for values in product(*map(range, p.shape)):
        out[tuple(values[j] for j in kept)] += float(p[values])
    return out


def kl(p, q):
    return sum(a * log(a / q[values]) for values, a in p.items() if a)


def conditional(p, q, given, kept):
    """KL of the `kept` tokens when `given`, a subset of them, are known: E log p(kept | given) / q(kept | given)."""
    return kl(marginal(p, kept), marginal(q, kept)) - kl(marginal(p, given), marginal(q, given))


def bernoulli(*chances):
    """Table of independent tokens, each 1 with its own chance."""
    table = torch.ones((), dtype=F64)
    for chance in chances:
        chance = torch.as_tensor(chance, dtype=F64)
        table = table[..., None] * torch.stack((1 - chance, chance))
    return table


def coins(k):
    """One parameter, k tokens that are 1 with probability θ."""
    return lambda theta: bernoulli(*[theta[0]] * k)


def mirrored(k):
    """The last token is 1 with probability 0.6 − θ: at θ* = 0.3 it says as much as the others, but it errs the other way."""
    return lambda theta: bernoulli(*[theta[0]] * (k - 1), 0.6 - theta[0])


def step(table, theta, delta):
    """KL_j and I_j of the tokens 2 … k, ‖δ‖² and the remainder max_j |KL_j − ½ δᵀ I_j δ| / ‖δ‖²."""
    each, information = token_divergences(table(theta), table(theta + delta))[1:], fisher(table, theta)[1:]
    return each, information, delta @ delta, float((each - information @ delta @ delta / 2).abs().max() / (delta @ delta))


# ---- tables and their divergences ---


@pytest.mark.claim("C3")
@check(thetas, sizes, noises)
def test_markov_is_the_sum_over_all_hidden_paths(theta, k, noise):
    table = markov(vector(*theta), k, noise)
    assert table.shape == (2,) * k and close(table.sum(), 1)
    expected = torch.zeros_like(table)
    for path, tokens in product(product((0, 1), repeat=k), repeat=2):
        chance = 0.5
        for before, state in zip(path, path[1:]):
            chance *= theta[before] if state else 1 - theta[before]
        for state, token in zip(path, tokens):
            chance *= 1 - noise if token == state else noise
        expected[tokens] += chance
    assert close(table, expected)


@pytest.mark.claim("C3")
@check(seeds, sizes)
def test_divergence_is_a_sum_over_all_values_of_the_kept_tokens_and_none_from_a_table_to_itself(seed, k):
    p, q = tables(seed, k)
    assert close(divergence(p, q), kl(marginal(p, range(k)), marginal(q, range(k))))
    for number in range(2**k):
        kept = subset(number, k)
        assert close(divergence(p, q, kept), kl(marginal(p, kept), marginal(q, kept)))
        assert close(divergence(q, q, kept), 0)
        assert divergence(p, q, [j - k for j in kept]) == divergence(p, q, kept)  # −1 is the last token


@pytest.mark.claim("C3")
@check(seeds, sizes)
def test_losing_tokens_never_adds_divergence(seed, k):
    p, q = tables(seed, k)
    of = [divergence(p, q, subset(number, k)) for number in range(2**k)]
    for less, more in product(range(2**k), repeat=2):
        assert less & ~more or at_most(of[less], of[more])
    assert close(of[0], 0) and close(of[-1], divergence(p, q))


@pytest.mark.claim("C3")
def test_values_that_neither_distribution_has_add_no_divergence_and_values_that_only_the_wrong_one_lacks_add_infinity():
    p, q = torch.diag(vector(0.3, 0.7)), torch.diag(vector(0.5, 0.5))  # the second token repeats the first
    expected = 0.3 * log(0.6) + 0.7 * log(1.4)
    assert close(divergence(p, q), expected) and close(token_divergences(p, q), [expected, 0])
    assert divergence(vector(0.5, 0.5), vector(1, 0)) == torch.inf
    assert close(fisher(lambda theta: torch.diag(bernoulli(theta[0])), vector(0.3)), [[[1 / 0.21]], [[0]]])


@pytest.mark.claim("C3")
@check(seeds, sizes)
def test_the_divergence_of_a_token_is_the_expectation_over_the_tokens_before_it_and_all_sum_to_that_of_the_tables(seed, k):
    p, q = tables(seed, k)
    each = token_divergences(p, q)
    assert each.shape == (k,) and close(each.sum(), divergence(p, q))
    for j in range(k):
        before, after = ([marginal(x, range(n)) for x in (p, q)] for n in (j, j + 1))
        expected = 0.0
        for prefix, chance in before[0].items():
            for value in range(p.shape[j]) if chance else ():
                true, wrong = (after[i][*prefix, value] / before[i][prefix] for i in (0, 1))
                expected += chance * true * log(true / wrong) if true else 0
        assert close(each[j], expected)


@pytest.mark.claim("C3")
@check(thetas, sizes, noises)
def test_fisher_is_the_expected_outer_product_of_the_scores_of_a_token_given_those_before_it(theta, k, noise):
    def upto(j, theta):
        table = markov(theta, k, noise)
        return table.reshape(*table.shape[:j], -1).sum(-1)

    theta = vector(*theta)
    information = fisher(lambda theta: markov(theta, k, noise), theta)
    assert information.shape == (k, 2, 2)
    for j in range(k):
        score = torch.autograd.functional.jacobian(lambda x: upto(j + 1, x).log() - upto(j, x).log()[..., None], theta)
        assert close(information[j], torch.einsum("...,...p,...q->pq", upto(j + 1, theta), score, score), 1e-10)


@pytest.mark.claim("C3")
@check(thetas, sizes)
def test_without_noise_the_information_is_how_often_a_state_is_left_over_the_variance_of_the_move(theta, k):
    theta, at = vector(*theta), vector(0.5, 0.5)
    information = fisher(lambda theta: markov(theta, k), theta)
    assert close(information[0], 0)  # the first token is a fair coin whatever θ is
    for j in range(1, k):
        assert close(information[j], torch.diag(at / (theta * (1 - theta))), 1e-10)
        at = torch.stack((at @ (1 - theta), at @ theta))


# ---- Eq. 10 to 16 ---


@pytest.mark.claim("C3")
@check(thetas, thetas, st.integers(2, 5), noises, st.floats(0.02, 1))
def test_equations_12_and_15_hold_once_the_remainder_stands_above_and_below_the_line(theta, other, k, noise, share):
    theta, delta = vector(*theta), share * (vector(*other) - vector(*theta))
    if delta.norm() < 1e-3:  # KL is a difference of numbers near 1
        return
    each, information, distance, remainder = step(lambda theta: markov(theta, k, noise), theta, delta)
    assert at_most(distance, distance_bound(each.sum(), information, remainder))
    assert at_most(each[-1], answer_bound(each.sum(), information, remainder))
    low = torch.linalg.eigvalsh(information)[:, 0].amin() / 2
    assert (distance_bound(each.sum(), information, remainder) < torch.inf) == (low > remainder)


@pytest.mark.claim("C3")
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_the_remainder_shrinks_as_fast_as_delta_so_the_dropped_term_is_cubic(noise):
    theta, delta = vector(0.3, 0.8), vector(0.2, -0.1)
    each = [step(lambda theta: markov(theta, 4, noise), theta, delta * scale)[-1] for scale in (1e-1, 1e-2, 1e-3)]
    assert each[0] / each[1] == pytest.approx(10, rel=0.1) and each[1] / each[2] == pytest.approx(10, rel=0.01)


@pytest.mark.claim("C3")
def test_the_remainder_of_one_move_is_the_cubic_term_of_a_coin_from_either_state():
    theta, delta = vector(0.3, 0.8), vector(2e-4, -1e-4)
    *_, remainder = step(lambda theta: markov(theta, 2), theta, delta)
    cubic = (1 / (1 - theta)**2 - 1 / theta**2) / 3  # of −θ* log θ − (1 − θ*) log (1 − θ)
    assert remainder == pytest.approx(float((cubic @ delta**3 / 2).abs() / (delta @ delta)), rel=1e-3)


@pytest.mark.claim("C3")
@pytest.mark.parametrize("k", [2, 3, 6])
def test_as_printed_equation_12_is_wrong_for_a_chain_that_is_mistaken_for_a_fair_coin(k):
    """All by hand: both states are as frequent, so I_j = 1/2 / (0.2 · 0.8) in both directions and KL_j = log 2 − H(0.2)."""
    theta, delta = vector(0.2, 0.8), vector(0.3, -0.3)
    each, information, distance, remainder = step(lambda theta: markov(theta, k), theta, delta)
    assert close(information, torch.eye(2, dtype=F64) * 3.125) and close(distance, 0.18)
    assert close(each, kl := 0.2 * log(0.4) + 0.8 * log(1.6))
    printed, repaired = (distance_bound(each.sum(), information, x) for x in (0.0, remainder))
    assert close(printed, kl * 2 / 3.125) and printed < 0.7 * distance  # 0.123 against 0.18
    assert close(repaired, distance)                                    # no slack: it could not be smaller
    assert close(answer_bound(each.sum(), information, 0.0), kl)        # Eq. 15 holds all the same: the tokens are alike


@pytest.mark.claim("C3")
def test_as_printed_equation_12_is_wrong_for_a_hidden_chain_too():
    theta, delta = vector(0.3, 0.8), vector(0.2, -0.2)
    each, information, distance, remainder = step(lambda theta: markov(theta, 5, 0.1), theta, delta)
    assert close(distance, 0.08) and close(distance_bound(each.sum(), information), 0.07808, 1e-5)
    assert close(distance_bound(each.sum(), information, remainder), 0.09486, 1e-5)


@pytest.mark.claim("C3")
@pytest.mark.parametrize("delta, printed, above, below, both, actual", [
    (0.05, 0.005720, 0.006144, 0.006178, 0.006636, 0.006401), (0.2, 0.0902, 0.1456, 0.2334, 0.3767, 0.1537)])
def test_equation_15_needs_its_o_1_and_a_remainder_above_the_line_or_below_it_alone_may_not_do(
        delta, printed, above, below, both, actual):
    each, information, _, remainder = step(mirrored(10), vector(0.3), vector(delta))
    noise, half = each.sum(), 0.5 / 0.21
    assert close(information, 2 * half) and close(each[-1], actual, 1e-4)
    assert close(answer_bound(noise, information), printed, 1e-4) and printed < actual
    assert close((half + remainder) * distance_bound(noise, information), above, 1e-4) and above < actual
    assert close(half * distance_bound(noise, information, remainder), below, 1e-4)
    assert close(answer_bound(noise, information, remainder), both, 1e-4) and both > actual
    assert delta == 0.2 or below < actual


@pytest.mark.claim("C3")
@pytest.mark.parametrize("k", [3, 10])
def test_above_the_line_alone_o_1_would_have_to_be_nearly_4_remainders_but_it_vanishes_with_delta(k):
    for delta in (1e-2, 1e-3):
        each, information, _, remainder = step(mirrored(k), vector(0.3), vector(delta))
        needed = each[-1] * (k - 1) * information.amin() / each.sum() - information.amax()  # Eq. 15 solved for O(1)
        assert close(needed / delta, 4 * (1 / 0.09 - 1 / 0.49) / 3 * (k - 2) / (k - 1), 20 * delta)
        assert close(needed / remainder, 4 * (k - 2) / (k - 1), 20 * delta)


@pytest.mark.claim("C3")
@pytest.mark.parametrize("k", [2, 3, 6])
def test_with_equal_tokens_and_one_parameter_nothing_is_lost(k):
    each, information, distance, remainder = step(coins(k), vector(0.3), vector(1e-4))
    assert close(answer_bound(each.sum(), information), each[-1], 1e-15)  # Eq. 15, at any distance
    assert close(distance_bound(each.sum(), information) / distance, 1, 1e-3)
    assert close(answer_bound(each.sum(), information, remainder) / each[-1], 1, 1e-3)
    each, information, *_ = step(coins(k), vector(0.3), vector(0.4))
    assert close(answer_bound(each.sum(), information), each[-1])


@pytest.mark.claim("C3")
def test_with_unequal_tokens_the_bounds_lose_what_the_least_and_the_most_informative_differ_in():
    """Token j is 1 with probability 1/2 + w_j · (θ − 1/2): I_j = 4 w_j², in two directions."""
    weights = vector(0, 0.5, 0.5, 0.9, 0.8)
    table = lambda theta: bernoulli(*0.5 + weights * (theta[0] - 0.5))
    each, information, distance, _ = step(table, vector(0.5), vector(1e-3))
    low, high, mean, last = (float(4 * x) for x in (0.25, 0.81, (weights[1:]**2).mean(), 0.64))
    assert close(distance_bound(each.sum(), information) / distance, mean / low, 1e-5)
    assert close(answer_bound(each.sum(), information) / each[-1], mean / low * high / last, 1e-5)
    turn = vector(0.6, 0.8)
    wide = information * torch.outer(turn, turn) + torch.eye(2, dtype=F64)  # eigenvalues 1 and 1 + I_j
    assert close(distance_bound(torch.tensor(3.0), wide, 0.2), 3 / (4 * (0.5 - 0.2)))
    assert close(answer_bound(torch.tensor(3.0), wide, 0.2), 3 * (1 + high + 0.4) / (4 * (1 - 0.4)))


@pytest.mark.claim("C3")
def test_where_some_parameter_changes_no_token_there_is_no_bound():
    blind = lambda theta: markov(theta[[0, 0]], 3)  # θ_2 may be anything
    each, information, distance, remainder = step(blind, vector(0.3, 0.2), vector(0, 0.7))
    assert close(each, 0) and close(distance, 0.49) and close(vector(remainder), 0)
    assert distance_bound(each.sum(), information) == answer_bound(each.sum(), information) == torch.inf
    way = vector(0.994, 0.1094)  # tokens that depend on θ in one direction alone: rounding makes λ_min 1e-18
    assert distance_bound(torch.tensor(1.0), torch.outer(way, way)[None]) > 1e15
    model, other = weights.from_hf(TINY), weights.from_hf(TINY)  # nor does a token of a decoder tell all weights
    attention, text = other.blocks[0].attention, torch.arange(300, 360)[None]
    with torch.inference_mode():
        attention.split(attention.qkv.weight)[2].mul_(2)
        attention.o.weight.div_(2)
        assert torch.equal(model(text), other(text))
    whole = fisher(lambda theta: markov(theta, 3), vector(0.3, 0.2))  # one silent token is enough: the first
    assert distance_bound(torch.tensor(1.0), whole) == torch.inf > distance_bound(torch.tensor(1.0), whole[1:])


@pytest.mark.claim("C3")
def test_a_remainder_as_large_as_half_the_least_eigenvalue_leaves_no_bound():
    information, noise = torch.eye(2, dtype=F64)[None] * 3, torch.tensor(1.0)
    for bound in (distance_bound, answer_bound):
        assert bound(noise, information, 1.4) < torch.inf == bound(noise, information, 1.5) == bound(noise, information, 2.0)


@pytest.mark.claim("C3")
def test_tokens_that_say_nothing_at_all_leave_no_bound():
    """Half of the tokens are wrong, so all are fair coins."""
    information, none = torch.zeros(2, 2, 2, dtype=F64), vector(0).sum()
    assert close(fisher(lambda theta: markov(theta, 3, 0.5), vector(0.3, 0.2))[1:], information)
    assert distance_bound(none, information) == answer_bound(none, information) == torch.inf


# ---- noise: tokens of every example, or whole examples ---


@pytest.mark.claim("C3")
@check(seeds, sizes, st.integers(1, 9))
def test_token_noise_is_what_the_lost_tokens_say_beyond_the_kept_and_chunk_noise_all_of_the_lost_examples(seed, k, n):
    p, q = tables(seed, k)
    for number in range(2**k):
        kept = subset(number, k)
        assert close(token_noise(p, q, kept, n), n * conditional(p, q, kept, range(k)), 1e-11)
        assert at_most(0, token_noise(p, q, kept, n))
    for whole in range(n + 1):
        assert close(chunk_noise(p, q, whole, n), sum(kl(marginal(p, range(k)), marginal(q, range(k)))
                                                      for _ in range(whole, n)), 1e-11)


@pytest.mark.claim("C3")
@check(seeds, sizes, st.integers(1, 3))
def test_at_equal_budgets_whole_examples_win_just_where_the_kept_tokens_say_less_per_token(seed, k, times):
    p, q = tables(seed, k)
    for number in range(1, 2**k):
        kept = subset(number, k)
        tokens, chunks = token_noise(p, q, kept, times * k), chunk_noise(p, q, times * len(kept), times * k)
        margin = divergence(p, q) / k - divergence(p, q, kept) / len(kept)
        assert close(tokens - chunks, times * k * len(kept) * margin, 1e-11)
        assert margin.abs() < 1e-12 or (chunks < tokens) == (margin > 0)


@pytest.mark.claim("C3")
def test_where_only_the_whole_example_says_anything_single_tokens_lose_all_and_whole_examples_half():
    """x is a fair coin, y = x with probability θ."""
    pair = lambda theta: bernoulli(theta)[torch.eye(2, dtype=torch.long)] / 2
    p, q, says = pair(0.9), pair(0.6), 0.9 * log(1.5) + 0.1 * log(0.25)
    for kept in ([0], [1]):
        assert close(token_noise(p, q, kept, 6), 6 * says) and close(chunk_noise(p, q, 3, 6), 3 * says)
    p, q = p[..., None] * vector(0.5, 0.5), q[..., None] * vector(0.5, 0.5)  # a third token that is a coin
    assert close(divergence(p, q, [0]), 0) and close(divergence(p, q, [1]), 0)  # alone each says nothing, but
    assert token_noise(p, q, [0, 1], 6) < 1e-12 < chunk_noise(p, q, 4, 6)       # together they say all


@pytest.mark.claim("C3")
@pytest.mark.parametrize("k", [2, 3, 5])
def test_where_one_token_says_all_single_tokens_lose_nothing_and_whole_examples_most(k):
    def copies(chance):
        table = torch.zeros((2,) * k, dtype=F64)
        table[(0,) * k], table[(1,) * k] = 1 - chance, chance
        return table

    p, q, says = copies(0.9), copies(0.6), 0.9 * log(1.5) + 0.1 * log(0.25)
    for j in range(k):
        assert close(token_noise(p, q, [j], k), 0) and close(chunk_noise(p, q, 1, k), (k - 1) * says)


@pytest.mark.claim("C3")
def test_where_tokens_are_independent_and_alike_it_is_all_one():
    for k in (2, 3, 4):
        p, q = (coins(k)(vector(theta)) for theta in (0.9, 0.6))
        assert close(token_noise(p, q, [k - 1], k), chunk_noise(p, q, 1, k))


# ---- what is kept ---


@check(seeds, st.integers(1, 12), st.floats(0.1, 0.9))
def test_jaccard_and_kept_whole_are_those_of_sets(seed, n, share):
    g = torch.Generator().manual_seed(seed)
    masks = torch.rand(2, 2, 3, n, generator=g) < share
    edges = torch.randint(0, n + 1, (4, 2), generator=g).sort(-1).values.tolist()
    examples = [slice(start, stop) for start, stop in edges]
    similarity, whole = jaccard(*masks), kept_whole(masks[0], examples)
    assert similarity.shape == whole.shape == (2, 3)
    for at in product(range(2), range(3)):
        kept, other = ({i for i in range(n) if x[at][i]} for x in masks)
        if kept | other:
            assert similarity[at].item() == pytest.approx(len(kept & other) / len(kept | other), rel=1e-6)
        else:
            assert similarity[at].isnan()
        assert whole[at] == sum({*range(start, stop)} <= kept for start, stop in edges) / 4


# ---- chunks: cut, scored and taken ---


def draw(seed, n, longest, share=0.3):
    """Ends (2, 3, n), votes (2, 3, n) with ties, and the chunks of every row."""
    g = torch.Generator().manual_seed(seed)
    ends = torch.rand(2, 3, n, generator=g) < share
    votes = torch.randint(0, 4, (2, 3, n), generator=g).to(F64)
    return ends, votes, {at: chunks_of(n, longest, range(n), ends[at].tolist()) for at in product(range(2), range(3))}


lengths = st.integers(1, 20), st.integers(1, 8), st.sampled_from([0.0, 0.3, 0.8])


@check(seeds, *lengths)
def test_a_chunk_ends_where_it_is_told_to_and_when_it_is_full(seed, n, longest, share):
    ends, _, rows = draw(seed, n, longest, share)
    unit = cut(ends, longest)
    assert unit.shape == ends.shape and (cut(ends[1, 2], longest) == unit[1, 2]).all()
    for at, row in rows.items():
        assert unit[at].tolist() == [m for m, tokens in enumerate(row) for _ in tokens]
        assert set(unit[at].diff().tolist()) <= {0, 1} and unit[at].bincount().max() <= longest  # contiguous
        assert (unit[at].diff()[ends[at][:-1]] == 1).all()


@check(seeds, *lengths)
def test_score_and_length_of_a_chunk_are_those_of_its_tokens_and_0_where_only_other_rows_have_it(seed, n, longest, share):
    ends, votes, rows = draw(seed, n, longest, share)
    most = max(map(len, rows.values()))
    for how, of in (("sum", sum), ("mean", lambda x: sum(x) / len(x)), ("max", max)):
        score, length = scores(votes, cut(ends, longest), how)
        assert score.shape == length.shape == (2, 3, most) and not length.is_floating_point()
        for at, row in rows.items():
            expected = [of(votes[at][tokens].tolist()) for tokens in row] + [0] * (most - len(row))
            assert close(score[at], expected)
            assert length[at].tolist() == [len(tokens) for tokens in row] + [0] * (most - len(row))


def greedy(score, length, room):
    taken = [False] * len(score)
    for m in sorted(range(len(score)), key=lambda m: (-score[m], -m)):
        if length[m] <= room:
            taken[m], room = True, room - length[m]
    return taken


@check(seeds, *lengths, st.integers(0, 20))
def test_fit_takes_the_best_chunks_that_fit_one_by_one_the_newest_of_equals_and_never_more_than_the_budget(
        seed, n, longest, share, budget):
    ends, votes, rows = draw(seed, n, longest, share)
    unit = cut(ends, longest)
    per_head = (budget + torch.tensor([0, 3, -4])).clamp(min=0)
    for how in ("sum", "max"):
        score, length = scores(votes, unit, how)
        each_head = per_head.tolist()
        for given, each in ((budget, [budget] * 3), (per_head, each_head), (per_head.expand(2, 3), each_head)):
            taken = fit(score, length, given)
            kept = taken.gather(-1, unit)
            assert taken.shape == score.shape and taken.dtype == torch.bool
            for b, h in rows:
                assert taken[b, h].tolist() == greedy(score[b, h].tolist(), length[b, h].tolist(), each[h])
                assert kept[b, h].sum() == (taken * length)[b, h].sum() <= each[h]
                assert (fit(score[b, h], length[b, h], each[h]) == taken[b, h]).all()


def test_fit_skips_a_chunk_that_is_too_long_and_goes_on_and_an_empty_one_costs_nothing():
    score, length = vector(5, 4, 3, 2, 2, 0), torch.tensor([3, 4, 2, 1, 1, 0])
    assert fit(score, length, 6).tolist() == [True, False, True, False, True, True]
    assert fit(score, length, 0).tolist() == [False] * 5 + [True]
    assert fit(score, length, 11).all()


@pytest.mark.parametrize("place", [0, 1, 9])
def test_a_placed_grid_gives_a_token_of_each_document_its_place_in_a_chunk_of_full_length(place):
    at = torch.tensor([0, 3, 17, 40, 41])
    cache = PlacedChunkKV(budget=30, window=8, at=at, place=place)
    unit = cut(cache.ends_at(torch.zeros(5, 3, 60)), 10)
    for row, i in zip(unit, at.tolist()):
        assert (row[:i] == row[i]).sum() == min(i, place)
        assert row.bincount()[1:-1].tolist() == [10] * (row[-1] - 1)


# ---- the claims about a trained model, on the shipped one ---


@pytest.fixture(scope="module")
def shipped():
    return weights.from_hf(TINY), Tasks(tokenizer.load(TINY / "tokenizer.tiktoken"), "test")


@torch.inference_mode()
def read(model, batch):
    """A batch and the record of its context and its question."""
    caches = make_cache(model, Recorder)
    return batch, [record(model, caches, part) for part in prompt_and_question(model, batch)[1:]]


@pytest.fixture(scope="module")
def found(shipped):
    """Per document, whether its question is answered, aware, with a share of 512 tokens."""
    model, tasks = shipped
    sources = {"marked": tasks, "unmarked": Unmarked(tasks.encoding, "test")}

    @cache
    def read_once(marks, task, *how):
        return read(model, sources[marks].batch(task, 1, 32, 512, **dict(how)))

    @torch.inference_mode()
    def answers(Method, task, how={}, share=1 / 8, marks="marked", **knobs):
        batch, told = read_once(marks, task, *how.items())
        knobs |= dict(ends=tokenizer.boundaries(tasks.encoding, 2048)) if Method is SemanticChunkKV else {}
        knobs |= dict(at=torch.from_numpy(batch.stated)) if Method is PlacedChunkKV else {}
        return retrieve(model, batch, maker(model, Method, share, window=8, **knobs), told)["aware"]
    return answers


def fewer(one, other):
    difference = other - one
    return difference.mean() > 2 * standard_error(difference)


LONG = dict(facts=1, numbers=4)  # values of 8 tokens


@pytest.mark.claim("C1")
def test_chunks_keep_long_facts_and_the_more_the_longer_they_are(found):
    snap, grid = (found(Method, "needle", LONG) for Method in (SnapKV, ChunkKV))
    assert snap.mean() < 0.05 and fewer(snap, grid) and fewer(grid, found(ChunkKV, "needle", LONG, chunk=20))
    for marks in ("marked", "unmarked"):
        assert found(SemanticChunkKV, "needle", LONG, marks=marks).mean() > 0.85


@pytest.mark.claim("C1")
@pytest.mark.parametrize("task", ["needle", "recall"])
def test_values_of_two_tokens_are_lost_where_the_grid_cuts_them_and_nowhere_else(found, task):
    places = {place: found(PlacedChunkKV, task, place=place) for place in (0, 4, 8, 9)}
    assert torch.stack([places[0], places[9]]).mean() < 0.3 and min(places[4].mean(), places[8].mean()) > 0.95
    assert found(ChunkKV, task, kernel=7, score="max").mean() > 0.95  # a vote beside a cut counts on both sides
    assert found(SemanticChunkKV, task).mean() > 0.95


@pytest.mark.claim("C1")
def test_without_a_mark_where_facts_end_semantic_chunks_find_needles_and_lose_lists_more_than_the_grid(found):
    grid, semantic = ({task: found(Method, task, marks="unmarked", share=share) for task, share in
                       (("needle", 1 / 8), ("recall", 1 / 16))} for Method in (ChunkKV, SemanticChunkKV))
    assert semantic["needle"].mean() > 0.9 and fewer(grid["needle"], semantic["needle"])
    assert semantic["recall"].mean() < 0.4 and fewer(semantic["recall"], grid["recall"])
    assert found(SnapKV, "recall", marks="unmarked", share=1 / 16).mean() > 0.9


@pytest.mark.claim("C2")
@torch.inference_mode()
def test_neighbouring_layers_choose_chunks_more_alike_than_tokens(shipped):
    model, tasks = shipped
    texts, similar = text_windows(tasks, 8, 512), {}
    for Method in (SnapKV, ChunkKV):
        caches = make_cache(model, Method, budget=51, window=8)
        feed(model, texts, caches)
        finish_prompt(caches)
        kept = held(caches, 504)
        similar[Method] = jaccard(kept[:, 1:], kept[:, :-1]).mean((0, 2))  # layers 0 and 1, 1 and 2, …
    assert similar[ChunkKV].mean() > similar[SnapKV].mean() + 0.05
    assert (similar[ChunkKV][2:] > 0.4).all() and similar[ChunkKV][0] < 0.15  # where layer 1 retrieves, hardly by chance


@pytest.mark.claim("C2")
def test_reusing_the_indices_of_layer_0_loses_the_answers_and_those_of_layer_1_in_all_layers_above_none(found):
    alone, printed, higher = (found(ChunkKV, "recall", **knobs) for knobs in ({}, dict(reuse=2), dict(reuse=5, first=1)))
    assert printed.mean() < alone.mean() - 0.5
    assert higher.mean() > alone.mean() - 0.05


@pytest.mark.claim("C3")
@torch.inference_mode()
def test_chunks_keep_more_examples_whole_which_helps_against_single_tokens_if_the_question_is_known_and_else_not(shipped):
    model, tasks = shipped
    batch, told = read(model, tasks.batch("few_shot", 2, 32, 512, shots=16))
    lines = examples(batch, *tasks.ids("\n"))
    assert {len(x) for x in lines} == {16}

    whole, kl = {}, {}
    for setting in ("aware", "blind"):
        full, _ = at_the_answer(model, batch, told, maker(model, LayerCache, None), setting == "blind")
        for name, Method, knobs in (("tokens", SnapKV, dict(kernel=1)), ("snap", SnapKV, {}), ("chunks", ChunkKV, {})):
            make = maker(model, Method, 1 / 4, window=8, **knobs)
            log_p, kept = at_the_answer(model, batch, told, make, setting == "blind")
            whole[setting, name] = torch.stack([kept_whole(row, at).mean() for row, at in zip(kept, lines)])
            kl[setting, name] = torch.nn.functional.kl_div(log_p, full, log_target=True, reduction="none").sum(-1)
        tokens_, snap, chunks = (whole[setting, name].mean() for name in ("tokens", "snap", "chunks"))
        assert chunks > 1.3 * snap > 1.3 * 1.3 * tokens_
    gain = {(setting, name): kl[setting, name] - kl[setting, "chunks"] for setting, name in kl}
    assert gain["aware", "tokens"].mean() > 3 * standard_error(gain["aware", "tokens"])
    assert gain["aware", "snap"].mean().abs() < 2 * standard_error(gain["aware", "snap"])    # no difference to be seen
    assert gain["blind", "tokens"].mean() < 2 * standard_error(gain["blind", "tokens"])      # and none for the better
