"""Make text of claims: for the command, and CLAIMS.md with the numbers that tests record.

Each paper has a file beside this one: `# Paper`, which version was read, then for each claim

    ## S3 · holds after a fix · notebook 03
    Theorem 3.1: attended to now, attended to next.
    Rule: the rule in words, if a trained model decides the claim; rules.py has it as code.
    > One line with the number: the smallest ε of {S3.draws} draws is {S3.smallest_eps:.2f}.

    Details.

A test that is marked `@pytest.mark.claim("S3")` records these numbers: note("S3", draws=80, smallest_eps=x).
"""
from itertools import groupby
import json
from pathlib import Path
import re
from textwrap import fill, indent
from typing import NamedTuple

from experiments.claims.rules import CLAIMS
from experiments.claims.subject import HOLDS, NOT, OPEN, UNTESTED
from nanollm import SHIPPED
from nanollm.commands.text_table import text_table

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
VERDICTS = HOLDS, "holds after a fix", NOT, UNTESTED, OPEN
CLAIM = re.compile(rf"([A-Z]\d+) · ({'|'.join(VERDICTS)})(?: · notebook (\d\d))?\n(.+)\n(Rule.+\n)?> (.+)\n"
                   r"((?s:.*))")
PLACEHOLDER = re.compile(r"\{([A-Z]\d+\.\w+)(?::([^{}]*))?\}")


class Claim(NamedTuple):
    id: str
    verdict: str          # on "built", if a model decides it
    notebook: str         # "03"
    says: str
    rule: str             # "" if no model decides it
    number: str
    details: str


def texts() -> str:
    """Return all papers' files, one after the other."""
    return "\n".join(file.read_text() for file in sorted(FOLDER.glob("*.md")) if file.stem != "head")


def parse(text: str) -> dict[str, list[Claim]]:
    """Return the claims of each paper, whose name is followed by the version that was read."""
    papers = {}
    for paper in re.split(r"^# ", text, flags=re.M)[1:]:
        head, *parts = re.split(r"^## ", paper, flags=re.M)
        papers[head.strip()] = claims = []
        for part in parts:
            if not (found := CLAIM.fullmatch(part)):
                raise ValueError(f"'## {part.splitlines()[0]}' must be '## ID · verdict · notebook NN', then "
                                 "a line with the claim, perhaps one with its rule, then '> ' and the number")
            claims.append(Claim(*((x or "").strip() for x in found.groups())))
    return papers


def listed() -> dict[str, Claim]:
    """Return every claim by its ID."""
    return {claim.id: claim for claims in parse(texts()).values() for claim in claims}


# ---- what was found on models ---

def table(found: list[dict]) -> str:
    """Return the verdicts on a claim and their numbers: a row for each, with a column for each model."""
    rows = [["{documents} documents of {tokens} tokens".format(**found[0]), *(row["model"] for row in found)],
            ["by the rule", *(row["verdict"] for row in found)]]
    for name in dict.fromkeys(name for row in found for name in row["numbers"]):
        numbers = [row["numbers"].get(name) for row in found]
        rows.append([name, *("{:.3g} ± {:.1g}".format(*x) if x else "" for x in numbers)])
    why = [f"{row['model']}: {row['why']}" for row in found if row["why"]]
    return "\n".join([text_table(rows, [36] + [16] * len(found)), *why])


def show(rows: list[dict]) -> str:
    """Return each claim of the command's rows, and its table."""
    claims = [list(found) for _, found in groupby(rows, key=lambda row: row["claim"])]
    return "\n\n".join(fill("{claim}  {says}".format(**found[0]), 100, subsequent_indent="    ") + "\n"
                       + indent(table(found), "    ") for found in claims)


# ---- CLAIMS.md ---

def filled(text: str, values: dict[str, object]) -> str:
    """Put the recorded values, by "ID.name", in the place of {ID.name:format}."""
    def formatted(found: re.Match) -> str:
        value = values[found[1]]
        return value if isinstance(value, str) else format(value, found[2] or "").replace("-", "−")
    return PLACEHOLDER.sub(formatted, text)


def notebook(claim: Claim) -> str:
    """Return the path of a claim's notebook, "" if there is none."""
    return "".join(str(x.relative_to(ROOT)) for x in ROOT.glob(f"notebooks/{claim.notebook}_*.ipynb"))


