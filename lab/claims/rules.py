"""The rules as code: one function for each claim that can be tested on a trained model.

    judge("P6", Subject(model, Tasks(encoding, "test")), 0.25)

By default python -m nanollm claims does so for all, at four keep ratios (S7 at none).

A function has its claim's ID as its name, and takes the keep ratio, the share of the entries that
stays (S7 takes none). The papers' files beside this one have the rule in words. Claims about
equations or random draws have no rule. If a number lies within two standard errors of a rule's
limit, and no other condition fails, the claim is undecided at this keep ratio.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from lab.benchmark import check_size
from lab.claims.compared_methods import (
    COMPARED,
    RULES,
    WINDOW,
    long_answer,
    rank_correlation,
)
from lab.claims.scissorhands_measured import FourBits, attention_maps, observed
from lab.claims.subject import (
    KEEP,
    UNFIT,
    Finding,
    Number,
    Subject,
    above,
    below,
    both,
    mean,
    means,
    over_texts,
    within,
)
from lab.kept import held
from lab.replay import replay
from lab.retrieval import maker
from methods.baselines.h2o import H2O
from methods.baselines.rounded import RoundedSlots
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical, PooledCritical
from methods.kv_reviver import KVReviver, Sketch
from methods.ours.chunk_kv_semantic import SemanticChunkKV
from methods.ours.kv_reviver_shrunk import ShrunkReviver
from methods.scissorhands import Scissorhands
from methods.theory.perturbation import (
    algorithm_1,
    assumption_1,
)
from methods.theory.sketch_error import printed_bound, relative_error
from nanollm.cache import Method, compress
from nanollm.tokenizer import boundaries

TASKS = {  # by a paper's letter
    "P": ("needle", "pairs"),
    "C": ("unmarked long needle", "unmarked pairs"),
    "R": ("needle", "pairs", "few_shot"),
    "S": ("few_shot",),
}
LITTLE = 0.02  # a rise of −log p, in nats a token, that still counts as no cost
LEAST_SAVED = 0.187  # the least that the text on Figure 1 names, SnapKV's at 128
TWO_BITS = partial(RoundedSlots, bits=2)


# ---- CriticalKV ----


def P5(on: Subject, keep: float) -> Finding:
    """Count the needles and pairs that each budget rule finds, plain and pooled in both stages."""
    plain = {Rule.__name__: on.facts(Rule.__name__, keep) for Rule in RULES}
    changes = {}
    for name, x in plain.items():
        pooled = on.facts(name, keep, select=PooledCritical())
        changes[f"change of {name}, pooled"] = mean(pooled - x)
    verdict = both(*map(above, changes.values()))
    return Finding(verdict, means(plain) | changes)


def P6(on: Subject, keep: float) -> Finding:
    """Measure the share of heads whose σ exceeds 1/2, beyond the first layer and in it."""
    shares = []  # of each prompt's layers
    for A, norms in on.heads:
        first, _ = algorithm_1(A, norms, round(keep * A.shape[-1]))
        shares.append((assumption_1(A, first) > 0.5)[0].double().mean(-1))
    shares = torch.stack(shares)
    share = mean(shares[:, 1:].mean(1))
    numbers = {"heads with σ > 1/2": share, "in the first layer": mean(shares[:, 0])}
    return Finding(above(share, 0.95), numbers)


def P7(on: Subject, keep: float) -> Finding:
    """Measure the share of heads whose L is lower than with SnapKV."""

    def lower(name, than):
        L = [on.of_text(x, keep)["l1_alone"] for x in (name, than)]
        return over_texts(lambda x, y: (x.mean(0) < y.mean(0)).double().mean(), *L)

    norms = "SnapKV+critical"
    found = {
        "heads with a lower L": lower(norms, "SnapKV"),
        "heads, no norms and no pool": lower("SnapKV, no pool", "SnapKV"),
        "heads, pooled in both stages": lower(f"{norms}, stage 2 pooled", "SnapKV"),
        "heads, norms against no pool": lower(norms, "SnapKV, no pool"),
    }
    return Finding(above(found["heads with a lower L"], 0.5), found)


def P8(on: Subject, keep: float) -> Finding:
    """Count the needles and pairs that SnapKV finds with and without stage 1."""
    plain = on.facts("SnapKV", keep)
    streaming = on.facts("StreamingLLM", keep)
    quarter = on.facts("SnapKV", keep, select=PooledCritical(0.25))
    none = on.facts("SnapKV", keep, select=PooledCritical(0.0))
    verdict = both(
        above(mean(none - quarter), -0.1),
        above(mean(quarter - plain)),
        above(mean(quarter - streaming), 0.25),
    )
    found = {
        "SnapKV": plain,
        "α = 0.25": quarter,
        "α = 0": none,
        "StreamingLLM": streaming,
    }
    return Finding(verdict, means(found))


def P10(on: Subject, keep: float) -> Finding:
    """Correlate L and KL over methods."""

    def correlation(L, kl) -> float:
        return rank_correlation(L.mean(0), kl.mean(0))

    rows = [on.of_text(name, keep) for name in COMPARED]
    L = torch.stack([row["l1_alone"].mean((1, 2)) for row in rows], 1)
    kl = torch.stack([row["kl"] for row in rows], 1)
    found = over_texts(correlation, L, kl)
    return Finding(above(found), {"rank correlation": found})


def P11(on: Subject, keep: float) -> Finding:
    """Interpolate the budget at which each budget rule has the KL that the norms give."""
    kept = 2 * keep, keep, keep / 2

    def saved(kl):  # (texts, 1 + len(kept))
        norms, *plain = kl.mean(0).tolist()
        rising = np.maximum.accumulate(plain)
        return 1 - keep / 2 ** np.interp(norms, rising, np.log2(kept))

    found = {}
    for Rule in RULES:
        name = Rule.__name__
        kl = [on.of_text(f"{name}+critical", keep)["kl"]]
        kl += [on.of_text(name, ratio)["kl"] for ratio in kept]
        found[f"budget saved, {name}"] = over_texts(saved, torch.stack(kl, 1))
    return Finding(both(*(above(x, LEAST_SAVED) for x in found.values())), found)


def P12(on: Subject, keep: float) -> Finding:
    """Measure the KL of half of the texts, compressed again whenever half of one is held."""
    texts = on.text.tokens[: on.some(2)]
    plain, norms = long_answer(on.model, texts, keep, SnapKV.select, Critical()).cpu()
    change = mean(norms - plain)
    numbers = {"KL of SnapKV": mean(plain), "change by the paper's rule": change}
    return Finding(below(change), numbers)


def P13(on: Subject, keep: float) -> Finding:
    """Compare the paper's gain in the last layer alone and after compressed layers."""
    critical = on.of_text("SnapKV+critical", keep)
    plain = on.of_text("SnapKV", keep)

    def gain(x, y) -> Tensor:
        return 1 - x[:, -1].mean() / y[:, -1].mean()

    def more(x, y, alone, plain_alone) -> Tensor:
        return gain(x, y) - gain(alone, plain_alone)

    alone = critical["l1_alone"], plain["l1_alone"]
    together = critical["l1"], plain["l1"]
    grown = over_texts(more, *together, *alone)
    numbers = {
        "last layer's advantage, alone": over_texts(gain, *alone),
        "after compressed layers": over_texts(gain, *together),
        "difference": grown,
    }
    return Finding(above(grown), numbers)


