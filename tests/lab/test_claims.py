"""The claims: verdicts follow numbers, the command runs on checkpoints, CLAIMS.md must be up to date."""

from dataclasses import make_dataclass
from functools import cache
import json
import os
from pathlib import Path
import re
import subprocess
import sys
from types import SimpleNamespace

import claims_plugin
import pytest
import torch

from common import checkpoint_of_two_layers
from foreign import foreign_checkpoint
from lab import command_line, registry
from lab.claims import claims_command, claims_renderer, rules
from lab.claims.claims_renderer import (
    PLACEHOLDER,
    listed,
    page,
    texts,
    write_or_compare,
)
from lab.claims.rules import CLAIMS, judge
from lab.claims.subject import (
    HOLDS,
    NOT,
    OPEN,
    UNFIT,
    UNTESTED,
    Subject,
    above,
    below,
    both,
    mean,
    over_texts,
    within,
)
from lab.tasks import Tasks
from methods.baselines.h2o import H2O
from methods.baselines.snap_kv import SnapKV
from methods.critical_kv import Critical
from methods.kv_reviver import KVReviver
from nanollm import SHIPPED
from nanollm.__main__ import main
from nanollm.cache import LayerCache

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "lab" / "stored" / "claims.json").read_text())["rows"]


# ---- rules ---


def around(x, spread=0.01):
    """Return ten numbers with this mean."""
    return x + spread * torch.linspace(-1, 1, 10)


def test_a_number_within_two_errors_of_the_limit_decides_nothing():
    assert [above((x, 0.1), 0.5) for x in (0.71, 0.69, 0.31, 0.29)] == [
        HOLDS,
        OPEN,
        OPEN,
        NOT,
    ]
    assert [below((x, 0.1), 0.5) for x in (0.71, 0.69, 0.31, 0.29)] == [
        NOT,
        OPEN,
        OPEN,
        HOLDS,
    ]
    assert [within((x, 0.1), 0.3) for x in (-0.6, -0.2, 0.0, 0.2, 0.6)] == [
        NOT,
        OPEN,
        HOLDS,
        OPEN,
        NOT,
    ]
    assert above((0.5, 0.0), 0.5) == OPEN  # all documents alike, and at the limit
    assert [both(OPEN, NOT), both(HOLDS, OPEN), both(HOLDS, UNTESTED)] == [
        NOT,
        OPEN,
        HOLDS,
    ]
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    assert over_texts(lambda x: x.mean(), x) == pytest.approx(mean(x.mean(1)), rel=0.15)


def each(function, items):
    return [*map(function, items)]


def parameters(n):
    return SimpleNamespace(
        parameters=lambda: iter([torch.empty(n - 5, device="meta"), torch.empty(5)])
    )


def kl(more=1.2, most=1.2, few=1.0, many=1.0, often=1.0, seldom=1.0):
    """Return a subject whose KL is 1 with the paper's shares and rate."""
    found = {(0.2, 0.4): more, (0.4, 0.3): most, (0.1, 0.2): few, (0.1, 0.6): many}

    def measured(Method, vague=0.1, recent=0.45, replace_rate=1.1):
        return around(
            found.get((vague, recent), 1.0)
            * {1.0: often, 1.5: seldom}.get(replace_rate, 1.0)
        )

    return SimpleNamespace(kl=measured)


def answers(reviver, h2o, n=10**9):
    right = {KVReviver: reviver, H2O: h2o, LayerCache: 0.9}
    found = lambda Method, *_, **options: around(right.get(Method, 0.0))
    return SimpleNamespace(model=parameters(n), answered=found, agnostic=found)


def likelihood(more, n=10**9, bits=0.0):
    """Return a subject whose −log p rises by `more`, and by `bits` if entries are also rounded."""
    rise = lambda Method, *_, **options: around(
        more + bits * (Method is rules.FourBits)
    )
    On = make_dataclass("On", ("model", "rise", "row", "documents"))
    return On(parameters(n), rise, lambda *_: around(1.0), 2)


def ranked(kl=lambda rank: rank):
    """Return a subject in which L rises from method to method, and the KL follows `kl`."""

    def found(name):
        rank = torch.full((10,), float(rules.COMPARED.index(name)))
        return dict(l1_alone=rank[:, None, None].expand(-1, 2, 4), kl=kl(rank))

    return SimpleNamespace(of_text=found)