def check(text: str, tests: dict[str, set[str]], values: dict[str, object], stored: list[dict]):
    """ValueError unless the papers' files, tests, rules, notebooks and stored rows fit together."""
    claims = sum(parse(text).values(), [])
    ids = [claim.id for claim in claims]
    decided = {(x.id, model, x.rule) for x in claims if x.rule for model in SHIPPED}
    wrong = {
        "claims that are there twice": {name for name in ids if ids.count(name) > 1},
        "claims without a test": {x.id for x in claims if x.verdict != UNTESTED} - tests.keys(),
        "markers of no claim": tests.keys() - ids,
        "claims with a rule in words or in code alone": {x.id for x in claims if x.rule} ^ CLAIMS.keys(),
        "claims whose notebook is not there": {x.id for x in claims if x.notebook and not notebook(x)},
        "values that no test recorded": {name for name, _ in PLACEHOLDER.findall(text)} - values.keys(),
        "claims of which experiments/stored/claims.json has no row, or one of another rule or model":
            {name for name, *_ in decided ^ {(x["claim"], x["model"], x["rule"]) for x in stored}},
    }
    wrong = [f"{what}: {', '.join(sorted(which))}" for what, which in wrong.items() if which]
    if wrong:
        raise ValueError("; ".join(wrong))


def section(claim: Claim, tests: set[str], found: list[dict]) -> tuple[str, str]:
    """Return a claim's row in the first table, and its section, from its tests and its stored rows."""
    files = groupby(sorted(tests), key=lambda test: test.partition("::")[0])
    files = {file: ", ".join(f"`{test.partition('::')[2]}`" for test in those) for file, those in files}
    links = ", ".join(f"[{Path(file).stem}]({file})" for file in files)
    sources = [f"- [{file}]({file}): {names}" for file, names in files.items()]
    if book := notebook(claim):
        sources.append(f"- [{book}]({book})")

    verdict, verdicts, judged = claim.verdict, [row["verdict"] for row in found], []
    if found:
        judged = [claim.rule, f"```\n{table(found)}\n```"]
    if len({*verdicts}) > 1:
        verdict = f"{verdict} (built); {verdicts[1]} (learned)"
    cells = [f"[{claim.id}](#{claim.id.lower()}) {claim.says}", verdict, *(verdicts or "––"), claim.number,
             links, f"[{claim.notebook}]({book})" if book else ""]
    parts = [f"### {claim.id}", claim.says, f"**{verdict.capitalize()}.** {claim.number}",
             claim.details, *judged, "\n".join(sources)]
    row = " | ".join(cell.replace("|", "\\|") for cell in cells)
    return f"| {row} |", "\n\n".join(filter(None, parts))


def page(recorded: list[tuple[str, str, object]], stored: list[dict]) -> str:
    """Return CLAIMS.md. ValueError if something is missing or unknown.

    recorded: a test's node id, and ("claim", "S3") of its marker or ("S3.draws", 80) of what it measured.
    stored: rows that `python -m nanollm claims` wrote of the two decoders.
    """
    tests, values = {}, {}
    for node, name, value in recorded:
        if name == "claim":
            tests.setdefault(value, set()).add(node.partition("[")[0])
        elif values.setdefault(name, value) != value:
            raise ValueError(f"{name} is {values[name]} in one test and {value} in {node}")
    check(texts(), tests, values, stored)

    rows = [f"| claim | verdict | {' | '.join(SHIPPED)} | number | tests | notebook |",
            "|---" * (5 + len(SHIPPED)) + "|"]
    sections = []
    for paper, claims in parse(filled(texts(), values)).items():
        sections.append(f"## {paper}")
        for claim in claims:
            found = [row for row in stored if row["claim"] == claim.id]
            row, text = section(claim, tests.get(claim.id, set()), found)
            rows.append(row)
            sections.append(text)
    head = f"# Claims of the papers\n\n{(FOLDER / 'head.md').read_text()}"
    return "\n\n".join([head + "\n" + "\n".join(rows), *sections]) + "\n"


def write_or_compare(recorded: list[tuple[str, str, object]], write: bool, file=ROOT / "CLAIMS.md") -> str:
    """Write CLAIMS.md, or raise a ValueError if it is not what would be written. Return what was done."""
    text = page(recorded, json.loads((ROOT / "experiments" / "stored" / "claims.json").read_text())["rows"])
    if write:
        file.write_text(text)
    elif not file.exists() or file.read_text() != text:
        raise ValueError(f"{file.name} is not what these tests would write; run pytest --write-claims")
    return f"{file.name} is {'written' if write else 'what the tests say'}"
