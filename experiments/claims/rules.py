"""The rules as code: one function for each claim that can be tested on a trained model.

    judge("P6", Subject(model, Tasks(encoding, "test")))    # or: python -m nanollm claims --model FOLDER

A function has its claim's ID as its name; the papers' files beside this one have the rule in words. Claims
about equations or random draws have no rule. If a number lies within two standard errors of a rule's limit,
the claim is undecided.

Some claims state a number of models with billions of parameters: the quality that is left, a share of the
tokens, a speed. They are not testable on a smaller model (`of_large`).
"""
import torch
import torch.nn.functional as F

from experiments.change_and_text import (COMPARED, RULES, WINDOW_METHODS, WINDOW, compressed, long_answer,
                                         rank_correlation)
from experiments.claims.subject import (NOT, UNFIT, Finding, Subject, above, below, both, mean, means,
                                        of_large, over_texts, within)
from experiments.inside import sinks
from methods.cam import CaM
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical, CriticalCode, PooledCritical
from methods.h2o import H2O
from methods.kv_reviver import KVReviver, Sketch
from methods.kv_reviver_mean import MeanReviver
from methods.ours.chunk_kv_semantic import SemanticChunkKV
from methods.ours.kv_reviver_shrunk import ShrunkReviver
from methods.ours.theta import theta
from methods.quantized import Quantized
from methods.snap_kv import SnapKV
from methods.streaming_llm import StreamingLLM
from methods.theory.chunk_bounds import jaccard
from methods.theory.persistence_measured import attention_maps, observed
from methods.theory.perturbation import algorithm_1, assumption_1, masked_attention, perturbation
from methods.theory.sketch_error import amnesia, fisher_shares, printed_bound, relative_error, revived_logits
from nanollm.attention import probabilities
from nanollm.cache import LayerCache, make_cache
from nanollm.measure.evaluate import check_size, held, maker, text_windows
from nanollm.ranking import indices
from nanollm.tokenizer import boundaries


# ---- CriticalKV ---

def P2(on: Subject) -> Finding:
    """Compare attention after evicting a random half with masked, renormalised attention."""
    g, off = torch.Generator().manual_seed(on.seed), []
    for layer, told, later in zip(make_cache(on.model), on.text.recording, on.text.continuation):
        q, k, v, pos = next(later.split(1))
        layer.write(*(x.to(q.device) for x in told[1:]))
        kept = (torch.rand(layer.pos.shape, generator=g) < 0.5).to(q.device)
        keys, values = torch.cat((layer.k, k), 2), torch.cat((layer.v, v), 2).unsqueeze(2)
        p = probabilities(q, keys, torch.zeros_like(keys[..., 0]), None, pos)  # all are visible
        y = masked_attention(p, F.pad(kept, (0, 1), value=True)[:, :, None, None]) @ values
        layer.keep(indices(kept))
        y, evicted = y.flatten(1), layer.attend(q, k, v, pos).flatten(1)
        off.append((y - evicted).abs().amax(1) / y.abs().amax(1))
    largest = mean(torch.stack(off).amax(0))
    return Finding(below(largest, 100 * torch.finfo(y.dtype).eps), {"largest difference": largest})


def P3(on: Subject) -> Finding:
    """Measure L and θ of every head at a quarter of the entries."""
    found = []
    for A, norms, values in on.heads():
        kept = torch.logical_or(*algorithm_1(A, norms, round(A.shape[-1] / 4)))
        found.append(torch.stack((perturbation(A, values, kept), theta(A, norms, kept))).flatten(1).cpu())
    L, bound = torch.stack(found, 1)  # (prompts, heads)
    most = mean((L / bound).amax(1))
    ratio = over_texts(lambda L, bound: bound.mean() / L.mean(), L, bound)
    return Finding(below(most, 1 + 1e-4), {"largest L / θ": most, "mean θ / mean L": ratio})