# ---- ChunkKV ----


def C1(on: Subject, keep: float) -> Finding:
    """Measure the share of needles with long values that SnapKV and chunks find."""
    ends = boundaries(on.tasks.encoding, on.model.config.vocab_size)
    methods = {
        "SnapKV": (SnapKV, {}),
        "ChunkKV": (ChunkKV, {}),
        "chunks of 20": (ChunkKV, dict(select=Chunks(20))),
        "semantic chunks": (SemanticChunkKV, dict(ends=ends)),
    }
    found = {}
    for name, (kind, options) in methods.items():
        given = WINDOW | options
        found[name] = on.answered(kind, keep, "unmarked long needle", **given)
    verdict = above(mean(found["ChunkKV"] - found["SnapKV"]))
    return Finding(verdict, means(found))


def C2(on: Subject, keep: float) -> Finding:
    """Compare the choices of neighbouring layers, and the pairs found if two layers share one."""
    prompt = on.text.prompt
    T = prompt.shape[1]
    methods = {
        "tokens": (SnapKV, dict(kernel_size=1)),
        "SnapKV": (SnapKV, {}),
        "chunks": (ChunkKV, {}),
    }
    alike = {}
    for name, (kind, options) in methods.items():
        caches = maker(on.model, kind, keep, **WINDOW, **options)(T)
        replay([on.text.recording], caches)
        compress(on.model, prompt, caches)
        kept = held(caches, T - WINDOW["window_size"])
        # the Jaccard similarity is |A ∩ B| / |A ∪ B|
        lower = kept[:, :-1]
        upper = kept[:, 1:]
        jaccard = (lower & upper).sum(-1) / (lower | upper).sum(-1)
        alike[f"similarity, {name}"] = jaccard.mean((1, 2)).cpu()
    more = mean(alike["similarity, chunks"] - alike["similarity, SnapKV"])

    def pairs_found(reuse):
        options = WINDOW | dict(reuse=reuse)
        return on.answered(ChunkKV, keep, "unmarked pairs", **options)

    alone = pairs_found(1)
    reuse = pairs_found(2)
    pairs = {"pairs, single layers": alone, "pairs, groups of two": reuse}
    numbers = means(alike | pairs)
    if alone.mean() < 0.1:
        return Finding(UNFIT, numbers, "single layers find too few pairs to lose any")
    verdict = both(above(more), above(mean(reuse - alone), -0.1))
    return Finding(verdict, numbers)


