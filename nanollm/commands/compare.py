"""python -m nanollm: what compressing the KV cache costs.

    python -m nanollm                          a method a family, a quarter of the entries: forty seconds
    python -m nanollm --all                    every method at four budgets: 25 minutes
    python -m nanollm --methods h2o ada_kv+critical --budgets 50 25 --json rows.json
    python -m nanollm --model FOLDER --lengths 4096 --batch 4 --dtype bfloat16 --json rows.json --resume
    python -m nanollm generate                 a page, what is kept of it, and what is answered
    python -m nanollm generate --method h2o --budget 64 --file TEXT
    python -m nanollm plan --model FOLDER --lengths 32768 --batch 8
    python -m nanollm train --help
"""
import argparse
import json
from math import isclose
import os
from os.path import realpath
from pathlib import Path
from statistics import fmean
import sys
import time
from zlib import crc32

import nanollm
from nanollm.check import check_row, check_seed, whole
from nanollm.commands import shell
from nanollm.commands.registry import calibrated, given, has_budget, loaded, model_options, one_line, pick


def main(argv: list[str]):
    """Measure what is asked for and print a table; rows and a figure go to files."""
    args = options(argv)
    rank, world = shell.ranks()
    before = check_files(args.figure, args.json) if rank == 0 else b""
    own = shell.read_text(args.text) if args.text else None
    made_with = settings(args, own)
    done = earlier(args.json, made_with) if args.resume else []
    if world > 1 and args.device == "cuda":  # a GPU a process
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', rank)}"

    import torch
    from nanollm.commands import table
    from nanollm.measure.evaluate import excess
    from nanollm.measure.tasks import Tasks
    chosen = pick(args.methods)
    model, encoding = loaded(args)
    for T in args.lengths:
        whole("length", T, 16, model.config.max_len)
    work = Work(args, model, encoding, chosen, made_with, done)
    unfit = work.try_out()
    torch.manual_seed(args.seed)
    work.tasks = Tasks(encoding, "test", own, args.chat)

    if rank == 0:
        whose = "a small trained decoder" if args.model == nanollm.TINY else args.model
        for name, error in unfit.items():
            print(f"{name} is left out: {error}", file=sys.stderr)
        for told in idle(args, chosen):
            print(told, file=sys.stderr)
        print(f"What compressing the KV cache of {whose} costs, measured on real text.\n\n{table.TERMS}",
              flush=True)
    rows, failed, began, held = [], [], time.time(), {key(row): row for row in done}
    for row, write in work.results(rank, world):
        if isinstance(row, str):
            failed.append(row)
            write(row)
            continue
        if not rows or rows[-1]["tokens"] != row["tokens"]:
            gpu = row["device"] is not None
            write(table.header(row["tokens"], args.documents, args.seed, args.short, gpu))
        rows.append(row)
        write(table.show(row, args.short) + (f"\n  ! {why}" if (why := excess(row)) else ""))
        held[key(row)] = row
        if args.json:
            before = shell.replace(args.json, json.dumps([*held.values()], indent=1).encode(), before)

    if rank == 0:
        finish(args, rows, time.time() - began)
    if failed:
        raise ValueError(f"{len(failed)} of {len(work.jobs)} rows failed: {'; '.join(failed)}")


def options(argv: list[str]) -> argparse.Namespace:
    """The command line. Without methods, budgets, --all or --full the short table is asked for."""
    parser = argparse.ArgumentParser(prog="python -m nanollm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every method, not one a family")
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME",
                        help="these; all: every one, also with every addition, as in ada_kv+critical")
    parser.add_argument("--budgets", nargs="+", type=float, metavar="PERCENT",
                        help="default 50 25 12.5 6.25; short table: 25")
    parser.add_argument("--window", type=int, metavar="QUERIES",
                        help="that vote, in methods with a window; default 8, for short prompts")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS",
                        help="of the documents; default 512")
    parser.add_argument("--documents", type=int, help="documents per task; default 32, short table: 8")
    parser.add_argument("--full", action="store_true", help="256 documents per task, 512 and 1024 tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the documents")
    parser.add_argument("--batch", type=int, default=32, metavar="DOCUMENTS", help="at a time; default 32")
    parser.add_argument("--keep", type=float, metavar="GB",
                        help="of recorded prompts at most, or they are read again for each row; "
                             "default: half of the memory that is free")
    parser.add_argument("--text", type=Path, help="a file to read in place of the text that ships")
    parser.add_argument("--chat", action="store_true",
                        help="put documents into the tokenizer's chat template")
    parser.add_argument("--json", type=Path, help="write the rows here, each as it is done")
    parser.add_argument("--resume", action="store_true",
                        help="go on with the rows in --json; those of a method that has changed since stay")
    parser.add_argument("--figure", type=Path, default=Path("compare.png"), help="of the first length")
    model_options(parser)
    args = parser.parse_args(argv)

    if args.all and args.methods:
        raise ValueError(f"--all is every method; leave it or --methods {' '.join(args.methods)} out")
    args.short = not (args.all or args.methods or args.budgets or args.full)
    args.named = bool(args.methods) and "all" not in args.methods
    args.asked = [name for name in ("budgets", "window") if getattr(args, name) is not None]
    args.window = 8 if args.window is None else args.window
    if args.short:
        from nanollm.commands.table import SHOWN
        args.methods = [*SHOWN]
    budgets = args.budgets or ([25] if args.short else [50, 25, 12.5, 6.25])
    args.budgets = [*dict.fromkeys(budgets)]
    args.lengths = [*dict.fromkeys(args.lengths or ([512, 1024] if args.full else [512]))]
    if args.documents is None:
        args.documents = 256 if args.full else 8 if args.short else 32

    check_seed(args.seed)
    whole("batch", args.batch, 1)
    if args.keep is not None and not args.keep >= 0:
        raise ValueError(f"keep {args.keep:g} GB must be at least 0")
    if args.resume and not args.json:
        raise ValueError("--resume goes on with the rows of a file; name it with --json")
    for percent in args.budgets:
        if not 0 < percent <= 100:
            raise ValueError(f"budget {percent:g} % must lie above 0 and up to 100 percent of the prompt")
    return args


