"""Make every rule's numbers again, without Subject, Benchmark and replay.

A reader takes one document at a time and, where eviction goes on, one token. L and σ are computed
head by head.
"""

from functools import cache
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch

from common import ENCODING
from lab import corpus
from lab.benchmark import text_windows
from lab.claims.rules import CLAIMS, judge
from lab.claims.scissorhands_measured import FourBits
from lab.claims.subject import ASKED, Subject
from lab.tasks import Tasks
from methods.baselines.ada_kv import AdaKV
from methods.baselines.h2o import H2O
from methods.baselines.pyramid_kv import PyramidKV
from methods.baselines.rounded import RoundedSlots
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical, CriticalCode, PooledCritical
from methods.kv_reviver import KVReviver, Sketch
from methods.ours.chunk_kv_semantic import SemanticChunkKV
from methods.ours.kv_reviver_shrunk import ShrunkReviver
from methods.scissorhands import Scissorhands
from methods.theory.persistence import even_shares, persistence_ratio, tail_exponent
from nanollm import TINY
from nanollm.cache import Method, begin_turn, compress, crop, make_cache
from nanollm.checkpoint import from_hf
from nanollm.tokenizer import boundaries

N, T, KEEP = 3, 256, 0.2  # documents, their tokens, and a keep ratio that is no default
CUT = T - T // 8 - 1  # a text's prompt; the token after it is read twice
MODEL = from_hf(TINY)
L, H, G, D = 6, 3, 2, 32  # layers, key/value heads, query heads of each, head dim
OWN = "\n".join(corpus.text("test")[::2])  # as after --text
TASKS = Tasks(ENCODING, "test", OWN)
ENDS = boundaries(ENCODING, MODEL.config.vocab_size)
TEXTS = text_windows(TASKS, N, T)
SNAP = dict(window_size=8)
RULES = {"SnapKV": SnapKV, "PyramidKV": PyramidKV, "AdaKV": AdaKV}


# ---- a reader ----


def compressed(tokens, cut, whole, kind, keep, **options):
    """Read tokens (t,), forget those from `cut` on, and compress; a budget is part of `whole`."""
    if keep:
        options["budget"] = round(keep * whole)
    caches = make_cache(MODEL, kind, **options)
    MODEL(tokens[None], caches)
    crop(caches, cut)
    compress(MODEL, tokens[None, :cut], caches)
    return caches


def step_by_step(tokens, caches, n=1):
    """Feed tokens (t,), n at a time; return log p of the next ones and outputs (t, L, heads, D)."""
    log_p = []
    outputs = []
    for part in tokens.split(n):
        seen = []
        for layer in caches:
            layer.attend = noted(layer.attend, seen)
        log_p.append(MODEL(part[None], caches)[0].double().log_softmax(-1))
        outputs.append(torch.stack(seen, 1))
        for layer in caches:
            del layer.attend
    return torch.cat(log_p).numpy(), torch.cat(outputs)


def noted(attend, seen):
    def attend_and_note(*given):
        y = attend(*given)
        seen.append(y[0].transpose(0, 1).double())
        return y

    return attend_and_note


def answers(kind, keep, *names, aware=True, **options):
    """Return of each document the share of the tasks whose answer greedy decoding gives."""
    found = []
    for name in names:
        made, task, given = ASKED[name]
        source = made(ENCODING, "test", OWN)
        batch = source.batch(task, 1, N, T, **given)
        [span] = batch.answers
        cut = span.start - 1 if aware else batch.question
        of_task = []
        for tokens in torch.tensor(batch.tokens):
            prompt = tokens[: cut + aware]
            caches = compressed(prompt, cut, batch.question, kind, keep, **options)
            log_p, _ = step_by_step(tokens[cut : span.stop - 1], caches)
            said = log_p.argmax(1)[span.start - 1 - cut :]
            of_task.append(float(np.array_equal(said, tokens[span])))
        found.append(of_task)
    return np.mean(found, 0)


