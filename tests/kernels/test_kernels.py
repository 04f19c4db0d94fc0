"""Methods with kernels in the place of plain code, in Triton's interpreter: same slots, outputs and bytes.

Then when kernels are asked for, where they are launched, and what the compiler says of them.
"""
from contextlib import contextmanager
import os
from pathlib import Path
import subprocess
import sys

import pytest
import torch

from common import DEVICE, interpreter, link

pytest.importorskip("triton")  # Linux only

from kernels import bench, launch, value_norms
from methods.ada_kv import AdaKV
from methods.cam import CaM
from methods.chunk_kv import Chunks
from methods.critical_kv import Critical
from methods.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.kv_reviver_mean import MeanReviver
from methods.ours.kv_reviver_shrunk import ShrunkReviver, SignedReviver
from methods.ours.residual import Residual
from methods.ours.scissorhands_weight import MeanWeight
from methods.ours.theta import LeastTheta
from methods.scissorhands import Scissorhands
from methods.snap_kv import SnapKV
from methods.tensor_attention import FactoredFourCache
from nanollm import kernel_switch
from nanollm.cache import ALL, LayerCache
from nanollm.window import window_rows, window_scores

B, H, G, D, T, LATER = 2, 2, 2, 16, 33, 2
ROOT = Path(__file__).parents[2]


class Uneven(LayerCache):
    """A cache that watches, with empty slots in the midst of some heads, and a bias."""
    watch = ALL

    def write(self, k, v, pos):
        super().write(k, v, pos, bias=k[..., 0].clone())

    def evict(self):
        if self.length == T:
            self.keep(torch.tensor([[3, 5, 32], [7, -1, -1]], device=DEVICE).expand(B, -1, -1))

    def observe(self, q, p):
        super().observe(q, p)
        self.told = p.mean(2)


ONE, PACKED = "decode_attention.attend_one", "decode_attention.attend_packed"
REVIVE, INSERT = "revive_attention.attend_one", "revive_attention.insert"
WINDOW, SKETCH = dict(budget=16, window_size=8), dict(budget=24, slack=2)
CASES = {
    "snap": (SnapKV, WINDOW, {"window_scores"}),
    "ada": (AdaKV, WINDOW, {"window_scores", PACKED}),
    "critical ada": (AdaKV, WINDOW | dict(select=Critical()), {"window_scores", "value_norms", PACKED}),
    "theta": (SnapKV, WINDOW | dict(select=LeastTheta()), {"window_scores", "value_norms"}),
    "chunks": (SnapKV, WINDOW | dict(select=Chunks(chunk_size=3)), {"window_scores"}),
    "residual ada": (AdaKV, WINDOW | dict(select=Residual(entries=2, rounds=1)), {"window_scores", PACKED}),
    "h2o": (H2O, dict(budget=16), {ONE}),
    "uneven": (Uneven, {}, {ONE}),
    "cam": (CaM, dict(budget=16), {ONE}),
    "scissorhands": (Scissorhands, dict(budget=16, recent=4, history=20), {ONE}),
    "mean weight": (MeanWeight, dict(budget=16, recent=4), {ONE}),
    "reviver": (KVReviver, SKETCH, {REVIVE, INSERT}),
    "means": (MeanReviver, SKETCH, {REVIVE, INSERT}),
    "signed": (SignedReviver, SKETCH, {REVIVE, INSERT}),
    "shrunk": (ShrunkReviver, SKETCH | dict(rows=3), {REVIVE, INSERT}),
    "one row": (ShrunkReviver, SKETCH, {INSERT}),  # attends to slots
    "pairs": (FactoredFourCache, {}, {"pair_attention.tensor_attention"}),
}
HALF = "ada", "critical ada", "uneven", "shrunk", "pairs"  # in 16 bits, too


def walk(case: str, dtype: torch.dtype):
    """The output of a prompt and of some later tokens, and the cache."""
    Method, options, _ = CASES[case]
    g, wide = torch.Generator().manual_seed(0), 2 if case == "pairs" else 1
    n = 5 if case == "pairs" else T  # one program for each query there
    q = 2 * torch.randn(B, H * G, n + LATER, D, generator=g)
    k, v = torch.randn(2, B, H, n + LATER, wide * D, generator=g)
    q, k, v = q.to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype)

    cache, y = Method(**options), []
    link(cache, w_o=torch.randn(24, H * G, D, generator=g).to(DEVICE, dtype))
    for part in torch.arange(n + LATER, device=DEVICE).split([n] + LATER * [1]):
        y.append(cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], part[None]))
        if len(part) == n:
            cache.end_prefill()
    return torch.cat(y, 2), cache


