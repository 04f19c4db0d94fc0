"""python -m nanollm claims: do the papers' claims hold on a model of yours?

    python -m nanollm claims                                  on both that ship: four minutes of a core
    python -m nanollm claims --model FOLDER --claims P6 C1    on yours as well: one more column

A rule on measured numbers decides each claim about trained models: experiments/claims.py has both.
"built" is nanollm/tiny, in whose start the heads that retrieve were built; "learned" is nanollm/tiny_learned.
"""
import argparse
import json
import os
from pathlib import Path
from textwrap import fill

from tqdm import tqdm

from nanollm import SHIPPED
from nanollm.check import check_seed, whole
from nanollm.commands import shell
from nanollm.commands.registry import loaded, model_options
from nanollm.measure.tasks import Tasks


def worded(claim) -> dict[str, str]:
    """The claim of a function and its rule, the two paragraphs of its docstring, in a line each."""
    return dict(zip(("says", "rule"), (" ".join(part.split()) for part in claim.__doc__.split("\n\n"))))


def line(name: str, cells) -> str:
    return f"    {name:<36}{''.join(f'{cell:<30}' for cell in cells)}".rstrip()


def show(name: str, claim, findings: dict) -> str:
    """A claim, and below it a row for the verdict and for each number, a column a model."""
    found = findings.values()
    rows = {"": [each.verdict for each in found]}
    for number in dict.fromkeys(key for each in found for key in each.numbers):
        of_each = (each.numbers.get(number) for each in found)
        rows[number] = ["{:.3g} ± {:.1g}".format(*x) if x else "" for x in of_each]
    why = [f"    {model}: {each.why}" for model, each in findings.items() if each.why]
    said = fill(f"{name}  {worded(claim)['says']}", 100, subsequent_indent="    ")
    return "\n".join([said, *map(line, rows, rows.values()), *why, ""])


def is_ours(data: bytes) -> bool:
    held = shell.read_json(data)
    return isinstance(held, list) and held != [] and all(
        isinstance(row, dict) and {"claim", "rule", "model", "verdict"} <= row.keys() for row in held)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm claims", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    model_options(parser)
    parser.add_argument("--claims", nargs="+", metavar="ID", help="default: all that a model decides")
    parser.add_argument("--documents", type=int, default=32, help="a task, and texts; default 32")
    parser.add_argument("--length", type=int, default=256, metavar="TOKENS", help="of each; default 256")
    parser.add_argument("--seed", type=int, default=0, help="of the documents and of what is drawn")
    parser.add_argument("--json", type=Path, help="write the findings here, each as it is made")
    args = parser.parse_args(argv)
    check_seed(args.seed), whole("documents", args.documents, 2), whole("length", args.length, 128)
    before = shell.check_output(args.json, "findings", is_ours) if args.json else b""

    from experiments.claims import CLAIMS, Subject, judge
    names, subjects = [*dict.fromkeys(args.claims or CLAIMS)], {}
    if unknown := [name for name in names if name not in CLAIMS]:
        raise ValueError(f"claim {unknown[0]!r} is none that a model decides; those are {', '.join(CLAIMS)}")
    ours = os.path.realpath(args.model) in map(os.path.realpath, SHIPPED.values())
    folders = SHIPPED | ({} if ours else {f"{args.model}/": args.model})  # /: a folder may be named "built"
    for label, folder in folders.items():
        model, encoding = loaded(args, folder)  # the threads that stay are those of FOLDER, the last
        subjects[label] = Subject(model, Tasks(encoding, "test"), args.seed, args.documents, args.length)
    print(f"{args.documents} documents a task and texts, {args.length} tokens each, seed {args.seed}; "
          f"± a standard error\n\n{line('', subjects)}\n")

    found = []
    for name in tqdm(names, unit="claim", leave=False, disable=None):
        findings = {label: judge(name, on) for label, on in subjects.items()}
        tqdm.write(show(name, CLAIMS[name], findings))
        found += [dict(claim=name, **worded(CLAIMS[name]), model=label, documents=on.documents, tokens=on.T,
                       seed=on.seed) | findings[label]._asdict() for label, on in subjects.items()]
        if args.json:
            before = shell.replace(args.json, json.dumps(found, indent=1).encode(), before)
