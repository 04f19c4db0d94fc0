"""Ranks, the highest scores and indices against Python's own sort; ties: the newest."""

from hypothesis import given, settings, strategies as st
import torch

from nanollm.ranking import indices, rank, taken, top

lists = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(lists, st.tuples(*[st.integers(-2, 14)] * 2))
@settings(max_examples=40, deadline=None)
def test_top_keeps_the_highest_and_of_equals_the_newest(scores, budgets):
    both = torch.tensor([scores, scores[::-1]]).float()
    expected = []
    for row, budget in zip(both.tolist(), budgets):
        best = sorted(range(len(row)), key=lambda i: (-row[i], -i))[: max(0, budget)]
        expected.append([i in best for i in range(len(row))])
    assert top(both, torch.tensor(budgets)).tolist() == expected
    # −inf is a score like any other
    assert top(both[0].log(), budgets[0]).tolist() == expected[0]


@given(lists, st.randoms())
@settings(max_examples=40, deadline=None)
def test_ranks_count_from_the_highest_and_of_equals_from_the_newest(scores, random):
    n = len(scores)
    pos = random.sample(range(n), n)
    ranked = sorted(range(n), key=lambda i: (-scores[i], -pos[i]))
    found = rank(torch.tensor(scores).float(), torch.tensor(pos))
    assert found.tolist() == [ranked.index(i) for i in range(n)]


def test_indices_name_the_kept_slots_and_taken_takes_them():
    kept = torch.tensor([[[0, 1, 1, 0], [0, 0, 0, 1]]]).bool()
    i = indices(kept)
    assert i.tolist() == [[[1, 2], [3, -1]]]
    x = torch.arange(16).view(1, 2, 4, 2)
    found = taken(x, i.clamp(min=0))
    assert found.tolist() == [[[[2, 3], [4, 5]], [[14, 15], [8, 9]]]]
    assert taken(x[:, :, :0], i[:, :, :0]).shape == (1, 2, 0, 2)
