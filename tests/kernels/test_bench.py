"""The bench without a GPU: cases agree, counts are the tensors', the command runs on a CPU."""
from contextlib import nullcontext
import json
import time
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch

from common import DEVICE, interpreter

pytest.importorskip("triton")  # Linux only

from kernels import bench
from kernels.bench import (Shape, cases, check, decode, difference, floored, inserting, microseconds, norms,
                           pairs, revive, table, votes)

TINY = dict(H=2, G=2, D=16, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("case", [*cases([40], [1], **TINY), decode(Shape(3, 20, **TINY), 0.8)],
                         ids=lambda case: f"{case.name}, batch {case.shape.B}")
def test_what_is_compared_is_the_same(case):
    torch.manual_seed(case.shape.B)
    check(case, 1e-5)


@pytest.mark.parametrize("who, wrong, told", [("kernel", 1.001, "0.001"), ("sdpa", torch.nan, "nan")])
def test_what_is_off_is_named(who, wrong, told):
    case = norms(Shape(1, 20, **TINY))
    case = case._replace(kernel=case.eager)._replace(**{who: lambda *inputs: case.eager(*inputs) * wrong})
    with pytest.raises(ValueError, match=f"^{who} is {told} off"):
        check(case, 1e-5)


def test_in_16_bits_a_kernel_may_be_as_far_off_as_the_plain_code(monkeypatch):
    case = decode(Shape(1, 300, 2, 2, 16, torch.bfloat16, "cpu"))
    torch.manual_seed(0)
    rounded = case._replace(kernel=case.eager, sdpa=None)
    check(rounded, 0)
    told = []
    monkeypatch.setattr(bench, "difference", lambda x, y: told.append(difference(x, y)) or told[-1])
    check(rounded, 1.0)
    assert 1e-3 < told[0] == told[1] < 1e-2
    with pytest.raises(ValueError, match="half as much again"):
        check(rounded._replace(kernel=lambda *inputs: case.eager(*inputs) * (1 + 3 * told[0])), 0)


def numbers(*tensors):
    return sum(x.nbytes for x in tensors)


def test_bytes_and_operations_are_those_of_the_inputs():
    s = Shape(2, 300, **TINY)
    B, n, H, G, D = s[:5]
    for spread in (0.0, 0.8):
        case = decode(s, spread)
        q, segment = case.draw()
        assert case.bytes == numbers(segment.k, segment.v)
        assert case.operations == 2 * 2 * len(segment.k) * G * D
        assert segment.count.sum() == len(segment.k) and (segment.count.max() > 1.7 * n) == bool(spread)
    # scores there and back, and the sums
    assert decode(s, sums=True).bytes == decode(s).bytes + B * H * n * (4 * G + 4 * G + 4)
    q, k = votes(s).draw()
    assert votes(s).bytes == numbers(k) + 4 * B * H * G * n
    assert votes(s).operations == 2 * 2 * q.shape[3] * D * n * B * H * G
    v, w_o = norms(s).draw()
    assert norms(s).bytes == numbers(v) + 4 * B * H * G * n and norms(s).operations == 2 * B * n * w_o.numel()
    for rows, by_slots in ((3, False), (1, False), (1, True)):
        case = revive(s, rows, by_slots)
        q, k, v, token, sketch, full = case.draw()
        assert sketch.rows == rows and k.shape[2] + token.shape[2] == n == full.shape[3]
        assert case.bytes == numbers(k, v, token, sketch.x)
        assert numbers(k, v, sketch.x) + 4 * B * H * n < 1.01 * numbers(full) / 10
        vague = sketch.width if by_slots else token.shape[2]
        assert case.operations == 4 * B * H * G * D * (k.shape[2] + vague)
        assert 0.7 < sketch.x.std() < 1.4
    k, v, token, x = inserting(s).draw()
    assert inserting(s).bytes == numbers(k, v, x)
    q, *four = pairs(s).draw()
    assert pairs(s).bytes == numbers(*four) and pairs(s).operations == 2 * 2 * n * n * D * B * H * G


def test_the_floor_is_the_larger_of_two_times():
    case = decode(Shape(1, 1000, **TINY))._replace(bytes=6_000_000, operations=10_000_000)
    slow_memory = floored(case, dict(copy=3e12, product=10e12))
    assert slow_memory["floor"] == pytest.approx(2.0) and slow_memory["binds"] == "memory"
    slow_product = floored(case, dict(copy=3e12, product=1e12))
    assert slow_product["floor"] == pytest.approx(10.0) and slow_product["binds"] == "units"


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)