@pytest.mark.parametrize(
    "claim, on, verdict",
    [
        ("P10", ranked(), HOLDS),
        ("P10", ranked(torch.neg), NOT),
        ("R4", kl(), HOLDS),
        ("R4", kl(more=0.9), NOT),
        ("R4", kl(most=0.9), NOT),
        ("R15", kl(), HOLDS),
        ("R15", kl(few=0.8), NOT),
        ("R15", kl(many=0.8), NOT),
        ("R14", kl(), HOLDS),
        ("R14", kl(often=1.2), NOT),
        ("R14", kl(seldom=0.8), NOT),
        ("R10", answers(0.9, 0.1), HOLDS),
        ("R10", answers(0.7, 0.1), NOT),
        ("R10", answers(0.85, 0.9), NOT),
        ("R11", likelihood(0.0), HOLDS),
        ("R11", likelihood(0.04), NOT),
        ("S8", likelihood(0.0), HOLDS),
        ("S8", likelihood(0.04), NOT),
        ("S8", likelihood(0.0, 10**9 - 1), UNTESTED),
        ("S9", likelihood(0.3), HOLDS),
        ("S9", likelihood(0.3, bits=0.04), NOT),
        ("R11", likelihood(0.0, 10**9 - 1), UNTESTED),
        ("R12", answers(0.5, 0.1, 10**9 - 1), HOLDS),
        ("R12", answers(0.5, 0.1), NOT),
        ("R12", answers(0.1, 0.5, 10**9 - 1), NOT),
        ("R12", answers(0.85, 0.1), HOLDS),
        ("R13", answers(0.85, 0.1), HOLDS),
        ("R13", answers(0.75, 0.1), NOT),
    ],
)
def test_a_verdict_turns_with_the_numbers(claim, on, verdict):
    assert CLAIMS[claim](on).verdict == verdict


@pytest.mark.parametrize("claim", ["P12", "R5"])
@pytest.mark.parametrize("change, verdict", [(-0.1, HOLDS), (0.1, NOT)])
def test_norms_and_layer_budgets_help_if_kl_is_lower_with_them(
    claim, change, verdict, monkeypatch
):
    monkeypatch.setattr(rules, "text_windows", lambda *_: torch.zeros(1))
    monkeypatch.setattr(rules, "fisher_shares", lambda *_: (0.5, 0.5))
    monkeypatch.setattr(
        rules,
        "long_answer",
        lambda model, texts, *each: torch.stack(
            [around(1 + change * (type(select) is Critical)) for select in each]
        ),
    )
    on = SimpleNamespace(
        model=None,
        tasks=None,
        documents=1,
        T=1,
        spread=each,
        text=SimpleNamespace(tokens=torch.zeros(1)),
        kl=lambda Method, shares=None: around(1 + change * (shares is not None)),
    )
    assert CLAIMS[claim](on).verdict == verdict


@pytest.mark.parametrize(
    "found, least",
    [((0.5, 0.6, 0.7), 1 / 16), ((0.1, 0.2, 0.45), 1 / 4), ((0.0, 0.0, 0.1), 1 / 2)],
)
def test_budgets_are_tight_where_snapkv_finds_half_of_what_the_full_cache_does(
    found, least
):
    class Known(Subject):
        answered = lambda self, *_: torch.tensor([0.8, 1.0])
        facts = lambda self, name, x: torch.tensor(
            dict(zip((1 / 16, 1 / 8, 1 / 4), found))[x]
        )

    assert Known(None, None).tight == least


@pytest.mark.parametrize("quarter, kept", [(0.2, 0.25), (0.05, 0.5)])
def test_if_a_quarter_of_the_entries_is_too_few_for_long_values_half_decides(
    quarter, kept, monkeypatch
):
    monkeypatch.setattr(rules, "boundaries", lambda *_: None)
    found = lambda Method, x, *_, **options: around(
        (quarter if x < 0.5 else 0.8) * (Method is not SnapKV)
    )
    on = SimpleNamespace(
        tasks=SimpleNamespace(encoding=None),
        answered=found,
        model=SimpleNamespace(config=SimpleNamespace(vocab_size=0)),
    )
    verdict, numbers, _ = CLAIMS["C1"](on)
    assert (
        verdict == HOLDS
        and numbers["keep ratio"] == (kept, 0.0)
        and numbers["SnapKV"][0] == 0
    )


