"""Read the claims, and lay out the tables of python -m nanollm claims.

Each paper has a file beside this one: `# Paper`, the version that was read, symbols, then for each
claim

    ## S3 · holds after a fix · notebook 03
    Theorem 3.1: attended to now, attended to next.
    Rule: the rule in words, if a trained model decides the claim; rules.py has it as code.
    > The deciding number, one line: the smallest ε of {S3.draws} draws is {S3.smallest_eps:.2f}.

    Details.

If a trained model decides the claim, its verdict is *by its rule*, unless the file says otherwise.
Its numbers stand in lab/stored/claims.json, by name: on SmolLM2 with a quarter of the entries
{P7.heads with a lower L:.2f} ± {P7.heads with a lower L ±:.2f}, with a sixteenth
{P7.heads with a lower L at 6.25:.2f}, on another decoder {P7.heads with a lower L @built:.2f}.
Other numbers are recorded by tests that are marked `@pytest.mark.claim("S3")`:
note("S3", draws=80, smallest_eps=x).
"""

from itertools import groupby
from pathlib import Path
import re
from textwrap import fill, indent
from typing import NamedTuple

from lab.claims.subject import HOLDS, NOT, OPEN, UNFIT
from lab.table import text_table
from nanollm import SHIPPED
from nanollm.gguf import SMOLLM2

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MODELS = SMOLLM2, *SHIPPED
RULED = "by its rule"
UNTESTED = "not testable here"
# what the paper says of models with billions of parameters
MEASURED = "measured at 135 M"
VERDICTS = RULED, HOLDS, "holds after a fix", NOT, UNTESTED, MEASURED
MARKS = {HOLDS: "✓", NOT: "✗", OPEN: "?", UNFIT: "–"}
LEGEND = "; ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
QUARTER = None, 0.25  # the keep ratios whose numbers RESULTS.md shows
CLAIM = re.compile(
    rf"([A-Z]\d+) · ({'|'.join(VERDICTS)})(?: · notebook (\d\d))?\n"
    r"(.+)\n(Rule.+\n)?> (.+)\n((?s:.*))"
)


class Claim(NamedTuple):
    id: str
    verdict: str
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


# ---- verdicts at several keep ratios ----


def percent(keep: float | None) -> str:
    return f"{100 * keep:g}" if keep else ""


def marks(rows: list[dict]) -> str:
    """Return a model's verdicts on a claim, a mark for each keep ratio, such as ✓✓?✗."""
    return "".join(MARKS[row["verdict"]] for row in rows)


def curve(rows: list[dict]) -> str:
    """Return a model's verdicts on a claim in words: where the claim holds."""
    found = {row["keep_ratio"]: row["verdict"] for row in rows}
    found = {keep: verdict for keep, verdict in found.items() if verdict != UNFIT}
    held = [percent(keep) for keep, verdict in found.items() if verdict == HOLDS]
    if not held:
        return NOT if NOT in found.values() else OPEN
    if len(held) == len(found):
        return HOLDS
    *most, last = held
    return f"holds at {' and '.join([', '.join(most)] * bool(most) + [last])} %"


# ---- tables ----


def table(judged: list[dict], keeps: tuple | None = None) -> str:
    """Return a claim's verdicts and numbers as a table with a column for each model.

    keeps: the keep ratios whose numbers are shown; None for all.
    """
    found = {(row["model"], row["keep_ratio"]): row for row in judged}
    models, ratios = ([*dict.fromkeys(x)] for x in zip(*found))
    at = ", ".join(filter(None, map(percent, ratios)))
    size = "{documents} documents of {tokens} tokens".format(**judged[0])
    verdicts = [f"verdict at {at} %" if at else "verdict"]
    for model in models:
        verdicts.append(marks([row for row in judged if row["model"] == model]))
    rows = [[size, *models], verdicts]
    for name in dict.fromkeys(name for row in judged for name in row["numbers"]):
        for keep in keeps or ratios:
            cells = [f"{name}, {percent(keep)} %" if keep else name]
            for model in models:
                row = found.get((model, keep), {"numbers": {}})
                number = row["numbers"].get(name)
                cells.append("{:.3g} ± {:.1g}".format(*number) if number else "")
            if any(cells[1:]):
                rows.append(cells)
    why = dict.fromkeys(f"{row['model']}: {row['why']}" for row in judged if row["why"])
    return "\n".join([text_table(rows, [36] + [16] * len(models)), *why])


def show(rows: list[dict], rule: bool = False) -> str:
    """Return each claim of the command's rows with its table.

    rule: with the claim's rule and the numbers at all keep ratios; else those at a quarter.
    """
    claims = listed()
    texts = []
    for name, group in groupby(rows, key=lambda row: row["claim"]):
        claim = claims[name]
        title = f"{name}  {claim.says}"
        lines = [fill(title, 100, subsequent_indent="    ")]
        if rule:
            lines.append(indent(fill(claim.rule, 96), "    "))
        shown = table([*group], None if rule else QUARTER)
        lines.append(indent(shown, "    "))
        texts.append("\n".join(lines))
    return "\n\n".join(texts)
