"""Attention of one new token over heads of different length: the kernel and its plain twin against a loop, in float64."""
from itertools import product
import math
import os
import subprocess
import sys

import pytest
import torch

from conftest import DEVICE

pytest.importorskip("triton")  # Linux only

from kernels.decode_attention import Segment, decode_attention, plain  # noqa: E402
from nanollm.cache import NEVER, LayerCache  # noqa: E402

TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=2e-6), torch.float16: dict(rtol=2e-3, atol=2e-3)}
if DEVICE == "cuda":  # the interpreter gets it wrong
    TOLERANCE[torch.bfloat16] = dict(rtol=16e-3, atol=16e-3)  # 3 bits less


def by_hand(q, segments):
    """One query head at a time: y (B, H, G, D), and the weight of every slot; slots of nobody have 0."""
    y, weights = torch.zeros(q.shape, dtype=torch.float64), [torch.zeros(len(s.k), dtype=torch.float64) for s in segments]
    B, H, G, D = q.shape
    q, segments = q.cpu(), [Segment(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in s)) for s in segments]
    for b, h, g in product(range(B), range(H), range(G)):
        slots = [(i, n) for i, s in enumerate(segments) for n in range(s.start[b * H + h], s.start[b * H + h] + s.count[b * H + h])]
        score = [(q[b, h, g].double() @ segments[i].k[n].double()).item() / math.sqrt(D)
                 + (0 if segments[i].bias is None else segments[i].bias[n].item()) for i, n in slots]
        most = max(score, default=0)
        total = sum(math.exp(x - most) for x in score)
        for (i, n), x in zip(slots, score):
            p = math.exp(x - most) / total
            weights[i][n] += p
            y[b, h, g] += p * segments[i].v[n].double()
    return y.to(DEVICE), [weight.to(DEVICE) for weight in weights]


def segment(counts, D, dtype, seed, bias=False, gap=1):
    """Heads one after the other, in another order than theirs, with `gap` rows of NaN around each, which nobody may read."""
    g = torch.Generator().manual_seed(seed)
    start, at = torch.zeros(len(counts), dtype=torch.int64), gap
    for i in torch.randperm(len(counts), generator=g).tolist():
        start[i], at = at, at + counts[i] + gap
    k, v = torch.full((2, at, D), math.nan, dtype=dtype)
    b = torch.full((at,), math.nan) if bias else None
    for i, n in enumerate(counts):
        rows = slice(start[i], start[i] + n)
        k[rows], v[rows] = torch.randn(2, n, D, generator=g).to(dtype)
        if bias:
            b[rows] = torch.randn(n, generator=g)
    k, v, start, count = (x.to(DEVICE) for x in (k, v, start, torch.tensor(counts, dtype=torch.int32)))
    return Segment(k, v, start, count, max(counts), b if b is None else b.to(DEVICE))


