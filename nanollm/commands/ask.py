"""python -m nanollm ask: answer questions from a cache that `compress` saved, without the text."""
import argparse
from pathlib import Path
import time

import torch

from nanollm.cache import copied, make_cache
from nanollm.check import whole
from nanollm.commands import shell
from nanollm.commands.registry import loaded, pick
from nanollm.generate import prefill
from nanollm.saved import header, load


def main(argv: list[str]):
    args = read_options(argv)
    head = header(args.cache)
    model, encoding = loaded(args)
    caches = make_cache(model, pick([head["method"]])[head["method"]], **head["options"])
    load(args.cache, caches)
    for question in args.questions:
        began = time.perf_counter()
        written = answer(model, encoding, copied(caches), f"\nQ: {question.strip()}", args.tokens)
        print(f"{question.strip()} ▸{written}   [{1000 * (time.perf_counter() - began):.0f} ms]", flush=True)


@torch.no_grad()
def answer(model, encoding, caches: list, question: str, new: int) -> str:
    """Feed a question, and return the text of greedy decoding up to a line's end or `new` tokens."""
    ids = torch.tensor([encoding.encode_ordinary(question)], device=model.embed.weight.device)
    logits, written = prefill(model, ids, caches), []
    for _ in range(new):
        written.append(logits[0].argmax().item())
        text = encoding.decode(written)
        if "\n" in text.strip():
            break
        logits = prefill(model, torch.tensor([written[-1:]], device=ids.device), caches)
    return f" {text.strip()}".partition("\n")[0]


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanollm ask",
        description="Answer questions from a cache that python -m nanollm compress saved, without its text. "
                    "A question stands on a line of its own after the text, as \"Q: The code of table is\".")
    parser.add_argument("cache", type=Path, metavar="FILE", help="file of the cache")
    parser.add_argument("questions", nargs="+", metavar="QUESTION",
                        help="the question; several are answered one by one, each as if it were the only one")
    parser.add_argument("--tokens", type=int, default=24, help="longest answer; default 24 tokens")
    shell.model_options(parser)
    args = parser.parse_args(argv)
    whole("tokens", args.tokens, 1)
    return args
