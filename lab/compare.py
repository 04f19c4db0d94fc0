"""Compare methods that compress the KV cache: right answers, KL divergence, bytes and speed of each.

    python -m nanollm                  the short table: main methods, keep ratio 25 %: 15 seconds
    python -m nanollm --all            every method, keep ratios 50, 25, 12.5 and 6.25 %: ten minutes
    python -m nanollm --methods h2o ada_kv+critical --keep 50 25 --json rows.json
    python -m nanollm --tasks hard --model nanollm/tiny_learned --methods full snap_kv kvzip

The table explains its columns. Other commands, each with its own --help:

    python -m nanollm generate         show the entries that a method keeps of a page, or continue a text
    python -m nanollm compress         read a text once, and keep its compressed cache in a file
    python -m nanollm ask              answer questions from that file, without the text
    python -m nanollm explore          write docs/index.html, a page in which a decoder runs
    python -m nanollm claims           test the papers' claims on the decoders that ship, or on yours
"""

import argparse
from collections.abc import Iterator
from itertools import groupby
import json
from os.path import realpath
from pathlib import Path
import sys
import time
from typing import NamedTuple
from zlib import crc32

from tqdm import tqdm

from lab import command_line, table

ALL_RATIOS = [50, 25, 12.5, 6.25]  # keep ratios in percent, if not told otherwise


class Job(NamedTuple):
    """One row to measure."""

    tokens: int  # length of the documents
    method: str
    keep_ratio: float | None  # None: the method has no budget


def main(argv: list[str]):
    """Check the options and files, measure the rows and print them; write them and a figure."""
    args = read_options(argv)
    stored = check_files(args.figure, args.json)
    text = command_line.read_text(args.text) if args.text else None
    # what all rows of a run share; each row repeats it
    settings = dict(
        model=command_line.whole_name(args.model),
        engine=args.engine,
        dtype=args.dtype,
        documents=args.documents,
        seed=args.seed,
        window=args.window,
        tasks=args.tasks,
        l1=args.l1,
        text=text and f"{args.text}, crc32 {crc32(text.encode()):08x}",
    )
    earlier = earlier_rows(stored, args.json, settings) if args.resume else {}

    from lab.benchmark import excess  # loads torch

    comparison = Comparison(args, text, settings)
    jobs = comparison.jobs()
    print(
        f"Methods that compress the KV cache, compared on {args.model}.\n\n"
        f"{table.terms(args.short, args.tasks == 'hard', args.l1)}",
        flush=True,
    )

    began, rows, failed = time.time(), [], []
    missing = comparison.results([job for job in jobs if job not in earlier])
    bar = tqdm(jobs, disable=None, leave=False, unit="row")
    for job in bar:
        bar.set_description(f"{job.method}, {job.tokens} tokens")
        found = earlier.get(job) or next(missing)
        if isinstance(found, str):  # an error; the other methods go on
            failed.append(f"{table.label(job.method, job.keep_ratio)}: {found}")
            bar.write(failed[-1])
            continue
        rows.append(found)
        row = earlier[job] = rows[-1]
        # the first of this length
        if [row["tokens"] for row in rows].count(job.tokens) == 1:
            bar.write(
                f"\n{comparison.sizes(job.tokens)}\n{table.header(row, args.short)}"
            )
        bar.write(
            table.show(row, args.short)
            + (f"\n  ! {why}" if (why := excess(row)) else "")
        )
        if args.json:
            data = json.dumps([*earlier.values()], indent=1).encode()
            stored = command_line.replace(args.json, data, stored)
    finish(args, rows, time.time() - began)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(jobs)} rows failed: {'; '.join(failed)}"
        )


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line. Without --all, --methods, --keep and --tasks, `short` is True."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="run every method; the default is one of each family",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        metavar="NAME",
        help="run only these methods; ada_kv+critical is the window method ada_kv with the "
        "addition critical",
    )
    parser.add_argument(
        "--tasks",
        choices=("standard", "hard", "needle", "pairs", "few_shot"),
        default="standard",
        help="standard: needle, pairs and few-shot; hard: changed facts, chains, lists, "
        "votes, rules, other words and several questions; or one task; default standard",
    )
    parser.add_argument(
        "--keep",
        nargs="+",
        type=float,
        metavar="PERCENT",
        help="keep ratios: the budget of each head as a percentage of the prompt's tokens; "
        "default 50 25 12.5 6.25 (short table: 25)",
    )
    parser.add_argument(
        "--l1",
        action="store_true",
        help="also measure the change of a head's output by its own layer's compression",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=8,
        metavar="QUERIES",
        help="observation window: how many of the prompt's last queries score the entries; "
        "default 8, which suits short prompts",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help="length of each document; one table per length; default 512 (short table: 256)",
    )
    parser.add_argument(
        "--documents", type=int, help="documents per task; default 32 (short table: 4)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random documents; default 0"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="file of text to measure on; default: the text that ships",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="file to write the rows to, after each row",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows that --json already holds and measure the missing ones; a row "
        "stays even if its method has changed since",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        default=Path("compare.png"),
        metavar="FILE",
        help="file for a figure of the first length, .png, .pdf or .svg; default compare.png",
    )
    command_line.model_options(parser)
    args = parser.parse_args(argv)
    if args.all and args.methods:
        raise ValueError(
            f"--all already runs every method; leave out --all or --methods {args.methods[0]} …"
        )
    args.short = not (
        args.all or args.methods or args.keep or args.l1 or args.tasks != "standard"
    )
    args.keep = [*dict.fromkeys(args.keep or ([25] if args.short else ALL_RATIOS))]
    args.lengths = [*dict.fromkeys(args.lengths or [256 if args.short else 512])]
    args.documents = (
        (4 if args.short else 32) if args.documents is None else args.documents
    )
    if args.resume and not args.json:
        raise ValueError("--resume continues the rows of a file; name it with --json")
    for percent in args.keep:
        command_line.check_keep(percent)
    return args


