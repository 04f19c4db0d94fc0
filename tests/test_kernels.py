"""Methods with the kernels in the place of their plain code, in Triton's interpreter: the same slots, outputs and bytes."""
from contextlib import contextmanager
from dataclasses import dataclass
import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import DEVICE, interpreter

pytest.importorskip("triton")  # Linux only

from kernels.decode_attention import Segment  # noqa: E402
from methods.ada_kv import AdaKV  # noqa: E402
from methods.cam import CaM  # noqa: E402
from methods.chunk_kv import ChunkKV  # noqa: E402
from methods.critical_kv import Critical, LeastTheta  # noqa: E402
from methods.h2o import H2O  # noqa: E402
from methods.kv_reviver import KVReviver  # noqa: E402
from methods.quantized import LowBitVague  # noqa: E402
from methods.residual_entry import Residual  # noqa: E402
from methods.scissorhands import MeanWeight, Scissorhands  # noqa: E402
from methods.snap_kv import SnapKV  # noqa: E402
from methods.tensor_attention import FactoredFourCache  # noqa: E402
from nanollm import cache as seam  # noqa: E402
from nanollm.cache import LayerCache  # noqa: E402

B, H, G, D, T, LATER = 2, 2, 2, 16, 40, 3
ROOT = Path(__file__).parent.parent


@dataclass(eq=False)
class CriticalAdaKV(Critical, AdaKV):
    """Both: heads of different length by weight × norm."""


class Uneven(LayerCache):
    """A cache that watches, with empty slots in the midst of some heads, and a bias."""
    watch = seam.ALL

    def write(self, k, v, pos):
        super().write(k, v, pos, bias=k[..., 0].clone())

    def forget(self):
        if self.length == T:
            self.keep(torch.tensor([[3, 5, 39], [7, -1, -1]], device=DEVICE).expand(B, -1, -1))
        self.told = None

    def observe(self, q, p):
        super().observe(q, p)
        self.told = p.mean(2)


ONE = "decode_attention.attend_one"
WINDOW = dict(budget=16, window=8)
CASES = {
    "snap": (SnapKV, WINDOW, {"window_votes"}),
    "ada": (AdaKV, WINDOW, {"window_votes", ONE}),
    "critical ada": (CriticalAdaKV, WINDOW, {"window_votes", "value_norms", ONE}),
    "theta": (LeastTheta, WINDOW, {"window_votes", "value_norms"}),
    "chunks": (ChunkKV, dict(WINDOW, chunk=3), {"window_votes"}),
    "k-means": (Residual, dict(WINDOW, entries=2, rounds=1), {"window_votes"}),
    "residual ada": (dataclass(eq=False)(type("ResidualAdaKV", (Residual, AdaKV), {})), WINDOW, {"window_votes", ONE}),
    "h2o": (H2O, dict(budget=16), {ONE}),
    "uneven": (Uneven, {}, {ONE}),
    "cam": (CaM, dict(budget=16), {ONE}),
    "scissorhands": (Scissorhands, dict(budget=16, recent=4, history=20), {ONE}),
    "mean weight": (MeanWeight, dict(budget=16, recent=4), {ONE}),
    "low bits": (LowBitVague, dict(bits=2, group=8, exact=8, heavy=4), {ONE}),
    "reviver": (KVReviver, dict(budget=30, slack=2), {"revive_attention.attend_one", "revive_attention.insert"}),
    "signed": (KVReviver, dict(budget=30, slack=2, kind="signed"), {"revive_attention.attend_one", "revive_attention.insert"}),
    "shrunk": (KVReviver, dict(budget=30, slack=2, kind="shrunk"), {"revive_attention.attend_one", "revive_attention.insert"}),
    "one row": (KVReviver, dict(budget=30, slack=2, kind="shrunk", rows=1), {"revive_attention.insert"}),  # attends to slots
    "pairs": (FactoredFourCache, {}, {"tensor_attention"}),
}


SKETCHES = "reviver", "signed", "shrunk", "one row"


