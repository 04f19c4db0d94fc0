"""python -m nanollm claims: rules fed by hand, a foreign checkpoint, both engines, bad input."""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from claims.render import parse
from common import checkpoint_of_two_layers, decoder
from experiments import claims, claims_command, subject
from experiments.claims import CLAIMS, judge
from experiments.subject import (HOLDS, NOT, OPEN, UNFIT, UNTESTED, Subject, above, below, both, mean,
                                 over_texts, within)
from foreign import foreign_checkpoint
from methods.critical_kv import Critical, PooledCritical
from methods.h2o import H2O
from methods.kv_reviver import KVReviver
from nanollm import SHIPPED
from nanollm.__main__ import main
from nanollm.cache import LayerCache
from nanollm.commands import registry
from nanollm.commands.registry import load
from nanollm.measure.tasks import Tasks

ROOT = Path(__file__).parents[2]


def around(x, spread=0.01):
    """Ten numbers of this mean."""
    return x + spread * torch.linspace(-1, 1, 10)


def run(tmp_path, *options):
    main(["claims", *map(str, options), "--json", str(tmp_path / "found.json")])
    return json.loads((tmp_path / "found.json").read_text())


def test_a_number_within_two_errors_of_the_limit_decides_nothing():
    assert [above((x, 0.1), 0.5) for x in (0.71, 0.69, 0.31, 0.29)] == [HOLDS, OPEN, OPEN, NOT]
    assert [below((x, 0.1), 0.5) for x in (0.71, 0.69, 0.31, 0.29)] == [NOT, OPEN, OPEN, HOLDS]
    assert [within((x, 0.1), 0.3) for x in (-0.6, -0.2, 0.0, 0.2, 0.6)] == [NOT, OPEN, HOLDS, OPEN, NOT]
    assert above((0.5, 0.0), 0.5) == OPEN  # all documents alike, and at the limit
    assert [both(OPEN, NOT), both(HOLDS, OPEN), both(HOLDS, HOLDS)] == [NOT, OPEN, HOLDS]
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    value, error = over_texts(lambda x: x.mean(), x)
    assert (value, error) == pytest.approx(mean(x.mean(1)), rel=0.15)


def test_a_subject_asks_blind_as_it_is_told_and_keeps_the_last_eighth_of_a_text(monkeypatch):
    on = Subject(decoder(max_len=1024), None, documents=2)
    on.row = lambda *_, **knobs: dict(aware=around(0.9), blind=around(0.6))
    assert (on.blind(H2O).mean(), on.answered(H2O, 0.25, "needle").mean()) == pytest.approx((0.6, 0.9))
    monkeypatch.setattr(subject, "text_windows", lambda *_: torch.zeros(1))
    monkeypatch.setattr(subject, "reference", lambda model, tokens, new: new)
    assert [Subject(on.model, None, T=T).text for T in (256, 1024)] == [32, 64]


def facts(plain=0.5, **pooled):
    """What each rule finds, with scores pooled in both stages, by the other selections and by itself."""
    def found(name, share=1 / 16, select=None):
        with_norms = pooled.get(name, 0.5) if isinstance(select, PooledCritical) else 0.2
        return around(with_norms if select else plain)
    return SimpleNamespace(facts=found)


def ablation(plain, quarter, none, streaming=0.0):
    """P8's setting; by the paper's own rule less is found."""
    def found(name, share=1 / 16, select=None):
        if select is None:
            return around(dict(SnapKV=plain, StreamingLLM=streaming)[name])
        pooled = isinstance(select, PooledCritical)
        return around({0.25: quarter if pooled else 0.3, 0.0: none if pooled else 0.2}[select.alpha])
    return SimpleNamespace(facts=found)


def needles(reviver, others=0.1):
    found = {KVReviver: reviver, LayerCache: 0.9}
    return SimpleNamespace(blind=lambda Method, *share, **knobs: around(found.get(Method, others)))


def parameters(n):
    return SimpleNamespace(parameters=lambda: iter([torch.empty(n - 5, device="meta"), torch.empty(5)]))


def labels(reviver, h2o, n):
    found = {KVReviver: reviver, H2O: h2o, LayerCache: 0.9}
    return SimpleNamespace(model=parameters(n), answered=lambda Method, *_: around(found.get(Method, 0.0)))


def shares(more=1.2, most=1.2, few=1.0, many=1.0, often=1.0, seldom=1.0):
    """KLs against a KL of 1 by the paper's shares and rate."""
    found = {(0.2, 0.4): more, (0.4, 0.3): most, (0.1, 0.2): few, (0.1, 0.6): many}
    def kl(Method, vague=0.1, recent=0.45, replace_rate=1.1):
        return around(found.get((vague, recent), 1.0) * {1.0: often, 1.5: seldom}.get(replace_rate, 1.0))
    return SimpleNamespace(kl=kl)


