"""Attention over tokens revived from a sketch, and the insert: the kernels and their twins against loops with Python's integers, in
float64, and against KVReviver's Sketch."""
from itertools import product
import math

import pytest
import torch

from conftest import DEVICE

pytest.importorskip("triton")  # Linux only

from kernels import revive_attention as module  # noqa: E402
from kernels.revive_attention import Segment, insert, plain, plain_insert, revive_attention  # noqa: E402
from methods.kv_reviver import MEDIAN, PRIME, Sketch  # noqa: E402
from test_decode_attention import TOLERANCE, segment  # noqa: E402


def where(J, rows, width, place, sign):
    """Slot and sign of a token in every row of a sketch; the cubics by[0]·J³ + … + by[3] modulo 2³¹ − 1 in Python's integers."""
    slot, minus = ([sum(int(c) * int(J) ** (3 - i) for i, c in enumerate(by[:, row])) % (2 ** 31 - 1) for row in range(rows)]
                   for by in (place, sign))
    return [(row * width + n % width, (-1) ** m) for row, (n, m) in enumerate(zip(slot, minus))]


def by_hand(q, exact, token, x, place, sign, mean=None, shrink=1.0, signed_keys=False):
    """One query head at a time: y (B, H, G, D), and the weights of the exact slots and of the vague tokens."""
    (B, H, G, D), rows = q.shape, place.shape[1]
    exact = Segment(*(part.cpu() if isinstance(part, torch.Tensor) else part for part in exact))
    q, token, x, place, sign, mean = (part if part is None else part.cpu() for part in (q, token, x, place, sign, mean))
    y, weights = torch.zeros(q.shape, dtype=torch.float64), [torch.zeros(n, dtype=torch.float64) for n in ([len(exact.k)], token.shape)]
    for b, h in product(range(B), range(H)):
        first, n = int(exact.start[b * H + h]), int(exact.count[b * H + h])
        k, v = list(exact.k[first:first + n].double()), list(exact.v[first:first + n].double())
        for J in token[b, h]:
            told = [x[b, h, slot].double() * torch.tensor(D * [s if signed_keys else 1] + D * [s])
                    for slot, s in where(J, rows, x.shape[2] // rows, place, sign)]
            found = torch.stack(told).sort(0).values[rows // 2]
            if mean is not None:
                found = mean[b, h].double() + shrink * found
            k.append(found[:D]), v.append(found[D:])
        bias = torch.zeros(n) if exact.bias is None else exact.bias[first:first + n]
        for g in range(G):
            if k:
                score = torch.stack(k) @ q[b, h, g].double() / math.sqrt(D)
                score[:n] += bias
                p = score.softmax(0)
                y[b, h, g] = p @ torch.stack(v)
                weights[0][first:first + n] += p[:n]
                weights[1][b, h] += p[n:]
    return y.to(DEVICE), [weight.to(DEVICE) for weight in weights]


def cubics(rows, seed):
    return torch.randint(PRIME, (2, 4, rows), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def amid_nan(x):
    """The same numbers, with NaN before and after them in memory, which nobody may read."""
    storage = torch.full((x.numel() + 2 ** 15,), math.nan, dtype=x.dtype, device=DEVICE)
    storage[2 ** 14:-2 ** 14] = x.flatten()
    return storage[2 ** 14:-2 ** 14].view(x.shape)


def inputs(B, H, G, D, counts, a, rows, width, signed, shrink, dtype=torch.float32, seed=0, bias=False):
    g = torch.Generator().manual_seed(seed)
    q, x, mean = (amid_nan(torch.randn(B, H, *size, generator=g).to(dtype)) for size in ((G, D), (rows * width, 2 * D), (2 * D,)))
    token = torch.stack([torch.randperm(500, generator=g)[:a] for _ in range(B * H)]).view(B, H, a)
    token[..., ::5] = 2 ** 31 - 2 - token[..., ::5]
    how = dict(signed_keys=signed) | (dict() if shrink is None else dict(mean=mean, shrink=shrink))
    return (q, segment(counts, D, dtype, seed, bias), token.int().to(DEVICE), x, *cubics(rows, seed)), how


CASES = [  # B, H, G, D, counts of exact slots of the B·H heads, vague tokens, rows, slots of a row, signed keys, shrink (None: no mean), tile
    (1, 1, 1, 16, [3], 1, 1, 5, False, None, 16),
    (1, 2, 4, 128, [0, 5], 65, 3, 7, False, None, 32),      # paper
    (3, 1, 3, 40, [5, 0, 33], 63, 3, 16, True, None, 16),   # signed; a head dim and a group that are no powers of 2
    (1, 2, 2, 80, [17, 0], 49, 1, 9, True, 0.3, 16),        # shrunk
    (3, 1, 2, 64, [1, 2, 0], 33, 3, 31, True, 0.6, 16),
    (1, 1, 4, 32, [0], 64, 3, 1, False, 0.9, 64),           # all tokens in one slot of each row
    (1, 2, 2, 16, [3, 0], 0, 3, 4, True, 0.5, 16),          # no vague token, and a head with nothing at all
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernel_and_twin_are_the_loop(poisoned, case, dtype):
    *sizes, block = CASES[case]
    x, how = inputs(*sizes, dtype, case)
    y, weights = by_hand(*x, **how)
    for found, sums in plain(*x, **how, sums=True), revive_attention(*x, **how, sums=True, block=block):
        assert found.dtype == dtype and torch.allclose(found.double(), y, **TOLERANCE[dtype])
        for mine, expected in zip(sums, weights, strict=True):
            assert mine.dtype == torch.float32 and mine.shape == expected.shape
            assert torch.allclose(mine.double(), expected, rtol=1e-4, atol=max(1e-5, TOLERANCE[dtype]["atol"]))
    alone, none = revive_attention(*x, **how, block=block)
    assert torch.equal(alone, found) and none == [] == plain(*x, **how)[1]


@pytest.mark.parametrize("by", [revive_attention, plain])
def test_exact_slots_may_have_a_bias(poisoned, by):
    x, how = inputs(1, 2, 2, 16, [20, 3], 18, 1, 6, True, 0.5, bias=True)
    y, weights = by_hand(*x, **how)
    found, sums = by(*x, **how, sums=True)
    assert torch.allclose(found.double(), y, rtol=1e-5, atol=2e-6)
    assert all(torch.allclose(mine.double(), expected, rtol=1e-4, atol=1e-5) for mine, expected in zip(sums, weights))


def test_many_parts_and_large_scores(poisoned, monkeypatch):
    """A tile a program, more of them than are added up at once, and all tiles in one; without the largest taken off, scores of
    hundreds overflow, and those of minus hundreds vanish."""
    (q, *x), how = inputs(1, 1, 2, 16, [20], 490, 1, 300, False, None)
    for q in 200 * q, torch.full_like(q, -100):
        if q.max() < 0:
            x[2].abs_(), x[0].k.abs_()
        y, weights = by_hand(q, *x, **how)
        for split in (lambda n, block, *_: (block, max(1, -(-n // block)))), (lambda *_: (512, 1)):
            monkeypatch.setattr(module, "split", split)
            found, sums = revive_attention(q, *x, **how, sums=True, block=16)
            assert torch.allclose(found.double(), y, rtol=1e-4, atol=1e-5)
            assert all(torch.allclose(mine.double(), expected, rtol=1e-4, atol=1e-5) for mine, expected in zip(sums, weights))
            assert abs(sum(x.sum().item() for x in sums) - 2) < 1e-4


@pytest.mark.parametrize("rows", MEDIAN)
@pytest.mark.parametrize("kind", ["paper", "signed", "shrunk"])
def test_it_attends_to_what_the_sketch_tells(poisoned, kind, rows):
    B, H, G, D, a, width, g = 1, 2, 2, 16, 37, 11, torch.Generator().manual_seed(rows)
    (k, more_k), (v, more_v) = ((torch.randn(B, H, a + 5, D, generator=g) + 1).to(DEVICE).split((a, 5), 2) for _ in range(2))
    token = torch.stack([torch.randperm(50, generator=g) for _ in range(B * H)]).view(B, H, -1).int()[..., :a].to(DEVICE)
    sketch, mine = (Sketch(k, rows, width, kind, 7) for _ in range(2))
    sketch.insert(token, k, v)
    insert(mine.x, token, k, v, torch.ones(B, H, a, device=DEVICE), mine.place_by, mine.sign_by, kind != "paper", block=16)
    assert torch.allclose(mine.x, sketch.x, rtol=1e-5, atol=1e-5)
    x, how = sketch.x, dict(signed_keys=kind != "paper")
    if kind == "shrunk":
        mean = sketch.sum / a
        times = x.new_zeros(x.shape[:3]).scatter_add_(2, sketch.place(token).flatten(2), 1.0 - 2 * sketch.negative(token).flatten(2))
        x, how = x - mean.unsqueeze(2) * times.unsqueeze(3), how | dict(shrink=1 / (1 + MEDIAN[rows] * (a - 1) / width))
        how["mean"] = torch.stack((mean, mean), -1)[..., 0]  # not contiguous, as the queries and tokens are not
    q, (k, v) = torch.randn(B, G, H, D, generator=g).to(DEVICE).transpose(1, 2), sketch.query(token)
    y = (q @ torch.cat((more_k, k), 2).mT / 4).softmax(-1) @ torch.cat((more_v, v), 2)
    found, _ = revive_attention(q, Segment.of(more_k, more_v), token, x, sketch.place_by, sketch.sign_by, **how, block=16)
    assert torch.allclose(found, y, rtol=1e-5, atol=2e-6)


M = PRIME - 1
BY = torch.tensor([[M, 0, 0, 1], [M, M, M, M], [0, 0, 0, M], [0, 0, 1, 0], [1, 0, 0, 0], [0, M, 1, 0]] + cubics(3, 0)[0].T.tolist(), device=DEVICE).T
TOKENS = torch.tensor([0, 1, 2, 3, 1290, 1291, 46340, 46341, 65536, 2 ** 30 - 1, 2 ** 30, M - 2, M - 1, M, PRIME, 1234567890], device=DEVICE)


@pytest.mark.parametrize("by", range(BY.shape[1]))
def test_numbers_are_those_of_integers(poisoned, by):
    """Each token is its own head's only one, so that what is read is what its slot holds: its number; and each its own dimension."""
    place, sign, n, width = BY[:, by, None], BY[:, by - 1, None], len(TOKENS), 1009
    slots = torch.arange(1.0, width + 1, device=DEVICE).view(-1, 1).expand(1, n, width, 32)
    y, _ = revive_attention(torch.zeros(1, n, 1, 16, device=DEVICE), segment(n * [0], 16, torch.float32, 0), TOKENS.view(1, n, 1), slots, place, sign)
    at, = zip(*(where(J, 1, width, place, sign) for J in TOKENS))
    assert y[0, :, 0].tolist() == [16 * [s * (slot + 1)] for slot, s in at]
    for put in insert, plain_insert:
        x, one = torch.zeros(1, 1, width, 2 * n, device=DEVICE), torch.eye(n, device=DEVICE).view(1, 1, n, n)
        put(x, TOKENS.view(1, 1, n), one, one, one.new_ones(1, 1, n), place, sign)
        assert x.nonzero().shape[0] == 2 * n
        assert all(x[0, 0, slot, i] == 1 and x[0, 0, slot, n + i] == s for i, (slot, s) in enumerate(at))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("B, H, n, D, rows, width, signed, block", [
    (1, 1, 1, 16, 1, 1, False, 16), (3, 1, 63, 40, 3, 5, False, 32), (1, 2, 65, 80, 3, 16, True, 32), (2, 2, 48, 128, 1, 1, True, 16)])
def test_insert_adds_to_the_sketch(B, H, n, D, rows, width, signed, block, dtype):
    """Whole and half numbers, whose sums are exact in whatever order; a tile beyond them must not change what lies there."""
    g = torch.Generator().manual_seed(n)
    storage = torch.zeros(2 ** 15 + B * H * rows * width * 2 * D, dtype=dtype, device=DEVICE)
    x = storage[2 ** 14:-2 ** 14].view(B, H, rows * width, 2 * D)
    x.copy_(torch.randint(-9, 10, x.shape, generator=g))
    k, v = (amid_nan(torch.randint(-4, 5, (B, H, n, D), generator=g).to(dtype)) for _ in range(2))
    token = torch.randint(2 ** 31 - 1, (B, n, H), generator=g).to(DEVICE).int().mT
    times = torch.randint(-2, 4, (B, n, H), generator=g).to(DEVICE).mT / 2
    times[0, 0, 0] = 1.5
    (place, sign), expected, before = cubics(rows, n), x.double(), x.clone()
    for b, h, i in product(range(B), range(H), range(n)):
        for slot, s in where(token[b, h, i], rows, width, place, sign):
            kv = torch.cat((k[b, h, i] * (s if signed else 1), v[b, h, i] * s)).double()
            expected[b, h, slot] += times[b, h, i] * kv
    twin = x.clone()
    plain_insert(twin, token, k, v, times, place, sign, signed)
    assert torch.equal(twin.double(), expected)
    for b, h, i in (times == 0).nonzero():
        k[b, h, i] = v[b, h, i] = math.nan
    insert(x, token, *(y.transpose(1, 2).contiguous().transpose(1, 2) for y in (k, v)), times, place, sign, signed, block)
    assert torch.equal(x.double(), expected)
    insert(x, token, k, v, -times, place, sign, signed, block)
    assert torch.equal(x, before) and not storage[:2 ** 14].any() and not storage[-2 ** 14:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])  # nothing is calculated in bfloat16 here
def test_a_full_slot_takes_more_and_a_sum_is_rounded_once(dtype):
    """300 tokens a slot whose keys have a mean of 3: numbers near 900, of which float16 has every half and bfloat16 every fourth."""
    g, (place, sign), n, width = torch.Generator().manual_seed(0), cubics(3, 1), 600, 2
    k, v = (torch.randn(2, 1, 2, n, 16, generator=g) + 3).to(DEVICE, dtype)
    token, sketch = torch.arange(n, device=DEVICE).int().expand(1, 2, -1), Sketch(k, 3, width, "paper", 0)
    sketch.place_by, sketch.sign_by, truth = place, sign, torch.zeros(1, 2, 3 * width, 32, dtype=torch.float64, device=DEVICE)
    plain_insert(truth, token, k.double(), v.double(), k.new_ones(1, 2, n).double(), place, sign)
    assert truth.amax() > 850
    sums = [torch.zeros_like(sketch.x) for _ in range(2)]
    for put, x in zip((insert, plain_insert), sums):
        put(x, token, k, v, k.new_ones(1, 2, n), place, sign)
    sketch.insert(token, k, v)
    for x in (*sums, sketch.x):
        assert x.dtype == dtype and torch.allclose(x.double(), truth, rtol=torch.finfo(dtype).eps / 2, atol=1e-3)


def test_what_does_not_fit_is_refused():
    x, _ = inputs(1, 2, 1, 16, [1, 0], 4, 3, 4, True, None)
    q, exact, token, x, place, sign = x
    for wrong in ((x[:, :, :11], place), (x[..., :16], place), (x[:, :1], place), (x.half(), place), (x, place[:, :2])):
        with pytest.raises(ValueError, match=r"must be 1 or 3 rows, here [23], of as many slots of .* for \(1, 2\) heads, 2 × 16 numbers"):
            revive_attention(q, exact, token, wrong[0], wrong[1], sign)
    k, before = torch.ones(1, 2, 4, 16, device=DEVICE), x.clone()
    for wrong in x[:, :, :11].contiguous(), x[..., :16].contiguous(), x.transpose(1, 2).contiguous().transpose(1, 2):
        with pytest.raises(ValueError, match="must be contiguous, 3 rows of as many slots of 2 × 16 numbers"):
            insert(wrong, token, k, k, k[..., 0], place, sign)
    insert(x, token[:, :, :0], k[:, :, :0], k[:, :, :0], k[:, :, :0, 0], place, sign)
    assert torch.equal(x, before)
    for wrong in (dict(token=token[:, :1]), dict(sign=sign[:, :1]), dict(mean=torch.zeros(1, 2, 16, device=DEVICE))):
        with pytest.raises(ValueError, match=r"must be those of \(1, 2\) heads, place"):
            revive_attention(**dict(q=q, exact=exact, token=token, x=x, place=place, sign=sign) | wrong)
    with pytest.raises(ValueError, match="starts and"):
        revive_attention(q, exact._replace(start=exact.start[:1]), token, x, place, sign)
    for wrong in ((token, k, k[:, :, :3], k[..., 0]), (token, k, k, k[:, :, :3, 0]), (token[:, :, :3], k, k, k[..., 0])):
        with pytest.raises(ValueError, match="must be those of [34] tokens"):
            insert(x, *wrong, place, sign)
