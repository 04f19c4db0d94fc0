"""How cost grows with the text: reading a prompt, its end, and one step of decoding, with fitted exponents.

    python -m experiments.growth --figure growth.png       # minutes, most of them for 16,384 tokens
    python -m experiments.growth --lengths 512 1024 2048 --methods full h2o

The decoder has the shape of --model and random weights, so that texts may be longer than it was trained for.
Methods keep a quarter. An exponent e says that time is as tokens^e, by least squares on logarithms. If part
of the time is constant, as in one step, e is small for short texts and grows with them.
"""
import argparse
from dataclasses import replace
from pathlib import Path
import sys
from time import perf_counter

import numpy as np
import torch

from experiments.speed import random_tokens
from nanollm import TINY
from nanollm.cache import make_cache
from nanollm.check import whole
from nanollm.commands.compare import check_files
from nanollm.commands.registry import given, pick
from nanollm.commands.shell import command
from nanollm.generate import end_prompt, prefill
from nanollm.hf.checkpoint import read_config
from nanollm.model import Decoder

LENGTHS = 512, 1024, 2048, 4096, 8192, 16_384
METHODS = "full", "snap_kv", "h2o", "kvzip", "quantized_2"
PHASES = "reading the prompt", "the prompt's end", "one step"
STEPS = 8  # of which the fastest counts


@torch.no_grad()
def measure(model, Method, knobs: dict, n: int) -> list[float]:
    """Seconds of the three phases for a text of n tokens."""
    tokens, caches = random_tokens(model, n, seed=n), make_cache(model, Method, **knobs)
    began = perf_counter()
    prefill(model, tokens, caches)
    read = perf_counter()
    end_prompt(model, tokens, caches)
    times = [perf_counter()]
    ended = times[0] - read
    for _ in range(STEPS):
        model(tokens[:, :1], caches)
        times.append(perf_counter())
    return [read - began, ended, float(np.diff(times).min())]


def exponent(lengths, seconds) -> float:
    """e of seconds ∝ lengths^e: the slope of the least-squares line on logarithms."""
    return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])


def table(lengths, times: dict[str, np.ndarray]) -> str:
    """times: method → (lengths, phases) in seconds."""
    lines = []
    for i, phase in enumerate(PHASES):
        lines += ["", f"{phase + ', ms':<24}" + "".join(f"{n:>10}" for n in lengths) + f"{'exponent':>10}"]
        lines += [f"{name:<24}" + "".join(f"{1e3 * s:>10.2f}" for s in of[:, i])
                  + f"{exponent(lengths, of[:, i]):>10.2f}" for name, of in times.items()]
    return "\n".join(lines)


def figure(lengths, times: dict[str, np.ndarray], file: Path):
    """A panel a phase, both axes logarithmic; the exponents stand beside the methods' names."""
    import matplotlib.pyplot as plt
    from nanollm.commands.plot import save, style
    drawing, axes = plt.subplots(1, len(PHASES), figsize=(16, 7), layout="constrained")
    for i, (axis, phase) in enumerate(zip(axes, PHASES)):
        for name, of in times.items():
            label = f"{name}, exponent {exponent(lengths, of[:, i]):.2f}"
            axis.plot(lengths, 1e3 * of[:, i], label=label, markersize=7, **style(name))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
        axis.set(title=phase, xlabel="tokens", ylabel="ms")
        axis.grid(alpha=0.3)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))  # below: no line is hidden
    save(drawing, file)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m experiments.growth", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY, help="a folder whose config.json gives the shape")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", default=LENGTHS,
                        help=f"at least two; default {' '.join(map(str, LENGTHS))}")
    parser.add_argument("--methods", nargs="+", metavar="NAME", default=METHODS,
                        help=f"default {' '.join(METHODS)}")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the table here")
    args = parser.parse_args(argv)
    lengths = sorted({whole("length", n, 1, 2 ** 17) for n in args.lengths})
    if len(lengths) < 2:
        raise ValueError(f"one length, {lengths[0]}, shows no growth; give two or more by --lengths")
    if args.figure:
        check_files(args.figure, None)
    config, methods = read_config(args.model), pick(args.methods)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(replace(config, max_len=2 * lengths[-1] + STEPS)).eval()  # a second reading comes behind
    knobs = {(name, n): given(Method, budget=max(n // 4, 1)) for name, Method in methods.items()
             for n in lengths}
    for (name, n), asked in knobs.items():  # what cannot be measured is found before any work is done
        try:
            make_cache(model, methods[name], **asked)
        except ValueError as error:
            raise ValueError(f"{name} at a quarter of {n} tokens: {error}") from None

    times = {name: np.full((len(lengths), len(PHASES)), np.inf) for name in methods}
    for i, n in enumerate(lengths):
        for name in [*methods] * max(1, min(5, 4096 // n)):  # in turn; long texts once
            times[name][i] = np.minimum(times[name][i], measure(model, methods[name], knobs[name, n], n))
    print(f"the shape of {args.model.name}, random weights, batch 1, float32, one thread, budget 25 %")
    print(table(lengths, times))
    if args.figure:
        figure(lengths, times, args.figure)


if __name__ == "__main__":
    command(main, sys.argv[1:])
