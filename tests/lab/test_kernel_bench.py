"""The bench of kernels refuses in a line what it cannot do, such as timing without a GPU."""

import pytest
import torch

pytest.importorskip("triton")  # Linux only

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
