"""Who still answers if the question comes after the compression, and what does it cost to find out?

    python -m methods.theory.blind

Needles and pairs, 32 documents of 512 tokens each, on both decoders. `bytes`: what is held when the question
comes, as a share of the full cache's. Both are of 32 bits a number here; beside a full cache of 16 bits, what
is rounded takes nearly twice the share. `reading`: seconds until then, of two documents, over the full
cache's.
"""
import argparse
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from nanollm import SHIPPED, command
from nanollm.cache import cache_bytes
from nanollm.data import Tasks
from nanollm.evaluate import TASKS, Benchmark, ask, check_size, maker, prompt_and_question
from nanollm.generate import end_prompt, prefill
from nanollm.replay import CannotReplay, replay
from nanollm.select import calibrated, given, has_budget, loaded, model_options, pick
from nanollm.speed import best
from nanollm.tokenizer import boundaries

SHARES = 0.5, 0.25, 0.125, 0.0625
ENOUGH = 0.95  # of the full cache's answers


class Found(NamedTuple):
    """Of one method and budget: right answers (documents,) by task; bytes and seconds until the question."""
    right: dict[str, Tensor]
    bytes: int
    seconds: float


def measure(model, read: Benchmark, make) -> Found:
    right, held = {}, 0
    for task, batch in read.batches.items():
        tokens, context, _ = prompt_and_question(model, batch)
        caches = make(batch.question, context)
        try:
            replay(read.recordings[task][:1], caches)
        except CannotReplay:
            caches = make(batch.question, context)
            prefill(model, context, caches)
        end_prompt(model, context, caches)
        held += cache_bytes(caches)[0]
        right[task] = ask(model, tokens, batch.answers, batch.question, caches)
    return Found(right, held, best(lambda: until_asked(model, context[:2], make), 2))


def until_asked(model, context: Tensor, make):
    caches = make(context.shape[1], context)
    prefill(model, context, caches)
    end_prompt(model, context, caches)


@torch.no_grad()
def found(model, tasks: Tasks, methods: dict, documents: int, T: int, steps=tqdm) -> dict[tuple, Found]:
    """Of every method and each share of the prompt; None is the share where there is no budget."""
    check_size(model, documents, 2, T)
    batches = {task: tasks.batch(task, 0, documents, T, **TASKS[task]) for task in ("needle", "recall")}
    learned, rows = {}, {}
    ends = boundaries(tasks.encoding, model.config.vocab_size)
    jobs = [(name, part) for name, Method in methods.items()
            for part in (SHARES if has_budget(Method) else [None])]
    shortest = min(batch.question for batch in batches.values())
    for name, part in jobs:  # what cannot be measured is found before any work is done
        try:
            maker(model, methods[name], part, **given(methods[name], window_size=8))(shortest)
        except ValueError as error:
            raise ValueError(f"{name} at {budget(part)} of {shortest} tokens: {error}") from None

    read = Benchmark.read(model, batches, None)
    for name, part in steps(jobs):
        if name not in learned:
            learned[name] = calibrated(methods[name], model, tasks.encoding)
        knobs = dict(ends=ends) | given(methods[name], window_size=8) | learned[name]
        rows[name, part] = measure(model, read, maker(model, methods[name], part, **knobs))
    return rows


def enough(rows: dict[tuple, Found]) -> dict[str, tuple]:
    """By method, the share of the prompt with which it keeps 95 % of the full cache's answers, both tasks
    together, in the fewest bytes. Methods that never keep as many are left out.
    """
    answers = lambda row: sum(x.sum().item() for x in row.right.values())
    least = ENOUGH * answers(rows["full", None])
    if not least:  # the full cache fails: these tasks cannot judge this model
        return {}
    best = {}
    for (name, part), row in sorted(rows.items(), key=lambda item: item[1].bytes):
        if answers(row) >= least:
            best.setdefault(name, part)
    return best


def budget(part: float | None) -> str:
    return "all" if part is None else f"{100 * part:g} %"


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m methods.theory.blind", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    model_options(parser)
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="default: every variant")
    parser.add_argument("--documents", type=int, default=32, help="a task; default 32")
    parser.add_argument("--length", type=int, default=512, metavar="TOKENS", help="of each; default 512")
    args = parser.parse_args(argv)
    methods = pick(["full", *args.methods] if args.methods else [])
    own = args.model.resolve()
    folders = SHIPPED if own in SHIPPED.values() else SHIPPED | {str(args.model): own}
    of = {}  # by decoder
    for name, folder in folders.items():
        model, encoding = loaded(args, folder)
        of[name] = found(model, Tasks(encoding, "test"), methods, args.documents, args.length,
                         lambda jobs: tqdm(jobs, leave=False, desc=name))

    print(f"{'':<33}" + "".join(f"{name:^34}" for name in of))
    print(f"{'method':<25}{'budget':>8}" + f"{'bytes':>10}{'needle':>8}{'recall':>8}{'reading':>8}" * len(of))
    full = {name: rows["full", None] for name, rows in of.items()}
    for job in next(iter(of.values())):
        cells = "".join(
            f"{100 * x[job].bytes / full[name].bytes:>8.1f} %"
            + "".join(f"{right.mean():>8.2f}" for right in x[job].right.values())
            + f"{x[job].seconds / full[name].seconds:>8.2f}" for name, x in of.items())
        print(f"{job[0]:<25}{budget(job[1]):>8}{cells}")

    print(f"\n{100 * ENOUGH:g} % of the full cache's answers to both tasks together, in the fewest bytes, on "
          f"{' and '.join(of)}")
    best = {name: enough(rows) for name, rows in of.items()}
    share = lambda name, method: of[name][method, best[name][method]].bytes / full[name].bytes
    for method in sorted(set.intersection(*map(set, best.values())),
                         key=lambda method: max(share(name, method) for name in of)):
        cells = "".join(f"{budget(best[name][method]):>12}{100 * share(name, method):>8.1f} %" for name in of)
        print(f"{method:<25}{cells}")


if __name__ == "__main__":
    command(main)
