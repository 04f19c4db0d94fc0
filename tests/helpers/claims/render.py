"""CLAIMS.md from the papers' templates (*.md beside this file) and from what tests recorded.

A template is one paper's: `# Paper`, which version was read, then for each claim

    ## S3 · holds after a fix · notebook 03
    Theorem 3.1: attended to now, attended to next.
    > One line with the number: the smallest ε of {S3.draws} draws is {S3.smallest_eps:.2f}.

    Details.

`{S3.smallest_eps:.2f}` is what a test recorded with `note("S3", smallest_eps=value)`, formatted.
What `python -m nanollm claims` finds of a claim is not in the template: findings.py reads it.
"""
from pathlib import Path
import re
from typing import NamedTuple

from claims.findings import MODELS, ClaimError, judged, read, row

VERDICTS = "holds", "holds after a fix", "does not hold", "not testable here", "undecided"
KEY = re.compile(r"[A-Z]\d+\.\w+")
PLACEHOLDER = re.compile(r"\{([A-Z]\d+\.\w+)(?::([^{}]*))?\}")
HEAD = """# Claims of the papers

Written by `pytest --write-claims`: words from `tests/helpers/claims/`, every number from the tests named.
A claim holds, holds after a fix, does not hold, is undecided, or is not testable here; the number says why.
A notebook has the figures, and what takes too long for a test.

The papers measured models of billions of parameters. What is claimed of those alone is not testable here: how
much of the full cache's quality is left on their benchmarks, which share of their tokens does something, how
fast they are. The number of our decoders stands in the row. A comparison of two methods on one model, a
condition of a theorem, and needles, which our decoders find as theirs do, are judged.

`python -m nanollm claims` judges two trained decoders by rules, in the columns *built* and *learned*.
The heads that retrieve were built into the start of the first. Where – stands, no model decides the claim.
Verdict and number are of *built*. If the rule decides otherwise on *learned*, the verdict names both.
"""


class Claim(NamedTuple):
    id: str
    verdict: str
    notebooks: list[str]  # "03"
    title: str
    number: str
    details: str


def parse(text: str, name: str) -> tuple[str, list[Claim]]:
    """A template's paper and its claims; `name` is said in errors."""
    title, *parts = re.split(r"^## ", text, flags=re.M)
    if not title.startswith("# "):
        raise ClaimError(f"{name} must begin with one line '# Paper', then '## ID · verdict · notebook NN'")
    return title[2:].strip(), [parse_claim(part, name) for part in parts]


def parse_claim(part: str, name: str) -> Claim:
    heading, _, rest = part.partition("\n")
    found = re.fullmatch(r"([A-Z]\d+) · ([^·]+?)(?: · notebooks? (\d\d(?:, \d\d)*))?", heading.strip())
    if not found or found[2] not in VERDICTS:
        raise ClaimError(f"{name}: '## {heading}' must be '## ID · verdict · notebook NN', "
                         f"the verdict one of {', '.join(VERDICTS)}")
    body = re.fullmatch(r"\s*(.+?)\n+((?:>[^\n]*(?:\n|$))+)(.*)", rest, re.S)
    if not body or "\n\n" in body[1]:
        raise ClaimError(f"{name}: {found[1]} needs its claim in a paragraph, then '> …' with the number")
    number = " ".join(line.lstrip("> ").strip() for line in body[2].splitlines())
    notebooks = re.findall(r"\d\d", found[3] or "")
    return Claim(found[1], found[2], notebooks, " ".join(body[1].split()), number, body[3].strip())


def collect(properties: list[tuple[str, list[tuple[str, object]]]]) -> tuple[dict, dict]:
    """From every test's node id and what it recorded, its markers among it as ("claim", ID): the node ids by
    claim, and the values by key ("S3.smallest_eps").
    """
    tests, values = {}, {}
    for node, recorded in properties:
        for key, value in recorded:
            if key == "claim":
                tests.setdefault(value, []).append(node)
            elif KEY.fullmatch(key) and values.setdefault(key, value) != value:
                raise ClaimError(f"{key} is {values[key]} in one test and {value} in {node}")
    return tests, values


