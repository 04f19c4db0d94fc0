"""Who still answers if the question comes after the compression, and what does it cost to find out?

    python -m experiments.blind

Needles and pairs of 512 tokens, on both decoders, 256 documents a task. What a method keeps is its share of
the full cache's right answers, mean over the tasks, ± one standard error, document by document. It counts as
95 % only if it is so by one standard error. A row is undecided within one standard error of 95 %. A row that
misses 95 % by four standard errors on the first 32 documents of a task is asked no more.

`bytes`: what is held when the question comes, of a full cache, numbers of 16 bits in both. `reading`: time of
the processor until then, of two documents, over the full cache's.
"""
import argparse
import math
import time
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.speed import best
from nanollm import SHIPPED
from nanollm.cache import bytes_in_16_bits
from nanollm.commands.registry import calibrated, given, has_budget, loaded, pick
from nanollm.commands.shell import command, model_options
from nanollm.generate import end_prompt, prefill, read_again, rereads
from nanollm.measure.benchmark import TASKS, Benchmark, cut
from nanollm.measure.evaluate import ask, check_size, maker, prompt_and_question, standard_error
from nanollm.measure.replay import CannotReplay, replay
from nanollm.measure.tasks import Tasks
from nanollm.tokenizer import boundaries

SHARES = 0.5, 0.25, 0.125, 0.0625
ENOUGH = 0.95       # of the full cache's answers
FIRST, FAR = 32, 4  # documents of a task that are asked first; standard errors that end a row then


class Found(NamedTuple):
    """Of one method and budget: right answers (documents,) by task; bytes of a text, and seconds, until the
    question.
    """
    right: dict[str, Tensor]
    bytes: float
    seconds: float

    @property
    def documents(self) -> int:
        return min(map(len, self.right.values()))


def kept(row: Found, full: Found) -> tuple[float, float]:
    """The share of the full cache's answers that a row keeps, mean over the tasks; its standard error."""
    answers = sum(x[:row.documents].mean().item() for x in full.right.values())
    beyond = [x - ENOUGH * full.right[task][:len(x)] for task, x in row.right.items()]
    error = sum(standard_error(x) ** 2 for x in beyond) ** 0.5
    return ENOUGH + sum(x.mean().item() for x in beyond) / answers, error / answers


def measure(model, pieces: list[Benchmark], make, full: Found | None, scores: dict) -> Found:
    """Ask piece by piece; no more after the first if that misses ENOUGH by far. `scores` are of KVzip's
    second readings, which its variants and budgets share.
    """
    right, held = {task: [] for task in pieces[0].batches}, []
    row = lambda: Found({task: torch.cat(x) for task, x in right.items()}, sum(held) / len(held), 0.0)
    for piece in pieces:
        for task, batch in piece.batches.items():
            tokens, context, _ = prompt_and_question(model, batch)
            caches = make(batch.question, context)
            try:
                replay(piece.recordings[task][:1], caches)
            except CannotReplay:
                caches = make(batch.question, context)
                prefill(model, context, caches)
            if rereads(caches):
                key = len(held), caches[0].score
                if key not in scores:
                    read_again(caches, lambda part: prefill(model, context[:, part], caches))
                    scores[key] = [cache.looked for cache in caches]
                for cache, looked in zip(caches, scores[key]):
                    cache.looked, cache.rereads = looked, 0
            end_prompt(model, context, caches)
            held.append(bytes_in_16_bits(caches) / len(tokens))
            right[task].append(ask(model, tokens, batch.answers, batch.question, caches))
        if full and piece is pieces[0]:
            share, error = kept(row(), full)
            if share < ENOUGH - FAR * error:
                break
    return row()._replace(seconds=best(lambda: until_asked(model, context[:2], make), 2, time.process_time))


def until_asked(model, context: Tensor, make):
    caches = make(context.shape[1], context)
    prefill(model, context, caches)
    end_prompt(model, context, caches)


