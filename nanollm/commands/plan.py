"""python -m nanollm plan: the memory of a model, of its cache and of each method's, before one is loaded.

    python -m nanollm plan --model FOLDER --lengths 32768 --batch 8 --memory 80

Only config.json is read. Weights are counted on a model without memory. Caches are not computed by formulas:
each method compresses short random prompts in the model's shape, and its bytes are carried on in a straight
line to the length that is asked for, with the budget a share of the prompt as in compare. Where
whole chunks or a sketch's slots are kept this may be off by a few per cent.
"""
import argparse
from pathlib import Path
from types import SimpleNamespace

import torch

from nanollm import TINY
from nanollm.cache import LayerCache, cache_bytes, end_prefill, make_cache
from nanollm.check import whole
from nanollm.commands.registry import given, has_budget, pick
from nanollm.commands.shell import DTYPES
from nanollm.commands.table import SHOWN, label
from nanollm.generate import read_again, tell_chunk_ends
from nanollm.hf.bridge import Bridged
from nanollm.hf.checkpoint import hf_skeleton
from nanollm.measure.evaluate import share

SHORT = 576, 1152  # tokens of the prompts that are compressed; longer than what KVzip reads at a time
LINE = "{:<27}{:>7}{:>18}{:>10}{:>9}"


def shape_of(folder: Path, dtype: torch.dtype) -> tuple[SimpleNamespace, int]:
    """What `make_cache` asks of a decoder, made of config.json alone, and the bytes of its weights."""
    skeleton = hf_skeleton(folder)
    bridged = Bridged(skeleton)
    c = bridged.config
    w_o = torch.zeros(1, c.n_kv_heads, c.head_dim, dtype=dtype)  # no method's bytes depend on more
    blocks = [SimpleNamespace(attention=SimpleNamespace(w_o=w_o)) for _ in range(c.n_layers)]
    freq = torch.ones(c.head_dim // 2)
    numbers = sum(p.numel() for p in skeleton.parameters())
    return SimpleNamespace(config=c, blocks=blocks, freq=freq), numbers * dtype.itemsize


def compressed(shape, Method, knobs: dict, T: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes allocated for one random prompt of T tokens: after compression, and at most while it was read."""
    c, g = shape.config, torch.Generator().manual_seed(0)
    pos = torch.arange(T)[None]
    caches = make_cache(shape, Method, **knobs)
    tell_chunk_ends(caches, pos % 16 == 15)  # a chunk's end every 16 tokens

    def read(part: slice):
        at = pos[:, part] + caches[0].seen
        for cache in caches:
            qkv = torch.randn(3, 1, c.n_kv_heads, at.shape[1], c.head_dim, generator=g, dtype=dtype)
            cache.attend(*qkv, at)  # with one query head each

    read(slice(None))
    peak = max(cache_bytes(caches)[1], read_again(caches, read))
    end_prefill(caches)
    return cache_bytes(caches)[1], peak


def planned(shape, Method, fraction: float | None, T: int, dtype: torch.dtype, window: int):
    """`compressed` at T tokens: on the line through two short prompts, or as it is, if T is no longer."""
    def at(n: int) -> tuple[int, int]:
        budget = {} if fraction is None else dict(budget=share(fraction, n))
        return compressed(shape, Method, given(Method, window_size=window) | budget, n, dtype)
    if T <= SHORT[1]:
        return at(T)
    return tuple(b + (b - a) * (T - SHORT[1]) // (SHORT[1] - SHORT[0]) for a, b in zip(*map(at, SHORT)))


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm plan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY, help="folder with a config.json")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS",
                        help="of the prompt; default 2048, or what the model reads")
    parser.add_argument("--batch", type=int, default=1, help="texts at a time")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--memory", type=float, default=80, metavar="GB", help="what there is; default 80")
    parser.add_argument("--methods", nargs="+", default=[*SHOWN], metavar="NAME")
    parser.add_argument("--budget", type=float, default=25, metavar="PERCENT",
                        help="of the prompt; default 25")
    parser.add_argument("--window", type=int, default=32, metavar="QUERIES", help="that vote; default 32")
    args = parser.parse_args(argv)
    whole("batch", args.batch, 1)
    if not 0 < args.budget <= 100 or not 0 < args.memory < 1e9:
        raise ValueError(f"budget {args.budget:g} % and memory {args.memory:g} GB must lie above 0, "
                         "the budget up to 100, the memory below 1e9")

    dtype = getattr(torch, args.dtype)
    shape, weights = shape_of(args.model, dtype)
    c, methods = shape.config, pick(args.methods)
    args.lengths = args.lengths or [min(2048, c.max_len)]
    for T in args.lengths:
        whole("length", T, 16, c.max_len)
    print(f"{c.n_layers} layers, {c.n_heads} query and {c.n_kv_heads} key/value heads of {c.head_dim}, "
          f"{args.dtype}; weights {weights / 1e9:.3g} GB")

    for T in args.lengths:
        print(f"\n{args.batch} prompts of {T} tokens\n")
        print(LINE.format("", "", "cache, GB", "peak, GB", "prompts"))
        print(LINE.format("method", "budget", "after the prompt", "reading", "that fit"))
        for name, Method in methods.items():
            fraction = args.budget / 100 if has_budget(Method) else None
            try:
                after, peak = planned(shape, Method, fraction, T, dtype, args.window)
            except ValueError as error:
                raise ValueError(f"{label(name, fraction)} of {T} tokens: {error}") from error
            fit = max(0, int((args.memory * 1e9 - weights) // max(after, peak)))
            kind = getattr(Method, "func", Method)  # of a partial
            keeps_all = kind is LayerCache or kind.keeps_all
            budget = f"{args.budget:g} %" if fraction else "all" if keeps_all else "none"
            both = (f"{args.batch * x / 1e9:.3g}" for x in (after, peak))
            print(LINE.format(name, budget, *both, fit), flush=True)
    print(f"\nThat fit: into {args.memory:g} GB beside the weights. Activations and matrices of attention\n"
          "come on top, and up to a tenth of the peak where a prompt is read in pieces.")
