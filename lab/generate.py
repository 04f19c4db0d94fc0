"""python -m nanollm generate: continue a text, or show what a method keeps of a page."""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lab import command_line

MARK = "▸"  # between the prompt and its continuation


def main(argv: list[str]):
    """Read the options, load the decoder, and continue a text or show the page."""
    args = read_options(argv)
    text = command_line.read_text(args.file) if args.file else args.prompt

    from lab import one_page  # loads torch
    from lab.loading import calibrated, loaded
    from lab.methods_by_name import pick
    from nanollm.check import check_seed, whole

    check_seed(args.seed)
    name = args.method
    budget = args.budget
    if name is None:
        name = one_page.METHOD if text is None else "full"
    if budget is None and text is None:
        budget = one_page.BUDGET
    variant = pick([name])[name]
    if budget is None and variant.takes("budget"):
        raise ValueError(
            f"{name} needs --budget: how many entries each key/value head may keep"
        )
    if args.budget is not None and not variant.takes("budget"):
        raise ValueError(f"{name} has no budget; leave --budget out")
    if budget is not None:
        whole("budget", budget, 1)
    model, encoding = loaded(args)
    learned = calibrated(variant, model, encoding, args.calibration)
    defaults = dict(budget=budget, window_size=args.window) | learned
    make = partial(variant.caches, model, **defaults)
    if text is None:
        one_page.demonstrate(model, encoding, name, make, args.figure)
    else:
        continue_text(model, encoding, make(), text, args)


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm generate",
        description="Continue a text with a compressed KV cache. Without a text, read a built-in "
        "page, mark the tokens that the method evicts, and answer a question about the page.",
    )
    option = parser.add_argument
    option("prompt", nargs="?", help="the text to continue")
    option("--file", type=Path, metavar="FILE", help="file with the text to continue")
    option(
        "--method",
        metavar="NAME",
        help="method that compresses the cache, such as h2o, ada_kv+critical or kvzip@4; default "
        "full, the full cache; for the built-in page snap_kv",
    )
    option(
        "--budget",
        type=int,
        metavar="ENTRIES",
        help="how many entries a key/value head may keep on average; every method with a budget "
        "needs it; default for the built-in page 32",
    )
    command_line.window_option(parser)
    option("--tokens", type=int, default=100, help="most tokens to write; default 100")
    option(
        "--temperature",
        type=float,
        default=0.0,
        help="temperature of the sampling; default 0: always the most likely token",
    )
    option(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; default 0: from all",
    )
    option("--seed", type=int, default=0, help="seed of the sampling; default 0")
    option(
        "--figure",
        type=Path,
        metavar="FILE",
        help="file for a picture of the text, and of what the heads keep of it (.png, .pdf or "
        ".svg)",
    )
    command_line.model_options(parser)
    args = parser.parse_args(argv)
    if args.prompt is not None and args.file:
        raise ValueError(f"give the text or --file {args.file}, not both")
    if args.figure:
        command_line.check_figure(args.figure)
    return args


def continue_text(model, encoding, caches: list, text: str, args: argparse.Namespace):
    """Continue a text, print each token as it comes, and compare a method with the full cache."""
    import torch
    from lab.one_page import picture, shares
    from nanollm.cache import cache_bytes
    from nanollm.generate import stream
    from nanollm.tokenizer import opening, special_ids

    ids = opening(encoding, model.config) + encoding.encode_ordinary(text)
    if not ids:
        raise ValueError("the prompt has no tokens; give a text")
    prompt = torch.tensor([ids], dtype=torch.long, device=model.embed.weight.device)
    sampling = dict(temperature=args.temperature, top_k=args.top_k, seed=args.seed)

    def said(caches=None) -> Iterator[str]:
        tokens = stream(model, prompt, args.tokens, caches, **sampling)
        return decoded(encoding, tokens, special_ids(encoding, model.config))

    pieces = said(caches)
    print(f"{text}{MARK}", end="", flush=True)
    written = ""
    for piece in pieces:
        written += piece
        print(piece, end="", flush=True)

    live, allocated = cache_bytes(caches)
    print(
        f"\n\n[{caches[0].seen} tokens seen; a head of layer 0 keeps at most "
        f"{caches[0].length}; the cache holds {live / 1024:.0f} KiB in "
        f"{allocated / 1024:.0f} KiB of allocated memory]"
    )
    if args.figure:
        kept = {"What stays": shares(caches, len(ids))}
        picture(encoding, ids, kept, args.figure)
    if args.method in (None, "full"):
        return
    full = "".join(said())
    if full == written:
        print("[the full cache writes the same]")
    else:
        print(f"[the full cache writes:]\n{full}")


def decoded(encoding, tokens: Iterator, special: set[int]) -> Iterator[str]:
    """Yield the text of tokens as they come, until a special one, such as the end of a turn."""
    ids = []
    printed = ""
    for token in tokens:
        if token.item() in special:
            return
        ids.append(token.item())
        # without a character of which some tokens are missing
        text = encoding.decode(ids).rstrip("\ufffd")
        yield text[len(printed) :]
        printed = text