@pytest.mark.parametrize(
    "lower, verdict", [(None, HOLDS), (0, NOT), (1, NOT), (2, NOT)]
)
def test_one_layer_that_does_not_persist_is_enough(lower, verdict, monkeypatch):
    # (4, texts, layers)
    found = torch.tensor([0.99, 0.95, 3.0, 0.5])[:, None, None].repeat(1, 10, 3)
    if lower is not None:
        found[lower, :, 1] /= 2
    monkeypatch.setattr(rules, "observed", lambda model, tokens: found)
    on = SimpleNamespace(
        model=parameters(10**9),
        spread=each,
        text=SimpleNamespace(tokens=torch.zeros(1)),
    )
    assert CLAIMS["S7"](on).verdict == verdict


@cache
def learned():
    model, encoding = registry.load(SHIPPED["learned"], "cpu")
    return Subject(model, Tasks(encoding, "test"))


@pytest.mark.parametrize("claim", ["P7", "P13"])
def test_the_stored_findings_are_what_the_code_finds(claim):
    (row,) = (
        row for row in STORED if (row["claim"], row["model"]) == (claim, "learned")
    )
    on, found = learned(), judge(claim, learned())
    assert (row["seed"], row["documents"], row["tokens"]) == (
        on.seed,
        on.documents,
        on.T,
    )
    assert (found.verdict, found.why) == (row["verdict"], row["why"])
    assert found.numbers.keys() == row["numbers"].keys() and found.numbers
    # elsewhere a head at the limit may round to the other side
    for number, x in found.numbers.items():
        assert x == pytest.approx(row["numbers"][number], rel=1e-3, abs=2e-3), number


# ---- python -m nanollm claims ---


def run(folder, *options):
    main(["claims", *map(str, options), "--json", str(folder / "found.json")])
    return json.loads((folder / "found.json").read_text())


def test_every_claim_has_a_row_on_a_foreign_checkpoint(tmp_path, monkeypatch, capsys):
    folder = foreign_checkpoint(tmp_path / "model")
    monkeypatch.setattr(claims_command, "SHIPPED", {})
    for several in ("COMPARED", "WINDOW_METHODS"):
        monkeypatch.setattr(rules, several, ["SnapKV", "AdaKV", "PyramidKV"])
    found = run(tmp_path, "--model", folder, "--documents", 2, "--length", 128)
    assert [(row["claim"], row["model"]) for row in found] == [
        (name, f"{folder}/") for name in CLAIMS
    ]
    why = {row["claim"]: row["why"] for row in found if row["verdict"] == UNFIT}
    assert [*why] == [
        "P5",
        "P8",
        "C1",
        "C2",
        "R9",
        "R10",
        "R11",
        "R12",
        "R13",
        "S8",
    ]  # it answers nothing, and the texts are too short
    assert "the full cache answers 0.00 of needle" in why["R10"]
    assert all(row["numbers"] for row in found if row["verdict"] != UNFIT)
    out = capsys.readouterr().out
    assert out.count(UNFIT) == 10 and all(f"\n{name}  " in out for name in CLAIMS)


@pytest.mark.parametrize(
    "model, columns",
    [
        ("", ["built", "learned"]),
        ("--model ../two/link", ["built", "learned"]),
        ("--model own/built", ["built", "learned", "own/built/"]),
    ],
)
def test_only_a_model_that_does_not_ship_has_a_third_column(
    model, columns, tmp_path, monkeypatch
):
    two = tmp_path / "two"
    folders = {name: checkpoint_of_two_layers(two / name) for name in SHIPPED}
    monkeypatch.setattr(claims_command, "SHIPPED", folders)
    monkeypatch.setattr(command_line, "TINY", folders["built"])  # the default
    monkeypatch.chdir(two)
    Path("link").symlink_to("learned")
    checkpoint_of_two_layers(two / "own" / "built")
    found = run(
        two, *f"--claims P3 --documents 3 --length 130 --seed 7 {model}".split()
    )
    assert [row["model"] for row in found] == columns
    model, encoding = registry.load(folders["built"], "cpu")
    alone = judge("P3", Subject(model, Tasks(encoding, "test"), 7, 3, 130)).numbers
    assert found[0]["numbers"] == {name: [*x] for name, x in alone.items()}
    assert [found[0][key] for key in ("seed", "documents", "tokens")] == [7, 3, 130]