CASES = [  # B, H, G, D, counts of the B·H heads, of a second segment, biased, tile
    (1, 1, 1, 16, [1], None, False, 16),
    (1, 2, 1, 32, [63, 65], None, False, 16),
    (1, 1, 4, 128, [130], None, True, 16),                      # 9 tiles in several parts
    (3, 2, 2, 64, [0, 1, 63, 64, 65, 2], None, False, 32),
    (3, 1, 3, 40, [5, 0, 33], [2, 2, 2], True, 16),             # a head dim and a group that are no powers of 2
    (1, 2, 4, 80, [65, 0], [1, 0], False, 64),                  # a head with nothing at all
    (2, 1, 8, 16, [17, 16], [3, 40], True, 16),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernel_and_twin_are_the_loop(poisoned, case, dtype):
    B, H, G, D, counts, more, biased, block = CASES[case]
    segments = [segment(counts, D, dtype, case, biased)] + ([segment(more, D, dtype, 50 + case)] if more else [])
    q = torch.randn(B, H, G, D, generator=torch.Generator().manual_seed(99 + case)).to(DEVICE, dtype)
    y, weights = by_hand(q, segments)
    for found, sums in (plain(q, segments, sums=True), decode_attention(q, segments, sums=True, block=block)):
        assert found.dtype == dtype and torch.allclose(found.double(), y, **TOLERANCE[dtype])
        assert len(sums) == len(segments)
        for mine, expected in zip(sums, weights):
            assert mine.dtype == torch.float32
            assert torch.allclose(mine.double(), expected, rtol=1e-4, atol=max(1e-5, TOLERANCE[dtype]["atol"]))
    alone, none = decode_attention(q, segments, block=block)
    assert torch.equal(alone, found) and none == [] == plain(q, segments)[1]


def test_many_parts_are_added_up_as_one(poisoned):
    """One head alone: its slots are split among programs. Scores of hundreds overflow unless the largest so far is taken off."""
    s = segment([700], 32, torch.float32, 3)
    q = 100 * torch.randn(1, 1, 2, 32, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    y, (weight,) = by_hand(q, [s])
    assert (q[0, 0] @ s.k[1:701].T / math.sqrt(32)).max() > 89
    for block in (16, 64, 1024 if DEVICE == "cpu" else 256):  # a GPU has no room for more
        found, (sums,) = decode_attention(q, [s], sums=True, block=block)
        assert torch.allclose(found.double(), y, rtol=1e-4, atol=1e-5) and torch.allclose(sums.double(), weight, atol=1e-5)
        assert abs(sums.sum().item() - 2) < 1e-4


def test_slots_with_a_bias_of_minus_infinity_are_hidden(poisoned):
    """The first tile of one head, and all slots of another, which gives 0 as if it had none."""
    s, q = segment([40, 20, 5], 16, torch.float32, 6, bias=True), torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    hidden = [*range(s.start[0], s.start[0] + 17), *range(s.start[1], s.start[1] + 20), s.start[2] + 4]
    s.bias[hidden] = -math.inf
    left = s._replace(start=s.start.cpu() + torch.tensor([17, 0, 0]), count=torch.tensor([23, 0, 4], dtype=torch.int32))
    y, (weight,) = by_hand(q, [left])
    for block in (16, 64):  # in a part of its own, or in one with others
        found, (sums,) = decode_attention(q, [s], sums=True, block=block)
        assert torch.allclose(found.double(), y, **TOLERANCE[torch.float32]) and not found[0, 1].any()
        assert torch.allclose(sums.double(), weight, rtol=1e-4, atol=1e-5) and not sums[hidden].any()


def test_the_layout_of_a_packed_cache_is_two_segments():
    """What AdaKV leaves: heads of different length one after the other, and new tokens in a buffer with room to spare."""
    B, H, G, D, g = 2, 2, 2, 16, torch.Generator().manual_seed(7)
    cache = LayerCache()
    cache.write(*torch.randn(2, B, H, 20, D, generator=g).to(DEVICE), torch.arange(20, device=DEVICE)[None])
    cache.keep(torch.tensor([[[0, 3, 7, 19], [4, 5, -1, -1]], [[1, -1, -1, -1], [2, 6, 9, -1]]], device=DEVICE))
    cache.pack()
    for t in range(20, 23):
        cache.write(*torch.randn(2, B, H, 1, D, generator=g).to(DEVICE), torch.tensor([[t]], device=DEVICE))
    new = cache.length - cache.behind
    counts, capacity = cache.counts.flatten().int(), cache.slots["k"].shape[2]
    segments = [Segment(cache.packed["k"], cache.packed["v"], (counts.cumsum(0) - counts).long(), counts, cache.behind),
                Segment(*(cache.slots[name].flatten(0, 2) for name in "kv"), torch.arange(B * H, device=DEVICE) * capacity,
                        torch.full((B * H,), new, dtype=torch.int32, device=DEVICE), new)]
    q = torch.randn(B, H, G, D, generator=g).to(DEVICE)
    k, v, at, _ = cache.read()
    score = (q @ k.mT / math.sqrt(D)).masked_fill((at == NEVER).unsqueeze(2), -math.inf)
    assert torch.allclose(decode_attention(q, segments)[0], score.softmax(-1) @ v, rtol=1e-5, atol=1e-6)


def test_storage_that_does_not_fit_the_queries_is_refused():
    s, q = segment([3, 4], 16, torch.float32, 0), torch.zeros(1, 2, 1, 16, device=DEVICE)
    for wrong in (s._replace(k=s.k.T.contiguous().T), s._replace(v=s.v[:, :8].contiguous()), segment([3, 4], 32, torch.float32, 0)):
        with pytest.raises(ValueError, match="must be contiguous rows of the head dim 16"):
            decode_attention(q, [wrong])
    with pytest.raises(ValueError, match="3 starts and 3 counts for 2 heads"):
        decode_attention(q, [segment([3, 4, 5], 16, torch.float32, 0)])


def test_every_kernel_compiles_for_an_h100_without_spills():
    """In another process, since this one's kernels are the interpreter's."""
    told = subprocess.run([sys.executable, "-m", "kernels.resources"], capture_output=True, text=True, check=True,
                          cwd=os.path.dirname(os.path.dirname(__file__)))
    rows = [line.split() for line in told.stdout.splitlines() if "." in line.split()[0]]
    assert {row[0] for row in rows} >= {"decode_attention.attend", "decode_attention.add_up", "decode_attention.column_sums", "value_norms.norms",
                                     "window_votes.row_sums", "window_votes.column_means", "tensor_attention.rows_of_pairs",
                                     "revive_attention.attend_revived", "revive_attention.add"}
    for name, number, registers, stack, shared in rows:
        assert int(stack) == 0, name
    readme = open(os.path.join(os.path.dirname(os.path.dirname(__file__)), "README.md")).read()
    most = f"at most {max(int(row[2]) for row in rows)} registers a thread and {max(int(row[4]) for row in rows) // 1024} KiB of shared memory"
    assert most in readme, most
