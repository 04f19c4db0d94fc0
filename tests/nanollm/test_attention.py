"""Attention and its observed probabilities by definition, for every kind of mask."""

import math

import pytest
import torch

from common import D, G, H, dense
from nanollm.attention import attention, probabilities, visible, wide
from nanollm.cache import ALL
from stores import draw


def weights(q, k, seen, bias):
    """Return the probabilities (B, H, G, T, S) by definition."""
    score = q.unflatten(1, (H, -1)) @ k.mT.unsqueeze(2) / math.sqrt(D) + bias
    return score.masked_fill(~seen, -math.inf).softmax(-1)


@pytest.mark.parametrize("watch", [0, 1, 3, ALL])
@pytest.mark.parametrize("start, stop", [(0, 11), (5, 6), (6, 11)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_output_and_watched_weights_are_those_of_causal_attention(
    watch, start, stop, biased, groups
):
    """The queries are tokens start … stop − 1 of a text, and see the tokens up to themselves."""
    q, k, v = draw(11, groups=groups)
    q = q[:, :, start:stop]
    k = k[:, :, :stop]
    v = v[:, :, :stop]
    T = stop - start
    token = torch.arange(stop)
    seen = token <= token[start:, None]
    bias = torch.randn(2, 2, stop) if biased else None
    more = bias[:, :, None] if biased else 0.0
    masks = [visible(token.view(1, 1, -1), bias, token[None, start:])]
    if not biased:
        masks += ["causal"] * (T == stop) + [None] * (T == 1)
    right = weights(q, k, seen, more.unsqueeze(2) if biased else 0.0)
    for mask in masks:
        y, p = attention(q, k, v, mask, watch)
        assert torch.allclose(y, dense(q, k, v, seen[None, None], more), atol=1e-5)
        w = min(watch, T)
        assert (p is None) == (w == 0)
        if w:
            assert p.shape == (2, 2, groups, w, stop)
            assert torch.allclose(p, right[..., T - w :, :], rtol=1e-5, atol=1e-7)
            # the first watched query sees nothing newer
            assert (p[..., 0, stop - w + 1 :] == 0).all()


def test_heads_may_see_other_slots():
    q, k, v = draw(4)
    pos = torch.tensor([[[0, 1, 2, 3], [3, 1, 9, 0]], [[5, 0, 1, 2], [0, 0, 0, 0]]])
    mask = visible(pos, None, torch.arange(4)[None])
    seen = pos[:, :, None] <= torch.arange(4)[:, None]
    assert torch.equal(mask, seen)
    y, _ = attention(q[:, :, 3:], k, v, mask[:, :, 3:], 0)
    assert torch.allclose(y, dense(q[:, :, 3:], k, v, seen[:, :, 3:]), atol=1e-5)


def test_16_bits_are_widened():
    """A product of 300 · 300 exceeds float16; the probabilities have 32 bits and add up to 1."""
    q = torch.full((1, H * G, 1, D), 300.0).half()
    k = torch.full((1, H, 5, D), 300.0).half()
    p = probabilities(q, k)
    assert p.dtype == torch.float32
    assert torch.allclose(p, torch.full_like(p, 0.2))
    assert wide(q.double()).dtype == torch.float64