@cache
def text(kind, keep, alone=False, **options):
    """Return each text's KL, −log p and ‖(y − ŷ) W_O‖₁ (N, L, heads).

    alone: that of each layer if only this one is compressed.
    """
    kl = []
    nll = []
    change = []
    for tokens in TEXTS:
        prompt = tokens[: CUT + 1]
        later = tokens[CUT:-1]
        p, y = step_by_step(later, compressed(prompt, CUT, CUT, Method, None))
        if not alone:
            caches = compressed(prompt, CUT, CUT, kind, keep, **options)
            q, y_hat = step_by_step(later, caches)
            kl.append((np.exp(p) * (p - q)).sum(1).mean())
            nll.append(-q[range(len(later)), tokens[CUT + 1 :]].mean())
        else:
            y_hat = y.clone()
            n = 1 if kind is StreamingLLM else T  # the others append
            for layer in range(L):
                caches = compressed(prompt, CUT, CUT, Method, None)
                one = compressed(prompt, CUT, CUT, kind, keep, **options)
                caches[layer] = one[layer]
                y_hat[:, layer] = step_by_step(later, caches, n)[1][:, layer]
        change.append(lengths(y - y_hat).mean(0))
    return np.array(kl), np.array(nll), torch.stack(change)


def lengths(y):
    """Return ‖y W_O‖₁ of each head, (t, L, heads), of outputs (t, L, heads, D)."""
    found = torch.empty(y.shape[:3])
    for layer, block in enumerate(MODEL.blocks):
        for head in range(H * G):
            w = block.attention.o.weight[:, head * D : (head + 1) * D].double()
            found[:, layer, head] = (y[:, layer, head] @ w.T).abs().sum(-1)
    return found


def weights(tokens):
    """Return full attention's weights of tokens (t,), (L, heads, t, t)."""
    caches = make_cache(MODEL)
    queries = []
    for layer in caches:
        attend = layer.attend

        def keep_q(q, *rest, attend=attend):
            queries.append(q[0])
            return attend(q, *rest)

        layer.attend = keep_q
    MODEL(tokens[None], caches)
    maps = []
    t = len(tokens)
    for q, layer in zip(queries, caches):
        k = layer.k[0, :, :t].repeat_interleave(G, 0)
        scores = (q @ k.mT).double() / D**0.5
        scores[:, ~torch.ones(t, t).tril().bool()] = -torch.inf
        maps.append(scores.softmax(-1))
    return torch.stack(maps)


# ---- the rules ----


def mean_kl(kind=KVReviver, **options):
    return text(kind, KEEP, slack=0, **options)[0][:2]


def rise(kind, **options):
    return text(kind, KEEP, **options)[1] - text(Method, None)[1]


def P5():
    found = {}
    for name, kind in RULES.items():
        found[name] = answers(kind, KEEP, "needle", "pairs", **SNAP)
        pooled = dict(select=PooledCritical(), **SNAP)
        better = answers(kind, KEEP, "needle", "pairs", **pooled)
        found[f"change of {name}, pooled"] = better - found[name]
    return found


def P6():
    found = []
    batch = TASKS.batch("needle", 1, N, T)
    for tokens in torch.tensor(batch.tokens):
        A = weights(tokens[: batch.answers[0].start])[:, :, -8:].mean(2)
        first = round(KEEP * A.shape[-1]) // 4
        sigma = [sum(sorted(a)[-first:]) for a in A.flatten(0, 1).tolist()]
        over = np.array(sigma) > 0.5
        found.append((over[H * G :].mean(), over[: H * G].mean()))
    beyond, inside = zip(*found)
    return {"heads with σ > 1/2": beyond, "in the first layer": inside}


def P7():
    L = {"plain": text(SnapKV, KEEP, True, **SNAP)[2].mean(0)}
    L["norms"] = text(SnapKV, KEEP, True, select=Critical(), **SNAP)[2].mean(0)
    L["no pool"] = text(SnapKV, KEEP, True, kernel_size=1, **SNAP)[2].mean(0)
    both = dict(select=PooledCritical(), **SNAP)
    L["pooled"] = text(SnapKV, KEEP, True, **both)[2].mean(0)
    pairs = {
        "heads with a lower L": ("norms", "plain"),
        "heads, no norms and no pool": ("no pool", "plain"),
        "heads, pooled in both stages": ("pooled", "plain"),
        "heads, norms against no pool": ("norms", "no pool"),
    }
    return {
        name: float((L[x] < L[y]).double().mean()) for name, (x, y) in pairs.items()
    }