def test_facts_may_stand_in_a_text_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(claims_command, "SHIPPED", {})
    folder, text, file = (
        checkpoint_of_two_layers(tmp_path / "own"),
        "otherwise " * 900,
        tmp_path / "text",
    )
    file.write_text(text)
    (found,) = run(
        tmp_path,
        *f"--claims P3 --documents 2 --length 130 --model {folder} --text {file}".split(),
    )
    model, encoding = registry.load(folder, "cpu")
    own, ours = (
        Subject(model, Tasks(encoding, "test", x), 0, 2, 130) for x in (text, None)
    )
    assert found["numbers"] == {
        name: [*x] for name, x in judge("P3", own).numbers.items()
    }
    assert (
        own.text.tokens[:, 5:].unique().numel() < 9 < ours.text.tokens.unique().numel()
    )
    fewer = [
        [len({*on.bench(task)[0].batches[task].tokens.flat}) for on in (own, ours)]
        for task in ("needle", "unmarked long needle")
    ]
    assert all(x < y for x, y in fewer), fewer


def test_beside_another_model_the_shipped_columns_are_the_stored_ones(tmp_path):
    found = run(
        tmp_path,
        "--claims",
        "P2",
        "--model",
        checkpoint_of_two_layers(tmp_path / "own"),
    )
    assert (
        found[:3] == [row for row in STORED if row["claim"] == "P2"] and len(found) == 4
    )


