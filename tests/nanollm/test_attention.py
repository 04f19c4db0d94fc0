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
    bias = torch.randn(2, 2, stop) if biased else torch.zeros(2, 2, stop)
    seen = (pos <= pos[start:, None])[None, None]
    expected = dense(q, k, v, seen, bias[:, :, None])
    identity = torch.eye(stop).expand(2, 2, -1, -1)  # as values it shows the weights
    weights = dense(q, k, identity, seen, bias[:, :, None]).unflatten(1, (H, -1))

    masks = [visible(pos.view(1, 1, -1), bias, pos[None, start:])]
    if not biased:
        masks.append(visible(pos.view(1, 1, -1), None, pos[None, start:]))
        masks += ["causal"] * (T == stop) + [None] * (T == 1)
    for mask in masks:
        y, p = attention(q, k, v, mask, watch)
        assert torch.allclose(y, expected, atol=1e-5)
        w = min(watch, T)
        assert (p is None) == (w == 0)
        if w:
            assert p.shape == (2, 2, groups, w, stop)
            assert torch.allclose(p, weights[..., -w:, :], rtol=1e-5, atol=1e-7)
            # the first watched query sees nothing newer
            assert (p[..., 0, stop - w + 1 :] == 0).all()


def test_16_bits_are_widened():
    """A product of 300 · 300 exceeds float16; the probabilities have 32 bits and add up to 1."""
    q = torch.full((1, H * G, 1, D), 300.0).half()
    k = torch.full((1, H, 5, D), 300.0).half()
    p = probabilities(q, k)
    assert p.dtype == torch.float32
    assert torch.allclose(p, torch.full_like(p, 0.2))
