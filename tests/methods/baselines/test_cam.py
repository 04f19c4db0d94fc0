"""Compare CaM with a loop over tokens: kept tokens, merged values and outputs."""

from itertools import product
import math

import pytest
import torch

from common import SLOT, B, D, G, H, alone, end, feed
from loops import check_sums, text
from methods.baselines.cam import CaM

T, BUDGET = 40, 12


def merged(values, attention, gone, coins, targets):
    """Return the values that stay, some with parts of those that leave added."""
    stay = [i for i in values if i not in gone]
    mean = sum(attention[j] for j in stay) / len(stay)
    m = min(targets, len(stay))
    new = {j: values[j] for j in stay}
    for i, coin in zip(gone, coins):
        if coin < attention[i] / mean:
            after = [j for j in stay if j > i][:m]
            if len(after) < m:
                after = stay[-m:]
            for j in after:
                new[j] = new[j] + values[i] / m
    return new


def by_loop(q, k, v, newest, leave, targets, coins):
    """Yield, after each token, the values by kept token and the outputs of the query heads.

    One key/value head: q (G, T, D), k and v (T, D). coins: for each eviction, one random number per
    entry that leaves.
    """
    values = {}
    attention = {}
    for t in range(T):
        if len(values) == BUDGET:
            old = [i for i in values if i < t - newest]
            gone = sorted(sorted(old, key=lambda i: (attention[i], i))[:leave])
            values = merged(values, attention, gone, next(coins), targets)
        values[t] = v[t]
        attention[t] = 0.0
        p = (q[:, t] @ k[[*values]].T / math.sqrt(D)).softmax(-1)
        for j, weight in zip(values, p.sum(0).tolist()):
            attention[j] += weight
        yield dict(values), p @ torch.stack([*values.values()])


@pytest.mark.parametrize(
    "recent, leave, targets",
    [
        (0.5, 1, 4),
        (0.5, 6, 1),
        (0.0, 5, 3),
        (0.25, 4, 100),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7, T])
def test_values_and_outputs_are_the_loops_however_the_text_is_cut(
    recent,
    leave,
    targets,
    chunk,
):
    q, k, v = text(T)
    generator = torch.Generator().manual_seed(3002)  # of seed 3 and layer 2
    coins = [torch.rand(B, H, leave, generator=generator) for _ in range(T)]
    newest = max(1, round(recent * BUDGET))
    loops = {}
    for b, h in product(range(B), range(H)):
        head = q[b, h * G : (h + 1) * G], k[b, h], v[b, h]
        own = iter([coin[b, h].tolist() for coin in coins])
        loops[b, h] = [*by_loop(*head, newest, leave, targets, own)]

    layer = alone(
        CaM(BUDGET, recent, leave, targets, seed=3),
        index=2,
        layers=3,
    )
    outputs = []
    for part in torch.arange(T).split(chunk):
        outputs.append(feed(layer, (q, k, v), len(part)))
        for (b, h), steps in loops.items():
            values, _ = steps[part[-1]]
            assert layer.pos[b, h].tolist() == [*values]
            assert torch.equal(layer.k[b, h], k[b, h, [*values]])
            expected = torch.stack([*values.values()])
            assert torch.allclose(layer.v[b, h], expected, atol=1e-4)
        # 4 bytes: accumulated attention
        assert layer.bytes()[0] == B * H * layer.length * (SLOT + 4)
        if 20 in part:
            end(layer)  # evicts nothing
    y = torch.cat(outputs, 2)
    for (b, h), steps in loops.items():
        expected = torch.stack([y for _, y in steps], 1)
        assert torch.allclose(y[b, h * G : (h + 1) * G], expected, atol=1e-4)


@pytest.mark.parametrize("chunk", [300, 1])
def test_attention_is_added_up_in_32_bits(chunk):
    check_sums(
        CaM(budget=300),
        lambda layer: layer.slot("accumulated"),
        chunk,
    )


def test_bad_options_are_refused():
    with pytest.raises(
        ValueError,
        match="budget 20 must be at least 23: the newest 22",
    ):
        CaM(budget=20, recent=1.1)
