"""python -m nanollm claims: do the papers' claims hold on a model of yours?

    python -m nanollm claims                                  on both that ship: four minutes of a core
    python -m nanollm claims --model FOLDER --claims P6 C1    on yours as well: one more column

A rule on measured numbers decides each claim about trained models: experiments/claims/ has both.
"built" is nanollm/tiny, in whose start the heads that retrieve were built; "learned" is nanollm/tiny_learned.
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
    held = shell.read_json(data)
    return isinstance(held, list) and held != [] and all(
        isinstance(row, dict) and {"claim", "rule", "model", "verdict"} <= row.keys() for row in held)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm claims", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    shell.model_options(parser)
    parser.add_argument("--claims", nargs="+", metavar="ID", help="default: all that a model decides")
    parser.add_argument("--documents", type=int, default=32, help="a task, and texts; default 32")
    parser.add_argument("--length", type=int, default=256, metavar="TOKENS", help="of each; default 256")
    parser.add_argument("--seed", type=int, default=0, help="of the documents and of what is drawn")
    parser.add_argument("--json", type=Path, help="write the findings here, each as it is made")
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
    print(f"seed {args.seed}; ± a standard error\n")

    rows, claims = [], listed()
    for name in tqdm(names, unit="claim", leave=False, disable=None):
        words = dict(claim=name, says=claims[name].says, rule=claims[name].rule)
        found = [words | dict(model=label, documents=on.documents, tokens=on.T, seed=on.seed)
                 | judge(name, on)._asdict() for label, on in subjects.items()]
        tqdm.write(show(found) + "\n")
        rows += found
        if args.json:
            before = shell.replace(args.json, json.dumps(rows, indent=1).encode(), before)