def check(claims: list[Claim], tests: dict, values: dict, notebooks: dict, findings: dict):
    names = [claim.id for claim in claims]
    asked = {key for claim in claims for key, _ in PLACEHOLDER.findall("\n".join(claim[3:]))}
    wrong = {
        "claims that are there twice": [name for name in names if names.count(name) > 1],
        "claims without a test": [claim.id for claim in claims
                                  if claim.id not in tests and claim.verdict != VERDICTS[3]],
        "markers without a claim in tests/helpers/claims/": tests.keys() - names,
        "findings without a claim in tests/helpers/claims/": findings.keys() - names,
        "values that no test recorded": asked - values.keys(),
        "notebooks that are not there": {n for claim in claims for n in claim.notebooks} - notebooks.keys(),
    }
    wrong = [f"{what}: {', '.join(sorted(set(who)))}" for what, who in wrong.items() if who]
    if wrong:
        raise ClaimError("; ".join(wrong))


def fill(text: str, values: dict[str, object]) -> str:
    def one(found: re.Match) -> str:
        value = values[found[1]]
        try:
            return value if isinstance(value, str) else format(value, found[2] or "").replace("-", "−")
        except (TypeError, ValueError) as error:
            raise ClaimError(f"{found[0]}, recorded as {value!r}: {error}") from error
    return PLACEHOLDER.sub(one, text)


def entry(claim: Claim, nodes: list[str], values: dict, notebooks: dict, found: dict) -> tuple[str, str]:
    """A claim's row of the table, and its section; found: of each decoder, what findings.py read."""
    title, number, details = (fill(text, values) for text in claim[3:])
    files: dict[str, set] = {}
    for node in nodes:
        file, _, test = node.partition("[")[0].partition("::")
        files.setdefault(file, set()).add(f"`{test}`")

    links = ", ".join(f"[{Path(file).stem}]({file})" for file in sorted(files))
    books = ", ".join(f"[{n}]({notebooks[n]})" for n in claim.notebooks)
    verdict, rule = judged(claim.verdict, found)
    by_rule = [found[name]["verdict"] if found else "–" for name in MODELS]
    cells = row(f"[{claim.id}](#{claim.id.lower()}) {title}", verdict, *by_rule, number, links, books)

    sources = [f"- [{file}]({file}): {', '.join(sorted(files[file]))}" for file in sorted(files)]
    sources += [f"- [{notebooks[n]}]({notebooks[n]})" for n in claim.notebooks]
    verdict = f"**{verdict.capitalize()}.** {number}"
    parts = f"### {claim.id}", title, verdict, details, rule, "\n".join(sources)
    return cells, "\n\n".join(filter(None, parts))


def render(papers: list[tuple[str, list[Claim]]], properties, notebooks: dict[str, str],
           findings: dict[str, dict]) -> str:
    """CLAIMS.md; notebooks: "03" → the file; findings: as findings.py reads them."""
    tests, values = collect(properties)
    check([claim for _, claims in papers for claim in claims], tests, values, notebooks, findings)
    heads = "claim", "verdict", *MODELS, "number", "tests", "notebook"
    rows, sections = [row(*heads), "|---" * len(heads) + "|"], []
    for paper, claims in papers:
        sections.append(f"## {paper}")
        for claim in claims:
            nodes, found = tests.get(claim.id, []), findings.get(claim.id, {})
            cells, section = entry(claim, nodes, values, notebooks, found)
            rows.append(cells)
            sections.append(section)
    return "\n\n".join([HEAD + "\n" + "\n".join(rows), *sections]) + "\n"


def from_folder(root: Path, properties) -> str:
    """What CLAIMS.md of a repository should say."""
    templates = sorted(root.glob("tests/helpers/claims/*.md"))
    papers = [parse(file.read_text(), f"tests/helpers/claims/{file.name}") for file in templates]
    notebooks = {file.name[:2]: f"notebooks/{file.name}" for file in root.glob("notebooks/[0-9][0-9]*.ipynb")}
    return render(papers, properties, notebooks, read(root))
