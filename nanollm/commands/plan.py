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
from nanollm.cache import cache_bytes, end_prefill, make_cache
from nanollm.check import whole
from nanollm.commands.registry import given, has_budget, pick
from nanollm.commands.shell import DTYPES
from nanollm.commands.table import SHOWN, budget, label
from nanollm.commands.text_table import text_table
from nanollm.generate import reread, tell_chunk_ends
from nanollm.hf.bridge import Bridged
from nanollm.hf.checkpoint import hf_skeleton
from nanollm.measure.evaluate import budget_for, slots

SHORT = 576, 1152  # tokens of the prompts that are compressed; longer than what KVzip reads at a time
HEADER = [["", "", "cache, GB", "peak, GB", "prompts"],
          ["method", "keep", "after the prompt", "reading", "that fit"]]
WIDTHS = 26, 6, 16, 8, 8


def shape_of(folder: Path, dtype: torch.dtype) -> tuple[SimpleNamespace, int]:
    """Return what `make_cache` asks of a decoder, made of config.json alone, and the bytes of its weights."""
    skeleton = hf_skeleton(folder)
    c = Bridged(skeleton).config
    w_o = torch.zeros(1, c.n_kv_heads, c.head_dim, dtype=dtype)  # no method's bytes depend on more
    blocks = [SimpleNamespace(attention=SimpleNamespace(w_o=w_o)) for _ in range(c.n_layers)]
    freq = torch.ones(c.head_dim // 2)
    numbers = sum(p.numel() for p in skeleton.parameters())
    return SimpleNamespace(config=c, blocks=blocks, freq=freq), numbers * dtype.itemsize


def compressed(shape, Method, keep_ratio: float | None, T: int, dtype: torch.dtype, window: int) -> dict:
    """Compress one random prompt of T tokens.

    Returns the bytes allocated `after` it and at most, `peak`, while it was read; and what `table.budget`
    goes by.
    """
    options = {} if keep_ratio is None else dict(budget=budget_for(keep_ratio, T))
    caches = make_cache(shape, Method, **given(Method, window_size=window) | options)
    c, g = shape.config, torch.Generator().manual_seed(0)
    pos = torch.arange(T)[None]
    tell_chunk_ends(caches, pos % 16 == 15)  # a chunk ends every 16 tokens

    def read(part: slice):
        new = pos[:, part] + caches[0].seen
        for cache in caches:
            qkv = torch.randn(3, 1, c.n_kv_heads, new.shape[1], c.head_dim, generator=g, dtype=dtype)
            cache.attend(*qkv, new)  # with one query head each

    read(slice(None))
    peak = max(cache_bytes(caches)[1], reread(caches, read))
    end_prefill(caches)
    return dict(after=cache_bytes(caches)[1], peak=peak, keep_ratio=keep_ratio, prompt=T, slots=slots(caches),
                keeps_all=all(cache.keeps_all for cache in caches))


def planned(shape, Method, keep_ratio: float | None, T: int, dtype: torch.dtype, window: int) -> dict:
    """Return `compressed` at T tokens, or what a line through two short prompts says if T is longer."""
    if T <= SHORT[1]:
        return compressed(shape, Method, keep_ratio, T, dtype, window)
    one, two = (compressed(shape, Method, keep_ratio, n, dtype, window) for n in SHORT)
    for key in ("after", "peak"):
        two[key] += (two[key] - one[key]) * (T - SHORT[1]) // (SHORT[1] - SHORT[0])
    return two


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
    parser.add_argument("--keep", type=float, default=25, metavar="PERCENT",
                        help="of the prompt; default 25")
    parser.add_argument("--window", type=int, default=32, metavar="QUERIES", help="that vote; default 32")
    args = parser.parse_args(argv)
    whole("batch", args.batch, 1)
    if not 0 < args.keep <= 100 or not 0 < args.memory < 1e9:
        raise ValueError(f"keep {args.keep:g} % and memory {args.memory:g} GB must lie above 0, "
                         "the budget up to 100, the memory below 1e9")

    dtype = getattr(torch, args.dtype)
    shape, weights = shape_of(args.model, dtype)
    c, methods = shape.config, pick(args.methods)
    lengths = args.lengths or [min(2048, c.max_len)]
    for T in lengths:
        whole("length", T, 16, c.max_len)
    print(f"{c.n_layers} layers, {c.n_heads} query and {c.n_kv_heads} key/value heads of {c.head_dim}, "
          f"{args.dtype}; weights {weights / 1e9:.3g} GB")

    for T in lengths:
        print(f"\n{args.batch} prompts of {T} tokens\n")
        print(text_table(HEADER, WIDTHS))
        for name, Method in methods.items():
            keep_ratio = args.keep / 100 if has_budget(Method) else None
            try:
                row = planned(shape, Method, keep_ratio, T, dtype, args.window)
            except ValueError as error:
                raise ValueError(f"{label(name, keep_ratio)} of {T} tokens: {error}") from error
            fit = max(0, int((args.memory * 1e9 - weights) // max(row["after"], row["peak"])))
            sizes = [f"{args.batch * row[key] / 1e9:.3g}" for key in ("after", "peak")]
            print(text_table([[name, budget(row), *sizes, str(fit)]], WIDTHS), flush=True)
    print(f"\nThat fit: into {args.memory:g} GB beside the weights. Activations and matrices of attention\n"
          "come on top, and up to a tenth of the peak where a prompt is read in pieces.")