def walk(case: str, dtype: torch.dtype, seed: int = 0):
    """The output of a prompt and of some later tokens, and the cache."""
    Method, knobs, _ = CASES[case]
    g = torch.Generator().manual_seed(seed)
    n = 12 if case == "pairs" else T  # one program for each query there
    q = 2 * torch.randn(B, H * G, n + LATER, D, generator=g)
    k, v = torch.randn(2, B, H, n + LATER, D * Method.vectors, generator=g)
    cache, y = Method(**knobs), []
    q, k, v = q.to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype)
    cache.link(0, 1, None, torch.randn(24, H * G, D, generator=g).to(DEVICE, dtype), None)
    for first, last in [(0, n), *((t, t + 1) for t in range(n, n + LATER))]:
        y.append(cache.attend(q[:, :, first:last], k[:, :, first:last], v[:, :, first:last], torch.arange(first, last, device=DEVICE)[None]))
        if last == n:
            cache.finish_prompt()
    return torch.cat(y, 2), cache


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, dict(rtol=1e-4, atol=1e-5)), (torch.float16, dict(rtol=5e-3, atol=5e-3))])
@pytest.mark.parametrize("case", CASES)
def test_kernels_do_what_the_plain_code_does(case, dtype, tolerance, poisoned, monkeypatch):
    if dtype == torch.float16 and case in SKETCHES:  # sums of many in 16 bits, in another order, and scores of tens
        tolerance = dict(rtol=5e-2, atol=5e-2)
    monkeypatch.setattr(seam, "use_kernels", False)
    y, cache = walk(case, dtype)
    called, plain = set(), seam.kernel_for

    def told(x, *name):
        called.add(".".join(name))
        return plain(x, *name)

    monkeypatch.setattr(seam, "on_gpu", lambda x: True)
    monkeypatch.setattr(seam, "kernel_for", told)
    for method in ("critical_kv", "kv_reviver", "tensor_attention"):
        monkeypatch.setattr(f"methods.{method}.kernel_for", told)
    fast_y, fast = walk(case, dtype)
    assert called == CASES[case][2]
    assert fast_y.shape == y.shape and fast_y.dtype == dtype and torch.allclose(fast_y, y, **tolerance)
    assert torch.equal(fast.pos, cache.pos) and fast.bytes() == cache.bytes() and bool(fast.packed) == bool(cache.packed)
    for name in cache.slots:
        assert torch.allclose(fast.slot(name).float(), cache.slot(name).float(), **tolerance), name
    if case == "uneven":
        assert torch.allclose(fast.told.float(), cache.told.float(), **tolerance)
    if case in SKETCHES:
        assert torch.allclose(fast.score, cache.score, **tolerance)
        assert torch.allclose(fast.sketch.x, cache.sketch.x, **tolerance)


def test_slots_in_a_buffer_are_taken_as_they_lie():
    buffer = torch.randn(2, B, H, 9, D)
    k, v = buffer[..., :5, :]
    s = Segment.of(k, v)
    assert s.k.data_ptr() == k.data_ptr() and s.v.data_ptr() == v.data_ptr() and s.longest == 5
    rows = (s.start[:, None] + torch.arange(5)).view(B, H, 5)
    assert torch.equal(s.k[rows], k) and torch.equal(s.v[rows], v)
    assert torch.equal(s.by_head(torch.arange(len(s.k)), B, H), rows)
    bias = torch.randn(B, H, 5)
    turned = torch.randn(2, B, 5, H, D).transpose(2, 3)
    for s, (k, v) in ((Segment.of(k, v, bias), (k, v)), (Segment.of(*turned, bias), turned), (Segment.of(k, turned[1], bias), (k, turned[1])),
                      (Segment.of(k, turned[1]), (k, turned[1])), (Segment.of(*turned), turned)):
        rows = (s.start[:, None] + torch.arange(5)).view(B, H, 5)
        assert torch.equal(s.k[rows], k) and torch.equal(s.v[rows], v) and (s.bias is None or torch.equal(s.bias[rows], bias))


