"""The tests that students have. Each says in words what it expects."""
from math import inf, log

import torch
from torch import tensor

from course.expect import problem, raises, same, wrong

NEVER = 2 ** 31 - 1


def slots(pos, **state):
    """Keys and values that say which slot they are from: slot s of head h of row b has 100 b + 10 h + s."""
    B, H, S = pos.shape
    name = 100 * torch.arange(B)[:, None, None] + 10 * torch.arange(H)[:, None] + torch.arange(S)
    k = name[..., None].expand(B, H, S, 2).float()
    return dict(k=k, v=-k, pos=pos.int(), **state)


def by_position(got, name):
    """One tensor of what a cache holds, (B, H, n), each head's slots in the order of their positions."""
    x, pos = (got["slots"].get(each) for each in (name, "pos"))
    if x is None or pos is None or x.shape != pos.shape:
        wrong(f"{name}: expected a tensor of one number a slot")
    return x.gather(2, pos.argsort(-1))


@problem("visible")
def test_no_later_slot(run):
    """Slots at 0 1 2 3. The query at 2 sees three of them, that at 3 sees all four."""
    got = run("visible", slot_pos=tensor([[[0, 1, 2, 3]]]).int(), bias=None, pos=tensor([[2, 3]]))
    same(got, tensor([[[[1, 1, 1, 0], [1, 1, 1, 1]]]]).bool(), "the mask")


@problem("visible")
def test_heads_hold_other_tokens(run):
    """Head 0 holds 0 and 5, head 1 holds 3 and an empty slot. The query at 5 sees what there is."""
    got = run("visible", slot_pos=tensor([[[0, 5], [3, NEVER]]]).int(), bias=None, pos=tensor([[4, 5]]))
    same(got, tensor([[[[1, 0], [1, 1]], [[1, 0], [1, 0]]]]).bool(), "the mask")


@problem("visible")
def test_a_bias(run):
    """With a bias the mask has floats: the slot's bias where it is seen, −inf where it is not."""
    got = run("visible", slot_pos=tensor([[[0, 1]]]).int(), bias=tensor([[[0.5, 2]]]), pos=tensor([[0, 1]]))
    same(got, tensor([[[[0.5, -inf], [0.5, 2]]]]), "the mask")


@problem("probabilities")
def test_equal_scores(run):
    """A query of zeros at position 1 gives slots 0 and 1 one half each, and the later ones nothing."""
    got = run("probabilities", q=torch.zeros(1, 1, 1, 4), k=torch.ones(1, 1, 4, 4),
              slot_pos=tensor([[[0, 1, 2, 3]]]).int(), bias=None, pos=tensor([[1]]))
    same(got, tensor([[[[[0.5, 0.5, 0, 0]]]]]), "the probabilities", atol=1e-6)


@problem("probabilities")
def test_the_scale(run):
    """D = 4. The products with the keys are 2 ln 3 and 0; divided by √D they are ln 3 and 0: 3/4 and 1/4."""
    got = run("probabilities", q=tensor([2., 0, 0, 0]).view(1, 1, 1, 4),
              k=tensor([[log(3), 1, 1, 1], [0, 1, 1, 1]]).view(1, 1, 2, 4), slot_pos=tensor([[[0, 1]]]).int(),
              bias=None, pos=tensor([[1]]))
    same(got, tensor([[[[[0.75, 0.25]]]]]), "the probabilities", atol=1e-6)


@problem("probabilities")
def test_a_bias_of_ln_3(run):
    """Equal scores; the second slot has the bias ln 3 and so three times the weight of the first."""
    got = run("probabilities", q=torch.zeros(1, 1, 1, 4), k=torch.zeros(1, 1, 2, 4),
              slot_pos=tensor([[[0, 1]]]).int(), bias=tensor([[[0, log(3)]]]), pos=tensor([[1]]))
    same(got, tensor([[[[[0.25, 0.75]]]]]), "the probabilities", atol=1e-6)


@problem("probabilities")
def test_groups(run):
    """Four query heads, two key heads: query heads 0 and 1 share key head 0. Shape (1, 2, 2, 1, 2)."""
    q = tensor([0., 1, 2, 3]).view(1, 4, 1, 1)
    k = log(2) * tensor([[1., 0], [0, 1]]).view(1, 2, 2, 1)
    slot_pos = tensor([[[0, 1], [0, 1]]]).int()
    got = run("probabilities", q=q, k=k, slot_pos=slot_pos, bias=None, pos=tensor([[1]]))
    expected = tensor([[[1 / 2, 1 / 2], [2 / 3, 1 / 3]], [[1 / 5, 4 / 5], [1 / 9, 8 / 9]]])
    same(got, expected.view(1, 2, 2, 1, 2), "the probabilities", atol=1e-6)


