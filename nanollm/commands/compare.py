"""python -m nanollm: what compressing the KV cache costs.

    python -m nanollm                          a method a family, a quarter of the entries: forty seconds
    python -m nanollm --all                    every method at four budgets: 25 minutes
    python -m nanollm --methods h2o ada_kv+critical --keep 50 25 --json rows.json
    python -m nanollm --model FOLDER --lengths 4096 --batch 4 --dtype bfloat16 --json rows.json --resume
    python -m nanollm generate                 a page, what is kept of it, and what is answered
    python -m nanollm generate --method h2o --budget 64 --file TEXT
    python -m nanollm plan --model FOLDER --lengths 32768 --batch 8
    python -m nanollm train --help
"""
import argparse
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from zlib import crc32

from nanollm.commands import shell


@dataclass(frozen=True)
class Settings:
    """What every row depends on, beside its method, budget and length; each row repeats it."""
    model: str       # the checkpoint's folder
    engine: str
    dtype: str
    documents: int   # per task
    seed: int
    window: int      # queries that vote
    text: str | None  # the file of --text, and its checksum
    chat: bool


def main(argv: list[str]):
    """Read the options and the files that they name, and measure; rows and a figure go to files."""
    args = read_options(argv)
    stored = check_files(args.figure, args.json)
    text = shell.read_text(args.text) if args.text else None
    source = None if text is None else f"{args.text}, crc32 {crc32(text.encode()):08x}"
    settings = Settings(str(args.model.resolve()), args.engine, args.dtype, args.documents, args.seed,
                        args.window, source, args.chat)
    shell.load_module("nanollm.commands.rows").main(args, settings, text, stored)


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line. Without --methods, --keep, --all or --full the short table is asked for."""
    parser = argparse.ArgumentParser(prog="python -m nanollm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every method, not one a family")
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME",
                        help="these; all: every one, also with every addition, as in ada_kv+critical")
    parser.add_argument("--keep", nargs="+", type=float, metavar="PERCENT",
                        help="default 50 25 12.5 6.25; short table: 25")
    parser.add_argument("--window", type=int, metavar="QUERIES",
                        help="that vote, in methods with a window; default 8, for short prompts")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS",
                        help="of the documents; default 512")
    parser.add_argument("--documents", type=int, help="documents per task; default 32, short table: 8")
    parser.add_argument("--full", action="store_true", help="256 documents per task, 512 and 1024 tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the documents")
    parser.add_argument("--batch", type=int, default=32, metavar="DOCUMENTS", help="at a time; default 32")
    parser.add_argument("--memory", type=float, metavar="GB",
                        help="of recorded prompts at most, or they are read again for each row; "
                             "default: half of the memory that is free")
    parser.add_argument("--text", type=Path, help="a file to read in place of the text that ships")
    parser.add_argument("--chat", action="store_true",
                        help="put documents into the tokenizer's chat template")
    parser.add_argument("--json", type=Path, help="write the rows here, each as it is done")
    parser.add_argument("--resume", action="store_true",
                        help="go on with the rows in --json; those of a method that has changed since stay")
    parser.add_argument("--figure", type=Path, default=Path("compare.png"), help="of the first length")
    shell.model_options(parser)
    args = parser.parse_args(argv)

    if args.all and args.methods:
        raise ValueError(f"--all is every method; leave it or --methods {' '.join(args.methods)} out")
    args.short = not (args.all or args.methods or args.keep or args.full)
    args.asked = [name for name in ("keep", "window") if getattr(args, name) is not None]
    args.window = 8 if args.window is None else args.window
    args.keep = [*dict.fromkeys(args.keep or ([25] if args.short else [50, 25, 12.5, 6.25]))]
    args.lengths = [*dict.fromkeys(args.lengths or ([512, 1024] if args.full else [512]))]
    if args.documents is None:
        args.documents = 256 if args.full else 8 if args.short else 32

    if args.memory is not None and not args.memory >= 0:
        raise ValueError(f"memory {args.memory:g} GB must be at least 0")
    if args.resume and not args.json:
        raise ValueError("--resume goes on with the rows of a file; name it with --json")
    for percent in args.keep:
        if not 0 < percent <= 100:
            raise ValueError(f"keep {percent:g} % must lie above 0 and up to 100 percent of the prompt")
    return args


def check_files(figure: Path, rows: Path | None) -> bytes:
    """Return what the file of the rows holds. ValueError or OSError, before any work, unless both can be
    written.
    """
    if figure.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"figure {figure} must end in .png, .pdf or .svg")
    if rows and realpath(rows) == realpath(figure):
        raise ValueError(f"rows and figure cannot both go to {rows}; name two files")
    is_figure = lambda data: shell.load_module("nanollm.commands.plot").is_ours(data)  # it takes a second
    shell.check_output(figure, "figure", is_figure)
    return shell.check_output(rows, "rows", is_rows) if rows else b""


def is_rows(data: bytes) -> bool:
    rows = shell.read_json(data)
    return isinstance(rows, list) and rows != [] and all(
        isinstance(row, dict) and {"method", "keep_ratio", "each"} <= row.keys() for row in rows)