def P5(on: Subject) -> Finding:
    """Count the needles and pairs that each budget rule finds, plain and with three selections."""
    plain = {Rule.__name__: on.facts(Rule.__name__) for Rule in RULES}
    pooled, paper, code = (
        {f"change of {name}, {label}": mean(on.facts(name, select=select) - x) for name, x in plain.items()}
        for label, select in (("pooled", PooledCritical()), ("paper's rule", Critical()),
                              ("authors' code", CriticalCode())))
    return Finding(both(*map(above, pooled.values())), means(plain) | pooled | paper | code)


def P6(on: Subject) -> Finding:
    """Measure σ of every head at 25, 12.5 and 6.25 % of the entries."""
    sigma = {25: [], 12.5: [], 6.25: []}
    for A, norms, _ in on.heads():
        for percent, found in sigma.items():
            first, _ = algorithm_1(A, norms, round(percent / 100 * A.shape[-1]))
            found.append((assumption_1(A, first) > 0.5)[0].double().cpu())  # (L, heads)
    sigma = {percent: torch.stack(found) for percent, found in sigma.items()}
    numbers = {"beyond the first layer at 25 %": mean(sigma[25][:, 1:].mean((1, 2)))}
    verdict = above(*numbers.values(), 0.95)
    return Finding(verdict, numbers | {f"heads with σ > 1/2 at {percent:g} %": mean(x.mean((1, 2)))
                                       for percent, x in sigma.items()})


def P7(on: Subject) -> Finding:
    """Measure the share of heads whose L is lower than with SnapKV."""
    lower = lambda x, y: (x.mean(0) < y.mean(0)).double().mean()
    plain = on.of_text("SnapKV")["alone"]
    paper, pooled, neither = (over_texts(lower, on.of_text(f"SnapKV{more}")["alone"], plain)
                              for more in ("+critical", "+critical, stage 2 pooled", ", no pool"))
    return Finding(above(paper, 0.5), {"heads with a lower L": paper, "heads, pooled in both stages": pooled,
                                       "heads, no norms and no pool": neither})


def P8(on: Subject) -> Finding:
    """Count the needles and pairs that SnapKV finds with and without stage 1."""
    rows = {"SnapKV": on.facts("SnapKV"), "α = 0.25, pooled": on.facts("SnapKV", select=PooledCritical()),
            "α = 0, pooled": on.facts("SnapKV", select=PooledCritical(0.0)),
            "StreamingLLM": on.facts("StreamingLLM"),
            "α = 0.25, the paper's rule": on.facts("SnapKV", select=Critical()),
            "α = 0, the paper's rule": on.facts("SnapKV", select=Critical(0.0))}
    plain, quarter, none, streaming, *_ = rows.values()
    return Finding(both(above(mean(none - quarter), -0.1), above(mean(quarter - plain)),
                        above(mean(quarter - streaming), 0.25)), means(rows))


def P10(on: Subject) -> Finding:
    """Correlate L and KL over methods."""
    numbers, correlation = {}, lambda L, kl: rank_correlation(L.mean(0).numpy(), kl.mean(0).numpy())
    compared = {"rank correlation, all methods": COMPARED, "rank correlation, window methods": WINDOW_METHODS}
    for what, names in compared.items():
        rows = [on.of_text(name) for name in names]
        L, kl = [row["alone"].mean((1, 2)) for row in rows], [row["kl"] for row in rows]
        numbers[what] = over_texts(correlation, torch.stack(L, 1), torch.stack(kl, 1))
    return Finding(both(*map(above, numbers.values())), numbers)