def check_files(figure: Path, rows: Path | None) -> bytes:
    """Return the content of the file of rows. ValueError or OSError if a file cannot be written."""
    if figure.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"figure is {figure}; its name must end in .png, .pdf or .svg")
    if rows and realpath(rows) == realpath(figure):
        raise ValueError(f"rows and figure both go to {rows}; name two files")
    command_line.check_output(figure, "figure", is_figure)
    return command_line.check_output(rows, "rows", is_rows) if rows else b""


def is_figure(data: bytes) -> bool:
    """Return whether data is a figure that this command drew."""
    from lab import plot  # matplotlib takes a second to import

    return plot.is_ours(data)


def is_rows(data: bytes) -> bool:
    """Return whether data is a list of rows that this command wrote."""
    rows = command_line.read_json(data)
    return (
        isinstance(rows, list)
        and rows != []
        and all(
            isinstance(row, dict)
            and {"method", "keep_ratio"} <= row.keys()
            and isinstance(row.get("each"), dict)
            for row in rows
        )
    )


def earlier_rows(stored: bytes, file: Path, settings: dict) -> dict[Job, dict]:
    """Return a file's rows. ValueError if a row lacks a key or was measured with other settings."""
    rows = json.loads(stored or "[]")
    for row in rows:
        if lacks := table.KEYS - row.keys():
            raise ValueError(
                f"a row in {file} has no {min(lacks)!r}; another version may have written it, "
                "so name another file"
            )
        for name, x in settings.items():
            if row.get(name) != x:
                raise ValueError(
                    f"the rows in {file} were measured with --{name} {row.get(name)}, not {x}; "
                    "give the same option, or name another file"
                )
    return {Job(row["tokens"], row["method"], row["keep_ratio"]): row for row in rows}


