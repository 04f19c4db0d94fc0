"""python -m nanollm generate: continue a text, or show what a cache keeps of the built-in page."""
import argparse
from pathlib import Path

import torch

from nanollm.cache import LayerCache, cache_bytes, make_cache
from nanollm.check import check_seed, whole
from nanollm.commands import demo, shell
from nanollm.commands.compare import check_files
from nanollm.commands.registry import calibrated, given, has_budget, loaded, pick
from nanollm.generate import generate, stream, tell_chunk_ends
from nanollm.tokenizer import boundaries, opening

MARK = "▸"  # between a text and what is written


def main(argv: list[str]):
    args = read_options(argv)
    shows_page = args.prompt is None and not args.file
    name = (demo.METHOD if shows_page else "full") if args.method is None else args.method
    if name == "all":
        raise ValueError("one method writes one text; name one")
    Method = pick([name])[name]
    budget = demo.BUDGET if args.budget is None and shows_page and has_budget(Method) else args.budget
    if budget is not None:
        whole("budget", budget, 1)
    if budget is None and has_budget(Method):
        raise ValueError(f"{name} needs --budget, in slots per key/value head")
    if budget is not None and not has_budget(Method):
        raise ValueError(f"{name} has no budget; leave --budget out")
    if args.window is not None and not given(Method, window_size=args.window):
        raise ValueError(f"{name} has no window; leave --window out")

    text = shell.read_text(args.file) if args.file else args.prompt
    model, encoding = loaded(args)
    options = given(Method, budget=budget, window_size=8 if args.window is None else args.window)
    options |= calibrated(Method, model, encoding)
    if shows_page:
        demo.demonstrate(model, encoding, name, Method, options, args.figure)
    else:
        sampling = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
        write(model, encoding, Method, options, text, args.tokens, sampling)


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line. ValueError for options that contradict each other or would change nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm generate",
        description="Continue a text. Without one: read a page that holds facts, show which of its tokens a "
                    "method evicts, and answer a question about it.")
    parser.add_argument("prompt", nargs="?", help="the text to continue")
    parser.add_argument("--file", type=Path, help="a file with the text to continue")
    parser.add_argument("--method", help=f"default: full; for the page {demo.METHOD}")
    parser.add_argument("--budget", type=int, help="slots per key/value head, for every method that has one; "
                        f"for the page {demo.BUDGET}")
    parser.add_argument("--window", type=int, metavar="QUERIES",
                        help="that vote, in methods with a window; default 8")
    parser.add_argument("--tokens", type=int, default=100, help="how many new ones")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: the most likely")
    parser.add_argument("--top-k", type=int, default=0, help="sample from so many tokens; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest, of this mass")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--figure", type=Path, help="of the page: a file for its picture")
    shell.model_options(parser)
    args = parser.parse_args(argv)

    def changed(*names: str) -> str:
        return ", ".join(f"--{name.replace('_', '-')}" for name in names
                         if getattr(args, name) != parser.get_default(name))

    check_seed(args.seed)
    shows_page = args.prompt is None and not args.file
    if args.prompt is not None and args.file:
        raise ValueError(f"give the text or --file {args.file}, not both")
    if shows_page and (idle := changed("tokens", "temperature", "top_k", "top_p", "seed")):
        raise ValueError(f"{idle} would change nothing on the built-in page; give a text, or leave it out")
    if args.temperature == 0 and (idle := changed("top_k", "top_p", "seed")):
        raise ValueError(f"{idle} would change nothing at --temperature 0; set it above 0, or leave it out")
    if args.figure and not shows_page:
        raise ValueError("--figure is of the built-in page; leave it or the text out")
    if args.figure:
        check_files(args.figure, None)
    return args


def write(model, encoding, Method, options: dict, text: str, new: int, sampling: dict):
    """Continue a text by `new` tokens, each printed as it comes. Then say what the cache holds, and what the
    full cache would have written.
    """
    ids = opening(encoding, model.config) + encoding.encode_ordinary(text)
    prompt = torch.tensor([ids], dtype=torch.long, device=model.embed.weight.device)
    ends = boundaries(encoding, model.config.vocab_size)
    caches = make_cache(model, Method, **options)
    tell_chunk_ends(caches, ends[prompt.cpu()])
    stream_of_tokens = stream(model, prompt, new, caches, **sampling)

    tokens, written = [], ""
    print(f"{text}{MARK}", end="", flush=True)
    try:
        for token in stream_of_tokens:
            tokens.append(token.item())
            all_of_it = encoding.decode(tokens)
            if not all_of_it.endswith("\ufffd"):  # a character may span tokens
                print(all_of_it[len(written):], end="", flush=True)
                written = all_of_it
    except ValueError:  # the text so far stays a line of its own
        print()
        raise
    print(all_of_it[len(written):], end="")

    live, allocated = cache_bytes(caches)
    print(f"\n\n[{caches[0].seen} tokens seen, at most {caches[0].length} slots kept per head in layer 0, "
          f"{live / 1024:.0f} KiB live, {allocated / 1024:.0f} KiB allocated]")
    if "budget" in options and caches[0].seen <= options["budget"]:
        print(f"[nothing was evicted: all tokens fit into the budget of {options['budget']}]")
    elif Method is not LayerCache:
        full = encoding.decode(generate(model, prompt, new, **sampling)[0].tolist())
        same = full == all_of_it
        print("[the full cache writes the same]" if same else f"[the full cache writes:]\n{full}")