def P12(on: Subject) -> Finding:
    """Measure the KL of texts that are compressed again whenever the cache holds half of one."""
    texts = text_windows(on.tasks, 2 * on.documents, on.T, on.model).to(on.text.tokens.device)
    plain, norms, code = (long_answer(on.model, texts, {}, select=select)
                          for select in (SnapKV.select, Critical(), CriticalCode()))
    change = mean(norms["kl"] - plain["kl"])
    return Finding(below(change), {
        "KL of SnapKV": mean(plain["kl"]), "change by the paper's rule": change,
        "change by the authors' code": mean(code["kl"] - plain["kl"]),
        "largest KiB of a text (16 bits)": (plain["most"], 0.0)})


def P13(on: Subject) -> Finding:
    """Compare the paper's gain in the last layer alone and after compressed layers."""
    critical, plain = (on.of_text(f"SnapKV{more}") for more in ("+critical", ""))
    gain = lambda x, y: 1 - x[:, -1].mean() / y[:, -1].mean()
    more = lambda x, y, alone, base: gain(x, y) - gain(alone, base)
    alone, together = ((critical[key], plain[key]) for key in ("alone", "together"))
    grown = over_texts(more, *together, *alone)
    return Finding(above(grown), {"last layer's advantage, alone": over_texts(gain, *alone),
                                  "after compressed layers": over_texts(gain, *together),
                                  "difference": grown})


# ---- ChunkKV ---

def C1(on: Subject) -> Finding:
    """Count the needles with long values that single tokens and chunks find."""
    ends = boundaries(on.tasks.encoding, on.model.config.vocab_size)
    found = {name: on.answered(Method, 0.25, "unmarked long needle", **WINDOW | options)
             for name, Method, options in (("SnapKV", SnapKV, {}), ("ChunkKV", ChunkKV, {}),
                                         ("chunks of 20", ChunkKV, dict(select=Chunks(20))),
                                         ("semantic chunks", SemanticChunkKV, dict(ends=ends)))}
    return Finding(above(mean(found["ChunkKV"] - found["SnapKV"])), means(found))


def C2(on: Subject) -> Finding:
    """Compare the choices of neighbouring layers, and the pairs found if two layers share one."""
    alike, prompt = {}, on.text.tokens.shape[1] - WINDOW["window_size"]
    for name, Method, options in ("tokens", SnapKV, dict(kernel_size=1)), ("SnapKV", SnapKV, {}), (
            "chunks", ChunkKV, {}):
        kept = held(compressed(on.model, Method, on.text.tokens, 0.1, **options), prompt)
        alike[f"similarity, {name}"] = jaccard(kept[:, 1:], kept[:, :-1]).mean((1, 2)).cpu()
    _, snap, chunks = alike.values()
    alone, reuse = (on.answered(ChunkKV, 0.25, "unmarked pairs", **WINDOW, reuse=n) for n in (1, 2))
    return Finding(both(above(mean(chunks - snap)), above(mean(reuse - alone), -0.1)),
                   means(alike | {"pairs, single layers": alone, "pairs, groups of two": reuse}))


# ---- KVReviver ---

def R4(on: Subject) -> Finding:
    """Measure the KL with 0.1, 0.2, 0.4 and none of the budget for Vague."""
    paper, shrunk, none = on.kl(KVReviver), on.kl(ShrunkReviver), on.kl(KVReviver, vague=0.0)
    more, most = (on.kl(KVReviver, vague=x, recent=(1 - x) / 2) - paper for x in (0.2, 0.4))
    return Finding(both(above(mean(more)), above(mean(most))), means({
        "KL at 0.1": paper, "change at 0.2": more, "change at 0.4": most,
        "change without a sketch": none - paper, "KL of the shrunk sketch": shrunk,
        "change from shrunk to no sketch": none - shrunk}))


