"""python -m nanollm generate: continue a text, or show the tokens of a built-in page that a method keeps."""
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

MARK = "▸"  # between the prompt and its continuation


def main(argv: list[str]):
    args = read_options(argv)
    shows_page = args.prompt is None and not args.file
    name = (demo.METHOD if shows_page else "full") if args.method is None else args.method
    if name == "all":
        raise ValueError("--method is all, but generate runs one method; name one")
    Method = pick([name])[name]
    budget = demo.BUDGET if args.budget is None and shows_page and has_budget(Method) else args.budget
    if budget is not None:
        whole("budget", budget, 1)
    if budget is None and has_budget(Method):
        raise ValueError(f"{name} needs --budget: how many entries each key/value head may keep")
    if budget is not None and not has_budget(Method):
        raise ValueError(f"{name} has no budget; leave --budget out")
    if args.window is not None and not given(Method, window_size=args.window):
        raise ValueError(f"{name} has no observation window; leave --window out")

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
    """Return the command line. ValueError if options contradict each other or would change nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm generate",
        description="Continue a text with a compressed KV cache. Without a text, read a built-in page, mark "
                    "the tokens that the method evicts, and answer a question about the page.")
    parser.add_argument("prompt", nargs="?", help="the text to continue")
    parser.add_argument("--file", type=Path, metavar="FILE", help="file with the text to continue")
    parser.add_argument("--method", metavar="NAME",
                        help="method that compresses the cache, such as h2o or ada_kv+critical; "
                             f"default: full (the full cache); for the built-in page {demo.METHOD}")
    parser.add_argument("--budget", type=int, metavar="ENTRIES",
                        help="how many entries each key/value head may keep; every method with a budget "
                             f"needs it; default for the built-in page {demo.BUDGET}")
    parser.add_argument("--window", type=int, metavar="QUERIES",
                        help="observation window: how many of the prompt's last queries score the entries; "
                             "default 8")
    parser.add_argument("--tokens", type=int, default=100, help="how many tokens to write; default 100")
    parser.add_argument("--temperature", type=float, default=0.0,
                        help="temperature of the sampling; default 0: always the most likely token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K",
                        help="sample from the K most likely tokens; default 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P",
                        help="sample from the most likely tokens that together have probability P; default 1")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling; default 0")
    parser.add_argument("--figure", type=Path, metavar="FILE",
                        help="file for a picture of the built-in page (.png, .pdf or .svg)")
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
        raise ValueError(f"{idle} would change nothing on the built-in page; give a text or leave {idle} out")
    if args.temperature == 0 and (idle := changed("top_k", "top_p", "seed")):
        raise ValueError(f"{idle} would change nothing at --temperature 0; raise it or leave {idle} out")
    if args.figure and not shows_page:
        raise ValueError("--figure draws the built-in page; leave out --figure or the text")
    if args.figure:
        check_files(args.figure, None)
    return args


def write(model, encoding, Method, options: dict, text: str, new: int, sampling: dict):
    """Continue a text, and print each token as it comes; then compare with the full cache."""
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
    except ValueError:  # end the line of text before the error
        print()
        raise
    print(all_of_it[len(written):], end="")

    live, allocated = cache_bytes(caches)
    print(f"\n\n[{caches[0].seen} tokens seen; a head of layer 0 keeps at most {caches[0].length}; the cache "
          f"holds {live / 1024:.0f} KiB in {allocated / 1024:.0f} KiB of allocated memory]")
    if "budget" in options and caches[0].seen <= options["budget"]:
        print(f"[nothing was evicted: all tokens fit into the budget of {options['budget']}]")
    elif Method is not LayerCache:
        full = encoding.decode(generate(model, prompt, new, **sampling)[0].tolist())
        same = full == all_of_it
        print("[the full cache writes the same]" if same else f"[the full cache writes:]\n{full}")