def P8():
    both = "needle", "pairs"
    found = {"SnapKV": answers(SnapKV, KEEP, *both, **SNAP)}
    found["StreamingLLM"] = answers(StreamingLLM, KEEP, *both)
    for alpha in 0.25, 0.0:
        given = dict(select=PooledCritical(alpha), **SNAP)
        found[f"α = {alpha:g}"] = answers(SnapKV, KEEP, *both, **given)
    return found


def P10():
    compared = [(StreamingLLM, {})]
    more = {}, dict(kernel_size=1), dict(select=Critical()), dict(select=CriticalCode())
    compared += [(kind, SNAP | x) for kind in RULES.values() for x in more]
    rows = []
    for kind, options in compared:
        alone = text(kind, KEEP, True, **options)[2]
        rows.append((alone.mean().item(), text(kind, KEEP, **options)[0].mean()))
    ranks = pd.DataFrame(rows).rank()
    return {"rank correlation": np.corrcoef(ranks[0], ranks[1])[0, 1]}


def P11():
    found = {}
    for name, kind in RULES.items():
        norms = text(kind, KEEP, select=Critical(), **SNAP)[0].mean()
        points = []
        for keep in 2 * KEEP, KEEP, KEEP / 2:
            points.append((text(kind, keep, **SNAP)[0].mean(), np.log2(keep)))
        points = [
            (max(kl for kl, _ in points[: i + 1]), x) for i, (_, x) in enumerate(points)
        ]
        needed = points[0][1] if norms < points[0][0] else points[-1][1]
        for (low, most), (high, least) in pairwise(points):
            if low <= norms <= high:
                needed = most + (least - most) * (norms - low) / (high - low)
        found[f"budget saved, {name}"] = 1 - KEEP / 2**needed
    return found


def P12():
    def kl(tokens, **options):
        log_p, _ = step_by_step(tokens[:-1], make_cache(MODEL))
        budget = round(KEEP * 128)
        caches = make_cache(MODEL, SnapKV, budget=budget, **SNAP, **options)
        found = []
        start = 0
        ends = {16, *range(128, T - 1, 128 - budget), T - 1}
        for end in sorted(ends):
            begin_turn(caches)
            logits = MODEL(tokens[None, start:end], caches)[0]
            compress(MODEL, tokens[None, :end], caches)
            assert end == 16 or caches[0].length == budget
            found += [*logits.double().log_softmax(-1).numpy()]
            start = end
        q = np.array(found)[16:]
        p = log_p[16:]
        return (np.exp(p) * (p - q)).sum(1).mean()

    plain = np.array([kl(tokens) for tokens in TEXTS[:2]])
    norms = np.array([kl(tokens, select=Critical()) for tokens in TEXTS[:2]])
    return {"KL of SnapKV": plain, "change by the paper's rule": norms - plain}


def P13():
    found = {}
    for name, alone in (
        ("last layer's advantage, alone", True),
        ("after compressed layers", False),
    ):
        plain = text(SnapKV, KEEP, alone, **SNAP)[2][:, -1].mean()
        norms = text(SnapKV, KEEP, alone, select=Critical(), **SNAP)[2][:, -1].mean()
        found[name] = float(1 - norms / plain)
    first, second = found.values()
    return found | {"difference": second - first}


def C1():
    task = "unmarked long needle"
    return {
        "SnapKV": answers(SnapKV, KEEP, task, **SNAP),
        "ChunkKV": answers(ChunkKV, KEEP, task, **SNAP),
        "chunks of 20": answers(ChunkKV, KEEP, task, select=Chunks(20), **SNAP),
        "semantic chunks": answers(SemanticChunkKV, KEEP, task, ends=ENDS, **SNAP),
    }


