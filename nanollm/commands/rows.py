"""Measure the rows of python -m nanollm; print and store each before the next begins."""
from argparse import Namespace
from functools import lru_cache
import json
from pathlib import Path
import sys
import time

import psutil
import torch
from tqdm import tqdm

from nanollm import TINY
from nanollm.check import check_seed, whole
from nanollm.commands import plot, shell, table
from nanollm.commands.registry import calibrated, given, has_budget, loaded, one_line, pick
from nanollm.generate import check_rereads
from nanollm.measure.benchmark import Benchmark, Slices, excess
from nanollm.measure.evaluate import Make, maker
from nanollm.measure.tasks import Tasks
from nanollm.tokenizer import boundaries

Job = tuple[int, str, float | None]  # length in tokens, name of the method, keep ratio (None: no budget)


def main(args: Namespace, settings: dict, text: str | None, stored: bytes):
    """Measure the selected rows and print them. text, stored: the contents of --text and --json."""
    check_seed(args.seed)
    whole("batch", args.batch, 1)
    rows = earlier(stored, args.json, settings) if args.resume else {}
    methods = pick([*table.SHOWN] if args.short else args.methods)
    model, encoding = loaded(args)
    for T in args.lengths:
        whole("length", T, 16, model.config.max_len)
    candidates = Candidates(model, encoding, methods, args.window)
    named = bool(args.methods) and "all" not in args.methods
    jobs, unfit = candidates.jobs(args.lengths, [percent / 100 for percent in args.keep], named)
    torch.manual_seed(args.seed)
    tasks = Tasks(encoding, "test", text, args.chat)
    # a large model computes with several threads, which must not be forked
    processes = shell.cores() if torch.get_num_threads() == 1 else 1
    keep = psutil.virtual_memory().available / 2 if args.memory is None else args.memory * 1e9

    @lru_cache(maxsize=1)
    def read(T: int) -> Slices:
        """Return the benchmark of documents of T tokens. Report its memory, unless a short table keeps it."""
        slices = Slices(model, tasks, T, args.documents, args.seed, args.batch, keep, processes)
        if not (args.short and slices.keeps):
            tqdm.write(str(slices), file=sys.stderr)
        slices.benchmark(model, 0)  # an error of the model ends the run here, not once per row
        return slices

    def measure(job: Job) -> dict | str:
        """Return a row, or a message if the method fails: the other methods go on."""
        if job in rows:
            return rows[job]
        T, name, keep_ratio = job
        slices = read(T)
        try:
            measured = slices.run(model, candidates.calibrated(name, keep_ratio))
        except Exception as error:
            return f"{table.label(name, keep_ratio)}: {one_line(error)}"
        return table.row_of(name, keep_ratio, T, settings, measured)

    for name, error in unfit.items():
        print(f"{name} is left out: {error}", file=sys.stderr)
    for message in idle(methods, named and "keep" in args.asked, "window" in args.asked):
        print(message, file=sys.stderr)
    model_name = "the small decoder that ships" if args.model == TINY else args.model
    on_gpu = torch.device(args.device).type == "cuda"
    print(f"Methods that compress the KV cache, compared on {model_name}.\n\n"
          f"{table.terms(args.short, on_gpu)}", flush=True)
    began, shown, failed = time.time(), [], []
    bar = tqdm(jobs, disable=None, leave=False, unit="row")
    for job in bar:
        T, name, _ = job
        bar.set_description(f"{name}, {T} tokens")
        row = measure(job)
        if isinstance(row, str):
            failed.append(row)
            bar.write(row)
            continue
        if not shown or shown[-1]["tokens"] != T:
            bar.write(table.header(T, args.documents, args.seed, args.short, row["device"] is not None))
        shown.append(row)
        bar.write(table.show(row, args.short) + (f"\n  ! {why}" if (why := excess(row)) else ""))
        rows[job] = row
        if args.json:
            stored = shell.replace(args.json, json.dumps([*rows.values()], indent=1).encode(), stored)

    finish(args, shown, time.time() - began)
    if failed:
        raise ValueError(f"{len(failed)} of {len(jobs)} rows failed: {'; '.join(failed)}")


