"""Time the reading of a prompt, its compression, and a decoding step on a CPU, beside the full cache.

    python -m lab.speed                                                         # two minutes
    python -m lab.speed --methods snap_kv my_method --lengths 256 --rounds 1    # seconds

Prompts are random tokens. The methods take turns, for some rounds, and the fastest time of each counts: other
work on the machine only adds time.
"""
import argparse
import json
from pathlib import Path
import sys
from time import perf_counter

import torch
from torch import Tensor

from lab import command_line
from lab.evaluate import budget_for
from lab.registry import calibrated, given, load, pick
from lab.text_table import text_table
from nanollm import TINY
from nanollm.cache import compress, make_cache
from nanollm.check import whole
from nanollm.generate import prefill, tell_chunk_ends
from nanollm.tokenizer import boundaries

METHODS = ("snap_kv", "ada_kv", "snap_kv+critical", "chunk_kv", "h2o", "scissorhands", "kv_reviver", "kvzip",
           "quantized_2")
PHASES = "prefill", "compress", "step"
STEPS = 8  # decoding steps after a prompt, of which the fastest counts
TERMS = """Times in ms, one thread, keep ratio {keep:g} %, fastest of {rounds} rounds.
prefill     reading the prompts of the batch      ×: in units of full's prefill
compress    compressing the cache once            ×: in units of full's prefill
step        one new token for each prompt         ×: in units of full's step"""


@torch.no_grad()
def times(model, caches: list, tokens: Tensor) -> list[float]:
    """Return the seconds to read tokens (B, T) into new caches, to compress them, and of a step after it."""
    clock = [perf_counter()]
    prefill(model, tokens, caches)
    clock.append(perf_counter())
    compress(model, tokens, caches)
    clock.append(perf_counter())
    for _ in range(STEPS):
        model(tokens[:, :1], caches)
        clock.append(perf_counter())
    read, compressed, *steps = [end - began for began, end in zip(clock, clock[1:])]
    return [read, compressed, min(steps)]


def measured(model, encoding, methods: dict, sizes: list[tuple[int, int]], keep: float, rounds: int):
    """Return a row for each size (B, T) and method. `methods` has "full", with which the others are compared.

    keep: keep ratio in percent. ValueError, before any work, if a method cannot use its budget.
    """
    ends = boundaries(encoding, model.config.vocab_size)
    learned = {name: calibrated(Method, model, encoding) for name, Method in methods.items()}

    def caches_for(name: str, T: int) -> list:
        budget = given(methods[name], budget=budget_for(keep / 100, T))
        try:
            return make_cache(model, methods[name], **learned[name], **budget)
        except ValueError as error:
            raise ValueError(f"{name} at {keep:g} % of {T} tokens: {error}") from error

    for _, T in sizes:
        for name in methods:
            caches_for(name, T)

    rows = []
    for B, T in sizes:
        tokens = torch.randint(model.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(T))
        taken = {name: [] for name in methods}
        for name in [*methods] * rounds:
            caches = caches_for(name, T)
            tell_chunk_ends(caches, ends[tokens])
            taken[name].append(times(model, caches, tokens))

        fastest = {name: [1000 * min(phase) for phase in zip(*runs)] for name, runs in taken.items()}
        reading, _, step = fastest["full"]
        for name, ms in fastest.items():
            ratios = [time / full for time, full in zip(ms, (reading, reading, step))]
            rows.append({"method": name, "batch": B, "tokens": T, "keep": keep, "rounds": rounds}
                        | dict(zip(PHASES, ms)) | {f"{phase} ×": x for phase, x in zip(PHASES, ratios)})
    return rows


def show(rows: list[dict]) -> str:
    """Return the rows as a text table, with its terms."""
    names = [name for name in rows[0] if name not in ("keep", "rounds")]
    cells = [[f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in names]
             for row in rows]
    return f"{text_table([names, *cells])}\n\n{TERMS.format(**rows[0])}"


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m lab.speed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--model", type=Path, default=TINY, help="folder of a checkpoint; default nanollm/tiny")
    option("--methods", nargs="+", default=METHODS, metavar="NAME",
           help=f"methods to time beside full; default {' '.join(METHODS)}")
    option("--lengths", nargs="+", type=int, default=[512, 2048], metavar="TOKENS",
           help="lengths of the prompts; default 512 2048")
    option("--batches", nargs="+", type=int, default=[1, 4], metavar="PROMPTS",
           help="numbers of prompts that are read at once; default 1 4")
    option("--keep", type=float, default=25, metavar="PERCENT",
           help="keep ratio: the budget of each head in percent of the prompt; default 25")
    option("--rounds", type=int, default=2, help="rounds, of which the fastest counts; default 2")
    option("--json", type=Path, metavar="FILE", help="file to write the rows to")
    args = parser.parse_args(argv)
    command_line.check_keep(args.keep)
    whole("rounds", args.rounds, 1)
    if args.json:
        command_line.check_output(args.json, "rows", lambda data: b'"prefill' in data)
    model, encoding = load(args.model, "cpu")
    for B in args.batches:
        whole("batch", B, 1, 1024)
    for T in args.lengths:
        whole("length", T, 1, model.config.max_len - STEPS)

    torch.set_num_threads(1)
    sizes = [(B, T) for T in args.lengths for B in args.batches]
    rows = measured(model, encoding, pick(["full", *args.methods]), sizes, args.keep, args.rounds)
    print(show(rows))
    if args.json:
        command_line.replace(args.json, json.dumps(rows, indent=1).encode())


if __name__ == "__main__":
    command_line.command(main, sys.argv[1:])