# ---- KVReviver ----


def R4(on: Subject, keep: float) -> Finding:
    """Measure the KL with 0.1, 0.2, 0.4 and none of the budget for Vague."""
    paper = on.kl(KVReviver, keep)
    shrunk = on.kl(ShrunkReviver, keep)
    none = on.kl(KVReviver, keep, vague=0.0)
    more = on.kl(KVReviver, keep, vague=0.2, recent=0.4) - paper
    most = on.kl(KVReviver, keep, vague=0.4, recent=0.3) - paper
    found = {
        "KL at 0.1": paper,
        "change at 0.2": more,
        "change at 0.4": most,
        "change without a sketch": none - paper,
        "change from shrunk to no sketch": none - shrunk,
    }
    return Finding(both(above(mean(more)), above(mean(most))), means(found))


def R6(on: Subject, keep: float) -> Finding:
    """Measure the squared errors of keys and values revived from a sketch, and of centred keys."""
    a = on.text.prompt.shape[1]
    b = round(keep * a / 3)  # slots of a row
    errors = {"keys": [], "values": [], "centred keys": []}

    def note(what, read, true):
        texts = zip(read.split(1), true.split(1))
        errors[what].append([relative_error(*text) for text in texts])

    for _, k, v, _ in on.text.recording:
        J = torch.arange(a).expand(*k.shape[:2], -1)
        for what, x in ("centred keys", k - k.mean(2, keepdim=True)), ("keys", k):
            sketch = Sketch(k, 3, b, on.seed)
            sketch.insert(J, x, v)
            read, values = sketch.query(J)
            note(what, read, x)
        note("values", values, v)
    numbers = {
        f"error of {what}, in variances": mean(torch.tensor(x).mean(0))
        for what, x in errors.items()
    }
    bound, _ = printed_bound(a, 3 * b)
    keys, values, _ = numbers.values()
    verdict = both(below(keys, bound), below(values, bound))
    return Finding(verdict, numbers | {"the bound": (bound, 0.0)})