def idle(args, chosen: dict) -> list[str]:
    """What was asked for on the command line and changes nothing for the methods that were named."""
    without = [name for name, Method in chosen.items() if name != "full" and not has_budget(Method)]
    told = []
    if "budgets" in args.asked and args.named and without:
        told.append(f"--budgets changes nothing for {', '.join(without)}: no budget there")
    if "window" in args.asked and not any(given(Method, window_size=0) for Method in chosen.values()):
        told.append("--window changes nothing: none of these methods has a window")
    return told


def check_files(figure: Path, rows: Path | None) -> bytes:
    """What the file of the rows holds. ValueError or OSError, before any work, unless both can be written."""
    if figure.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"figure {figure} must end in .png, .pdf or .svg")
    if rows and realpath(rows) == realpath(figure):
        raise ValueError(f"rows and figure cannot both go to {rows}; name two files")

    def is_figure(data):
        from nanollm.commands import plot  # only where a file is there: it takes a second
        return plot.is_ours(data)

    def is_rows(data):
        held = shell.read_json(data)
        return isinstance(held, list) and held != [] and all(
            isinstance(row, dict) and {"method", "fraction", "each"} <= row.keys() for row in held)

    shell.check_output(figure, "figure", is_figure)
    return shell.check_output(rows, "rows", is_rows) if rows else b""


SETTINGS = "model", "engine", "dtype", "documents", "seed", "window", "text", "chat"


def settings(args, own: str | None) -> dict:
    """What a row depends on beside its length, method and budget. own: the text of --text."""
    text = args.text and f"{args.text}, crc32 {crc32(own.encode()):08x}"
    return {name: getattr(args, name) for name in SETTINGS} | dict(model=str(args.model.resolve()), text=text)


def key(row: dict) -> tuple:
    """What is measured, where settings are the same."""
    return row["tokens"], row["method"], row["fraction"]


def earlier(file: Path, made_with: dict) -> list[dict]:
    """The rows in a file. ValueError if one is broken or they were made with other settings."""
    from nanollm.commands.table import ACCURACIES, EACH, HOLDS
    rows = json.loads(file.read_bytes() or "[]") if file.exists() else []
    for row in rows:
        check_row(row, HOLDS, file)
        check_row(row["each"], EACH, file)
        for name in ACCURACIES:
            if not isclose(row[name], mean := fmean(row["each"][name]), abs_tol=1e-6):
                raise ValueError(f"{name!r} of a row in {file} is {row[name]}, and the mean over its "
                                 f"documents {mean}; name another file")
        for name, x in made_with.items():
            if row.get(name) != x:
                raise ValueError(f"the rows in {file} were made with --{name} {row.get(name)}, not {x}; "
                                 "give what they were made with, or name another file")
    return rows


