"""The bench without a GPU: what is compared is the same, and counts are those of the tensors."""
import pytest
import torch

from common import DEVICE

pytest.importorskip("triton")  # Linux only

from kernels import bench
from kernels.bench import Shape, cases, check, decode, floored, inserting, norms, pairs, revive, scoring

TINY = dict(H=2, G=2, D=16, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("case", [*cases([40], [1], **TINY), decode(Shape(3, 20, **TINY), 0.8)],
                         ids=lambda case: f"{case.name}, batch {case.shape.B}")
def test_what_is_compared_is_the_same(case):
    torch.manual_seed(case.shape.B)
    check(case, 1e-5)


def test_what_is_off_is_named_and_16_bits_may_be_as_far_off_as_the_plain_code():
    torch.manual_seed(0)
    for dtype, off in (torch.float32, 1.001), (torch.bfloat16, 1.03):
        case = decode(Shape(1, 300, 2, 2, 16, dtype, "cpu"))
        case = case._replace(kernel=case.eager, sdpa=None)
        check(case, 0)
        for wrong in off, torch.nan:
            with pytest.raises(ValueError, match="^kernel is .* off the plain code in float32"):
                check(case._replace(kernel=lambda *inputs: case.eager(*inputs) * wrong), 0)


def test_bytes_and_operations_are_those_of_the_inputs():
    s = Shape(2, 300, **TINY)
    B, n, H, G, D = s[:5]
    read = lambda *tensors: sum(x.nbytes for x in tensors)
    for spread in (0.0, 0.8):
        case = decode(s, spread)
        q, segment = case.draw()
        assert case.bytes == read(segment.k, segment.v)
        assert case.operations == 2 * 2 * len(segment.k) * G * D
        assert segment.count.sum() == len(segment.k) and (segment.count.max() > 1.7 * n) == bool(spread)
    # scores there and back, and the sums
    assert decode(s, sums=True).bytes == decode(s).bytes + B * H * n * (4 * G + 4 * G + 4)
    q, k = scoring(s).draw()
    assert scoring(s).bytes == read(k) + 4 * B * H * G * n
    assert scoring(s).operations == 2 * 2 * q.shape[3] * D * n * B * H * G
    v, w_o = norms(s).draw()
    assert norms(s).bytes == read(v) + 4 * B * H * G * n and norms(s).operations == 2 * B * n * w_o.numel()
    for rows, by_slots in ((3, False), (1, False), (1, True)):
        case = revive(s, rows, by_slots)
        q, k, v, token, sketch, full = case.draw()
        assert sketch.rows == rows and k.shape[2] + token.shape[2] == n == full.shape[3]
        assert case.bytes == read(k, v, token, sketch.x)
        assert read(k, v, sketch.x) + 4 * B * H * n < 1.01 * read(full) / 10
        vague = sketch.width if by_slots else token.shape[2]
        assert case.operations == 4 * B * H * G * D * (k.shape[2] + vague)
    k, v, token, x = inserting(s).draw()
    assert inserting(s).bytes == read(k, v, x)
    q, *four = pairs(s).draw()
    assert pairs(s).bytes == read(*four) and pairs(s).operations == 2 * 2 * n * n * D * B * H * G


def test_the_floor_is_the_larger_of_two_times():
    case = decode(Shape(1, 1000, **TINY))._replace(bytes=6_000_000, operations=10_000_000)
    slow_memory = floored(case, dict(copy=3e12, product=10e12))
    assert slow_memory["floor"] == pytest.approx(2.0) and slow_memory["binds"] == "memory"
    slow_product = floored(case, dict(copy=3e12, product=1e12))
    assert slow_product["floor"] == pytest.approx(10.0) and slow_product["binds"] == "units"
    assert bench.show([slow_memory, slow_product]).split()[-3:] == ["2", "units", "10.0"]


@pytest.mark.parametrize("wrong, told", [
    ("--resources --dim 0", "--dim 0 must be a whole number from 1 to 256"), ("--lengths 0", "length 0 must"),
    ("--json README.md", "README.md holds something else"),
    pytest.param("", "no GPU here", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is"))])
def test_what_cannot_be_done_is_one_line_in_a_clean_shell(wrong, told, typed):
    done = typed("python", "-m", "kernels.bench", *wrong.split())
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {told}"), done.stderr
