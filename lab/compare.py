"""Compare methods that compress the KV cache by their answers, KL divergence and bytes.

    python -m nanollm                  the short table: main methods, keep ratio 25 %: 15 seconds
    python -m nanollm --all            every method, keep ratios 50, 25, 12.5, 6.25 %: ten minutes
    python -m nanollm --methods h2o ada_kv+critical --keep 50 25 --json rows.json
    python -m nanollm --questions FILE.jsonl --keep 25 12.5   your questions (lab/question_file.py)

The table explains its columns. Other commands, each with its own --help:

    python -m nanollm generate         show what a method keeps of a page, or continue a text
    python -m nanollm compress         read a text, and keep its compressed cache in a file
    python -m nanollm ask              answer questions from that file, without the text
    python -m nanollm explore          write docs/index.html, a page in which a decoder runs
    python -m nanollm teach            teach gates the kind of your questions
    python -m nanollm claims           test the papers' claims on the decoders that ship, or yours

Methods. Behind snap_kv, pyramid_kv or ada_kv, +critical adds CriticalKV. Behind all but
scissorhands, streaming_llm and kv_reviver*, @3 stores what stays in 3 bits:

    full                    every entry
    snap_kv                 the entries to which the last queries attend
    pyramid_kv              as snap_kv, with fewer entries in later layers
    ada_kv                  as snap_kv, with a budget that the heads of a layer share
    snap_kv+critical        as snap_kv, but three quarters by attention times the value's size
    chunk_kv                chunks of ten neighbours, by the attention of the last queries
    chunk_kv_reuse          as chunk_kv; two layers share a choice
    chunk_kv_semantic       chunks that end with lines and sentences
    kvzip                   what the decoder looks at while it repeats the text; reads twice
    kvzip_recent            as kvzip; the newest entries stay, too
    kvzip_fast              gates that have learned to guess kvzip's choice
    question_gates          gates that have learned from questions which entries answers need
    compactor               outliers, and keys that their neighbours attend to
    key_diff                keys that differ most from the mean key
    h2o                     entries with the most attention so far, and the newest
    scissorhands            entries that mattered lately; evicts while it reads
    streaming_llm           the first tokens and the newest, with new positions
    streaming_llm_absolute  the same, with their own positions
    kv_reviver              adds what it evicts into a sketch, and reads it back
    kv_reviver_mean         as kv_reviver, but a slot of the sketch is read as a mean
    kv_reviver_shrunk       as kv_reviver, with less noise
    random                  entries drawn at random
"""

import argparse
import json
from pathlib import Path
import time

from tqdm import tqdm

from lab import command_line, table

ALL_RATIOS = [50, 25, 12.5, 6.25]  # keep ratios in percent, if not told otherwise