def test_new_slots_behind_packed_ones_may_have_a_bias(monkeypatch):
    cache, g = LayerCache(), torch.Generator().manual_seed(0)
    pos = torch.arange(8, device=DEVICE)[None]
    bias = torch.randn(B, H, 8, generator=g).to(DEVICE)
    cache.write(*torch.randn(2, B, H, 6, D, generator=g).to(DEVICE), pos[:, :6], bias=bias[..., :6])
    cache.keep(torch.tensor([[0, 3, 5], [4, -1, -1]], device=DEVICE).expand(B, -1, -1))
    cache.pack()
    cache.write(*torch.randn(2, B, H, 2, D, generator=g).to(DEVICE), pos[:, 6:], bias=bias[..., 6:])
    q, pos = torch.randn(B, H * G, 1, D, generator=g).to(DEVICE), pos[:, 7:]
    k, v, at, bias = cache.read()
    expected = (seam.probabilities(q, k, at, bias, pos).flatten(2, 3) @ v).view(B, H * G, 1, D)
    monkeypatch.setattr(seam, "on_gpu", lambda x: True)
    y, p = cache.decode(q, pos)
    assert p is None and torch.allclose(y, expected, rtol=1e-5, atol=1e-6)


GPUS = {75: (64, 64, 64), 80: (164, 163, 256), 89: (100, 99, 128), 90: (228, 227, 256), 120: (100, 99, 128)}
"""Ten times the compute capability: KiB of shared memory a processor and a program, by NVIDIA's table, and the widest head."""


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_kernels_are_for_16_bits_on_a_gpu_and_heads_that_fit(dtype, arch, monkeypatch):
    room, _, widest = GPUS[arch]
    monkeypatch.setattr(seam, "use_kernels", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(shared_memory_per_multiprocessor=1024 * room))
    for D in (16, 40, 64, 65, 128, 129, 256, 257, 512):
        x = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 2, 3, D), device="cuda:1")
        assert seam.on_gpu(x) == (dtype.itemsize == 2 and D <= widest), D
    assert not seam.on_gpu(torch.zeros(1, dtype=dtype))
    monkeypatch.setattr(seam, "use_kernels", False)
    assert not seam.on_gpu(x)


@interpreter
def test_every_launch_is_on_the_gpu_of_its_tensors(monkeypatch):
    """Triton launches on the current device; cuda:1 need not be that."""
    from kernels.resources import calls
    from triton.runtime.interpreter import InterpretedFunction
    inside, launched = [], []

    @contextmanager
    def guard(x):
        inside.append(x.device)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda kernel, grid: lambda **how: launched.append([*inside]))
    for call in calls(16, torch.float16):
        call()
    assert len(launched) >= 9 and all(devices == [torch.device("cpu")] for devices in launched)


def test_a_kernel_is_compiled_once_for_all_lengths():
    """Triton would compile anew for a number that is 1, or a multiple of 16: a text grows by a token at a time."""
    told = fresh("import torch; from kernels.resources import calls, compiled\n"
                 "one, two = ([(kernel.__name__, id(made)) for kernel, made in compiled(calls(16, torch.float16, n), 90)] for n in (40, 2048))\n"
                 "print(len(dict(one)), one == two)", TRITON_INTERPRET="0")
    assert told == "9 True\n"


def test_heads_that_fit_are_those_that_the_compiler_says_fit():
    """Compiled for GPUs that are not there: every launcher at the widest head, and the norms, which want most, at twice that."""
    told = fresh("import torch; from kernels.resources import calls, compiled\n"
                 "most = lambda calls, arch: max(made.metadata.shared for _, made in compiled(calls, arch))\n"
                 f"for arch, D in {[(arch, widest) for arch, (*_, widest) in GPUS.items() if arch != 120]}:\n"
                 "    print(arch, most(calls(D, torch.float16), arch), most(calls(2 * D, torch.float16)[2:3], arch))",
                 TRITON_INTERPRET="0")
    for line in told.splitlines():
        arch, fits, too_much = map(int, line.split())
        assert fits <= 1024 * GPUS[arch][1] < too_much, line


