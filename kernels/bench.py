"""How fast the kernels are on a GPU, beside plain code, PyTorch's attention, and what the GPU can do.

    python -m kernels.bench      # checks, then times; writes kernels/bench.json and kernels/roofline.png

The shapes are those of one layer of an 8-billion Llama 3: 8 key/value heads, 32 query heads, head dim 128, in
bf16. A `floor` is the larger of two times: the bytes that must be moved over the rate of a large copy, and
the operations of the tensor cores over the rate of a large product. Both rates are measured in the same run.
Kernels and PyTorch's attention are timed as a CUDA graph (`kernel`, `sdpa`: without the gaps between
launches) and as they are called (`called`, `eager`), in turn over so many sets of inputs that nothing comes
from the GPU's cache; medians.
"""
import argparse
from collections.abc import Callable, Iterator
import copy
from datetime import date
import json
from pathlib import Path
from statistics import median
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import tqdm

if __name__ == "__main__":  # again, where all imports find what is meant
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from nanollm.commands.shell import command
    from nanollm.kernel_switch import kernel_file
    sys.exit(command(kernel_file("bench").main, sys.argv[1:]))

from .launch import interpreted
from .decode_attention import Segment, decode_attention
from .revive_attention import insert, plain_insert, revive_attention
from .pair_attention import tensor_attention
from .value_norms import value_norms
from .window_votes import window_votes
from methods import critical_kv
from methods.count_sketch import PRIME, Sketch
from methods.ours.kv_reviver_shrunk import SignedSketch
from methods.tensor_attention import FactoredFourCache
from nanollm import kernel_switch, window
from nanollm.attention import probabilities
from nanollm.cache import NEVER
from nanollm.commands.shell import check_output, read_json, replace

LENGTHS, BATCHES = (1024, 4096, 16384, 32768, 131072), (1, 8, 64)
MOST_TOKENS = 2 ** 21  # of a batch: 8 GiB of keys and values
HERE = Path(__file__).parent
TITLE = "Roofline of python -m kernels.bench"  # written into the file: no other figure is taken for ours


# ---- what is timed ---------------------------------------------------------------------------


class Shape(NamedTuple):
    """One layer: B sequences of n tokens, H key/value heads, G query heads for each, head dim D."""
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
    """Something to be timed: by a kernel, and by others that must give the same."""
    name: str
    shape: Shape
    bytes: int                    # that must be moved at least
    operations: int               # of the tensor cores
    draw: Callable[[], tuple]     # inputs
    kernel: Callable[..., Tensor]
    eager: Callable[..., Tensor]  # plain code, as the methods run it
    sdpa: Callable[..., Tensor] | None = None  # PyTorch's attention, where it does the same


def plain(run: Callable) -> Callable:
    """What methods run without kernels, on a GPU too."""
    def without(*inputs):
        before, kernel_switch.use_kernels = kernel_switch.use_kernels, False
        try:
            return run(*inputs)
        finally:
            kernel_switch.use_kernels = before
    return without


def decode(s: Shape, spread: float = 0.0, sums: bool = False) -> Case:
    """One token over n slots a head, or between (1 − spread) n and (1 + spread) n of them."""
    B, n, H, G, D = s[:5]
    counts = (n * torch.linspace(1 - spread, 1 + spread, B * H)).round().int()
    slots, size, longest = int(counts.sum()), s.dtype.itemsize, int(counts.max())

    def draw():
        start = counts.cumsum(0) - counts
        k, v = s.draw(2, slots, D)
        return s.draw(B, H, G, D), Segment(k, v, start.long().to(s.device), counts.to(s.device), longest)

    def dense(segment):
        """What WindowCache does with heads of different length: k, v and a mask of slots that are there."""
        if not spread:
            return segment.k.view(B, H, n, D), segment.v.view(B, H, n, D), None
        place = torch.arange(longest, device=s.device)
        i = (segment.start[:, None] + place).clamp(max=slots - 1).flatten()
        k, v = (x[i].view(B, H, longest, D) for x in (segment.k, segment.v))
        return k, v, (place < segment.count[:, None]).view(B, H, 1, longest)

    def eager(q, segment):
        k, v, mask = dense(segment)
        at = torch.zeros(B, H, k.shape[2], dtype=torch.int32, device=s.device)
        if mask is not None:
            at = at.masked_fill(~mask[:, :, 0], NEVER)
        p = probabilities(q.flatten(1, 2).unsqueeze(2), k, at, None, torch.zeros(1, 1, device=s.device))
        y = p.flatten(2, 3) @ v
        return torch.cat((y.flatten(), p.sum((2, 3))[at == 0])) if sums else y  # of slots that are there

    def sdpa(q, segment):
        k, v, mask = dense(segment)
        return F.scaled_dot_product_attention(q, k, v, mask)

    def kernel(q, segment):
        y, weights = decode_attention(q, [segment], sums=sums)
        return torch.cat((y.flatten(), weights[0].to(y))) if sums else y

    name = "decode_attention" + (" ragged" if spread else "") + (" + sums" if sums else "")
    moved = 2 * slots * D * size + sums * slots * (8 * G + 4)
    return Case(name, s, moved, 4 * slots * G * D, draw, kernel, eager, None if sums else sdpa)