@problem("write")
def test_two_writes(run):
    """Two tokens, then one: three slots in the order of the tokens, and three tokens seen."""
    k = tensor([1., 2, 3]).view(1, 1, 3, 1)
    _, got = run("written", steps=[dict(k=k[:, :, :2], v=-k[:, :, :2], pos=tensor([[0, 1]])),
                                   dict(k=k[:, :, 2:], v=-k[:, :, 2:], pos=tensor([[2]]))])
    same(got["slots"].get("k"), k, "the keys")
    same(got["slots"].get("v"), -k, "the values")
    same(got["slots"].get("pos"), tensor([[[0, 1, 2]]]).int(), "the positions")
    same((got["length"], got["seen"]), (3, 3), "slots in use and tokens seen")


@problem("write")
def test_what_is_not_given(run):
    """A write with a state tensor and then one without: 5 5 0."""
    k = torch.ones(1, 1, 3, 1)
    _, got = run("written", steps=[
        dict(k=k[:, :, :2], v=k[:, :, :2], pos=tensor([[0, 1]]), score=tensor([[[5., 5]]])),
        dict(k=k[:, :, 2:], v=k[:, :, 2:], pos=tensor([[2]]))])
    same(got["slots"].get("score"), tensor([[[5., 5, 0]]]), "the state")


@problem("write")
def test_buffers(run):
    """Ten tokens take ten slots. The next needs a buffer of capacity(11) = 12; the 12th fits into it."""
    k = torch.ones(1, 1, 12, 1)
    got = run("written", steps=[dict(k=k[:, :, a:b], v=k[:, :, a:b], pos=torch.arange(a, b)[None])
                                for a, b in ((0, 10), (10, 11), (11, 12))])
    for each, slots_in_all in zip(got, (10, 12, 12)):
        same(each["allocated"], dict.fromkeys(("k", "v", "pos"), slots_in_all),
             f"the buffers' slots with {each['length']} in use")


@problem("write")
def test_slots_that_were_freed(run):
    """Three tokens, of which one slot was freed, and one more: two and one are three slots, of four seen."""
    k = tensor([1., 2, 3, 4]).view(1, 1, 4, 1)
    *_, got = run("written", steps=[dict(k=k[:, :, :3], v=k[:, :, :3], pos=tensor([[0, 1, 2]])),
                                    dict(forget=1), dict(k=k[:, :, 3:], v=k[:, :, 3:], pos=tensor([[3]]))])
    same(got["slots"].get("pos"), tensor([[[0, 1, 3]]]).int(), "the positions")
    same((got["length"], got["seen"]), (3, 4), "slots in use and tokens seen")


@problem("keep")
def test_everything_moves(run):
    """Of slots 0 1 2 3 the first head keeps 0 and 2, the second 1 and 3; a state tensor moves along."""
    held = slots(tensor([[[0, 1, 2, 3], [0, 1, 2, 3]]]), score=tensor([[[5., 6, 7, 8], [1, 2, 3, 4]]]))
    got = run("kept", slots=held, i=tensor([[[0, 2], [1, 3]]]))
    same(got["slots"].get("pos"), tensor([[[0, 2], [1, 3]]]).int(), "the positions")
    same(got["slots"]["k"][..., 0], tensor([[[0., 2], [11, 13]]]), "the keys")
    same(got["slots"].get("score"), tensor([[[5., 7], [2, 4]]]), "the state")
    same((got["length"], got["ragged"]), (2, False), "length and ragged")


@problem("keep")
def test_an_empty_slot(run):
    """−1 is an empty slot: its position is NEVER, and the cache is ragged from then on."""
    got = run("kept", slots=slots(tensor([[[0, 1, 2], [0, 1, 2]]])), i=tensor([[[0, 2], [1, -1]]]))
    same(got["slots"].get("pos"), tensor([[[0, 2], [1, NEVER]]]).int(), "the positions")
    same((got["length"], got["ragged"]), (2, True), "length and ragged")


@problem("keep")
def test_a_slot_that_is_not_there(run):
    """Slot 3 of three slots: a ValueError, as check_kept raises it."""
    raises(run, "kept", slots=slots(tensor([[[0, 1, 2]]])), i=tensor([[[0, 3]]]))


