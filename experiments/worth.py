"""Measure what each cache entry is worth, by leaving it out, and which scores of methods tell it.

    python -m experiments.worth --documents 8    # per task, both shipped decoders: a quarter of an hour

An entry is one token's key and value in one head. Its worth is what the answer's log probability loses when
only this entry is missing: no approximation. It is computed in 64 bits, because most entries change the
answer by less than 32 bits can tell. Documents have 256 tokens and ask for a needle or one of 16 pairs. The
context is read with all entries; the question and the true answer follow.

The first table compares the scores of methods with the worth. The second keeps the entries with the highest
scores, ranked over all heads together. The third adds up the worth of single entries and compares the sum
with the loss when all of them are missing.
"""
from copy import deepcopy
import math
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.script import grouped, keep_label, mean_and_error, run, with_error
from methods.chunk_kv import chunk_scores, grid
from methods.critical_kv import value_norms
from methods.expected_attention import ExpectedAttention
from methods.key_diff import likeness
from methods.kvzip import KVzip
from methods.kvzip_fast import FastKVzip
from nanollm.attention import probabilities
from nanollm.cache import NEVER, LayerCache, copied, make_cache
from nanollm.commands.text_table import text_table
from nanollm.generate import prefill, reread
from nanollm.measure.benchmark import cut
from nanollm.measure.evaluate import check_size
from nanollm.measure.replay import Recorder, record
from nanollm.measure.tasks import Batch, Tasks

KEEP_RATIOS = 0.25, 0.125, 0.0625, 0.03125, 0.015625
ASKED = "needle", "pairs"
WINDOW = 8   # queries of the observation window
CHUNK = 10   # tokens of ChunkKV's chunks
ROWS = 128   # removals that one forward pass measures
DRAWN = 8    # random sets of each size
SIZES = 4, 16, 64, 256, 1024  # entries removed together


class Loss(NamedTuple):
    """The effect of R removals on the answer."""
    worth: Tensor  # (R,) loss of the answer's log probability, in nats
    kl: Tensor     # (R,) KL(full ‖ without) of the next token, mean over question and answer
    right: Tensor  # (R,) of bool: whether greedy decoding still gives the answer


@torch.no_grad()
def removed(model, caches: list[LayerCache], rest: Tensor, answer: int, absent: Tensor) -> Loss:
    """Measure the answer without some entries: absent (R, L, H, S) of bool.

    caches hold the context with all S entries. rest (1, n) are the tokens after it; its last `answer` tokens
    are the answer.
    """
    nothing, parts = torch.zeros_like(absent[:1]), []
    for part in (nothing, *absent.split(ROWS)):
        trial = copied(caches)
        for cache, hidden in zip(trial, part.unbind(1)):
            cache.slots = {name: cache.slot(name).expand(len(part), *[-1] * (x.dim() - 1)).clone()
                           for name, x in cache.slots.items()}
            cache.slots["pos"].masked_fill_(hidden, NEVER)
            cache.ragged = bool(hidden.any())
        parts.append(model(rest[:, :-1].expand(len(part), -1), trial).log_softmax(-1))
    full, log_p = parts[0], torch.cat(parts[1:])
    target = rest[:, -answer:]
    said = log_p[:, -answer:].gather(-1, target.expand(len(log_p), -1)[..., None]).sum((1, 2))
    right = (log_p[:, -answer:].argmax(-1) == target).all(1)
    kl = (full.exp() * (full - log_p)).sum(-1).mean(1)
    return Loss(full[:, -answer:].gather(-1, target[..., None]).sum() - said, kl, right)


# ---- the scores of methods, (L, H, S) each ---

@torch.no_grad()
def scores(model, tokens: Tensor, S: int, gates: dict) -> dict[str, Tensor]:
    """Return a score of the first S of tokens (1, T) by name. The scores of "…, question" know the question.

    gates: the options that FastKVzip measures on the decoder.
    """
    recording = record(model, make_cache(model, Recorder), tokens)
    by_layer = [from_queries(layer, block.attention.w_o, S) for layer, block in zip(recording, model.blocks)]
    found = {name: torch.stack([layer[name] for layer in by_layer]) for name in by_layer[0]}

    context = tokens[:, :S]
    for name, Method, options in (("reread", KVzip, {}), ("gates", FastKVzip, gates)):
        caches = make_cache(model, Method, budget=S, **options)
        prefill(model, context, caches)
        reread(caches, lambda part: prefill(model, context[:, part], caches))
        found[name] = torch.cat([cache.entry_scores for cache in caches])
    caches = make_cache(model, ExpectedAttention, budget=S)
    prefill(model, context, caches)
    found["expected"] = torch.cat([cache.score() for cache in caches])
    found["keys"] = torch.cat([-likeness(cache.k) for cache in caches])
    found["newest"] = torch.arange(S).expand_as(found["keys"]).float()
    return found


