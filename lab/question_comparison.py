"""Compare methods on a file of questions: python -m nanollm --questions FILE.jsonl."""

from argparse import Namespace
from collections.abc import Iterator
from functools import lru_cache, partial
import json
import pickle
import time
from zlib import crc32

import torch
from tqdm import tqdm

from lab import command_line, question_table, table
from lab.answering import EARLY, Job, answered
from lab.contenders import Contenders
from lab.processes import on_cluster, spread
from lab.question_file import Encoder, Question, contexts, read
from nanollm.block_linear import number_format

HEADER = b"method,setting,task,line,score,surprise,kib,prompt,reply,context,keep"


class QuestionComparison:
    """The model, the methods and the questions of a run."""

    def __init__(self, args: Namespace):
        self.args = args
        self.questions = read(args.questions)
        self.contexts = contexts(self.questions)
        names = [] if args.all else args.methods or [*table.SHOWN]
        if names and "full" not in names:
            names = ["full", *names]
        self.contenders = Contenders(args, names)
        if args.against and args.against not in self.contenders.methods:
            raise ValueError(
                f"--against {args.against} is not among the methods; add it to --methods"
            )
        model = self.contenders.model
        self.encoder = Encoder(self.contenders.encoding, model.config)
        text = args.questions.read_bytes()
        self.settings = dict(
            questions=f"{args.questions.name}, crc32 {crc32(text):08x}",
            model=command_line.whole_name(args.model),
            engine=args.engine,
            dtype=number_format(model),
            window=args.window,
        )

    def lengths(self) -> list[int]:
        """Return each context's tokens. ValueError if one is too long with question and reply."""
        longest = self.contenders.model.config.max_len
        lengths = []
        for some in self.contexts:
            n = self.encoder.context(some[0].context).shape[1]
            lengths.append(n)
            for question in some:
                parts = self.encoder.question(question)
                reply = max(question.max_new_tokens, parts[2].shape[1])
                total = n + sum(x.shape[1] for x in parts[:2]) + reply
                if total > longest:
                    raise ValueError(
                        f"{self.args.questions}, line {question.line}: context, question and "
                        f"reply take {total} tokens, and the model reads {longest}; shorten it"
                    )
        return lengths

    def jobs(self, shortest: int) -> list[tuple[str, str, float | None]]:
        """Return setting, method and keep ratio of all rows that are possible."""
        self.contenders.calibrate(dict.fromkeys(self.contenders.methods))
        pairs = [
            pair
            for pair in self.contenders.each()
            if self.contenders.possible(*pair, shortest)
        ]
        if self.args.evict_early:
            pairs += [(f"{name}{EARLY}", ratio) for name, ratio in pairs if ratio]
        return [(setting, *pair) for setting in self.args.settings for pair in pairs]

    def result(self, item: tuple[int, list]) -> list[dict]:
        """Return the records of a context, by its number, for some of the jobs."""
        number, jobs = item
        some = {}
        for setting, name, ratio in jobs:
            make = self.contenders.make(name.removesuffix(EARLY), ratio)
            some.setdefault(setting, []).append(Job(name, ratio, make))
        return answered(
            self.contenders.model, self.encoder, self.contexts[number], some
        )

    def results(self, items: list) -> Iterator[list[dict]]:
        """Return an iterator over each item's records, from a cluster or as `spread` finds them."""
        args = self.args
        if args.scheduler:
            packed = pickle.dumps((args, self.contenders.options))
            return on_cluster(args.scheduler, partial(elsewhere, packed), items)
        processes = args.device == "cpu" and args.threads < 2
        return spread(self.result, items, processes)


@lru_cache(1)
def opened(packed: bytes) -> QuestionComparison:
    """Return the run that another process packed, with a decoder of this process's own."""
    args, options = pickle.loads(packed)
    comparison = QuestionComparison(args)
    comparison.contenders.options = options
    torch.set_num_threads(1)
    return comparison


