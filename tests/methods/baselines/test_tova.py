"""TOVA keeps what a loop written from section 3 of its paper keeps."""

import math

import pytest

from common import B, D, G, H
from loops import PROMPT, check_kept, each_cut
from methods.baselines.tova import TOVA


def looked_at_least(q, k, parts, budget):
    """Evict the tokens with the least attention from the newest query, mean over all heads."""
    kept = [[] for _ in range(B)]
    for part in parts:
        for b in range(B):
            kept[b] = [*kept[b], *part]
            weight = dict.fromkeys(kept[b], 0.0)
            for h in range(H * G):
                logits = k[b, h // G, kept[b]] @ q[b, h, part.stop - 1] / math.sqrt(D)
                for i, x in zip(kept[b], logits.softmax(0).tolist()):
                    weight[i] += x
            if part.stop >= PROMPT:
                ranked = sorted(kept[b], key=lambda i: (weight[i], i))
                kept[b] = sorted(ranked[-budget:])
        yield [[row] * H for row in kept]


@pytest.mark.parametrize("budget", [8, 1])
@each_cut
def test_kept_tokens_and_bytes_equal_the_loop(cut, budget):
    check_kept(cut, TOVA(budget), looked_at_least, own=4)