def earlier(stored: bytes, file: Path, settings: dict) -> dict[Job, dict]:
    """Return a file's rows. ValueError if a row lacks a key or was measured with other settings."""
    rows = json.loads(stored or "[]")
    for row in rows:
        if lacks := (table.KEYS - row.keys()) | (table.EACH - row["each"].keys()):
            raise ValueError(f"a row in {file} has no {min(lacks)!r}; another version may have written it, "
                             "so name another file")
        for name, x in settings.items():
            if row.get(name) != x:
                raise ValueError(f"the rows in {file} were measured with --{name} {row.get(name)}, not {x}; "
                                 "give the same option, or name another file")
    return {(row["tokens"], row["method"], row["keep_ratio"]): row for row in rows}


def idle(methods: dict, keep: bool, window: bool) -> list[str]:
    """Return a message for --keep and for --window if the option changes nothing for these methods."""
    messages = []
    without = [name for name, Method in methods.items() if name != "full" and not has_budget(Method)]
    if keep and without:
        messages.append(f"--keep changes nothing for {', '.join(without)}: no budget to set")
    if window and not any(given(Method, window_size=0) for Method in methods.values()):
        messages.append("--window changes nothing: none of these methods has an observation window")
    return messages


class Candidates:
    """The methods to compare on one model. window: queries in the observation window."""

    def __init__(self, model, encoding, methods: dict, window: int):
        self.model, self.encoding, self.methods = model, encoding, methods
        ends = boundaries(encoding, model.config.vocab_size)
        self.options = {name: dict(ends=ends) | given(Method, window_size=window)
                        for name, Method in methods.items()}
        self.measured = {}  # by name: the options that a method measured on the decoder

    def calibrated(self, name: str, keep_ratio: float | None) -> Make:
        """Return a function that makes a method's caches, with the options that it measures."""
        if name not in self.measured:
            self.measured[name] = calibrated(self.methods[name], self.model, self.encoding)
        options = self.options[name] | self.measured[name]
        return maker(self.model, self.methods[name], keep_ratio, **options)

    def jobs(self, lengths: list[int], keep_ratios: list[float],
             named: bool) -> tuple[list[Job], dict[str, ValueError]]:
        """Return the jobs that can run, and the error of each method that cannot run on this model.

        A method without a budget has one keep ratio, None. ValueError if a budget is too small for a method;
        if `named`, on the command line, also if a method cannot run on this model.
        """
        jobs = [(T, name, keep_ratio) for T in lengths for name, Method in self.methods.items()
                for keep_ratio in (keep_ratios if has_budget(Method) else [None])]
        unfit = {}
        for T, name, keep_ratio in jobs:
            error = self.why_not(T, name, keep_ratio)
            if error is None:
                continue
            everything = None if keep_ratio is None else 1.0
            if named or self.why_not(T, name, everything) is None:
                where = "" if keep_ratio is None else f" of {shortest(T)} tokens"
                raise ValueError(f"{table.label(name, keep_ratio)}{where}: {error}") from error
            unfit[name] = error
        return [job for job in jobs if job[1] not in unfit], unfit

    def why_not(self, T: int, name: str, keep_ratio: float | None) -> ValueError | None:
        """Return the error of a method with documents of T tokens and this budget; None if it can run."""
        try:
            make = maker(self.model, self.methods[name], keep_ratio, **self.options[name])
            # the answer, at least one token, and the token before it are not part of the prompt
            check_rereads(self.model, make(shortest(T)), T - 2)
        except ValueError as error:
            return error
        except Exception:  # a bug in the method: its own row reports it
            return None


def shortest(T: int) -> int:
    """Return the tokens of the shortest prompt among documents of T tokens."""
    return T - Benchmark.continuation_length(T) - 1


def finish(args: Namespace, rows: list[dict], seconds: float):
    """Print the lines below the table, and draw the rows of the first length."""
    for message in (table.unfit(rows), table.findings(rows) if args.short else ""):
        if message:
            print(f"\n{message}")
    for T in () if args.short else args.lengths:
        print(table.additions_table([row for row in rows if row["tokens"] == T]))
    if drawn := [row for row in rows if row["tokens"] == args.lengths[0]]:
        plot.comparison(drawn, args.figure)
        print(f"\n{len(rows)} rows in {seconds:.0f} s; figure in {args.figure}"
              + (f", rows in {args.json}" if args.json else ""))
    if args.short and args.model == TINY:
        print("For all methods at four keep ratios: python -m nanollm --all. Tensor attention needs its\n"
              "own decoder: see notebooks/04_tensor_attention.ipynb.")
