"""KVzip taken apart: second reading, maximum for sum, ranking across layers; and in fewer bits.

    python -m experiments.kvzip_parts

Each part is left out alone and with the others. Then what KVzip and SnapKV keep is stored in fewer bits
(methods/ours/kvzip_4.py). Last, DuoAttention's heads: those of its trained gates, and those whose entries
KVzip ranks highest. The context is compressed before the question comes (blind): 32 documents a task of 512
tokens; the share that is answered as asked, ± one standard error, and the bytes of a text after its
answers, if the model's numbers have 16 bits.
"""
from itertools import product
import time

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.script import (budget, decoders, finish, mean_and_error, options, parser,
                                with_error)
from methods.duo_attention import DuoAttention, DuoByKVzip
from methods.kvzip import KVzip
from methods.ours.kvzip_4 import RoundedKVzip, RoundedWindow
from methods.ours.one_reading import OneReading
from methods.quantized import Quantized
from nanollm.cache import LayerCache, bytes_in_16_bits, copied, make_cache
from nanollm.commands.shell import command
from nanollm.commands.text_table import text_table
from nanollm.generate import prefill, read_again
from nanollm.measure.evaluate import (TASKS, answer, check_size, maker, prompt_and_question, retrieve, share)
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


def measured(model, encoding, documents: int, length: int) -> list[dict]:
    """A row for each task and cell of the three tables: readings, bits and heads. `right`: mean and error."""
    check_size(model, documents, 2, length)
    heads, seconds, rows = {}, {}, []
    for name, Method in HEADS.items():
        began = time.perf_counter()
        heads[name] = Method.calibrate(model, encoding)["heads"]
        seconds[name] = time.perf_counter() - began

    for task in ("needle", "recall"):
        batch = Tasks(encoding, "test").batch(task, 0, documents, length, **TASKS[task])
        progress = lambda x: tqdm(x, leave=False, desc=task, disable=None)
        found, ratio = apart(model, batch, steps=progress)
        rows += [dict(table="readings", task=task, reading=reading, score=score, ranked=ranked, share=part,
                      right=mean_and_error(right), times=ratio)
                 for (reading, score, ranked, part), right in found.items()]
        rows += [dict(table="bits", task=task, method=name, share=part, bits=bits, right=mean_and_error(right),
                      kib=held / 1024)
                 for (name, bits, part), (right, held) in fewer_bits(model, batch, steps=progress).items()]
        rows += [dict(table="heads", task=task, heads=name, seconds=seconds[name], share=part,
                      right=mean_and_error(right))
                 for (name, part), right in by_heads(model, batch, heads, steps=progress).items()]
    return rows


def show(rows: list[dict]) -> str:
    """Three tables a decoder."""
    parts = []
    for decoder in dict.fromkeys(row["decoder"] for row in rows):
        readings, bits, heads = ([row for row in rows if (row["decoder"], row["table"]) == (decoder, table)]
                                 for table in ("readings", "bits", "heads"))
        parts += [f"{decoder}\n" + side_by_side(readings, "reading", "score", "ranked") + "\nThe second "
                  f"reading takes {readings[-1]['times']:.1f} times as long as the first.",
                  side_by_side(bits, "method", "budget", "bits"), side_by_side(heads, "heads", "found in")]
    return "\n\n".join(parts)


def side_by_side(rows: list[dict], *names: str) -> str:
    """A line for all rows that agree in these columns; in it the answers of each task, and budget or KiB."""
    of, titles = {}, {}
    for row in rows:
        right = with_error(*row["right"])
        if row["table"] == "bits":
            text = dict(budget="all" if row["share"] == 1 else budget(row["share"]),
                        bits="–" if row["bits"] == 16 else str(row["bits"]))
            cells = {row["task"]: right, f"{row['task']}, KiB": f"{row['kib']:.0f}"}
        else:
            text = {"found in": f"{row.get('seconds', 0):.0f} s"}
            cells = {f"{row['task']} {budget(row['share'])}": right}
        line = tuple(text.get(name) or row[name] for name in names)
        of.setdefault(line, {}).update(cells)
        titles.update(cells)
    return text_table([[*names, *titles], *([*line, *cells.values()] for line, cells in of.items())])


def main(argv: list[str] | None = None):
    made = parser("experiments.kvzip_parts", __doc__)
    made.add_argument("--documents", type=int, default=32, help="a task; default 32")
    made.add_argument("--length", type=int, default=512, metavar="TOKENS", help="of each; default 512")
    args = options(made, argv)
    rows = [dict(decoder=name) | row for name, model, encoding in decoders(args)
            for row in measured(model, encoding, args.documents, args.length)]
    finish(args, rows, show)


if __name__ == "__main__":
    command(main)