def votes(s: Shape, w: int = 32) -> Case:
    B, n, H, G, D = s[:5]
    return Case("window_votes", s, B * H * n * (D * s.dtype.itemsize + 4 * G), 4 * B * H * G * w * n * D,
                lambda: (s.draw(B, H, G, min(w, n), D), s.draw(B, H, n, D)), window_votes,
                plain(window.window_votes))


def norms(s: Shape) -> Case:
    B, n, H, G, D = s[:5]
    width = H * G * D  # of the model
    return Case("value_norms", s, B * H * n * (D * s.dtype.itemsize + 4 * G), 2 * B * H * G * n * D * width,
                lambda: (s.draw(B, H, n, D), s.draw(width, H * G, D) * width ** -0.5), value_norms,
                plain(critical_kv.value_norms))


def revive(s: Shape, rows: int, by_slots: bool = False) -> Case:
    """KVReviver at a tenth of the full cache's bytes, against attention to the full cache."""
    B, n, H, G, D = s[:5]
    size, budget = s.dtype.itemsize, n // 10
    width = max(budget // 10 // rows, 1)
    exact = max(budget - rows * width - -(-4 * n // (2 * D * size)), 1)  # a token's score takes 4 bytes
    vague = n - exact

    def draw():
        sketch = (Sketch if rows == 3 else SignedSketch)(s.draw(B, H, 1, D), rows, width, 0)
        sketch.tokens = n
        token = torch.randperm(n)[:vague].sort().values.to(s.device).expand(B, H, -1)
        for part in token.split(8192, 2):
            sketch.insert(part, *s.draw(2, B, H, part.shape[2], D))
        sketch.x *= (width / vague) ** 0.5  # sums of many tokens, made as long as one again

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

    def sdpa(q, k, v, token, sketch, full):  # another result: nothing was evicted
        return F.scaled_dot_product_attention(q, *full)

    name = f"revive_attention {rows} row{'s' * (rows > 1)}" + (" by slots" if by_slots else "")
    moved = B * H * (2 * D * size * (exact + rows * width) + 4 * vague)
    worked = 4 * B * H * G * D * (exact + (width if by_slots else vague))
    return Case(name, s, moved, worked, draw, kernel, eager, sdpa)


def inserting(s: Shape) -> Case:
    """n tokens into 3 rows of n/300 slots, with keys of a mean that adds up, as real ones have."""
    B, n, H, G, D = s[:5]
    width, by = max(n // 300, 1), torch.randint(PRIME, (2, 4, 3), device=s.device)

    def draw():
        token = torch.arange(n, device=s.device).int().repeat(B, H, 1)
        return *(s.draw(2, B, H, n, D) + 3), token, s.draw(B, H, 3 * width, 2 * D)

    def run(add):
        def into(k, v, token, x):
            x.zero_()
            add(x, token, k, v, x.new_ones(B, H, n), *by)
            return x
        return into

    return Case("insert", s, B * H * 2 * D * s.dtype.itemsize * (n + 3 * width), 0, draw, run(insert),
                run(plain_insert))


def pairs(s: Shape) -> Case:
    B, n, H, G, D = s[:5]

    def sdpa(q, k1, k2, v1, v2):  # attention with the queries q ∘ k₁, then its outputs by their totals
        rows = (q.unsqueeze(3) * k1.unsqueeze(2)).flatten(1, 2)
        k2, v2 = (x.repeat_interleave(G, 1) for x in (k2, v2))
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention(rows, k2, v2)[:2]
        return (lse.softmax(-1).to(y).unsqueeze(-1) * y).unflatten(1, (H, G)).mul(v1.unsqueeze(2)).sum(3)

    return Case("tensor_attention", s, B * H * n * D * 4 * s.dtype.itemsize, 4 * B * H * G * n * n * D,
                lambda: (s.draw(B, H, G, D), *s.draw(4, B, H, n, D)), tensor_attention,
                plain(lambda q, *kv: FactoredFourCache().one_query(q * D ** -0.5, *kv)),
                sdpa if s.device == "cuda" and s.dtype.itemsize == 2 else None)


def cases(lengths=LENGTHS, batches=BATCHES, **of_shape) -> Iterator[Case]:
    for n in lengths:
        for B in batches:
            if B * n > MOST_TOKENS:
                continue
            s = Shape(B, n, **of_shape)
            yield from (decode(s), decode(s, spread=0.8), decode(s, sums=True), votes(s), norms(s),
                        revive(s, 3), revive(s, 1), revive(s, 1, by_slots=True), inserting(s))
            if B == min(batches) and n <= 32768:
                yield pairs(s)


# ---- measuring -------------------------------------------------------------------------------


def difference(x: Tensor, y: Tensor) -> float:
    """‖x − y‖/‖y‖, NaN if anything is."""
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm()).item()


def exact(x):
    """The same inputs in float32."""
    if isinstance(x, Segment):
        return x._replace(k=x.k.float(), v=x.v.float())
    if isinstance(x, Sketch):
        x = copy.copy(x)
        x.x, x.flip = x.x.float(), x.flip.float()
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def check(case: Case, most: float):
    """ValueError unless the kernel's result is near that of the plain code in float32; unwritten memory is
    NaN.

    Near is `most` of its length, or half as much again as the plain code's own distance in fewer bits.
    """
    inputs = case.draw()
    truth = case.eager(*map(exact, inputs)).clone()
    plain_off = difference(case.eager(*inputs), truth)
    for size in range(8, 26 if case.shape.device == "cuda" else 8):  # memory that is handed out again
        [torch.full((2 ** size,), torch.nan, device=case.shape.device) for _ in range(4)]

    for name, other in (("kernel", case.kernel), ("sdpa", case.sdpa)):
        if other is None or name == "sdpa" and case.name.startswith("revive"):
            continue
        off = difference(other(*inputs), truth)
        if not off <= max(most, 1.5 * plain_off):
            raise ValueError(f"{name} is {off:.3g} off the plain code in float32, which is itself "
                             f"{plain_off:.3g} off in {case.shape.dtype}; at most {most}, "
                             "or half as much again")


def microseconds(run: Callable, sets: list[tuple], graph: bool, least: float = 0.05) -> float:
    """Median time of a run on these inputs, for `least` seconds: replays of a graph, or plain calls."""
    def all_of_them():
        for inputs in sets:
            run(*inputs)

    # compile, and fill the allocator, before a capture
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        all_of_them()
        all_of_them()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    again = all_of_them
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            all_of_them()
        again = captured.replay
        again()

    taken, began = [], time.perf_counter()
    while len(taken) < 3 or (time.perf_counter() - began < least and len(taken) < 200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        again()
        end.record()
        torch.cuda.synchronize()
        taken.append(1000 * start.elapsed_time(end) / len(sets))
    return median(taken)


def ceilings() -> dict[str, float]:
    """Bytes a second of a large copy, read and written, and operations a second of a large bf16 product."""
    x, y = torch.randn(2, 2 ** 29, device="cuda", dtype=torch.bfloat16)
    copy = 4 * x.numel() / microseconds(lambda: y.copy_(x), [()], True) * 1e6
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return dict(copy=copy, product=2 * 8192 ** 3 / microseconds(lambda: a @ b, [()], True) * 1e6)


def floored(case: Case, ceiling: dict[str, float]) -> dict:
    """Name, size, what is moved and worked out, and the floor in µs."""
    moved = case.bytes / ceiling["copy"] * 1e6
    worked = case.operations / ceiling["product"] * 1e6
    binds = "memory" if moved >= worked else "units"
    return dict(kernel_name=case.name, batch=case.shape.B, tokens=case.shape.n, bytes=case.bytes,
                operations=case.operations, floor=max(moved, worked), binds=binds)


def measured(case: Case, ceiling: dict[str, float], cache: int) -> dict:
    """Times in µs and ratios of one case."""
    sets = [case.draw() for _ in range(min(max(1, 4 * cache // case.bytes), 256))]
    row = floored(case, ceiling)
    row["kernel"] = microseconds(case.kernel, sets, True)
    row["called"] = microseconds(case.kernel, sets, False)
    if case.shape.B * case.shape.n <= 2 ** 18:  # it holds what the kernel does not
        row["eager"] = microseconds(case.eager, sets[:16], False)
    if case.sdpa:
        row["sdpa"] = microseconds(case.sdpa, sets, True)
        row["over_sdpa"] = row["sdpa"] / row["kernel"]

    seconds = row["kernel"] / 1e6
    return row | dict(of_floor=row["floor"] / row["kernel"], of_copy=case.bytes / seconds / ceiling["copy"],
                      of_product=case.operations / seconds / ceiling["product"])


# ---- telling ---------------------------------------------------------------------------------


def table(rows: list[dict]) -> str:
    """One line a case; times in µs."""
    columns = [(name, "11.1f") for name in ("floor", "kernel", "called", "eager", "sdpa")]
    columns += [("of_floor", "11.2f"), ("over_sdpa", "11.2f")]
    columns = [(name, form) for name, form in columns if any(name in row for row in rows)]

    lines = [f"{'':33}{'batch':>6}{'tokens':>8}{'ops/byte':>10}  {'binds':8}"
             + "".join(f"{name:>11}" for name, _ in columns)]
    for row in rows:
        size = f"{row['batch']:>6}{row['tokens']:>8}{row['operations'] / row['bytes']:>10.0f}"
        lines.append(f"{row['kernel_name']:33}{size}  {row['binds']:8}" + "".join(
            f"{row[name]:>{form}}" if name in row else f"{'':>11}" for name, form in columns))
    return "\n".join(lines)


def roofline(told: dict):
    """A figure of what each case reached, over its operations a byte, under the two ceilings.

    Cases that were not measured are circles on the ceiling.
    """
    import matplotlib.pyplot as plt

    copy, product = told["ceilings"]["copy"], told["ceilings"]["product"]
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    x = [0.5, product / copy, 1e5]
    axes.plot(x, [min(copy * i, product) / 1e12 for i in x], "k-", linewidth=1,
              label=f"ceilings: {copy / 1e12:.2f} TB/s, {product / 1e12:.0f} TFLOP/s")

    by_name: dict[str, list] = {}
    for row in told["rows"]:
        if row["operations"]:
            by_name.setdefault(row["kernel_name"], []).append(row)
    for (name, rows), marker in zip(by_name.items(), "osD^v<>pPX*h"):
        of_row = [row["operations"] / row["bytes"] for row in rows]
        if "kernel" in rows[0]:
            reached = [row["operations"] / row["kernel"] * 1e6 / 1e12 for row in rows]
            axes.scatter(of_row, reached, marker=marker, s=24, alpha=0.8, label=name)
        else:
            ceiling = [min(copy * i, product) / 1e12 for i in of_row]
            axes.scatter(of_row, ceiling, marker=marker, s=40, facecolors="none", edgecolors="k",
                         label=name)

    unknown = "" if "kernel" in told["rows"][0] else ": the ceiling for each, nothing was measured"
    axes.set(xscale="log", yscale="log", xlabel="operations of the tensor cores per byte that must be moved",
             ylabel="TFLOP/s", title=told["device"] + unknown)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def holds_times(data: bytes) -> bool:
    """Whether a file holds what --json wrote."""
    told = read_json(data)
    return isinstance(told, dict) and told.keys() == {"device", "torch", "ceilings", "rows"}


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=HERE / "bench.json",
                        help="where the numbers go, each row as it is done (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=HERE / "roofline.png",
                        help="where the roofline goes (default: %(default)s)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError("no GPU here, so there is nothing to time; "
                         "pytest runs the kernels in Triton's interpreter")
    if interpreted:
        raise ValueError("TRITON_INTERPRET is set, and there is nothing to time in the interpreter; "
                         "unset it")
    from nanollm.commands import plot  # as in `roofline`: importing it takes a second
    check_output(args.json, "times", holds_times)
    check_output(args.figure, "roofline", lambda held: plot.is_ours(held, TITLE))

    began, failed = time.perf_counter(), {}

    def done(case: Case, run: Callable, *how):
        """What `run` returns; or None, and why, if the case fails, which costs no other its row."""
        try:
            return run(case, *how)
        except Exception as error:
            where = f"{case.name} at batch {case.shape.B}, {case.shape.n} tokens"
            failed[where] = f"{type(error).__name__}: {error}"

    torch.manual_seed(0)
    with torch.inference_mode():
        for case in cases(lengths=[1037], batches=[1, 3]):
            done(case, check, 5e-3)
        wrong = {name.split(" at batch")[0] for name in failed}  # is not timed
        right = [case for case in cases() if case.name not in wrong]

        ceiling, device = ceilings(), torch.cuda.get_device_properties(0)
        told = dict(device=f"{device.name}, {date.today()}", torch=torch.__version__, ceilings=ceiling,
                    rows=[])
        for case in tqdm(right, desc="timing"):
            if row := done(case, measured, ceiling, device.L2_cache_size):
                told["rows"].append(row)
                replace(args.json, (json.dumps(told, indent=1) + "\n").encode())

    if rows := told["rows"]:
        plot.save(roofline(told), args.figure, TITLE)
        print(f"{told['device']}: copy {ceiling['copy'] / 1e12:.2f} TB/s, "
              f"bf16 product {ceiling['product'] / 1e12:.0f} TFLOP/s; times in µs\n")
        print(f"{table(rows)}\n\n{len(rows)} rows in {time.perf_counter() - began:.0f} s; "
              f"{args.json}, {args.figure}")
    if failed:
        told = "; ".join(f"{name}: {why}" for name, why in failed.items())
        raise ValueError(f"{len(failed)} failed: {told}")
