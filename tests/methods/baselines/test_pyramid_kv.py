"""PyramidKV deals out SnapKV's total among the layers: more to lower ones."""

import pytest
import torch

from methods.baselines.pyramid_kv import PyramidKV
from windows import by_depth, compressed


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
@pytest.mark.parametrize("beta", [1, 3, 20])
def test_all_layers_together_keep_what_snap_kv_keeps(layers, beta):
    budget, w = 12, 3
    for T in (budget + 1, 2 * budget, 2 * budget + 5, 4 * budget + 1):
        x = torch.zeros(1, 1, T, 2)
        counts = []
        expected = []
        for i in range(layers):
            method = PyramidKV(budget, w, beta=beta)
            counts.append(compressed(method, x, x, x, layer=i, layers=layers).length)
            if layers > 1:
                scores = [[0] * (T - w)]
                expected.append(w + by_depth(scores, budget - w, beta, i, layers)[0])
        assert sum(counts) == layers * budget
        assert layers == 1 or counts == expected