def C2():
    kinds = dict(
        tokens=(SnapKV, dict(kernel_size=1)), SnapKV=(SnapKV, {}), chunks=(ChunkKV, {})
    )
    found = {}
    n = CUT + 1
    for name, (kind, options) in kinds.items():
        alike = []
        for tokens in TEXTS:
            caches = compressed(tokens[:n], n, n, kind, KEEP, **SNAP, **options)
            kept = []
            for layer in caches:
                heads = [
                    {x for x in head if x < n - 8} for head in layer.pos[0].tolist()
                ]
                kept.append(heads)
            pairs = [(x, y) for two in pairwise(kept) for x, y in zip(*two)]
            alike.append(np.mean([len(x & y) / len(x | y) for x, y in pairs]))
        found[f"similarity, {name}"] = alike
    for name, reuse in ("pairs, single layers", 1), ("pairs, groups of two", 2):
        found[name] = answers(ChunkKV, KEEP, "unmarked pairs", reuse=reuse, **SNAP)
    return found


def R4():
    paper = mean_kl()
    none = mean_kl(vague=0.0)
    return {
        "KL at 0.1": paper,
        "change at 0.2": mean_kl(vague=0.2, recent=0.4) - paper,
        "change at 0.4": mean_kl(vague=0.4, recent=0.3) - paper,
        "change without a sketch": none - paper,
        "change from shrunk to no sketch": none - mean_kl(ShrunkReviver),
    }


def R6():
    found = {
        f"error of {x}, in variances": [] for x in ("keys", "values", "centred keys")
    }
    a = CUT + 1
    b = round(KEEP * a / 3)
    for tokens in TEXTS:
        caches = make_cache(MODEL)
        MODEL(tokens[None, :a], caches)
        errors = []
        for layer in caches:
            k, v = (x[:, :, :a] for x in (layer.k, layer.v))
            each = []
            for x, store in ((k, 0), (v, 1), (k - k.mean(2, keepdim=True), 0)):
                sketch = Sketch(k, 3, b, 1)
                J = torch.arange(a).expand(1, H, -1)
                sketch.insert(J, *((x, v) if store == 0 else (k, x)))
                estimate = sketch.query(J)[store]
                error = (
                    (estimate - x).square().sum((2, 3))
                    / x.var(2, correction=0).sum(-1)
                    / a
                )
                each.append(error.mean().item())
            errors.append(each)
        for x, mean in zip(found.values(), np.mean(errors, 0)):
            x.append(mean)
    return found | {"the bound": np.pi * a / (3 * b)}


def R9():
    generator = torch.Generator().manual_seed(1)
    cut = T * 7 // 8
    chances = [torch.rand(L, 1, H, cut, generator=generator)[:, 0] for _ in TEXTS]
    often = []
    by_chance = []
    for tokens, chance in zip(TEXTS, chances):
        maps = weights(tokens).unflatten(1, (H, G))[..., :cut]
        looked_at = (maps[:, :, :, cut:] > 0.005).any(2).any(2)
        hitters = maps[:, :, :, :cut].sum((2, 3))
        for scores, found in (hitters, often), (chance, by_chance):
            outside = []
            for score, later in zip(scores.flatten(0, 1), looked_at.flatten(0, 1)):
                low = score.argsort()[: cut - round(KEEP * cut)]
                outside.append(later[low].double().mean())
            found.append(np.mean(outside))
    return {
        "over 0.5 %, outside H2O's share": often,
        "over 0.5 %, outside a random one": by_chance,
        "needles, aware": answers(SnapKV, KEEP, "needle", **SNAP),
        "needles, agnostic": answers(SnapKV, KEEP, "needle", aware=False, **SNAP),
    }


def R10():
    given = KEEP, "needle"
    two_bits = dict(store=lambda *place: RoundedSlots(*place, bits=2))
    return {
        "KVReviver": answers(KVReviver, *given, aware=False),
        "H2O": answers(H2O, *given, aware=False),
        "StreamingLLM": answers(StreamingLLM, *given, aware=False),
        "the shrunk sketch": answers(ShrunkReviver, *given, aware=False),
        "full cache": answers(Method, None, "needle", aware=False),
        "2 bits a number": answers(Method, None, "needle", aware=False, **two_bits),
    }


