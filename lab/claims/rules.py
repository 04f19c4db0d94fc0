"""The rules as code: one function for each claim that can be tested on a trained model.

    judge("P6", Subject(model, Tasks(encoding, "test")))    # or: python -m nanollm claims --model FOLDER

A function has its claim's ID as its name; the papers' files beside this one have the rule in words.
Claims about equations or random draws have no rule. If a number lies within two standard errors of
a rule's limit, the claim is undecided. Claims about models with billions of parameters are tested
on these only (`of_large`).
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
import torch.nn.functional as F

from lab.claims.change_and_text import (
    COMPARED,
    RULES,
    WINDOW,
    WINDOW_METHODS,
    long_answer,
    rank_correlation,
)
from lab.claims.persistence_measured import FourBits, attention_maps, observed
from lab.claims.subject import (
    NOT,
    PART,
    UNFIT,
    Finding,
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
from lab.evaluate import check_size, held, text_windows
from lab.replay import feed
from methods.baselines.cam import CaM
from methods.baselines.h2o import H2O
from methods.baselines.quantized import Quantized
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical, PooledCritical
from methods.kv_reviver import KVReviver, Sketch
from methods.ours.chunk_kv_semantic import SemanticChunkKV
from methods.ours.kv_reviver_shrunk import ShrunkReviver
from methods.ours.theta import theta
from methods.scissorhands import Scissorhands
from methods.theory.perturbation import (
    algorithm_1,
    assumption_1,
    masked_attention,
    perturbation,
)
from methods.theory.sketch_error import fisher_shares, printed_bound, relative_error
from nanollm.attention import probabilities
from nanollm.cache import LayerCache, compress, make_cache
from nanollm.ranking import indices
from nanollm.tokenizer import boundaries

LITTLE = 0.02  # a rise of −log p, in nats a token, that still counts as no cost


# ---- CriticalKV ---


def P2(on: Subject) -> Finding:
    """Compare attention after evicting a random half with masked, renormalised attention."""
    g, off = torch.Generator().manual_seed(on.seed), []
    for layer, told, later in zip(
        make_cache(on.model), on.text.recording, on.text.continuation
    ):
        q, k, v, pos = next(later.split(1))
        layer.write(*(x.to(q.device) for x in told[1:]))
        kept = (torch.rand(layer.pos.shape, generator=g) < 0.5).to(q.device)
        keys, values = (
            torch.cat((layer.k, k), 2),
            torch.cat((layer.v, v), 2).unsqueeze(2),
        )
        # all are visible
        p = probabilities(q, keys, torch.zeros_like(keys[..., 0]), None, pos)
        y = (
            masked_attention(p, F.pad(kept, (0, 1), value=True)[:, :, None, None])
            @ values
        )
        layer.keep(indices(kept))
        y, evicted = y.flatten(1), layer.attend(q, k, v, pos).flatten(1)
        off.append((y - evicted).abs().amax(1) / y.abs().amax(1))
    largest = mean(torch.stack(off).amax(0))
    return Finding(
        below(largest, 100 * torch.finfo(y.dtype).eps), {"largest difference": largest}
    )


def P3(on: Subject) -> Finding:
    """Measure L and θ of every head at a quarter of the entries."""

    def largest(A: Tensor, norms: Tensor, values: Tensor) -> Tensor:
        # SmolLM2 has heads that give evicted entries 1e-9 of A
        A, values = A.double(), values.double()
        A, norms = A / A.sum(-1, keepdim=True), values.abs().sum(-1)
        kept = torch.logical_or(*algorithm_1(A, norms, round(A.shape[-1] / 4)))
        return (perturbation(A, values, kept) / theta(A, norms, kept)).amax()

    most = mean(on.heads(largest))
    return Finding(below(most, 1 + 1e-4), {"largest L / θ": most})


def P5(on: Subject) -> Finding:
    """Count the needles and pairs that each budget rule finds, plain and pooled in both stages."""
    plain = {Rule.__name__: on.facts(Rule.__name__) for Rule in RULES}
    pooled = {
        f"change of {name}, pooled": mean(on.facts(name, select=PooledCritical()) - x)
        for name, x in plain.items()
    }
    return Finding(
        both(*map(above, pooled.values())),
        means(plain) | pooled | {"keep ratio": (on.tight, 0.0)},
    )


def P6(on: Subject) -> Finding:
    """Count the heads beyond the first layer whose σ exceeds 1/2, at a quarter of the entries."""

    def beyond(A: Tensor, norms: Tensor, values: Tensor) -> Tensor:
        first, _ = algorithm_1(A, norms, round(A.shape[-1] / 4))
        return (assumption_1(A, first) > 0.5)[0, 1:].double().mean()

    share = mean(on.heads(beyond))
    return Finding(above(share, 0.95), {"heads with σ > 1/2": share})


def P7(on: Subject) -> Finding:
    """Measure the share of heads whose L is lower than with SnapKV."""
    lower = lambda x, y: (x.mean(0) < y.mean(0)).double().mean()
    names = {
        "heads with a lower L": "SnapKV+critical",
        "heads, no norms and no pool": "SnapKV, no pool",
        "heads, pooled in both stages": "SnapKV+critical, stage 2 pooled",
    }
    plain = on.of_text("SnapKV")["l1_alone"]
    found = {
        what: over_texts(lower, on.of_text(name)["l1_alone"], plain)
        for what, name in names.items()
    }
    return Finding(above(found["heads with a lower L"], 0.5), found)


def P8(on: Subject) -> Finding:
    """Count the needles and pairs that SnapKV finds with and without stage 1."""
    plain, streaming = on.facts("SnapKV"), on.facts("StreamingLLM")
    quarter, none = (
        on.facts("SnapKV", select=PooledCritical(alpha)) for alpha in (0.25, 0.0)
    )
    return Finding(
        both(
            above(mean(none - quarter), -0.1),
            above(mean(quarter - plain)),
            above(mean(quarter - streaming), 0.25),
        ),
        means(
            {
                "SnapKV": plain,
                "α = 0.25": quarter,
                "α = 0": none,
                "StreamingLLM": streaming,
            }
        )
        | {"keep ratio": (on.tight, 0.0)},
    )


def P10(on: Subject) -> Finding:
    """Correlate L and KL over methods."""
    numbers, correlation = {}, lambda L, kl: rank_correlation(L.mean(0), kl.mean(0))
    compared = {
        "rank correlation, all methods": COMPARED,
        "rank correlation, window methods": WINDOW_METHODS,
    }
    for what, names in compared.items():
        rows = [on.of_text(name) for name in names]
        L, kl = (
            [row["l1_alone"].mean((1, 2)) for row in rows],
            [row["kl"] for row in rows],
        )
        numbers[what] = over_texts(correlation, torch.stack(L, 1), torch.stack(kl, 1))
    return Finding(both(*map(above, numbers.values())), numbers)


def P11(on: Subject) -> Finding:
    """Interpolate the budget at which each budget rule has the KL that the norms give at a quarter."""
    kept = 0.5, 0.25, 0.125

    def saved(kl: Tensor) -> float:  # (texts, 1 + len(kept))
        norms, *plain = kl.mean(0).tolist()
        return 1 - 0.25 / 2 ** np.interp(
            norms, np.maximum.accumulate(plain), np.log2(kept)
        )

    found = {}
    for name in (Rule.__name__ for Rule in RULES):
        kl = [
            on.of_text(f"{name}+critical")["kl"],
            *(on.of_text(name, x)["kl"] for x in kept),
        ]
        found[f"budget saved, {name}"] = over_texts(saved, torch.stack(kl, 1))
    return Finding(both(*(above(x, 0.21) for x in found.values())), found)


def P12(on: Subject) -> Finding:
    """Measure the KL of texts that are compressed again whenever the cache holds half of one."""
    texts = text_windows(on.tasks, 2 * on.documents, on.T, on.model).to(
        on.text.tokens.device
    )
    plain, norms = torch.cat(
        on.spread(
            lambda some: long_answer(on.model, some, SnapKV.select, Critical()).cpu(),
            texts.split(PART),
        ),
        1,
    )
    change = mean(norms - plain)
    return Finding(
        below(change),
        {"KL of SnapKV": mean(plain), "change by the paper's rule": change},
    )


def P13(on: Subject) -> Finding:
    """Compare the paper's gain in the last layer alone and after compressed layers."""
    critical, plain = (on.of_text(f"SnapKV{more}") for more in ("+critical", ""))
    gain = lambda x, y: 1 - x[:, -1].mean() / y[:, -1].mean()
    more = lambda x, y, alone, base: gain(x, y) - gain(alone, base)
    alone, together = ((critical[key], plain[key]) for key in ("l1_alone", "l1"))
    grown = over_texts(more, *together, *alone)
    return Finding(
        above(grown),
        {
            "last layer's advantage, alone": over_texts(gain, *alone),
            "after compressed layers": over_texts(gain, *together),
            "difference": grown,
        },
    )