class Comparison:
    """The model, the methods and the documents of a run.

    Its functions import what they need: torch takes two seconds, and --help and mistakes come
    before.
    """

    def __init__(self, args: argparse.Namespace, text: str | None, settings: dict):
        from lab.benchmark import TASKS
        from lab.evaluate import check_size
        from lab.hard_tasks import HARD, HardTasks
        from lab.registry import loaded, pick
        from nanollm.check import check_seed
        from nanollm.tokenizer import boundaries

        self.args, self.settings = args, settings
        self.names = dict(standard=TASKS, hard=HARD).get(args.tasks, (args.tasks,))
        self.methods = pick([*table.SHOWN] if args.short else args.methods)
        self.model, self.encoding = loaded(args)
        self.tasks = HardTasks(self.encoding, "test", text)
        self.ends = boundaries(self.encoding, self.model.config.vocab_size)
        # by method: the options that it measured on the decoder
        self.learned: dict[str, dict] = {}
        self.benchmarks = []  # the recorded documents
        check_seed(args.seed)
        for T in args.lengths:
            check_size(self.model, args.documents, 2, T)

    def make(self, job: Job, **more):
        """Return a function that makes a method's caches. more: options that it measured."""
        from lab.evaluate import maker
        from lab.registry import given

        Method = self.methods[job.method]
        options = given(Method, window_size=self.args.window) | more
        return maker(self.model, Method, job.keep_ratio, self.ends, **options)

    def jobs(self) -> list[Job]:
        """Return the jobs that can run on this model.

        One that cannot is left out, with a line on stderr; ValueError if --methods names its
        method.
        """
        from lab.benchmark import continuation_length
        from lab.registry import has_budget

        ratios = [percent / 100 for percent in self.args.keep]
        jobs = []
        for job in [
            Job(T, name, ratio)
            for T in self.args.lengths
            for name, Method in self.methods.items()
            for ratio in (ratios if has_budget(Method) else [None])
        ]:
            # tokens of the shortest prompt
            shortest = job.tokens - continuation_length(job.tokens) - 1
            try:
                self.make(job)(shortest)
            except ValueError as error:
                line = f"{table.label(job.method, job.keep_ratio)} of {shortest} tokens: {error}"
                if self.args.methods:
                    raise ValueError(line) from error
                print(f"left out: {line}", file=sys.stderr)
                continue
            except Exception:  # a bug in the method: its own row reports it
                pass
            jobs.append(job)
        return jobs

    def results(self, jobs: list[Job]) -> Iterator[dict | str]:
        """Yield each job's row, or the line of its error. Each core has a process, of one thread."""
        from lab.benchmark import build
        from lab.processes import spread

        args = self.args
        processes = args.device == "cpu" and args.threads < 2
        for T, some in groupby(jobs, key=lambda job: job.tokens):
            self.benchmarks = build(
                self.model, self.tasks, T, args.documents, args.seed, self.names
            )
            yield from spread(self.result, some, processes)

    def result(self, job: Job) -> dict | str:
        """Return the row of a job, or the line of its error."""
        from lab.benchmark import run
        from lab.registry import calibrated, one_line

        try:
            if job.method not in self.learned:  # takes some seconds for some methods
                self.learned[job.method] = calibrated(
                    self.methods[job.method],
                    self.model,
                    self.encoding,
                    self.args.calibration,
                )
            make = self.make(job, **self.learned[job.method])
            measured = run(self.benchmarks, self.model, make, self.args.l1)
            return table.row_of(
                job.method, job.keep_ratio, job.tokens, self.settings, measured
            )
        except Exception as error:
            return one_line(error)

    def sizes(self, T: int) -> str:
        """Return a line on the bytes of a full cache of T tokens and of the weights."""
        from lab.evaluate import full_cache_bytes

        full = full_cache_bytes(self.model.config, T) / 2**20
        weights = sum(2 * p.numel() for p in self.model.parameters()) / 2**20
        return f"In 16 bits: full cache of {T} tokens {full:.1f} MiB a text, weights {weights:.1f} MiB"


def finish(args: argparse.Namespace, rows: list[dict], seconds: float):
    """Print the lines below the table, and draw the rows of the first length."""
    for message in (table.unfit(rows), table.findings(rows) if args.short else ""):
        if message:
            print(f"\n{message}")
    if drawn := [row for row in rows if row["tokens"] == args.lengths[0]]:
        from lab import plot  # matplotlib takes a second to import

        plot.comparison(drawn, args.figure)
        print(
            f"\n{len(rows)} rows in {seconds:.0f} s; figure in {args.figure}"
            + (f", rows in {args.json}" if args.json else "")
        )
    if args.short:
        print(
            "For all methods at four keep ratios: python -m nanollm --all. Tensor attention needs its\n"
            "own decoder: see notebooks/04_tensor_attention.ipynb."
        )
