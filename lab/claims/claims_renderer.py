"""Lay out the claims as text: the command's tables, and CLAIMS.md with all numbers.

Each paper has a file beside this one: `# Paper`, the version that was read, symbols, then for each
claim

    ## S3 · holds after a fix · notebook 03
    Theorem 3.1: attended to now, attended to next.
    Rule: the rule in words, if a trained model decides the claim; rules.py has it as code.
    > The deciding number, one line: the smallest ε of {S3.draws} draws is {S3.smallest_eps:.2f}.

    Details.

If a trained model decides the claim, its numbers stand in lab/stored/claims.json, by name: on
SmolLM2 {P7.heads with a lower L:.2f} ± {P7.heads with a lower L ±:.2f}, on another decoder
{P7.heads with a lower L @built:.2f}. Other numbers are recorded by tests that are marked
`@pytest.mark.claim("S3")`: note("S3", draws=80, smallest_eps=x).
"""

from itertools import groupby
import json
from pathlib import Path
import re
from textwrap import fill, indent
from typing import NamedTuple

from lab.claims.rules import CLAIMS
from lab.claims.subject import HOLDS, NOT, OPEN, UNTESTED
from lab.table import text_table
from nanollm import SHIPPED
from nanollm.gguf import SMOLLM2

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MODELS = SMOLLM2, *SHIPPED
VERDICTS = HOLDS, "holds after a fix", NOT, UNTESTED, OPEN
CLAIM = re.compile(
    rf"([A-Z]\d+) · ({'|'.join(VERDICTS)})(?: · notebook (\d\d))?\n"
    r"(.+)\n(Rule.+\n)?> (.+)\n((?s:.*))"
)
PLACEHOLDER = re.compile(r"\{([A-Z]\d+\.[^{}:]+)(?::([^{}]*))?\}")


class Claim(NamedTuple):
    id: str
    verdict: str  # on SmolLM2, if a model decides it
    notebook: str  # "03"
    says: str
    rule: str  # "" if no model decides it
    number: str
    details: str

    @property
    def lesson(self) -> str:
        """Return the path of the claim's notebook, or "" without one."""
        books = ROOT.glob(f"notebooks/{self.notebook}_*.ipynb")
        return "".join(str(book.relative_to(ROOT)) for book in books)


def texts() -> str:
    """Return all papers' files, one after the other."""
    files = [file for file in sorted(FOLDER.glob("*.md")) if file.stem != "head"]
    return "\n".join(file.read_text() for file in files)


def parse(text: str) -> dict[str, list[Claim]]:
    """Return each paper's claims; the keys are the texts before the first claim."""
    papers = {}
    for paper in re.split(r"^# ", text, flags=re.M)[1:]:
        head, *parts = re.split(r"^## ", paper, flags=re.M)
        claims = []
        for part in parts:
            found = CLAIM.fullmatch(part)
            if not found:
                raise ValueError(
                    f"'## {part.splitlines()[0]}' must be '## ID · verdict · notebook NN', "
                    "then the claim's line, its 'Rule' line if any, and '> ' with the number"
                )
            claims.append(Claim(*(x.strip() for x in found.groups(""))))
        papers[head.strip()] = claims
    return papers


def listed() -> dict[str, Claim]:
    """Return every claim by its ID."""
    return {claim.id: claim for claims in parse(texts()).values() for claim in claims}


# ---- the command's tables ---


def table(judged: list[dict]) -> str:
    """Return a claim's verdicts and numbers as a table with a column for each model."""
    size = "{documents} documents of {tokens} tokens".format(**judged[0])
    rows = [
        [size, *(row["model"] for row in judged)],
        ["verdict by the rule", *(row["verdict"] for row in judged)],
    ]
    for name in dict.fromkeys(name for row in judged for name in row["numbers"]):
        cells = [name]
        for row in judged:
            number = row["numbers"].get(name)
            cells.append("{:.3g} ± {:.1g}".format(*number) if number else "")
        rows.append(cells)
    why = [f"{row['model']}: {row['why']}" for row in judged if row["why"]]
    return "\n".join([text_table(rows, [36] + [16] * len(judged)), *why])


def show(rows: list[dict], rule: bool = False) -> str:
    """Return each claim of the command's rows with its table, and if asked for with its rule."""
    texts = []
    for _, group in groupby(rows, key=lambda row: row["claim"]):
        judged = list(group)
        first = judged[0]
        claim = f"{first['claim']}  {first['says']}"
        lines = [fill(claim, 100, subsequent_indent="    ")]
        if rule:
            lines.append(indent(fill(first["rule"], 96), "    "))
        lines.append(indent(table(judged), "    "))
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


# ---- CLAIMS.md ---


def filled(text: str, values: dict[str, object]) -> str:
    """Replace each {ID.name:format} by the recorded value of that name."""

    def formatted(found: re.Match) -> str:
        number = format(values[found[1]], found[2] or "")
        return number.replace("-", "−").replace("%", " %")

    return PLACEHOLDER.sub(formatted, text)