# ---- ChunkKV ---


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
        found = {
            name: on.answered(Method, kept, "unmarked long needle", **WINDOW | options)
            for name, (Method, options) in methods.items()
        }
        if max(found["SnapKV"].mean(), found["ChunkKV"].mean()) >= 0.1:
            break
    return Finding(
        above(mean(found["ChunkKV"] - found["SnapKV"])),
        means(found) | {"keep ratio": (kept, 0.0)},
    )


def C2(on: Subject) -> Finding:
    """Compare the choices of neighbouring layers, and the pairs found if two layers share one."""
    tokens, alike = on.text.tokens, {}
    for name, Method, options in (
        ("tokens", SnapKV, dict(kernel_size=1)),
        ("SnapKV", SnapKV, {}),
        ("chunks", ChunkKV, {}),
    ):
        caches = make_cache(
            on.model, Method, budget=round(0.1 * tokens.shape[1]), **WINDOW, **options
        )
        feed(on.model, tokens, caches)
        compress(on.model, tokens, caches)
        kept = held(caches, tokens.shape[1] - WINDOW["window_size"])
        # the Jaccard similarity is |A ∩ B| / |A ∪ B|
        lower, upper = kept[:, :-1], kept[:, 1:]
        jaccard = (lower & upper).sum(-1) / (lower | upper).sum(-1)
        alike[f"similarity, {name}"] = jaccard.mean((1, 2)).cpu()
    _, snap, chunks = alike.values()
    alone, reuse = (
        on.answered(ChunkKV, 0.25, "unmarked pairs", **WINDOW, reuse=n) for n in (1, 2)
    )
    return Finding(
        both(above(mean(chunks - snap)), above(mean(reuse - alone), -0.1)),
        means(alike | {"pairs, single layers": alone, "pairs, groups of two": reuse}),
    )


