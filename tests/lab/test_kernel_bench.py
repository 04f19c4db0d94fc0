"""The bench without a GPU: it times the right functions, which compute the same."""

import pytest
import torch

from common import DEVICE, interpreter

pytest.importorskip("triton")  # Linux only

from lab import kernel_bench as bench


def test_rows_have_the_times_of_functions_that_compute_the_same(monkeypatch):
    results = []

    def microseconds(run):  # 10 for a kernel; 20, 30 and 40 for sdpa's implementations
        results.append(run())
        return 10 * len(results)

    torch.manual_seed(0)
    monkeypatch.setattr(bench, "microseconds", microseconds)
    monkeypatch.setattr(bench, "speeds", lambda: (1e3, 1e6))
    shape = dict(H=1, G=2, D=16, dtype=torch.float32, device=DEVICE)
    for row in bench.measured([300], [2], **shape):
        kernel, *sdpa = results
        assert row["batch"] == 2 and row["kernel"] == 10
        assert row["bound ×"] == row["bound"] / 10
        if row["case"] in ("decode_attention", "decode_attention ragged"):
            assert row["sdpa"] == 20 and row["sdpa ×"] == 2
        else:
            assert row["sdpa"] is row["sdpa ×"] is None and not sdpa
        for y in sdpa:
            assert torch.allclose(kernel, y, rtol=1e-4, atol=1e-5), row["case"]
        if row["case"] == "decode_attention":
            assert row["bound"] == 2 * 2 * 300 * 16 * 4 / 1e3  # k and v are read once
        results.clear()
    assert row["case"] == "tensor_attention"  # the last


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="GPU")


@pytest.mark.parametrize(
    "wrong, told",
    [
        ("--lengths 0", "length 0 must"),
        ("--json README.md", "README.md holds something else"),
        pytest.param("", "timing needs", marks=no_gpu),
    ],
)
def test_what_cannot_be_done_is_one_line_in_a_clean_shell(wrong, told, typed):
    done = typed("python", "-m", "lab.kernel_bench", *wrong.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {told}"), done.stderr


@interpreter
def test_the_interpreter_is_not_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="^TRITON_INTERPRET is set"):
        bench.main([])
