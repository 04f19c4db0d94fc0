"""Compare CaM with a loop over tokens: kept tokens, merged values and outputs."""

from itertools import product
import math

import pytest
import torch

from common import B, D, G, H, SLOT, end, feed
from methods.baselines.cam import CaM

T, BUDGET = 40, 12


def text():
    q, k, v = (
        torch.randn(
            B, T, heads, D, generator=torch.Generator().manual_seed(i)
        ).transpose(1, 2)
        for i, heads in enumerate((H * G, H, H))
    )
    return q * 2, k, v


def by_loop(q, k, v, newest, leave, targets, coins):
    """Yield, after each token, the values by kept token and the outputs of the query heads.

    One key/value head: q (G, T, D), k and v (T, D). coins: for each eviction, one random number per
    entry that leaves.
    """
    held, attention = {}, {}
    for t in range(T):
        if len(held) == BUDGET:
            old = [i for i in held if i < t - newest]
            gone = sorted(sorted(old, key=lambda i: (attention[i], i))[:leave])
            stay = [i for i in held if i not in gone]
            mean, m = (
                sum(attention[j] for j in stay) / len(stay),
                min(targets, len(stay)),
            )
            given = dict.fromkeys(stay, 0)
            for i, coin in zip(gone, next(coins)):
                if coin < attention[i] / mean:
                    after = [j for j in stay if j > i][:m]
                    for j in after if len(after) == m else stay[-m:]:
                        given[j] = given[j] + held[i] / m
            held = {j: held[j] + given[j] for j in stay}
        held[t], attention[t] = v[t], 0.0
        p = (q[:, t] @ k[[*held]].T / math.sqrt(D)).softmax(-1)
        for j, weight in zip(held, p.sum(0).tolist()):
            attention[j] += weight
        yield dict(held), p @ torch.stack([*held.values()])


@pytest.mark.parametrize(
    "recent, leave, targets",
    [(0.5, 1, 4), (0.5, 6, 1), (0.0, 5, 3), (0.25, 4, 100), (0.75, 1, 100)],
)
@pytest.mark.parametrize("chunk", [1, 7, T])
def test_values_and_outputs_are_the_loops_however_the_text_is_cut(
    recent, leave, targets, chunk
):
    (q, k, v), cache, outputs = text(), CaM(BUDGET, recent, leave, targets, seed=3), []
    cache.layer, generator = 2, torch.Generator().manual_seed(3002)
    coins = [torch.rand(B, H, leave, generator=generator) for _ in range(T)]
    newest, loops = max(1, round(recent * BUDGET)), {}
    for b, h in product(range(B), range(H)):
        mine = iter([coin[b, h].tolist() for coin in coins])
        loops[b, h] = [
            *by_loop(
                q[b, h * G : (h + 1) * G],
                k[b, h],
                v[b, h],
                newest,
                leave,
                targets,
                mine,
            )
        ]

    for part in torch.arange(T).split(chunk):
        outputs.append(
            feed(cache, *(x[:, :, part] for x in (q, k, v)), first=int(part[0]))
        )
        for (b, h), steps in loops.items():
            held, _ = steps[part[-1]]
            assert cache.pos[b, h].tolist() == [*held] and torch.equal(
                cache.k[b, h], k[b, h, [*held]]
            )
            assert torch.allclose(
                cache.v[b, h], torch.stack([*held.values()]), atol=1e-4
            )
        # 4 bytes: accumulated attention
        assert cache.bytes()[0] == B * H * cache.length * (SLOT + 4)
        if 20 in part:
            end(cache)  # evicts nothing
    y = torch.cat(outputs, 2)
    for (b, h), steps in loops.items():
        expected = torch.stack([y for _, y in steps], 1)
        assert torch.allclose(y[b, h * G : (h + 1) * G], expected, atol=1e-4)