def from_queries(layer, w_o: Tensor, S: int) -> dict[str, Tensor]:
    """Return the scores (H, S) that one layer's queries give to the first S entries.

    layer: a Recording of a whole document, B = 1. w_o: (d_model, H·G, D).
    """
    q, k, v, pos = layer
    p = probabilities(q, k, pos[:, None], None, pos)[0]                   # (H, G, T, T)
    y, w_o = p @ v[0].unsqueeze(1), w_o.unflatten(1, p.shape[:2])         # y (H, G, T, D)
    norms = value_norms(v[:, :, :S], w_o.flatten(1, 2))[0]                # (H, G, S)
    projected = torch.einsum("hnd,ohgd->hgno", v[0, :, :S], w_o)          # W_O v
    window, question = slice(S - WINDOW, S), slice(S, None)
    mean = p[:, :, window, :S].mean(2)                                    # A, (H, G, S)
    W = (mean * norms).sum(-1, keepdim=True)
    chunk = grid(torch.arange(S), CHUNK).expand(k.shape[1], S)

    def one_removal(rows: slice) -> Tensor:
        """Return ‖Σ_g α/(1 − α) W_O (v − y)‖₂, the output's change if one entry goes, mean over queries."""
        odds = p[:, :, rows, :S] / (1 - p[:, :, rows, :S]).clamp(min=1e-6)
        out = torch.einsum("hgtd,ohgd->hgto", y[:, :, rows], w_o)
        change = torch.einsum("hgtn,hgno->htno", odds, projected) - torch.einsum("hgtn,hgto->htno", odds, out)
        return change.norm(dim=-1).mean(1)

    return {"attention": p[:, :, :S, :S].sum(2).mean(1),
            "window": mean.mean(1),
            "window, chunks": chunk_scores(mean.mean(1), chunk, "sum")[0].gather(-1, chunk),
            "window × norm": (mean * norms).mean(1),
            "theta": (mean * (norms + W)).mean(1),
            "one removal": one_removal(window),
            "window, question": p[:, :, question, :S].mean(2).mean(1),
            "one removal, question": one_removal(question)}


# ---- comparing them ---