def likelihood(more, n=10**9):
    """−log p of a token is 1 by the full cache; by KVReviver it is higher by `more`."""
    text = SimpleNamespace(new=2, tokens=torch.zeros(10, 5, dtype=torch.long),
                           log_p=torch.full((10, 2, 1), -1.0))
    return SimpleNamespace(model=parameters(n), text=text,
                           continued=lambda *_, **knobs: dict(nll=around(1 + more)))


def outputs(alone=0.9, together=0.9):
    """L of every head of every layer; it is 1 for SnapKV."""
    return SimpleNamespace(of_text=lambda name: {key: torch.full((10, 2, 4), 1.0 if name == "SnapKV" else x)
                                                 for key, x in dict(alone=alone, together=together).items()})


def ranked(kl=lambda rank: rank):
    """L of the compared methods rises from one to the next; so does KL, or not."""
    def found(name):
        rank = torch.full((10,), float(claims.COMPARED.index(name)))
        return dict(alone=rank[:, None, None].expand(-1, 2, 4), kl=kl(rank))
    return SimpleNamespace(of_text=found)


@pytest.mark.parametrize("claim, on, verdict", [
    ("P5", facts(SnapKV=0.6, PyramidKV=0.6, AdaKV=0.6), HOLDS), ("P5", facts(SnapKV=0.6, AdaKV=0.4), NOT),
    ("P5", facts(SnapKV=0.6, AdaKV=0.6), OPEN), ("P8", ablation(0.5, 0.8, 0.75), HOLDS),
    ("P8", ablation(0.5, 0.8, 0.65), NOT), ("P8", ablation(0.8, 0.5, 0.5), NOT),
    ("P8", ablation(0.5, 0.8, 0.8, streaming=0.6), NOT),
    ("R4", shares(), HOLDS), ("R4", shares(more=0.9), NOT), ("R4", shares(most=0.9), NOT),
    ("R15", shares(), HOLDS), ("R15", shares(few=0.8), NOT), ("R15", shares(many=0.8), NOT),
    ("R14", shares(), HOLDS), ("R14", shares(often=1.2), NOT), ("R14", shares(seldom=0.8), NOT),
    ("R12", labels(0.5, 0.1, 10**9 - 1), HOLDS), ("R12", labels(0.5, 0.1, 10**9), NOT),
    ("R12", labels(0.1, 0.5, 10**9 - 1), NOT), ("R12", labels(0.85, 0.1, 10**9), HOLDS),
    ("R10", needles(0.9), HOLDS), ("R10", needles(0.7), NOT), ("R10", needles(0.85, 0.9), NOT),
    ("R11", likelihood(0.0), HOLDS), ("R11", likelihood(0.04), NOT),
    ("R11", likelihood(0.0, 10**9 - 1), UNTESTED), ("R13", labels(0.85, 0.1, 5), HOLDS),
    ("R13", labels(0.75, 0.1, 5), NOT), ("P7", outputs(), HOLDS), ("P7", outputs(alone=1.1), NOT),
    ("P13", outputs(together=0.8), HOLDS), ("P13", outputs(alone=0.8), NOT), ("P10", ranked(), HOLDS),
    ("P10", ranked(torch.neg), NOT)])
def test_a_verdict_turns_with_the_numbers(claim, on, verdict):
    found = CLAIMS[claim](on)
    assert found.verdict == verdict and all(len(x) == 2 for x in found.numbers.values())


def test_numbers_stand_under_their_names():
    for claim, on, expected in (
            ("P8", ablation(0.5, 0.8, 0.75, 0.1), [0.5, 0.8, 0.75, 0.1, 0.3, 0.2]),
            ("R4", shares(more=1.3, most=1.5), [1, 0.3, 0.5, 0, 1, 0]),
            ("R14", shares(often=1.3, seldom=1.5), [1, 0.3, 0.5]),
            ("R15", shares(few=1.3, many=1.5), [1, 0.3, 0.5])):
        assert [x for x, _ in CLAIMS[claim](on).numbers.values()] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("weight, verdict", [(0.004, NOT), (0.006, HOLDS), (0.03, HOLDS)])
