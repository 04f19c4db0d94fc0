"""python -m nanollm compress: read a text, and keep its compressed cache in a file."""

import argparse
from pathlib import Path
import shlex
import sys
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
    from lab.ask import around, read
    from lab.kept import full_cache_bytes
    from lab.loading import calibrated, loaded
    from lab.methods_by_name import pick
    from lab.retrieval import budget_for
    from nanollm.cache import compress
    from nanollm.generate import prefill_evicting
    from lab.saved import to_bytes

    variant = pick([args.method])[args.method]
    model, encoding = loaded(args)
    ids = around(encoding, model.config)[0] + encoding.encode_ordinary(text)
    if not text:
        raise ValueError(f"{args.file} is empty; name a file with a text")
    longest = model.config.max_len
    if len(ids) > longest:
        raise ValueError(
            f"{args.file} has {len(ids)} tokens, and the decoder reads {longest}; cut it into "
            "files, and compress and ask each of them"
        )
    # a full cache's positions, too, which take 4 bytes an entry
    each = model.embed.weight.itemsize + 2 / model.config.head_dim
    full = full_cache_bytes(model, len(ids), each)
    print(
        f"{len(ids)} tokens; a full cache of them takes {full / 2**20:.0f} MiB",
        file=sys.stderr,
    )
    learned = calibrated(variant, model, encoding, args.calibration)
    defaults = dict(budget=budget_for(args.keep / 100, len(ids)), window_size=8)
    caches = variant.caches(model, **defaults | learned)

    tokens = torch.tensor([ids], device=model.embed.weight.device)
    began = time.perf_counter()
    if args.evict_early:
        prefill_evicting(model, tokens, caches)
    else:
        read(model, tokens, caches)
    compress(model, tokens, caches)
    seconds = time.perf_counter() - began

    data = to_bytes(
        caches,
        name=args.method,
        learned=[*learned],
        model=command_line.whole_name(args.model),
        engine=args.engine,
    )
    command_line.replace(args.out, data)
    question = f'python -m nanollm ask {shlex.quote(str(args.out))} "QUESTION"'
    print(
        f"{len(ids)} tokens read and compressed in {seconds:.1f} s. {args.out} has "
        f"{len(data):,} bytes, {100 * len(data) / full:.1f} % of a full cache.\n"
        f"Now ask: {question}"
    )


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanollm compress",
        description="Read a text and keep its compressed KV cache in a file. "
        "python -m nanollm ask answers questions from it, without the text.",
    )
    option = parser.add_argument
    option(
        "--file", type=Path, required=True, metavar="TEXT", help="file with the text"
    )
    option("--out", type=Path, required=True, metavar="FILE", help="file for the cache")
    option(
        "--method",
        default="kvzip@4",
        metavar="NAME",
        help="method that compresses the cache; default kvzip@4, which does not need to know "
        "the question",
    )
    option(
        "--keep",
        type=float,
        default=12.5,
        metavar="PERCENT",
        help="keep ratio: a head's mean budget as a percentage of the text's tokens; "
        "default 12.5; full has no budget and keeps every token",
    )
    option(
        "--evict-early",
        action="store_true",
        help="evict after every 512 tokens of the text, so that on average a head holds at most "
        "its budget and 512 entries (more while KVzip rereads)",
    )
    command_line.model_options(parser)
    args = parser.parse_args(argv)
    command_line.check_keep(args.keep)
    return args
