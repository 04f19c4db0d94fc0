"""What the scripts of this folder do alike: the options, the decoders, the rows in a file."""
import argparse
from collections.abc import Callable, Iterator
import json
from pathlib import Path

from torch import Tensor

from nanollm import SHIPPED
from nanollm.commands.registry import loaded
from nanollm.commands.shell import check_output, model_options, read_json, replace
from nanollm.measure.evaluate import standard_error


def parser(module: str, about: str) -> argparse.ArgumentParser:
    """Return a parser that knows the options of a model, and --json."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=about,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    model_options(made)
    made.add_argument("--json", type=Path, help="write the rows here")
    return made


def arguments(made: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse a command line. ValueError, before any work, if the file of --json cannot be written."""
    args = made.parse_args(argv)
    if args.json:
        check_output(args.json, "rows", lambda data: isinstance(read_json(data), list))
    return args


def decoders(args) -> Iterator[tuple]:
    """Yield name, model and encoding of the decoders that ship, then of --model if it is another."""
    own = args.model.resolve()
    folders = SHIPPED if own in SHIPPED.values() else SHIPPED | {str(args.model): own}
    for name, folder in folders.items():
        yield name, *loaded(args, folder)


def finish(args, rows: list[dict], show: Callable[[list[dict]], str]):
    """Print the rows as text, and write them where --json says."""
    print(show(rows))
    if args.json:
        replace(args.json, json.dumps(rows, indent=1).encode())


def grouped(rows: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """Return the rows by their values of these keys, in the order in which they first come."""
    of = {}
    for row in rows:
        of.setdefault(tuple(row[key] for key in keys), []).append(row)
    return of


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Return the mean of x (n,) and its standard error."""
    return x.double().mean().item(), standard_error(x.double())


def with_error(mean: float, error: float, digits: int = 2, sign: str = "") -> str:
    """Return "0.50 ± 0.09". sign: "+" shows the sign of the mean."""
    return f"{mean:{sign}.{digits}f} ± {error:.{digits}f}"


def keep_label(keep_ratio: float | None) -> str:
    """Return a share of the prompt as tables show it; None is "all"."""
    return "all" if keep_ratio is None else f"{100 * keep_ratio:g} %"
