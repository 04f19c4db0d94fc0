"""Predict the memory of a model's weights and of each method's cache, without loading the model.

    python -m nanollm plan --model FOLDER --lengths 32768 --batch 8 --memory 80

Only config.json is read. Each method compresses two short random prompts in the model's shape. A straight
line through their bytes predicts longer prompts. For methods that keep whole chunks or slots of a sketch,
the prediction may be off by a few per cent.
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
from nanollm.hf.checkpoint import hf_skeleton
from nanollm.measure.evaluate import budget_for, slots

SHORT = 576, 1152  # lengths of the two prompts; longer than the pieces that KVzip rereads
HEADER = [["", "", "GB after", "GB at most", "prompts"],
          ["method", "keep", "the prompt", "so far", "that fit"]]
WIDTHS = 26, 6, 10, 10, 8
TERMS = """\
keep               keep ratio: the budget of each head, as a percentage of the prompt's tokens; "all" if every
                   token stays; in brackets the percentage that a method without a budget kept
GB after           size of the caches once the prompts are compressed
GB at most so far  largest size of the caches until then; many methods hold the whole prompt first
prompts that fit   how many prompts fit into the memory of --memory, beside the weights. Activations and
                   attention matrices are not counted, nor up to a tenth more if prompts come in pieces"""


def shape_of(folder: Path, dtype: torch.dtype) -> tuple[SimpleNamespace, int]:
    """Return a stand-in for the decoder and the bytes of its weights, from config.json alone."""
    from nanollm.hf.bridge import Bridged  # here, because transformers takes seconds to import
    skeleton = hf_skeleton(folder)
    c = Bridged(skeleton).config
    w_o = torch.zeros(1, c.n_kv_heads, c.head_dim, dtype=dtype)  # no method's bytes depend on more rows
    blocks = [SimpleNamespace(attention=SimpleNamespace(w_o=w_o)) for _ in range(c.n_layers)]
    freq = torch.ones(c.head_dim // 2)
    numbers = sum(p.numel() for p in skeleton.parameters())
    return SimpleNamespace(config=c, blocks=blocks, freq=freq), numbers * dtype.itemsize


def compressed(shape, Method, keep_ratio: float | None, T: int, dtype: torch.dtype, window: int) -> dict:
    """Compress one random prompt of T tokens, and return the bytes that its caches take.

    after: bytes after the compression. peak: most bytes until then. `table.budget` needs the other keys.
    """
    options = {} if keep_ratio is None else dict(budget=budget_for(keep_ratio, T))
    caches = make_cache(shape, Method, **given(Method, window_size=window) | options)
    c, g = shape.config, torch.Generator().manual_seed(0)
    pos = torch.arange(T)[None]
    tell_chunk_ends(caches, pos % 16 == 15)  # a chunk ends every 16 tokens
    for cache in caches:
        if hasattr(cache, "gain"):  # no decoder can say it of this prompt
            cache.gain = torch.ones(1, T)

    def read(part: slice):
        new = pos[:, part] + caches[0].seen
        for cache in caches:
            qkv = torch.randn(3, 1, c.n_kv_heads, new.shape[1], c.head_dim, generator=g, dtype=dtype)
            cache.attend(*qkv, new)  # one query head per key/value head

    read(slice(None))
    peak = max(cache_bytes(caches)[1], reread(caches, read))
    end_prefill(caches)
    return dict(after=cache_bytes(caches)[1], peak=peak, keep_ratio=keep_ratio, prompt=T, slots=slots(caches),
                keeps_all=all(cache.keeps_all for cache in caches))


def planned(shape, Method, keep_ratio: float | None, T: int, dtype: torch.dtype, window: int) -> dict:
    """Return `compressed` at T tokens; for long T, its value on the line through two short prompts."""
    if T <= SHORT[1]:
        return compressed(shape, Method, keep_ratio, T, dtype, window)
    one, two = (compressed(shape, Method, keep_ratio, n, dtype, window) for n in SHORT)
    for key in ("after", "peak"):
        two[key] += (two[key] - one[key]) * (T - SHORT[1]) // (SHORT[1] - SHORT[0])
    return two


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm plan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY,
                        help="folder with a config.json; default nanollm/tiny, the small decoder that ships")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS",
                        help="length of the prompts, a table each; default 2048, or the model's longest")
    parser.add_argument("--batch", type=int, default=1, metavar="PROMPTS",
                        help="number of prompts whose caches are held at once; default 1")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16",
                        help="number format of weights, keys and values; default bfloat16")
    parser.add_argument("--memory", type=float, default=80, metavar="GB",
                        help="memory of the machine, to count the prompts that fit; default 80")
    parser.add_argument("--methods", nargs="+", default=[*SHOWN], metavar="NAME",
                        help="methods to plan, or 'all'; default: the main methods, as in python -m nanollm")
    parser.add_argument("--keep", type=float, default=25, metavar="PERCENT",
                        help="keep ratio: the budget of each head as a percentage of the prompt's tokens; "
                             "default 25")
    parser.add_argument("--window", type=int, default=32, metavar="QUERIES",
                        help="observation window: how many of the prompt's last queries score the entries; "
                             "default 32")
    args = parser.parse_args(argv)
    whole("batch", args.batch, 1)
    if not 0 < args.keep <= 100 or not 0 < args.memory < 1e9:
        raise ValueError(f"--keep is {args.keep:g} % and --memory {args.memory:g} GB; --keep must be above 0 "
                         "and at most 100, --memory above 0 and below 1e9")

    dtype = getattr(torch, args.dtype)
    shape, weights = shape_of(args.model, dtype)
    c, methods = shape.config, pick(args.methods)
    lengths = args.lengths or [min(2048, c.max_len)]
    for T in lengths:
        whole("length", T, 16, c.max_len)
    print(f"{c.n_layers} layers, {c.n_heads} query and {c.n_kv_heads} key/value heads of {c.head_dim}, "
          f"{args.dtype}; weights {weights / 1e9:.3g} GB\n\n{TERMS}")

    for T in lengths:
        print(f"\n{args.batch} prompts of {T} tokens, {args.memory:g} GB of memory\n")
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
