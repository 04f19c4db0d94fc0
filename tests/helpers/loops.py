"""Compare what a method keeps with a loop written from its paper; check its sums of attention."""

import pytest
import torch

from common import SLOT, B, D, G, H, alone, end, feed, once

PROMPT = 30
LATER = (1, 1, 1, 1, 1, 1, 5, 1)
CUTS = {
    "whole": (PROMPT, *LATER),
    "pieces": (12, 1, 10, 4, 2, 1, *LATER),
}
each_cut = pytest.mark.parametrize("cut", CUTS)


@once
def text(T=42):
    """Return q (B, H·G, T, D), k and v (B, H, T, D)."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H)]


def parts_of(cut) -> list[range]:
    """Return the tokens of each part."""
    parts = []
    start = 0
    for n in CUTS[cut]:
        parts.append(range(start, start + n))
        start += n
    return parts


def check_kept(cut, method, loop, own=0, twice=0):
    """Compare kept positions and bytes after each part with the loop's.

    loop(q, k, parts, **options) yields the positions that stay, [b][h], after each part. own: bytes
    of the method's numbers for an entry. twice: keys that are stored twice once tokens have left.
    """
    q, k, _ = text()
    parts = parts_of(cut)
    layer = alone(method, freq=torch.ones(D // 2))
    for part, kept in zip(parts, loop(q, k, parts, **vars(method)), strict=True):
        left = layer.seen - layer.length  # tokens that had left before this part
        feed(layer, text(), len(part))
        if part.stop == PROMPT:
            end(layer)
        assert layer.pos.sort(-1).values.tolist() == kept, part
        n = len(kept[0][0])
        slot = SLOT + own
        beside = twice * D * 4 if left else 0
        live, allocated = layer.bytes()
        assert live == B * H * (n * slot + beside)
        most = 1.1 * (n + len(part)) * slot + beside
        assert allocated <= B * H * most


def check_sums(method, sums, chunk):
    """Check that attention is added up in 32 bits if keys and values have 16.

    In 16 bits large sums would stop growing. sums(layer) returns those of a method, (B, H, S).
    """
    T = 300
    g = torch.Generator().manual_seed(0)
    q, k, v = [
        torch.randn(B, heads, T, D, generator=g).bfloat16() for heads in (H * G, H, H)
    ]
    k[:, :, 0] = 4 * q[:, ::G].mean(2)
    expected = torch.zeros(B, H, T, dtype=torch.float64)
    observe = method.observe

    def recorded(layer, q, p):
        expected[..., : p.shape[-1]] += p.double().sum((2, 3))
        observe(layer, q, p)

    method.observe = recorded
    layer = alone(method)
    feed(layer, (q, k, v), chunk=chunk)
    found = sums(layer)[..., :T].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert layer.k.dtype == torch.bfloat16
