"""Take KVzip apart: leave out its reread, its maximum and its ranking across heads; then use fewer bits.

    python -m experiments.kvzip_parts

The first table leaves out each part alone and with the others, and weighs the reread by its gain. The second
stores the kept entries in fewer bits, as KIVI rounds (methods/ours/kvzip_4.py) or as TurboQuant does
(methods/turbo_quant.py). The third compares two ways to find DuoAttention's retrieval heads: its trained
gates, and KVzip's scores. The last lets each piece of the reread score only its own entries, or all. The
question comes after the compression (agnostic): 32 documents of each task, of 512 tokens, in the last table
of 1536.
"""
from dataclasses import dataclass
from itertools import product
import time

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.script import grouped, keep_label, mean_and_error, run, with_error
from methods.duo_attention import DuoAttention, DuoByKVzip
from methods.kvzip import KVzip
from methods.ours.kvzip_gain import GainKVzip
from methods.ours.kvzip_4 import RoundedKVzip, RoundedWindow
from methods.ours.one_reading import OneReading
from methods.quantized import Quantized
from methods.turbo_quant import Turbo, TurboQuant
from nanollm.cache import LayerCache, bytes_in_16_bits, copied, make_cache
from nanollm.commands.text_table import text_table
from nanollm.generate import prefill, reread, tell_prompt
from nanollm.measure.benchmark import TASKS
from nanollm.measure.evaluate import answer, check_size, maker, prompt_and_question, retrieve, budget_for
from nanollm.measure.tasks import Tasks

KEEP_RATIOS = 0.125, 0.0625, 0.03125
READINGS = {"second": KVzip, "by gain": GainKVzip, "first alone": OneReading}
RANKED = {"all": True, "each head": False}  # value of the option `across`
HEADS = {"trained gates": DuoAttention, "KVzip's scores": DuoByKVzip}
HEAD_KEEP_RATIOS = 0.5, 0.25, 0.125
SCORED = {"its own": True, "all": False}  # value of the option `own`
BITS = 16, 4, 3, 2  # bits per number; 16: not quantized


@dataclass(eq=False)
class TurboKVzip(Turbo, KVzip):
    """What KVzip keeps, rounded by TurboQuant."""


@torch.no_grad()
def apart(model, batch, keep_ratios=KEEP_RATIOS) -> tuple[dict[tuple, Tensor], float]:
    """Return the right answers (B,) by (reading, score, ranking, keep ratio), and the time of the reread.

    Answers are agnostic. The time is in units of the first read's.
    """
    tokens, context, _ = prompt_and_question(model, batch)
    found, seconds = {}, []
    for (reading, Method), score in tqdm([*product(READINGS.items(), ("max", "sum"))], leave=False,
                                           desc="readings", disable=None):
        caches = make_cache(model, Method, budget=context.shape[1], score=score)
        began = time.perf_counter()
        prefill(model, context, caches, 64)
        first = time.perf_counter()
        tell_prompt(context, caches)
        reread(caches, lambda part: prefill(model, context[:, part], caches, 64))
        if Method is KVzip:
            seconds.append((time.perf_counter() - first) / (first - began))
        for (ranked, across), part in product(RANKED.items(), keep_ratios):
            compressed = copied(caches)
            for cache in compressed:
                cache.budget, cache.across, cache.reread_size = budget_for(part, context.shape[1]), across, 0
            right = answer(model, tokens, batch.answers, batch.question, compressed)
            found[reading, score, ranked, part] = right
    return found, min(seconds)


@torch.no_grad()
def fewer_bits(model, batch, keep_ratios=KEEP_RATIOS) -> dict[tuple, tuple[Tensor, int]]:
    """Return the right answers (B,), agnostic, and a text's bytes by (method, bits, keep ratio).

    The keep ratio is None for methods that keep all tokens. Bytes are `bytes_in_16_bits`.
    """
    tokens, context, _ = prompt_and_question(model, batch)
    found, n = {}, context.shape[1]
    for name, Method, options in tqdm([
            ("full", LayerCache, {}), ("quantized_2", Quantized, dict(bits=2, residual_length=16)),
            ("turbo_3", TurboQuant, dict(bits=3)), ("turbo_2", TurboQuant, dict(bits=2)),
            ("snap_kv", RoundedWindow, dict(budget=n, window_size=8)),
            ("kvzip", RoundedKVzip, dict(budget=n)), ("kvzip, rotated", TurboKVzip, dict(budget=n)),
            ("kvzip, two stages", TurboKVzip, dict(budget=n, second=True))],
            leave=False, desc="bits", disable=None):
        caches = make_cache(model, Method, **options)
        prefill(model, context, caches, 64)
        reread(caches, lambda part: prefill(model, context[:, part], caches, 64))
        widths = [bits for bits in BITS if bits < 16 or Method is not TurboKVzip]
        every = product(widths, keep_ratios) if "budget" in options else [(options.get("bits", 16), None)]
        for bits, part in every:
            compressed = copied(caches)
            for cache in compressed:
                if "budget" in options:
                    cache.budget, cache.bits, cache.reread_size = budget_for(part, n), bits, 0
            right = answer(model, tokens, batch.answers, batch.question, compressed)
            found[name, bits, part] = right, bytes_in_16_bits(compressed) // len(tokens)
    return found