@torch.no_grad()
def found(model, tasks: Tasks, methods: dict, documents: int, T: int, steps=list) -> dict[tuple, Found]:
    """Of every method and each share of the prompt; None is the share where there is no budget. The full
    cache comes first.
    """
    check_size(model, documents, 2, T)
    batches = {task: tasks.batch(task, 0, documents, T, **TASKS[task]) for task in ("needle", "recall")}
    learned, rows, scores = {}, {}, {}
    ends = boundaries(tasks.encoding, model.config.vocab_size)
    jobs = [(name, part) for name, Method in methods.items()
            for part in (SHARES if has_budget(Method) else [None])]
    shortest = min(batch.question for batch in batches.values())
    for name, part in jobs:  # what cannot be measured is found before any work is done
        try:
            maker(model, methods[name], part, **given(methods[name], window_size=8))(shortest)
        except ValueError as error:
            raise ValueError(f"{name} at {budget(part)} of {shortest} tokens: {error}") from None

    pieces = [Benchmark.read(model, dict(zip(batches, parts)), None)
              for parts in zip(*(cut(batch, FIRST) for batch in batches.values()))]
    for name, part in steps(jobs):
        if name not in learned:
            learned[name] = calibrated(methods[name], model, tasks.encoding)
        knobs = dict(ends=ends) | given(methods[name], window_size=8) | learned[name]
        make = maker(model, methods[name], part, **knobs)
        rows[name, part] = measure(model, pieces, make, rows.get(("full", None)), scores)
    return rows


def verdict(row: Found, full: Found) -> str:
    """Whether a row keeps ENOUGH: "yes" or "no" by one standard error, else "undecided"."""
    share, error = kept(row, full)
    return "yes" if share - error >= ENOUGH else "no" if share + error < ENOUGH else "undecided"


def enough(rows: dict[tuple, Found]) -> dict[str, tuple]:
    """By method, the share of the prompt with which it keeps ENOUGH in the fewest bytes. Methods that never
    do are left out.
    """
    full, best = rows["full", None], {}
    if not sum(x.sum() for x in full.right.values()):  # these tasks cannot judge this model
        return {}
    for (name, part), row in sorted(rows.items(), key=lambda item: item[1].bytes):
        if verdict(row, full) == "yes":
            best.setdefault(name, part)
    return best


def budget(part: float | None) -> str:
    return "all" if part is None else f"{100 * part:g} %"


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m experiments.blind", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    model_options(parser)
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="default: every variant")
    parser.add_argument("--documents", type=int, default=256, help="a task; default 256")
    parser.add_argument("--length", type=int, default=512, metavar="TOKENS", help="of each; default 512")
    args = parser.parse_args(argv)
    methods = pick(["full", *args.methods] if args.methods else [])
    own = args.model.resolve()
    folders = SHIPPED if own in SHIPPED.values() else SHIPPED | {str(args.model): own}
    of, began = {}, time.time()  # by decoder
    for name, folder in folders.items():
        model, encoding = loaded(args, folder)
        of[name] = found(model, Tasks(encoding, "test"), methods, args.documents, args.length,
                         lambda jobs: tqdm(jobs, leave=False, desc=name, disable=None))

    print(f"{'':<33}" + "".join(f"{name:^50}" for name in of))
    names = f"{'bytes':>10}{'needle':>8}{'recall':>8}{'kept, %':>14}{'asked':>6}{'reading':>8}"
    print(f"{'method':<25}{'budget':>8}" + names * len(of))
    full = {name: rows["full", None] for name, rows in of.items()}
    for job in next(iter(of.values())):
        line = "".join(cells(x[job], full[name]) for name, x in of.items())
        print(f"{job[0]:<25}{budget(job[1]):>8}{line}")

    print(f"\n{100 * ENOUGH:g} % of the full cache's answers by one standard error, in the fewest bytes, on "
          f"{' and '.join(of)}")
    best = {name: enough(rows) for name, rows in of.items()}
    share = lambda name, method: of[name][method, best[name][method]].bytes / full[name].bytes
    for method in sorted(set.intersection(*map(set, best.values())),
                         key=lambda method: max(share(name, method) for name in of)):
        line = "".join(f"{budget(best[name][method]):>12}{100 * share(name, method):>8.1f} %" for name in of)
        print(f"{method:<25}{line}")
    for name, rows in of.items():
        near = [f"{method} at {budget(part)}" for (method, part), row in rows.items()
                if name in best and best[name] and verdict(row, full[name]) == "undecided"]
        print(f"undecided on {name}: {', '.join(near) or 'none'}")
    print(f"in {(time.time() - began) / 60:.0f} minutes")


def cells(row: Found, full: Found) -> str:
    share, error = kept(row, full) if any(x.any() for x in full.right.values()) else (math.nan, math.nan)
    answers = "".join(f"{x.mean():>8.2f}" for x in row.right.values())
    return (f"{100 * row.bytes / full.bytes:>8.1f} %{answers}"
            + f"{f'{100 * share:.1f} ± {100 * error:.1f}':>14}{row.documents:>6}"
            + f"{row.seconds / full.seconds:>8.2f}")


if __name__ == "__main__":
    command(main)