def check(
    text: str, tests: dict[str, set[str]], values: dict[str, object], stored: list[dict]
):
    """Raise a ValueError unless files, tests, rules, notebooks and stored rows fit together."""
    claims = sum(parse(text).values(), [])
    ids = {claim.id for claim in claims}
    ruled = {claim.id: claim.rule for claim in claims if claim.rule}
    tested = {claim.id for claim in claims if claim.verdict != UNTESTED} - ruled.keys()
    recorded = {name for name, _ in PLACEHOLDER.findall(text)}
    half_ruled = ruled.keys() ^ CLAIMS.keys()
    decided = {(name, model, rule) for name, rule in ruled.items() for model in MODELS}
    rows = {(row["claim"], row["model"], row["rule"]) for row in stored}
    wrong = {
        "claims without a test": tested - tests.keys(),
        "markers of unknown claims": tests.keys() - ids,
        "claims with a rule only in words or only in code": half_ruled,
        "values that nobody recorded": recorded - values.keys(),
        "claims without a row in lab/stored/claims.json, or with another rule or model there": {
            name for name, *_ in decided ^ rows
        },
    }
    messages = [f"{what}: {', '.join(sorted(x))}" for what, x in wrong.items() if x]
    if messages:
        raise ValueError("; ".join(messages))


def of_claim(claim: Claim, tests: set[str], rows: list[dict]) -> tuple[str, str]:
    """Return a claim's row of the table, and its details with links to its tests and notebook."""
    by_rule = {row["model"]: row["verdict"] for row in rows}
    decided = ""
    if len({*by_rule.values()}) > 1:
        each = "; ".join(f"*{model}*: {by_rule[model]}" for model in MODELS)
        decided = f"{claim.rule} The verdict turns with the decoder. {each}."
    elif rows:
        decided = f"{claim.rule} All three decoders: {rows[0]['verdict']}."

    cells = (
        f"[{claim.id}](#{claim.id.lower()})",
        claim.says,
        claim.verdict,
        *(by_rule.get(model, "") for model in MODELS),
        claim.number,
    )
    row = " | ".join(cell.replace("|", r"\|") for cell in cells)

    files = sorted({test.partition("::")[0] for test in tests})
    links = [f"[{Path(file).stem}]({file})" for file in files]
    if claim.lesson:
        links.append(f"[notebook {claim.notebook}]({claim.lesson})")
    parts = f"### {claim.id}", claim.details, decided, "; ".join(links)
    return f"| {row} |", "\n\n".join(filter(None, parts))


def page(recorded: list[tuple[str, str, object]], stored: list[dict]) -> str:
    """Return the text of CLAIMS.md; ValueError if something is missing or unknown.

    recorded: a test's node id, and ("claim", "S3") of its marker or ("S3.draws", 80) of what it
    measured. stored: rows that `python -m nanollm claims` wrote of the three decoders.
    """
    tests = {}
    values = {}
    for row in stored:
        decoder = "" if row["model"] == SMOLLM2 else f" @{row['model']}"
        for number, (x, error) in row["numbers"].items():
            name = f"{row['claim']}.{number}{decoder}"
            values[name] = x
            values[f"{name} ±"] = error
    for node, name, value in recorded:
        if name == "claim":
            tests.setdefault(value, set()).add(node.partition("[")[0])
        elif values.setdefault(name, value) != value:
            raise ValueError(
                f"{name} is {values[name]} in one test and {value} in {node}; "
                "give one of them another name"
            )
    check(texts(), tests, values, stored)
    parts = [f"# Claims of the papers\n\n{(FOLDER / 'head.md').read_text().strip()}"]
    header = f"| ID | claim | verdict | {' | '.join(MODELS)} | number |\n|{'---|' * 7}"
    for paper, claims in parse(filled(texts(), values)).items():
        lines = [header]
        details = []
        for claim in claims:
            rows = [row for row in stored if row["claim"] == claim.id]
            line, detail = of_claim(claim, tests.get(claim.id, set()), rows)
            lines.append(line)
            details.append(detail)
        parts += [f"## {paper}", "\n".join(lines), *details]
    return "\n\n".join(parts) + "\n"


def write_or_compare(
    recorded: list[tuple[str, str, object]], write: bool, file=ROOT / "CLAIMS.md"
) -> str:
    """Write CLAIMS.md, or raise a ValueError if it is stale; return a message."""
    stored = json.loads((ROOT / "lab" / "stored" / "claims.json").read_text())
    text = page(recorded, stored["rows"])
    if write:
        file.write_text(text)
    elif not file.exists() or file.read_text() != text:
        raise ValueError(
            f"{file.name} is stale: these tests would write another text; "
            "run pytest --write-claims"
        )
    return f"{file.name} is {'written' if write else 'up to date'}"