def test_both_engines_find_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(claims_command, "SHIPPED", {"built": SHIPPED["built"]})
    ours, theirs = (
        run(
            tmp_path, *f"--claims P6 S7 --documents 2 --length 128 --engine {x}".split()
        )
        for x in ("ours", "transformers")
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (
            a["verdict"] == b["verdict"] and a["numbers"].keys() == b["numbers"].keys()
        )
        for name, x in a["numbers"].items():
            assert b["numbers"][name] == pytest.approx(x, rel=1e-2, abs=1e-3), name


@pytest.mark.parametrize(
    "options, message",
    [
        (
            "--claims P6 P1",
            "claim 'P1' cannot be tested on a model; choose from P2, P3",
        ),
        ("--documents 1", "documents 1 must be"),
        ("--length 16", "length 16 must be"),
        ("--seed -1", "seed -1"),
        ("--model nowhere", "nowhere"),
        ("--json foreign.json", "foreign.json holds something else"),
    ],
)
def test_what_is_wrong_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("foreign.json").write_text('[{"verdict": "guilty"}]')
    with pytest.raises(SystemExit) as stop:
        main(["claims", *options.split()])
    lines = capsys.readouterr().err.splitlines()
    assert (
        stop.value.code == 2
        and lines[-1].startswith("error: ")
        and message in lines[-1]
    )


# ---- CLAIMS.md ---


@pytest.fixture
def recorded():
    """Return the records of a run of all tests, with made-up numbers."""
    marks = [
        (f"tests/test_{name[0]}.py::test_{name}[1]", "claim", name) for name in listed()
    ]
    stored = {f"{row['claim']}.{name}" for row in STORED for name in row["numbers"]}
    return marks + [
        ("tests/test_P.py::test_P1", name, -0.126)
        for name, _ in PLACEHOLDER.findall(texts())
        if re.sub(" @\\w+| ±", "", name) not in stored
    ]


def test_a_claim_has_its_sentence_verdicts_number_rule_tests_and_notebook(recorded):
    by_model = {"smollm2": HOLDS, "built": NOT, "learned": OPEN}
    rows = [row | dict(verdict=by_model[row["model"]]) for row in STORED]
    (p12,) = (
        part
        for part in page(recorded, rows).split("\n\n### ")
        if part.startswith("P12\n")
    )
    claim = listed()["P12"]
    assert (
        f"{claim.rule} The verdict turns with the decoder. *smollm2*: {HOLDS}; *built*: {NOT}"
        in p12
    )
    assert "[test_P](tests/test_P.py)" in p12
    (stored,) = (
        row["numbers"]
        for row in rows
        if (row["claim"], row["model"]) == ("P12", "smollm2")
    )
    mean, error = (
        f"{x:.3f}".replace("-", "−") for x in stored["change by the paper's rule"]
    )
    text = page(recorded, rows)
    assert (
        f"{HOLDS} | {HOLDS} | {NOT} | {OPEN} | The norms change the KL by {mean} ± {error}"
        in text
    )
    assert "L is −0.126 if kept" in text  # as the test recorded it


@pytest.mark.parametrize(
    "without, more, changed, message",
    [
        (("claim", "T1"), [], "", "claims without a test: T1$"),
        (
            None,
            [("a.py::test_a", "claim", "T99")],
            "",
            "markers of unknown claims: T99$",
        ),
        (
            ("P1.sink_kept", -0.126),
            [],
            "",
            "values that nobody recorded: P1.sink_kept$",
        ),
        (
            None,
            [("a.py::test_a", "P1.sink_kept", 0.5)],
            "",
            "P1.sink_kept is -0.126 in .* and 0.5 in a.py:",
        ),
        (
            None,
            [],
            "rule",
            "claims without a row in lab/stored/claims.json, or with another .*: C1$",
        ),
        (None, [], "model", "or with another rule or model there: C1$"),
        (None, [], "claim", "or with another rule or model there: C1, other$"),
    ],
)
def test_what_is_missing_unknown_or_of_another_rule_is_refused(
    without, more, changed, message, recorded
):
    stored = [
        row | {changed: "other"} if changed and row["claim"] == "C1" else row
        for row in STORED
    ]
    with pytest.raises(ValueError, match=message):
        page([x for x in recorded if x[1:] != without] + more, stored)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("## T1 · holds", "## T1 · hold", "'## T1 · hold' must"),
        ("Rule: L over", "L over", "'## P3 · "),
        (
            "Rule: L over θ is at most 1 in every head, at a quarter of the entries.\n",
            "",
            "only in code: P3;",
        ),
    ],
)
def test_a_file_of_claims_with_a_slip_is_refused(
    old, new, message, recorded, monkeypatch
):
    changed = texts().replace(old, new)
    monkeypatch.setattr(claims_renderer, "texts", lambda: changed)
    with pytest.raises(ValueError, match=message):
        page(recorded, STORED)


def test_a_stale_number_is_refused(recorded, tmp_path):
    write_or_compare(recorded, True, tmp_path / "CLAIMS.md")
    write_or_compare(recorded, False, tmp_path / "CLAIMS.md")
    other = [(node, name, 0.5 if name == "S5.n" else x) for node, name, x in recorded]
    with pytest.raises(
        ValueError, match="CLAIMS.md is stale: these tests would write another text"
    ):
        write_or_compare(other, False, tmp_path / "CLAIMS.md")


def test_a_run_of_all_tests_fails_where_they_and_the_claims_disagree(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "import numpy, pytest\n\n@pytest.mark.claim('T99')\ndef test_a(note):\n"
        "    note('S5', n=numpy.int64(5))\n"
    )

    env = dict(
        os.environ,
        PYTHONPATH=f"{ROOT}:{ROOT / 'tests' / 'helpers'}",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )  # the others take seconds to load
    command = [
        sys.executable,
        "-m",
        "pytest",
        *"-q -p claims_plugin -p xdist -n 1".split(),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, timeout=100, capture_output=True, text=True
    )
    out = done.stdout
    assert done.returncode == 1 and "1 passed" in out and "S5.printed_above" in out
    assert "markers of unknown claims: T99" in out
    assert "S5.n," not in out


def test_claims_are_written_by_a_run_of_all_tests_only():
    option = SimpleNamespace(write_claims=True, keyword="a")
    some = SimpleNamespace(
        option=option,
        addinivalue_line=lambda *_: 0,
        args=["tests"],
        getini=lambda _: ["tests"],
    )
    with pytest.raises(pytest.UsageError, match="needs a run of all tests"):
        claims_plugin.pytest_configure(some)
