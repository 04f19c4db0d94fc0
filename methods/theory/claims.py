"""The papers' claims about trained models, each judged on any model by a rule on what is measured.

    judge("P6", Subject(model, Tasks(encoding, "test")))    # or: python -m nanollm claims --model FOLDER

A function's docstring says the claim, as CLAIMS.md does, and below it the rule. Claims about equations or
random draws are not here: no model decides them.
"""
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.cam import CaM
from methods.chunk_kv import ChunkKV, Chunks
from methods.count_sketch import Sketch
from methods.critical_kv import Critical, PooledCritical
from methods.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.kv_reviver_shrunk import ShrunkReviver, ShrunkSketch
from methods.quantized import Quantized
from methods.semantic_chunk_kv import SemanticChunkKV
from methods.snap_kv import SnapKV
from methods.streaming_llm import StreamingLLM
from methods.theory.change_and_text import (COMPARED, METHODS, RULES, VOTING, WINDOW, answers, by_text,
                                            compressed, rank_correlation)
from methods.theory.chunk_kv import jaccard, read
from methods.theory.critical_kv import (algorithm_1, assumption_1, masked_attention, perturbation,
                                        seen_by_window)
from methods.theory.kv_reviver import amnesia, fisher_shares, relative_error, share_out
from methods.theory.scissorhands import (attention_maps, block_similarity, even_shares, persistence_ratio,
                                         tail_exponent)
from methods.least_theta import theta
from nanollm.cache import LayerCache, make_cache, probabilities
from nanollm.data import Tasks, Unmarked
from nanollm.evaluate import (Benchmark, Reference, check_size, continuation, held, maker, reference,
                              replayed_or_read, standard_error, text_windows)
from nanollm.ranking import indices
from nanollm.tokenizer import boundaries

ASKED = {"needle": (Tasks, "needle", {}), "recall": (Tasks, "recall", {}),
         "unmarked recall": (Unmarked, "recall", {}),  # no mark tells where a fact ends
         "unmarked long needle": (Unmarked, "needle", dict(facts=1, numbers=4))}
HOLDS, NOT, OPEN, UNFIT = "holds", "does not hold", "undecided", "this model cannot judge it"
Number = tuple[float, float]  # a mean and its standard error


class Finding(NamedTuple):
    """A verdict, what it goes by, and why there is none."""
    verdict: str
    numbers: dict[str, Number]
    why: str = ""


# ---- rules ---

def mean(x: Tensor) -> Number:
    """Of a number a document, (documents,)."""
    return x.double().mean().item(), standard_error(x.double())


def over_texts(of: Callable, *x: Tensor, draws: int = 200) -> Number:
    """of(*x), x (texts, …) each; its standard error is how it varies if the texts are drawn anew."""
    again = torch.randint(len(x[0]), (draws, len(x[0])), generator=torch.Generator().manual_seed(0))
    return float(of(*x)), torch.tensor([float(of(*(y[i] for y in x))) for i in again]).std().item()


def above(x: Number, limit: float = 0.0) -> str:
    """Whether a number lies above the limit; undecided within two standard errors of it."""
    off, error = x[0] - limit, 2 * x[1]
    return HOLDS if off > error else NOT if off < -error else OPEN


def below(x: Number, limit: float = 0.0) -> str:
    return above((-x[0], x[1]), -limit)


def both(*verdicts: str) -> str:
    """Of several conditions: one that fails is enough to refute."""
    return next((verdict for verdict in (NOT, OPEN) if verdict in verdicts), HOLDS)


# ---- a model, and what several claims measure of it ---