@torch.no_grad()
def by_pieces(model, batch, keep_ratios=(0.125, 0.0625)) -> dict[tuple, tuple[Tensor, float]]:
    """Return the right answers (B,), agnostic, and seconds of the reread by (scored entries, keep ratio)."""
    tokens, context, _ = prompt_and_question(model, batch)
    found = {}
    for scored, own in SCORED.items():
        caches = make_cache(model, KVzip, budget=context.shape[1], own=own)
        prefill(model, context, caches, 64)
        began = time.perf_counter()
        reread(caches, lambda part: prefill(model, context[:, part], caches))
        seconds = time.perf_counter() - began
        for part in keep_ratios:
            compressed = copied(caches)
            for cache in compressed:
                cache.budget, cache.reread_size = budget_for(part, context.shape[1]), 0
            found[scored, part] = answer(model, tokens, batch.answers, batch.question, compressed), seconds
    return found


def by_heads(model, batch, heads: dict[str, tuple], keep_ratios=HEAD_KEEP_RATIOS) -> dict[tuple, Tensor]:
    """Return the right answers (B,) of DuoAttention, agnostic, by (source of heads, keep ratio)."""
    return {(name, part): retrieve(model, batch, maker(model, DuoAttention, part, heads=heads[name])
                                   )["agnostic"] for name, part in product(heads, keep_ratios)}


def measured(model, encoding, documents: int, length: int) -> list[dict]:
    """Return the rows of four tables: readings, bits, heads, pieces. A task's accuracy is [mean, error]."""
    check_size(model, documents, 2, length)
    heads, seconds = {}, {}
    for name, Method in HEADS.items():
        began = time.perf_counter()
        heads[name] = Method.calibrate(model, encoding)["heads"]
        seconds[name] = time.perf_counter() - began

    batches = {task: Tasks(encoding, "test").batch(task, 0, documents, length, **TASKS[task])
               for task in ("needle", "pairs")}
    readings = {task: apart(model, batch) for task, batch in batches.items()}
    bits = {task: fewer_bits(model, batch) for task, batch in batches.items()}
    duo = {task: by_heads(model, batch, heads) for task, batch in batches.items()}
    pieces = {task: by_pieces(model, Tasks(encoding, "test").batch(task, 0, documents, 3 * length, **options))
              for task, options in TASKS.items() if task in batches}
    rows = [dict(table="rereading", times=min(times for _, times in readings.values()))]
    for key in readings["needle"][0]:
        rows.append(dict(table="readings") | dict(zip(("reading", "score", "ranked", "keep_ratio"), key)))
        rows[-1] |= {task: mean_and_error(found[key]) for task, (found, _) in readings.items()}
    for key in bits["needle"]:
        rows.append(dict(table="bits") | dict(zip(("method", "bits", "keep_ratio"), key)))
        for task, found in bits.items():
            rows[-1] |= {task: mean_and_error(found[key][0]), f"{task}, KiB": found[key][1] / 1024}
    for name, part in duo["needle"]:
        rows.append(dict(table="heads", heads=name, keep_ratio=part, seconds=seconds[name]))
        rows[-1] |= {task: mean_and_error(found[name, part]) for task, found in duo.items()}
    for scored, part in pieces["needle"]:
        found = {task: table[scored, part] for task, table in pieces.items()}
        rows.append(dict(table="pieces", scored=scored, keep_ratio=part))
        rows[-1] |= {task: mean_and_error(right) for task, (right, _) in found.items()}
        rows[-1] |= dict(seconds=sum(seconds for _, seconds in found.values()))
    return rows


def show(rows: list[dict]) -> str:
    """Return four tables for each decoder."""
    tables, parts = grouped(rows, "decoder", "table"), [TERMS]
    for decoder in dict.fromkeys(decoder for decoder, _ in tables):
        parts += [f"{decoder}: KVzip with and without its parts\n{columns(tables[decoder, 'readings'])}\n"
                  f"The reread takes {tables[decoder, 'rereading'][0]['times']:.1f} times as long as the "
                  "first read.",
                  f"{decoder}: fewer bits\n{columns(tables[decoder, 'bits'])}",
                  f"{decoder}: DuoAttention by two calibrations\n{columns(tables[decoder, 'heads'])}",
                  f"{decoder}: which entries a piece of the reread scores, in texts three times as long\n"
                  f"{columns(tables[decoder, 'pieces'])}"]
    return "\n\n".join(parts)


LABELS = {"keep_ratio": "keep", "reading": "scores", "second": "reread", "by gain": "reread, by gain",
          "first alone": "first read"}
TERMS = """\
scores   where they come from: KVzip's reread of the prompt, the same weighed by what it gains at each token
         (methods/ours/kvzip_gain.py), or the first read
score    an entry's score is the largest attention weight that it gets (max), or their sum
ranked   all: the entries of all heads are ranked together; each head: every head keeps as many
bits     per stored number of keys and values; 16: not quantized. rotated: by TurboQuant; two stages: its
         second stage takes a bit more for keys
heads    retrieval heads found by DuoAttention's trained gates, or by KVzip's scores
scored   by a piece of 512 reread tokens: its own entries, as in the paper, or all
seconds  time of this calibration, or of both tasks' rereads
KiB      size of a text's cache after its answer, with 16-bit numbers; quantized entries as stored"""


def columns(rows: list[dict]) -> str:
    """Return the rows of one table as text, with a column for each key."""
    def cell(key: str, x) -> str:
        if key == "keep_ratio":
            return keep_label(x)
        if isinstance(x, str):
            return LABELS.get(x, x)
        return f"{x:.0f}" if isinstance(x, (int, float)) else with_error(*x)

    names = [key for key in rows[0] if key not in ("decoder", "table")]
    return text_table([[LABELS.get(key, key) for key in names],
                       *([cell(key, row[key]) for key in names] for row in rows)])


if __name__ == "__main__":
    run("experiments.kvzip_parts", __doc__, measured, show, documents=32, length=512)
