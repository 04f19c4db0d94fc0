"""python -m nanollm compress: read a text once, and keep its compressed cache in a file."""

import argparse
from pathlib import Path
import shlex
import time

from lab import command_line

# near the start of every file that `save` writes
FILE_START = b'"cache":"{\\"version\\": '


def main(argv: list[str]):
    """Read the text, compress its cache, and write the file."""
    args = read_options(argv)
    text = command_line.read_text(args.file)
    command_line.check_output(
        args.out, "cache", lambda data: FILE_START in data[:10_000]
    )

    import torch
    from lab.ask import around
    from lab.evaluate import budget_for
    from lab.registry import calibrated, given, loaded, pick
    from nanollm.cache import compress, make_cache
    from nanollm.generate import prefill, tell_chunk_ends
    from nanollm.saved import to_bytes
    from nanollm.tokenizer import boundaries

    Method = pick([args.method])[args.method]
    model, encoding = loaded(args)
    ids = around(encoding, model.config)[0] + encoding.encode_ordinary(text)
    if not text:
        raise ValueError(f"{args.file} is empty; name a file with a text")
    tokens = torch.tensor([ids], device=model.embed.weight.device)
    options = given(Method, budget=budget_for(args.keep / 100, len(ids)), window_size=8)
    caches = make_cache(
        model, Method, **options | calibrated(Method, model, encoding, args.calibration)
    )
    tell_chunk_ends(caches, boundaries(encoding, model.config.vocab_size)[tokens.cpu()])
    began = time.perf_counter()
    prefill(model, tokens, caches, 512)
    compress(model, tokens, caches)
    seconds = time.perf_counter() - began

    data = to_bytes(
        caches,
        name=args.method,
        model=command_line.whole_name(args.model),
        engine=args.engine,
    )
    command_line.replace(args.out, data)
    c = model.config
    full = (
        len(ids)
        * c.n_layers
        * c.n_kv_heads
        * (2 * c.head_dim * model.embed.weight.itemsize + 4)
    )
    print(
        f"{len(ids)} tokens read and compressed in {seconds:.1f} s. {args.out} has {len(data):,} bytes, "
        f"{100 * len(data) / full:.1f} % of a full cache in {args.dtype}.\n"
        f'Now ask: python -m nanollm ask {shlex.quote(str(args.out))} "QUESTION"'
    )


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanollm compress",
        description="Read a text once and keep its compressed KV cache in a file. python -m nanollm ask "
        "answers questions from it, without the text.",
    )
    parser.add_argument(
        "--file", type=Path, required=True, metavar="TEXT", help="file with the text"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file for the cache"
    )
    parser.add_argument(
        "--method",
        default="kvzip_4",
        metavar="NAME",
        help="method that compresses the cache; default kvzip_4, which does not need to know "
        "the question",
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=12.5,
        metavar="PERCENT",
        help="keep ratio: the budget of each head as a percentage of the text's tokens; "
        "default 12.5; a method without a budget keeps every token",
    )
    command_line.model_options(parser)
    args = parser.parse_args(argv)
    command_line.check_keep(args.keep)
    return args
