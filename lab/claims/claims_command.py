"""python -m nanollm claims: test the papers' claims on trained models, yours included.

    python -m nanollm claims                                  both shipped decoders, in two minutes
    python -m nanollm claims --model smollm2                  a pretrained decoder: 15 minutes on two cores
    python -m nanollm claims --model FOLDER --claims P6 C1    your model beside these three

Beside your model, the other columns are those of lab/stored/claims.json, which the first two
commands wrote, unless you choose other documents, another text, length or seed. Each claim about a
trained model has a rule: conditions on measured numbers. The table of a claim has a column for each
model, the verdict by the rule, and the numbers. A number within two standard errors of its limit
leaves the claim undecided (CLAIMS.md). "built" is nanollm/tiny, whose initial weights contained
retrieval heads; "learned" is nanollm/tiny_learned.
"""

import argparse
import json
import os
from pathlib import Path

from tqdm import tqdm

from lab import command_line
from lab.registry import loaded
from lab.tasks import Tasks
from nanollm import SHIPPED
from nanollm.check import check_seed, whole


def is_ours(data: bytes) -> bool:
    """Return whether a file's content is this command's findings."""
    rows = command_line.read_json(data)
    return (
        isinstance(rows, list)
        and rows != []
        and all(
            isinstance(row, dict)
            and {"claim", "rule", "model", "verdict"} <= row.keys()
            for row in rows
        )
    )


def main(argv: list[str]):
    parser = argparse.ArgumentParser(
        prog="python -m nanollm claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.model_options(parser, without="only the two decoders that ship")
    add = parser.add_argument
    add(
        "--claims",
        nargs="+",
        metavar="ID",
        help="the claims to test; default: all that have a rule",
    )
    add(
        "--documents",
        type=int,
        default=32,
        help="documents of each task, and texts; default 32",
    )
    add(
        "--length",
        type=int,
        default=256,
        metavar="TOKENS",
        help="length of each document; default 256",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of documents and random draws; default 0",
    )
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="file of text to measure on; default: the text that ships",
    )
    add("--json", type=Path, help="write the findings to this file, claim by claim")
    args = parser.parse_args(argv)
    check_seed(args.seed)
    whole("documents", args.documents, 2)
    whole("length", args.length, 128)
    before = (
        command_line.check_output(args.json, "findings", is_ours) if args.json else b""
    )
    text = command_line.read_text(args.text) if args.text else None

    from lab.claims.claims_renderer import listed, show
    from lab.claims.rules import CLAIMS, judge
    from lab.claims.subject import Subject
    from nanollm.gguf import SMOLLM2

    names, claims, rows, subjects = (
        [*dict.fromkeys(args.claims or CLAIMS)],
        listed(),
        [],
        {},
    )
    if unknown := [name for name in names if name not in CLAIMS]:
        raise ValueError(
            f"claim {unknown[0]!r} cannot be tested on a model; choose from {', '.join(CLAIMS)}"
        )
    folders, stored = dict(SHIPPED), {}
    if os.path.realpath(args.model) not in map(os.path.realpath, SHIPPED.values()):
        # /: it may be named "built"
        own = f"{args.model}/" if args.model.is_dir() else args.model.name
        folders[own] = args.model
        # of the text that ships
        file = Path(__file__).parents[1] / "stored/claims.json"
        rows_of = [] if text else json.loads(file.read_text())["rows"]
        asked = args.documents, args.length, args.seed
        stored = {
            (row["claim"], row["model"]): row
            for row in rows_of
            if (row["documents"], row["tokens"], row["seed"]) == asked
            and row["model"] != own
        }
    known = {model for _, model in stored}
    columns = [
        x for x in dict.fromkeys((SMOLLM2, *folders)) if x in known or x in folders
    ]
    for label, folder in folders.items():
        if label in known:
            continue
        # the threads that stay are those of FOLDER, the last
        model, encoding = loaded(args, folder)
        subjects[label] = Subject(
            model,
            Tasks(encoding, "test", text),
            args.seed,
            args.documents,
            args.length,
            processes=args.device == "cpu" and args.threads < 2,
        )
    print(f"Seed {args.seed}. Numbers are means ± one standard error.\n")

    for name in tqdm(names, unit="claim", leave=False, disable=None):
        words = dict(claim=name, says=claims[name].says, rule=claims[name].rule)
        found = [
            stored.get((name, label))
            or words
            | dict(
                model=label,
                documents=args.documents,
                tokens=args.length,
                seed=args.seed,
            )
            | judge(name, subjects[label])._asdict()
            for label in columns
        ]
        tqdm.write(show(found, rule=True) + "\n")
        rows += found
        if args.json:
            before = command_line.replace(
                args.json, json.dumps(rows, indent=1).encode(), before
            )
