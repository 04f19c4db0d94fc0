"""The rules as code: one function for each claim that can be tested on a trained model.

    judge("P6", Subject(model, Tasks(encoding, "test")))

python -m nanollm claims does so for all of them.

A function has its claim's ID as its name; the papers' files beside this one have the rule in words.
Claims about equations or random draws have no rule. If a number lies within two standard errors of
a rule's limit, the claim is undecided. Claims about models with billions of parameters are tested
on these only (`of_large`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
import torch.nn.functional as F

from lab.benchmark import check_size, text_windows
from lab.claims.compared_methods import (
    COMPARED,
    RULES,
    WINDOW,
    long_answer,
    rank_correlation,
)
from lab.claims.scissorhands_measured import FourBits, attention_maps, observed
from lab.claims.subject import (
    PART,
    UNFIT,
    Finding,
    Number,
    Subject,
    above,
    below,
    both,
    mean,
    means,
    of_large,
    over_texts,
    within,
)
from lab.kept import held
from lab.replay import feed
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
    masked_attention,
    perturbation,
    theta,
)
from methods.theory.sketch_error import printed_bound, relative_error
from nanollm.attention import probabilities
from nanollm.cache import Method, compress, make_cache
from nanollm.ranking import indices
from nanollm.tokenizer import boundaries

LITTLE = 0.02  # a rise of −log p, in nats a token, that still counts as no cost


# ---- CriticalKV ----


def P2(on: Subject) -> Finding:
    """Compare attention after evicting a random half with masked, renormalised attention."""
    generator = torch.Generator().manual_seed(on.seed)
    differences = []
    layers = zip(make_cache(on.model), on.text.recording, on.text.continuation)
    for layer, prompt, later in layers:
        q, k, v, pos = next(later.split(1))
        layer.write(*(x.to(q.device) for x in prompt[1:]))
        stays = torch.rand(layer.pos.shape, generator=generator) < 0.5
        stays = stays.to(q.device)

        # masked: all slots are there
        keys = torch.cat((layer.k, k), 2)
        values = torch.cat((layer.v, v), 2).unsqueeze(2)
        p = probabilities(q, keys)
        stays_too = F.pad(stays, (0, 1), value=True)[:, :, None, None]
        y = (masked_attention(p, stays_too) @ values).flatten(1)

        layer.keep(indices(stays))
        evicted = layer.attend(q, k, v, pos).flatten(1)
        differences.append((y - evicted).abs().amax(1) / y.abs().amax(1))
    largest = mean(torch.stack(differences).amax(0))
    limit = 100 * torch.finfo(y.dtype).eps
    return Finding(below(largest, limit), {"largest difference": largest})


def P3(on: Subject) -> Finding:
    """Measure L and θ of every head at a quarter of the entries."""

    def largest(A: Tensor, _, values: Tensor) -> Tensor:
        # SmolLM2 has heads that give evicted entries 1e-9 of A
        A = A.double()
        values = values.double()
        A = A / A.sum(-1, keepdim=True)
        norms = values.abs().sum(-1)
        kept = torch.logical_or(*algorithm_1(A, norms, round(A.shape[-1] / 4)))
        return (perturbation(A, values, kept) / theta(A, norms, kept)).amax()

    most = mean(on.heads(largest))
    return Finding(below(most, 1 + 1e-4), {"largest L / θ": most})


def P5(on: Subject) -> Finding:
    """Count the needles and pairs that each budget rule finds, plain and pooled in both stages."""
    plain = {Rule.__name__: on.facts(Rule.__name__) for Rule in RULES}
    changes = {}
    for name, x in plain.items():
        pooled = on.facts(name, select=PooledCritical())
        changes[f"change of {name}, pooled"] = mean(pooled - x)
    verdict = both(*map(above, changes.values()))
    return Finding(verdict, means(plain) | changes | {"keep ratio": (on.tight, 0.0)})


def P6(on: Subject) -> Finding:
    """Count the heads beyond the first layer whose σ exceeds 1/2, at a quarter of the entries."""

    def beyond(
        A: Tensor,
        norms: Tensor,
        values: Tensor,
    ) -> Tensor:
        first, _ = algorithm_1(A, norms, round(A.shape[-1] / 4))
        return (assumption_1(A, first) > 0.5)[0, 1:].double().mean()

    share = mean(on.heads(beyond))
    return Finding(above(share, 0.95), {"heads with σ > 1/2": share})


def P7(on: Subject) -> Finding:
    """Measure the share of heads whose L is lower than with SnapKV."""

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return (x.mean(0) < y.mean(0)).double().mean()

    names = {
        "heads with a lower L": "SnapKV+critical",
        "heads, no norms and no pool": "SnapKV, no pool",
        "heads, pooled in both stages": "SnapKV+critical, stage 2 pooled",
    }
    plain = on.of_text("SnapKV")["l1_alone"]
    found = {}
    for what, name in names.items():
        found[what] = over_texts(lower, on.of_text(name)["l1_alone"], plain)
    return Finding(above(found["heads with a lower L"], 0.5), found)


def P8(on: Subject) -> Finding:
    """Count the needles and pairs that SnapKV finds with and without stage 1."""
    plain = on.facts("SnapKV")
    streaming = on.facts("StreamingLLM")
    quarter = on.facts("SnapKV", select=PooledCritical(0.25))
    none = on.facts("SnapKV", select=PooledCritical(0.0))
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
    return Finding(verdict, means(found) | {"keep ratio": (on.tight, 0.0)})


def P10(on: Subject) -> Finding:
    """Correlate L and KL over methods."""

    def correlation(L: Tensor, kl: Tensor) -> float:
        return rank_correlation(L.mean(0), kl.mean(0))

    rows = [on.of_text(name) for name in COMPARED]
    L = torch.stack([row["l1_alone"].mean((1, 2)) for row in rows], 1)
    kl = torch.stack([row["kl"] for row in rows], 1)
    found = over_texts(correlation, L, kl)
    return Finding(above(found), {"rank correlation": found})


def P11(on: Subject) -> Finding:
    """Interpolate the budget at which each rule has the KL that the norms give at a quarter."""
    kept = 0.5, 0.25, 0.125

    def saved(kl: Tensor) -> float:  # (texts, 1 + len(kept))
        norms, *plain = kl.mean(0).tolist()
        rising = np.maximum.accumulate(plain)
        return 1 - 0.25 / 2 ** np.interp(norms, rising, np.log2(kept))

    found = {}
    for Rule in RULES:
        name = Rule.__name__
        kl = [on.of_text(f"{name}+critical")["kl"]]
        kl += [on.of_text(name, keep_ratio)["kl"] for keep_ratio in kept]
        found[f"budget saved, {name}"] = over_texts(saved, torch.stack(kl, 1))
    return Finding(both(*(above(x, 0.21) for x in found.values())), found)


def P12(on: Subject) -> Finding:
    """Measure the KL of texts that are compressed again whenever the cache holds half of one."""
    texts = text_windows(on.tasks, 2 * on.documents, on.T, on.model)
    parts = texts.to(on.text.tokens.device).split(PART)

    def measured(some: Tensor) -> Tensor:
        return long_answer(on.model, some, SnapKV.select, Critical()).cpu()

    plain, norms = torch.cat(on.spread(measured, parts), 1)
    change = mean(norms - plain)
    numbers = {"KL of SnapKV": mean(plain), "change by the paper's rule": change}
    return Finding(below(change), numbers)


def P13(on: Subject) -> Finding:
    """Compare the paper's gain in the last layer alone and after compressed layers."""
    critical = on.of_text("SnapKV+critical")
    plain = on.of_text("SnapKV")

    def gain(x: Tensor, y: Tensor) -> Tensor:
        return 1 - x[:, -1].mean() / y[:, -1].mean()

    def more(
        x: Tensor,
        y: Tensor,
        alone: Tensor,
        plain_alone: Tensor,
    ) -> Tensor:
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


