"""What `python -m nanollm claims` found on the two decoders that ship, as CLAIMS.md shows it.

The findings stand in experiments/stored/claims.json, the claims and their rules in experiments/claims.py.
That file is read, not imported, as importing torch takes seconds.
"""
import ast
import json
from pathlib import Path
import re

MODELS = "built", "learned"
STORED = "experiments/stored/claims.json"


class ClaimError(ValueError):
    """What is wrong with the claims, in one line."""


def rules(source: str) -> dict[str, dict[str, str]]:
    """Of each claim that a model decides what it says and its rule: its docstring's two paragraphs."""
    told = {f.name: ast.get_docstring(f).split("\n\n") for f in ast.parse(source).body
            if isinstance(f, ast.FunctionDef) and re.fullmatch(r"[A-Z]\d+", f.name)}
    return {name: {"says": " ".join(says.split()), "rule": " ".join(rule.split())}
            for name, (says, rule) in told.items()}


def read(root: Path) -> dict[str, dict[str, dict]]:
    """A repository's findings: claim → decoder → a row of the stored file."""
    source, stored = root / "experiments/claims.py", root / STORED
    claims = rules(source.read_text()) if source.exists() else {}
    if claims and not stored.exists():
        raise stale("is not there")
    return by_claim(stored.read_text(), claims) if claims else {}


def by_claim(stored: str, claims: dict[str, dict[str, str]]) -> dict[str, dict[str, dict]]:
    """ClaimError unless the rows are of these claims, in these words, on both decoders and no other."""
    found: dict[str, dict] = {}
    try:
        for each in json.loads(stored):
            found.setdefault(each["claim"], {})[each["model"]] = each
    except (ValueError, TypeError, KeyError):
        raise stale("is damaged") from None
    for claim in claims:
        if missing := [name for name in MODELS if name not in found.get(claim, {})]:
            raise stale(f"has no verdict on {claim} of the decoder {missing[0]}")
    for claim, models in found.items():
        if claim not in claims:
            raise stale(f"judges {claim}, which is no claim that a model decides")
        if more := models.keys() - MODELS:
            raise stale(f"judges {claim} on {min(more)}, which does not ship")
        if any(each.get(part) != words for each in models.values() for part, words in claims[claim].items()):
            raise stale(f"was made when {claim} had other words or another rule")
    return found


def stale(what: str) -> ClaimError:
    return ClaimError(f"{STORED} {what}; python -m experiments.render claims")


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def judged(verdict: str, found: dict[str, dict]) -> tuple[str, str]:
    """A claim's verdict, which names the decoders if they disagree, and below it the rule and its numbers.

    `verdict` is the template's, of the first decoder. That of the second is the rule's.
    """
    if not found:
        return verdict, ""
    built, learned = (found[name]["verdict"] for name in MODELS)
    told = f"{found[MODELS[0]]['rule']}\n\n{table(found)}"
    if built == learned:
        return verdict, told
    told += f"\n\nThe two decoders disagree: {built} (built), {learned} (learned)."
    return f"{verdict} (built); {learned} (learned)", told


def table(found: dict[str, dict]) -> str:
    """The numbers of a claim ± a standard error, a column a decoder."""
    columns = [found[name] for name in MODELS]
    of = "{documents} documents of {tokens} tokens".format(**columns[0])
    rows = [row(of, *MODELS), "|---" * (1 + len(MODELS)) + "|",
            row("by the rule", *(column["verdict"] for column in columns))]
    for number in dict.fromkeys(name for column in columns for name in column["numbers"]):
        rows.append(row(number, *(shown(column["numbers"].get(number)) for column in columns)))
    if any(column["why"] for column in columns):
        rows.append(row("why", *(column["why"] for column in columns)))
    return "\n".join(rows)


def shown(number: list[float] | None) -> str:
    return "{:.3g} ± {:.1g}".format(*number).replace("-", "−") if number else ""
