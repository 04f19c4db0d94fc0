"""python -m nanollm ask: answer questions from a cache that `compress` saved, without the text."""
import argparse
from pathlib import Path
import time

import torch

from lab.registry import loaded, pick
from nanollm.cache import copied, make_cache
from nanollm.check import whole
from nanollm.generate import prefill
from nanollm.saved import header, load


def main(argv: list[str]):
    args = read_options(argv)
    head = header(args.cache)
    if "name" not in head["note"]:
        raise ValueError(f"{args.cache} was not written by python -m nanollm compress; load it in Python")
    args.engine, args.dtype = head["note"]["engine"], head["dtype"]
    args.model = args.model or Path(head["note"]["model"])
    model, encoding = loaded(args)
    name = head["note"]["name"]
    caches = make_cache(model, pick([name])[name], **head["options"])
    load(args.cache, caches)
    for question in args.questions:
        began = time.perf_counter()
        written = answer(model, encoding, copied(caches), f"\nQ: {question.strip()}", args.tokens)
        print(f"{question.strip()} ▸ {written}   [{1000 * (time.perf_counter() - began):.0f} ms]", flush=True)


@torch.no_grad()
def answer(model, encoding, caches: list, question: str, new: int) -> str:
    """Feed a question; return what greedy decoding writes to a line's end, at most `new` tokens."""
    ids = encoding.encode_ordinary(question)
    room = model.config.max_len - caches[0].seen - len(ids)
    if room < 1:
        raise ValueError(f"the question has {len(ids)} tokens, and after a text of {caches[0].seen} the "
                         f"decoder reads at most {max(room + len(ids) - 1, 0)}; shorten the question")
    ids, text, written = torch.tensor([ids], device=model.embed.weight.device), "", []
    while "\n" not in text and len(written) < min(new, room):
        written.append(prefill(model, ids, caches)[0].argmax().item())
        ids, text = ids.new_tensor([written[-1:]]), encoding.decode(written)
    return text.partition("\n")[0].strip()


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanollm ask",
        description="Answer questions from a cache that python -m nanollm compress saved, without its text. "
                    "Each question is appended to the text as a new line, Q: QUESTION.")
    parser.add_argument("cache", type=Path, metavar="FILE", help="file of the cache")
    parser.add_argument("questions", nargs="+", metavar="QUESTION",
                        help="the question, such as \"The code of table is\"; several are answered one by "
                             "one, each as if it were the only one")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer; default 24")
    parser.add_argument("--model", type=Path, help="folder of the decoder; default: where it was when it "
                                                   "read the text")
    parser.add_argument("--device", default="cpu", help="torch device, such as cpu or cuda:0; default cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; default 0: chosen by the size")
    args = parser.parse_args(argv)
    whole("tokens", args.tokens, 1)
    return args
