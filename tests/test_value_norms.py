"""‖v W_O‖₁: the kernel and its twin against a loop in float64, and against what CriticalKV computes."""
from itertools import product

import pytest
import torch

from common import DEVICE, TOLERANCE, amid_nan

pytest.importorskip("triton")  # Linux only

from kernels.value_norms import plain, value_norms
from methods import critical_kv


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("B, H, G, n, D, d_model, block", [
    (1, 1, 1, 1, 16, 64, 16), (2, 2, 2, 17, 40, 129, 16), (1, 1, 3, 0, 16, 8, 16)])
def test_kernel_and_twin_are_the_loop(poisoned, B, H, G, n, D, d_model, block, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    g = torch.Generator().manual_seed(n + D)
    v = torch.randn(B, n, H, D, generator=g).to(dtype).transpose(1, 2)
    w_o = torch.randn(d_model, H * G, D, generator=g).to(dtype)
    expected = torch.empty(B, H, G, n, dtype=torch.float64)
    for b, h, i, j in product(range(B), range(H), range(G), range(n)):
        expected[b, h, i, j] = (w_o[:, h * G + i].double() @ v[b, h, j].double()).abs().sum()
    v, w_o, expected = v.to(DEVICE), w_o.to(DEVICE), expected.to(DEVICE)
    for found in plain(v, w_o), value_norms(amid_nan(v), amid_nan(w_o), block):
        assert found.shape == (B, H, G, n) and found.dtype == torch.float32
        assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32 and n:
        assert torch.allclose(critical_kv.value_norms(v, w_o), expected.float(), rtol=1e-5, atol=1e-5)


def test_a_projection_of_other_heads_or_numbers_is_refused():
    v = torch.zeros(1, 2, 3, 16, device=DEVICE)
    for w_o in torch.zeros(8, 3, 16), torch.zeros(8, 4, 32), torch.zeros(8, 4, 16, dtype=torch.float16):
        with pytest.raises(ValueError, match="must have a multiple of 2 heads of 16 numbers"):
            value_norms(v, w_o)