def C1(on: Subject) -> Finding:
    """Count the needles with long values that single tokens and chunks find."""
    ends = boundaries(on.tasks.encoding, on.model.config.vocab_size)
    methods = {
        "SnapKV": (SnapKV, {}),
        "ChunkKV": (ChunkKV, {}),
        "chunks of 20": (ChunkKV, dict(select=Chunks(20))),
        "semantic chunks": (SemanticChunkKV, dict(ends=ends)),
    }
    for kept in (0.25, 0.5):
        found = {}
        for name, (kind, options) in methods.items():
            given = WINDOW | options
            found[name] = on.answered(kind, kept, "unmarked long needle", **given)
        if max(found["SnapKV"].mean(), found["ChunkKV"].mean()) >= 0.1:
            break
    verdict = above(mean(found["ChunkKV"] - found["SnapKV"]))
    return Finding(verdict, means(found) | {"keep ratio": (kept, 0.0)})


def C2(on: Subject) -> Finding:
    """Compare the choices of neighbouring layers, and the pairs found if two layers share one."""
    tokens = on.text.tokens
    budget = round(0.1 * tokens.shape[1])
    methods = {
        "tokens": (SnapKV, dict(kernel_size=1)),
        "SnapKV": (SnapKV, {}),
        "chunks": (ChunkKV, {}),
    }
    alike = {}
    for name, (kind, options) in methods.items():
        caches = make_cache(on.model, kind, budget=budget, **WINDOW, **options)
        feed(on.model, tokens, caches)
        compress(on.model, tokens, caches)
        kept = held(caches, tokens.shape[1] - WINDOW["window_size"])
        # the Jaccard similarity is |A ∩ B| / |A ∪ B|
        lower = kept[:, :-1]
        upper = kept[:, 1:]
        jaccard = (lower & upper).sum(-1) / (lower | upper).sum(-1)
        alike[f"similarity, {name}"] = jaccard.mean((1, 2)).cpu()
    more = mean(alike["similarity, chunks"] - alike["similarity, SnapKV"])

    def pairs_found(reuse: int) -> Tensor:
        options = WINDOW | dict(reuse=reuse)
        return on.answered(ChunkKV, 0.25, "unmarked pairs", **options)

    alone = pairs_found(1)
    reuse = pairs_found(2)
    pairs = {"pairs, single layers": alone, "pairs, groups of two": reuse}
    verdict = both(above(more), above(mean(reuse - alone), -0.1))
    return Finding(verdict, means(alike | pairs))


