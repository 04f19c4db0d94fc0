"""The public tests, which students have."""
from math import inf, log

import torch
from torch import tensor

from course.expect import problem, raises, same, wrong

NEVER = 2 ** 31 - 1


def slots(pos, **state):
    """Return slots whose keys tell their origin: slot s of head h of row b has the key 100 b + 10 h + s."""
    B, H, S = pos.shape
    name = 100 * torch.arange(B)[:, None, None] + 10 * torch.arange(H)[:, None] + torch.arange(S)
    k = name[..., None].expand(B, H, S, 2).float()
    return dict(k=k, v=-k, pos=pos.int(), **state)


def by_position(got, name):
    """Return one tensor (B, H, n) of a cache, each head's slots sorted by position."""
    x, pos = (got["slots"].get(each) for each in (name, "pos"))
    if x is None or pos is None or x.shape != pos.shape:
        wrong(f"{name}: expected a tensor with one number per slot, (B, H, slots)")
    return x.gather(2, pos.argsort(-1))


@problem("visible")
def test_no_later_slot(run):
    """Slots at 0 1 2 3: the query at 2 sees three of them, the query at 3 all four."""
    got = run("visible", slot_pos=tensor([[[0, 1, 2, 3]]]).int(), bias=None, pos=tensor([[2, 3]]))
    same(got, tensor([[[[1, 1, 1, 0], [1, 1, 1, 1]]]]).bool(), "the mask")


@problem("visible")
def test_heads_hold_other_tokens(run):
    """Head 0 holds 0 and 5, head 1 holds 3 and an empty slot. The query at 5 sees 0 and 5, and 3."""
    got = run("visible", slot_pos=tensor([[[0, 5], [3, NEVER]]]).int(), bias=None, pos=tensor([[4, 5]]))
    same(got, tensor([[[[1, 0], [1, 1]], [[1, 0], [1, 0]]]]).bool(), "the mask")


@problem("visible")
def test_a_bias(run):
    """With a bias the mask holds floats: the bias of a visible slot, −inf for others."""
    got = run("visible", slot_pos=tensor([[[0, 1]]]).int(), bias=tensor([[[0.5, 2]]]), pos=tensor([[0, 1]]))
    same(got, tensor([[[[0.5, -inf], [0.5, 2]]]]), "the mask")


@problem("probabilities")
def test_equal_scores(run):
    """A query of zeros that sees slots 0 and 1 of four gives each of them one half, and the others 0."""
    got = run("probabilities", q=torch.zeros(1, 1, 1, 4), k=torch.ones(1, 1, 4, 4),
              mask=tensor([[[[1, 1, 0, 0]]]]).bool())
    same(got, tensor([[[[[0.5, 0.5, 0, 0]]]]]), "the probabilities", atol=1e-6)


@problem("probabilities")
def test_the_scale(run):
    """D = 4. The products with the keys are 2 ln 3 and 0; divided by √D they are ln 3 and 0: 3/4 and 1/4."""
    got = run("probabilities", q=tensor([2., 0, 0, 0]).view(1, 1, 1, 4),
              k=tensor([[log(3), 1, 1, 1], [0, 1, 1, 1]]).view(1, 1, 2, 4), mask=None)
    same(got, tensor([[[[[0.75, 0.25]]]]]), "the probabilities", atol=1e-6)


@problem("probabilities")
def test_a_bias_of_ln_3(run):
    """Equal scores; the mask adds ln 3 to the second slot, so it has three times the weight: 1/4 and 3/4."""
    got = run("probabilities", q=torch.zeros(1, 1, 1, 4), k=torch.zeros(1, 1, 2, 4),
              mask=tensor([[[[0, log(3)]]]]))
    same(got, tensor([[[[[0.25, 0.75]]]]]), "the probabilities", atol=1e-6)


@problem("probabilities")
def test_groups(run):
    """Four query heads, two key heads: query heads 0 and 1 share key head 0. Shape (1, 2, 2, 1, 2)."""
    q = tensor([0., 1, 2, 3]).view(1, 4, 1, 1)
    k = log(2) * tensor([[1., 0], [0, 1]]).view(1, 2, 2, 1)
    got = run("probabilities", q=q, k=k, mask=torch.ones(1, 2, 1, 2, dtype=torch.bool))
    expected = tensor([[[1 / 2, 1 / 2], [2 / 3, 1 / 3]], [[1 / 5, 4 / 5], [1 / 9, 8 / 9]]])
    same(got, expected.view(1, 2, 2, 1, 2), "the probabilities", atol=1e-6)


def tokens(k, start, end):
    """Return the arguments of `write` for the tokens from `start` to `end` of keys k."""
    here = k[:, :, start:end]
    return dict(k=here, v=-here, pos=torch.arange(start, end)[None])


