"""Ranks and the highest scores against Python's own sort; ties: the newest."""

from hypothesis import given, settings, strategies as st
import torch

from nanollm.ranking import indices, rank, taken, top

lists = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def ranked(scores) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], -i))


@given(lists, st.integers(-2, 14), st.integers(-2, 14))
@settings(max_examples=40, deadline=None)
def test_top_keeps_the_highest_and_of_equals_the_newest(scores, budget, other):
    both = torch.tensor([scores, scores[::-1]]).float()
    found = top(both, torch.tensor([budget, other]))
    for row, kept, n in zip(both.tolist(), found, (budget, other)):
        best = ranked(row)[: max(0, n)]
        assert kept.nonzero().flatten().tolist() == sorted(best)
    # −inf is a score like any other
    assert torch.equal(top(both[0].log(), budget), found[0])


@given(lists, st.randoms())
@settings(max_examples=40, deadline=None)
def test_ranks_count_from_the_highest_and_of_equals_from_the_newest(scores, random):
    pos = random.sample(range(len(scores)), len(scores))
    by_pos = torch.tensor(scores).float()[torch.tensor(pos)]
    expected = [ranked(scores).index(i) for i in pos]
    assert rank(by_pos, torch.tensor(pos)).tolist() == expected


def test_indices_name_the_kept_slots_and_taken_takes_them():
    i = indices(torch.tensor([[[0, 1, 1, 0], [0, 0, 0, 1]]]).bool())
    assert i.tolist() == [[[1, 2], [3, -1]]]
    x = torch.arange(8).view(1, 2, 4)
    assert taken(x, i.clamp(min=0)).tolist() == [[[1, 2], [7, 4]]]
    assert taken(x[:, :, :0], i[:, :, :0]).shape == (1, 2, 0)
