"""Time each kernel on a GPU, beside its plain twin and PyTorch's attention.

    python -m lab.kernel_bench                                                  # all sizes: some minutes
    python -m lab.kernel_bench --lengths 8192 --batches 1 16 --json rows.json

The shapes are those of one layer of an 8-billion Llama 3: 8 key/value heads, 4 query heads for each, head
dim 128, bf16. Times are medians in µs; the GPU's cache is emptied before each run.

    kernel   our kernel, called from Python
    plain    the same in plain PyTorch, in 32 bits: the function `plain` in the kernel's file
    sdpa     PyTorch's scaled_dot_product_attention. Heads of unlike length (ragged) are padded for it
    plain ×, sdpa ×   this time / the kernel's

A dash: PyTorch's attention cannot compute this, or the GPU's memory is too small.
"""
import argparse
from collections.abc import Callable, Iterator
from datetime import date
from importlib.util import find_spec
import json
from pathlib import Path
import sys

import torch
from torch import Tensor
import torch.nn.functional as F

from lab.command_line import check_output, command, replace
from lab.text_table import text_table
from nanollm.check import whole

WIDTHS = [24, 5, 6, 9, 9, 9, 7, 6]  # least widths of the columns, as each row is printed at once


def cases(B: int, n: int, H: int = 8, G: int = 4, D: int = 128, dtype: torch.dtype = torch.bfloat16,
          device: str = "cuda") -> Iterator[tuple]:
    """Yield (name, kernel, plain, sdpa) for B sequences of n tokens: functions to time, or None.

    Run each before taking the next, because they share inputs.
    """
    from kernels import decode_attention as decode, pair_attention as pair
    from kernels import value_norms as norms, window_scores as window  # here, as Triton runs on Linux only

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    q, k, v = draw(B, H, G, D), draw(B, H, n, D), draw(B, H, n, D)
    even = [decode.Segment.of(k, v)]
    full = lambda: F.scaled_dot_product_attention(q, k, v)
    yield ("decode_attention", lambda: decode.decode_attention(q, even)[0],
           lambda: decode.plain(q, even)[0], full)
    yield ("decode_attention sums", lambda: decode.decode_attention(q, even, sums=True)[1][0],
           lambda: decode.plain(q, even, sums=True)[1][0], None)

    count = torch.linspace(0.2 * n, 1.8 * n, B * H, device=device).int()
    longest = int(count.max())
    padded_k, padded_v = draw(B, H, longest, D), draw(B, H, longest, D)
    used = torch.arange(longest, device=device) < count.view(B, H, 1)
    ragged = [decode.Segment(padded_k[used], padded_v[used], count.cumsum(0) - count, count, longest)]
    yield ("decode_attention ragged", lambda: decode.decode_attention(q, ragged)[0],
           lambda: decode.plain(q, ragged)[0],
           lambda: F.scaled_dot_product_attention(q, padded_k, padded_v, used.unsqueeze(2)))

    queries, w_o, k2, v2 = draw(B, H, G, 32, D), draw(H * G * D, H * G, D), draw(B, H, n, D), draw(B, H, n, D)
    yield ("window_scores", lambda: window.window_scores(queries, k), lambda: window.plain(queries, k), None)
    yield ("value_norms", lambda: norms.value_norms(v, w_o), lambda: norms.plain(v, w_o), None)
    yield ("tensor_attention", lambda: pair.tensor_attention(q, k, k2, v, v2),
           lambda: pair.plain(q, k, k2, v, v2), None)


def microseconds(run: Callable) -> float | None:
    """Return the median time of a run on the GPU; None if its memory is too small."""
    from triton.testing import do_bench
    try:
        return 1e3 * do_bench(run, return_mode="median")
    except torch.OutOfMemoryError:
        return None


def measured(lengths: list[int], batches: list[int], **shape) -> Iterator[dict]:
    """Yield a row for each size and kernel: times in µs, and ratios. shape: options of `cases`."""
    for n in lengths:
        for B in batches:
            for name, *runs in cases(B, n, **shape):
                kernel, plain, sdpa = (run and microseconds(run) for run in runs)
                over = lambda time: time / kernel if time and kernel else None
                yield {"case": name, "batch": B, "tokens": n, "kernel": kernel, "plain": plain, "sdpa": sdpa,
                       "plain ×": over(plain), "sdpa ×": over(sdpa)}


def show(rows: list[dict]) -> str:
    """Return the rows as a text table."""
    text = lambda x: "–" if x is None else f"{x:.1f}" if isinstance(x, float) else str(x)
    return text_table([[*rows[0]], *([*map(text, row.values())] for row in rows)], WIDTHS)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m lab.kernel_bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option, file = parser.add_argument, Path(__file__).parent / "stored" / "kernels.json"
    option("--lengths", nargs="+", type=int, default=[4096, 16_384, 65_536], metavar="TOKENS",
           help="cached tokens of a sequence; default 4096 16384 65536")
    option("--batches", nargs="+", type=int, default=[1, 8], metavar="SEQUENCES", help="default 1 8")
    option("--json", type=Path, default=file, metavar="FILE",
           help="for the rows; default lab/stored/kernels.json")
    args = parser.parse_args(argv)
    for name, sizes, least in ("length", args.lengths, 300), ("batch", args.batches, 1):
        for size in sizes:
            whole(name, size, least, 2 ** 20)
    check_output(args.json, "rows", lambda data: b'"sdpa"' in data)
    if not torch.cuda.is_available() or not find_spec("triton"):
        raise ValueError("timing needs a CUDA GPU and Triton, and one of them is missing here; tests/kernels "
                         "needs no GPU: it runs the kernels in Triton's interpreter")
    from kernels.launch import interpreted
    if interpreted:
        raise ValueError("TRITON_INTERPRET is set, and times of the interpreter mean nothing; unset it")

    result = dict(command=" ".join(("python -m lab.kernel_bench", *argv)), date=str(date.today()), rows=[],
                  machine=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with torch.inference_mode():
        for row in measured(args.lengths, args.batches):
            print("\n".join(show([row]).splitlines()[bool(result["rows"]):]), flush=True)
            result["rows"].append(row)
            replace(args.json, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    command(main, sys.argv[1:])
