"""H2O keeps what a loop written from Algorithm 1 keeps."""

import math

import pytest

from common import B, D, G, H
from loops import PROMPT, check_kept, check_sums, each_cut
from methods.baselines.h2o import H2O


def heavy_hitters(q, k, parts, budget, recent):
    """F adds up attention; the token with the least F outside the recent ones is evicted."""
    F = [[{} for _ in range(H)] for _ in range(B)]
    newest = max(1, round(recent * budget))
    for part in parts:
        for b in range(B):
            for h in range(H):
                score = F[b][h]
                score |= dict.fromkeys(part, 0.0)
                for t in part:
                    seen = [i for i in score if i <= t]
                    for g in range(G):
                        logits = k[b, h, seen] @ q[b, h * G + g, t] / math.sqrt(D)
                        for i, weight in zip(seen, logits.softmax(0).tolist()):
                            score[i] += weight
                while part.stop >= PROMPT and len(score) > budget:
                    old = [i for i in score if i < part.stop - newest]
                    del score[min(old, key=lambda i: (score[i], i))]
        yield [[sorted(score) for score in row] for row in F]


@pytest.mark.parametrize("budget, recent", [(8, 0.5), (6, 0.0), (6, 1.0)])
@each_cut
def test_kept_tokens_and_bytes_equal_the_loop(cut, budget, recent):
    check_kept(cut, H2O(budget, recent), heavy_hitters, own=4)


@pytest.mark.parametrize("chunk", [300, 1])
def test_attention_is_added_up_in_32_bits(chunk):
    check_sums(
        H2O(budget=300),
        lambda layer: layer.slot("accumulated"),
        chunk,
    )
