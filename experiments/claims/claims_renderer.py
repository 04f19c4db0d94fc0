"""Lay out the claims as text: the command's tables, and CLAIMS.md with the numbers that tests record.

Each paper has a file beside this one: `# Paper`, the version that was read, symbols, then for each claim

    ## S3 · holds after a fix · notebook 03
    Theorem 3.1: attended to now, attended to next.
    Rule: the rule in words, if a trained model decides the claim; rules.py has it as code.
    > The deciding number, one line: the smallest ε of {S3.draws} draws is {S3.smallest_eps:.2f}.

    Details.

A test marked `@pytest.mark.claim("S3")` records the numbers: note("S3", draws=80, smallest_eps=x).
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
NAMED = 3  # tests of a claim that are named; of more, only the files
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
    """Return each paper's claims; the keys are the texts before the first claim."""
    papers = {}
    for paper in re.split(r"^# ", text, flags=re.M)[1:]:
        head, *parts = re.split(r"^## ", paper, flags=re.M)
        papers[head.strip()] = claims = []
        for part in parts:
            if not (found := CLAIM.fullmatch(part)):
                raise ValueError(f"'## {part.splitlines()[0]}' must be '## ID · verdict · notebook NN', "
                                 "then the claim's line, its 'Rule' line if any, and '> ' with the number")
            claims.append(Claim(*((x or "").strip() for x in found.groups())))
    return papers


def listed() -> dict[str, Claim]:
    """Return every claim by its ID."""
    return {claim.id: claim for claims in parse(texts()).values() for claim in claims}


# ---- the command's tables ---

def table(judged: list[dict]) -> str:
    """Return a claim's verdicts and numbers as a table with a column for each model."""
    size = "{documents} documents of {tokens} tokens".format(**judged[0])
    rows = [[size, *(row["model"] for row in judged)],
            ["verdict by the rule", *(row["verdict"] for row in judged)]]
    for name in dict.fromkeys(name for row in judged for name in row["numbers"]):
        numbers = [row["numbers"].get(name) for row in judged]
        rows.append([name, *("{:.3g} ± {:.1g}".format(*x) if x else "" for x in numbers)])
    why = [f"{row['model']}: {row['why']}" for row in judged if row["why"]]
    return "\n".join([text_table(rows, [36] + [16] * len(judged)), *why])


def show(rows: list[dict], rule: bool = False) -> str:
    """Return each claim of the command's rows with its table, and if asked for with its rule."""
    texts = []
    for _, judged in groupby(rows, key=lambda row: row["claim"]):
        judged = list(judged)
        texts.append(fill("{claim}  {says}".format(**judged[0]), 100, subsequent_indent="    ") + "\n")
        if rule:
            texts[-1] += fill(judged[0]["rule"], 100, initial_indent="    ", subsequent_indent="    ") + "\n"
        texts[-1] += indent(table(judged), "    ")
    return "\n\n".join(texts)


# ---- CLAIMS.md ---

def filled(text: str, values: dict[str, object]) -> str:
    """Replace each {ID.name:format} by the recorded value of that name."""
    def formatted(found: re.Match) -> str:
        value = values[found[1]]
        return value if isinstance(value, str) else format(value, found[2] or "").replace("-", "−")
    return PLACEHOLDER.sub(formatted, text)


def notebook(claim: Claim) -> str:
    """Return the path of a claim's notebook, or "" without one."""
    return "".join(str(x.relative_to(ROOT)) for x in ROOT.glob(f"notebooks/{claim.notebook}_*.ipynb"))


def check(text: str, tests: dict[str, set[str]], values: dict[str, object], stored: list[dict]):
    """Raise a ValueError unless files, tests, rules, notebooks and stored rows fit together."""
    claims = sum(parse(text).values(), [])
    ids = [claim.id for claim in claims]
    decided = {(x.id, model, x.rule) for x in claims if x.rule for model in SHIPPED}
    wrong = {
        "claims that appear twice": {name for name in ids if ids.count(name) > 1},
        "claims without a test": {x.id for x in claims if x.verdict != UNTESTED} - tests.keys(),
        "markers of unknown claims": tests.keys() - ids,
        "claims with a rule only in words or only in code": {x.id for x in claims if x.rule} ^ CLAIMS.keys(),
        "claims whose notebook does not exist": {x.id for x in claims if x.notebook and not notebook(x)},
        "values that no test recorded": {name for name, _ in PLACEHOLDER.findall(text)} - values.keys(),
        "claims without a row in experiments/stored/claims.json, or with another rule or model there":
            {name for name, *_ in decided ^ {(x["claim"], x["model"], x["rule"]) for x in stored}},
    }
    wrong = [f"{what}: {', '.join(sorted(which))}" for what, which in wrong.items() if which]
    if wrong:
        raise ValueError("; ".join(wrong))


