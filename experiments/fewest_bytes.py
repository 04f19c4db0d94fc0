"""Find the fewest bytes with which each method keeps 95 % of the answers to questions that come later.

    python -m experiments.fewest_bytes    # all methods on both shipped decoders: half an hour

Each document has 512 tokens and asks for a needle or for one of 16 pairs. The question comes after the
compression. A method keeps 95 % if its share of the full cache's right answers is at least one standard error
above 95 %, and it is undecided within one standard error of 95 %. If a row is four standard errors below 95 %
after the first 32 documents of each task, the other documents are left out.
"""
import time
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.script import (arguments, check_budgets, decoders, finish, grouped, keep_label, parser,
                                with_error)
from nanollm.cache import bytes_in_16_bits
from nanollm.commands.registry import calibrated, given, has_budget, pick
from nanollm.commands.shell import command
from nanollm.commands.text_table import text_table
from nanollm.generate import end_prompt, prefill, reread, reread_size, tell_prompt
from nanollm.measure.benchmark import TASKS, Benchmark, cut
from nanollm.measure.evaluate import ask, check_size, maker, prompt_and_question, standard_error
from nanollm.measure.replay import CannotReplay, replay
from nanollm.measure.tasks import Tasks
from nanollm.measure.timing import best
from nanollm.tokenizer import boundaries

KEEP_RATIOS = 0.5, 0.25, 0.125, 0.0625
ENOUGH = 0.95       # share of the full cache's right answers that a method must keep
FIRST, FAR = 32, 4  # a row stops after FIRST documents per task if it is FAR standard errors too low


class Found(NamedTuple):
    """The measurements of one method and keep ratio.

    right: by task, which answers are right (documents,). bytes: a text's cache when the question comes.
    seconds: time until then.
    """
    right: dict[str, Tensor]
    bytes: float
    seconds: float

    @property
    def documents(self) -> int:
        return min(map(len, self.right.values()))


def kept(row: Found, full: Found) -> tuple[float, float]:
    """Return the share of the full cache's right answers that a row keeps, and its standard error."""
    answers = sum(x[:row.documents].mean().item() for x in full.right.values())
    beyond = [x - ENOUGH * full.right[task][:len(x)] for task, x in row.right.items()]
    error = sum(standard_error(x) ** 2 for x in beyond) ** 0.5
    return ENOUGH + sum(x.mean().item() for x in beyond) / answers, error / answers


def measure(model, pieces: list[Benchmark], make, full: Found | None, scores: dict) -> Found:
    """Measure a method on all pieces of the benchmark; stop after the first piece if it misses ENOUGH by FAR.

    scores: KVzip's scores from its reread of the prompt, which its variants and budgets share.
    """
    right, sizes = {task: [] for task in pieces[0].batches}, []
    row = lambda: Found({task: torch.cat(x) for task, x in right.items()}, sum(sizes) / len(sizes), 0.0)
    for piece in pieces:
        for task, batch in piece.batches.items():
            tokens, context, _ = prompt_and_question(model, batch)
            caches = make(batch.question, context)
            try:
                replay(piece.recordings[task][:1], caches)
            except CannotReplay:
                caches = make(batch.question, context)
                prefill(model, context, caches)
            if reread_size(caches) and not hasattr(caches[0], "asked"):  # else it needs the queries, too
                tell_prompt(context, caches)
                key = len(sizes), caches[0].score, hasattr(caches[0], "prompt_tokens")
                if key not in scores:
                    reread(caches, lambda part: prefill(model, context[:, part], caches))
                    scores[key] = [cache.entry_scores for cache in caches]
                for cache, entry_scores in zip(caches, scores[key]):
                    cache.entry_scores, cache.reread_size = entry_scores, 0
            end_prompt(model, context, caches)
            sizes.append(bytes_in_16_bits(caches) / len(tokens))
            right[task].append(ask(model, tokens, batch.answers, batch.question, caches))
        if full and piece is pieces[0]:
            share, error = kept(row(), full)
            if share < ENOUGH - FAR * error:
                break
    return row()._replace(seconds=best(lambda: until_asked(model, context[:2], make), 2, time.process_time))


def until_asked(model, context: Tensor, make):
    """Read and compress the context: all work that a method does before the question comes."""
    caches = make(context.shape[1], context)
    prefill(model, context, caches)
    end_prompt(model, context, caches)


@torch.no_grad()
def found(model, tasks: Tasks, methods: dict, documents: int, T: int) -> dict[tuple, Found]:
    """Return the measurements by (method, keep ratio); the keep ratio is None for methods without a budget.

    The full cache must be the first method.
    """
    check_size(model, documents, 2, T)
    batches = {task: tasks.batch(task, 0, documents, T, **TASKS[task]) for task in ("needle", "pairs")}
    learned, rows, scores = {}, {}, {}
    ends = boundaries(tasks.encoding, model.config.vocab_size)
    jobs = [(name, Method, part) for name, Method in methods.items()
            for part in (KEEP_RATIOS if has_budget(Method) else [None])]
    check_budgets(model, jobs, min(batch.question for batch in batches.values()))
    pieces = [Benchmark.read(model, dict(zip(batches, parts)), None)
              for parts in zip(*(cut(batch, FIRST) for batch in batches.values()))]
    for name, Method, part in tqdm(jobs, leave=False, disable=None):
        if name not in learned:
            learned[name] = calibrated(Method, model, tasks.encoding)
        options = dict(ends=ends) | given(Method, window_size=8) | learned[name]
        make = maker(model, Method, part, **options)
        rows[name, part] = measure(model, pieces, make, rows.get(("full", None)), scores)
    return rows


