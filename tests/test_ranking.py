"""Ranks, masks and indices against loops that sort each row with Python."""

from hypothesis import given, settings, strategies as st
import torch

from nanollm.ranking import expand_index, indices, rank, taken, top

few = settings(max_examples=60, deadline=None)
SCORES = st.lists(st.integers(0, 3), min_size=1, max_size=12)  # many are equal
BUDGETS = st.integers(-2, 14)
HEAD = st.lists(st.booleans(), min_size=5, max_size=5)


def best_first(scores, pos):
    """Return one row's slots, the highest score first and of equals the newest."""
    slots = range(len(scores))
    return sorted(slots, key=lambda i: (-scores[i], -pos[i]))


@given(SCORES, st.randoms(use_true_random=False))
@few
def test_rank_counts_from_the_best_and_of_equals_from_the_newest(scores, random):
    slots = range(len(scores))
    pos = random.sample(range(50), len(scores))  # slots in any order
    order = best_first(scores, pos)
    expected = [order.index(i) for i in slots]
    ranks = rank(torch.tensor(scores), torch.tensor(pos))
    assert ranks.tolist() == expected


@given(SCORES, BUDGETS, BUDGETS)
@few
def test_top_keeps_the_highest_and_of_equals_the_newest(scores, one, other):
    slots = range(len(scores))
    rows = [scores, scores[::-1]]
    budgets = [one, other]
    expected = []
    for row, budget in zip(rows, budgets):
        best = best_first(row, slots)
        best = best[: max(budget, 0)]
        expected.append([i in best for i in slots])

    score = torch.tensor(rows).float()
    masks = top(score, torch.tensor(budgets))  # each row has its own
    assert masks.tolist() == expected
    for row, budget, mask in zip(score, budgets, expected):
        assert top(row, budget).tolist() == mask
        # −inf is a score like any other
        assert top(row.log(), budget).tolist() == mask


def test_top_gives_each_row_its_budget_where_only_one_has_ties():
    score = torch.tensor(
        [
            [2, 2, 5, 2],
            [1, 4, 3, 2],
        ]
    )
    three = [
        [False, True, True, True],
        [False, True, True, True],
    ]
    one = [
        [False, False, True, False],
        [False, True, False, False],
    ]
    assert top(score, 3).tolist() == three
    assert top(score, 1).tolist() == one
    assert not top(score, 0).any()
    assert top(score, 9).all()


@given(st.lists(HEAD, min_size=4, max_size=4))
@few
def test_indices_list_the_kept_slots_and_fill_up_with_minus_one(heads):
    rows = []
    for head in heads:
        rows.append([i for i in range(5) if head[i]])
    n = max(map(len, rows))
    for row in rows:
        row += [-1] * (n - len(row))

    kept = torch.tensor(heads).view(2, 2, 5)
    found = indices(kept)
    assert found.dtype == torch.int64
    assert found.shape == (2, 2, n)
    assert found.flatten(0, 1).tolist() == rows


def test_taken_is_gather_with_an_expanded_index():
    B, H, S, n = 2, 3, 7, 4
    g = torch.Generator().manual_seed(0)
    i = torch.randint(0, S, (B, H, n), generator=g)
    for rest in (), (5,), (5, 2):
        x = torch.randn(B, H, S, *rest, generator=g)
        expected = torch.empty(B, H, n, *rest)
        for b in range(B):
            for h in range(H):
                expected[b, h] = x[b, h, i[b, h]]
        assert torch.equal(taken(x, i), expected)
        index = expand_index(i, x)
        assert torch.equal(x.gather(2, index), expected)