def R5(on: Subject) -> Finding:
    """Measure how layer budgets change the KL: the paper's, and ours with half shared out evenly."""
    # between the texts that are measured
    text = text_windows(on.tasks, 2 * on.documents - 1, on.T, on.model)[1:16:2]
    alone, mixed = (fisher_shares(on.model, text.to(on.text.tokens.device), even) for even in (0.0, 0.5))
    fixed = mean(on.kl(ShrunkReviver, mixed) - on.kl(ShrunkReviver))
    numbers = {"largest two shares": (sum(sorted(alone)[-2:]), 0.0), "change of KL, our fix": fixed}
    try:
        change = mean(on.kl(KVReviver, alone) - on.kl(KVReviver))
    except ValueError as error:
        return Finding(NOT, numbers, str(error))
    return Finding(below(change), numbers | {"change of KL": change})


def R6(on: Subject) -> Finding:
    """Measure the squared errors of keys and values revived from a sketch of five tokens a slot."""
    (B, a), errors = on.text.prompt.shape, []
    for _, k, v, _ in on.text.recording:
        sketch, J = Sketch(k, 3, a // 15, on.seed), torch.arange(a).expand(*k.shape[:2], -1)
        sketch.insert(J, k, v)
        pairs = zip(sketch.query(J), (k, v))
        errors.append([[relative_error(found[i:i + 1], true[i:i + 1]) for i in range(B)]
                       for found, true in pairs])
    keys, values = map(mean, torch.tensor(errors).mean(0))
    bound, _ = printed_bound(a, 3 * (a // 15))
    *_, revived, true = torch.tensor(revived_logits(on.model, on.text, maker(on.model, KVReviver, 0.25))).T
    first, _ = sinks(on.model, on.text.tokens)
    return Finding(both(below(keys, bound), below(values, bound)), {
        "error of keys, in variances": keys, "error of values": values, "the bound": (bound, 0.0),
        "attention to vague tokens, revived": (revived.mean().item(), 0.0),
        "attention to them, true": (true.mean().item(), 0.0),
        "most weight on a first token": (first.max().item(), 0.0)})


def R9(on: Subject) -> Finding:
    """Measure the later attention to tokens outside H2O's 40 % and outside a random 40 %."""
    c, tokens, found = on.model.config, on.text.tokens, []
    cut, g = tokens.shape[1] * 7 // 8, torch.Generator().manual_seed(on.seed)
    chance = torch.rand(c.n_layers, len(tokens), c.n_kv_heads, cut, generator=g).to(tokens.device)
    for text, drawn in zip(tokens.split(1), chance.split(1, 1)):
        p = attention_maps(on.model, text)[..., :cut].unflatten(2, (c.n_kv_heads, -1))
        later, score = p[..., cut:, :], p[..., :cut, :].sum((3, 4))
        found.append([x for by in (score, drawn) for x in amnesia(later, by, 0.4)["ever"]])
    often, much, often_chance, much_chance = torch.tensor(found).T
    aware, agnostic = on.answered(SnapKV, 0.25, "needle", **WINDOW), on.agnostic(SnapKV, **WINDOW)
    return Finding(both(above(mean(often), 0.1), above(mean(aware - agnostic))), means({
        "over 0.5 %, outside H2O's 40 %": often, "over 0.5 %, outside a random 40 %": often_chance,
        "over 2 %, outside H2O's 40 %": much, "over 2 %, outside a random 40 %": much_chance,
        "needles, aware": aware, "needles, agnostic": agnostic}))


def R10(on: Subject) -> Finding:
    """Count the needles that each method finds, query-agnostic."""
    found = {Method.__name__: on.agnostic(Method) for Method in (KVReviver, H2O, StreamingLLM, CaM)}
    paper, *others = found.values()
    found |= {"the shrunk sketch": on.agnostic(ShrunkReviver), "full cache": on.agnostic(LayerCache, None),
              "2 bits a number": on.agnostic(Quantized, None, bits=2, residual_length=16)}
    near = above(mean(paper - found["full cache"]), -0.1)
    return Finding(both(near, *(above(mean(paper - other)) for other in others)), means(found))


def R11(on: Subject) -> Finding:
    """Measure −log p of the texts' last eighth at a tenth of the bytes."""
    new = on.text.new
    true = -on.text.log_p.gather(-1, on.text.tokens[:, -new:, None])[..., 0].mean(-1)
    caches = (("by the paper's sketch", KVReviver, {}), ("by means of slots", MeanReviver, {}),
              ("by no sketch", KVReviver, dict(vague=0.0)))
    more = {name: on.continued(Method, 0.1, **options)["nll"].cpu() - true.cpu()
            for name, Method, options in caches}
    paper, *_ = more.values()
    return Finding(of_large(on.model, below(mean(paper), 0.02)), means(more))


def R12(on: Subject) -> Finding:
    """Count the needles, pairs and labels that each method answers, query-aware."""
    tasks = "needle", "pairs", "few_shot"
    found = {name: on.answered(Method, keep_ratio, *tasks) for name, Method, keep_ratio in (
        ("KVReviver", KVReviver, 0.25), ("full cache", LayerCache, None), ("H2O", H2O, 0.25),
        ("means of slots", MeanReviver, 0.25))}
    paper, full, h2o, _ = found.values()
    loss = of_large(on.model, above(mean(paper - full), -0.1))
    return Finding(both(loss, above(mean(paper - h2o))), means(found))


def R13(on: Subject) -> Finding:
    """Count the needles that each method finds, query-aware."""
    found = {name: on.answered(Method, keep_ratio, "needle") for name, Method, keep_ratio in (
        ("KVReviver", KVReviver, 0.25), ("full cache", LayerCache, None),
        ("means of slots", MeanReviver, 0.25), ("the shrunk sketch", ShrunkReviver, 0.25))}
    paper, full, *_ = found.values()
    return Finding(above(mean(paper - full), -0.1), means(found))


def R14(on: Subject) -> Finding:
    """Measure the change of the KL by ReplaceRates of 1.0 and 1.5."""
    paper = on.kl(KVReviver)
    often, seldom = (mean(on.kl(KVReviver, replace_rate=rate) - paper) for rate in (1.0, 1.5))
    limit = 0.1 * paper.mean().item()
    return Finding(both(within(often, limit), within(seldom, limit)), {
        "KL at 1.1": mean(paper), "change at 1.0": often, "change at 1.5": seldom})


def R15(on: Subject) -> Finding:
    """Measure the change of the KL by 0.2 and 0.6 of the budget for Recent."""
    paper = on.kl(KVReviver)
    few, many = (mean(on.kl(KVReviver, recent=share) - paper) for share in (0.2, 0.6))
    limit = 0.1 * paper.mean().item()
    return Finding(both(above(few, -limit), above(many, -limit)), {
        "KL at 0.45": mean(paper), "change at 0.2": few, "change at 0.6": many})


# ---- Scissorhands ---

def S7(on: Subject) -> Finding:
    """Measure the persistence of importance, the cosine of x and F(x), and the power law."""
    found = observed(on.model, on.text.tokens)
    low = found.mean(1).argmin(1)  # a layer for each
    ratio, cosine, k = (mean(x[:, layer]) for x, layer in zip(found[:3], low))
    verdict = both(above(ratio, 0.95), above(cosine, 0.9), above(k, 2.0))
    return Finding(of_large(on.model, verdict), {
        "persistence, lowest layer": ratio, "its share by chance": mean(found[3][:, low[0]]),
        "cosine, lowest layer": cosine, "exponent, lowest layer": k})


CLAIMS = {f.__name__: f for f in (P2, P3, P5, P6, P7, P8, P10, P12, P13, C1, C2, R4, R5, R6, R9, R10, R11,
                                   R12, R13, R14, R15, S7)}


@torch.no_grad()
def judge(claim: str, on: Subject) -> Finding:
    """Return the finding on a claim, or the reason why this model cannot judge it."""
    try:
        check_size(on.model, on.documents, 2, on.T)
        return CLAIMS[claim](on)
    except ValueError as error:
        return Finding(UNFIT, {}, str(error))
