"""Who still answers if the question comes after the compression, and what does it cost to find out?

    python -m experiments.fewest_bytes

Needles and pairs of 512 tokens, on both decoders, 256 documents a task. What a method keeps is its share of
the full cache's right answers, mean over the tasks, ± one standard error, document by document. It counts as
95 % only if it is so by one standard error. A row is undecided within one standard error of 95 %. A row that
misses 95 % by four standard errors on the first 32 documents of a task is asked no more.

`bytes`: what is held when the question comes, of a full cache, numbers of 16 bits in both. `reading`: time of
the processor until then, of two documents, over the full cache's.
"""
import time
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.script import arguments, decoders, finish, grouped, keep_label, parser, with_error
from nanollm.cache import bytes_in_16_bits
from nanollm.commands.registry import calibrated, given, has_budget, pick
from nanollm.commands.shell import command
from nanollm.commands.text_table import text_table
from nanollm.generate import end_prompt, prefill, reread, rereads
from nanollm.measure.benchmark import TASKS, Benchmark, cut
from nanollm.measure.evaluate import ask, check_size, maker, prompt_and_question, standard_error
from nanollm.measure.replay import CannotReplay, replay
from nanollm.measure.tasks import Tasks
from nanollm.measure.timing import best
from nanollm.tokenizer import boundaries

KEEP_RATIOS = 0.5, 0.25, 0.125, 0.0625
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
                    reread(caches, lambda part: prefill(model, context[:, part], caches))
                    scores[key] = [cache.entry_scores for cache in caches]
                for cache, entry_scores in zip(caches, scores[key]):
                    cache.entry_scores, cache.rereads = entry_scores, 0
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
def found(model, tasks: Tasks, methods: dict, documents: int, T: int) -> dict[tuple, Found]:
    """Of every method and each share of the prompt; None is the share where there is no budget. The full
    cache comes first.
    """
    check_size(model, documents, 2, T)
    batches = {task: tasks.batch(task, 0, documents, T, **TASKS[task]) for task in ("needle", "pairs")}
    learned, rows, scores = {}, {}, {}
    ends = boundaries(tasks.encoding, model.config.vocab_size)
    jobs = [(name, part) for name, Method in methods.items()
            for part in (KEEP_RATIOS if has_budget(Method) else [None])]
    shortest = min(batch.question for batch in batches.values())
    for name, part in jobs:  # what cannot be measured is found before any work is done
        try:
            maker(model, methods[name], part, **given(methods[name], window_size=8))(shortest)
        except ValueError as error:
            raise ValueError(f"{name} at {keep_label(part)} of {shortest} tokens: {error}") from None

    pieces = [Benchmark.read(model, dict(zip(batches, parts)), None)
              for parts in zip(*(cut(batch, FIRST) for batch in batches.values()))]
    for name, part in tqdm(jobs, leave=False, disable=None):
        if name not in learned:
            learned[name] = calibrated(methods[name], model, tasks.encoding)
        options = dict(ends=ends) | given(methods[name], window_size=8) | learned[name]
        make = maker(model, methods[name], part, **options)
        rows[name, part] = measure(model, pieces, make, rows.get(("full", None)), scores)
    return rows


def summary(decoder: str, found: dict[tuple, Found]) -> list[dict]:
    """Return a row for each method and share: bytes and reading over the full cache's, and what is kept."""
    full, rows = found["full", None], []
    answered = any(x.any() for x in full.right.values())  # if not, these tasks cannot judge this model
    for (method, part), row in found.items():
        share, error = kept(row, full) if answered else (None, None)
        rows.append(dict(decoder=decoder, method=method, keep_ratio=part, bytes=row.bytes / full.bytes)
                    | {task: x.mean().item() for task, x in row.right.items()}
                    | dict(kept=share, error=error, asked=row.documents, reading=row.seconds / full.seconds))
    return rows


def verdict(row: dict) -> str:
    """Whether a row keeps ENOUGH: "yes" or "no" by one standard error, else "undecided"; "" if unknown."""
    if row["kept"] is None:
        return ""
    if row["kept"] - row["error"] >= ENOUGH:
        return "yes"
    return "no" if row["kept"] + row["error"] < ENOUGH else "undecided"


def enough(rows: list[dict]) -> dict[str, dict]:
    """By method, the row of one decoder that keeps ENOUGH in the fewest bytes. Methods that never do are
    left out.
    """
    best = {}
    for row in sorted(rows, key=lambda row: row["bytes"]):
        if verdict(row) == "yes":
            best.setdefault(row["method"], row)
    return best


def show(rows: list[dict]) -> str:
    """The table of all rows, decoders side by side, and below it who keeps ENOUGH."""
    of = grouped(rows, "decoder")
    names = ["bytes", "needle", "pairs", "kept, %", "asked", "reading"]
    table = [["", "", *(cell for name, in of for cell in [name, *[""] * (len(names) - 1)])],
             ["method", "keep", *names * len(of)]]
    for beside in zip(*of.values()):
        table.append([beside[0]["method"], keep_label(beside[0]["keep_ratio"])])
        for row in beside:
            kept = row["kept"] is not None
            table[-1] += [f"{100 * row['bytes']:.1f} %", f"{row['needle']:.2f}", f"{row['pairs']:.2f}",
                          with_error(100 * row["kept"], 100 * row["error"], 1) if kept else "–",
                          str(row["asked"]), f"{row['reading']:.2f}"]
    return f"{text_table(table)}\n\n{show_enough(rows)}"


def show_enough(rows: list[dict]) -> str:
    """Methods that keep ENOUGH on all decoders, the fewest bytes first; then who is undecided."""
    of = grouped(rows, "decoder")
    best = [enough(each) for each in of.values()]
    table = [["", *(cell for name, in of for cell in (name, ""))], ["method", *["keep", "bytes"] * len(of)]]
    both = [[each[method] for each in best] for method in sorted(set.intersection(*map(set, best)))]
    for beside in sorted(both, key=lambda beside: max(row["bytes"] for row in beside)):
        table.append([beside[0]["method"]])
        for row in beside:
            table[-1] += [keep_label(row["keep_ratio"]), f"{100 * row['bytes']:.1f} %"]
    lines = [f"{100 * ENOUGH:g} % of the full cache's answers by one standard error, in the fewest bytes",
             text_table(table)]
    for (name,), each in of.items():
        near = [f"{row['method']} at {keep_label(row['keep_ratio'])}" for row in each if verdict(row) == "undecided"]
        lines.append(f"undecided on {name}: {', '.join(near) or 'none'}")
    return "\n".join(lines)


def main(argv: list[str] | None = None):
    made = parser("experiments.fewest_bytes", __doc__)
    made.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="default: every variant")
    made.add_argument("--documents", type=int, default=256, help="a task; default 256")
    made.add_argument("--length", type=int, default=512, metavar="TOKENS", help="of each; default 512")
    args = arguments(made, argv)
    methods = pick(["full", *args.methods] if args.methods else [])
    rows = []
    for name, model, encoding in decoders(args):
        rows += summary(name, found(model, Tasks(encoding, "test"), methods, args.documents, args.length))
    finish(args, rows, show)


if __name__ == "__main__":
    command(main)
