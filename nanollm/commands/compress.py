"""python -m nanollm compress: read a text once, and keep its compressed cache in a file."""
import argparse
from pathlib import Path
import shlex
import time

import torch

from nanollm.cache import make_cache
from nanollm.commands import shell
from nanollm.commands.registry import calibrated, given, has_budget, loaded, pick
from nanollm.generate import check_rereads, end_prompt, prefill, tell_chunk_ends
from nanollm.measure.evaluate import budget_for
from nanollm.saved import to_bytes
from nanollm.tokenizer import boundaries, opening

FILE_START = b'"cache":"{\\"version\\": '  # near the start of every file that `save` writes


def main(argv: list[str]):
    args = read_options(argv)
    Method = pick([args.method])[args.method]
    if not has_budget(Method) and args.keep is not None:
        raise ValueError(f"{args.method} has no budget; leave --keep out")
    text = shell.read_text(args.file)
    shell.check_output(args.out, "cache", lambda data: FILE_START in data[:10_000])
    model, encoding = loaded(args)
    ids = opening(encoding, model.config) + encoding.encode_ordinary(text)
    if not text:
        raise ValueError(f"{args.file} is empty; name a file with a text")
    tokens = torch.tensor([ids], device=model.embed.weight.device)
    budget = budget_for(12.5 / 100 if args.keep is None else args.keep / 100, len(ids))
    options = given(Method, budget=budget, window_size=8) | calibrated(Method, model, encoding)

    caches = make_cache(model, Method, **options)
    check_rereads(model, caches, len(ids))
    tell_chunk_ends(caches, boundaries(encoding, model.config.vocab_size)[tokens.cpu()])
    began = time.perf_counter()
    prefill(model, tokens, caches, 512)
    end_prompt(model, tokens, caches)
    seconds = time.perf_counter() - began
    data = to_bytes(caches, name=args.method, model=str(args.model.resolve()), engine=args.engine)
    shell.replace(args.out, data)
    c = model.config
    full = len(ids) * c.n_layers * c.n_kv_heads * (2 * c.head_dim * model.embed.weight.itemsize + 4)
    print(f"{len(ids)} tokens read and compressed in {seconds:.1f} s. {args.out} has {len(data):,} bytes, "
          f"{100 * len(data) / full:.1f} % of a full cache in {args.dtype}.\n"
          f"Now ask: python -m nanollm ask {shlex.quote(str(args.out))} \"QUESTION\"")


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanollm compress",
        description="Read a text once and keep its compressed KV cache in a file. python -m nanollm ask "
                    "answers questions from it, without the text.")
    parser.add_argument("--file", type=Path, required=True, metavar="TEXT", help="file with the text")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file for the cache")
    parser.add_argument("--method", default="kvzip_4", metavar="NAME",
                        help="method that compresses the cache; default kvzip_4, which does not need to know "
                             "the question")
    parser.add_argument("--keep", type=float, metavar="PERCENT",
                        help="keep ratio: the budget of each head as a percentage of the text's tokens; "
                             "default 12.5")
    shell.model_options(parser)
    args = parser.parse_args(argv)
    if args.keep is not None:
        shell.check_keep(args.keep)
    if args.method == "all":
        raise ValueError("--method is all, but a file holds one cache; name one method")
    return args
