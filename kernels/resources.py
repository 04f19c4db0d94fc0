"""What each kernel takes of a GPU, found out by compiling it, which needs no GPU: python -m kernels.resources"""
import argparse
from collections.abc import Callable
import os
from pathlib import Path
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from nanollm import command  # noqa: E402
from nanollm.cache import kernel_file  # noqa: E402


def calls(D: int, dtype: torch.dtype, n: int = 100) -> list[Callable]:
    """Of every launcher, with n slots or tokens a head, a head dim D and groups of four query heads."""
    decode, votes, norms, pairs, revive = map(kernel_file, (
        "decode_attention", "window_votes", "value_norms", "tensor_attention", "revive_attention"))
    q, k, w_o = (torch.zeros(*shape, D, dtype=dtype) for shape in ((1, 2, 4), (1, 2, n), (300, 8)))
    one, mean = torch.zeros(1, 2, n), torch.zeros(1, 2, 2 * D)
    exact, token = decode.Segment.of(k, k, one), one.int()
    sketch = {rows: (torch.zeros(1, 2, 5 * rows, 2 * D, dtype=dtype), *torch.zeros(2, 4, rows, dtype=torch.int64)) for rows in (1, 3)}
    return [lambda: decode.decode_attention(q, [exact], sums=True), lambda: votes.window_votes(q.unsqueeze(3).repeat(1, 1, 1, 32, 1), k),
            lambda: norms.value_norms(k, w_o), lambda: pairs.tensor_attention(q, k, k, k, k),
            lambda: revive.revive_attention(q, exact, token, *sketch[3], sums=True),
            lambda: revive.revive_attention(q, exact, token, *sketch[1], mean, signed_keys=True, sums=True),
            lambda: revive.insert(sketch[3][0], token, k, k, one, *sketch[3][1:])]


def compiled(calls: list[Callable], arch: int) -> list[tuple]:
    """Kernels that these would launch on a GPU of compute capability `arch` / 10, each with what it was compiled to, as its launch
    finds it. Nothing runs."""
    import triton
    from triton.backends.compiler import GPUTarget

    def launch(kernel, grid):
        return lambda **how: made.append((kernel, kernel.run(grid=grid, warmup=True, **how)))

    made: list[tuple] = []
    triton.runtime.driver.set_active(SimpleNamespace(get_current_device=lambda: arch, get_current_stream=lambda device: None,
                                                     get_current_target=lambda: GPUTarget("cuda", arch, 32)))
    triton.JITFunction.__getitem__ = launch
    kernel_file("launch").interpreted = True  # what it refuses else is tensors on a CPU
    for call in calls:
        call()
    return made


def used(made) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack a thread (spills) and of shared memory a program."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
                              capture_output=True, text=True, check=True).stdout
    told = dict(pair.split(":") for pair in told.split() if ":" in pair)
    return int(told["REG"]), int(told["STACK"]), made.metadata.shared


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m kernels.resources", description=__doc__)
    parser.add_argument("--dim", type=int, default=128, help="numbers of a head (default: %(default)s)")
    parser.add_argument("--arch", type=int, default=90, help="ten times the GPU's compute capability (default: %(default)s, H100 and H200)")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") != "0":  # the interpreter's kernels cannot be compiled; it is chosen at import
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=os.environ | {"TRITON_INTERPRET": "0"}).returncode)
    print(f"{'':<40}{'registers':>11}{'stack':>7}{'shared':>9}\n{'kernel':<40}{'a thread':>11}{'bytes':>7}{'bytes':>9}")
    most: dict[tuple, list] = {}
    for number, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for kernel, made in compiled(calls(args.dim, dtype), args.arch):
            most.setdefault((Path(kernel.fn.__code__.co_filename).stem, kernel.__name__, number), []).append(used(made))
    for (file, name, number), found in most.items():  # of all that it is compiled to
        print(f"{file + '.' + name:<34}{number:>6}" + "{:>11}{:>7}{:>9}".format(*map(max, zip(*found))))


if __name__ == "__main__":
    command(main, sys.argv[1:])
