"""python -m nanollm ask: answer questions from a cache that `compress` saved."""

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
import sys
import time

import torch
from tqdm import tqdm

from lab.command_line import machine_options
from lab.loading import loaded
from lab.methods_by_name import pick
from lab.saved import header, load
from nanollm.cache import compress, copied, make_cache
from nanollm.check import whole
from nanollm.generate import prefill
from nanollm.tokenizer import opening, special_ids


def main(argv: list[str]):
    args = read_options(argv)
    head = header(args.cache)
    note = head["note"]
    if "name" not in note:
        raise ValueError(
            f"{args.cache} was not written by python -m nanollm compress; load it in Python"
        )
    args.engine = note["engine"]
    args.dtype = head["dtype"]
    args.model = args.model or Path(note["model"])
    model, encoding = loaded(args)
    caches = made(model, note, head["options"])
    load(args.cache, caches)
    asked = {"": caches}
    if args.compare:
        asked["   the full cache"] = read_again(model, caches)
    for question in map(str.strip, args.questions):
        for name, read in asked.items():
            began = time.perf_counter()
            print(f"{name or question} ▸ ", end="", flush=True)
            for piece in answer(model, encoding, copied(read), question, args.tokens):
                print(piece, end="", flush=True)
            milliseconds = 1000 * (time.perf_counter() - began)
            print(f"   [{milliseconds:.0f} ms]", flush=True)


def made(model, note: dict, options: dict) -> list:
    """Return caches into which the file fits.

    What the method had learned of the decoder, such as its gates, served the compression alone. So
    an empty tensor stands in for it.
    """
    variant = pick([note["name"]])[note["name"]]
    learned = dict.fromkeys(note["learned"], torch.empty(0))
    options = variant.options | options | learned
    return make_cache(model, variant.kind, variant.store, **options)


def read_again(model, caches: list) -> list:
    """Return full caches of the text that these caches have read."""
    full = make_cache(model)
    read(model, caches[0].ids, full)
    compress(model, caches[0].ids, full)
    return full


def read(model, tokens: torch.Tensor, caches: list):
    """Read tokens (1, T), and show how far it has come."""
    for part in tqdm(tokens.split(512, 1), "reading", leave=False, disable=None):
        prefill(model, part, caches)


@cache
def say_once(line: str):
    print(line, file=sys.stderr)


def around(encoding, config) -> tuple[list[int], list[int]]:
    """Return the tokens before a text, and those between a question and its answer.

    A chat template gives both. Without one they are the decoder's opening, [BOS] or [], and [].
    """
    try:
        return encoding.turn()
    except AttributeError:  # of the decoders that ship, which do not chat
        pass
    except ValueError as error:
        say_once(f"{error}; text and question are read without one")
    return opening(encoding, config), []


@torch.no_grad()
def answer(model, encoding, caches: list, question: str, new: int) -> Iterator[str]:
    """Feed a question; yield what greedy decoding writes, at most `new` tokens.

    It ends with the line, or at a special token, such as the one that ends the turn.
    """
    end = around(encoding, model.config)[1]
    if end and question.endswith("?"):
        ids = encoding.encode_ordinary(f"\n\n{question}") + end
    else:
        ids = encoding.encode_ordinary(f"\nQ: {question}")
    room = model.config.max_len - caches[0].seen - len(ids)
    if room < 1:
        most = max(room + len(ids) - 1, 0)
        raise ValueError(
            f"the question has {len(ids)} tokens, and after a text of {caches[0].seen} the "
            f"decoder reads at most {most}; shorten the question"
        )

    special = special_ids(encoding, model.config)
    written = []
    line = ""
    fed = torch.tensor([ids], device=model.embed.weight.device)
    for _ in range(min(new, room)):
        token = prefill(model, fed, caches)[0].argmax().item()
        if [token] == end[:1] or token in special:
            return
        written.append(token)
        text = encoding.decode(written).lstrip(" ")
        before = line
        # without a letter of which some bytes are missing
        line = text.partition("\n")[0].rstrip("\ufffd")
        yield line[len(before) :]
        if "\n" in text:
            return
        fed = fed.new_tensor([[token]])


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanollm ask",
        description="Answer questions from a cache that python -m nanollm compress saved, "
        "without its text. Each question is appended to the text as a new line, Q: QUESTION. "
        "With a decoder that chats, one that ends with a question mark is asked in its chat "
        "template instead.",
    )
    option = parser.add_argument
    option("cache", type=Path, metavar="FILE", help="file of the cache")
    option(
        "questions",
        nargs="+",
        metavar="QUESTION",
        help='the question, such as "The code of table is"; several are answered one by '
        "one, each as if it were the only one",
    )
    option(
        "--tokens", type=int, default=48, help="most tokens of an answer; default 48"
    )
    option(
        "--compare",
        action="store_true",
        help="read the text again, and show the full cache's answers below",
    )
    option(
        "--model",
        type=Path,
        help="folder or file of the decoder; default: where it was when it read the text",
    )
    machine_options(parser)
    args = parser.parse_args(argv)
    whole("tokens", args.tokens, 1)
    return args
