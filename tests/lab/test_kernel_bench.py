"""The bench without a GPU: what is compared is the same, and rows have the times of the right functions."""

from time import perf_counter

import pytest
import torch

from common import DEVICE, interpreter

pytest.importorskip("triton")  # Linux only

from lab import kernel_bench as bench


def test_rows_have_the_times_of_functions_that_compute_the_same(monkeypatch):
    results = []

    def microseconds(run):  # without a GPU, by the clock
        began = perf_counter()
        results.append(run())
        return 1e6 * (perf_counter() - began)

    torch.manual_seed(0)
    monkeypatch.setattr(bench, "microseconds", microseconds)
    monkeypatch.setattr(bench, "speeds", lambda: (1e3, 1e6))
    for row in bench.measured(
        [300], [2], H=1, G=2, D=16, dtype=torch.float32, device=DEVICE
    ):
        assert row["batch"] == 2 and row["bound ×"] == row["bound"] / row["kernel"]
        assert row["sdpa ×"] == (row["sdpa"] and row["sdpa"] / row["kernel"])
        kernel, *sdpa = results
        assert bool(sdpa) == (
            row["case"] in ("decode_attention", "decode_attention ragged")
        )
        assert all(torch.allclose(kernel, y, rtol=1e-4, atol=1e-5) for y in sdpa), row[
            "case"
        ]
        if row["case"] == "decode_attention":
            assert row["bound"] == 2 * 2 * 300 * 16 * 4 / 1e3  # k and v are read once
        results.clear()
    assert row["case"] == "tensor_attention"  # the last


@pytest.mark.parametrize(
    "wrong, told",
    [
        ("--lengths 0", "length 0 must"),
        ("--json README.md", "README.md holds something else"),
        pytest.param(
            "",
            "timing needs",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="GPU"),
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_in_a_clean_shell(wrong, told, typed):
    done = typed("python", "-m", "lab.kernel_bench", *wrong.split())
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(
        f"error: {told}"
    ), done.stderr


@interpreter
def test_the_interpreter_is_not_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="^TRITON_INTERPRET is set"):
        bench.main([])
