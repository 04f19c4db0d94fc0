"""python -m nanollm claims: test the papers' claims on trained models, yours included.

    python -m nanollm claims                                  both shipped decoders: four minutes
    python -m nanollm claims --model smollm2                  a pretrained decoder: 20 minutes
    python -m nanollm claims --model FOLDER --claims P6 C1    your model beside these three
    python -m nanollm claims --model FOLDER --keep 25         at one keep ratio in place of four

Beside your model, the other columns are those of lab/stored/claims.json, which the first two
commands wrote, unless you choose other documents, another text, length or seed. 22 claims have
a rule: conditions on measured numbers, at several keep ratios (S7 at none). The table of a
claim has a column for each model, a mark for each keep ratio, and the numbers. A number within two
standard errors of its limit leaves the claim undecided, unless another condition fails (CLAIMS.md).
"built" is nanollm/tiny, whose initial weights contained retrieval heads; "learned" is
nanollm/tiny_learned.
"""

import argparse
from itertools import product
import json
import os
from pathlib import Path

from tqdm import tqdm

from lab import command_line
from lab.loading import loaded
from lab.processes import spread
from lab.tasks import Tasks
from nanollm import SHIPPED
from nanollm.check import check_seed, whole
from nanollm.gguf import SMOLLM2

STORED = Path(__file__).parents[1] / "stored" / "claims.json"


def main(argv: list[str]):
    """Judge each claim on each model, print its table, and write the findings."""
    args = read_options(argv)
    before = b""
    if args.json:
        before = command_line.check_output(args.json, "findings", is_ours)
    text = command_line.read_text(args.text) if args.text else None

    from lab.claims.claims_renderer import LEGEND, listed, show
    from lab.claims.rules import CLAIMS, judge, keep_ratios, read

    names = [*dict.fromkeys(args.claims or CLAIMS)]
    for name in names:
        if name not in CLAIMS:
            raise ValueError(
                f"claim {name!r} cannot be tested on a model; choose from {', '.join(CLAIMS)}"
            )
    folders = dict(SHIPPED)
    stored = {}
    if os.path.realpath(args.model) not in map(os.path.realpath, SHIPPED.values()):
        # /: it may be named "built"
        own = f"{args.model}/" if args.model.is_dir() else args.model.name
        folders[own] = args.model
        if text is None:
            stored = stored_rows(args, own)
    known = {model for _, model, _ in stored}
    models = {*known, *folders}
    columns = [x for x in dict.fromkeys((SMOLLM2, *folders)) if x in models]
    # the threads that stay are those of --model, the last
    subjects = {
        label: subject(args, folder, text)
        for label, folder in folders.items()
        if label not in known
    }
    print(f"Seed {args.seed}. Numbers are means ± one standard error. {LEGEND}\n")

    claims = listed()
    asked = [percent / 100 for percent in args.keep]
    size = dict(documents=args.documents, tokens=args.length, seed=args.seed)
    parts = {}  # a paper's claims on one model, at two keep ratios
    for name, label in product(names, subjects):
        for i, keep in enumerate(keep_ratios(name, asked)):
            part = parts.setdefault((name[0], label, i // 2), [])
            part.append((name, label, keep))

    def judged(part: list[tuple]) -> dict[tuple, dict]:
        rows = {}
        for name, label, keep in part:
            finding = judge(name, subjects[label], keep)
            row = dict(claim=name, rule=claims[name].rule, model=label)
            row |= dict(keep_ratio=keep) | size | finding._asdict()
            rows[name, label, keep] = row
        return rows

    quiet = dict(leave=False, disable=None)
    for on in tqdm(subjects.values(), "the full cache", **quiet):
        read(on, names)
    cores = args.device == "cpu" and args.threads < 2
    found = spread(judged, parts.values(), cores)
    found = iter(tqdm(found, "the methods", len(parts), **quiet))
    rows = []
    for name in names:
        table = []
        for label, keep in product(columns, keep_ratios(name, asked)):
            while (name, label, keep) not in stored and label in subjects:
                stored |= next(found)
            if (name, label, keep) in stored:
                table.append(stored[name, label, keep])
        tqdm.write(show(table, rule=True) + "\n")
        rows += table
        if args.json:
            data = json.dumps(rows, indent=1).encode()
            before = command_line.replace(args.json, data, before)


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.model_options(parser, without="only the two decoders that ship")
    parser.set_defaults(dtype="float32")  # as in the stored findings
    option = parser.add_argument
    option(
        "--claims",
        nargs="+",
        metavar="ID",
        help="the claims to test; default: all that have a rule",
    )
    option(
        "--keep",
        nargs="+",
        type=float,
        default=[50, 25, 12.5, 6.25],
        metavar="PERCENT",
        help="keep ratios at which the claims are judged; default 50 25 12.5 6.25",
    )
    option(
        "--documents",
        type=int,
        default=24,
        help="documents of each task, and texts; default 24",
    )
    option(
        "--length",
        type=int,
        default=256,
        metavar="TOKENS",
        help="length of each document; default 256",
    )
    option(
        "--seed",
        type=int,
        default=0,
        help="seed of documents and random draws; default 0",
    )
    option(
        "--text",
        type=Path,
        metavar="FILE",
        help="file of text to measure on; default: the text that ships",
    )
    option("--json", type=Path, help="write the findings to this file, claim by claim")
    args = parser.parse_args(argv)
    check_seed(args.seed)
    for percent in args.keep:
        command_line.check_keep(percent)
    whole("documents", args.documents, 2)
    whole("length", args.length, 128)
    return args


def is_ours(data: bytes) -> bool:
    """Return whether a file's content is this command's findings."""
    return command_line.are_rows(data, {"claim", "rule", "model", "verdict"})


def stored_rows(args: argparse.Namespace, own: str) -> dict[tuple, dict]:
    """Return the stored findings of the same size and seed, but for those of the model `own`.

    The keys are claim, model and keep ratio.
    """
    asked = args.documents, args.length, args.seed
    found = {}
    for row in json.loads(STORED.read_text())["rows"]:
        size = row["documents"], row["tokens"], row["seed"]
        if size == asked and row["model"] != own:
            found[row["claim"], row["model"], row["keep_ratio"]] = row
    return found


def subject(args: argparse.Namespace, folder: Path, text: str | None):
    """Return a model on which claims are judged."""
    from lab.claims.subject import Subject

    model, encoding = loaded(args, folder)
    return Subject(
        model,
        Tasks(encoding, "test", text),
        args.seed,
        args.documents,
        args.length,
    )
