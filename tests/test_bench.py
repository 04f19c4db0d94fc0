"""The bench without a GPU: its cases agree, its counts are those of the tensors, and the command runs with a CPU in a GPU's place."""
from contextlib import nullcontext
import json
import os
from pathlib import Path
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from conftest import DEVICE, interpreter

pytest.importorskip("triton")  # Linux only

from kernels import bench  # noqa: E402
from kernels.bench import (  # noqa: E402
    Shape, cases, check, decode, difference, inserting, microseconds, norms, pairs, predicted, revive, table, value_norms, verdicts, votes)

TINY = dict(H=2, G=2, D=16, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("case", [*cases([70], [1], **TINY), decode(Shape(3, 40, **TINY), 0.8)],
                         ids=lambda case: f"{case.name}, batch {case.shape.B}")
def test_what_is_compared_is_the_same(case):
    torch.manual_seed(case.shape.B)
    check(case, 1e-5)
    if case.sdpa and "revive" not in case.name:
        with pytest.raises(ValueError, match="sdpa is 0.001 off"):
            check(case._replace(sdpa=lambda *inputs: case.eager(*inputs) * 1.001), 1e-5)
    for wrong, told in ((1.001, "kernel is 0.001 off"), (torch.nan, "kernel is nan off")):
        with pytest.raises(ValueError, match=told):
            check(case._replace(kernel=lambda *inputs: case.eager(*inputs) * wrong), 1e-5)


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


def test_a_sum_that_is_rounded_at_each_token_is_off():
    """300 tokens a slot: a kernel that adds in 16 bits is 2e-3 off."""
    torch.manual_seed(0)
    check(inserting(Shape(1, 600, 1, 1, 16, torch.float16, DEVICE)), 5e-4)


def numbers(*tensors):
    return sum(x.nbytes for x in tensors)


@pytest.mark.parametrize("B, n", [(1, 640), (2, 300)])
def test_bytes_and_operations_are_those_of_the_inputs(B, n):
    s = Shape(B, n, **TINY)
    H, G, D = s.H, s.G, s.D
    for spread in (0.0, 0.8):
        case = decode(s, spread)
        q, segment = case.draw()
        assert case.bytes == numbers(segment.k, segment.v) and case.operations == 2 * 2 * len(segment.k) * G * D
        assert segment.count.sum() == len(segment.k) and (segment.count.max() > 1.7 * n) == bool(spread)
    assert decode(s, sums=True).bytes == decode(s).bytes + B * H * n * (4 * G + 4 * G + 4)  # scores there and back, and the sums
    q, k = votes(s).draw()
    assert votes(s).bytes == numbers(k) + 4 * B * H * G * n and votes(s).operations == 2 * 2 * q.shape[3] * D * n * B * H * G
    v, w_o = norms(s).draw()
    assert norms(s).bytes == numbers(v) + 4 * B * H * G * n and norms(s).operations == 2 * B * n * w_o.numel()
    for rows, by_slots in ((3, False), (1, False), (1, True)):
        case = revive(s, rows, by_slots)
        q, k, v, token, sketch, full = case.draw()
        assert sketch.rows == rows and k.shape[2] + token.shape[2] == n == full.shape[3]
        assert case.bytes == numbers(k, v, token, sketch.x) and numbers(k, v, sketch.x) + 4 * B * H * n < 1.01 * numbers(full) / 10
        assert case.operations == 4 * B * H * G * D * (k.shape[2] + (sketch.width if by_slots else token.shape[2]))
        assert 0.7 < sketch.x.std() < 1.4
    k, v, token, x = inserting(s).draw()
    assert inserting(s).bytes == numbers(k, v, x)
    q, *four = pairs(s).draw()
    assert pairs(s).bytes == numbers(*four) and pairs(s).operations == 2 * 2 * n * n * D * B * H * G


def test_the_floor_is_the_larger_of_two_times():
    case = decode(Shape(1, 1000, **TINY))._replace(bytes=6_000_000, operations=10_000_000)
    slow_memory = predicted(case, dict(copy=3e12, product=10e12))
    assert slow_memory["floor"] == pytest.approx(2.0) and slow_memory["binds"] == "memory"
    slow_product = predicted(case, dict(copy=3e12, product=1e12))
    assert slow_product["floor"] == pytest.approx(10.0) and slow_product["binds"] == "units"


def test_a_verdict_is_that_of_the_worst_case():
    rows = [dict(kernel_name=name, tokens=n, **{what: 2.0}) for name, what, _, _ in bench.AIMS for n in (1024, 131072)]
    assert verdicts(rows).count(": yes") == len(bench.AIMS)
    one = "decode_attention", "over_sdpa"
    rows.append(dict(kernel_name=one[0], tokens=65536, **{one[1]: 0.5}))
    rows.append(dict(kernel_name=one[0], tokens=1024, of_copy=0.1))  # too short to count
    told = verdicts(rows).splitlines()
    assert [line.endswith("found 0.50: no") for line in told] == [(name, what) == one for name, what, _, _ in bench.AIMS]


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
    for name, fake in dict(is_available=lambda: True, Stream=lambda: stream, current_stream=lambda: stream, Event=Event,
                           stream=lambda s: nullcontext(), graph=lambda g: nullcontext(), synchronize=lambda: None,
                           CUDAGraph=lambda: SimpleNamespace(replay=lambda: seen.append(1)),
                           get_device_properties=lambda i: SimpleNamespace(name="a CPU", L2_cache_size=600)).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return seen


def test_a_time_is_that_of_one_run(replays):
    seen = []

    def run(i):
        seen.append(i)
        time.sleep(0.004)

    assert 4000 <= microseconds(run, [(0,), (1,), (2,)], False) < 8000
    assert len(seen) % 3 == 0 and seen[:6] == [0, 1, 2, 0, 1, 2] and not replays
    microseconds(run, [(0,)], True)
    assert len(replays) >= 4


def run(checked, timed, monkeypatch, folder):
    """The command with these cases, and what it has written."""
    monkeypatch.setattr(bench, "interpreted", False)
    monkeypatch.setattr(bench, "ceilings", lambda: dict(copy=1e12, product=1e13))
    monkeypatch.setattr(bench, "cases", lambda lengths=None, batches=None: checked if lengths else timed)
    monkeypatch.setattr(bench, "AIMS", [("decode_attention", "over_sdpa", 0.0, 35), ("insert", "of_floor", 0.0, 10 ** 6)])
    bench.main(["--json", str(folder / "b.json"), "--figure", str(folder / "r.png")])
    return json.loads((folder / "b.json").read_text())


@interpreter
def test_the_command_with_a_cpu_in_the_gpus_place(replays, monkeypatch, tmp_path, capsys):
    """Nothing here is a measurement: it shows that the command would run through and what it would write."""
    written = run(*([*cases(n, [1], **TINY)] for n in ([33], [40])), monkeypatch, tmp_path)
    told = capsys.readouterr().out
    assert {row["kernel_name"] for row in written["rows"]} == {case.name for case in cases([40], [1], **TINY)} and replays
    for row in written["rows"]:
        assert row["kernel"] > 0 and row["called"] > 0 and row["of_floor"] == pytest.approx(row["floor"] / row["kernel"])
        assert row["of_copy"] == pytest.approx(row["bytes"] / (row["kernel"] * 1e-6) / 1e12)
        assert ("over_sdpa" in row) == ("sdpa" in row) and row.get("over_sdpa", 0) == pytest.approx(row.get("sdpa", 0) / row["kernel"])
    assert table(written["rows"]) in told and "a CPU, 20" in told and "at least 0.0, found" in told and "not measured" in told
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert written["device"].startswith("a CPU, ")


@interpreter
def test_a_failing_case_leaves_the_others_and_is_named(replays, monkeypatch, tmp_path):
    s, there = Shape(1, 40, **TINY), []

    def breaks(*inputs):
        there.append(json.loads((tmp_path / "b.json").read_text())["rows"])
        return 1 / 0

    wrong, broken = norms(s)._replace(kernel=lambda *x: 1.01 * value_norms(*x)), decode(s)._replace(name="broken", kernel=breaks)
    with pytest.raises(ValueError, match=r"^2 failed: value_norms at batch 1, 40 tokens: ValueError: kernel is 0.01 off .*; "
                                         r"broken at batch 1, 40 tokens: ZeroDivisionError: division by zero$"):
        run([wrong, decode(s)], [decode(s), broken, wrong, votes(s)], monkeypatch, tmp_path)
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [row["kernel_name"] for row in rows] == ["decode_attention", "window_votes"] and there == [rows[:1]]
    (tmp_path / "b.json").write_text("mine")
    with pytest.raises(ValueError, match="b.json holds something else than the times of an earlier run"):
        run([], [decode(s)], monkeypatch, tmp_path)


def test_what_cannot_be_timed_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "interpreted", True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set"):
        bench.main([])
    for rate in "0", "-1", "nan", "inf", "1e300":
        with pytest.raises(ValueError, match=r"must be a rate above 0"):
            bench.main(["--predict", "--copy", rate])
        with pytest.raises(ValueError, match="--product"):
            bench.main(["--predict", "--product", rate])
    done = subprocess.run([sys.executable, "-m", "kernels.bench"], cwd=Path(__file__).parent.parent, capture_output=True, text=True,
                          env=os.environ | dict(TRITON_INTERPRET="1"))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


def test_a_plain_run_has_no_kernels(monkeypatch):
    seen = []
    bench.plain(lambda: seen.append(bench.seam.use_kernels))()
    with pytest.raises(ZeroDivisionError):
        bench.plain(lambda: 1 / 0)()
    assert seen == [False] and bench.seam.use_kernels


def test_difference():
    x = torch.tensor([3.0, 4.0])
    assert difference(x, x) == 0 and difference(x + torch.tensor([0.0, 0.05]), x) == pytest.approx(0.01, rel=1e-4)
    assert not difference(x * torch.nan, x) <= 1


def test_without_a_gpu_it_says_so_and_predicts(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU here"):
        bench.main([])
    bench.main(["--predict", "--copy", "1", "--product", "100"])
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("decode_attention  ") and " 131072 " in line)
    assert row == ["decode_attention", "1", "131072", "4", "memory", f"{2 * 131072 * 8 * 128 * 2 / 1e12 * 1e6:.1f}"]
