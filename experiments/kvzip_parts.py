"""KVzip taken apart: second reading, maximum for sum, ranking across layers; and in fewer bits.

    python -m experiments.kvzip_parts

Each part is left out alone and with the others. Then what KVzip and SnapKV keep is stored in fewer bits
(methods/ours/kvzip_4.py). Last, DuoAttention's heads: those of its trained gates, and those whose entries
KVzip ranks highest. The context is compressed before the question comes (blind): 32 documents a task of 512
tokens; the share that is answered as asked, ± one standard error, and the bytes of a text after its
answers, if the model's numbers have 16 bits.
"""
import argparse
from itertools import product
import time

import torch
from torch import Tensor
from tqdm import tqdm

from methods.duo_attention import DuoAttention, DuoByKVzip
from methods.kvzip import KVzip
from methods.ours.kvzip_4 import RoundedKVzip, RoundedWindow
from methods.ours.one_reading import OneReading
from methods.quantized import Quantized
from nanollm import SHIPPED
from nanollm.cache import LayerCache, bytes_in_16_bits, copied, make_cache
from nanollm.commands.registry import loaded
from nanollm.commands.shell import command, model_options
from nanollm.generate import prefill, read_again
from nanollm.measure.benchmark import TASKS
from nanollm.measure.evaluate import (answer, check_size, maker, prompt_and_question, retrieve, share,
                                      standard_error)
from nanollm.measure.tasks import Tasks

SHARES = 0.25, 0.125, 0.0625
READINGS = {"second": KVzip, "first alone": OneReading}
RANKED = {"all": True, "each head": False}  # across
HEADS = {"trained gates": DuoAttention, "KVzip's scores": DuoByKVzip}
HEAD_SHARES = 0.5, 0.25, 0.125
BITS = 16, 4, 2  # of a number; 16: as it is


@torch.no_grad()
def apart(model, batch, shares=SHARES, steps=list) -> tuple[dict[tuple, Tensor], float]:
    """Right answers (B,) of every (reading, score, ranking, share), blind; and the seconds of the second
    reading in units of the first's.
    """
    tokens, context, _ = prompt_and_question(model, batch)
    found, seconds = {}, []
    for (reading, Method), score in steps([*product(READINGS.items(), ("max", "sum"))]):
        caches = make_cache(model, Method, budget=context.shape[1], score=score)
        began = time.perf_counter()
        prefill(model, context, caches, 64)
        first = time.perf_counter()
        read_again(caches, lambda part: prefill(model, context[:, part], caches, 64))
        if Method is KVzip:
            seconds.append((time.perf_counter() - first) / (first - began))
        for (ranked, across), part in product(RANKED.items(), shares):
            compressed = copied(caches)
            for cache in compressed:
                cache.budget, cache.across, cache.rereads = share(part, context.shape[1]), across, 0
            right = answer(model, tokens, batch.answers, batch.question, compressed)
            found[reading, score, ranked, part] = right
    return found, min(seconds)


@torch.no_grad()
def fewer_bits(model, batch, shares=SHARES, steps=list) -> dict[tuple, tuple[Tensor, int]]:
    """Right answers (B,), blind, and `bytes_in_16_bits` of one text, of every (method, bits, share). Of
    methods that keep all tokens the share is 1.
    """
    tokens, context, _ = prompt_and_question(model, batch)
    found, n = {}, context.shape[1]
    for name, Method, knobs in steps([
            ("full", LayerCache, {}), ("quantized_2", Quantized, dict(bits=2, residual_length=16)),
            ("snap_kv", RoundedWindow, dict(budget=n, window_size=8)),
            ("kvzip", RoundedKVzip, dict(budget=n))]):
        caches = make_cache(model, Method, **knobs)
        prefill(model, context, caches, 64)
        read_again(caches, lambda part: prefill(model, context[:, part], caches, 64))
        for bits, part in product(BITS, shares) if "budget" in knobs else [(knobs.get("bits", 16), 1.0)]:
            compressed = copied(caches)
            for cache in compressed:
                if "budget" in knobs:
                    cache.budget, cache.bits, cache.rereads = share(part, n), bits, 0
            right = answer(model, tokens, batch.answers, batch.question, compressed)
            found[name, bits, part] = right, bytes_in_16_bits(compressed) // len(tokens)
    return found