def elsewhere(packed: bytes, item: tuple[int, list]) -> list[dict]:
    """Return `result` of an item, in a worker of a cluster."""
    return opened(packed).result(item)


# ---- the command ----


def compare(args: Namespace):
    """Measure, and print the tables; write records and a figure."""
    command_line.check_figure(args.figure)
    stored = b""
    if args.json:
        stored = command_line.check_output(args.json, "records", is_ours)
    if args.csv:
        command_line.check_output(args.csv, "records", is_csv)
    comparison = QuestionComparison(args)
    lengths = comparison.lengths()
    records = earlier(args, comparison.settings, stored) if args.resume else {}
    jobs = comparison.jobs(min(lengths))
    items = missing(comparison.contexts, jobs, records)

    print(
        f"{len(comparison.questions)} questions on {len(lengths)} contexts of "
        f"{min(lengths)} to {max(lengths)} tokens, from {args.questions}; "
        f"model {args.model}\n\n{question_table.TERMS}",
        flush=True,
    )
    began = time.time()
    results = comparison.results(items)
    failed = {}
    for found in tqdm(results, "contexts", len(items), disable=None, leave=False):
        for record in found:
            if "error" in record:
                failed[record["method"], record["keep_ratio"]] = record["error"]
        records |= by_key([record for record in found if "error" not in record])
        if args.json:
            data = dict(settings=comparison.settings, records=[*records.values()])
            text = json.dumps(data, indent=0, ensure_ascii=False).encode()
            stored = command_line.replace(args.json, text, stored)
    jobs = [job for job in jobs if job[1:] not in failed]
    lines = [question.line for question in comparison.questions]
    in_order = [records[(*job, line)] for job in jobs for line in lines]
    frame = question_table.frame_of(in_order)
    if args.csv:
        command_line.replace(args.csv, frame.to_csv(index=False).encode())
    print(f"\n{question_table.show(frame, args.against)}")
    for around in {q.haystack for q in comparison.questions if q.haystack}:
        print(f"\n*: around the facts stands {around}")
    from lab import plot  # matplotlib takes a second to import

    n = len(comparison.questions)
    title = f"{args.model.name}, {n} questions of {args.questions.name}"
    plot.questions(question_table.points(frame), title, args.figure)
    seconds = time.time() - began
    print(f"\n{len(jobs)} rows in {seconds:.0f} s; figure in {args.figure}")
    if failed:
        lines = [f"{table.label(*pair)}: {why}" for pair, why in failed.items()]
        raise ValueError(f"{len(failed)} rows failed: {'; '.join(lines)}")


def by_key(records: list[dict]) -> dict[tuple, dict]:
    """Return records by setting, method, keep ratio and line."""
    names = "setting", "method", "keep_ratio", "line"
    return {tuple(record[name] for name in names): record for record in records}


def earlier(args: Namespace, settings: dict, stored: bytes) -> dict[tuple, dict]:
    """Return the records of --json. ValueError if they have other settings."""
    if not stored:
        return {}
    found = json.loads(stored)
    for name, x in settings.items():
        before = found["settings"].get(name)
        if before != x:
            raise ValueError(
                f"the records in {args.json} were measured with {name} {before}, not {x}; "
                "give the same, or name another file"
            )
    return by_key(found["records"])


def missing(groups: list[list[Question]], jobs: list, records: dict) -> list:
    """Return each context's number with the jobs that lack a record of one of its lines."""
    items = []
    for i, some in enumerate(groups):
        left = [job for job in jobs if any((*job, q.line) not in records for q in some)]
        if left:
            items.append((i, left))
    return items


def is_ours(data: bytes) -> bool:
    """Return whether data is a file of records, such as this command writes."""
    found = command_line.read_json(data)
    return isinstance(found, dict) and found.keys() == {"settings", "records"}


def is_csv(data: bytes) -> bool:
    return data.startswith(HEADER)