# ---- KVReviver ---


def R4(on: Subject) -> Finding:
    """Measure the KL with 0.1, 0.2, 0.4 and none of the budget for Vague."""
    paper, shrunk, none = (
        on.kl(KVReviver),
        on.kl(ShrunkReviver),
        on.kl(KVReviver, vague=0.0),
    )
    more, most = (
        on.kl(KVReviver, vague=x, recent=(1 - x) / 2) - paper for x in (0.2, 0.4)
    )
    return Finding(
        both(above(mean(more)), above(mean(most))),
        means(
            {
                "KL at 0.1": paper,
                "change at 0.2": more,
                "change at 0.4": most,
                "change without a sketch": none - paper,
                "change from shrunk to no sketch": none - shrunk,
            }
        ),
    )


def R5(on: Subject) -> Finding:
    """Measure how layer budgets change the KL: the paper's, and ours with half shared out evenly."""
    # between the texts that are measured
    text = text_windows(on.tasks, 2 * on.documents - 1, on.T, on.model)[1:16:2]
    alone, mixed = (
        fisher_shares(on.model, text.to(on.text.tokens.device), even)
        for even in (0.0, 0.5)
    )
    fixed = mean(on.kl(ShrunkReviver, mixed) - on.kl(ShrunkReviver))
    numbers = {
        "largest two shares": (sum(sorted(alone)[-2:]), 0.0),
        "change of KL, our fix": fixed,
    }
    try:
        change = mean(on.kl(KVReviver, alone) - on.kl(KVReviver))
    except ValueError as error:
        return Finding(NOT, numbers, str(error))
    return Finding(below(change), numbers | {"change of KL": change})


