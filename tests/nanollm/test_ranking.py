"""Ranks and the highest scores against Python's own sort; ties: the newest."""

from hypothesis import given, settings, strategies as st
import torch

from nanollm.ranking import indices, rank, taken, top

digits = st.integers(0, 3)
lists = st.lists(digits, min_size=1, max_size=12)
budgets = st.integers(-2, 14)


def ranked(scores) -> list[int]:
    def key(i):
        return -scores[i], -i

    return sorted(range(len(scores)), key=key)


@given(lists, budgets, budgets)
@settings(max_examples=40, deadline=None)
def test_top_keeps_the_highest_and_of_equals_the_newest(scores, one, other):
    rows = scores, scores[::-1]
    score = torch.tensor(rows).float()
    both = torch.tensor([one, other])
    found = top(score, both)
    for row, budget, mask in zip(rows, (one, other), found):
        n = max(0, budget)
        best = ranked(row)[:n]
        kept = mask.nonzero().flatten()
        assert kept.tolist() == sorted(best)
    # −inf is a score like any other
    logs = score[0].log()
    assert torch.equal(top(logs, one), found[0])


@given(lists, st.randoms())
@settings(max_examples=40, deadline=None)
def test_ranks_count_from_the_highest_and_of_equals_from_the_newest(scores, random):
    order = ranked(scores)
    pos = [*order]
    random.shuffle(pos)
    score = torch.tensor([float(scores[i]) for i in pos])
    found = rank(score, torch.tensor(pos))
    assert found.tolist() == [order.index(i) for i in pos]


def test_indices_name_the_kept_slots_and_taken_takes_them():
    kept = torch.tensor(
        [
            [[0, 1, 1, 0], [0, 0, 0, 1]],
        ]
    )
    i = indices(kept.bool())
    assert i.tolist() == [[[1, 2], [3, -1]]]
    x = torch.arange(8).view(1, 2, 4)
    found = taken(x, i.clamp(min=0))
    assert found.tolist() == [[[1, 2], [7, 4]]]
    nothing = taken(x[:, :, :0], i[:, :, :0])
    assert nothing.shape == (1, 2, 0)
