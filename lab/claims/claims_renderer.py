"""Read the claims, and lay out the tables of python -m nanollm claims.

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
from pathlib import Path
import re
from textwrap import fill, indent
from typing import NamedTuple

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


class Claim(NamedTuple):
    id: str
    verdict: str  # on SmolLM2, if a model decides it
    notebook: str  # "03"
    says: str
    rule: str  # "" if no model decides it
    number: str
    details: str


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