@pytest.mark.parametrize("case, dtype", [(case, torch.float32) for case in CASES] + [
    (case, torch.float16) for case in HALF])
def test_kernels_do_what_the_plain_code_does(case, dtype, poisoned, monkeypatch):
    off = 1e-4 if dtype == torch.float32 else 5e-3
    off = 5e-2 if case == "shrunk" and dtype == torch.float16 else off  # sums of many, in another order
    tolerance = dict(rtol=off, atol=off if dtype == torch.float16 else 1e-5)
    monkeypatch.setattr(kernel_switch, "use_kernels", False)
    y, cache = walk(case, dtype)
    called, plain = set(), kernel_switch.kernel_for

    def told(x, *name):
        called.add(".".join(name))
        return plain(x, *name)

    monkeypatch.setattr(kernel_switch, "on_gpu", lambda x: True)
    for module in [*sys.modules.values()]:
        if getattr(module, "kernel_for", None) is plain:
            monkeypatch.setattr(module, "kernel_for", told)
    fast_y, fast = walk(case, dtype)
    assert called == CASES[case][2]
    assert fast_y.shape == y.shape and fast_y.dtype == dtype and torch.allclose(fast_y, y, **tolerance)
    assert torch.equal(fast.pos, cache.pos) and fast.bytes() == cache.bytes()
    for name in cache.slots:
        assert torch.allclose(fast.slot(name).float(), cache.slot(name).float(), **tolerance), name
    if case == "uneven":
        assert torch.allclose(fast.told.float(), cache.told.float(), **tolerance)
    if INSERT in called:
        assert torch.allclose(fast.score, cache.score, **tolerance)
        assert torch.allclose(fast.sketch.x, cache.sketch.x, **tolerance)


def test_where_plain_code_runs_though_kernels_could(monkeypatch):
    for dtype in torch.float16, torch.bfloat16, torch.float32:  # a CPU's tensors
        assert kernel_switch.kernel_for(torch.zeros(1, dtype=dtype), "no such file") is None
    monkeypatch.setattr(kernel_switch, "on_gpu", lambda x: True)
    own = kernel_switch.kernel_file("value_norms").value_norms
    assert kernel_switch.kernel_for(torch.zeros(1), "value_norms") is own

    # a window too wide for a tile
    q, k = torch.randn(1, 1, 1, 129, 16), torch.randn(1, 1, 140, 16)
    assert torch.equal(window_scores(q, k), window_rows(q, k)[..., :11].mean(3))

    # packed heads of a cache that watches, or reads otherwise
    class Watches(SnapKV):
        watch = ALL

    class Reads(SnapKV):
        def read(self):
            return super().read()

    monkeypatch.delattr(kernel_switch.kernel_file("decode_attention"), "attend_packed")
    for Method in Watches, Reads:
        cache = Method(budget=4, window_size=1)
        k, v = torch.randn(2, B, H, 6, D)
        cache.write(k, v, torch.arange(6)[None])
        cache.keep(torch.tensor([[0, 3, 5], [4, -1, -1]]).expand(B, -1, -1))
        cache.pack()
        y, _ = cache.attention(torch.zeros(B, H * G, 1, D), torch.tensor([[6]]))
        expected = torch.stack((v[:, 0, [0, 3, 5]].mean(1), v[:, 1, 4]), 1)  # all scores are 0
        assert torch.allclose(y, expected.repeat_interleave(G, 1).unsqueeze(2), rtol=1e-5, atol=1e-6)


@interpreter
def test_every_launch_is_on_the_gpu_of_its_tensors(monkeypatch):
    """Triton launches on the current device; cuda:1 need not be that."""
    from triton.runtime.interpreter import InterpretedFunction
    inside, launched = [], []

    @contextmanager
    def guard(x):
        inside.append(x.device)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    monkeypatch.setattr(InterpretedFunction, "__getitem__",
                        lambda kernel, grid: lambda **how: launched.append([*inside]))
    for call in bench.typical(16, torch.float16):
        call()
    assert len(launched) >= 9 and all(devices == [torch.device("cpu")] for devices in launched)


