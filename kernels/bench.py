"""How fast the kernels are on a GPU: against the plain code they replace, PyTorch's attention, and what the GPU can do at all.

    python -m kernels.bench             # on a GPU: checks, then times; writes kernels/bench.json and kernels/roofline.png
    python -m kernels.bench --predict   # anywhere: the least time that any code could take, from two ceilings given by hand

The shapes are those of one layer of an 8-billion Llama 3: 8 key/value heads, 32 query heads, head dim 128, in bf16. A `floor` is
the larger of two times: the bytes that must be moved over the rate of a large copy, and the operations of the matrix units over
the rate of a large product; both rates are measured in the same run. Kernels and PyTorch's attention are timed as a CUDA graph
(`kernel`, `sdpa`: without the gaps between launches) and as they are called (`called`, `eager`), in turn over so many sets of
inputs that nothing comes from the GPU's cache; medians.
"""
import argparse
from collections.abc import Callable, Iterator
import copy
from datetime import date
import json
import math
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
    from nanollm import command
    from nanollm.cache import kernel_file
    sys.exit(command(kernel_file("bench").main, sys.argv[1:]))

from .launch import interpreted
from .decode_attention import Segment, decode_attention
from .revive_attention import insert, plain_insert, revive_attention
from .tensor_attention import tensor_attention
from .value_norms import value_norms
from .window_votes import window_votes
from methods import critical_kv, kv_reviver
from methods.tensor_attention import FactoredFourCache
from nanollm import cache as seam, check_output, replace

LENGTHS, BATCHES = (1024, 4096, 16384, 32768, 131072), (1, 8, 64)
MOST_TOKENS = 2 ** 21  # of a batch: 8 GiB of keys and values
HERE = Path(__file__).parent


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
    bytes: int                 # that must be moved at least
    operations: int            # of the matrix units
    draw: Callable[[], tuple]  # inputs
    kernel: Callable[..., Tensor]
    eager: Callable[..., Tensor]  # plain code, as the methods run it
    sdpa: Callable[..., Tensor] | None = None   # PyTorch's attention, where it does the same


def plain(run: Callable) -> Callable:
    """What methods run without kernels, on a GPU too."""
    def without(*inputs):
        before, seam.use_kernels = seam.use_kernels, False
        try:
            return run(*inputs)
        finally:
            seam.use_kernels = before
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

    def dense(segment):  # what LayerCache does with heads of different length
        if not spread:
            return segment.k.view(B, H, n, D), segment.v.view(B, H, n, D), None
        place = torch.arange(longest, device=s.device)
        i = (segment.start[:, None] + place).clamp(max=slots - 1)
        k, v = (x[i.flatten()].view(B, H, longest, D) for x in (segment.k, segment.v))
        return k, v, (place < segment.count[:, None]).view(B, H, 1, longest)

    def eager(q, segment):
        k, v, mask = dense(segment)
        at = torch.zeros(B, H, k.shape[2], dtype=torch.int32, device=s.device)
        at = at if mask is None else at.masked_fill(~mask[:, :, 0], seam.NEVER)
        p = seam.probabilities(q.flatten(1, 2).unsqueeze(2), k, at, None, torch.zeros(1, 1, device=s.device))
        y = p.flatten(2, 3) @ v
        return torch.cat((y.flatten(), p.sum((2, 3))[at == 0])) if sums else y  # no slot is attended to that is not there

    def sdpa(q, segment):
        k, v, mask = dense(segment)
        return F.scaled_dot_product_attention(q, k, v, mask)

    def kernel(q, segment):
        y, weights = decode_attention(q, [segment], sums=sums)
        return torch.cat((y.flatten(), weights[0].to(y))) if sums else y

    name = "decode_attention" + (" ragged" if spread else "") + (" + sums" if sums else "")
    return Case(name, s, 2 * slots * D * size + sums * slots * (8 * G + 4), 4 * slots * G * D, draw, kernel, eager,
                None if sums else sdpa)


def votes(s: Shape, w: int = 32) -> Case:
    B, n, H, G, D = s[:5]
    return Case("window_votes", s, B * H * n * (D * s.dtype.itemsize + 4 * G), 4 * B * H * G * w * n * D,
                lambda: (s.draw(B, H, G, min(w, n), D), s.draw(B, H, n, D)), window_votes,
                plain(seam.window_votes))


def norms(s: Shape) -> Case:
    B, n, H, G, D = s[:5]
    width = H * G * D  # of the model
    return Case("value_norms", s, B * H * n * (D * s.dtype.itemsize + 4 * G), 2 * B * H * G * n * D * width,
                lambda: (s.draw(B, H, n, D), s.draw(width, H * G, D) * width ** -0.5), value_norms, plain(critical_kv.value_norms))