@cache
def attended(on: Subject) -> list[tuple[Tensor, Tensor]]:
    """Return two tensors (L, 1, H, prompt) of each text, for its prompt's tokens.

    They are whether a later query of the group gives a token more than 0.5 % of its attention, and
    what the prompt's queries give it, H2O's score.
    """
    cut = on.text.prompt.shape[1]
    H = on.model.config.n_kv_heads

    found = []
    for text in on.text.tokens.split(1):
        p = attention_maps(on.model, text)[..., :cut].unflatten(2, (H, -1))
        later = (p[..., cut:, :] > 0.005).flatten(3, 4).any(3)
        found.append((later, p[..., :cut, :].sum((3, 4))))
    return found


def R9(on: Subject, keep: float) -> Finding:
    """Measure later attention to what H2O or chance would evict, and the needles of SnapKV."""
    generator = torch.Generator().manual_seed(on.seed)
    often = []
    for later, score in attended(on):
        chance = torch.rand(score.shape, generator=generator).to(score)
        outside = [x <= x.quantile(1 - keep, -1, keepdim=True) for x in (score, chance)]
        often.append([later[x].double().mean() for x in outside])
    often, often_chance = torch.tensor(often).T
    aware = on.answered(SnapKV, keep, "needle", **WINDOW)
    agnostic = on.agnostic(SnapKV, keep, **WINDOW)
    found = {
        "over 0.5 %, outside H2O's share": often,
        "over 0.5 %, outside a random one": often_chance,
        "needles, aware": aware,
        "needles, agnostic": agnostic,
    }
    verdict = both(above(mean(often), 0.1), above(mean(aware - agnostic)))
    return Finding(verdict, means(found))


def R10(on: Subject, keep: float) -> Finding:
    """Count the needles that each method finds, query-agnostic."""
    paper = on.agnostic(KVReviver, keep)
    full = on.agnostic(Method, None)
    others = {kind.__name__: on.agnostic(kind, keep) for kind in (H2O, StreamingLLM)}
    found = {"KVReviver": paper} | others
    found["the shrunk sketch"] = on.agnostic(ShrunkReviver, keep)
    found["full cache"] = full
    found["2 bits a number"] = on.agnostic(Method, None, store=TWO_BITS)
    better = [above(mean(paper - other)) for other in others.values()]
    verdict = both(above(mean(paper - full), -0.1), *better)
    return Finding(verdict, means(found))


def R11(on: Subject, keep: float) -> Finding:
    """Measure the rise of −log p of the texts' ends, with and without a sketch."""
    paper = on.rise(KVReviver, keep, part=3, slack=0)
    none = on.rise(KVReviver, keep, part=3, slack=0, vague=0.0)
    found = means({"by the paper's sketch": paper, "by no sketch": none})
    return Finding(below(mean(paper), LITTLE), found)


def R12(on: Subject, keep: float) -> Finding:
    """Count the needles, pairs and labels that each method answers, query-aware."""
    tasks = "needle", "pairs", "few_shot"
    paper = on.answered(KVReviver, keep, *tasks)
    full = on.answered(Method, None, *tasks)
    h2o = on.answered(H2O, keep, *tasks)
    verdict = both(above(mean(paper - full), -0.1), above(mean(paper - h2o)))
    found = {"KVReviver": paper, "full cache": full, "H2O": h2o}
    return Finding(verdict, means(found))


def R13(on: Subject, keep: float) -> Finding:
    """Count the needles that KVReviver and the full cache find, query-aware."""
    paper = on.answered(KVReviver, keep, "needle")
    full = on.answered(Method, None, "needle")
    verdict = above(mean(paper - full), -0.1)
    return Finding(verdict, means({"KVReviver": paper, "full cache": full}))