def summary(decoder: str, found: dict[tuple, Found]) -> list[dict]:
    """Return a row for each method and keep ratio; bytes and reading are in units of the full cache's."""
    full, rows = found["full", None], []
    answered = any(x.any() for x in full.right.values())  # else these tasks say nothing
    for (method, part), row in found.items():
        share, error = kept(row, full) if answered else (None, None)
        rows.append(dict(decoder=decoder, method=method, keep_ratio=part, bytes=row.bytes / full.bytes)
                    | {task: x.mean().item() for task, x in row.right.items()}
                    | dict(kept=share, error=error, asked=row.documents, reading=row.seconds / full.seconds))
    return rows


def verdict(row: dict) -> str:
    """Return whether a row keeps ENOUGH: "yes", "no" or, within one standard error, "undecided".

    "" if the full cache has no right answers.
    """
    if row["kept"] is None:
        return ""
    if row["kept"] - row["error"] >= ENOUGH:
        return "yes"
    return "no" if row["kept"] + row["error"] < ENOUGH else "undecided"


def enough(rows: list[dict]) -> dict[str, dict]:
    """Return by method the row of one decoder that keeps ENOUGH in the fewest bytes.

    Methods without such a row are left out.
    """
    best = {}
    for row in sorted(rows, key=lambda row: row["bytes"]):
        if verdict(row) == "yes":
            best.setdefault(row["method"], row)
    return best


TERMS = """\
keep       keep ratio: the budget of each head, as a percentage of the prompt's tokens
bytes      size of the cache when the question comes, of a full cache's; numbers have 16 bits in both
needle     accuracy; pairs: the same. The question comes after the compression
kept, %    share of the full cache's right answers, ± one standard error
documents  per task; 32 if the row is far below 95 %
reading    processor time until the question may come, in units of the full cache's"""


def show(rows: list[dict]) -> str:
    """Return the table of all rows, decoders side by side, and below it the methods that keep ENOUGH."""
    decoders = grouped(rows, "decoder")
    names = ["bytes", "needle", "pairs", "kept, %", "documents", "reading"]
    table = [["", "", *(cell for name, in decoders for cell in [name, *[""] * (len(names) - 1)])],
             ["method", "keep", *names * len(decoders)]]
    for same in zip(*decoders.values()):
        table.append([same[0]["method"], keep_label(same[0]["keep_ratio"])])
        for row in same:
            known = row["kept"] is not None
            table[-1] += [f"{100 * row['bytes']:.1f} %", f"{row['needle']:.2f}", f"{row['pairs']:.2f}",
                          with_error(100 * row["kept"], 100 * row["error"], 1) if known else "–",
                          str(row["asked"]), f"{row['reading']:.2f}"]
    return f"{TERMS}\n\n{text_table(table)}\n\n{show_enough(rows)}"


def show_enough(rows: list[dict]) -> str:
    """Return the methods that keep ENOUGH on all decoders, fewest bytes first, and the undecided rows."""
    decoders = grouped(rows, "decoder")
    best = [enough(each) for each in decoders.values()]
    table = [["", *(cell for name, in decoders for cell in (name, ""))],
             ["method", *["keep", "bytes"] * len(decoders)]]
    both = [[each[method] for each in best] for method in sorted(set.intersection(*map(set, best)))]
    for same in sorted(both, key=lambda same: max(row["bytes"] for row in same)):
        table.append([same[0]["method"]])
        for row in same:
            table[-1] += [keep_label(row["keep_ratio"]), f"{100 * row['bytes']:.1f} %"]
    lines = [f"Fewest bytes that keep {100 * ENOUGH:g} % on all decoders, by one standard error",
             text_table(table)]
    for (name,), each in decoders.items():
        near = [f"{row['method']} at {keep_label(row['keep_ratio'])}"
                for row in each if verdict(row) == "undecided"]
        lines.append(f"Undecided on {name}: {', '.join(near) or 'none'}")
    return "\n".join(lines)


def main():
    made = parser("experiments.fewest_bytes", __doc__, documents=256, length=512)
    made.add_argument("--methods", nargs="+", default=[], metavar="NAME",
                      help="methods to measure beside the full cache; default: all")
    args = arguments(made)
    methods = pick(["full", *args.methods] if args.methods else [])
    rows = []
    for name, model, encoding in decoders(args):
        rows += summary(name, found(model, Tasks(encoding, "test"), methods, args.documents, args.length))
    finish(args, rows, show)


if __name__ == "__main__":
    command(main)
