"""Rules on a subject whose numbers are planted: a verdict turns where its rule says so."""

from dataclasses import dataclass
from functools import cache, partial
import json

import pytest
import torch

from common import decoder, tasks
from lab.claims import rules
from lab.claims.claims_command import STORED
from lab.claims.compared_methods import COMPARED, METHODS
from lab.claims.rules import judge
from lab.claims.scissorhands_measured import FourBits
from lab.claims.subject import HOLDS, NOT, OPEN, UNFIT, Subject
from lab.loading import load
from lab.tasks import Tasks
from methods.baselines.ada_kv import AdaKV
from methods.baselines.h2o import H2O
from methods.baselines.pyramid_kv import PyramidKV
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.chunk_kv import ChunkKV
from methods.critical_kv import Critical, PooledCritical
from methods.kv_reviver import KVReviver
from methods.scissorhands import Scissorhands
from nanollm import SHIPPED
from nanollm.cache import Method

N = 10  # documents and texts
KEEP = 0.25


class Number:
    """A planted number of a method: with some options, at a keep ratio, in a setting."""

    # Documents differ by so much from the mean, alike for all methods. So only paired errors are
    # small enough for the verdicts below.
    NOISE = dict(answers=0.05, kl=0.05, rise=0.02)

    def __init__(self, quantity, kind, number, **when):
        self.noise = self.NOISE.get(quantity, 0.01)
        self.quantity = quantity
        self.kind = kind
        self.number = number
        self.when = when

    def fits(self, quantity, kind, known) -> bool:
        same = quantity == self.quantity and kind is self.kind
        return same and self.when.items() <= known.items()


@dataclass(eq=False)
class Planted(Subject):
    """A small decoder. What it would measure of a method is the last planted number that fits.

    Without one, the full cache answers 0.9 of the questions, a method none, and all methods change
    texts alike: KL and L are 1, and −log p does not rise.
    """

    numbers: tuple[Number, ...] = ()

    def planted(self, quantity, kind, otherwise, **known):
        """Return a number for each document, around the planted one."""
        found = Number(quantity, kind, otherwise)
        for number in self.numbers:
            if number.fits(quantity, kind, known):
                found = number
        return found.number + found.noise * torch.linspace(-1, 1, self.documents)

    def right(self, task, kind, keep_ratio, setting="aware", **options):
        otherwise = 0.9 if kind is Method else 0.0
        known = options | dict(task=task, keep_ratio=keep_ratio, setting=setting)
        return self.planted("answers", kind, otherwise, **known)

    def continued(self, kind, keep_ratio, alone=False, part=1, **options):
        known = options | dict(keep_ratio=keep_ratio)
        heads = torch.ones(2, 4)
        l1 = self.planted("l1", kind, 1.0, **known)
        l1_alone = self.planted("l1_alone", kind, 1.0, **known)
        true = self.text.tokens[:, -self.text.new :, None]
        full = -self.text.log_p.gather(-1, true)[..., 0].mean(-1)
        return dict(
            kl=self.planted("kl", kind, 1.0, **known),
            nll=full + self.planted("rise", kind, 0.0, **known),
            l1=l1[:, None, None] * heads,
            l1_alone=l1_alone[:, None, None] * heads,
        )


def subject(*numbers) -> Planted:
    size = dict(vocab_size=2048, max_len=256, n_layers=2, n_heads=4, n_kv_heads=2)
    model = decoder(**size, d_model=32, d_ff=32)
    return Planted(model, tasks("test"), 0, N, 128, numbers=numbers)


answers = partial(Number, "answers")
kl = partial(Number, "kl")
rise = partial(Number, "rise")


# ---- CriticalKV ----


@pytest.mark.parametrize(
    "pooled, verdict",
    [(0.52, HOLDS), (0.505, OPEN), (0.5, OPEN), (0.495, OPEN), (0.48, NOT)],
)
def test_p5_pooling_in_both_stages_must_help_every_rule(pooled, verdict):
    numbers = []
    for kind in SnapKV, PyramidKV, AdaKV:
        numbers += [answers(kind, 0.5), answers(kind, 0.6, select=PooledCritical())]
    last = answers(AdaKV, pooled, select=PooledCritical())
    last.noise = 0.03  # the change of a document has a mean, and an error of 0.004
    assert judge("P5", subject(*numbers, last), KEEP).verdict == verdict