def main(argv: list[str]):
    """Check the options and files, measure the rows and print them; write them and a figure."""
    args = read_options(argv)
    if args.questions:
        from lab.question_comparison import compare  # loads torch

        return compare(args)
    command_line.check_figure(args.figure)
    stored = b""
    if args.json:
        stored = command_line.check_output(args.json, "rows", is_rows)
    text = command_line.read_text(args.text) if args.text else None

    from lab.comparison import Comparison, Failed  # loads torch

    comparison = Comparison(args, text)
    if args.resume:
        comparison.resume(stored)
    jobs = comparison.jobs()
    print(f"Methods that compress the KV cache, compared on {args.model}.", flush=True)

    began = time.time()
    file = dict(comparison.earlier)  # the rows of --json
    rows = []
    failed = []
    results = comparison.results(jobs)
    bar = tqdm(results, total=len(jobs), disable=None, leave=False, unit="row")
    for job, row in bar:
        if isinstance(row, Failed):  # the other methods go on
            failed.append(f"{table.label(job.method, job.keep_ratio)}: {row.why}")
            bar.write(failed[-1])
            continue
        if job.tokens not in {row["tokens"] for row in rows}:
            bar.write(f"\n{table.header(row)}")
        rows.append(row)
        bar.write(comparison.shown(row))
        file[job] = row
        if args.json:
            data = json.dumps([*file.values()], indent=1).encode()
            stored = command_line.replace(args.json, data, stored)
    finish(args, rows, time.time() - began)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(jobs)} rows failed: {'; '.join(failed)}"
        )


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line. `short`: without --all, --methods, --keep, --questions."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--all",
        action="store_true",
        help="run every method; the default without --keep is the main ones",
    )
    option(
        "--methods",
        nargs="+",
        default=[],
        metavar="NAME",
        help="run only these methods; ada_kv+critical is the window method ada_kv with the "
        "addition critical; with @3 at the end, what a method keeps is stored in 3 bits",
    )
    option(
        "--keep",
        nargs="+",
        type=float,
        metavar="PERCENT",
        help="keep ratios: a head's mean budget, its observation window included, as a "
        "percentage of the prompt's tokens (25 is kvpress's compression_ratio 0.75); "
        "default 50 25 12.5 6.25 (short table and --questions: 25)",
    )
    question_options(parser)
    command_line.window_option(parser)
    option(
        "--lengths",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help="length of each document; one table per length; default 512 (short table: 256)",
    )
    option(
        "--documents", type=int, help="documents per task; default 32 (short table: 4)"
    )
    option(
        "--seed", type=int, default=0, help="seed of the random documents; default 0"
    )
    option(
        "--text",
        type=Path,
        metavar="FILE",
        help="file of text to measure on; default: the text that ships",
    )
    option(
        "--json",
        type=Path,
        metavar="FILE",
        help="file to write the rows to, after each row; with --questions the records, after "
        "each context",
    )
    option(
        "--resume",
        action="store_true",
        help="keep the rows that --json already holds and measure the missing ones; a row "
        "stays even if its method has changed since",
    )
    option(
        "--figure",
        type=Path,
        default=Path("compare.png"),
        metavar="FILE",
        help="file for a figure (of the first length), .png, .pdf or .svg; default compare.png",
    )
    command_line.model_options(parser)
    args = parser.parse_args(argv)
    if args.all and args.methods:
        raise ValueError(
            f"--all already runs every method; leave out --all or --methods {args.methods[0]} …"
        )
    if args.resume and not args.json:
        raise ValueError("--resume continues the rows of a file; name it with --json")
    for percent in args.keep or ():
        command_line.check_keep(percent)
    if args.questions:
        return checked_questions(args)
    if any((args.csv, args.scheduler, args.against, args.settings, args.evict_early)):
        raise ValueError(
            "--csv, --scheduler, --against, --settings and --evict-early need --questions FILE"
        )
    args.short = not (args.all or args.methods or args.keep)
    args.keep = [*dict.fromkeys(args.keep or ([25] if args.short else ALL_RATIOS))]
    args.lengths = [*dict.fromkeys(args.lengths or [256 if args.short else 512])]
    if args.documents is None:
        args.documents = 4 if args.short else 32
    return args


def question_options(parser):
    """Add the options of a file of questions."""
    option = parser.add_argument
    option(
        "--questions",
        type=Path,
        metavar="FILE",
        help="measure on the questions of a file, one JSON object a line with context, "
        "question and answers; lab/question_file.py has all fields",
    )
    option(
        "--settings",
        nargs="+",
        choices=("agnostic", "aware"),
        help="with --questions: agnostic, the question comes after the compression; aware, "
        "the question is compressed with the context; default agnostic",
    )
    option(
        "--against",
        metavar="NAME",
        help="with --questions: also print differences to this method, paired by context",
    )
    option(
        "--csv",
        type=Path,
        metavar="FILE",
        help="with --questions: file for a line of each reply",
    )
    option(
        "--scheduler",
        metavar="ADDRESS",
        help="with --questions: Dask scheduler whose workers share the contexts (pip install "
        "distributed); all must see this repository and the files",
    )
    option(
        "--evict-early",
        action="store_true",
        help="with --questions: measure each method with a budget, but compactor, also while it "
        "evicts after every 512 tokens of the text; its name there ends with _early",
    )


def checked_questions(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options of a run on questions. ValueError if some do not go together."""
    for name in "lengths", "documents", "text", "seed":
        if getattr(args, name):
            raise ValueError(
                f"--{name} is of the tasks that are made here; leave it out with --questions"
            )
    args.keep = [*dict.fromkeys(args.keep or [25])]
    args.settings = [*dict.fromkeys(args.settings or ["agnostic"])]
    return args


def is_rows(data: bytes) -> bool:
    """Return whether data is a list of rows, such as this command writes."""
    return command_line.are_rows(data, {"method", "keep_ratio", "each"})


def finish(args: argparse.Namespace, rows: list[dict], seconds: float):
    """Print the lines below the table, and draw the rows of the first length."""
    print(f"\n{table.TERMS}")
    unfit = table.unfit(rows)
    if unfit:
        print(f"\n{unfit}")
    drawn = [row for row in rows if row["tokens"] == args.lengths[0]]
    if drawn:
        from lab import plot  # matplotlib takes a second to import

        plot.comparison(drawn, args.figure)
        line = f"{len(rows)} rows in {seconds:.0f} s; figure in {args.figure}"
        print(f"\n{line}, rows in {args.json}" if args.json else f"\n{line}")
    if args.short:
        print(
            "For all methods at four keep ratios: python -m nanollm --all. Tensor attention needs\n"
            "its own decoder: see notebooks/04_tensor_attention.ipynb."
        )
