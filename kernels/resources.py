"""What each kernel takes of a GPU, found out by compiling it, without one: python -m kernels.resources"""
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
from nanollm.check import whole
from nanollm.commands.shell import command
from nanollm.kernel_switch import kernel_file


def typical(D: int, dtype: torch.dtype, n: int = 100) -> list[Callable]:
    """Calls of every launcher, with n slots or tokens a head, head dim D and groups of four query heads."""
    decode, votes, norms, pairs, revive = map(kernel_file, (
        "decode_attention", "window_votes", "value_norms", "pair_attention", "revive_attention"))
    q, k, w_o = (torch.zeros(*shape, D, dtype=dtype) for shape in ((1, 2, 4), (1, 2, n), (300, 8)))
    window = q.unsqueeze(3).repeat(1, 1, 1, 32, 1)

    one, mean = torch.zeros(1, 2, n), torch.zeros(1, 2, 2 * D)
    exact, token = decode.Segment.of(k, k, one), one.int()
    sketch = {rows: torch.zeros(1, 2, 5 * rows, 2 * D, dtype=dtype) for rows in (1, 3)}
    hashes = {rows: torch.zeros(2, 4, rows, dtype=torch.int64) for rows in (1, 3)}
    return [
        lambda: decode.decode_attention(q, [exact], sums=True),
        lambda: votes.window_votes(window, k),
        lambda: norms.value_norms(k, w_o),
        lambda: pairs.tensor_attention(q, k, k, k, k),
        lambda: revive.revive_attention(q, exact, token, sketch[3], *hashes[3], sums=True),
        lambda: revive.revive_attention(q, exact, token, sketch[1], *hashes[1], mean, signed_keys=True,
                                        sums=True),
        lambda: revive.insert(sketch[3], token, k, k, one, *hashes[3])]


def compiled(calls: list[Callable], arch: int) -> list[tuple]:
    """Kernels that these would launch on a GPU of compute capability `arch` / 10, each with its binary.

    Nothing runs. A kernel that was compiled before is found again, as a launch would find it.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    def launch(kernel, grid):
        return lambda **how: made.append((kernel, kernel.run(grid=grid, warmup=True, **how)))

    made: list[tuple] = []
    target = GPUTarget("cuda", arch, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_device=lambda: arch, get_current_stream=lambda device: None,
        get_current_target=lambda: target))
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
    parser.add_argument("--arch", type=int, default=90, choices=(75, 80, 86, 89, 90, 100, 120),
                        help="ten times the GPU's compute capability (default: %(default)s, H100 and H200)")
    parser.add_argument("--types", nargs="+", choices=("bf16", "fp16"), default=("bf16", "fp16"),
                        help="of the numbers (default: both)")
    args = parser.parse_args(argv)
    whole("--dim", args.dim, 1, 256)
    if os.environ.get("TRITON_INTERPRET") != "0":  # the interpreter's kernels cannot be compiled
        again = os.environ | {"TRITON_INTERPRET": "0"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=again).returncode)

    most: dict[tuple, list] = {}
    for name in args.types:
        dtype = dict(bf16=torch.bfloat16, fp16=torch.float16)[name]
        for kernel, made in compiled(typical(args.dim, dtype), args.arch):
            file = Path(kernel.fn.__code__.co_filename).stem
            most.setdefault((file, kernel.__name__, name), []).append(used(made))

    print(f"{'':<40}{'registers':>11}{'stack':>7}{'shared':>9}")
    print(f"{'kernel':<40}{'a thread':>11}{'bytes':>7}{'bytes':>9}")
    for (file, kernel, name), found in most.items():  # the most of all that it is compiled to
        print(f"{file + '.' + kernel:<34}{name:>6}" + "{:>11}{:>7}{:>9}".format(*map(max, zip(*found))))


if __name__ == "__main__":
    command(main, sys.argv[1:])
