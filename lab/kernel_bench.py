"""Time each kernel on a GPU, beside the least time that it allows and PyTorch's attention.

    python -m lab.kernel_bench                                        # all sizes: some minutes
    python -m lab.kernel_bench --lengths 8192 --batches 1 16 --json rows.json
    python -m lab.kernel_bench --methods full snap_kv ada_kv --lengths 32768 --batches 1

Single kernels have the shapes of one layer of an 8-billion Llama 3: 8 key/value heads, 4 query
heads for each, head dim 128, bf16. Times are medians in µs of CUDA graphs, without the launch from
Python. Inputs of some megabytes stay in the GPU's cache.

    bound    the least time on this GPU: of the bytes at its memory's nominal speed, or of the
             operations at the measured speed of a large matrix product, whichever is longer
    bound ×  bound / kernel
    sdpa     PyTorch's scaled_dot_product_attention, the fastest of three implementations. Heads of
             unlike length (ragged) are padded for it. A dash: it cannot compute this
    sdpa ×   sdpa / kernel

--methods times a decoder of that Llama's shape, with random weights: `end` compresses the caches to
a quarter at the prompt's end (`full` keeps all), `step` adds a token to each prompt, both in ms and
called from Python.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from itertools import chain, product
import json
from pathlib import Path
from statistics import median
import sys
from time import perf_counter
from warnings import catch_warnings

import torch
from torch import Tensor
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.command_line import check_output, command, replace
from lab.methods_by_name import pick
from lab.table import text_table
from nanollm import kernel_switch
from nanollm.cache import cache_bytes, compress
from nanollm.check import whole
from nanollm.generate import prefill
from nanollm.model import Config, Decoder

# least widths of the columns, as each row is printed at once
WIDTHS = [23, 7, 6, 9, 9, 8, 9, 7]


def cases(B: int, n: int) -> Iterator[tuple]:
    """Yield (name, kernel, sdpa, bytes, operations) for B sequences of n tokens.

    kernel and sdpa are functions to time, on shared inputs; sdpa may be None.
    """
    # here, as Triton may be missing
    from kernels import decode_attention as decode, window_scores as window

    H = 8
    G = 4
    D = 128

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    q = draw(B, H, G, D)
    k = draw(B, H, n, D)
    v = draw(B, H, n, D)
    even = [decode.Segment.of(k, v)]
    half = k.nbytes
    q_by_k = 2 * q.numel() * n  # operations of q kᵀ
    yield (
        "decode_attention",
        lambda: decode.decode_attention(q, even)[0],
        lambda: F.scaled_dot_product_attention(q, k, v),
        2 * half,
        2 * q_by_k,
    )
    yield (
        "decode_attention sums",
        lambda: decode.decode_attention(q, even, sums=True)[1][0],
        None,
        2 * half + 4 * B * H * n,
        2 * q_by_k,
    )

    count = torch.linspace(0.2 * n, 1.8 * n, B * H, device="cuda").int()
    longest = int(count.max())
    padded_k = draw(B, H, longest, D)
    padded_v = draw(B, H, longest, D)
    used = torch.arange(longest, device="cuda") < count.view(B, H, 1)
    start = count.cumsum(0) - count
    ragged = decode.Segment(padded_k[used], padded_v[used], start, count, longest)
    yield (
        "decode_attention ragged",
        lambda: decode.decode_attention(q, [ragged])[0],
        lambda: F.scaled_dot_product_attention(q, padded_k, padded_v, used[:, :, None]),
        2 * ragged.k.nbytes,
        2 * q_by_k,
    )

    queries = draw(B, H, G, 32, D)
    yield (
        "window_scores",
        lambda: window.window_scores(queries, k),
        None,
        half + 4 * B * H * G * n,
        32 * q_by_k,
    )


def microseconds(run: Callable) -> float:
    """Return the median time of a run, replayed from a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    # it runs on another stream, which does not wait for the inputs
    torch.cuda.synchronize()
    return 1e3 * do_bench_cudagraph(run, return_mode="median")


def sdpa(run: Callable) -> float:
    """Return the time of a run with the fastest of `backends` that can do it."""
    backends = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    )
    times = []
    for backend in backends:
        # flash attention takes no mask, for example
        with suppress(RuntimeError), catch_warnings(action="ignore"):
            with sdpa_kernel(backend):
                times.append(microseconds(run))
    return min(times)


def speeds() -> tuple[float, float]:
    """Return this GPU's bytes and 16-bit operations per µs."""
    from triton.testing import get_dram_gbps

    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 1e3 * get_dram_gbps(), 2 * len(x) ** 3 / microseconds(lambda: x @ x)


