"""The bits of each step of kvzip_gain_coded: the entropy, and the order of the steps."""
import math

import numpy as np
import torch

from common import ENCODING
from experiments.coded_parts import Rotated, bits, entropy
from methods.ours import rans
from methods.ours.karhunen_loeve import basis, metric, watched
from nanollm import TINY
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.hard_tasks import HardTasks


def test_entropy_is_that_of_rounded_normal_numbers():
    assert abs(entropy(torch.tensor([20.0])) - math.log2(20 * math.sqrt(2 * math.pi * math.e))) < 1e-3
    z = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).mul(0.7).round()
    p = z.unique(return_counts=True)[1] / len(z)
    assert abs(entropy(torch.tensor([0.7])) + (p * p.log2()).sum()) < 0.01


def test_each_step_saves_bits_and_the_coder_needs_about_the_last():
    needed, written = [0.0] * 4, 0
    for cache in watched(from_hf(TINY), HardTasks(ENCODING, "train"), Rotated, documents=8, T=256):
        into, _, mean, spread = basis(cache.kept, metric(cache)).split((192, 192, 1, 1))
        code = ((cache.kept - mean) @ into).round().clamp(-rans.MOST, rans.MOST).long().numpy()
        data = rans.encode(code.ravel(), np.tile(rans.class_of(spread[0].numpy()), len(code)))
        needed = [x + len(code) * y for x, y in zip(needed, bits(cache))]
        written += 8 * (len(data) - 4 * rans.lanes(code.size))
    assert needed == sorted(needed, reverse=True)
    assert 0.9 * needed[-1] < written < 1.1 * needed[-1]
