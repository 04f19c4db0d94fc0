"""KeyDiff keeps what a loop written from section 3 of its paper keeps."""

from common import B, H
from loops import PROMPT, check_kept, each_cut
from methods.baselines.key_diff import KeyDiff


def like_the_others(q, k, parts, budget):
    """Evict at once the keys with the highest cosine to the mean direction."""
    kept = [[[] for _ in range(H)] for _ in range(B)]
    for part in parts:
        for b in range(B):
            for h in range(H):
                kept[b][h] += part
                unit = {}
                for i in kept[b][h]:
                    key = k[b, h, i]
                    unit[i] = (key / key.norm()).double()
                mean = sum(unit.values()) / len(unit)
                alike = {}
                for i, x in unit.items():
                    alike[i] = (x @ mean / mean.norm()).item()
                if part.stop >= PROMPT:
                    ranked = sorted(unit, key=lambda i: (-alike[i], i))
                    kept[b][h] = sorted(ranked[-budget:])
        yield [[*row] for row in kept]


@each_cut
def test_kept_tokens_and_bytes_equal_the_loop(cut):
    check_kept(cut, KeyDiff(budget=7), like_the_others)
