"""Attention and its observed probabilities by definition, for every kind of mask."""

import pytest
import torch

from common import D, G, H, dense
from nanollm.attention import attention, probabilities, visible
from nanollm.cache import ALL
from stores import draw


@pytest.mark.parametrize("watch", [0, 1, 3, ALL])
@pytest.mark.parametrize("start, stop", [(0, 11), (5, 6), (6, 11)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_output_and_watched_weights_are_those_of_causal_attention(
    watch, start, stop, biased, groups
):
    """The queries are tokens start … stop − 1 of a text, and see the tokens up to themselves."""
    q, k, v = draw(stop, groups=groups)
    q = q[:, :, start:]
    T = stop - start
    pos = torch.arange(stop)
    bias = torch.randn(2, 2, stop) * biased
    slot_pos = pos.view(1, 1, -1)
    new = pos[None, start:]
    masks = [visible(slot_pos, bias, new)]
    if not biased:
        masks.append(visible(slot_pos, None, new))
        masks += ["causal"] * (T == stop)
        masks += [None] * (T == 1)

    seen = pos <= pos[start:, None]
    seen = seen[None, None]
    more = bias.unsqueeze(2)
    expected = dense(q, k, v, seen, more)
    identity = torch.eye(stop).expand(2, 2, -1, -1)  # as values it shows the weights
    weights = dense(q, k, identity, seen, more)
    weights = weights.unflatten(1, (H, -1))
    w = min(watch, T)
    for mask in masks:
        y, p = attention(q, k, v, mask, watch)
        assert torch.allclose(y, expected, atol=1e-5)
        assert (p is None) == (w == 0)
        if w:
            assert p.shape == (2, 2, groups, w, stop)
            late = weights[..., -w:, :]
            assert torch.allclose(p, late, rtol=1e-5, atol=1e-7)
            # the first watched query sees nothing newer
            newer = p[..., 0, stop - w + 1 :]
            assert (newer == 0).all()


def test_16_bits_are_widened():
    """A product of 300 · 300 exceeds float16; the probabilities have 32 bits and add up to 1."""
    q = torch.full((1, H * G, 1, D), 300.0).half()
    k = torch.full((1, H, 5, D), 300.0).half()
    p = probabilities(q, k)
    assert p.dtype == torch.float32
    assert torch.allclose(p, torch.full_like(p, 0.2))