def revive(s: Shape, rows: int, by_slots: bool = False) -> Case:
    """KVReviver at a tenth of the full cache's bytes, against attention to the full cache."""
    B, n, H, G, D = s[:5]
    size, budget = s.dtype.itemsize, n // 10
    width = max(budget // 10 // rows, 1)
    exact = max(budget - rows * width - -(-4 * n // (2 * D * size)), 1)  # a token's score takes 4 bytes
    vague = n - exact

    def draw():
        sketch = kv_reviver.Sketch(s.draw(B, H, 1, D), rows, width, "paper" if rows == 3 else "signed", 0)
        sketch.tokens = n
        token = torch.randperm(n)[:vague].sort().values.to(s.device).expand(B, H, -1)
        for part in token.split(8192, 2):
            sketch.insert(part, *s.draw(2, B, H, part.shape[2], D))
        sketch.x *= (width / vague) ** 0.5  # sums of many tokens, made as long as one again
        return s.draw(B, H, G, D), *s.draw(2, B, H, exact, D), token.int().contiguous(), sketch, s.draw(2, B, H, n, D)

    def kernel(q, k, v, token, sketch, full):
        if by_slots:
            return sketch.attend(q, k, v, token)[0]
        return revive_attention(q, Segment.of(k, v), token, sketch.x, sketch.place_by, sketch.sign_by, signed_keys=rows == 1)[0]

    def eager(q, k, v, token, sketch, full):
        k, v = (torch.cat(x, 2) for x in zip((k, v), sketch.query(token)))
        return F.scaled_dot_product_attention(q, k, v)

    def sdpa(q, k, v, token, sketch, full):  # another result: nothing was evicted
        return F.scaled_dot_product_attention(q, *full)

    name = f"revive_attention {rows} row{'s' * (rows > 1)}" + (" by slots" if by_slots else "")
    return Case(name, s, B * H * (2 * D * size * (exact + rows * width) + 4 * vague),
                4 * B * H * G * D * (exact + (width if by_slots else vague)), draw, kernel, eager, sdpa)


def inserting(s: Shape) -> Case:
    """n tokens into 3 rows of n/300 slots, with keys of a mean that adds up, as real ones have."""
    B, n, H, G, D = s[:5]
    width, by = max(n // 300, 1), torch.randint(kv_reviver.PRIME, (2, 4, 3), device=s.device)

    def run(add):
        def into(k, v, token, x):
            x.zero_()
            add(x, token, k, v, x.new_ones(B, H, n), *by)
            return x
        return into

    return Case("insert", s, B * H * 2 * D * s.dtype.itemsize * (n + 3 * width), 0,
                lambda: (*(s.draw(2, B, H, n, D) + 3), torch.arange(n, device=s.device).int().repeat(B, H, 1), s.draw(B, H, 3 * width, 2 * D)),
                run(insert), run(plain_insert))


def pairs(s: Shape) -> Case:
    B, n, H, G, D = s[:5]

    def sdpa(q, k1, k2, v1, v2):  # ordinary attention with the queries q ∘ k₁, then its outputs by their totals
        rows = (q.unsqueeze(3) * k1.unsqueeze(2)).flatten(1, 2)
        k2, v2 = (x.repeat_interleave(G, 1) for x in (k2, v2))
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention(rows, k2, v2)[:2]
        return (lse.softmax(-1).to(y).unsqueeze(-1) * y).unflatten(1, (H, G)).mul(v1.unsqueeze(2)).sum(3)

    return Case("tensor_attention", s, B * H * n * D * 4 * s.dtype.itemsize, 4 * B * H * G * n * n * D,
                lambda: (s.draw(B, H, G, D), *s.draw(4, B, H, n, D)), tensor_attention,
                plain(lambda q, *kv: FactoredFourCache().one_query(q * D ** -0.5, *kv)), sdpa if s.device == "cuda" and s.dtype.itemsize == 2 else None)


def cases(lengths=LENGTHS, batches=BATCHES, **of_shape) -> Iterator[Case]:
    for n in lengths:
        for B in batches:
            if B * n > MOST_TOKENS:
                continue
            s = Shape(B, n, **of_shape)
            yield from (decode(s), decode(s, spread=0.8), decode(s, sums=True), votes(s), norms(s), revive(s, 3), revive(s, 1),
                        revive(s, 1, by_slots=True), inserting(s))
            if B == min(batches) and n <= 32768:
                yield pairs(s)


AIMS = [  # kernel, what, at least, from how many tokens of one sequence on
    ("decode_attention", "of_copy", 0.9, 32768), ("decode_attention", "over_sdpa", 1.0, 32768),
    ("revive_attention 3 rows", "over_sdpa", 1.0, 32768), ("revive_attention 1 row", "over_sdpa", 1.0, 32768),
    ("revive_attention 1 row by slots", "over_sdpa", 1.0, 32768), ("tensor_attention", "of_product", 0.5, 8192),
    ("window_votes", "of_floor", 0.8, 32768), ("value_norms", "of_floor", 0.8, 32768)]


# ---- measuring ---------------------------------------------------------------------------------------------------


def difference(x: Tensor, y: Tensor) -> float:
    """‖x − y‖/‖y‖, NaN if anything is."""
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm()).item()


def exact(x):
    """The same inputs in float32."""
    if isinstance(x, Segment):
        return x._replace(k=x.k.float(), v=x.v.float())
    if isinstance(x, kv_reviver.Sketch):
        x = copy.copy(x)
        x.x, x.flip = x.x.float(), x.flip.float()
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def check(case: Case, most: float):
    """ValueError unless the kernel's result is as near to that of the plain code in float32 as `most` of its length, or as half as
    much again as the plain code's own in fewer bits; what was not written is NaN."""
    inputs = case.draw()
    truth = case.eager(*map(exact, inputs)).clone()
    plain_off = difference(case.eager(*inputs), truth)
    for size in range(8, 26 if case.shape.device == "cuda" else 8):  # memory that is handed out again
        [torch.full((2 ** size,), torch.nan, device=case.shape.device) for _ in range(4)]
    for name in ("kernel", "sdpa"):
        other = getattr(case, name)
        if other and not (name == "sdpa" and case.name.startswith("revive")):
            if not (off := difference(other(*inputs), truth)) <= max(most, 1.5 * plain_off):
                raise ValueError(f"{name} is {off:.3g} off the plain code in float32, which is itself {plain_off:.3g} off in "
                                 f"{case.shape.dtype}; at most {most}, or half as much again")


def microseconds(run: Callable, sets: list[tuple], graph: bool, least: float = 0.05) -> float:
    """Median time of one run, over replays of a graph of one run for each set of inputs, or over plain calls, for `least` seconds."""
    def all_of_them():
        for inputs in sets:
            run(*inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills the allocator, before a capture
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


def predicted(case: Case, ceiling: dict[str, float]) -> dict:
    """Name, size, what is moved and worked out, and the floor in µs."""
    moved, worked = case.bytes / ceiling["copy"] * 1e6, case.operations / ceiling["product"] * 1e6
    return dict(kernel_name=case.name, batch=case.shape.B, tokens=case.shape.n, bytes=case.bytes, operations=case.operations,
                floor=max(moved, worked), binds="memory" if moved >= worked else "units")


def measured(case: Case, ceiling: dict[str, float], cache: int) -> dict:
    """Times in µs and ratios of one case."""
    sets = [case.draw() for _ in range(min(max(1, 4 * cache // case.bytes), 256))]
    row = predicted(case, ceiling) | dict(kernel=microseconds(case.kernel, sets, True), called=microseconds(case.kernel, sets, False))
    if case.shape.B * case.shape.n <= 2 ** 18:  # it holds what the kernel does not
        row["eager"] = microseconds(case.eager, sets[:16], False)
    if case.sdpa:
        row["sdpa"] = microseconds(case.sdpa, sets, True)
        row["over_sdpa"] = row["sdpa"] / row["kernel"]
    return row | dict(of_floor=row["floor"] / row["kernel"], of_copy=case.bytes / row["kernel"] * 1e6 / ceiling["copy"],
                      of_product=case.operations / row["kernel"] * 1e6 / ceiling["product"])


# ---- telling -----------------------------------------------------------------------------------------------------


def table(rows: list[dict]) -> str:
    """One line a case; times in µs."""
    names = [name for name in ("floor", "kernel", "called", "eager", "sdpa") if any(name in row for row in rows)]
    ratios = [name for name in ("of_floor", "over_sdpa") if any(name in row for row in rows)]
    lines = [f"{'':33}{'batch':>6}{'tokens':>8}{'ops/byte':>10}  {'binds':8}" + "".join(f"{name:>11}" for name in (*names, *ratios))]
    for row in rows:
        lines.append(f"{row['kernel_name']:33}{row['batch']:>6}{row['tokens']:>8}{row['operations'] / row['bytes']:>10.0f}  {row['binds']:8}"
                     + "".join(f"{row[name]:>11.1f}" if name in row else f"{'':>11}" for name in names)
                     + "".join(f"{row[name]:>11.2f}" if name in row else f"{'':>11}" for name in ratios))
    return "\n".join(lines)


def verdicts(rows: list[dict]) -> str:
    """Each aim: the worst of the measured cases that it speaks of."""
    lines = []
    for name, what, least, tokens in AIMS:
        found = [row[what] for row in rows if row["kernel_name"] == name and row["tokens"] >= tokens and what in row]
        verdict = f"found {min(found):.2f}: {'yes' if min(found) >= least else 'no'}" if found else "not measured"
        lines.append(f"{name:33}{what:>12} from {tokens:>6} tokens on: at least {least}, {verdict}")
    return "\n".join(lines)


def roofline(told: dict):
    """A figure: what each case reached, over its operations a byte, under the two ceilings; for cases that were not measured, circles
    on the ceiling."""
    import matplotlib.pyplot as plt

    copy, product = told["ceilings"]["copy"], told["ceilings"]["product"]
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    x = [0.5, product / copy, 1e5]
    axes.plot(x, [min(copy * i, product) / 1e12 for i in x], "k-", linewidth=1, label=f"ceilings: {copy / 1e12:.2f} TB/s, {product / 1e12:.0f} TFLOP/s")
    by_name: dict[str, list] = {}
    for row in told["rows"]:
        if row["operations"]:
            by_name.setdefault(row["kernel_name"], []).append(row)
    for (name, rows), marker in zip(by_name.items(), "osD^v<>pPX*h"):
        of_row = [row["operations"] / row["bytes"] for row in rows]
        if "kernel" in rows[0]:
            axes.scatter(of_row, [row["operations"] / row["kernel"] * 1e6 / 1e12 for row in rows], marker=marker, s=24, alpha=0.8, label=name)
        else:  # where the ceiling is for it
            axes.scatter(of_row, [min(copy * i, product) / 1e12 for i in of_row], marker=marker, s=40, facecolors="none", edgecolors="k", label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations of the matrix units per byte that must be moved", ylabel="TFLOP/s",
             title=told["device"] + ("" if "kernel" in told["rows"][0] else ": where the ceiling is for each, nothing was measured"))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def holds_times(data: bytes) -> bool:
    """Whether a file holds what --json wrote."""
    try:
        told = json.loads(data)
    except ValueError:
        return False
    return isinstance(told, dict) and told.keys() == {"device", "torch", "ceilings", "rows"}


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--predict", action="store_true", help="floors only, from --copy and --product; needs no GPU")
    parser.add_argument("--copy", type=float, default=4.8, help="TB/s, for --predict (default: an H200's data sheet)")
    parser.add_argument("--product", type=float, default=989.0, help="TFLOP/s in bf16, for --predict (likewise)")
    parser.add_argument("--json", type=Path, default=HERE / "bench.json", help="where the numbers go, each row as it is done (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=HERE / "roofline.png", help="where the roofline goes (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.predict:
        for name in ("copy", "product"):
            if not 0 < 1e12 * (rate := getattr(args, name)) < math.inf:
                raise ValueError(f"--{name} {rate:g} must be a rate above 0, in TB/s or TFLOP/s")
        ceiling = dict(copy=args.copy * 1e12, product=args.product * 1e12)
        print(table([predicted(case, ceiling) for case in cases(device="cpu")]))
        return
    if not torch.cuda.is_available():
        raise ValueError("no GPU here, so there is nothing to time; --predict tells what a GPU could do at best, and pytest runs the kernels "
                         "in Triton's interpreter")
    if interpreted:
        raise ValueError("TRITON_INTERPRET is set, and there is nothing to time in the interpreter; unset it")
    check_output(args.json, "times", holds_times)
    check_output(args.figure, "roofline", lambda held: b"matplotlib" in held.lower())
    began, failed = time.perf_counter(), {}

    def done(case: Case, run: Callable, *how):
        """What `run` returns; or None, and why, if the case fails, which costs no other its row."""
        try:
            return run(case, *how)
        except Exception as error:
            failed[f"{case.name} at batch {case.shape.B}, {case.shape.n} tokens"] = f"{type(error).__name__}: {error}"

    torch.manual_seed(0)
    with torch.inference_mode():
        for case in cases(lengths=[1037], batches=[1, 3]):
            done(case, check, 5e-3)
        wrong = {name.split(" at batch")[0] for name in failed}
        ceiling, device = ceilings(), torch.cuda.get_device_properties(0)
        told = dict(device=f"{device.name}, {date.today()}", torch=torch.__version__, ceilings=ceiling, rows=[])
        for case in tqdm([case for case in cases() if case.name not in wrong], desc="timing"):  # what is wrong is not timed
            if row := done(case, measured, ceiling, device.L2_cache_size):
                told["rows"].append(row)
                replace(args.json, (json.dumps(told, indent=1) + "\n").encode())
    if rows := told["rows"]:
        roofline(told).savefig(args.figure, dpi=110)
        print(f"{told['device']}: copy {ceiling['copy'] / 1e12:.2f} TB/s, bf16 product {ceiling['product'] / 1e12:.0f} TFLOP/s; times in µs\n")
        print(table(rows) + "\n\n" + verdicts(rows) + f"\n\n{len(rows)} rows in {time.perf_counter() - began:.0f} s; {args.json}, {args.figure}")
    if failed:
        raise ValueError(f"{len(failed)} failed: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