def test_a_window_too_wide_for_a_tile_votes_by_plain_code(monkeypatch):
    monkeypatch.setattr(seam, "on_gpu", lambda x: True)
    q, k = torch.randn(1, 1, 1, 129, 16), torch.randn(1, 1, 140, 16)
    assert torch.equal(seam.window_votes(q, k), seam.window_rows(q, k)[..., :11].mean(3))


@pytest.mark.parametrize("how", ["watches", "reads otherwise"])
def test_a_packed_cache_that_watches_or_reads_otherwise_runs_plain(how, monkeypatch):
    class Twice(LayerCache):
        watch = seam.ALL if how == "watches" else 0

        def read(self):
            k, v, at, bias = super().read()
            return k, 2 * v, at, bias

    class Watches(LayerCache):
        watch = seam.ALL

    cache = Twice() if how == "reads otherwise" else Watches()
    cache.write(*torch.randn(2, B, H, 6, D), torch.arange(6)[None])
    cache.keep(torch.tensor([[0, 3, 5], [4, -1, -1]]).expand(B, -1, -1))
    cache.pack()
    monkeypatch.setattr(seam, "on_gpu", lambda x: True)
    assert cache.decode(torch.zeros(B, H * G, 1, D), torch.tensor([[6]])) is None


def test_without_a_gpu_no_kernel_is_asked_for():
    assert seam.kernel_for(torch.zeros(1), "no such file") is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "on_gpu", lambda x: True)
        assert seam.kernel_for(torch.zeros(1), "value_norms") is seam.kernel_file("value_norms").value_norms


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
    told = fresh("from transformers import AutoModelForCausalLM, LlamaForCausalLM; from nanollm import TINY; "
                 "print(type(AutoModelForCausalLM.from_pretrained(TINY)) is LlamaForCausalLM)")
    assert told == "True\n"


def test_every_file_of_kernels_can_be_imported_first():
    """Each in a process of its own, which is forked off one that has torch."""
    told = fresh("import importlib, os, pathlib, torch\n"
                 "for file in pathlib.Path('kernels').glob('*.py'):\n"
                 "    if not os.fork(): importlib.import_module(f'kernels.{file.stem}'), os._exit(0)\n"
                 "    print(file.stem, os.wait()[1])")
    assert dict(line.split() for line in told.splitlines()) == {file.stem: "0" for file in (ROOT / "kernels").glob("*.py")}


def test_where_another_library_is_called_kernels_ours_are_found(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = True\n")
    told = fresh("import kernels, torch; from nanollm import cache; cache.on_gpu = lambda x: True; x = torch.ones(1, 1, 2, 16); "
                 "fast = cache.kernel_for(x, 'value_norms'); print(kernels.theirs, fast(x, x[0]).tolist()); "
                 "from transformers import LlamaForCausalLM", PYTHONPATH=str(tmp_path), TRITON_INTERPRET="1")
    assert told == "True [[[[16.0, 16.0], [16.0, 16.0]]]]\n"
    for file in "bench", "resources":
        done = subprocess.run([sys.executable, f"kernels/{file}.py", "--help"], cwd=ROOT, capture_output=True, text=True,
                              env=os.environ | dict(PYTHONPATH=str(tmp_path)))
        assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_kernels_that_came_too_late_for_the_interpreter_say_so_when_they_are_called():
    told = fresh("import os, torch, triton; torch.cuda.is_available = lambda: False; before = dict(os.environ); "
                 "from kernels.value_norms import plain, value_norms; x = torch.ones(1, 1, 2, 16); plain(x, x[0])\n"
                 "try: value_norms(x, x[0])\nexcept ValueError as e: print(e, dict(os.environ) == before)")
    assert told.startswith("tensors on cpu are for Triton's interpreter") and "TRITON_INTERPRET=1" in told and told.endswith(" True\n")
