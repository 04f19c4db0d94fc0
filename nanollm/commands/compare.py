"""Compare methods that compress the KV cache: right answers, KL divergence, bytes and speed of each.

    python -m nanollm                  the short table: main methods, keep ratio 25 %: twenty seconds
    python -m nanollm --all            every method, keep ratios 50, 25, 12.5 and 6.25 %: 40 minutes
    python -m nanollm --methods h2o ada_kv+critical --keep 50 25 --json rows.json
    python -m nanollm --model FOLDER --lengths 4096 --batch 4 --dtype bfloat16 --json rows.json --resume

The table explains its columns. Other commands, each with its own --help:

    python -m nanollm generate         show the entries that a method keeps of a page, or continue a text
    python -m nanollm compress         read a text once, and keep its compressed cache in a file
    python -m nanollm ask              answer questions from that file, without the text
    python -m nanollm record           find the smallest file that still answers later questions
    python -m nanollm explore          write docs/index.html, a page in which a decoder runs
    python -m nanollm plan             predict the memory of a model, its cache and each method
    python -m nanollm claims           test the papers' claims on the decoders that ship, or on yours
    python -m nanollm course           make, check or grade a student's copy of this repository
    python -m nanollm train            train a decoder like the one that ships
"""
import argparse
from importlib import import_module
from os.path import realpath
from pathlib import Path
from zlib import crc32

from nanollm.commands import shell


def main(argv: list[str]):
    """Check the options and files, then measure the rows, print them, and write them and a figure."""
    args = read_options(argv)
    stored = check_files(args.figure, args.json)
    text = shell.read_text(args.text) if args.text else None
    source = None if text is None else f"{args.text}, crc32 {crc32(text.encode()):08x}"
    # what all rows of a run share; each row repeats it
    settings = dict(model=str(args.model.resolve()), engine=args.engine, dtype=args.dtype,
                    documents=args.documents, seed=args.seed, window=args.window, text=source, chat=args.chat)
    import_module("nanollm.commands.rows").main(args, settings, text, stored)  # loads torch


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line. Without --all, --full, --methods and --keep, `short` is True."""
    parser = argparse.ArgumentParser(prog="python -m nanollm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true",
                        help="run every method, without additions; the default is one of each family")
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME",
                        help="run only these methods; ada_kv+critical is the window method ada_kv with the "
                             "addition critical; 'all' is every method, and every window method with each "
                             "addition")
    parser.add_argument("--keep", nargs="+", type=float, metavar="PERCENT",
                        help="keep ratios: the budget of each head as a percentage of the prompt's tokens; "
                             "default 50 25 12.5 6.25 (short table: 25)")
    parser.add_argument("--window", type=int, metavar="QUERIES",
                        help="observation window: how many of the prompt's last queries score the entries; "
                             "default 8, which suits short prompts")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS",
                        help="length of each document; one table per length; default 512")
    parser.add_argument("--documents", type=int, help="documents per task; default 32 (short table: 8)")
    parser.add_argument("--full", action="store_true",
                        help="all methods, more precisely: 256 documents per task, of 512 and of 1024 tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random documents; default 0")
    parser.add_argument("--batch", type=int, default=32, metavar="DOCUMENTS",
                        help="how many documents the model reads at once; default 32")
    parser.add_argument("--memory", type=float, metavar="GB",
                        help="memory for recordings of the prompts; if they need more, every row reads the "
                             "prompts anew, which is slower; default: half of the free memory")
    parser.add_argument("--text", type=Path, metavar="FILE",
                        help="file of text to measure on; default: the text that ships")
    parser.add_argument("--chat", action="store_true",
                        help="put each document into the tokenizer's chat template, for models tuned to chat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write the rows to, after each row")
    parser.add_argument("--resume", action="store_true",
                        help="keep the rows that --json already holds and measure the missing ones; a row "
                             "stays even if its method has changed since")
    parser.add_argument("--figure", type=Path, default=Path("compare.png"), metavar="FILE",
                        help="file for a figure of the first length, .png, .pdf or .svg; default compare.png")
    shell.model_options(parser)
    args = parser.parse_args(argv)

    if args.all and args.methods:
        raise ValueError("--all already runs every method; leave out --all or --methods "
                         f"{' '.join(args.methods)}")
    args.short = not (args.all or args.methods or args.keep or args.full)
    args.asked = [name for name in ("keep", "window") if getattr(args, name) is not None]
    args.window = 8 if args.window is None else args.window
    args.keep = [*dict.fromkeys(args.keep or ([25] if args.short else [50, 25, 12.5, 6.25]))]
    args.lengths = [*dict.fromkeys(args.lengths or ([512, 1024] if args.full else [512]))]
    if args.documents is None:
        args.documents = 256 if args.full else 8 if args.short else 32

    if args.resume and not args.json:
        raise ValueError("--resume continues the rows of a file; name it with --json")
    for percent in args.keep:
        shell.check_keep(percent)
    return args


def check_files(figure: Path, rows: Path | None) -> bytes:
    """Return the content of the file of rows. ValueError or OSError if a file cannot be written."""
    if figure.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"figure is {figure}; its name must end in .png, .pdf or .svg")
    if rows and realpath(rows) == realpath(figure):
        raise ValueError(f"rows and figure both go to {rows}; name two files")
    is_figure = lambda data: import_module("nanollm.commands.plot").is_ours(data)  # loads matplotlib
    shell.check_output(figure, "figure", is_figure)
    return shell.check_output(rows, "rows", is_rows) if rows else b""


def is_rows(data: bytes) -> bool:
    """Return whether data is a list of rows that this command wrote."""
    rows = shell.read_json(data)
    return isinstance(rows, list) and rows != [] and all(
        isinstance(row, dict) and {"method", "keep_ratio"} <= row.keys() and isinstance(row.get("each"), dict)
        for row in rows)