def R6(on: Subject) -> Finding:
    """Measure the squared errors of keys and values revived from a sketch with a/N = 5, tokens over
    slots."""
    tokens, (B, a), errors = on.text.tokens, on.text.prompt.shape, []
    for _, k, v, _ in on.text.recording:
        sketch, J = (
            Sketch(k, 3, a // 15, on.seed),
            torch.arange(a).expand(*k.shape[:2], -1),
        )
        sketch.insert(J, k, v)
        pairs = zip(sketch.query(J), (k, v))
        errors.append(
            [
                [relative_error(found[i : i + 1], true[i : i + 1]) for i in range(B)]
                for found, true in pairs
            ]
        )
    keys, values = map(mean, torch.tensor(errors).mean(0))
    bound, _ = printed_bound(a, 3 * (a // 15))
    # what the second half of each text gives to its first token, (texts, L, heads)
    first = torch.stack(
        on.spread(
            lambda text: attention_maps(on.model, text)[
                :, 0, :, tokens.shape[1] // 2 :, 0
            ].mean(-1),
            tokens.split(1),
        )
    )
    return Finding(
        both(below(keys, bound), below(values, bound)),
        {
            "error of keys, in variances": keys,
            "error of values": values,
            "the bound": (bound, 0.0),
            "most weight on a first token": (first.mean(0).max().item(), 0.0),
        },
    )


def R9(on: Subject) -> Finding:
    """Measure the later attention to tokens outside H2O's 40 % and outside a random 40 %."""
    tokens, c, generator = (
        on.text.tokens,
        on.model.config,
        torch.Generator().manual_seed(on.seed),
    )
    cut = tokens.shape[1] * 7 // 8
    chances = [
        torch.rand((c.n_layers, 1, c.n_kv_heads, cut), generator=generator)
        for _ in tokens
    ]

    def shares(text_and_chance: tuple[Tensor, Tensor]) -> list[float]:
        text, chance = text_and_chance
        p = attention_maps(on.model, text)[..., :cut].unflatten(2, (c.n_kv_heads, -1))
        # by a later query of the group
        activated = (p[..., cut:, :] > 0.005).flatten(3, 4).any(3)
        score = p[..., :cut, :].sum((3, 4))
        outside = (
            x <= x.quantile(0.6, -1, keepdim=True) for x in (score, chance.to(score))
        )
        return [activated[x].float().mean().item() for x in outside]

    often, often_chance = torch.tensor(
        on.spread(shares, zip(tokens.split(1), chances))
    ).T
    aware, agnostic = (
        on.answered(SnapKV, 0.25, "needle", **WINDOW),
        on.agnostic(SnapKV, **WINDOW),
    )
    return Finding(
        both(above(mean(often), 0.1), above(mean(aware - agnostic))),
        means(
            {
                "over 0.5 %, outside H2O's 40 %": often,
                "over 0.5 %, outside a random 40 %": often_chance,
                "needles, aware": aware,
                "needles, agnostic": agnostic,
            }
        ),
    )


def R10(on: Subject) -> Finding:
    """Count the needles that each method finds, query-agnostic."""
    found = {
        Method.__name__: on.agnostic(Method)
        for Method in (KVReviver, H2O, StreamingLLM, CaM)
    }
    paper, *others = found.values()
    found |= {
        "the shrunk sketch": on.agnostic(ShrunkReviver),
        "full cache": on.agnostic(LayerCache, None),
        "2 bits a number": on.agnostic(Quantized, None, bits=2, residual_length=16),
    }
    near = above(mean(paper - found["full cache"]), -0.1)
    return Finding(
        both(near, *(above(mean(paper - other)) for other in others)), means(found)
    )


def R11(on: Subject) -> Finding:
    """Measure −log p of the texts' last eighth at a tenth of the bytes, with and without a sketch."""
    paper, none = (on.rise(KVReviver, 0.1, slack=0, vague=x) for x in (0.1, 0.0))
    return Finding(
        of_large(on.model, below(mean(paper), LITTLE)),
        means({"by the paper's sketch": paper, "by no sketch": none}),
    )


def R12(on: Subject) -> Finding:
    """Count the needles, pairs and labels that each method answers, query-aware."""
    paper, full, h2o = (
        on.answered(Method, keep_ratio, "needle", "pairs", "few_shot")
        for Method, keep_ratio in ((KVReviver, 0.25), (LayerCache, None), (H2O, 0.25))
    )
    loss = of_large(on.model, above(mean(paper - full), -0.1))
    return Finding(
        both(loss, above(mean(paper - h2o))),
        means({"KVReviver": paper, "full cache": full, "H2O": h2o}),
    )


def R13(on: Subject) -> Finding:
    """Count the needles that KVReviver and the full cache find, query-aware."""
    paper, full = (
        on.answered(Method, keep_ratio, "needle")
        for Method, keep_ratio in ((KVReviver, 0.25), (LayerCache, None))
    )
    return Finding(
        above(mean(paper - full), -0.1), means({"KVReviver": paper, "full cache": full})
    )


def R14(on: Subject) -> Finding:
    """Measure the change of the KL by ReplaceRates of 1.0 and 1.5."""
    paper = on.kl(KVReviver)
    often, seldom = (
        mean(on.kl(KVReviver, replace_rate=rate) - paper) for rate in (1.0, 1.5)
    )
    limit = 0.1 * paper.mean().item()
    return Finding(
        both(within(often, limit), within(seldom, limit)),
        {"KL at 1.1": mean(paper), "change at 1.0": often, "change at 1.5": seldom},
    )


def R15(on: Subject) -> Finding:
    """Measure the change of the KL by 0.2 and 0.6 of the budget for Recent."""
    paper = on.kl(KVReviver)
    few, many = (mean(on.kl(KVReviver, recent=share) - paper) for share in (0.2, 0.6))
    limit = 0.1 * paper.mean().item()
    return Finding(
        both(above(few, -limit), above(many, -limit)),
        {"KL at 0.45": mean(paper), "change at 0.2": few, "change at 0.6": many},
    )


# ---- Scissorhands ---


def S7(on: Subject) -> Finding:
    """Measure the persistence of importance, the cosine of x and F(x), and the power law."""
    found = torch.cat(
        on.spread(lambda text: observed(on.model, text), on.text.tokens.split(1)), 1
    )
    low = found.mean(1).argmin(1)  # a layer for each
    ratio, cosine, k = (mean(x[:, layer]) for x, layer in zip(found[:3], low))
    verdict = both(above(ratio, 0.95), above(cosine, 0.9), above(k, 2.0))
    return Finding(
        of_large(on.model, verdict),
        {
            "persistence, lowest layer": ratio,
            "its share by chance": mean(found[3][:, low[0]]),
            "cosine, lowest layer": cosine,
            "exponent, lowest layer": k,
        },
    )


def S8(on: Subject) -> Finding:
    """Measure −log p of the texts' last eighth, and labels, with a fifth of the entries."""
    rise, full = (
        on.rise(Scissorhands, 0.2),
        on.row("few_shot", LayerCache, None, "agnostic"),
    )
    return Finding(
        of_large(on.model, below(mean(rise), LITTLE)),
        means(
            {
                "rise of −log p": rise,
                "labels": on.row("few_shot", Scissorhands, 0.2, "agnostic"),
                "labels, full cache": full,
            }
        ),
    )


def S9(on: Subject) -> Finding:
    """Measure how much more −log p rises if the kept fifth is rounded to 4 bits, on twice the texts."""
    # another machine's rounding flips steps of the 4 bits
    on = replace(on, documents=2 * on.documents)
    fifth, bits = on.rise(Scissorhands, 0.2), on.rise(FourBits, 0.2)
    more = mean(bits - fifth)
    return Finding(
        below(more, LITTLE), {"rise by 4 bits": more, "rise by eviction": mean(fifth)}
    )


CLAIMS = {
    rule.__name__: rule
    for rule in (
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
        R5,
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
    )
}


@torch.no_grad()
def judge(claim: str, on: Subject) -> Finding:
    """Return the finding on a claim, or the reason why this model cannot judge it."""
    try:
        check_size(on.model, on.documents, 2, on.T)
        return CLAIMS[claim](on)
    except ValueError as error:
        return Finding(UNFIT, {}, str(error))