class Work:
    """The rows to measure: `jobs`, each a length, a method's name and its budget, a fraction or None.

    made_with: the settings of all rows. done: rows that need not be measured.
    """

    def __init__(self, args, model, encoding, chosen: dict, made_with: dict, done: list[dict]):
        from nanollm.tokenizer import boundaries
        self.args, self.model, self.encoding, self.chosen = args, model, encoding, chosen
        self.made_with = made_with
        self.done = {key(row): row for row in done}
        fractions = [percent / 100 for percent in args.budgets]
        self.jobs = [(T, name, fraction) for T in args.lengths for name, Method in chosen.items()
                     for fraction in (fractions if has_budget(Method) else [None])]
        ends = boundaries(encoding, model.config.vocab_size)
        self.knobs = {name: given(Method, window_size=args.window) | dict(ends=ends)
                      for name, Method in chosen.items()}
        self.learned = {}  # by name: what a method has found out about the decoder
        self.tasks = self.slices = self.length = None

    def try_out(self) -> dict[str, ValueError]:
        """A budget that a method cannot work with is a ValueError before any work is done.

        So is a method that cannot work with this model, if it was asked for by name; else it is left out, and
        returned with the reason.
        """
        from nanollm.commands.table import label
        unfit = {}
        for T, name, fraction in self.jobs:
            try:
                self.try_one(T, name, fraction)
            except ValueError as error:
                if self.args.named or self.works(T, name):
                    where = "" if fraction is None else f" of {self.shortest(T)} tokens"
                    raise ValueError(f"{label(name, fraction)}{where}: {error}") from error
                unfit[name] = error
            except Exception:  # a bug: its row will name it, and the others go on
                pass
        self.jobs = [job for job in self.jobs if job[1] not in unfit]
        return unfit

    def shortest(self, T: int) -> int:
        """The shortest prompt of documents of T tokens."""
        from nanollm.measure.evaluate import Benchmark
        return T - Benchmark.continuation_length(T) - 1

    def try_one(self, T: int, name: str, fraction: float | None):
        from nanollm.generate import check_rereads
        from nanollm.measure.evaluate import maker
        caches = maker(self.model, self.chosen[name], fraction, **self.knobs[name])(self.shortest(T))
        check_rereads(self.model, caches, T - 2)  # of documents, an answer and the token before it come later

    def works(self, T: int, name: str) -> bool:
        """Whether a method works with this model if it may keep everything."""
        try:
            self.try_one(T, name, 1.0 if has_budget(self.chosen[name]) else None)
        except ValueError:
            return False
        return True

    def measure(self, T: int, name: str, fraction: float | None) -> dict | str:
        """A row, or why there is none: one method's mistake costs only its own rows."""
        from nanollm.commands.table import label, row_of
        from nanollm.measure.evaluate import maker
        model, Method = self.model, self.chosen[name]
        if row := self.done.get((T, name, fraction)):
            return row
        if T != self.length:
            self.slices, self.length = self.read(T), T

        try:
            if name not in self.learned:
                self.learned[name] = calibrated(Method, model, self.encoding)
            make = maker(model, Method, fraction, **self.knobs[name] | self.learned[name])
            measured = self.slices.run(model, make)
        except Exception as error:
            return f"{label(name, fraction)}: {one_line(error)}"
        return row_of(name, fraction, T, self.made_with, measured)

    def read(self, T: int):
        """Documents of T tokens; what they cost is said where it matters."""
        import psutil
        from tqdm import tqdm
        from nanollm.measure.slices import Slices
        args = self.args
        keep = psutil.virtual_memory().available / 2 if args.keep is None else args.keep * 1e9
        slices = Slices(self.model, self.tasks, T, args.documents, args.seed, args.batch, keep)
        if shell.ranks()[0] == 0 and not (args.short and slices.keeps):
            tqdm.write(str(slices), file=sys.stderr)
        slices.benchmark(self.model, 0)  # what the model refuses is an error, not one of each row
        return slices

    def results(self, rank: int, world: int):
        """On rank 0: each row, or why there is none, in order, and a function that prints beside the progress
        bar.

        `world` rows are measured at a time, one on each rank.
        """
        from tqdm import tqdm
        if world > 1:
            import torch.distributed as dist
            dist.init_process_group("gloo")
        unit = "row" if world == 1 else "rows"
        bar = tqdm(range(0, len(self.jobs), world), disable=rank > 0 or None, leave=False, unit=unit)
        for first in bar:
            T, name, _ = self.jobs[first]
            bar.set_description(f"{name}, {T} tokens")
            mine = self.measure(*self.jobs[first + rank]) if first + rank < len(self.jobs) else None
            results = [mine] * world
            if world > 1:
                dist.all_gather_object(results, mine)
            for row in results:
                if rank == 0 and row is not None:
                    yield row, bar.write
        if world > 1:
            dist.destroy_process_group()


def finish(args, rows: list[dict], seconds: float):
    """What stands below the rows, and the figure of those of the first length."""
    from nanollm.commands import plot, table
    for told in (table.unfit(rows), table.findings(rows) if args.short else ""):
        if told:
            print(f"\n{told}")
    for T in () if args.short else args.lengths:
        print(table.additions_table([row for row in rows if row["tokens"] == T]))
    if drawn := [row for row in rows if row["tokens"] == args.lengths[0]]:
        plot.comparison(drawn, args.figure)
        print(f"\n{len(rows)} rows in {seconds:.0f} s; figure in {args.figure}"
              + (f", rows in {args.json}" if args.json else ""))
    if args.short and args.model == nanollm.TINY:
        print("All methods at four budgets: python -m nanollm --all. Tensor attention needs a decoder of\n"
              "its own: notebooks/04_tensor_attention.ipynb.")
