"""What each kernel takes of an H100 or H200, found out by compiling it, which needs no GPU: python -m kernels.resources"""
import argparse
import os
from pathlib import Path
import subprocess
import sys
import tempfile

TYPES = dict(start="i64", count="i32", token="i32", place="i64", sign="i64") | dict.fromkeys(
    ("q", "k", "v", "w", "y", "rows", "k2", "v1", "v2", "x", "mean"), "{0}")  # of the pointers p_…; all others are fp32


def compiled(kernel, constants: dict, number: str, warps: int = 4, stages: int = 3) -> dict:
    """Registers a thread, bytes of stack a thread (spills) and of shared memory a block, of one kernel for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.startswith("p_"):
            return "*" + TYPES.get(name[2:], "fp32").format(number)
        return "fp32" if name in ("scale", "shrink") else "i32"

    names = kernel.arg_names
    source = ASTSource(fn=kernel, signature={name: type_of(name) for name in names},
                       constexprs={(names.index(name),): value for name, value in constants.items()},
                       attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.startswith("p_")})  # as a launch finds it
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps, num_stages=stages))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
                              capture_output=True, text=True, check=True).stdout
    used = dict(pair.split(":") for pair in told.split() if ":" in pair)
    return dict(registers=int(used["REG"]), stack=int(used["STACK"]), shared=made.metadata.shared)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m kernels.resources", description=__doc__).parse_args()
    if os.environ.get("TRITON_INTERPRET") != "0":  # the interpreter's kernels cannot be compiled; it is chosen at import
        sys.exit(subprocess.run([sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "0"}).returncode)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from nanollm.cache import kernel_file
    print(f"{'':<40}{'registers':>11}{'stack':>7}{'shared':>9}\n{'kernel':<40}{'a thread':>11}{'bytes':>7}{'bytes':>9}")
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for kernel, constants, *launch in getattr(kernel_file(file.stem), "typical", []):
            for number in ("bf16", "fp16"):
                used = compiled(kernel, constants, number, *launch)
                name = f"{file.stem}.{kernel.__name__}"
                print(f"{name:<34}{number:>6}" + "{registers:>11}{stack:>7}{shared:>9}".format(**used), flush=True)