# ---- KVReviver ----


def R4(on: Subject) -> Finding:
    """Measure the KL with 0.1, 0.2, 0.4 and none of the budget for Vague."""
    paper = on.kl(KVReviver)
    shrunk = on.kl(ShrunkReviver)
    none = on.kl(KVReviver, vague=0.0)
    more = on.kl(KVReviver, vague=0.2, recent=0.4) - paper
    most = on.kl(KVReviver, vague=0.4, recent=0.3) - paper
    found = {
        "KL at 0.1": paper,
        "change at 0.2": more,
        "change at 0.4": most,
        "change without a sketch": none - paper,
        "change from shrunk to no sketch": none - shrunk,
    }
    return Finding(both(above(mean(more)), above(mean(most))), means(found))


def R6(on: Subject) -> Finding:
    """Measure the squared errors of keys and values revived from a sketch of five tokens a slot."""
    tokens = on.text.tokens
    B, a = on.text.prompt.shape
    errors = []
    for _, k, v, _ in on.text.recording:
        sketch = Sketch(k, 3, a // 15, on.seed)
        J = torch.arange(a).expand(*k.shape[:2], -1)
        sketch.insert(J, k, v)
        for x, true in zip(sketch.query(J), (k, v)):
            texts = zip(x.split(1), true.split(1))
            errors.append([relative_error(*text) for text in texts])
    keys, values = map(mean, torch.tensor(errors).unflatten(0, (-1, 2)).mean(0))
    bound, _ = printed_bound(a, 3 * (a // 15))

    # what the second half of each text gives to its first token, (texts, L, heads)
    def given_to_first(text: Tensor) -> Tensor:
        maps = attention_maps(on.model, text)[:, 0]
        return maps[:, :, tokens.shape[1] // 2 :, 0].mean(-1)

    first = torch.stack(on.spread(given_to_first, tokens.split(1)))
    numbers = {
        "error of keys, in variances": keys,
        "error of values": values,
        "the bound": (bound, 0.0),
        "most weight on a first token": (first.mean(0).max().item(), 0.0),
    }
    return Finding(both(below(keys, bound), below(values, bound)), numbers)


def R9(on: Subject) -> Finding:
    """Measure the later attention to tokens outside H2O's 40 % and outside a random 40 %."""
    tokens = on.text.tokens
    c = on.model.config
    cut = tokens.shape[1] * 7 // 8
    shape = (c.n_layers, 1, c.n_kv_heads, cut)
    generator = torch.Generator().manual_seed(on.seed)
    chances = [torch.rand(shape, generator=generator) for _ in tokens]

    def shares(text_and_chance: tuple[Tensor, Tensor]) -> list[float]:
        text, chance = text_and_chance
        p = attention_maps(on.model, text)[..., :cut].unflatten(2, (c.n_kv_heads, -1))
        # by a later query of the group
        activated = (p[..., cut:, :] > 0.005).flatten(3, 4).any(3)
        score = p[..., :cut, :].sum((3, 4))
        found = []
        for x in score, chance.to(score):
            outside = x <= x.quantile(0.6, -1, keepdim=True)
            found.append(activated[outside].float().mean().item())
        return found

    texts = zip(tokens.split(1), chances)
    often, often_chance = torch.tensor(on.spread(shares, texts)).T
    aware = on.answered(SnapKV, 0.25, "needle", **WINDOW)
    agnostic = on.agnostic(SnapKV, **WINDOW)
    found = {
        "over 0.5 %, outside H2O's 40 %": often,
        "over 0.5 %, outside a random 40 %": often_chance,
        "needles, aware": aware,
        "needles, agnostic": agnostic,
    }
    verdict = both(above(mean(often), 0.1), above(mean(aware - agnostic)))
    return Finding(verdict, means(found))


def R10(on: Subject) -> Finding:
    """Count the needles that each method finds, query-agnostic."""
    paper = on.agnostic(KVReviver)
    full = on.agnostic(Method, None)
    others = {kind.__name__: on.agnostic(kind) for kind in (H2O, StreamingLLM)}
    found = {"KVReviver": paper} | others
    found["the shrunk sketch"] = on.agnostic(ShrunkReviver)
    found["full cache"] = full
    two_bits = partial(RoundedSlots, bits=2)
    found["2 bits a number"] = on.agnostic(Method, None, store=two_bits)
    better = [above(mean(paper - other)) for other in others.values()]
    verdict = both(above(mean(paper - full), -0.1), *better)
    return Finding(verdict, means(found))


def R11(on: Subject) -> Finding:
    """Measure −log p of the texts' last eighth at a tenth of the bytes, and without a sketch."""
    paper = on.rise(KVReviver, 0.1, slack=0, vague=0.1)
    none = on.rise(KVReviver, 0.1, slack=0, vague=0.0)
    verdict = of_large(on.model, below(mean(paper), LITTLE))
    return Finding(
        verdict, means({"by the paper's sketch": paper, "by no sketch": none})
    )


def R12(on: Subject) -> Finding:
    """Count the needles, pairs and labels that each method answers, query-aware."""
    tasks = "needle", "pairs", "few_shot"
    paper = on.answered(KVReviver, 0.25, *tasks)
    full = on.answered(Method, None, *tasks)
    h2o = on.answered(H2O, 0.25, *tasks)
    loss = of_large(on.model, above(mean(paper - full), -0.1))
    found = {"KVReviver": paper, "full cache": full, "H2O": h2o}
    return Finding(both(loss, above(mean(paper - h2o))), means(found))


def R13(on: Subject) -> Finding:
    """Count the needles that KVReviver and the full cache find, query-aware."""
    paper = on.answered(KVReviver, 0.25, "needle")
    full = on.answered(Method, None, "needle")
    verdict = above(mean(paper - full), -0.1)
    return Finding(verdict, means({"KVReviver": paper, "full cache": full}))


def changed(on: Subject, verdict: Callable, option: str, *others: float) -> Finding:
    """Measure the change of the KL if an option has other values than the paper's.

    verdict: of a change and a tenth of the KL.
    """
    paper = on.kl(KVReviver)
    limit = 0.1 * paper.mean().item()
    numbers = {f"KL at {getattr(KVReviver, option)}": mean(paper)}
    verdicts = []
    for x in others:
        change = mean(on.kl(KVReviver, **{option: x}) - paper)
        numbers[f"change at {x}"] = change
        verdicts.append(verdict(change, limit))
    return Finding(both(*verdicts), numbers)


def R14(on: Subject) -> Finding:
    """Measure the change of the KL by ReplaceRates of 1.0 and 1.5."""
    return changed(on, within, "replace_rate", 1.0, 1.5)


def R15(on: Subject) -> Finding:
    """Measure the change of the KL by 0.2 and 0.6 of the budget for Recent."""

    def no_lower(change: Number, limit: float) -> str:
        return above(change, -limit)

    return changed(on, no_lower, "recent", 0.2, 0.6)


# ---- Scissorhands ----


def S7(on: Subject) -> Finding:
    """Measure the persistence of importance, the cosine of x and F(x), and the power law."""
    texts = on.text.tokens.split(1)
    found = torch.cat(on.spread(lambda text: observed(on.model, text), texts), 1)
    low = found.mean(1).argmin(1)  # a layer for each
    ratio, cosine, exponent = (mean(x[:, layer]) for x, layer in zip(found[:3], low))
    verdict = both(above(ratio, 0.95), above(cosine, 0.9), above(exponent, 2.0))
    numbers = {
        "persistence, lowest layer": ratio,
        "its share by chance": mean(found[3][:, low[0]]),
        "cosine, lowest layer": cosine,
        "exponent, lowest layer": exponent,
    }
    return Finding(of_large(on.model, verdict), numbers)


def S8(on: Subject) -> Finding:
    """Measure −log p of the texts' last eighth, and labels, with a fifth of the entries."""
    rise = on.rise(Scissorhands, 0.2)
    found = {
        "rise of −log p": rise,
        "labels": on.right("few_shot", Scissorhands, 0.2, "agnostic"),
        "labels, full cache": on.right("few_shot", Method, None, "agnostic"),
    }
    return Finding(of_large(on.model, below(mean(rise), LITTLE)), means(found))


def S9(on: Subject) -> Finding:
    """Measure how much more −log p rises if the kept fifth is rounded, on twice the texts."""
    # another machine's rounding flips steps of the 4 bits
    on = replace(on, documents=2 * on.documents)
    fifth = on.rise(Scissorhands, 0.2)
    more = mean(on.rise(FourBits, 0.2) - fifth)
    numbers = {"rise by 4 bits": more, "rise by eviction": mean(fifth)}
    return Finding(below(more, LITTLE), numbers)


JUDGED = [
    P2,
    P3,
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


@torch.no_grad()
def judge(claim: str, on: Subject) -> Finding:
    """Return the finding on a claim, or the reason why this model cannot judge it."""
    try:
        check_size(on.model, on.documents, 2, on.T)
        return CLAIMS[claim](on)
    except ValueError as error:
        return Finding(UNFIT, {}, str(error))