@pytest.fixture
def replays(monkeypatch):
    """A CPU in the GPU's place, whose graphs do nothing but count their replays."""
    stream, seen = SimpleNamespace(wait_stream=lambda other: None), []
    fakes = dict(is_available=lambda: True, Stream=lambda: stream, current_stream=lambda: stream, Event=Event,
                 stream=lambda s: nullcontext(), graph=lambda g: nullcontext(), synchronize=lambda: None,
                 CUDAGraph=lambda: SimpleNamespace(replay=lambda: seen.append(1)),
                 get_device_properties=lambda i: SimpleNamespace(name="a CPU", L2_cache_size=600))
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return seen


def test_a_time_is_that_of_one_run_in_the_middle_of_all(replays, monkeypatch):
    seen, clock = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run(i):
        clock[0] += (0.001, 0.004, 0.040)[len(seen) // 3 % 3]  # a round of three runs takes as long each
        seen.append(i)

    assert microseconds(run, [(0,), (1,), (2,)], False) == pytest.approx(4000)
    assert len(seen) % 3 == 0 and seen[:6] == [0, 1, 2, 0, 1, 2] and not replays
    microseconds(run, [(0,)], True)
    assert len(replays) >= 4


def run(checked, timed, monkeypatch, folder):
    """The command with these cases."""
    monkeypatch.setattr(bench, "interpreted", False)
    monkeypatch.setattr(bench, "ceilings", lambda: dict(copy=1e12, product=1e13))
    monkeypatch.setattr(bench, "cases", lambda lengths=None, batches=None: checked if lengths else timed)
    bench.main(["--json", str(folder / "b.json"), "--figure", str(folder / "r.png")])


@interpreter
def test_the_command_with_a_cpu_in_the_gpus_place(replays, monkeypatch, tmp_path, capsys):
    """Nothing here is a measurement: it shows that the command would run through and what it would write."""
    def breaks(*inputs):
        there.append(json.loads(written.read_text())["rows"])
        return 1 / 0

    s, there, written = Shape(1, 20, **TINY), [], tmp_path / "b.json"
    first, *others = right = [case._replace(kernel=case.eager)
                              for case in (decode(s), decode(s, sums=True), revive(s, 3), pairs(s))]
    wrong = norms(s)._replace(kernel=lambda *x: 1.01 * norms(s).eager(*x))
    broken = first._replace(name="broken", kernel=breaks)
    told = (r"^2 failed: value_norms at batch 1, 20 tokens: ValueError: kernel is 0.01 off .*; "
            r"broken at batch 1, 20 tokens: ZeroDivisionError: division by zero$")
    with pytest.raises(ValueError, match=told):
        run([wrong, first], [first, broken, wrong, *others], monkeypatch, tmp_path)

    held, out = json.loads(written.read_text()), capsys.readouterr().out
    rows = held["rows"]
    assert there == [rows[:1]] and [row["kernel_name"] for row in rows] == [case.name for case in right]
    for row in rows:
        assert row["kernel"] > 0 and row["called"] > 0
        assert row["of_floor"] == pytest.approx(row["floor"] / row["kernel"])
        assert row["of_copy"] == pytest.approx(row["bytes"] / (row["kernel"] * 1e-6) / 1e12)
        assert row["of_product"] == pytest.approx(row["operations"] / (row["kernel"] * 1e-6) / 1e13)
        assert ("over_sdpa" in row) == ("sdpa" in row)
        assert row.get("over_sdpa", 0) == pytest.approx(row.get("sdpa", 0) / row["kernel"])
    assert replays and table(rows) in out and "a CPU, 20" in out and held["device"].startswith("a CPU, ")
    assert bench.TITLE.encode() in (tmp_path / "r.png").read_bytes()
    points = {x.get_label(): x.get_offsets().tolist() for x in bench.roofline(held).axes[0].collections}
    for row in rows:  # operations a byte, and TFLOP/s
        assert points[row["kernel_name"]] == [pytest.approx(
            [row["operations"] / row["bytes"], 10 * row["of_product"]])]

    plt.figure().savefig(tmp_path / "r.png")  # a figure, but another
    with pytest.raises(ValueError, match="r.png holds something else than the roofline"):
        run([], [first], monkeypatch, tmp_path)
    written.write_text("mine")
    with pytest.raises(ValueError, match="b.json holds something else than the times of an earlier run"):
        run([], [first], monkeypatch, tmp_path)


def test_what_cannot_be_timed_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "interpreted", True)
    for there, message in (True, "TRITON_INTERPRET is set"), (False, "no GPU here"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        with pytest.raises(ValueError, match=message):
            bench.main([])


def test_a_plain_run_has_no_kernels(monkeypatch):
    seen = []
    bench.plain(lambda: seen.append(bench.kernel_switch.use_kernels))()
    with pytest.raises(ZeroDivisionError):
        bench.plain(lambda: 1 / 0)()
    assert seen == [False] and bench.kernel_switch.use_kernels