@problem("write")
def test_two_writes(run):
    """Two rows. Write two tokens, then one: three slots in order, three tokens seen."""
    k = tensor([1., 2, 3]).view(1, 1, 3, 1).repeat(2, 1, 1, 1)
    _, got = run("written", steps=[tokens(k, 0, 2), tokens(k, 2, 3)])
    same(got["slots"].get("k"), k, "the keys")
    same(got["slots"].get("v"), -k, "the values")
    same(got["slots"].get("pos"), tensor([[[0, 1, 2]]] * 2).int(), "the positions")
    same((got["length"], got["seen"]), (3, 3), "slots in use and tokens seen")


@problem("write")
def test_other_numbers_start_at_0(run):
    """The method stores a score with each entry. Two tokens get the score 5; a third is written: 5 5 0."""
    k = torch.ones(1, 1, 3, 1)
    *_, got = run("written", more=True, steps=[tokens(k, 0, 2), dict(fill=5), tokens(k, 2, 3)])
    same(got["slots"].get("score"), tensor([[[5, 5, 0]]]).double(), "the scores")


@problem("write")
def test_buffers(run):
    """Ten tokens take ten slots. The 11th needs a buffer of capacity(11) = 12 slots; the 12th fits in."""
    k = torch.ones(1, 1, 12, 1)
    got = run("written", steps=[tokens(k, 0, 10), tokens(k, 10, 11), tokens(k, 11, 12)])
    for each, slots_in_all in zip(got, (10, 12, 12)):
        same(each["allocated"], dict.fromkeys(("k", "v", "pos"), slots_in_all),
             f"slots of each buffer with {each['length']} in use")


@problem("write")
def test_slots_that_were_freed(run):
    """Write three tokens, free one slot, write one more: three slots in use, four tokens seen."""
    k = tensor([1., 2, 3, 4]).view(1, 1, 4, 1)
    *_, got = run("written", steps=[tokens(k, 0, 3), dict(forget=1), tokens(k, 3, 4)])
    same(got["slots"].get("pos"), tensor([[[0, 1, 3]]]).int(), "the positions")
    same((got["length"], got["seen"]), (3, 4), "slots in use and tokens seen")


@problem("keep")
def test_everything_moves(run):
    """Of slots 0 1 2 3 head 0 keeps 0 and 2, head 1 keeps 1 and 3; the scores move along."""
    held = slots(tensor([[[0, 1, 2, 3], [0, 1, 2, 3]]]), score=tensor([[[5., 6, 7, 8], [1, 2, 3, 4]]]))
    got = run("kept", slots=held, i=tensor([[[0, 2], [1, 3]]]))
    same(got["slots"].get("pos"), tensor([[[0, 2], [1, 3]]]).int(), "the positions")
    same(got["slots"]["k"][..., 0], tensor([[[0., 2], [11, 13]]]), "the keys")
    same(got["slots"].get("score"), tensor([[[5., 7], [2, 4]]]), "the scores")
    same((got["length"], got["ragged"]), (2, False), "length and ragged")


@problem("keep")
def test_an_empty_slot(run):
    """−1 makes an empty slot: its position is NEVER, and the cache is ragged."""
    got = run("kept", slots=slots(tensor([[[0, 1, 2], [0, 1, 2]]])), i=tensor([[[0, 2], [1, -1]]]))
    same(got["slots"].get("pos"), tensor([[[0, 2], [1, NEVER]]]).int(), "the positions")
    same((got["length"], got["ragged"]), (2, True), "length and ragged")


@problem("keep")
def test_a_slot_that_is_not_there(run):
    """Slot 3 of a cache with three slots: a ValueError."""
    raises(run, "kept", slots=slots(tensor([[[0, 1, 2]]])), i=tensor([[[0, 3]]]))


@problem("drop")
def test_the_last_fills_the_hole(run):
    """Positions 0 1 2 3, slot 1 goes: the last slot moves into the hole, 0 3 2."""
    held = slots(tensor([[[0, 1, 2, 3]]]), score=tensor([[[5., 6, 7, 8]]]))
    got = run("dropped", slots=held, i=tensor([[[1]]]))
    same(got["slots"].get("pos"), tensor([[[0, 3, 2]]]).int(), "the positions")
    same(got["slots"]["k"][..., 0], tensor([[[0., 3, 2]]]), "the keys")
    same(got["slots"].get("score"), tensor([[[5., 8, 7]]]), "the scores")
    same((got["length"], got["seen"]), (3, 4), "slots in use and tokens seen")


