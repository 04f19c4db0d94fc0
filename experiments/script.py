"""Code that the scripts of this folder share: options, decoders, writing rows to a file."""
import argparse
from collections.abc import Callable, Iterable, Iterator
import json
from pathlib import Path

from torch import Tensor

from nanollm import SHIPPED
from nanollm.commands.registry import given, loaded
from nanollm.commands.shell import check_output, command, model_options, read_json, replace
from nanollm.measure.evaluate import maker, standard_error


def parser(module: str, about: str, documents: int | None = None,
           length: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of a model and --json.

    It also has --documents and --length if their default is given.
    """
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=about,
                                   epilog="The shipped decoders are measured; --model adds another.",
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    model_options(made, without="only the decoders that ship")
    made.add_argument("--shipped", nargs="*", choices=SHIPPED, default=[*SHIPPED], metavar="NAME",
                      help=f"shipped decoders to measure; default: {' '.join(SHIPPED)}. Without a name: none")
    made.add_argument("--json", type=Path, metavar="FILE", help="file to write the rows to")
    if documents:
        made.add_argument("--documents", type=int, default=documents,
                          help="documents per task, and number of texts if any; default %(default)s")
    if length:
        made.add_argument("--length", type=int, default=length, metavar="TOKENS",
                          help="length of each document; default %(default)s")
    return made


def arguments(made: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line.

    Raises ValueError if no decoder is named, or the file of --json cannot be written.
    """
    args = made.parse_args(argv)
    if not args.shipped and args.model.resolve() in SHIPPED.values():
        raise ValueError(f"--shipped names no decoder and --model none; name one: {', '.join(SHIPPED)}")
    if args.json:
        check_output(args.json, "rows", lambda data: isinstance(read_json(data), list))
    return args


def decoders(args) -> Iterator[tuple]:
    """Yield name, model and tokenizer of the shipped decoders, then of --model if it is another."""
    own = args.model.resolve()
    folders = {name: SHIPPED[name] for name in args.shipped}
    folders |= {} if own in SHIPPED.values() else {str(args.model): own}
    for name, folder in folders.items():
        yield name, *loaded(args, folder)


def check_budgets(model, jobs: Iterable[tuple], tokens: int):
    """Raise ValueError if a budget does not fit a text of so many tokens, before any work.

    jobs: tuples that end with a method's name, the method and a keep ratio.
    """
    for *_, name, Method, ratio in jobs:
        try:
            maker(model, Method, ratio, **given(Method, window_size=8))(tokens)
        except ValueError as error:
            raise ValueError(f"{name} at {keep_label(ratio)} of {tokens} tokens: {error}") from None


def finish(args, rows: list[dict], show: Callable[[list[dict]], str]):
    """Print the rows as text, and write them to the file of --json."""
    print(show(rows))
    if args.json:
        replace(args.json, json.dumps(rows, indent=1).encode())


def run(module: str, about: str, measured: Callable[..., list[dict]], show: Callable[[list[dict]], str],
        documents: int | None = None, length: int | None = None):
    """Run an experiment as a command: measure each decoder, print the rows, and write them to a file.

    measured(model, tokenizer, …) returns the rows of a decoder. It also gets the values of --documents and
    --length if they have a default here.
    """
    def main():
        args = arguments(parser(module, about, documents, length))
        sizes = [getattr(args, name) for name in ("documents", "length") if name in args]
        finish(args, [dict(decoder=name) | row for name, model, encoding in decoders(args)
                      for row in measured(model, encoding, *sizes)], show)
    command(main)


def grouped(rows: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """Return lists of rows by their values of these keys, in order of first appearance."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Return the mean of x (n,) and its standard error."""
    return x.double().mean().item(), standard_error(x.double())


def with_error(mean: float, error: float, digits: int = 2, sign: str = "") -> str:
    """Return "0.50 ± 0.09". sign: "+" shows the sign of the mean."""
    return f"{mean:{sign}.{digits}f} ± {error:.{digits}f}"


def keep_label(keep_ratio: float | None) -> str:
    """Return a keep ratio as tables show it, "25 %"; None is "all"."""
    return "all" if keep_ratio is None else f"{100 * keep_ratio:g} %"
