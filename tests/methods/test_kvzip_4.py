"""Check eviction with few bits: the method's entries, rounded as in KIVI, and their bytes."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from common import B, D, G, H, dense, end, feed, link
from methods.baselines.ada_kv import AdaKV
from methods.baselines.snap_kv import SnapKV
from methods.ours.kvzip_4 import GROUP, Rounded, RoundedKVzip
from nanollm.cache import NEVER

n, NEW = 90, 3
g = torch.Generator().manual_seed(4)
Q, K, V = (
    torch.randn(B, heads, n + NEW, D, generator=g) * 3 for heads in (H * G, H, H)
)


@dataclass(eq=False)
class RoundedAda(Rounded, AdaKV):
    pass


@dataclass(eq=False)
class RoundedWindow(Rounded, SnapKV):
    pass


def fed(Method, **options):
    cache = Method(budget=50, window_size=8, **options)
    link(cache, w_o=torch.zeros(4, H * G, D))
    feed(cache, *(x[:, :, :n] for x in (Q, K, V)))
    end(cache)
    return cache, feed(cache, *(x[:, :, n:] for x in (Q, K, V)), chunk=1, first=n)


def grid(x, bits):
    """Round a list of numbers to 2^bits even levels between its smallest and its largest."""
    low, high = torch.tensor(min(x)).half().item(), max(x)
    step = torch.tensor((high - low) / (2**bits - 1)).half().item()
    return [
        low + step * min(max(round((y - low) / step), 0), 2**bits - 1) if step else low
        for y in x
    ]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    "Method, exact", [(RoundedWindow, SnapKV), (RoundedAda, AdaKV)]
)
def test_entries_are_those_of_the_method_rounded_by_loops(Method, exact, bits):
    (cache, y), (other, _) = fed(Method, bits=bits), fed(exact)
    assert torch.equal(cache.pos, other.pos)
    k, v, codes = torch.zeros(B, H, n + NEW, D), torch.zeros(B, H, n + NEW, D), 0
    kept_mask = torch.zeros(B, H, n + NEW, dtype=torch.bool)
    for b, h in product(range(B), range(H)):
        kept = [i for i in other.pos[b, h].tolist() if i < n]
        codes += len(kept)
        for i in range(0, len(kept), GROUP):
            group = kept[i : i + GROUP]
            for d in range(D):
                k[b, h, group, d] = torch.tensor(grid(K[b, h, group, d].tolist(), bits))
        for i in kept:
            v[b, h, i] = torch.tensor(grid(V[b, h, i].tolist(), bits))
        kept_mask[b, h, kept] = True
    k[:, :, n:], v[:, :, n:], kept_mask[:, :, n:] = K[:, :, n:], V[:, :, n:], True
    visible = torch.ones(n + NEW, n + NEW).tril().bool()[n:] & kept_mask[:, :, None]
    # a number halfway between two levels may be rounded to either
    torch.testing.assert_close(
        y, dense(Q[:, :, n:], k, v, visible), atol=2e-2 if bits == 2 else 5e-3, rtol=0
    )

    groups = sum(
        -(-int((row != NEVER).sum() - NEW) // GROUP) for row in cache.pos.flatten(0, 1)
    )
    # an entry's codes, 4 bytes for its value's range and 4 for its position; a group's key ranges
    rounded = codes * (2 * D * bits // 8 + 4 + 4) + groups * D * 4 + 8 * B * H
    live, allocated = cache.bytes()
    assert (
        live == rounded + B * H * NEW * (2 * D * 4 + 4)
        and live <= allocated
        and live < other.bytes()[0]
    )


def test_16_bits_are_the_method_itself():
    (cache, y), (other, expected) = fed(RoundedWindow, bits=16), fed(SnapKV)
    assert torch.equal(y, expected) and cache.bytes() == other.bytes()


@pytest.mark.parametrize("bits", [0, 9])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits {bits} must be"):
        RoundedKVzip(budget=20, bits=bits)
