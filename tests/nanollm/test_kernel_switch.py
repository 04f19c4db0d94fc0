"""When kernels run: what a tensor and a GPU must be like, and where the code is taken from."""

from types import SimpleNamespace

import pytest
import torch

from nanollm import kernel_switch


def on_a_gpu(D, dtype=torch.float16):
    """Return what the switch asks of a tensor on a GPU."""
    return SimpleNamespace(shape=(2, D), dtype=dtype, is_cuda=True, device="cuda")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(n): from now on there is a GPU with n bytes of shared memory per SM."""

    def with_memory(n):
        properties = SimpleNamespace(shared_memory_per_multiprocessor=n)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: properties
        )

    monkeypatch.setattr(kernel_switch, "use_kernels", True)
    return with_memory


def test_heads_run_in_kernels_if_shared_memory_holds_their_tiles(gpu):
    for D, needed in kernel_switch.shared_memory.items():
        gpu(1024 * needed)
        assert kernel_switch.on_gpu(on_a_gpu(D))
        assert not kernel_switch.on_gpu(on_a_gpu(D + 1))
        gpu(1024 * needed - 1)
        assert not kernel_switch.on_gpu(on_a_gpu(D))


def test_only_16_bits_on_a_gpu_run_in_kernels(gpu, monkeypatch):
    gpu(2**20)
    assert kernel_switch.on_gpu(on_a_gpu(64, torch.bfloat16))
    assert not kernel_switch.on_gpu(on_a_gpu(64, torch.float32))
    assert not kernel_switch.on_gpu(torch.zeros(2, 64, dtype=torch.float16))
    monkeypatch.setattr(kernel_switch, "use_kernels", False)
    assert not kernel_switch.on_gpu(on_a_gpu(64))


def test_a_kernel_is_found_by_its_file_and_name_or_there_is_none(monkeypatch):
    pytest.importorskip("triton")
    x = torch.zeros(1)
    assert kernel_switch.kernel_for(x, "no such file") is None
    monkeypatch.setattr(kernel_switch, "on_gpu", lambda x: True)
    file = kernel_switch.kernel_file("window_scores")
    assert file.__name__ == "nanollm_kernels.window_scores"
    assert kernel_switch.kernel_for(x, "window_scores") is file.window_scores
    assert kernel_switch.kernel_for(x, "window_scores", "row_sums") is file.row_sums