def ranks(x: Tensor) -> Tensor:
    """Return the rank of each element of x (n,), from 0; equal elements share their mean rank."""
    _, place, count = x.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count + 1) / 2).double()[place]


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rank correlation of x and y, (n,) each."""
    return torch.corrcoef(torch.stack((ranks(x), ranks(y))))[0, 1].item()


def highest(score: Tensor, n: int) -> Tensor:
    """Return a mask like `score` of its n highest elements."""
    return torch.zeros(score.numel(), dtype=torch.bool).index_fill_(
        0, score.flatten().topk(n).indices, True).view_as(score)


def of_document(model, precise, batch: Batch, gates: dict, generator: torch.Generator) -> dict:
    """Return the measurements of one document: worth, correlations, answers by keep ratio, sums.

    precise: the same model in 64 bits, which measures the worth; methods score in the model's own bits.
    """
    tokens, S, answer = torch.from_numpy(batch.tokens), batch.question, batch.answers[0]
    rest, length = tokens[:, S:answer.stop], answer.stop - answer.start
    caches = make_cache(precise)
    prefill(precise, tokens[:, :S], caches)
    shape = len(caches), caches[0].k.shape[1], S
    each_entry = torch.eye(math.prod(shape), dtype=torch.bool).view(-1, *shape)  # a row removes one entry
    loss = removed(precise, caches, rest, length, each_entry)
    worth, kl = loss.worth.view(shape), loss.kl.view(shape)
    found = scores(model, tokens[:, :answer.stop], S, gates)
    top = highest(worth, worth.numel() // 100)
    ranked = dict(worth=worth) | found | dict(random=torch.rand(shape, generator=generator))

    kept = [highest(x, round(ratio * x.numel())) for x in ranked.values() for ratio in KEEP_RATIOS]
    right = removed(precise, caches, rest, length, ~torch.stack(kept)).right.view(len(ranked), -1)
    return dict(worth=worth, correlations={
        name: (*(rank_correlation(x.flatten(), y.flatten()) for y in (worth, worth.abs(), kl)),
               (highest(x, int(top.sum())) & top).sum().item() / top.sum().item())
        for name, x in ranked.items()},
        right=dict(zip(ranked, right.float())), sums=sums(precise, caches, rest, length, worth, generator))


def sums(model, caches, rest: Tensor, length: int, worth: Tensor, generator) -> dict[tuple, tuple]:
    """Return Σ of single worths and the worth of all together, by (how the set was chosen, its size)."""
    order, sets = worth.flatten().argsort(descending=True), {}
    for n in SIZES:
        drawn = [torch.randperm(len(order), generator=generator)[:n] for _ in range(DRAWN)]
        sets |= {("random", n): drawn, ("highest", n): [order[:n]], ("lowest", n): [order[-n:]]}
    flat = [torch.zeros(len(order), dtype=torch.bool).index_fill_(0, i, True)
            for drawn in sets.values() for i in drawn]
    together = iter(removed(model, caches, rest, length, torch.stack(flat).view(-1, *worth.shape)).worth)
    result = {}
    for key, drawn in sets.items():
        alone = torch.stack([worth.flatten()[i].sum() for i in drawn])
        result[key] = alone.mean().item(), torch.stack([next(together) for _ in drawn]).mean().item()
    return result


def measured(model, encoding, documents: int, length: int) -> list[dict]:
    """Return the rows of three tables: scores, kept, sums. Means over documents come with standard errors."""
    check_size(model, documents, 2, length)
    gates, precise, rows = FastKVzip.calibrate(model, encoding), deepcopy(model).double(), []
    for task in ASKED:
        batch = Tasks(encoding, "test").batch(task, 0, documents, length)
        generator = torch.Generator().manual_seed(0)
        each = [of_document(model, precise, one, gates, generator)
                for one in tqdm(cut(batch, 1), desc=task, leave=False, disable=None)]
        mean = lambda values: mean_and_error(torch.tensor(values))
        matter = torch.tensor([[(x["worth"] > 0.01).sum(), x["worth"].numel(), (x["worth"] < -0.01).sum()]
                               for x in each]).double().mean(0).tolist()
        rows.append(dict(table="entries", task=task, over=matter[0], entries=matter[1], under=matter[2]))
        for name in each[0]["correlations"]:
            columns = zip(*(x["correlations"][name] for x in each))
            rows.append(dict(table="scores", task=task, score=name)
                        | dict(zip(("worth", "size", "kl", "top"), map(mean, columns))))
            rows.append(dict(table="kept", task=task, score=name, right=[
                mean(column) for column in zip(*(x["right"][name].tolist() for x in each))]))
        for chosen, n in each[0]["sums"]:
            alone, together = zip(*(x["sums"][chosen, n] for x in each))
            rows.append(dict(table="sums", task=task, chosen=chosen, n=n, alone=mean(alone),
                             together=mean(together)))
    return rows


TERMS = """\
worth      what the answer's log probability loses, in nats, if one entry is missing
score      how a method ranks entries. attention: sum over all queries (H2O); window: mean of the last 8
           queries (SnapKV); chunks: summed over chunks of 10 tokens (ChunkKV); × norm: times ‖W_O v‖₁
           (CriticalKV); theta: the slope of CriticalKV's bound; one removal: exact change of the head's
           output (DropKV); reread: KVzip; gates: Fast KVzip; expected: Expected Attention; keys: KeyDiff;
           question: by the queries of question and answer
ρ          Spearman's rank correlation of a score and the worth; |worth|: its size, whatever its sign; KL:
           the KL of the next tokens. 1: they rank the entries alike; 0: one says nothing about the other
top 1 %    share of the 1 % of entries with the highest worth that the score also ranks there"""


def show(rows: list[dict]) -> str:
    """Return three tables for each decoder, the tasks side by side."""
    tables, parts = grouped(rows, "decoder", "table"), [TERMS]
    for decoder in dict.fromkeys(decoder for decoder, _ in tables):
        of = lambda table, decoder=decoder: grouped(tables[decoder, table], "task")
        tasks = [task for task, in of("scores")]
        parts.append(f"{decoder}\n" + "\n".join(
            f"{task}: of {row['entries']:.0f} entries of a document, {row['over']:.0f} are worth more than "
            f"0.01 nats; {row['under']:.0f} make the answer likelier by more than that if they are missing"
            for (task,), (row,) in of("entries").items()))
        for table, labels, names, cells in (
                ("scores", dict(score="score"), ("ρ worth", "ρ |worth|", "ρ KL", "top 1 %"),
                 lambda row: [with_error(*row[key]) for key in ("worth", "size", "kl", "top")]),
                ("kept", dict(score="score"), [keep_label(ratio) for ratio in KEEP_RATIOS],
                 lambda row: [f"{mean:.2f}" for mean, _ in row["right"]]),
                ("sums", dict(chosen="removed together", n="entries"), ("Σ alone", "together"),
                 lambda row: [with_error(*row[key]) for key in ("alone", "together")])):
            parts.append(text_table([
                [*labels.values(), *(f"{task} {name}" for task in tasks for name in names)],
                *([*(str(same[0][key]) for key in labels), *(cell for row in same for cell in cells(row))]
                  for same in zip(*of(table).values()))]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    run("experiments.worth", __doc__, measured, show, documents=32, length=256)