def test_a_token_counts_as_activated_above_half_a_percent(weight, verdict, monkeypatch):
    """16 tokens of which the first 14 can be forgotten; the last two queries look at 13 with this weight."""
    p = torch.zeros(1, 1, 1, 16, 16)  # (B, L, heads, queries, keys)
    p[..., :14, 0] = 1
    p[..., 14:, 1:14] = weight
    monkeypatch.setattr(claims, "attention_maps", lambda model, text: p)
    on = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(n_layers=1, n_kv_heads=1)), seed=0,
        text=SimpleNamespace(tokens=torch.zeros(2, 16)), answered=lambda *_, **knobs: around(0.9),
        blind=lambda *_, **knobs: around(0.1))
    found = CLAIMS["R9"](on)
    assert found.verdict == verdict
    assert found.numbers["activated, outside H2O's"][0] == (weight > 0.005)
    assert found.numbers["over 2 %, outside H2O's"][0] == (weight > 0.02)
    assert [found.numbers[f"needles, {x}"][0] for x in ("aware", "blind")] == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("claim", ["P12", "R5"])
@pytest.mark.parametrize("change, verdict", [(-0.1, HOLDS), (0.1, NOT)])
def test_norms_and_layer_budgets_help_if_kl_is_lower_with_them(claim, change, verdict, monkeypatch):
    def answered(model, texts, asked, select):
        return dict(kl=around(1 + change if type(select) is Critical else 1), most=1.0)

    monkeypatch.setattr(claims, "long_answer", answered)
    monkeypatch.setattr(claims, "text_windows", lambda *_: torch.zeros(1))
    monkeypatch.setattr(claims, "fisher_shares", lambda *_: (0.5, 0.5))
    on = SimpleNamespace(model=None, tasks=None, documents=1, T=1,
                         kl=lambda Method, shares=None: around(1 + change * (shares is not None)),
                         text=SimpleNamespace(tokens=torch.zeros(1)))
    assert CLAIMS[claim](on).verdict == verdict


@pytest.mark.parametrize("keys, values, verdict", [(1, 1, HOLDS), (99, 1, NOT), (1, 99, NOT)])
def test_both_keys_and_values_must_lie_below_the_bound(keys, values, verdict, monkeypatch):
    k, v = (torch.full((2, 1, 30, 4), float(x)) for x in (keys, values))  # as far off as they are large
    monkeypatch.setattr(claims, "relative_error", lambda found, true: true.mean().item())
    monkeypatch.setattr(claims, "revived_logits", lambda *_: [(0.5, 0.5)])
    monkeypatch.setattr(claims, "sinks", lambda *_: (torch.zeros(1), None))
    text = SimpleNamespace(prompt=torch.zeros(2, 30), tokens=None, recording=[(None, k, v, None)])
    found = CLAIMS["R6"](SimpleNamespace(model=None, seed=0, text=text))
    assert found.verdict == verdict and [x for x, _ in found.numbers.values()][:2] == [keys, values]


@pytest.mark.parametrize("lower, verdict", [(None, HOLDS), (0, NOT), (1, NOT), (2, NOT)])
def test_one_layer_that_does_not_persist_is_enough(lower, verdict, monkeypatch):
    found = torch.tensor([0.99, 0.95, 3.0, 0.5])[:, None, None].repeat(1, 10, 3)  # (4, texts, layers)
    if lower is not None:
        found[lower, :, 1] /= 2
    monkeypatch.setattr(claims, "observed", lambda model, tokens: found)
    on = SimpleNamespace(model=parameters(10**9), text=SimpleNamespace(tokens=None))
    assert CLAIMS["S7"](on).verdict == verdict


def test_claims_are_worded_as_in_claims_md():
    files = (ROOT / "tests" / "helpers" / "claims").glob("*.md")  # what CLAIMS.md is made of
    worded = {claim.id: claim.title for file in files for claim in parse(file.read_text(), file.name)[1]}
    for name, claim in CLAIMS.items():
        told = claims_command.worded(claim)
        assert told["says"] == worded[name] and told["rule"].startswith("Rule")


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("claim", ["P3", "P6"])
def test_the_stored_findings_are_what_the_code_finds(claim, name):
    (row,) = (row for row in json.loads((ROOT / "experiments" / "stored" / "claims.json").read_text())
              if (row["claim"], row["model"]) == (claim, name))
    model, encoding = load(SHIPPED[name], "cpu")
    size = (row[key] for key in ("seed", "documents", "tokens"))
    found = judge(claim, Subject(model, Tasks(encoding, "test"), *size))
    assert (found.verdict, found.why) == (row["verdict"], row["why"])
    assert found.numbers.keys() == row["numbers"].keys() and found.numbers
    for number, x in found.numbers.items():  # elsewhere a head at the limit may round to the other side
        assert x == pytest.approx(row["numbers"][number], rel=1e-3, abs=2e-3), number