@problem("drop")
def test_the_last_fills_the_hole(run):
    """Four slots; slot 1 goes. The last slot, with position 3, moves into its place."""
    held = slots(tensor([[[0, 1, 2, 3]]]), score=tensor([[[5., 6, 7, 8]]]))
    got = run("dropped", slots=held, i=tensor([[[1]]]))
    same(got["slots"].get("pos"), tensor([[[0, 3, 2]]]).int(), "the positions")
    same(got["slots"]["k"][..., 0], tensor([[[0., 3, 2]]]), "the keys")
    same(got["slots"].get("score"), tensor([[[5., 8, 7]]]), "the state")
    same((got["length"], got["seen"]), (3, 4), "slots in use and tokens seen")


@problem("drop")
def test_another_in_each_head(run):
    """Head 0 loses its first slot and head 1 its last, which leaves no hole."""
    got = run("dropped", slots=slots(tensor([[[0, 1, 2], [0, 1, 2]]])), i=tensor([[[0], [2]]]))
    same(got["slots"].get("pos"), tensor([[[2, 1], [0, 1]]]).int(), "the positions")


@problem("drop")
def test_the_buffer_has_more(run):
    """Three slots in use of buffers of five: the last slot in use moves, and the buffers stay as they are."""
    got = run("dropped", slots=slots(tensor([[[0, 1, 2]]])), i=tensor([[[0]]]), slack=2)
    same(got["slots"].get("pos"), tensor([[[2, 1]]]).int(), "the positions")
    same((got["allocated"]["k"], got["in_place"]), (5, True), "the buffers, and that none is new")


@problem("indices")
def test_in_order(run):
    """The mask 1 0 1 1 has the slots 0 2 3."""
    same(run("indices", kept=tensor([[[True, False, True, True]]])), tensor([[[0, 2, 3]]]), "the slots")


@problem("indices")
def test_filled_up(run):
    """The second head keeps one slot where the first keeps two: the place that is left is −1."""
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
    """Equal scores, positions 3 0 2 1, budget 2: the newest stay, 2 and 3, wherever they lie."""
    got = run("shrunk", slots=slots(tensor([[[3, 0, 2, 1]]])), score=torch.ones(1, 1, 4), budget=2)
    same(by_position(got, "pos"), tensor([[[2, 3]]]).int(), "the positions")


@problem("shrink")
def test_one_too_many(run):
    """Three slots, budget 2. Where the lowest score is there twice, the older goes; by `drop`, in place."""
    held = slots(tensor([[[4, 2, 3], [2, 3, 4]]]))
    got = run("shrunk", slots=held, score=tensor([[[9., 1, 1], [7, 5, 6]]]), budget=2)
    same(by_position(got, "pos"), tensor([[[3, 4], [2, 4]]]).int(), "the positions")
    same(got["allocated"]["k"], 3, "the slots of the buffers")


@problem("shrink")
def test_empty_slots_go_first(run):
    """The second head has an empty slot with a high score, budget 2: it goes, not a token."""
    got = run("shrunk", slots=slots(tensor([[[0, 1, 2], [0, 1, NEVER]]])), ragged=True, budget=2,
              score=tensor([[[3., 1, 2], [1, 2, 9]]]))
    same(by_position(got, "pos"), tensor([[[0, 2], [0, 1]]]).int(), "the positions")


@problem("score")
def test_heavy_and_recent(run):
    """Six tokens, budget 4, half of it recent: 4 and 5. Of the others 0 and 2 had most attention."""
    held = slots(tensor([[[0, 1, 2, 3, 4, 5]]]), accumulated=tensor([[[9., 2, 5, 3, 1, 0]]]))
    got = run("evicted", slots=held, budget=4, recent=0.5)
    same(by_position(got, "pos"), tensor([[[0, 2, 4, 5]]]).int(), "the positions")
    same(by_position(got, "accumulated"), tensor([[[9., 5, 1, 0]]]), "the accumulated attention")


@problem("score")
def test_the_newest_stays(run):
    """recent = 0 means at least the newest one: of four tokens, budget 2, token 3 and the heaviest stay."""
    got = run("evicted", slots=slots(tensor([[[0, 1, 2, 3]]]), accumulated=tensor([[[1., 9, 5, 0]]])),
              budget=2, recent=0.0)
    same(by_position(got, "pos"), tensor([[[1, 3]]]).int(), "the positions")


@problem("score")
def test_after_evictions(run):
    """Ten tokens have been seen, of which 0 3 6 8 9 are held; budget 4: 8 and 9 are recent, 6 is lightest."""
    got = run("evicted", slots=slots(tensor([[[0, 9, 6, 3, 8]]]), accumulated=tensor([[[4., 0, 2, 3, 1]]])),
              budget=4, recent=0.5, seen=10)
    same(by_position(got, "pos"), tensor([[[0, 3, 8, 9]]]).int(), "the positions")
