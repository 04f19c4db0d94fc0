"""The hidden tests, which a student's copy does not hold: more sizes, and edge cases."""
import pytest
import torch
from torch import tensor

from course.expect import problem, same, wrong

NEVER = 2 ** 31 - 1
HOW = {"sum": sum, "mean": lambda x: sum(x) / len(x), "max": max}


def drawn(seed, *shape, values=None):
    g = torch.Generator().manual_seed(seed)
    if values is None:
        return torch.rand(*shape, generator=g)
    return torch.randint(values, shape, generator=g).float()


def order(score):
    """Return the indices, highest score first, of equal scores the last."""
    return sorted(range(len(score)), key=lambda i: (-score[i], -i))


def chunks(lengths):
    """Return the chunk of each token."""
    return [i for i, n in enumerate(lengths) for _ in range(n)]


@problem("grid")
@pytest.mark.parametrize("n, size", [(1, 1), (12, 4), (13, 4), (3, 10), (5, 1)])
def test_a_grid(run, n, size):
    """Place i is in chunk ⌊i/size⌋ + 1; an empty slot, wherever it is, is in chunk 0."""
    place = drawn(0, 2, 2, n, values=40).long() - 6
    expected = tensor([i // size + 1 if i >= 0 else 0 for i in place.flatten().tolist()]).view(2, 2, n)
    same(run("grid", place=place, size=size), expected, f"{n} tokens in chunks of {size}")


@problem("chunk_scores")
@pytest.mark.parametrize("how", HOW)
def test_unlike_chunks(run, how):
    """Two rows and three heads, (2, 3, 12), each with chunks of other lengths."""
    scores, cuts = drawn(1, 2, 3, 12), [[3, 4, 5], [1, 10, 1], [6, 1, 5], [4, 4, 4], [10, 1, 1], [2, 3, 7]]
    chunk = tensor([chunks(each) for each in cuts]).view(2, 3, 12)
    score, length = run("chunk_scores", scores=scores, chunk=chunk, how=how)
    expected = torch.zeros(2, 3, 3)
    for b in range(2):
        for h in range(3):
            for m in range(3):
                inside = [x for x, at in zip(scores[b, h].tolist(), chunk[b, h].tolist()) if at == m]
                expected[b, h, m] = HOW[how](inside)
    same(score, expected, f"each chunk's {how}", atol=1e-5)
    same(length, tensor(cuts).view(2, 3, 3), "the lengths")


@problem("chunk_scores")
@pytest.mark.parametrize("how", HOW)
def test_a_head_with_fewer_chunks(run, how):
    """One head has fewer chunks than the other: the chunks it lacks have score 0 and length 0, not NaN."""
    scores, chunk = tensor([[1., 2, 3], [4, 5, 6]]), tensor([[0, 1, 2], [0, 0, 0]])
    score, length = run("chunk_scores", scores=scores, chunk=chunk, how=how)
    same(score, tensor([[1., 2, 3], [HOW[how]([4., 5, 6]), 0, 0]]), f"each chunk's {how}")
    same(length, tensor([[1, 1, 1], [3, 0, 0]]), "the lengths")


@problem("chunk_scores")
@pytest.mark.parametrize("how", HOW)
def test_empty_slots(run, how):
    """Two empty slots, of score −1 and −2, in chunk 0: its score is below 0, for every `how`. Scores are float64."""
    scores = tensor([-1., 3, -2, 4], dtype=torch.float64)
    score, length = run("chunk_scores", scores=scores, chunk=tensor([0, 1, 0, 2]), how=how)
    same(score, tensor([HOW[how]([-1., -2]), 3, 4], dtype=torch.float64), f"each chunk's {how}")
    same(length, tensor([2, 1, 1]), "the lengths")


@problem("ranking")
@pytest.mark.parametrize("shape", [(6,), (2, 3, 40)])
def test_many_ties(run, shape):
    """Many ties, two shapes: the highest score first, of equal scores the newest."""
    score = drawn(2, *shape, values=4)
    expected = tensor([order(row) for row in score.view(-1, shape[-1]).tolist()]).view(shape)
    same(run("ranking", score=score), expected, "the order")


@problem("cut_to")
@pytest.mark.parametrize("budget", [0, 1, 5, 11, 12, 20])
def test_down_the_ranking(run, budget):
    """Chunk after chunk, each from its first token on, until the budget is used or all stay."""
    lengths, score = [[3, 4, 5], [6, 1, 5]], drawn(3, 1, 2, 3)
    chunk = tensor([chunks(each) for each in lengths])[None]
    expected = torch.zeros(1, 2, 12, dtype=torch.bool)
    for h in range(2):
        tokens = [i for m in order(score[0, h].tolist()) for i in range(12) if chunk[0, h, i] == m]
        expected[0, h, tokens[:budget]] = True
    same(run("cut_to", score=score, chunk=chunk, budget=budget), expected, f"a budget of {budget}")


@problem("cut_to")
def test_equal_chunks_are_not_mixed(run):
    """Equal scores: all of the newest chunk stays before the next one begins."""
    got = run("cut_to", score=tensor([[2., 2, 2]]), chunk=tensor([chunks([2, 2, 2])]), budget=3)
    same(got, tensor([[False, False, True, False, True, True]]), "what stays")


@problem("cut_to")
def test_budgets_by_row_and_head(run):
    """A tensor (B, H) of budgets, all different."""
    score, budget = drawn(4, 2, 2, 4), tensor([[1, 4], [7, 10]])
    chunk = tensor(chunks([3, 3, 3, 1])).expand(2, 2, 10)
    kept = run("cut_to", score=score, chunk=chunk, budget=budget)
    if not isinstance(kept, torch.Tensor) or kept.dtype != torch.bool or kept.shape != chunk.shape:
        wrong(f"expected a torch.bool mask of the shape {tuple(chunk.shape)}, got {kept!r:.200}")
    same(kept.sum(-1), budget, "tokens that stay in each row and head")


@problem("fit")
@pytest.mark.parametrize("budget", [0, 3, 7, 10, 16, 40])
def test_greedy(run, budget):
    """In ranking order, each chunk that fits stays; a shorter one may fit after a longer one did not."""
    score, length = drawn(5, 2, 2, 8, values=5), drawn(6, 2, 2, 8, values=6).long() + 1
    expected = torch.zeros(2, 2, 8, dtype=torch.bool)
    for b in range(2):
        for h in range(2):
            room = budget
            for m in order(score[b, h].tolist()):
                if length[b, h, m] <= room:
                    expected[b, h, m], room = True, room - int(length[b, h, m])
    same(run("fit", score=score, length=length, budget=budget), expected, f"a budget of {budget}")


@problem("fit")
def test_fit_budgets_by_head(run):
    """A tensor (B, H) of budgets; a chunk that fits exactly stays."""
    score, length = tensor([[[3., 2, 1], [1, 2, 3]]]), tensor([[[2, 2, 2], [2, 2, 2]]])
    expected = tensor([[[True, False, False], [False, True, True]]])
    same(run("fit", score=score, length=length, budget=tensor([[2, 5]])), expected, "the chunks that stay")


@problem("fit")
def test_chunks_without_tokens(run):
    """Chunks of length 0 need no room; the mask may have either value there, and the search ends."""
    got = run("fit", score=tensor([3., 0, 0]), length=tensor([4, 0, 0]), budget=3)
    if not isinstance(got, torch.Tensor) or bool(got[0]):
        wrong(f"a chunk of length 4 does not fit into a budget of 3, but it stays: {got!r}")


@problem("reuse")
@pytest.mark.parametrize("layers, reuse", [(6, 2), (5, 3), (4, 1), (3, 8)])
def test_groups_of_layers(run, layers, reuse):
    """The lowest layer of each group is asked, once; the last group may be smaller. Rows and heads differ."""
    slots = tensor([[[0, 9], [1, 8]], [[2, 7], [3, 6]]])
    window = torch.arange(66, 70).expand(2, 2, 4)
    choices = [slots + layer for layer in range(layers)]
    got = run("compressed", choices=choices, tokens=70, reuse=reuse)
    for layer, kept in enumerate(got["kept"]):
        expected = torch.cat((choices[layer // reuse * reuse], window), 2).int()
        same(kept, expected, f"the positions in layer {layer}")
    same(sorted(got["asked"]), [[i, 60] for i in range(0, layers, reuse)],
         "the layers whose choice was asked for, and the budget beside the window")


@problem("reuse")
def test_heads_that_keep_fewer(run):
    """A head that keeps fewer slots has empty slots in both layers."""
    choices = [tensor([[[0, 2, 5], [1, -1, -1]]]), tensor([[[3, 4, 6], [2, 3, 4]]])]
    expected = tensor([[[0, 2, 5, 66, 67, 68, 69], [1, 66, 67, 68, 69, NEVER, NEVER]]]).int()
    for layer, kept in enumerate(run("compressed", choices=choices, tokens=70, reuse=2)["kept"]):
        same(kept.sort(-1).values, expected, f"the positions in layer {layer}")


@problem("reuse")
@pytest.mark.parametrize("tokens", [1, 63, 64])
def test_within_the_budget(run, tokens):
    """At most 64 tokens, a budget of 64: nothing is chosen, and every layer keeps all."""
    got = run("compressed", choices=[tensor([[[0]]]), tensor([[[0]]])], tokens=tokens, reuse=2)
    for layer, kept in enumerate(got["kept"]):
        same(kept, torch.arange(tokens).int()[None, None], f"the positions in layer {layer}")
    same(got["asked"], [], "the layers whose choice was asked for")