def R11():
    return {
        "by the paper's sketch": rise(KVReviver, slack=0)[:2],
        "by no sketch": rise(KVReviver, slack=0, vague=0.0)[:2],
    }


def R12():
    names = "needle", "pairs", "few_shot"
    return {
        "KVReviver": answers(KVReviver, KEEP, *names),
        "full cache": answers(Method, None, *names),
        "H2O": answers(H2O, KEEP, *names),
    }


def R13():
    return {
        "KVReviver": answers(KVReviver, KEEP, "needle"),
        "full cache": answers(Method, None, "needle"),
    }


def R14():
    paper = mean_kl()
    changes = {f"change at {x}": mean_kl(replace_rate=x) - paper for x in (1.0, 1.5)}
    return {"KL at 1.1": paper} | changes


def R15():
    paper = mean_kl()
    changes = {f"change at {x}": mean_kl(recent=x) - paper for x in (0.2, 0.6)}
    return {"KL at 0.45": paper} | changes


def S7():
    layers = []
    for tokens in TEXTS[:2]:
        maps = weights(tokens)
        ratio, chance = (x.nanmean(1) for x in persistence_ratio(maps))
        inputs = []
        hooks = []
        for block in MODEL.blocks:
            hooks += [
                block.mlp.register_forward_hook(lambda _, x, y: inputs.append(y)),
                block.norm2.register_forward_hook(lambda _, x, y: inputs.append(x[0])),
            ]
        MODEL(tokens[None])
        for hook in hooks:
            hook.remove()
        cosines = []
        for x, change in zip(inputs[::2], inputs[1::2]):
            cosines.append(torch.cosine_similarity(x, x + change, -1).mean())
        exponents = [tail_exponent(even_shares(p)) for p in maps]
        layers.append(np.stack((ratio, cosines, exponents, chance)))
    found = np.stack(layers, 1)  # (4, texts, layers)
    ratio, cosine, exponent, chance = found
    low = ratio.mean(0).argmin()
    return {
        "persistence, lowest layer": ratio[:, low],
        "its share by chance": chance[:, low],
        "cosine, lowest layer": cosine[:, cosine.mean(0).argmin()],
        "exponent, lowest layer": exponent[:, exponent.mean(0).argmin()],
    }


def S8():
    later = dict(aware=False)
    return {
        "rise of −log p": rise(Scissorhands)[:2],
        "labels": answers(Scissorhands, KEEP, "few_shot", **later),
        "labels, full cache": answers(Method, None, "few_shot", **later),
    }


def S9():
    evicted = rise(Scissorhands)[:2]
    return {"rise by 4 bits": rise(FourBits)[:2] - evicted, "rise by eviction": evicted}


BY_HAND = [P5, P6, P7, P8, P10, P11, P12, P13, C1, C2]
BY_HAND += [R4, R6, R9, R10, R11, R12, R13, R14, R15, S7, S8, S9]


@pytest.fixture(scope="module")
def on():
    return Subject(MODEL, TASKS, seed=1, documents=N, T=T)


@pytest.mark.slow
@pytest.mark.parametrize("rule", BY_HAND)
@torch.no_grad()
def test_a_rule_s_numbers_are_those_made_by_hand(rule, on):
    name = rule.__name__
    found = judge(name, on, None if name == "S7" else KEEP)
    assert not found.why
    expected = rule()
    assert found.numbers.keys() == expected.keys()
    for what, x in expected.items():
        mean, error = found.numbers[what]
        assert mean == pytest.approx(np.mean(x), rel=1e-3, abs=1e-4), what
        if np.ndim(x):
            by_hand = np.std(x, ddof=1) / len(x) ** 0.5
            assert error == pytest.approx(by_hand, rel=1e-2, abs=1e-4), what


def test_all_rules_are_made_by_hand():
    assert {rule.__name__ for rule in BY_HAND} == {*CLAIMS}
