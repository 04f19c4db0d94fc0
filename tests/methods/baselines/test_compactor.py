"""Compactor keeps what its equations, with whole matrices, say, however the prompt is cut."""

import pytest
import torch

from common import FREQ, H, alone, end, feed, turn
from loops import PROMPT, text
from methods.baselines.compactor import Compactor


def equations(q, k, v, raw):
    """Return the scores (H, n) of a text's entries in chunks of 8; raw: keys before rotation."""
    outlier = torch.zeros_like(v[..., 0])
    looked = torch.zeros_like(outlier)
    i = torch.arange(v.shape[1])
    j = i[:, None]
    together = i // 8 == j // 8
    near = ((i - j).abs() <= 1).double()
    for h, queries in enumerate(q.split(3)):
        x = raw[h] - raw[h].mean(0)
        inverse = (x.T @ x).inverse()
        outlier[h] = (x @ inverse @ x.T).diag()
        dots = queries @ k[h].T
        dots[:, ~together] = -torch.inf
        p = dots.softmax(-1)
        weight = p.sum((0, 1)) * v[h].norm(dim=1)
        looked[h] = near @ weight
    outlier /= outlier.std()
    looked /= looked.std()
    return (1 - 14 / PROMPT) * outlier + looked


@pytest.mark.parametrize("cut", [PROMPT, 7, 1])
def test_kept_tokens_equal_the_equations_and_later_ones_are_appended(cut):
    q, k, v = text()
    v = v.clone()
    v[:, 1] *= 10  # the deviation is that of a layer, not of a head
    pos = torch.arange(42)
    turned = turn(q, pos), turn(k, pos), v
    layer = alone(Compactor(14, sinks=3, recent=2, piece=8), freq=FREQ)
    feed(layer, turned, PROMPT, cut)
    end(layer)
    feed(layer, turned)
    score = equations(*(x[1, :, 3:28].double() for x in (*turned, k)))
    for h in range(H):
        best = score[h].topk(9).indices + 3
        stays = [
            *range(3),
            *range(28, 42),
            *best.tolist(),
        ]
        assert sorted(layer.pos[1, h].tolist()) == sorted(stays)