def changed(
    on: Subject, keep: float, verdict: Callable, option: str, *others: float
) -> Finding:
    """Measure the change of the KL if an option has other values than the paper's.

    verdict: of a change and a tenth of the KL.
    """
    paper = on.kl(KVReviver, keep)
    limit = 0.1 * paper.mean().item()
    numbers = {f"KL at {getattr(KVReviver, option)}": mean(paper)}
    verdicts = []
    for x in others:
        change = mean(on.kl(KVReviver, keep, **{option: x}) - paper)
        numbers[f"change at {x}"] = change
        verdicts.append(verdict(change, limit))
    return Finding(both(*verdicts), numbers)


def R14(on: Subject, keep: float) -> Finding:
    """Measure the change of the KL by ReplaceRates of 1.0 and 1.5."""
    return changed(on, keep, within, "replace_rate", 1.0, 1.5)


def R15(on: Subject, keep: float) -> Finding:
    """Measure the change of the KL by 0.2 and 0.6 of the budget for Recent."""

    def no_lower(change: Number, limit: float) -> str:
        return above(change, -limit)

    return changed(on, keep, no_lower, "recent", 0.2, 0.6)


# ---- Scissorhands ----


def S7(on: Subject) -> Finding:
    """Measure the persistence of importance, the cosine of x and F(x), and the power law."""
    found = observed(on.model, on.text.tokens[: on.some(2)])
    low = found.mean(1).argmin(1)  # a layer for each
    ratio, cosine, exponent = (mean(x[:, layer]) for x, layer in zip(found[:3], low))
    verdict = both(above(ratio, 0.95), above(cosine, 0.9), above(exponent, 2.0))
    numbers = {
        "persistence, lowest layer": ratio,
        "its share by chance": mean(found[3][:, low[0]]),
        "cosine, lowest layer": cosine,
        "exponent, lowest layer": exponent,
    }
    return Finding(verdict, numbers)


def S8(on: Subject, keep: float) -> Finding:
    """Measure the rise of −log p of the texts' ends, and labels if the question comes later."""
    rise = on.rise(Scissorhands, keep, part=2)
    found = {
        "rise of −log p": rise,
        "labels": on.right("few_shot", Scissorhands, keep, "agnostic"),
        "labels, full cache": on.right("few_shot", Method, None, "agnostic"),
    }
    return Finding(below(mean(rise), LITTLE), means(found))


def S9(on: Subject, keep: float) -> Finding:
    """Measure how much more −log p rises if what stays is rounded."""
    evicted = on.rise(Scissorhands, keep, part=2)
    more = mean(on.rise(FourBits, keep, part=2) - evicted)
    numbers = {"rise by 4 bits": more, "rise by eviction": mean(evicted)}
    return Finding(below(more, LITTLE), numbers)


JUDGED = [
    P5,
    P6,
    P7,
    P8,
    P10,
    P11,
    P12,
    P13,
    C1,
    C2,
    R4,
    R6,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
    S7,
    S8,
    S9,
]
CLAIMS = {rule.__name__: rule for rule in JUDGED}


def keep_ratios(claim: str, asked: Iterable[float] = KEEP) -> list[float | None]:
    """Return the keep ratios at which a claim is judged."""
    return [None] if claim == "S7" else [*asked]


@torch.no_grad()
def read(on: Subject, claims: Iterable[str]):
    """Measure what these claims share at all keep ratios: the full cache, and attention."""
    papers = {claim[0] for claim in claims}
    try:
        for task in dict.fromkeys(task for paper in papers for task in TASKS[paper]):
            on.right(task, Method, None)
        _ = on.text, "P6" in claims and on.heads, "R9" in claims and attended(on)
    except ValueError:
        pass  # `judge` meets it again, and returns it


@torch.no_grad()
def judge(claim: str, on: Subject, keep: float | None = None) -> Finding:
    """Return the finding on a claim, or the reason why this model cannot judge it.

    keep: the share of the entries that stays, one of `keep_ratios`.
    """
    given = (on, keep) if keep else (on,)
    try:
        check_size(on.model, on.documents, 2, on.T)
        return CLAIMS[claim](*given)
    except ValueError as error:
        return Finding(UNFIT, {}, str(error))
