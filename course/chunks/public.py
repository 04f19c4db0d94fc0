"""The public tests, which students have."""
import torch
from torch import tensor

from course.expect import problem, same


@problem("grid")
def test_seven_tokens(run):
    """Seven tokens in chunks of three are 1 1 1 2 2 2 3."""
    same(run("grid", place=torch.arange(7), size=3), tensor([1, 1, 1, 2, 2, 2, 3]), "the chunks")


@problem("grid")
def test_places_not_slots(run):
    """Two heads in chunks of four: places 0 4 5 give 1 2 2; places 3 8 −1 (empty) give 1 3 0."""
    place = tensor([[[0, 4, 5], [3, 8, -1]]])
    same(run("grid", place=place, size=4), tensor([[[1, 2, 2], [1, 3, 0]]]), "the chunks")


@problem("chunk_scores")
def test_sums_and_lengths(run):
    """Window scores 1 2 3 4 5 in chunks 0 0 1 1 2: the sums are 3 7 5 and the lengths 2 2 1."""
    scores, chunk = tensor([1., 2, 3, 4, 5]), tensor([0, 0, 1, 1, 2])
    score, length = run("chunk_scores", scores=scores, chunk=chunk, how="sum")
    same(score, tensor([3., 7, 5]), "the sums")
    same(length, tensor([2, 2, 1]), "the lengths")


@problem("chunk_scores")
def test_means_and_maxima(run):
    """Window scores 1 2 3 4 5 in chunks 0 0 1 1 2: the means are 1.5 3.5 5 and the maxima 2 4 5."""
    scores, chunk = tensor([1., 2, 3, 4, 5]), tensor([0, 0, 1, 1, 2])
    mean = run("chunk_scores", scores=scores, chunk=chunk, how="mean")[0]
    same(mean, tensor([1.5, 3.5, 5]), "the means", atol=1e-6)
    same(run("chunk_scores", scores=scores, chunk=chunk, how="max")[0], tensor([2., 4, 5]), "the maxima")


@problem("chunk_scores")
def test_heads_are_cut_apart(run):
    """Two heads with the chunks 0 0 1 and 0 1 1: each chunk sums the window scores of its own head."""
    scores, chunk = tensor([[1., 2, 3], [4, 5, 6]]), tensor([[0, 0, 1], [0, 1, 1]])
    score, length = run("chunk_scores", scores=scores, chunk=chunk, how="sum")
    same(score, tensor([[3., 3], [4, 11]]), "the sums")
    same(length, tensor([[2, 1], [1, 2]]), "the lengths")


@problem("ranking")
def test_highest_first(run):
    """Scores 2 5 3: chunk 1 comes first, then 2, then 0."""
    same(run("ranking", score=tensor([2., 5, 3])), tensor([1, 2, 0]), "the order")


@problem("ranking")
def test_of_equals_the_newest(run):
    """Scores 5 1 5 1: of equal scores the newest chunk comes first, so 2 0 3 1. Another head has 1 5 1 5."""
    score = tensor([[5., 1, 5, 1], [1, 5, 1, 5]])
    same(run("ranking", score=score), tensor([[2, 0, 3, 1], [3, 1, 2, 0]]), "the order")


@problem("cut_to")
def test_the_last_chunk_is_cut(run):
    """Chunks 0 0 0 1 1 1, scores 1 and 9, budget 4: chunk 1 and the first token of chunk 0 stay."""
    same(run("cut_to", score=tensor([1., 9]), chunk=tensor([0, 0, 0, 1, 1, 1]), budget=4),
         tensor([True, False, False, True, True, True]), "the mask")


@problem("cut_to")
def test_a_budget_for_each_head(run):
    """Two heads with a tensor of budgets: the first keeps 2 tokens, the second 3."""
    score, chunk = tensor([[[3., 1], [1, 3]]]), tensor([0, 0, 1, 1]).expand(1, 2, 4)
    expected = tensor([[[True, True, False, False], [True, False, True, True]]])
    same(run("cut_to", score=score, chunk=chunk, budget=tensor([[2, 3]])), expected, "the mask")


@problem("fit")
def test_each_that_fits(run):
    """Lengths 3 3 2, scores 5 9 1, budget 5: chunk 1 fits, then chunk 0 does not, chunk 2 does."""
    same(run("fit", score=tensor([5., 9, 1]), length=tensor([3, 3, 2]), budget=5),
         tensor([False, True, True]), "the chunks that stay")


@problem("fit")
def test_heads_with_other_lengths(run):
    """Two heads with budgets of 4 and 3: each head follows its own ranking and lengths."""
    score, length = tensor([[[1., 9, 5], [5, 1, 9]]]), tensor([[[1, 3, 2], [2, 1, 3]]])
    expected = tensor([[[True, True, False], [False, False, True]]])
    same(run("fit", score=score, length=length, budget=tensor([[4, 3]])), expected, "the chunks that stay")


@problem("fit")
def test_no_room(run):
    """Two chunks of length 2, budget 1: none fits."""
    got = run("fit", score=tensor([5., 9]), length=tensor([2, 2]), budget=1)
    same(got, tensor([False, False]), "the chunks that stay")


@problem("reuse")
def test_two_layers_share(run):
    """reuse = 2, 80 tokens, a window of 4: layer 0 chooses the slots 1 4 7 for both. Layer 1 is not asked."""
    got = run("compressed", choices=[tensor([[[1, 4, 7]]]), tensor([[[0, 2, 3]]])], tokens=80, reuse=2)
    for layer, kept in enumerate(got["kept"]):
        same(kept, tensor([[[1, 4, 7, 76, 77, 78, 79]]]).int(), f"the positions in layer {layer}")
    same(got["asked"], [[0, 60]], "the layers whose choice was asked for, and the budget beside the window")


@problem("reuse")
def test_each_layer_for_itself(run):
    """reuse = 1: every layer keeps its own choice, and the window."""
    choices = [tensor([[[1, 4]]]), tensor([[[0, 2]]])]
    got = run("compressed", choices=choices, tokens=80, reuse=1)
    for layer, (kept, choice) in enumerate(zip(got["kept"], choices)):
        expected = torch.cat((choice, tensor([[[76, 77, 78, 79]]])), 2).int()
        same(kept, expected, f"the positions in layer {layer}")
