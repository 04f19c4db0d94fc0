"""The hidden tests, which a student's copy does not hold: more sizes, and edge cases."""
import math

import pytest
import torch
from torch import tensor

from course.expect import problem, raises, same, wrong

NEVER = 2 ** 31 - 1


def drawn(seed, *shape, values=None):
    g = torch.Generator().manual_seed(seed)
    if values is None:
        return torch.randn(*shape, generator=g)
    return torch.randint(values, shape, generator=g)


def shuffled(seed, B, H, S):
    """Return the positions 0 … S − 1, shuffled in each head."""
    return drawn(seed, B, H, S).argsort(-1)


def slots(seed, pos, **state):
    """Return random keys and values, and two state tensors: vectors and whole numbers."""
    B, H, S = pos.shape
    return dict(k=drawn(seed, B, H, S, 3), v=drawn(seed + 1, B, H, S, 3), pos=pos.int(),
                code=drawn(seed + 2, B, H, S, 2, values=100).to(torch.uint8),
                count=drawn(seed + 3, B, H, S, values=100).int()) | state


def attention(q, k, v, see):
    """Return output and weights of one query over the slots where `see` is true, in Python's numbers."""
    weight = [math.exp(sum(a * b for a, b in zip(q, each)) / math.sqrt(len(q))) if seen else 0.0
              for each, seen in zip(k, see)]
    weight = [w / sum(weight) for w in weight]
    return [sum(w * each[d] for w, each in zip(weight, v)) for d in range(len(q))], weight


def holds(got, before, at, what):
    """Fail unless each head holds exactly the slots `at` (B, H, n) of `before`, in any order."""
    for name in before:
        now = got["slots"].get(name)
        if now is None or now.shape[:3] != at.shape:
            wrong(f"{what}: expected {name} of {at.shape[2]} slots of each head")
    order = got["slots"]["pos"].argsort(-1)
    for name, x in before.items():
        now = got["slots"][name]
        expected = torch.stack([torch.stack([x[b, h, at[b, h][before["pos"][b, h, at[b, h]].argsort()]]
                                             for h in range(x.shape[1])]) for b in range(x.shape[0])])
        here = torch.stack([torch.stack([now[b, h, order[b, h]] for h in range(x.shape[1])])
                            for b in range(x.shape[0])])
        same(here, expected, f"{what}: {name}, by position")


