"""Time the kernels on a GPU, or compile them without a GPU and report their resources.

    python -m kernels.bench               # on a GPU: check each kernel against its plain code, then time it
    python -m kernels.bench --resources   # without a GPU: registers, spills and shared memory

The shapes are those of one layer of an 8-billion Llama 3: 8 key/value heads, 32 query heads, head dim 128,
bf16. Times are medians in µs. The runs cycle through several sets of inputs, so that no input comes from the
GPU's cache.

    floor     the larger of two times: bytes that must be moved / rate of a large copy, and
              tensor-core operations / rate of a large product; both rates are measured in the same run
    kernel    the kernel in a CUDA graph, without the gaps between launches
    sdpa      PyTorch's attention in a CUDA graph
    called    the kernel, called from Python
    eager     the methods' plain code, called from Python
"""
import argparse
from collections.abc import Callable, Iterator
import copy
from datetime import date
from importlib.util import find_spec
import json
import os
from pathlib import Path
from statistics import median
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import tqdm

if __name__ == "__main__":  # run main from the package, for relative imports
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from nanollm.commands.shell import command
    from nanollm.kernel_switch import kernel_file
    sys.exit(command(kernel_file("bench").main, sys.argv[1:]))

if find_spec("triton"):  # only on Linux; `show` works without it
    from . import launch
    from .decode_attention import Segment, decode_attention
    from .pair_attention import tensor_attention
    from .revive_attention import insert, plain_insert, revive_attention
    from .value_norms import value_norms
    from .window_scores import window_scores
from methods import critical_kv
from methods.count_sketch import PRIME, Sketch
from methods.ours.kv_reviver_shrunk import SignedSketch
from methods.tensor_attention import FactoredFourCache
from nanollm import kernel_switch, window
from nanollm.check import whole
from nanollm.commands.shell import check_output, replace
from nanollm.commands.text_table import text_table

LENGTHS, BATCHES = (1024, 4096, 16384, 32768, 131072), (1, 8, 64)
MOST_TOKENS = 2 ** 21  # in a batch; their keys and values take 8 GiB


# ---- the cases ---------------------------------------------------------------------------


class Shape(NamedTuple):
    """Describe one layer: B sequences of n tokens, H key/value heads of G query heads, head dim D."""
    B: int
    n: int
    H: int = 8
    G: int = 4
    D: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


class Case(NamedTuple):
    """Describe one computation to time: the kernel, and other code that must give the same result."""
    name: str
    shape: Shape
    bytes: int                    # least number of bytes moved
    operations: int               # on the tensor cores
    draw: Callable[[], tuple]     # new inputs
    kernel: Callable[..., Tensor]
    eager: Callable[..., Tensor]  # the methods' plain code
    sdpa: Callable[..., Tensor] | None = None  # PyTorch's attention, if it can compute this


def decode(s: Shape, spread: float = 0.0, sums: bool = False) -> Case:
    """Return the case of decoding one token over (1 − spread)·n to (1 + spread)·n slots per head."""
    B, n, H, G, D = s[:5]
    counts = (n * torch.linspace(1 - spread, 1 + spread, B * H)).round().int()
    slots, size, longest = int(counts.sum()), s.dtype.itemsize, int(counts.max())

    def draw():
        start = counts.cumsum(0) - counts
        k, v = s.draw(2, slots, D)
        return s.draw(B, H, G, D), Segment(k, v, start.long().to(s.device), counts.to(s.device), longest)

    def dense(segment):
        """Return k, v and a mask of the slots that exist: heads padded as in WindowCache."""
        if not spread:
            return segment.k.view(B, H, n, D), segment.v.view(B, H, n, D), None
        place = torch.arange(longest, device=s.device)
        i = (segment.start[:, None] + place).clamp(max=slots - 1).flatten()
        k, v = (x[i].view(B, H, longest, D) for x in (segment.k, segment.v))
        return k, v, (place < segment.count[:, None]).view(B, H, 1, longest)

    def eager(q, segment):
        k, v, mask = dense(segment)
        score = q @ k.mT * D ** -0.5
        score = score if mask is None else score.masked_fill(~mask, -torch.inf)
        p = score.softmax(-1, dtype=torch.float32).to(q.dtype)
        return torch.cat(((p @ v).flatten(), p.sum(2).flatten())) if sums else p @ v

    def sdpa(q, segment):
        k, v, mask = dense(segment)
        return F.scaled_dot_product_attention(q, k, v, mask)

    def kernel(q, segment):
        y, weights = decode_attention(q, [segment], sums=sums)
        return torch.cat((y.flatten(), weights[0].to(y))) if sums else y

    name = "decode_attention" + (" ragged" if spread else "") + (" + sums" if sums else "")
    moved = 2 * slots * D * size + sums * slots * (8 * G + 4)
    return Case(name, s, moved, 4 * slots * G * D, draw, kernel, eager, None if sums else sdpa)


