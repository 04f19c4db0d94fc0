"""Measure the rows of `python -m nanollm`: one for each method, keep ratio and length."""

from argparse import Namespace
from collections.abc import Iterator
from itertools import groupby
import json
from typing import NamedTuple
from zlib import crc32

from lab import command_line, table
from lab.benchmark import (
    Benchmark,
    build,
    check_size,
    continuation_length,
    excess,
    run,
)
from lab.contenders import Contenders
from lab.methods_by_name import one_line
from lab.processes import spread
from lab.tasks import Tasks
from nanollm.block_linear import number_format
from nanollm.check import check_seed


class Job(NamedTuple):
    """One row to measure."""

    tokens: int  # length of the documents
    method: str
    keep_ratio: float | None  # None: the method has no budget


class Failed(NamedTuple):
    """What stands in place of a row if its method failed: the error, in a line."""

    why: str


class Comparison:
    """The model, the methods and the documents of a run, and the rows of an earlier one."""

    def __init__(self, args: Namespace, text: str | None):
        self.args = args
        self.contenders = Contenders(
            args, [*table.SHOWN] if args.short else args.methods
        )
        self.model = self.contenders.model
        self.tasks = Tasks(self.contenders.encoding, "test", text)
        self.settings = settings(args, self.model, text)
        self.earlier: dict[Job, dict] = {}
        self.benchmarks: list[Benchmark] = []  # of the length that is being measured
        check_seed(args.seed)
        for T in args.lengths:
            check_size(self.model, args.documents, 2, T)

    def resume(self, stored: bytes):
        """Take the rows of --json. ValueError if one has other settings."""
        file = self.args.json
        for row in json.loads(stored or "[]"):
            for name, x in self.settings.items():
                if row.get(name) != x:
                    raise ValueError(
                        f"the rows in {file} were measured with --{name} {row.get(name)}, "
                        f"not {x}; give the same option, or name another file"
                    )
            self.earlier[Job(row["tokens"], row["method"], row["keep_ratio"])] = row

    # ---- what can be measured ----

    def jobs(self) -> list[Job]:
        """Return the jobs that have an earlier row, or can run on this model.

        What cannot is left out, with a line on stderr; ValueError if --methods names its method.
        """
        jobs = []
        for T in self.args.lengths:
            jobs += [Job(T, *pair) for pair in self.contenders.each()]
        missing = [job for job in jobs if job not in self.earlier]
        self.contenders.calibrate(dict.fromkeys(job.method for job in missing))
        return [job for job in jobs if job in self.earlier or self.possible(job)]

    def possible(self, job: Job) -> bool:
        """Return whether a method can have its budget in the shortest prompt."""
        shortest = job.tokens - continuation_length(job.tokens) - 1
        return self.contenders.possible(job.method, job.keep_ratio, shortest)

    # ---- the rows ----

    def results(self, jobs: list[Job]) -> Iterator[tuple[Job, dict | Failed]]:
        """Yield each job with its row. On a CPU with --threads 0 or 1 `spread` makes processes."""
        args = self.args
        processes = args.device == "cpu" and args.threads < 2
        for T, of_length in groupby(jobs, key=lambda job: job.tokens):
            some = [*of_length]
            if any(job not in self.earlier for job in some):
                self.benchmarks = build(
                    self.model, self.tasks, T, args.documents, args.seed
                )
            rows = spread(self.result, some, processes)
            yield from zip(some, rows, strict=True)

    def result(self, job: Job) -> dict | Failed:
        """Return the earlier row of a job, or measure it."""
        if job in self.earlier:
            return self.earlier[job]
        try:
            make = self.contenders.make(job.method, job.keep_ratio)
            measured = run(self.benchmarks, self.model, make)
        except Exception as error:
            return Failed(one_line(error))
        return table.row_of(
            job.method, job.keep_ratio, job.tokens, self.settings, measured
        )

    def shown(self, row: dict) -> str:
        """Return a row as a line of the table, and a line if it holds more than its budget."""
        line = table.show(row)
        too_much = excess(row)
        return f"{line}\n  ! {too_much}" if too_much else line


def settings(args: Namespace, model, text: str | None) -> dict:
    """Return what all rows of a run share; each row repeats it."""
    return dict(
        model=command_line.whole_name(args.model),
        engine=args.engine,
        dtype=number_format(model),
        documents=args.documents,
        seed=args.seed,
        window=args.window,
        text=text and f"{args.text}, crc32 {crc32(text.encode()):08x}",
    )