def verdict(claim: Claim, rows: list[dict]) -> str:
    """Return a claim's verdict; both decoders' if their stored rows differ."""
    verdicts = [row["verdict"] for row in rows]
    return f"{claim.verdict} (built); {verdicts[1]} (learned)" if len({*verdicts}) > 1 else claim.verdict


def sources(claim: Claim, tests: set[str]) -> str:
    """Return a line with links to a claim's tests and its notebook."""
    files = [(file, [test.partition("::")[2] for test in those])
             for file, those in groupby(sorted(tests), key=lambda test: test.partition("::")[0])]
    few = len(tests) <= NAMED
    links = [f"[{Path(file).stem}]({file})" + (": " + ", ".join(f"`{name}`" for name in names) if few else
                                               f", {len(names)} test" + "s" * (len(names) > 1))
             for file, names in files]
    if book := notebook(claim):
        links.append(f"[notebook {claim.notebook}]({book})")
    return "; ".join(links)


def section(claim: Claim, tests: set[str], rows: list[dict]) -> str:
    """Return the details of a claim."""
    decided = ""
    if rows:
        verdicts = {row["verdict"]: f"*{row['model']}*" for row in rows}
        verdicts = {x: "both" for x in verdicts} if len(verdicts) == 1 else verdicts
        verdicts = "; ".join(f"{models}: {x}" for x, models in verdicts.items())
        decided = f"{claim.rule} {verdicts.capitalize()}."
    parts = f"### {claim.id}", claim.details, decided, sources(claim, tests)
    return "\n\n".join(filter(None, parts))


def of_paper(paper: str, claims: list[Claim], tests: dict[str, set[str]], stored: list[dict]) -> str:
    """Return a paper's table, a row a claim, and the details below it."""
    rows, sections = ["| ID | claim | verdict | number |", "|---" * 4 + "|"], []
    for claim in claims:
        judged = [row for row in stored if row["claim"] == claim.id]
        cells = f"[{claim.id}](#{claim.id.lower()})", claim.says, verdict(claim, judged), claim.number
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        sections.append(section(claim, tests.get(claim.id, set()), judged))
    return "\n\n".join([f"## {paper}", "\n".join(rows), *sections])


def page(recorded: list[tuple[str, str, object]], stored: list[dict]) -> str:
    """Return the text of CLAIMS.md; ValueError if something is missing or unknown.

    recorded: a test's node id, and ("claim", "S3") of its marker or ("S3.draws", 80) of what it measured.
    stored: rows that `python -m nanollm claims` wrote of the two decoders.
    """
    tests, values = {}, {}
    for node, name, value in recorded:
        if name == "claim":
            tests.setdefault(value, set()).add(node.partition("[")[0])
        elif values.setdefault(name, value) != value:
            raise ValueError(f"{name} is {values[name]} in one test and {value} in {node}; "
                             "give one of them another name")
    check(texts(), tests, values, stored)
    head = f"# Claims of the papers\n\n{(FOLDER / 'head.md').read_text().strip()}"
    papers = [of_paper(paper, claims, tests, stored)
              for paper, claims in parse(filled(texts(), values)).items()]
    return "\n\n".join([head, *papers]) + "\n"


def write_or_compare(recorded: list[tuple[str, str, object]], write: bool, file=ROOT / "CLAIMS.md") -> str:
    """Write CLAIMS.md, or raise a ValueError if it is stale; return a message."""
    text = page(recorded, json.loads((ROOT / "experiments" / "stored" / "claims.json").read_text())["rows"])
    if write:
        file.write_text(text)
    elif not file.exists() or file.read_text() != text:
        raise ValueError(f"{file.name} is stale: these tests would write another text; "
                         "run pytest --write-claims")
    return f"{file.name} is {'written' if write else 'up to date'}"
