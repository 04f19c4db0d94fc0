"""Attention over tokens revived from a sketch, and the insert: kernels and twins against loops with Python's
integers, in float64. test_kernels.py holds them against KVReviver's sketches.
"""
from itertools import product
import math

import pytest
import torch

from common import DEVICE, TOLERANCE, amid_nan, attended, segment

pytest.importorskip("triton")  # Linux only

from kernels import revive_attention as module
from kernels.revive_attention import Segment, insert, plain, plain_insert, revive_attention
from methods.count_sketch import PRIME, Sketch


def where(J, rows, width, place, sign):
    """Slot and sign of a token in every row, by the cubics by[0]·J³ + … + by[3] modulo 2³¹ − 1."""
    slot, minus = ([sum(int(c) * int(J) ** (3 - i) for i, c in enumerate(by[:, row])) % (2 ** 31 - 1)
                    for row in range(rows)] for by in (place, sign))
    return [(row * width + n % width, (-1) ** m) for row, (n, m) in enumerate(zip(slot, minus))]


def by_hand(q, exact, token, x, place, sign, mean=None, shrink=1.0, signed_keys=False):
    """One token at a time, in float64: y (B, H, G, D), and the weights of exact slots and of vague tokens."""
    (B, H, _, D), rows, a = q.shape, place.shape[1], token.shape[2]
    told = torch.zeros(B, H, a, 2 * D, dtype=torch.float64, device=DEVICE)
    for b, h, i in product(range(B), range(H), range(a)):
        found = [x[b, h, slot] * torch.tensor(D * [s if signed_keys else 1] + D * [s], device=DEVICE)
                 for slot, s in where(token[b, h, i], rows, x.shape[2] // rows, place, sign)]
        told[b, h, i] = torch.stack(found).sort(0).values[rows // 2]
    if mean is not None:
        told = mean.double().unsqueeze(2) + shrink * told
    count = torch.full((B * H,), a, device=DEVICE)
    revived = Segment(*told.flatten(0, 2).chunk(2, -1), torch.arange(B * H, device=DEVICE) * a, count, a)
    y, (slots, vague) = attended(q, [exact, revived])
    return y, [slots, vague.view(B, H, a)]


def cubics(rows, seed):
    return torch.randint(PRIME, (2, 4, rows), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def inputs(B, H, G, D, counts, a, rows, width, signed, shrink, dtype=torch.float32, seed=0, bias=False):
    g = torch.Generator().manual_seed(seed)
    q, x, mean = (amid_nan(torch.randn(B, H, *size, generator=g).to(dtype))
                  for size in ((G, D), (rows * width, 2 * D), (2 * D,)))
    token = torch.stack([torch.randperm(500, generator=g)[:a] for _ in range(B * H)]).view(B, H, a)
    token[..., ::5] = 2 ** 31 - 2 - token[..., ::5]
    how = dict(signed_keys=signed) | (dict() if shrink is None else dict(mean=mean, shrink=shrink))
    return (q, segment(counts, D, dtype, seed, bias), token.int().to(DEVICE), x, *cubics(rows, seed)), how


# B, H, G, D, exact slots by head, vague tokens, rows, slots of a row, signed keys, shrink (or None), tile
CASES = [(1, 1, 1, 16, [3], 1, 1, 5, False, None, 16),
         (1, 2, 2, 128, [0, 5], 17, 3, 7, False, None, 16),     # paper
         (1, 1, 3, 40, [17], 20, 3, 16, True, None, 16),        # no powers of 2
         (1, 2, 2, 80, [17, 0], 25, 1, 9, True, 0.3, 16),       # shrunk
         (1, 1, 4, 32, [0], 16, 3, 1, False, 0.9, 64),          # all tokens in one slot of each row
         (1, 2, 2, 16, [3, 0], 0, 3, 4, True, 0.5, 16)]         # no vague token, and an empty head


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernel_and_twin_are_the_loop(poisoned, case, dtype):
    *sizes, block = CASES[case]
    x, how = inputs(*sizes, dtype, case, bias=case == 3)
    y, weights = by_hand(*x, **how)
    for found, sums in plain(*x, **how, sums=True), revive_attention(*x, **how, sums=True, block=block):
        assert found.dtype == dtype and torch.allclose(found.double(), y, **TOLERANCE[dtype])
        for mine, expected in zip(sums, weights, strict=True):
            assert mine.dtype == torch.float32 and mine.shape == expected.shape
            atol = max(1e-5, TOLERANCE[dtype]["atol"])
            assert torch.allclose(mine.double(), expected, rtol=1e-4, atol=atol)
    alone, none = revive_attention(*x, **how, block=block)
    assert torch.equal(alone, found) and none == [] == plain(*x, **how)[1]


@pytest.mark.parametrize("split", [lambda n, block, *_: (block, max(1, -(-n // block))), lambda *_: (512, 1)])
def test_many_parts_and_large_scores(poisoned, monkeypatch, split):
    """Scores of hundreds, which overflow if the largest is not taken off; a tile a program, or all in one."""
    (q, *x), how = inputs(1, 1, 1, 16, [20], 100, 1, 70, False, None)
    monkeypatch.setattr(module, "split", split)
    y, weights = by_hand(200 * q, *x, **how)
    found, sums = revive_attention(200 * q, *x, **how, sums=True, block=16)
    assert torch.allclose(found.double(), y, rtol=1e-4, atol=1e-5)
    for mine, expected in zip(sums, weights):
        assert torch.allclose(mine.double(), expected, rtol=1e-4, atol=1e-5)


M = PRIME - 1
BY = [[M, 0, 0, 1], [M, M, M, M], [0, 0, 1, 0], [1, 0, 0, 0], *cubics(1, 0)[0].T.tolist()]
TOKENS = [0, 1, 2, 1290, 1291, 46340, 46341, 65536, 2 ** 30 - 1, 2 ** 30, M - 2, M - 1, M, PRIME, 1234567890]


@pytest.mark.parametrize("by", range(len(BY)))
def test_numbers_are_those_of_integers(poisoned, by):
    """Each token is its own head's only one and has its own dimension, so that its slot tells its number."""
    BYS, token = torch.tensor(BY, device=DEVICE).T, torch.tensor(TOKENS, device=DEVICE)
    place, sign, n, width = BYS[:, by, None], BYS[:, by - 1, None], len(token), 1009
    exact, q = segment(n * [0], 16, torch.float32, 0), torch.zeros(1, n, 1, 16, device=DEVICE)
    x = torch.arange(1.0, width + 1, device=DEVICE).view(-1, 1).expand(1, n, width, 32)
    y, _ = revive_attention(q, exact, token.view(1, n, 1), x, place, sign)
    at, = zip(*(where(J, 1, width, place, sign) for J in token))
    assert y[0, :, 0].tolist() == [16 * [s * (slot + 1)] for slot, s in at]
    for put in insert, plain_insert:
        x, one = torch.zeros(1, 1, width, 2 * n, device=DEVICE), torch.eye(n, device=DEVICE).view(1, 1, n, n)
        put(x, token.view(1, 1, n), one, one, one.new_ones(1, 1, n), place, sign)
        assert x.nonzero().shape[0] == 2 * n
        assert all(x[0, 0, slot, i] == 1 and x[0, 0, slot, n + i] == s for i, (slot, s) in enumerate(at))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("B, H, n, D, rows, width, signed, block", [
    (1, 1, 1, 16, 1, 1, False, 16), (2, 1, 17, 40, 3, 5, False, 16), (1, 2, 33, 24, 3, 16, True, 32)])
def test_insert_adds_to_the_sketch(B, H, n, D, rows, width, signed, block, dtype):
    """Whole and half numbers, whose sums are exact in whatever order; what lies beyond must not change."""
    g, size = torch.Generator().manual_seed(n), B * H * rows * width * 2 * D
    storage = torch.zeros(2 ** 15 + size, dtype=dtype, device=DEVICE)
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
    turned = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (k, v))
    insert(x, token, *turned, times, place, sign, signed, block)
    assert torch.equal(x.double(), expected)
    insert(x, token, k, v, -times, place, sign, signed, block)
    assert torch.equal(x, before) and not storage[:2 ** 14].any() and not storage[-2 ** 14:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])  # nothing is calculated in bfloat16 here
def test_a_full_slot_takes_more_and_a_sum_is_rounded_once(dtype):
    """300 tokens a slot whose keys have a mean of 3: numbers near 900, of which bfloat16 has every fourth."""
    g, n = torch.Generator().manual_seed(0), 600
    k, v = (torch.randn(2, 1, 1, n, 4, generator=g) + 3).to(DEVICE, dtype)
    token, sketch = torch.arange(n, device=DEVICE).int().expand(1, 1, -1), Sketch(k, 1, 2, 0)
    truth, ones = torch.zeros(1, 1, 2, 8).double().to(DEVICE), k.new_ones(1, 1, n)
    by = sketch.bucket_by, sketch.sign_by
    plain_insert(truth, token, k.double(), v.double(), ones.double(), *by)
    sums = [torch.zeros_like(sketch.x) for _ in range(2)]
    for put, x in zip((insert, plain_insert), sums):
        put(x, token, k, v, ones, *by)
    sketch.insert(token, k, v)
    for x in (*sums, sketch.x):
        rounding = torch.finfo(dtype).eps / 2
        assert truth.amax() > 850 and torch.allclose(x.double(), truth, rtol=rounding, atol=1e-3)


def test_what_does_not_fit_is_refused():
    (q, exact, token, x, place, sign), _ = inputs(1, 2, 1, 16, [1, 0], 4, 3, 4, True, None)
    k = torch.ones(1, 2, 4, 16, device=DEVICE)
    right = dict(q=q, exact=exact, token=token, x=x, place=place, sign=sign)
    for wrong in (dict(x=x[:, :, :11]), dict(x=x.half()), dict(place=place[:, :2]), dict(token=token[:, :1]),
                  dict(mean=k[:, :, 0]), dict(exact=exact._replace(start=exact.start[:1]))):
        with pytest.raises(ValueError, match="must be|give one each"):
            revive_attention(**right | wrong)

    right = dict(x=x, token=token, k=k, v=k, times=k[..., 0], place=place, sign=sign)
    for wrong in (dict(x=x[:, :, :11].contiguous()), dict(x=x[..., :16].contiguous()),
                  dict(x=x.mT.contiguous().mT), dict(v=k[:, :, :3]), dict(times=k[:, :, :3, 0])):
        with pytest.raises(ValueError, match="must be"):
            insert(**right | wrong)