@dataclass(eq=False)
class Subject:
    """A decoder, ours or `Bridged`, and its tasks: `documents` of T tokens each, and as many texts."""
    model: object
    tasks: Tasks
    seed: int = 0
    documents: int = 16
    T: int = 256
    benches: dict[str, Benchmark] = field(default_factory=dict)
    known: dict[tuple, dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def text(self) -> Reference:
        """Texts of T tokens, of which the last eighth, at most 64, are what comes after the prompt."""
        check_size(self.model, self.documents, 2, self.T)
        tokens = text_windows(self.tasks, self.documents, self.T).to(self.model.embed.weight.device)
        return reference(self.model, tokens, min(64, self.T // 8))

    def bench(self, task: str) -> Benchmark:
        """The documents of a task of ASKED, read once."""
        if task not in self.benches:
            check_size(self.model, self.documents, 2, self.T)
            Kind, name, knobs = ASKED[task]
            tasks = self.tasks if Kind is Tasks else Kind(self.tasks.encoding, self.tasks.split)
            batch = tasks.batch(name, self.seed, self.documents, self.T, **knobs)
            self.benches[task] = Benchmark({task: batch}, {task: read(self.model, batch)}, None)
        return self.benches[task]

    def row(self, task: str, Method, share: float | None, **knobs) -> dict[str, Tensor]:
        """The share of right answers of every document, (documents,), "aware" and "blind"."""
        key = task, Method, share, *knobs.items()
        if key not in self.known:
            row = answers(self.model, self.bench(task), Method, share, **knobs)
            self.known[key] = {setting: x[0].cpu() for setting, x in row.items()}
        return self.known[key]

    def answered(self, Method, share: float | None, *tasks: str, setting: str = "aware", **knobs) -> Tensor:
        """(documents,): mean over the tasks. ValueError if the full cache fails at all; those are left out.
        """
        full = {task: self.row(task, LayerCache, None)["aware"].mean().item() for task in tasks}
        fit = [task for task, right in full.items() if right >= 0.5]
        if not fit:
            raise ValueError("the full cache answers " + ", ".join(f"{x:.2f} of {task}" for task, x in full.items()))
        return torch.stack([self.row(task, Method, share, **knobs)[setting] for task in fit]).mean(0)

    def of_text(self, name: str, share: float = 0.25) -> dict[str, Tensor]:
        """`by_text` of a method of METHODS."""
        if (name, share) not in self.known:
            self.known[name, share] = by_text(self.model, self.text, name, share)
        return self.known[name, share]

    @torch.no_grad()
    def kl(self, Method, shares: tuple | None = None, **knobs) -> Tensor:
        """(texts,), at a quarter of the entries' bytes, every one of them used; `shares` of it by layer."""
        make = maker(self.model, Method, 0.25, **dict(slack=0) | knobs)
        shared = lambda n, *prompt: make(n) if shares is None else share_out(make(n), shares)
        return replayed_or_read(continuation, self.model, self.text, shared, self.text.recording)["kl"].cpu()

    def heads(self):
        """`seen_by_window` of every needle prompt, one at a time."""
        (batch,) = self.bench("needle").batches.values()
        prompts = torch.from_numpy(batch.tokens[:, :batch.answers[0].start - 1])
        for prompt in prompts.to(self.model.embed.weight.device).split(1):
            yield seen_by_window(self.model, prompt, 8)


# ---- CriticalKV ---

def P2(on: Subject) -> Finding:
    """Theorem 1: to evict is to mask and renormalise, A′ = N∘A / Σ N·A.

    Rule: attention after a random half is evicted differs by less than 1e-5 of its largest number.
    """
    g, off = torch.Generator().manual_seed(on.seed), []
    for cache, said, later in zip(make_cache(on.model), on.text.recording, on.text.continuation):
        cache.write(*said[1:])
        kept = (torch.rand(cache.pos.shape, generator=g) < 0.5).to(cache.pos.device)
        q, k, v, pos = next(later.split(1))
        k_all, v_all = torch.cat((said.k, k), 2), torch.cat((said.v, v), 2)
        at = torch.arange(k_all.shape[2], device=pos.device).expand(k_all.shape[:3])
        p = masked_attention(probabilities(q, k_all, at, None, pos), F.pad(kept, (0, 1), value=True)[:, :, None, None])
        cache.keep(indices(kept))
        y = cache.attend(q, k, v, pos)
        off.append(((p @ v_all.unsqueeze(2)).view_as(y) - y).abs().amax((1, 2, 3)) / y.abs().amax((1, 2, 3)))
    largest = mean(torch.stack(off).amax(0))
    return Finding(below(largest, 1e-5), {"largest difference": largest})


def P3(on: Subject) -> Finding:
    """Theorem 2: L ≤ θ.

    Rule: L over θ is at most 1 in every head, at a quarter of the entries.
    """
    L, bound = [], []
    for A, norms, values in on.heads():
        kept = torch.logical_or(*algorithm_1(A, norms, round(A.shape[-1] / 4)))
        L.append(perturbation(A, values, kept).flatten().cpu()), bound.append(theta(A, norms, kept).flatten().cpu())
    L, bound = torch.stack(L), torch.stack(bound)
    most, ratio = mean((L / bound).amax(1)), over_texts(lambda L, bound: bound.mean() / L.mean(), L, bound)
    return Finding(below(most, 1 + 1e-4), {"largest L / θ": most, "mean θ / mean L": ratio})


def P5(on: Subject) -> Finding:
    """Algorithm 2 improves SnapKV, PyramidKV and AdaKV.

    Rule: more needles and pairs are found with it, aware, at an eighth of the entries, on each of the three.
    """
    changes = {}
    for Rule in RULES:
        plain, critical, code = (answered(on, f"{Rule.__name__}{more}") for more in ("", "+critical", "+critical_code"))
        changes[f"{Rule.__name__}, the paper's rule"] = mean(critical - plain)
        changes[f"{Rule.__name__}, the authors' code"] = mean(code - plain)
    paper = [x for name, x in changes.items() if "paper" in name]
    return Finding(both(*map(above, paper)), changes)


def answered(on: Subject, name: str, **more) -> Tensor:
    """Needles and pairs by a method of METHODS, at an eighth of the entries."""
    Method, knobs = METHODS[name]
    return on.answered(Method, 1 / 8, "needle", "recall", **knobs | more)


def P6(on: Subject) -> Finding:
    """Assumption 1: a quarter of the budget gathers σ > 1/2, but for a few heads of the first layer.

    Rule: at 25 % of the entries it does in more than 95 % of the heads of all other layers.
    """
    sigma = {25: [], 12.5: [], 6.25: []}
    for A, norms, _ in on.heads():
        for percent, found in sigma.items():
            first, _ = algorithm_1(A, norms, round(percent / 100 * A.shape[-1]))
            found.append((assumption_1(A, first) > 0.5)[0].double().cpu())  # (L, heads)
    numbers = {f"heads with σ > 1/2 at {percent:g} %": mean(torch.stack(found).mean((1, 2)))
               for percent, found in sigma.items()}
    others = mean(torch.stack(sigma[25])[:, 1:].mean((1, 2)))
    return Finding(above(others, 0.95), {"beyond the first layer at 25 %": others} | numbers)


def P7(on: Subject) -> Finding:
    """L is lower in 74.3 % of the heads thanks to the norms, and the advantage accumulates over the layers.

    Rule: at 25 % it is lower in most heads, with votes pooled in both stages as well, and in the last layer
    more so where the layers below are compressed too. SnapKV, with and without Algorithm 2.
    """
    plain, critical, pooled = (on.of_text(f"SnapKV{more}") for more in ("", "+critical", "+critical, stage 2 pooled"))
    lower = lambda x, y: (x.mean(0) < y.mean(0)).double().mean()
    gain = lambda x, y: 1 - x[:, -1].mean() / y[:, -1].mean()
    more = lambda a, b, c, d: gain(a, b) - gain(c, d)
    of = dict(together=(critical["together"], plain["together"]), alone=(critical["alone"], plain["alone"]))
    numbers = {"heads with a lower L": over_texts(lower, *of["alone"]),
               "heads, votes pooled in both": over_texts(lower, pooled["alone"], plain["alone"]),
               "last layer's advantage alone": over_texts(gain, *of["alone"]),
               "after compressed layers": over_texts(gain, *of["together"])}
    accumulated = over_texts(more, *of["together"], *of["alone"])
    all_heads, all_pooled, *_ = numbers.values()
    return Finding(both(above(all_heads, 0.5), above(all_pooled, 0.5), above(accumulated)), numbers)


def P8(on: Subject) -> Finding:
    """Without stage 1 (α = 0) a little quality is lost; needles are found better; StreamingLLM is far behind.

    Rule: in P5's setting α = 0 loses less than 0.1 of α = 0.25's answers, which has more than SnapKV, and
    StreamingLLM has 0.25 less than it.
    """
    rows = {"SnapKV": answered(on, "SnapKV"), "α = 0.25": answered(on, "SnapKV+critical"),
            "α = 0": answered(on, "SnapKV", select=Critical(0.0)), "StreamingLLM": answered(on, "StreamingLLM"),
            "α = 0, pooled": answered(on, "SnapKV", select=PooledCritical(0.0))}
    plain, quarter, none, streaming, _ = rows.values()
    verdict = both(above(mean(none - quarter), -0.1), above(mean(quarter - plain)), above(mean(plain - streaming), 0.25))
    return Finding(verdict, {name: mean(x) for name, x in rows.items()})


def P10(on: Subject) -> Finding:
    """Appendix I: a smaller change of the attention output means better text.

    Rule: over the methods, at 25 %, L and KL have a positive rank correlation; over those that keep entries
    by votes alone as well.
    """
    numbers = {}
    for what, names in {"rank correlation, all methods": COMPARED, "voting methods": VOTING}.items():
        rows = [on.of_text(name) for name in names]
        L, kl = torch.stack([x["alone"].mean((1, 2)) for x in rows], 1), torch.stack([x["kl"] for x in rows], 1)
        numbers[what] = over_texts(lambda L, kl: rank_correlation(L.mean(0).numpy(), kl.mean(0).numpy()), L, kl)
    return Finding(both(*map(above, numbers.values())), numbers)


# ---- ChunkKV ---

def C1(on: Subject) -> Finding:
    """Chunks of consecutive tokens, scored by the window's attention and kept whole, keep what single tokens
    lose.

    Rule: ChunkKV finds more needles of long values than SnapKV, aware, at a quarter of the entries.
    """
    ends = boundaries(on.tasks.encoding, on.model.config.vocab_size)
    methods = {"SnapKV": (SnapKV, {}), "ChunkKV": (ChunkKV, {}), "chunks of 20": (ChunkKV, dict(select=Chunks(20))),
               "semantic chunks": (SemanticChunkKV, dict(ends=ends))}
    found = {name: on.answered(Method, 0.25, "unmarked long needle", **WINDOW | knobs)
             for name, (Method, knobs) in methods.items()}
    return Finding(above(mean(found["ChunkKV"] - found["SnapKV"])), {name: mean(x) for name, x in found.items()})


def C2(on: Subject) -> Finding:
    """Neighbouring layers choose chunks more alike than tokens, so groups of layers can share indices.

    Rule: the Jaccard similarity of neighbours is higher with ChunkKV than with SnapKV, at a tenth of the
    entries, and groups of two find at most 0.1 fewer pairs than single layers, at a quarter.
    """
    alike, tokens = {}, on.text.tokens
    for name, Method, knobs in (("tokens", SnapKV, dict(kernel_size=1)), ("SnapKV", SnapKV, {}), ("chunks", ChunkKV, {})):
        kept = held(compressed(on.model, Method, tokens, 0.1, **knobs), tokens.shape[1] - WINDOW["window_size"])
        alike[name] = jaccard(kept[:, 1:], kept[:, :-1]).mean((1, 2)).cpu()
    alone, reuse = (on.answered(ChunkKV, 0.25, "unmarked recall", **WINDOW, reuse=n) for n in (1, 2))
    verdict = both(above(mean(alike["chunks"] - alike["SnapKV"])), above(mean(reuse - alone), -0.1))
    numbers = {f"similarity, {name}": mean(x) for name, x in alike.items()}
    return Finding(verdict, numbers | {"pairs, single layers": mean(alone), "pairs, groups of two": mean(reuse)})


# ---- KVReviver ---

def R4(on: Subject) -> Finding:
    """Tables 2 and 3: shares of 0.1, 0.45, 0.45 for Vague, Candidate, Recent are best; ReplaceRate hardly
    matters from 1.0 to 1.5.

    Rule: the KL is higher without a sketch, at a quarter of the bytes, and by ReplaceRate 1.0 and 1.5 it
    changes by less than a tenth.
    """
    paper, shrunk, none = on.kl(KVReviver), on.kl(ShrunkReviver), on.kl(KVReviver, vague=0.0)
    often, seldom = (on.kl(KVReviver, replace_rate=rate) - paper for rate in (1.0, 1.5))
    limit = 0.1 * paper.mean().item()
    within = [side for x in (often, seldom) for side in (above(mean(x), -limit), below(mean(x), limit))]
    return Finding(both(above(mean(none - paper)), *within), {
        "KL of the paper's sketch": mean(paper), "no sketch minus it": mean(none - paper),
        "no sketch minus the shrunk": mean(none - shrunk), "rate 1.0 minus 1.1": mean(often),
        "rate 1.5 minus 1.1": mean(seldom)})


def R5(on: Subject) -> Finding:
    """Layer budgets by the Fisher information of W_K and W_V.

    Rule: with them the paper's sketch has a lower KL; not if they leave a layer no room. Fixed: half of all
    is shared out evenly, for the shrunk sketch.
    """
    text = text_windows(on.tasks, 2 * on.documents - 1, on.T)[1:16:2].to(on.text.tokens.device)  # between
    alone, mixed = (fisher_shares(on.model, text, even) for even in (0.0, 0.5))
    numbers = {"largest two shares": (sum(sorted(alone)[-2:]), 0.0),
               "change of KL, fixed": mean(on.kl(ShrunkReviver, mixed) - on.kl(ShrunkReviver))}
    try:
        numbers["change of KL"] = mean(on.kl(KVReviver, alone) - on.kl(KVReviver))
    except ValueError as error:
        return Finding(NOT, numbers, str(error))
    return Finding(below(numbers["change of KL"]), numbers)


def R7(on: Subject) -> Finding:
    """Ours: centred, signed and shrunk, what is read is on average over the hashes no farther off than the
    mean, until swaps.

    Rule: keys read from one row have a squared error below their variance, at 5.3 tokens a slot.
    """
    errors = {Sketch: [], ShrunkSketch: []}
    k, v = (torch.stack([x[i] for x in on.text.recording], 1) for i in (1, 2))  # (B, L, H, n, D)
    J = torch.arange(k.shape[3], device=k.device).expand(k.shape[1:4])
    for (kind, found), keys, values in ((pair, *kv) for pair in errors.items() for kv in zip(k, v)):
        rows = 3 if kind is Sketch else 1
        sketch = kind(keys, rows, max(1, round(3 * J.shape[-1] / 16 / rows)), on.seed)
        sketch.insert(J, keys, values)
        found.append(relative_error(sketch.query(J)[0], keys))
    paper, shrunk = (mean(torch.tensor(found)) for found in errors.values())
    return Finding(below(shrunk, 1.0), {"error over variance, shrunk": shrunk, "the paper's sketch": paper})


def R9(on: Subject) -> Finding:
    """Figure 2: tokens that are no heavy hitters are activated later, so eviction forgets what is needed.

    Rule: of the tokens outside H2O's 40 % more than a tenth get over 0.5 % of a later query's attention, and
    SnapKV at 25 % finds fewer needles if the question comes later.
    """
    cut, found = on.text.tokens.shape[1] * 7 // 8, []
    c = on.model.config
    chance = torch.rand(c.n_layers, len(on.text.tokens), c.n_kv_heads, cut, generator=torch.Generator().manual_seed(0))
    for text, drawn in zip(on.text.tokens.split(1), chance.split(1, 1)):
        p = attention_maps(on.model, text)[..., :cut].unflatten(2, (c.n_kv_heads, -1))
        later, score = p[..., cut:, :], p[..., :cut, :].sum((3, 4))
        found.append([amnesia(later, by, 0.4)["ever"][0] for by in (score, drawn.to(score))])
    heavy, random = torch.tensor(found).T
    aware, blind = (on.answered(SnapKV, 0.25, "needle", setting=setting, **WINDOW) for setting in ("aware", "blind"))
    return Finding(both(above(mean(heavy), 0.1), above(mean(aware - blind))), {
        "activated, outside H2O's": mean(heavy), "outside a random 40 %": mean(random),
        "needles, aware": mean(aware), "needles, blind": mean(blind)})


def R10(on: Subject) -> Finding:
    """Figure 5, Table 1: at 25 % KVReviver finds needles as the full cache does, where H2O, StreamingLLM and
    CaM fail; large batches make up for its speed.

    Rule: blind, it finds at most 0.1 fewer than the full cache and more than each of the three. No speed.
    """
    methods = dict(KVReviver=KVReviver, H2O=H2O, StreamingLLM=StreamingLLM, CaM=CaM)
    found = {name: on.answered(Method, 0.25, "needle", setting="blind") for name, Method in methods.items()}
    paper, *others = found.values()
    found["the shrunk sketch"] = on.answered(ShrunkReviver, 0.25, "needle", setting="blind")
    found["2 bits a number"] = on.answered(Quantized, None, "needle", setting="blind", bits=2, residual_length=16)
    full = on.answered(LayerCache, None, "needle", setting="blind")
    verdict = both(above(mean(paper - full), -0.1), *(above(mean(paper - other)) for other in others))
    return Finding(verdict, {name: mean(x) for name, x in found.items()})


# ---- Scissorhands ---

def S7(on: Subject) -> Finding:
    """Appendix A and Section 3, on OPT models of billions of parameters: importance persists for more than
    95 % of the pivotal tokens, x and F(x) are alike, weights follow a power law.

    Rule: in every layer it does, their cosine is above 0.9 and the law's exponent above 2, as Theorem B.3
    asks.
    """
    measured = []  # (texts, 4, L)
    for text in on.text.tokens.split(1):
        p = attention_maps(on.model, text)
        ratio, chance = (x.nanmean((1, 2)).cpu() for x in persistence_ratio(p))
        k = torch.tensor([tail_exponent(even_shares(x)).k for x in p])
        measured.append(torch.stack((ratio, block_similarity(on.model, text)[0].cpu(), k, chance)))
    measured = torch.stack(measured)
    least = measured.mean(0).argmin(1)
    ratio, cosine, k = (mean(measured[:, i, least[i]]) for i in range(3))
    return Finding(both(above(ratio, 0.95), above(cosine, 0.9), above(k, 2.0)), {
        "persistence, lowest layer": ratio, "its share by chance": mean(measured[:, 3, least[0]]),
        "cosine, lowest layer": cosine, "exponent, lowest layer": k})


CLAIMS = {f.__name__: f for f in (P2, P3, P5, P6, P7, P8, P10, C1, C2, R4, R5, R7, R9, R10, S7)}


@torch.no_grad()
def judge(claim: str, on: Subject) -> Finding:
    """The claim's finding; where a model lacks what it asks for, or fails at the task, why it has none."""
    try:
        return CLAIMS[claim](on)
    except ValueError as error:
        return Finding(UNFIT, {}, str(error))
