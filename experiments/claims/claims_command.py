"""python -m nanollm claims: test the papers' claims on trained models, yours included.

    python -m nanollm claims                                  both shipped decoders, in four minutes on a core
    python -m nanollm claims --model FOLDER --claims P6 C1    your model in a third column

Each claim about a trained model has a rule: conditions on measured numbers. The table of a claim has a column
for each model, the verdict by the rule, and the numbers. A number within two standard errors of its limit
leaves the claim undecided. CLAIMS.md explains all claims.
"built" is nanollm/tiny, whose initial weights contained retrieval heads; "learned" is nanollm/tiny_learned.
"""
import argparse
import json
import os
from pathlib import Path

from tqdm import tqdm

from nanollm import SHIPPED
from nanollm.check import check_seed, whole
from nanollm.commands import shell
from nanollm.commands.registry import loaded
from nanollm.measure.tasks import Tasks


def is_ours(data: bytes) -> bool:
    """Return whether a file's content is this command's findings."""
    rows = shell.read_json(data)
    return isinstance(rows, list) and rows != [] and all(
        isinstance(row, dict) and {"claim", "rule", "model", "verdict"} <= row.keys() for row in rows)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm claims", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    shell.model_options(parser, without="only the two decoders that ship")
    parser.add_argument("--claims", nargs="+", metavar="ID",
                        help="the claims to test; default: all that have a rule")
    parser.add_argument("--documents", type=int, default=32,
                        help="documents of each task, and texts; default 32")
    parser.add_argument("--length", type=int, default=256, metavar="TOKENS",
                        help="length of each document; default 256")
    parser.add_argument("--seed", type=int, default=0, help="seed of documents and random draws; default 0")
    parser.add_argument("--json", type=Path, help="write the findings to this file, claim by claim")
    args = parser.parse_args(argv)
    check_seed(args.seed)
    whole("documents", args.documents, 2)
    whole("length", args.length, 128)
    before = shell.check_output(args.json, "findings", is_ours) if args.json else b""

    from experiments.claims.claims_renderer import listed, show
    from experiments.claims.rules import CLAIMS, judge
    from experiments.claims.subject import Subject
    names = [*dict.fromkeys(args.claims or CLAIMS)]
    if unknown := [name for name in names if name not in CLAIMS]:
        raise ValueError(f"claim {unknown[0]!r} cannot be tested on a model; choose from {', '.join(CLAIMS)}")
    folders, shipped = dict(SHIPPED), map(os.path.realpath, SHIPPED.values())
    if os.path.realpath(args.model) not in shipped:
        folders[f"{args.model}/"] = args.model  # /: a folder may be named "built"
    subjects = {}
    for label, folder in folders.items():
        model, encoding = loaded(args, folder)  # the threads that stay are those of FOLDER, the last
        subjects[label] = Subject(model, Tasks(encoding, "test"), args.seed, args.documents, args.length)
    print(f"Seed {args.seed}. Numbers are means ± one standard error.\n")

    rows, claims = [], listed()
    for name in tqdm(names, unit="claim", leave=False, disable=None):
        words = dict(claim=name, says=claims[name].says, rule=claims[name].rule)
        found = [words | dict(model=label, documents=on.documents, tokens=on.T, seed=on.seed)
                 | judge(name, on)._asdict() for label, on in subjects.items()]
        tqdm.write(show(found, rule=True) + "\n")
        rows += found
        if args.json:
            before = shell.replace(args.json, json.dumps(rows, indent=1).encode(), before)