def full_attention(q, k, v):
    """Compute causal attention by a loop: q (B, 2H, T, D), k and v (B, H, T, D)."""
    B, heads, T, _ = q.shape
    expected = torch.zeros(q.shape)
    for b in range(B):
        for h in range(heads):
            for t in range(T):
                expected[b, h, t] = tensor(attention(q[b, h, t].tolist(), k[b, h // 2].tolist(),
                                                     v[b, h // 2].tolist(), [s <= t for s in range(T)])[0])
    return expected


# ---- what a query sees ----------------------------------------------------------------------------------

@problem("visible")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_every_pair(run, rows, heads, biased):
    """Slots in any order, some empty; heads differ, or share their slots; one row of positions, or two."""
    at, pos = drawn(0, 2, heads, 7, values=9), drawn(1, rows, 4, values=9)
    at = torch.where(drawn(2, 2, heads, 7, values=4) == 0, NEVER, at).int()
    bias = drawn(3, 2, 3, 7) if biased else None
    H = 3 if biased else heads
    expected = torch.zeros(2, H, 4, 7) if biased else torch.zeros(2, H, 4, 7, dtype=torch.bool)
    for b in range(2):
        for h in range(H):
            for t in range(4):
                for s in range(7):
                    seen = bool(at[b, h % heads, s] <= pos[b if rows == 2 else 0, t])
                    expected[b, h, t, s] = (bias[b, h, s] if seen else -math.inf) if biased else seen
    same(run("visible", slot_pos=at, bias=bias, pos=pos), expected, "the mask")


@problem("visible")
def test_a_prompt_in_pieces(run):
    """A prompt in pieces of 3, 4 and 2 tokens gives the outputs of the whole prompt."""
    q, k, v = drawn(4, 2, 4, 9, 4), drawn(5, 2, 2, 9, 4), drawn(6, 2, 2, 9, 4)
    same(run("attended", q=q, k=k, v=v, pieces=[3, 4, 2]), full_attention(q, k, v), "the outputs", atol=1e-5)


@problem("probabilities")
@pytest.mark.parametrize("H, G, w, S, heads", [(1, 1, 1, 5, 1), (2, 3, 4, 7, 2), (3, 2, 2, 6, 1)])
@pytest.mark.parametrize("kind", ["none", "boolean", "numbers"])
def test_each_row(run, H, G, w, S, heads, kind):
    """Each query's softmax: groups, batch 2, a mask for each head or one for all, or none."""
    B, D = 2, 5
    q, k = drawn(0, B, H * G, w, D), drawn(1, B, H, S, D)
    sees = drawn(2, B, heads, w, S, values=3) > 0
    sees[..., 0] = True
    add = torch.where(sees, drawn(3, B, heads, w, S) if kind == "numbers" else 0.0, -math.inf)
    mask = dict(none=None, boolean=sees, numbers=add)[kind]
    expected = torch.zeros(B, H, G, w, S)
    for b in range(B):
        for h in range(H):
            for g in range(G):
                for t in range(w):
                    score = [sum(x * y for x, y in zip(q[b, h * G + g, t].tolist(), k[b, h, s].tolist()))
                             / math.sqrt(D) for s in range(S)]
                    if mask is not None:
                        score = [x + y for x, y in zip(score, add[b, h % heads, t].tolist())]
                    weight = [math.exp(x) for x in score]
                    expected[b, h, g, t] = tensor([x / sum(weight) for x in weight])
    got = run("probabilities", q=q, k=k, mask=mask)
    same(got, expected, "the probabilities", atol=1e-5)
    if got.dtype != torch.float32 or (got[expected == 0] != 0).any():
        wrong("expected float32, and exactly 0 for a slot that is not visible")


@problem("probabilities")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_at_least_32_bits(run, dtype, biased):
    """Probabilities have 64 bits if q has, else 32."""
    q, k = drawn(6, 1, 2, 1, 4).to(dtype), drawn(7, 1, 1, 6, 4).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    got = run("probabilities", q=q, k=k, mask=torch.zeros(1, 1, 1, 6) if biased else None)
    if not isinstance(got, torch.Tensor) or got.dtype != wide:
        wrong(f"expected probabilities of {wide}")
    group, keys = q.to(wide), k.to(wide)
    expected = (group @ keys.mT / 2).softmax(-1).view(1, 1, 2, 1, 6)
    same(got, expected, "the probabilities", atol=1e-6)


@problem("probabilities")
def test_watched(run):
    """An attention layer that watches its last two queries has the outputs of full attention."""
    q, k, v = drawn(8, 2, 4, 6, 4), drawn(9, 2, 2, 6, 4), drawn(10, 2, 2, 6, 4)
    same(run("attended", q=q, k=k, v=v, pieces=[4, 2], watch=2), full_attention(q, k, v),
         "the outputs", atol=1e-5)


# ---- slots ----------------------------------------------------------------------------------------------

@problem("write")
@pytest.mark.parametrize("pieces", [[7], [10, 1, 1, 1], [4, 3, 5, 20, 1, 1, 1, 1], [1] * 30])
@pytest.mark.parametrize("more", [False, True])
def test_tokens_in_pieces(run, pieces, more):
    """However a text is cut: all tokens in order, other numbers 0; buffers grow to `capacity` when full."""
    n = sum(pieces)
    k, v, pos = drawn(0, 2, 3, n, 4), drawn(1, 2, 3, n, 4).double(), drawn(2, 2, n, values=1000)
    cut = [slice(sum(pieces[:i]), sum(pieces[:i + 1])) for i in range(len(pieces))]
    got = run("written", more=more, steps=[dict(k=k[:, :, x], v=v[:, :, x], pos=pos[:, x]) for x in cut])
    expected = dict(k=k, v=v, pos=pos[:, None].expand(2, 3, n).int())
    if more:
        expected |= dict(score=torch.zeros(2, 3, n, dtype=torch.float64),
                         bits=torch.zeros(2, 3, n, 5, dtype=torch.uint8))
    room = 0
    for each, x in zip(got, cut):
        end = x.stop
        if end > room:
            room = end + end // 10 if x.start else end
        same(sorted(each["slots"]), sorted(expected), "the tensors")
        for name, full in expected.items():
            same(each["slots"][name], full[:, :, :end], f"{name} after {end} tokens")
        same((each["length"], each["seen"]), (end, end), "slots in use and tokens seen")
        same(each["allocated"], dict.fromkeys(expected, room), f"slots of the buffers after {end} tokens")


@problem("write")
def test_one_row_of_positions(run):
    """Positions (1, T) are those of every row and head."""
    k = drawn(5, 3, 2, 4, 2)
    got, = run("written", steps=[dict(k=k, v=k.clone(), pos=tensor([[5, 6, 7, 8]]))])
    same(got["slots"].get("pos"), tensor([5, 6, 7, 8]).int().expand(3, 2, 4), "the positions")


@problem("write")
@pytest.mark.parametrize("new", [1, 2, 9])
def test_slots_that_are_used_again(run, new):
    """Of six slots three are freed. Those of new tokens hold 0, the others what they held."""
    k, tokens = torch.ones(1, 2, 15, 3), torch.arange(15)[None]
    *_, got = run("written", more=True, steps=[
        dict(k=k[:, :, :6], v=k[:, :, :6], pos=tokens[:, :6]), dict(fill=7), dict(forget=3),
        dict(k=k[:, :, 6:6 + new], v=k[:, :, 6:6 + new], pos=tokens[:, 6:6 + new])])
    expected = tensor([7] * 3 + [0] * new)
    same(got["slots"].get("score"), expected.double().expand(1, 2, -1), "the scores")
    same(got["slots"].get("bits"), expected.to(torch.uint8)[:, None].expand(1, 2, -1, 5), "the bits")
    at = [0, 1, 2, *range(6, 6 + new)]
    same(got["slots"].get("pos"), tensor(at).int().expand(1, 2, -1), "the positions")
    same((got["length"], got["seen"]), (3 + new, 6 + new), "slots in use and tokens seen")


@problem("keep")
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_any_slots_in_any_order(run, ragged, empty):
    """Slots in the order of i, in every tensor and head; −1 is empty; a ragged cache stays ragged."""
    before = slots(0, shuffled(0, 2, 3, 8))
    i = shuffled(1, 2, 3, 8)[:, :, :5]
    if empty:
        i[0, 1, 3:], i[1, 2, 0] = -1, -1
    got = run("kept", slots=before, i=i, slack=3, ragged=ragged, seen=30)
    for name, x in before.items():
        now = got["slots"].get(name)
        if now is None or now.shape != (2, 3, 5, *x.shape[3:]) or now.dtype != x.dtype:
            wrong(f"{name}: expected the shape {(2, 3, 5, *x.shape[3:])} and {x.dtype}")
        for b in range(2):
            for h in range(3):
                for n, s in enumerate(i[b, h].tolist()):
                    if s >= 0:
                        same(now[b, h, n], x[b, h, s], f"{name} of slot {s}")
                    elif name == "pos":
                        same(int(now[b, h, n]), NEVER, "the position of an empty slot")
    same((got["length"], got["seen"], got["ragged"]), (5, 30, ragged or empty), "length, seen and ragged")
    same(got["allocated"], dict.fromkeys(before, 5), "slots of the buffers")


@problem("keep")
def test_bad_slots(run):
    """A slot not in use, or a missing head: a ValueError."""
    before = slots(2, shuffled(2, 1, 2, 4))
    for i in (tensor([[[0, 4], [0, 1]]]), tensor([[[0, 1]]])):
        raises(run, "kept", slots=before, i=i, slack=4)


@problem("keep")
def test_none(run):
    """No slot stays: the cache is empty and not ragged."""
    got = run("kept", slots=slots(3, shuffled(3, 1, 2, 4)), i=torch.zeros(1, 2, 0, dtype=torch.int64))
    same((got["length"], got["seen"], got["ragged"]), (0, 4, False), "length, seen and ragged")


@problem("drop")
@pytest.mark.parametrize("slack", [0, 1, 4])
def test_a_slot_of_each_head(run, slack):
    """Batch 2, each head drops its own slot: the last moves in every tensor; the buffers stay the same."""
    before, i = slots(0, shuffled(0, 2, 3, 5)), drawn(1, 2, 3, 1, values=5)
    got = run("dropped", slots=before, i=i, slack=slack, seen=20)
    for name, x in before.items():
        expected = x[:, :, :4].clone()
        for b in range(2):
            for h in range(3):
                if i[b, h, 0] < 4:
                    expected[b, h, i[b, h, 0]] = x[b, h, 4]
        same(got["slots"].get(name), expected, f"{name}")
    same((got["length"], got["seen"]), (4, 20), "slots in use and tokens seen")
    same(got["allocated"], dict.fromkeys(before, 5 + slack), "the slots of the buffers")
    same(got["in_place"], True, "whether the buffers are the same tensors")


@problem("drop")
def test_the_only_slot(run):
    """A cache with one slot becomes empty."""
    got = run("dropped", slots=slots(2, torch.zeros(2, 2, 1)), i=torch.zeros(2, 2, 1, dtype=torch.int64))
    same((got["length"], got["seen"]), (0, 1), "slots in use and tokens seen")


@problem("indices")
@pytest.mark.parametrize("B, H, S", [(1, 1, 1), (2, 3, 9), (3, 2, 40)])
def test_random_masks(run, B, H, S):
    """The slots where the mask is true, in order; shorter heads are filled up with −1."""
    kept = drawn(0, B, H, S, values=3) == 0
    kept[0, 0, 0] = True
    rows = [[[s for s in range(S) if kept[b, h, s]] for h in range(H)] for b in range(B)]
    n = max(len(row) for head in rows for row in head)
    same(run("indices", kept=kept), tensor([[row + [-1] * (n - len(row)) for row in head] for head in rows]),
         "the slots")


@problem("indices")
@pytest.mark.parametrize("value", [False, True])
def test_all_and_nothing(run, value):
    """An all-true mask gives all slots, an all-false mask (B, H, 0)."""
    expected = torch.arange(4 if value else 0).expand(2, 3, -1)
    same(run("indices", kept=torch.full((2, 3, 4), value)), expected, "the slots")


# ---- eviction -------------------------------------------------------------------------------------------

def best(score, pos, budget):
    """Return the slots of a head that stay: highest score, of equal scores the newest, none empty."""
    used = [s for s in range(len(score)) if pos[s] != NEVER]
    return sorted(sorted(used, key=lambda s: (-score[s], -pos[s]))[:budget])


@problem("shrink")
@pytest.mark.parametrize("S, budget", [(9, 8), (9, 7), (9, 4), (12, 1), (30, 11)])
def test_many_ties(run, S, budget):
    """Many ties; slots in any order; rows and heads differ."""
    before = slots(0, shuffled(0, 2, 3, S))
    score = drawn(1, 2, 3, S, values=4) + tensor([0., 10, 20]).view(3, 1)
    at = tensor([[best(score[b, h].tolist(), before["pos"][b, h].tolist(), budget) for h in range(3)]
                 for b in range(2)])
    got = run("shrunk", slots=before, score=score, budget=budget, slack=2, seen=99)
    holds(got, before, at, f"a budget of {budget}")
    same((got["length"], got["seen"], got["ragged"]), (budget, 99, False), "length, seen and ragged")
    same(got["allocated"]["k"], S + 2 if S == budget + 1 else budget, "the slots of the buffers")


@problem("shrink")
@pytest.mark.parametrize("budget", [7, 9])
def test_within_the_budget(run, budget):
    """At most as many slots as the budget: nothing changes."""
    before = slots(2, shuffled(2, 1, 2, 7))
    got = run("shrunk", slots=before, score=drawn(3, 1, 2, 7), budget=budget, slack=3)
    for name, x in before.items():
        same(got["slots"].get(name), x, name)
    same(got["allocated"]["k"], 10, "the slots of the buffers")


@problem("shrink")
@pytest.mark.parametrize("budget", [1, 3, 6, 7])
def test_heads_with_empty_slots(run, budget):
    """Empty slots score highest but displace no token; a head may have fewer tokens than the budget."""
    pos = shuffled(4, 2, 2, 8)
    pos[0, 0, 2:5], pos[1, 1, 0], pos[1, 0, 7] = NEVER, NEVER, NEVER
    before, score = slots(4, pos), drawn(5, 2, 2, 8, values=3).float()
    score[pos == NEVER] = 50
    got = run("shrunk", slots=before, score=score, budget=budget, ragged=True)
    same(got["length"], budget, "slots in use")
    for b in range(2):
        for h in range(2):
            at = best(score[b, h].tolist(), pos[b, h].tolist(), budget)
            now = got["slots"]["pos"][b, h]
            there = sorted(x for x in now.tolist() if x != NEVER)
            same(there, sorted(pos[b, h, at].tolist()), "the positions")
            for x, key in zip(now.tolist(), got["slots"]["k"][b, h]):
                if x != NEVER:
                    same(key, before["k"][b, h, pos[b, h].tolist().index(x)], f"the key of position {x}")


@problem("shrink")
def test_bad_scores(run):
    """A score that lacks a head: a ValueError."""
    raises(run, "shrunk", slots=slots(6, shuffled(6, 1, 2, 5)), score=torch.zeros(1, 1, 5), budget=2)


@problem("score")
@pytest.mark.parametrize("budget", [2, 5, 7, 9])
@pytest.mark.parametrize("recent", [0.0, 0.3, 0.5, 1.0])
def test_one_eviction(run, budget, recent):
    """Ties, gaps, slots in any order: the newest stay, then the heaviest, of equal sums the newer."""
    pos = (3 * shuffled(0, 2, 3, 10) + 2).int()
    before = slots(0, pos, accumulated=drawn(1, 2, 3, 10, values=4).float())
    newest = 30 - max(1, round(recent * budget))
    at = tensor([[best([math.inf if x >= newest else a for x, a in zip(pos[b, h].tolist(),
                                                                       before["accumulated"][b, h].tolist())],
                       pos[b, h].tolist(), budget) for h in range(3)] for b in range(2)])
    holds(run("evicted", slots=before, budget=budget, recent=recent, seen=30), before, at,
          f"a budget of {budget}, {recent} recent")


@problem("score")
@pytest.mark.parametrize("budget, recent, pieces",
                         [(4, 0.5, [9]), (5, 0.3, [4, 6]), (6, 0.0, [3]), (3, 1.0, [5, 1])])
def test_every_step(run, budget, recent, pieces):
    """A prompt, then token by token: the positions held after each step, and the outputs."""
    B, H, G, n, D = 2, 2, 2, 16, 4
    q, k, v = 2 * drawn(2, B, H * G, n, D), drawn(3, B, H, n, D), drawn(4, B, H, n, D)
    prompt = sum(pieces)
    got = run("h2o", q=q, k=k, v=v, budget=budget, recent=recent, pieces=pieces)
    same(len(got["positions"]), n - prompt + 1, "number of steps")
    outputs = torch.zeros(B, H * G, n, D)
    for b in range(B):
        for h in range(H):
            there, had = [], {}
            for t in range(n):
                there.append(t)
                had[t] = 0.0
                for g in range(G):
                    y, weight = attention(q[b, h * G + g, t].tolist(), [k[b, h, s].tolist() for s in there],
                                          [v[b, h, s].tolist() for s in there], [True] * len(there))
                    outputs[b, h * G + g, t] = tensor(y)
                    for s, w in zip(there, weight):
                        had[s] += w
                if t + 1 >= prompt:
                    newest = t + 1 - max(1, round(recent * budget))
                    score = [math.inf if s >= newest else had[s] for s in there]
                    there = [there[i] for i in best(score, there, budget)]
                    now = sorted(got["positions"][t + 1 - prompt][b, h].tolist())
                    same(now, there, f"row {b}, head {h}, {t + 1} tokens seen: the positions")
    same(got["outputs"], outputs, "the outputs", atol=1e-4)