@problem("drop")
def test_another_in_each_head(run):
    """Head 0 drops its first slot, head 1 its last, which leaves no hole."""
    got = run("dropped", slots=slots(tensor([[[0, 1, 2], [0, 1, 2]]])), i=tensor([[[0], [2]]]))
    same(got["slots"].get("pos"), tensor([[[2, 1], [0, 1]]]).int(), "the positions")


@problem("drop")
def test_the_buffer_has_more(run):
    """Buffers of five slots, three in use: the last slot in use moves; the buffers stay the same."""
    got = run("dropped", slots=slots(tensor([[[0, 1, 2]]])), i=tensor([[[0]]]), slack=2)
    same(got["slots"].get("pos"), tensor([[[2, 1]]]).int(), "the positions")
    same((got["allocated"]["k"], got["in_place"]), (5, True),
         "slots of the buffers, and whether they are the same tensors")


@problem("indices")
def test_in_order(run):
    """The mask 1 0 1 1 gives the slots 0 2 3."""
    same(run("indices", kept=tensor([[[True, False, True, True]]])), tensor([[[0, 2, 3]]]), "the slots")


@problem("indices")
def test_filled_up(run):
    """Head 0 keeps slots 0 and 2, head 1 only slot 1: 0 2 and 1 −1."""
    got = run("indices", kept=tensor([[[1, 0, 1], [0, 1, 0]]]).bool())
    same(got, tensor([[[0, 2], [1, -1]]]), "the slots")


@problem("shrink")
def test_the_highest(run):
    """Scores 5 1 9 2 6, budget 3: slots 0 2 4 stay."""
    held = slots(tensor([[[0, 1, 2, 3, 4]]]))
    got = run("shrunk", slots=held, score=tensor([[[5., 1, 9, 2, 6]]]), budget=3)
    same(by_position(got, "pos"), tensor([[[0, 2, 4]]]).int(), "the positions")


@problem("shrink")
def test_ties(run):
    """Equal scores, positions 3 0 2 1, budget 2: the newest, 2 and 3, stay."""
    got = run("shrunk", slots=slots(tensor([[[3, 0, 2, 1]]])), score=torch.ones(1, 1, 4), budget=2)
    same(by_position(got, "pos"), tensor([[[2, 3]]]).int(), "the positions")


@problem("shrink")
def test_one_too_many(run):
    """Three slots, budget 2: the lowest goes, of equal scores the oldest. Use `drop`: no new buffers."""
    held = slots(tensor([[[4, 3, 2], [2, 3, 4]]]))
    got = run("shrunk", slots=held, score=tensor([[[9., 1, 1], [7, 5, 6]]]), budget=2)
    same(by_position(got, "pos"), tensor([[[3, 4], [2, 4]]]).int(), "the positions")
    same(got["allocated"]["k"], 3, "the slots of the buffers")


@problem("shrink")
def test_empty_slots_go_first(run):
    """Budget 2; one of head 1's three slots is empty and has a high score: the empty slot goes."""
    got = run("shrunk", slots=slots(tensor([[[0, 1, 2], [0, 1, NEVER]]])), ragged=True, budget=2,
              score=tensor([[[3., 1, 2], [1, 2, 9]]]))
    same(by_position(got, "pos"), tensor([[[0, 2], [0, 1]]]).int(), "the positions")


@problem("score")
def test_heavy_and_recent(run):
    """Six tokens, budget 4, half of it recent: 4 and 5 stay, and 0 and 2, which have the most attention."""
    held = slots(tensor([[[0, 1, 2, 3, 4, 5]]]), accumulated=tensor([[[9., 2, 5, 3, 1, 0]]]))
    got = run("evicted", slots=held, budget=4, recent=0.5)
    same(by_position(got, "pos"), tensor([[[0, 2, 4, 5]]]).int(), "the positions")
    same(by_position(got, "accumulated"), tensor([[[9., 5, 1, 0]]]), "the accumulated attention")


@problem("score")
def test_the_newest_stays(run):
    """recent = 0 still protects the newest. Four tokens, budget 2: token 3 and the heaviest, 1, stay."""
    got = run("evicted", slots=slots(tensor([[[0, 1, 2, 3]]]), accumulated=tensor([[[1., 9, 5, 0]]])),
              budget=2, recent=0.0)
    same(by_position(got, "pos"), tensor([[[1, 3]]]).int(), "the positions")


@problem("score")
def test_after_evictions(run):
    """Of ten tokens the cache holds 0 3 6 8 9; budget 4. 8 and 9 are recent; 6 has the least of the rest."""
    got = run("evicted", slots=slots(tensor([[[0, 9, 6, 3, 8]]]), accumulated=tensor([[[4., 0, 2, 3, 1]]])),
              budget=4, recent=0.5, seen=10)
    same(by_position(got, "pos"), tensor([[[0, 3, 8, 9]]]).int(), "the positions")
