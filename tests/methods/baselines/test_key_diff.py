"""KeyDiff keeps what a loop written from section 3 of its paper keeps."""

import torch

from common import B, D, H, alone
from loops import PROMPT, check_kept, each_cut
from methods.baselines.key_diff import KeyDiff, likeness


def like_the_others(
    q,
    k,
    parts,
    budget,
):
    """Evict at once the keys with the highest cosine to the mean direction."""
    kept = [[[] for _ in range(H)] for _ in range(B)]
    for part in parts:
        for b in range(B):
            for h in range(H):
                kept[b][h] += part
                unit = {}
                for i in kept[b][h]:
                    unit[i] = (k[b, h, i] / k[b, h, i].norm()).double()
                mean = sum(unit.values()) / len(unit)
                alike = {i: (x @ mean / mean.norm()).item() for i, x in unit.items()}
                if part.stop >= PROMPT:
                    ranked = sorted(alike, key=lambda i: (-alike[i], i))
                    kept[b][h] = sorted(ranked[-budget:])
        yield [[*row] for row in kept]


@each_cut
def test_kept_tokens_and_bytes_equal_the_loop(cut):
    check_kept(cut, KeyDiff(budget=7), like_the_others)


def test_empty_slots_take_no_part_in_the_mean():
    k = torch.randn(1, 2, 6, D, generator=torch.Generator().manual_seed(0))
    layer = alone(KeyDiff(budget=4))
    layer.write(k, k, torch.arange(6)[None])
    layer.keep_chosen(torch.tensor([[[1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1]]]).bool())
    other = alone(KeyDiff(budget=4))
    other.write(
        k[:, 1:, [1, 4, 5]],
        k[:, 1:, [1, 4, 5]],
        torch.arange(3)[None],
    )
    assert torch.allclose(likeness(layer)[:, 1, 3:], likeness(other)[:, 0])