@pytest.mark.parametrize(
    "plain, norms, needed",
    [
        ((1.0, 2.0, 4.0), 1.0, 0.5),
        ((1.0, 2.0, 4.0), 1.9, 0.268),  # 2^(−1 − 0.9)
        ((2.0, 1.0, 4.0), 3.0, 0.177),  # a smaller budget that does better is chance
    ],
)
def test_p11_norms_must_save_a_fifth_of_the_budget(plain, norms, needed):
    numbers = []
    for kind in SnapKV, PyramidKV, AdaKV:
        for ratio, number in zip((0.5, 0.25, 0.125), plain):
            numbers.append(kl(kind, number, keep_ratio=ratio))
        numbers.append(kl(kind, norms, select=Critical()))
    found = judge("P11", subject(*numbers), KEEP)
    saved = 1 - KEEP / needed
    assert found.verdict == (HOLDS if saved > 0.187 else NOT)
    assert found.numbers["budget saved, SnapKV"][0] == pytest.approx(saved, abs=0.02)


# ---- KVReviver ----


def shares(more=1.2, most=1.2, few=1.0, many=1.0, often=1.0, seldom=1.0):
    """Return KVReviver's KL with other shares and rates than the paper's, with which it is 1."""
    return (
        kl(KVReviver, more, vague=0.2, recent=0.4),
        kl(KVReviver, most, vague=0.4, recent=0.3),
        kl(KVReviver, few, recent=0.2),
        kl(KVReviver, many, recent=0.6),
        kl(KVReviver, often, replace_rate=1.0),
        kl(KVReviver, seldom, replace_rate=1.5),
    )


def reviver(answered, h2o, **when):
    return answers(KVReviver, answered, **when), answers(H2O, h2o, **when)


def stage_1(quarter, none, streaming):
    """Return answers of SnapKV, plain 0.4, by the share of its stage 1, and of StreamingLLM."""
    return (
        answers(SnapKV, 0.4),
        answers(SnapKV, quarter, select=PooledCritical(0.25)),
        answers(SnapKV, none, select=PooledCritical(0.0)),
        answers(StreamingLLM, streaming),
    )


def ranked(sign):
    """Return an L for each method, and a KL that rises or falls with it."""
    numbers = []
    for rank, name in enumerate(COMPARED):
        kind, options = METHODS[name]
        numbers.append(Number("l1_alone", kind, rank, **options))
        numbers.append(kl(kind, sign * rank, **options))
    # options of one method may be among those of another: the more, the later
    return sorted(numbers, key=lambda number: len(number.when))


def norms(quantity, number) -> Number:
    return Number(quantity, SnapKV, number, select=Critical())


def four_bits(number):
    return rise(Scissorhands, 0.3), rise(FourBits, number)


# of a claim: numbers with which it holds, and with which it does not
RULES = {
    "P7": ([norms("l1_alone", 0.9)], [norms("l1_alone", 1.1)]),
    "P8": (
        [stage_1(0.5, 0.5, 0.1)],
        [
            stage_1(0.5, 0.38, 0.1),  # it is needed
            stage_1(0.3, 0.5, 0.0),  # worse than SnapKV
            stage_1(0.5, 0.5, 0.3),  # little better than StreamingLLM
        ],
    ),
    "P10": ([ranked(1)], [ranked(-1)]),
    # the gain grows after compressed layers
    "P13": (
        [(norms("l1_alone", 0.8), norms("l1", 0.5))],
        [(norms("l1_alone", 0.8), norms("l1", 0.9))],
    ),
    "C1": (
        [(answers(ChunkKV, 0.5), answers(SnapKV, 0.4))],
        [(answers(ChunkKV, 0.3), answers(SnapKV, 0.4))],
    ),
    "R4": ([shares()], [shares(more=0.9), shares(most=0.9)]),
    "R10": (
        [reviver(0.82, 0.1)],
        [
            reviver(0.78, 0.1),
            reviver(0.85, 0.9),
            (*reviver(0.9, 0.1), answers(StreamingLLM, 0.95)),
        ],
    ),
    "R11": ([rise(KVReviver, 0.008)], [rise(KVReviver, 0.04)]),
    "R12": ([reviver(0.82, 0.8)], [reviver(0.5, 0.1), reviver(0.85, 0.9)]),
    "R13": ([reviver(0.82, 0.1)], [reviver(0.78, 0.1)]),
    "R14": (
        [shares(often=1.08, seldom=0.92)],
        [shares(often=1.12), shares(seldom=0.88)],
    ),
    "R15": ([shares(few=0.92)], [shares(few=0.88), shares(many=0.88)]),
    "S8": ([rise(Scissorhands, 0.008)], [rise(Scissorhands, 0.04)]),
    "S9": ([four_bits(0.31)], [four_bits(0.34)]),
}