def by_heads(model, batch, heads: dict[str, tuple], shares=HEAD_SHARES,
             steps=list) -> dict[tuple[str, float], Tensor]:
    """Right answers (B,) of DuoAttention, blind, of every (whose heads, share)."""
    return {(name, part): retrieve(model, batch, maker(model, DuoAttention, part, heads=heads[name]))["blind"]
            for name, part in steps([*product(heads, shares)])}


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m experiments.kvzip_parts", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    model_options(parser)
    parser.add_argument("--documents", type=int, default=32, help="a task; default 32")
    parser.add_argument("--length", type=int, default=512, metavar="TOKENS", help="of each; default 512")
    args = parser.parse_args(argv)
    names = {folder: name for name, folder in SHIPPED.items()}
    for folder in dict.fromkeys([*names, args.model]):
        model, encoding = loaded(args, folder)
        check_size(model, args.documents, 2, args.length)
        tasks, found, rounded, duo, ratio = Tasks(encoding, "test"), {}, {}, {}, 0.0
        retrieve_by, taken = {}, {}
        for name, Method in HEADS.items():
            began = time.perf_counter()
            retrieve_by[name] = Method.calibrate(model, encoding)["heads"]
            taken[name] = time.perf_counter() - began
        for task in ("needle", "recall"):
            batch = tasks.batch(task, 0, args.documents, args.length, **TASKS[task])
            progress = lambda x: tqdm(x, leave=False, desc=task, disable=None)
            found[task], ratio = apart(model, batch, steps=progress)
            rounded[task] = fewer_bits(model, batch, steps=progress)
            duo[task] = by_heads(model, batch, retrieve_by, steps=progress)
        heads = "".join(f"{f'{task} {100 * part:g} %':>18}" for task in found for part in SHARES)
        print(f"{names.get(folder, folder)!s:<12}{'':<24}{heads}\n{'reading':<12}{'score':<8}ranked")
        for reading, score, ranked in product(READINGS, ("max", "sum"), RANKED):
            cells = (found[task][reading, score, ranked, part] for task in found for part in SHARES)
            row = "".join(f"{f'{x.mean():.2f} ± {standard_error(x):.2f}':>18}" for x in cells)
            print(f"{reading:<12}{score:<8}{ranked:<16}{row}")
        print(f"The second reading takes {ratio:.1f} times as long as the first.\n")

        tasks_of = "".join(f"{task:>18}{'KiB':>8}" for task in rounded)
        print(f"{'method':<16}{'budget':>8}{'bits':>6}{tasks_of}")
        for name, bits, part in rounded["needle"]:
            cells = (each[name, bits, part] for each in rounded.values())
            row = "".join(f"{f'{x.mean():.2f} ± {standard_error(x):.2f}':>18}{held / 1024:>8.0f}"
                          for x, held in cells)
            budget = "all" if part == 1 else f"{100 * part:g} %"
            print(f"{name:<16}{budget:>8}{bits if bits < 16 else '–':>6}{row}")

        columns = "".join(f"{f'{task} {100 * part:g} %':>18}" for task in duo for part in HEAD_SHARES)
        print(f"\n{'DuoAttention by':<16}{'found in':>10}{columns}")
        for name in retrieve_by:
            row = "".join(f"{f'{x.mean():.2f} ± {standard_error(x):.2f}':>18}"
                          for x in (duo[task][name, part] for task in duo for part in HEAD_SHARES))
            print(f"{name:<16}{f'{taken[name]:.0f} s':>10}{row}")
        print()


if __name__ == "__main__":
    command(main)
