"""python -m nanollm generate: continue a text, or show the tokens of a built-in page that a method
keeps."""

import argparse
from pathlib import Path

from lab import command_line
from lab.compare import check_files

MARK = "▸"  # between the prompt and its continuation


def main(argv: list[str]):
    """Read the options, load the decoder, and continue a text or show the page."""
    args = read_options(argv)
    text = command_line.read_text(args.file) if args.file else args.prompt

    from lab import example_page  # loads torch
    from lab.registry import calibrated, given, has_budget, loaded, pick
    from nanollm.check import check_seed, whole

    check_seed(args.seed)
    name = args.method or ("full" if text is not None else example_page.METHOD)
    Method = pick([name])[name]
    budget = (
        example_page.BUDGET if args.budget is None and text is None else args.budget
    )
    if budget is None and has_budget(Method):
        raise ValueError(
            f"{name} needs --budget: how many entries each key/value head may keep"
        )
    if args.budget is not None and not has_budget(Method):
        raise ValueError(f"{name} has no budget; leave --budget out")
    options = given(
        Method, budget=budget and whole("budget", budget, 1), window_size=args.window
    )
    model, encoding = loaded(args)
    options |= calibrated(Method, model, encoding, args.calibration)
    if text is None:
        example_page.demonstrate(model, encoding, name, Method, options, args.figure)
    else:
        sampling = dict(temperature=args.temperature, top_k=args.top_k, seed=args.seed)
        write(model, encoding, Method, options, text, args.tokens, sampling)


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm generate",
        description="Continue a text with a compressed KV cache. Without a text, read a built-in page, mark "
        "the tokens that the method evicts, and answer a question about the page.",
    )
    parser.add_argument("prompt", nargs="?", help="the text to continue")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="file with the text to continue"
    )
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="method that compresses the cache, such as h2o or ada_kv+critical; default "
        "full, the full cache; for the built-in page snap_kv",
    )
    parser.add_argument(
        "--budget",
        type=int,
        metavar="ENTRIES",
        help="how many entries each key/value head may keep; every method with a budget "
        "needs it; default for the built-in page 32",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=8,
        metavar="QUERIES",
        help="observation window: how many of the prompt's last queries score the entries; "
        "default 8",
    )
    parser.add_argument(
        "--tokens", type=int, default=100, help="how many tokens to write; default 100"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="temperature of the sampling; default 0: always the most likely token",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; default 0: from all",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the sampling; default 0"
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="file for a picture of the built-in page (.png, .pdf or .svg)",
    )
    command_line.model_options(parser)
    args = parser.parse_args(argv)
    if args.prompt is not None and args.file:
        raise ValueError(f"give the text or --file {args.file}, not both")
    if args.figure and (args.prompt is not None or args.file):
        raise ValueError(
            "--figure draws the built-in page; leave out --figure or the text"
        )
    if args.figure:
        check_files(args.figure, None)
    return args


def write(model, encoding, Method, options: dict, text: str, new: int, sampling: dict):
    """Continue a text, and print each token as it comes; then compare with the full cache."""
    import torch
    from nanollm.cache import LayerCache, cache_bytes, make_cache
    from nanollm.generate import generate, stream, tell_chunk_ends
    from nanollm.tokenizer import boundaries, opening

    ids = opening(encoding, model.config) + encoding.encode_ordinary(text)
    if not ids:
        raise ValueError("the prompt has no tokens; give a text")
    prompt = torch.tensor([ids], dtype=torch.long, device=model.embed.weight.device)
    caches = make_cache(model, Method, **options)
    tell_chunk_ends(caches, boundaries(encoding, model.config.vocab_size)[prompt.cpu()])
    stream_of_tokens = stream(model, prompt, new, caches, **sampling)

    tokens, written = [], ""
    print(f"{text}{MARK}", end="", flush=True)
    for token in stream_of_tokens:
        tokens.append(token.item())
        all_of_it = encoding.decode(tokens)
        if not all_of_it.endswith("\ufffd"):  # a character may span tokens
            print(all_of_it[len(written) :], end="", flush=True)
            written = all_of_it
    print(all_of_it[len(written) :], end="")

    live, allocated = cache_bytes(caches)
    print(
        f"\n\n[{caches[0].seen} tokens seen; a head of layer 0 keeps at most {caches[0].length}; the cache "
        f"holds {live / 1024:.0f} KiB in {allocated / 1024:.0f} KiB of allocated memory]"
    )
    if Method is not LayerCache:
        full = encoding.decode(generate(model, prompt, new, **sampling)[0].tolist())
        same = full == all_of_it
        print(
            "[the full cache writes the same]"
            if same
            else f"[the full cache writes:]\n{full}"
        )