def verdicts(claim, numbers) -> list[str]:
    found = []
    for some in numbers:
        some = [some] if isinstance(some, Number) else some
        found.append(judge(claim, subject(*some), KEEP).verdict)
    return found


@pytest.mark.parametrize("claim", RULES)
def test_a_verdict_turns_where_its_rule_says(claim):
    holds, fails = RULES[claim]
    assert {*verdicts(claim, holds)} == {HOLDS}
    assert {*verdicts(claim, fails)} == {NOT}


@pytest.mark.parametrize(
    "lower, verdict", [(None, HOLDS), (0, NOT), (1, NOT), (2, NOT)]
)
def test_s7_one_layer_that_does_not_persist_is_enough(lower, verdict, monkeypatch):
    # (4, texts, layers): persistence, cosine, exponent, chance
    found = torch.tensor([0.99, 0.95, 3.0, 0.5])[:, None, None].repeat(1, N, 3)
    if lower is not None:
        found[lower, :, 1] /= 2
    found[3] = torch.tensor([0.2, 0.3, 0.4])
    monkeypatch.setattr(rules, "observed", lambda model, tokens: found)
    judged = judge("S7", subject())
    assert judged.verdict == verdict
    share, _ = judged.numbers["its share by chance"]
    assert share == pytest.approx(found[3, 0, found[0, 0].argmin()].item())


# ---- what a model cannot judge, and what is stored ----


def test_tasks_that_the_full_cache_fails_are_no_judge():
    on = subject(
        answers(Method, 0.4, task="pairs"),
        answers(H2O, 0.7, task="needle"),
        answers(H2O, 0.9, task="pairs"),
        answers(H2O, 0.1, task="few_shot"),
    )
    found = on.answered(H2O, 0.25, "needle", "pairs", "few_shot")
    assert found.mean().item() == pytest.approx(0.4)
    found = judge("R13", subject(answers(Method, 0.4)), KEEP)
    assert found.verdict == UNFIT
    assert found.why == "the full cache answers 0.40 of needle"


@cache
def learned() -> Subject:
    model, encoding = load(SHIPPED["learned"])
    return Subject(model, Tasks(encoding, "test"))


@pytest.mark.parametrize("claim", ["P7", "P13"])
def test_the_stored_findings_are_what_the_code_finds(claim):
    rows = json.loads(STORED.read_text())["rows"]
    wanted = claim, "learned", 0.125
    keys = "claim", "model", "keep_ratio"
    (row,) = [row for row in rows if tuple(row[key] for key in keys) == wanted]
    on = learned()
    found = judge(claim, on, 0.125)
    expected = on.seed, on.documents, on.T, found.verdict, found.why
    keys = "seed", "documents", "tokens", "verdict", "why"
    assert tuple(row[key] for key in keys) == expected
    assert found.numbers and found.numbers.keys() == row["numbers"].keys()
    # elsewhere a head at the limit may round to the other side
    for name, x in found.numbers.items():
        assert x == pytest.approx(row["numbers"][name], rel=1e-3, abs=2e-3), name