def test_every_claim_has_a_row_on_a_foreign_checkpoint(tmp_path, monkeypatch, capsys):
    folder = foreign_checkpoint(tmp_path / "model")
    small = {"built": checkpoint_of_two_layers(tmp_path / "small")}
    monkeypatch.setattr(claims_command, "SHIPPED", small)
    for several in ("COMPARED", "VOTING"):
        monkeypatch.setattr(claims, several, ["SnapKV", "AdaKV", "PyramidKV"])
    found = run(tmp_path, "--model", folder, "--documents", 2, "--length", 256)
    assert [(row["claim"], row["model"]) for row in found] == [
        (name, model) for name in CLAIMS for model in ("built", f"{folder}/")]
    why = {row["claim"]: row["why"] for row in found[1::2] if row["verdict"] == UNFIT}
    assert [*why] == ["P5", "P8", "C1", "C2", "R9", "R10", "R12", "R13"]  # it answers nothing
    assert "the full cache answers 0.00 of needle" in why["R10"]
    assert all(row["numbers"] for row in found if row["verdict"] != UNFIT)
    out = capsys.readouterr().out
    assert out.count(UNFIT) == 16 and all(f"\n{name}  " in out for name in CLAIMS)
    assert out.splitlines()[2].split() == ["built", f"{folder}/"]


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A folder with checkpoints in the place of those that ship."""
    folders = {name: checkpoint_of_two_layers(tmp_path / "two" / name) for name in SHIPPED}
    monkeypatch.setattr(claims_command, "SHIPPED", folders)
    monkeypatch.setattr(registry, "TINY", folders["built"])  # the default
    monkeypatch.chdir(tmp_path / "two")
    Path("link").symlink_to("learned")
    return tmp_path / "two"


@pytest.mark.parametrize("model, columns", [
    ("", ["built", "learned"]), ("--model learned", ["built", "learned"]),
    ("--model ../two/link", ["built", "learned"]), ("--model own/built", ["built", "learned", "own/built/"])])
def test_only_a_model_that_does_not_ship_has_a_third_column(model, columns, two):
    checkpoint_of_two_layers(two / "own" / "built")
    found = run(two, *f"--claims P6 --documents 2 --length 128 {model}".split())
    assert [row["model"] for row in found] == columns


def test_both_engines_find_the_same(tmp_path):
    ours, theirs = (run(tmp_path, *f"--claims P6 R5 S7 --documents 2 --length 128 --engine {x}".split())
                    for x in ("ours", "transformers"))
    for a, b in zip(ours, theirs, strict=True):
        assert a["verdict"] == b["verdict"] and a["numbers"].keys() == b["numbers"].keys()
        for name, x in a["numbers"].items():
            assert b["numbers"][name] == pytest.approx(x, rel=1e-2, abs=1e-3), name


def test_seed_documents_and_length_are_those_asked_for(two):
    rows = {seed: run(two, *f"--claims P3 --documents 3 --length 130 --seed {seed}".split())[0]
            for seed in (0, 7)}
    model, encoding = load(claims_command.SHIPPED["built"], "cpu")
    alone = judge("P3", Subject(model, Tasks(encoding, "test"), 7, 3, 130)).numbers
    assert rows[7]["numbers"] == {name: [*x] for name, x in alone.items()} != rows[0]["numbers"]
    assert [rows[7][key] for key in ("seed", "documents", "tokens")] == [7, 3, 130]


def test_a_model_that_is_too_short_has_a_row(tmp_path):
    small = checkpoint_of_two_layers(tmp_path / "small")
    *_, row = run(tmp_path, *"--claims P6 --documents 2 --length 850 --model".split(), small)
    assert row["verdict"] == UNFIT and row["why"].startswith("850 tokens exceed the model's length of 800")


@pytest.mark.parametrize("options, message", [
    ("--claims P6 P1", "claim 'P1' is none that a model decides; those are P2, P3"),
    ("--documents 1", "documents 1 must be"), ("--length 16", "length 16 must be"), ("--seed -1", "seed -1"),
    ("--model nowhere", "nowhere"), ("--json other.txt", "other.txt holds something else"),
    ("--json foreign.json", "foreign.json holds something else")])
def test_what_is_wrong_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text("mine")
    Path("foreign.json").write_text('[{"verdict": "guilty"}]')
    with pytest.raises(SystemExit) as stop:
        main(["claims", *options.split()])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and lines[-1].startswith("error: ") and message in lines[-1]