@interpreter
def test_kernels_that_came_too_late_for_the_interpreter_say_so(monkeypatch):
    x = torch.ones(1, 1, 2, 16)
    monkeypatch.setattr(launch, "interpreted", False)
    with pytest.raises(ValueError, match="^tensors on cpu are for Triton's interpreter.*TRITON_INTERPRET=1"):
        value_norms.value_norms(x, x[0])
    monkeypatch.delenv("TRITON_INTERPRET")
    exec(Path(launch.__file__).read_text(), {})  # triton is here already: it would not be read
    assert "TRITON_INTERPRET" not in os.environ


def fresh(code: str, **environment: str) -> str:
    """What a new process prints, which knows only PATH and HOME and starts in the repository's root."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env={name: os.environ[name] for name in ("PATH", "HOME")} | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_kernels_does_nothing():
    """transformers looks for a library of that name: the Hub's."""
    told = fresh("import os, sys; before = dict(os.environ), {*sys.modules}; import kernels; "
                 "print(dict(os.environ) == before[0], {*sys.modules} - before[1])")
    assert told == "True {'kernels'}\n"


def test_any_file_of_ours_is_found_and_first_where_the_hubs_kernels_are_installed(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = True\n")
    files = sorted(file.stem for file in (ROOT / "kernels").glob("*.py"))
    told = fresh("import sys, kernels, torch; from nanollm import kernel_switch\n"
                 "kernel_switch.on_gpu = lambda x: True\n"
                 "x = torch.ones(1, 1, 2, 16); fast = kernel_switch.kernel_for(x, 'value_norms')\n"
                 "print(kernels.theirs, fast(x, x[0]).tolist())\n"
                 f"for file in {files}:\n"
                 "    for name in [*sys.modules]:\n"
                 "        if name.startswith(('nanollm_kernels.', 'methods')): del sys.modules[name]\n"
                 "    print(kernel_switch.kernel_file(file).__name__)", PYTHONPATH=str(tmp_path))
    assert told == "True [[[[16.0, 16.0], [16.0, 16.0]]]]\n" + "".join(
        f"nanollm_kernels.{file}\n" for file in files)


def test_what_the_compiler_says():
    """In another process, as this one's kernels are the interpreter's; for GPUs that are not there.

    Triton would compile anew for a number that is 1, or a multiple of 16: a text grows by a token at a time.
    On an H100 nothing is spilled. What wants most shared memory gets it at the widest heads of other GPUs.
    """
    told = fresh(
        "import torch, triton; from kernels.bench import compiled, typical, used\n"
        "kind, keys = torch.float16, {}\n"
        "really, triton.JITFunction._do_compile = triton.JITFunction._do_compile, (\n"
        "    lambda kernel, key, *how: keys[n].append((kernel.__name__, key)))\n"
        "for n in 40, 2048:\n"
        "    keys[n] = []\n"
        "    compiled(typical(16, kind, n), 90)\n"
        "print('keys', len({name for name, _ in keys[40]}), keys[40] == keys[2048])\n"
        "triton.JITFunction._do_compile = really\n"
        "for kernel, made in compiled(typical(128, kind)[:5], 90):\n"
        "    print('h100', kernel.__name__, *used(made))\n"
        "most = lambda calls, arch: max(made.metadata.shared for _, made in compiled(calls, arch))\n"
        f"for arch, D in {((75, 64), (80, 256), (89, 128))}:\n"
        "    print('fits', arch, most(typical(D, kind)[2:4 if arch == 89 else 3], arch))",
        TRITON_INTERPRET="0")
    lines = [line.split() for line in told.splitlines()]
    assert lines[0] == ["keys", "9", "True"]
    h100 = [line[1:] for line in lines if line[0] == "h100"]
    assert {name for name, *_ in h100} == {"attend", "add_up", "column_sums", "norms", "row_sums",
                                           "column_means", "rows_of_pairs", "attend_revived"}
    for name, registers, stack, shared in h100:
        assert int(stack) == 0 and int(registers) <= 255 and int(shared) <= 1024 * 227, name
    for arch, shared in (map(int, line[1:]) for line in lines if line[0] == "fits"):
        # NVIDIA's KiB of a program; of an SM a KiB more, or as many: what `on_gpu` asks for
        assert shared <= 1024 * {75: 64, 80: 163, 89: 99}[arch], arch
