"""Write CLAIMS.md from the files of claims, the stored findings and what the tests record."""

import json
from pathlib import Path
import re

from lab.claims.claims_renderer import (
    FOLDER,
    MODELS,
    QUARTER,
    RULED,
    UNTESTED,
    Claim,
    curve,
    marks,
    parse,
    percent,
    texts,
)
from lab.claims.rules import CLAIMS, keep_ratios
from nanollm.gguf import SMOLLM2

ROOT = Path(__file__).parents[2]
PLACEHOLDER = re.compile(r"\{([A-Z]\d+\.[^{}:]+)(?::([^{}]*))?\}")


def lesson(claim: Claim) -> str:
    """Return the path of the claim's notebook, or "" without one."""
    books = ROOT.glob(f"notebooks/{claim.notebook}_*.ipynb")
    return "".join(str(book.relative_to(ROOT)) for book in books)


def filled(text: str, values: dict[str, object]) -> str:
    """Replace each {ID.name:format} by the recorded value of that name."""

    def formatted(found: re.Match) -> str:
        number = format(values[found[1]], found[2] or "")
        return number.replace("-", "−").replace("%", " %")

    return PLACEHOLDER.sub(formatted, text)


def check(
    text: str, tests: dict[str, set[str]], values: dict[str, object], stored: list[dict]
):
    """Raise a ValueError unless files, tests, rules and stored rows fit together."""
    claims = sum(parse(text).values(), [])
    ids = {claim.id for claim in claims}
    ruled = {claim.id: claim.rule for claim in claims if claim.rule}
    tested = {claim.id for claim in claims if claim.verdict != UNTESTED} - ruled.keys()
    recorded = {name for name, _ in PLACEHOLDER.findall(text)}
    half_ruled = ruled.keys() ^ CLAIMS.keys()
    decided = {
        (name, model, keep, rule)
        for name, rule in ruled.items()
        for model in MODELS
        for keep in keep_ratios(name)
    }
    keys = "claim", "model", "keep_ratio", "rule"
    rows = {tuple(row[key] for key in keys) for row in stored}
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
    by_model = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row)
    verdict = claim.verdict
    if verdict == RULED:
        verdict = curve(by_model[SMOLLM2])

    cells = (
        f"[{claim.id}](#{claim.id.lower()})",
        claim.says,
        verdict,
        *(marks(by_model.get(model, [])) for model in MODELS),
        claim.number,
    )
    row = " | ".join(cell.replace("|", r"\|") for cell in cells)

    files = sorted({test.partition("::")[0] for test in tests})
    links = [f"[{Path(file).stem}]({file})" for file in files]
    if lesson(claim):
        links.append(f"[notebook {claim.notebook}]({lesson(claim)})")
    parts = f"### {claim.id}", claim.details, claim.rule, "; ".join(links)
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
        keep = row["keep_ratio"]
        at = "" if keep in QUARTER else f" at {percent(keep)}"
        for number, (x, error) in row["numbers"].items():
            name = f"{row['claim']}.{number}{at}{decoder}"
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