def measured(lengths: list[int], batches: list[int]) -> Iterator[dict]:
    """Yield a row for each size and kernel: times in µs, and ratios."""
    bytes_per_us, operations_per_us = speeds()
    for n in lengths:
        for B in batches:
            for name, run, peer, moved, operations in cases(B, n):
                kernel = microseconds(run)
                other = peer and sdpa(peer)
                bound = max(moved / bytes_per_us, operations / operations_per_us)
                yield {
                    "case": name,
                    "batch": B,
                    "tokens": n,
                    "kernel": kernel,
                    "bound": bound,
                    "bound ×": bound / kernel,
                    "sdpa": other,
                    "sdpa ×": other and other / kernel,
                }


def decoding(methods: dict, B: int, T: int) -> Iterator[dict]:
    """Yield rows for each method, with and without kernels: its compression and step, in ms.

    The decoder has the shape of Llama 3 8B and random weights; B prompts of T random tokens, a
    quarter stays.
    """
    config = Config(
        vocab_size=128_256,
        max_len=T + 32,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_model=4096,
        d_ff=14_336,
        rope_theta=5e5,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Decoder(config).to("cuda").eval()
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (B, T), generator=generator).cuda()
    for name, variant in methods.items():
        for kernel_switch.use_kernels in False, True:
            for _ in range(2):  # the first time, kernels are compiled
                caches = variant.caches(model, budget=T // 4)
                prefill(model, tokens, caches, 8192)
                at_end = seconds(lambda: compress(model, tokens, caches))
            decode = lambda: model(tokens[:, :1], caches)
            step = median(seconds(decode) for _ in range(21))
            yield {
                "method": name,
                "kernels": "yes" if kernel_switch.use_kernels else "no",
                "batch": B,
                "tokens": T,
                "end": 1e3 * at_end,
                "step": 1e3 * step,
                "tokens/s": B / step,
                "GiB": cache_bytes(caches)[1] / 2**30,
            }


def seconds(run: Callable) -> float:
    """Return the seconds of a run by the clock."""
    torch.cuda.synchronize()
    began = perf_counter()
    run()
    torch.cuda.synchronize()
    return perf_counter() - began


def show(rows: list[dict]) -> str:
    """Return the rows as a text table."""

    def cell(name: str, x) -> str:
        if x is None:
            return "–"
        if not isinstance(x, float):
            return str(x)
        return f"{x:.2f}" if name.endswith("×") else f"{x:.1f}"

    cells = [[cell(name, x) for name, x in row.items()] for row in rows]
    return text_table([[*rows[0]], *cells], WIDTHS)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(
        prog="python -m lab.kernel_bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--lengths",
        nargs="+",
        type=int,
        default=[4096, 16_384, 65_536],
        metavar="TOKENS",
        help="cached tokens of a sequence; default 4096 16384 65536",
    )
    option(
        "--batches",
        nargs="+",
        type=int,
        default=[1, 8],
        metavar="SEQUENCES",
        help="default 1 8",
    )
    option(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="time decoding with these methods, not single kernels",
    )
    option(
        "--json",
        type=Path,
        metavar="FILE",
        help="file to write the rows to, each as it comes",
    )
    args = parser.parse_args(argv)
    for name, sizes, least in ("length", args.lengths, 300), ("batch", args.batches, 1):
        for size in sizes:
            whole(name, size, least, 2**20)
    if args.json:
        check_output(args.json, "rows", lambda data: b'"kernel' in data)
    if not torch.cuda.is_available() or not find_spec("triton"):
        raise ValueError(
            "timing needs a CUDA GPU and Triton, and one of them is missing here; tests/kernels "
            "needs no GPU: it runs the kernels in Triton's interpreter"
        )
    from kernels.launch import interpreted

    if interpreted:
        raise ValueError(
            "TRITON_INTERPRET is set, and times of the interpreter mean nothing; unset it"
        )

    result = dict(
        command=" ".join(("python -m lab.kernel_bench", *argv)),
        date=str(date.today()),
        rows=[],
        machine=f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
    )
    with torch.inference_mode():
        rows = measured(args.lengths, args.batches)
        if args.methods:
            methods = pick(args.methods)
            sizes = product(args.lengths, args.batches)
            rows = chain.from_iterable(decoding(methods, B, n) for n, B in sizes)
        for row in rows:
            lines = show([row]).splitlines()
            if result["rows"]:
                lines = lines[1:]  # the header stands above the first row
            print("\n".join(lines), flush=True)
            result["rows"].append(row)
            if args.json:
                replace(args.json, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    command(main, sys.argv[1:])