def scoring(s: Shape, w: int = 32) -> Case:
    B, n, H, G, D = s[:5]
    return Case("window_scores", s, B * H * n * (D * s.dtype.itemsize + 4 * G), 4 * B * H * G * w * n * D,
                lambda: (s.draw(B, H, G, min(w, n), D), s.draw(B, H, n, D)), window_scores,
                window.window_scores)


def norms(s: Shape) -> Case:
    B, n, H, G, D = s[:5]
    width = H * G * D  # d_model
    return Case("value_norms", s, B * H * n * (D * s.dtype.itemsize + 4 * G), 2 * B * H * G * n * D * width,
                lambda: (s.draw(B, H, n, D), s.draw(width, H * G, D) * width ** -0.5), value_norms,
                critical_kv.value_norms)


def revive(s: Shape, rows: int, by_slots: bool = False) -> Case:
    """Return the case of KVReviver with a tenth of the full cache's bytes; sdpa is full attention."""
    B, n, H, G, D = s[:5]
    size, budget = s.dtype.itemsize, n // 10
    width = max(budget // 10 // rows, 1)
    exact = max(budget - rows * width - -(-4 * n // (2 * D * size)), 1)  # minus 4 score bytes per token
    vague = n - exact

    def draw():
        sketch = (Sketch if rows == 3 else SignedSketch)(s.draw(B, H, 1, D), rows, width, 0)
        sketch.tokens = n
        token = torch.randperm(n)[:vague].sort().values.to(s.device).expand(B, H, -1)
        for part in token.split(8192, 2):
            sketch.insert(part, *s.draw(2, B, H, part.shape[2], D))
        sketch.x *= (width / vague) ** 0.5  # scale sums back to the norm of one token

        q, (k, v) = s.draw(B, H, G, D), s.draw(2, B, H, exact, D)
        return q, k, v, token.int().contiguous(), sketch, s.draw(2, B, H, n, D)

    def kernel(q, k, v, token, sketch, full):
        if by_slots:
            return sketch.attend(q, k, v, token)[0]
        return revive_attention(q, Segment.of(k, v), token, sketch.x, sketch.bucket_by, sketch.sign_by,
                                signed_keys=sketch.signed_keys)[0]

    def eager(q, k, v, token, sketch, full):
        k, v = (torch.cat(x, 2) for x in zip((k, v), sketch.query(token)))
        return F.scaled_dot_product_attention(q, k, v)

    def sdpa(q, k, v, token, sketch, full):  # the full cache: another result
        return F.scaled_dot_product_attention(q, *full)

    name = f"revive_attention {rows} row{'s' * (rows > 1)}" + (" by slots" if by_slots else "")
    moved = B * H * (2 * D * size * (exact + rows * width) + 4 * vague)
    worked = 4 * B * H * G * D * (exact + (width if by_slots else vague))
    return Case(name, s, moved, worked, draw, kernel, eager, sdpa)


def inserting(s: Shape) -> Case:
    """Return the case of inserting n tokens into 3 rows of n/300 slots.

    The keys have mean 3, so that their sums grow with every token, like those of real keys.
    """
    B, n, H, G, D = s[:5]
    width, hashes = max(n // 300, 1), torch.randint(PRIME, (2, 4, 3), device=s.device)

    def draw():
        token = torch.arange(n, device=s.device).int().repeat(B, H, 1)
        return *(s.draw(2, B, H, n, D) + 3), token, s.draw(B, H, 3 * width, 2 * D)

    def run(add):
        def into(k, v, token, x):
            x.zero_()
            add(x, token, k, v, x.new_ones(B, H, n), *hashes)
            return x
        return into

    return Case("insert", s, B * H * 2 * D * s.dtype.itemsize * (n + 3 * width), 0, draw, run(insert),
                run(plain_insert))


def pairs(s: Shape) -> Case:
    B, n, H, G, D = s[:5]

    def sdpa(q, k1, k2, v1, v2):  # attention of q ∘ k₁; then weigh its outputs by their totals
        rows = (q.unsqueeze(3) * k1.unsqueeze(2)).flatten(1, 2)
        k2, v2 = (x.repeat_interleave(G, 1) for x in (k2, v2))
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention(rows, k2, v2)[:2]
        return (lse.softmax(-1).to(y).unsqueeze(-1) * y).unflatten(1, (H, G)).mul(v1.unsqueeze(2)).sum(3)

    return Case("tensor_attention", s, B * H * n * D * 4 * s.dtype.itemsize, 4 * B * H * G * n * n * D,
                lambda: (s.draw(B, H, G, D), *s.draw(4, B, H, n, D)), tensor_attention,
                lambda q, *kv: FactoredFourCache().one_query(q * D ** -0.5, *kv),
                sdpa if s.device == "cuda" and s.dtype.itemsize == 2 else None)


def cases(lengths=LENGTHS, batches=BATCHES, **shape_options) -> Iterator[Case]:
    for n in lengths:
        for B in batches:
            if B * n > MOST_TOKENS:
                continue
            s = Shape(B, n, **shape_options)
            yield from (decode(s), decode(s, spread=0.8), decode(s, sums=True), scoring(s), norms(s),
                        revive(s, 3), revive(s, 1), revive(s, 1, by_slots=True), inserting(s))
            if B == min(batches) and n <= 32768:
                yield pairs(s)


# ---- measuring -------------------------------------------------------------------------------


def difference(x: Tensor, y: Tensor) -> float:
    """Return ‖x − y‖/‖y‖; NaN if any number is NaN."""
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm()).item()


def exact(x):
    """Return the input x in float32."""
    if isinstance(x, Segment):
        return x._replace(k=x.k.float(), v=x.v.float())
    if isinstance(x, Sketch):
        x = copy.copy(x)
        x.x, x.flip = x.x.float(), x.flip.float()
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def check(case: Case, most: float):
    """Raise ValueError if the kernel's result differs too much from the plain code's in float32.

    The relative error may be `most`, or 1.5 times the error of the plain code in the case's own dtype if that
    is larger. Free memory is first filled with NaN, so that reading unwritten memory fails the check.
    """
    inputs = case.draw()
    truth = case.eager(*map(exact, inputs)).clone()
    plain_off = difference(case.eager(*inputs), truth)
    for size in range(8, 26 if case.shape.device == "cuda" else 8):  # the allocator will reuse this memory
        [torch.full((2 ** size,), torch.nan, device=case.shape.device) for _ in range(4)]

    for name, other in (("kernel", case.kernel), ("sdpa", case.sdpa)):
        if other is None or name == "sdpa" and case.name.startswith("revive"):
            continue
        off = difference(other(*inputs), truth)
        if not off <= max(most, 1.5 * plain_off):
            raise ValueError(f"{name} is {off:.3g} off the plain code in float32; at most {most} is allowed, "
                             f"or 1.5 times the plain code's own error in {case.shape.dtype}, "
                             f"{plain_off:.3g}")


def microseconds(run: Callable, sets: list[tuple], graph: bool) -> float:
    """Return the median time of one run on these inputs, as replays of a graph or as plain calls."""
    def run_all():
        for inputs in sets:
            run(*inputs)

    torch.cuda.synchronize()
    if graph:
        from triton.testing import do_bench_cudagraph
        return 1e3 * do_bench_cudagraph(run_all, return_mode="median") / len(sets)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        run_all()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e6 * median(times[1:]) / len(sets)  # the first run fills the allocator


def ceilings() -> dict[str, float]:
    """Return the bytes per second of a large copy and the operations per second of a large product.

    The bytes count both reading and writing. The product is in bf16.
    """
    x, y = torch.randn(2, 2 ** 29, device="cuda", dtype=torch.bfloat16)
    copy = 4 * x.numel() / microseconds(lambda: y.copy_(x), [()], True) * 1e6
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return dict(copy=copy, product=2 * 8192 ** 3 / microseconds(lambda: a @ b, [()], True) * 1e6)


def floored(case: Case, ceiling: dict[str, float]) -> dict:
    """Return the case's name, size, bytes, operations and floor in µs."""
    moved = case.bytes / ceiling["copy"] * 1e6
    worked = case.operations / ceiling["product"] * 1e6
    return dict(kernel_name=case.name, batch=case.shape.B, tokens=case.shape.n, bytes=case.bytes,
                operations=case.operations, ops_per_byte=case.operations / case.bytes,
                binds="memory" if moved >= worked else "units", floor=max(moved, worked))


def measured(case: Case, ceiling: dict[str, float], cache: int) -> dict:
    """Return the row of one case: times in µs, and ratios. cache: bytes of the GPU's cache."""
    sets = [case.draw() for _ in range(min(max(1, 4 * cache // case.bytes), 256))]
    row = floored(case, ceiling)
    row["kernel"] = microseconds(case.kernel, sets, True)
    row["called"] = microseconds(case.kernel, sets, False)
    if case.shape.B * case.shape.n <= 2 ** 18:  # plain code needs more memory
        row["eager"] = microseconds(case.eager, sets[:16], False)
    if case.sdpa:
        row["sdpa"] = microseconds(case.sdpa, sets, True)
        row["over_sdpa"] = row["sdpa"] / row["kernel"]
    return row | dict(of_floor=row["floor"] / row["kernel"])


# ---- compiled, without a GPU ---------------------------------------------------------------


def typical(D: int, dtype: torch.dtype, n: int = 100) -> list[Callable]:
    """Return calls of every launcher: n slots or tokens per head, head dim D, G = 4."""
    q, k, w_o = (torch.zeros(*shape, D, dtype=dtype) for shape in ((1, 2, 4), (1, 2, n), (300, 8)))
    window = q.unsqueeze(3).repeat(1, 1, 1, 32, 1)

    one, mean = torch.zeros(1, 2, n), torch.zeros(1, 2, 2 * D)
    exact, token = Segment.of(k, k, one), one.int()
    sketch = {rows: torch.zeros(1, 2, 5 * rows, 2 * D, dtype=dtype) for rows in (1, 3)}
    hashes = {rows: torch.zeros(2, 4, rows, dtype=torch.int64) for rows in (1, 3)}
    return [
        lambda: decode_attention(q, [exact], sums=True),
        lambda: window_scores(window, k),
        lambda: value_norms(k, w_o),
        lambda: tensor_attention(q, k, k, k, k),
        lambda: revive_attention(q, exact, token, sketch[3], *hashes[3], sums=True),
        lambda: revive_attention(q, exact, token, sketch[1], *hashes[1], mean, signed_keys=True, sums=True),
        lambda: insert(sketch[3], token, k, k, one, *hashes[3])]


def compiled(calls: list[Callable], arch: int) -> list[tuple]:
    """Return the kernels that these calls launch, each with its binary, without running them.

    arch: ten times the compute capability of the GPU. A kernel compiled before comes from Triton's cache.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    def compile_only(kernel, grid):
        return lambda **how: made.append((kernel, kernel.run(grid=grid, warmup=True, **how)))

    made: list[tuple] = []
    target = GPUTarget("cuda", arch, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_device=lambda: arch, get_current_stream=lambda device: None,
        get_current_target=lambda: target))
    triton.JITFunction.__getitem__ = compile_only
    launch.interpreted = True  # so that the launchers accept tensors on a CPU
    for call in calls:
        call()
    return made


def used(made) -> tuple[int, int, int]:
    """Return registers and stack bytes (spills) per thread, and shared-memory bytes per program."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        report = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
                                capture_output=True, text=True, check=True).stdout
    usage = dict(pair.split(":") for pair in report.split() if ":" in pair)
    return int(usage["REG"]), int(usage["STACK"]), made.metadata.shared


def resources(D: int, arch: int, types: list[str]) -> list[dict]:
    """Return a row for each kernel and type: the largest values among its compiled versions."""
    usages: dict[tuple, list] = {}
    for name in types:
        dtype = dict(bf16=torch.bfloat16, fp16=torch.float16)[name]
        for kernel, made in compiled(typical(D, dtype), arch):
            file = Path(kernel.fn.__code__.co_filename).stem
            usages.setdefault((f"{file}.{kernel.__name__}", name), []).append(used(made))
    names = "registers", "stack", "shared"
    return [dict(kernel_name=kernel, type=name) | dict(zip(names, map(max, zip(*versions))))
            for (kernel, name), versions in usages.items()]


# ---- printing ---------------------------------------------------------------------------------

FORMS = dict.fromkeys(("kernel_name", "type", "registers", "stack", "shared", "batch", "tokens"), "") | dict(
    ops_per_byte=".0f", binds="", floor=".1f", kernel=".1f", called=".1f", eager=".1f", sdpa=".1f",
    of_floor=".2f", over_sdpa=".2f")


def show(rows: list[dict]) -> str:
    """Return the rows, of times or of resources, as a text table."""
    keys = [key for key in FORMS if any(key in row for row in rows)]
    cells = [[format(row[key], FORMS[key]) if key in row else "" for key in keys] for row in rows]
    return text_table([keys, *cells])


def time_all(lengths: list[int], file: Path):
    """Check every kernel against its plain code, then time all cases and write each row to `file`.

    If a case fails, the others continue; a ValueError at the end names all cases that failed.
    """
    kernel_switch.use_kernels = False  # so that the methods run their plain code
    failed = {}

    def done(case: Case, run: Callable, *how):
        try:
            return run(case, *how)
        except Exception as error:
            where = f"{case.name} at batch {case.shape.B}, {case.shape.n} tokens"
            failed[where] = f"{type(error).__name__}: {error}"

    torch.manual_seed(0)
    with torch.inference_mode():
        for case in cases(lengths=[1037], batches=[1, 3]):
            done(case, check, 5e-3)
        wrong = {name.split(" at batch")[0] for name in failed}  # these are not timed
        ceiling, device = ceilings(), torch.cuda.get_device_properties(0)
        result = dict(device=f"{device.name}, {date.today()}", torch=torch.__version__,
                      triton=launch.triton.__version__, ceilings=ceiling, rows=[])
        for case in tqdm([case for case in cases(lengths) if case.name not in wrong], desc="timing"):
            if row := done(case, measured, ceiling, device.L2_cache_size):
                result["rows"].append(row)
                replace(file, (json.dumps(result, indent=1) + "\n").encode())

    print(f"{result['device']}: copy {ceiling['copy'] / 1e12:.2f} TB/s, bf16 product "
          f"{ceiling['product'] / 1e12:.0f} TFLOP/s\n\n{show(result['rows'])}\n\n"
          "Times (floor, kernel, called, eager, sdpa) are medians in µs; --help explains them.\n"
          "ops_per_byte: tensor-core operations per byte; binds: limit behind the floor, memory or\n"
          "units (the tensor cores); of_floor: floor / kernel; over_sdpa: sdpa / kernel.")
    if failed:
        why = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise ValueError(f"{len(failed)} cases failed: {why}")


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--json", type=Path, metavar="FILE", help="file for the rows, written after each row; "
           "default kernels/bench.json, with --resources none")
    option("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS",
           help=f"numbers of cached tokens to time; default {' '.join(map(str, LENGTHS))}")
    option("--resources", action="store_true", help="compile the kernels without running them; needs no GPU")
    option("--dim", type=int, default=128, help="with --resources: dimension of a head; default %(default)s")
    option("--arch", type=int, default=90, choices=(75, 80, 86, 89, 90, 100, 120), help="with --resources: "
           "ten times the GPU's compute capability; default %(default)s, for H100 and H200")
    option("--types", nargs="+", choices=("bf16", "fp16"), default=("bf16", "fp16"),
           help="with --resources: number formats; default both")
    args = parser.parse_args(argv)
    whole("--dim", args.dim, 1, 256)
    for n in args.lengths:
        whole("length", n, 1, MOST_TOKENS)
    if not find_spec("triton"):
        raise ValueError("Triton is not installed, and the kernels need it; on Linux: pip install triton")
    file = args.json or (None if args.resources else Path(__file__).with_name("bench.json"))
    if file:
        check_output(file, "numbers", lambda data: b'"kernel_name"' in data)

    if args.resources:
        if os.environ.get("TRITON_INTERPRET") != "0":  # in the interpreter kernels cannot be compiled
            again = os.environ | {"TRITON_INTERPRET": "0"}
            sys.exit(subprocess.run([sys.executable, __file__, *argv], env=again).returncode)
        rows = resources(args.dim, args.arch, args.types)
        print(f"{show(rows)}\n\nregisters: per thread; stack: bytes per thread (spills); "
              "shared: bytes of shared memory per program.")
        if file:
            replace(file, json.dumps(rows, indent=1).encode())
        return
    if not torch.cuda.is_available():
        raise ValueError("no GPU here, and timing needs one; use --resources, which needs none, or pytest, "
                         "which runs the kernels in Triton's interpreter")
    if launch.interpreted:
        raise ValueError("TRITON_INTERPRET is set, and times in the interpreter mean nothing; unset it")
    time_all(args.lengths, file)
