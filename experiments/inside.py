"""Measure a decoder's attention by layer: retrieval, sinks, value norms, and how long window scores hold.

    python -m experiments.inside                  both shipped decoders: two minutes
    python -m experiments.inside --model FOLDER   and your own

These properties decide which methods work. If few heads retrieve, they can keep their whole caches. A sink
must be kept. Value norms can rank entries only if they differ. Window scores can predict later attention only
if they hold.
"""
from collections.abc import Iterable

import torch
from torch import Tensor
import torch.nn.functional as F

from experiments.script import grouped, run
from methods.duo_gates import ask, predictions
from methods.theory.persistence_measured import attention_maps, observed
from methods.theory.perturbation import seen_by_window
from nanollm.commands.text_table import text_table
from nanollm.measure.evaluate import exact_match, text_windows
from nanollm.measure.tasks import Tasks
from nanollm.training.initial_weights import without_heads

DISTANCES = 16, 32, 64, 128  # tokens between the ends of two observation windows


# ---- retrieval ---

@torch.no_grad()
def found_without(model, tasks: Tasks, heads: Iterable[tuple[int, int]], documents: int = 32,
                  T: int = 256) -> float:
    """Return the accuracy on needles while these (layer, query head) add nothing to the residual."""
    stays = torch.ones(model.config.n_layers, 1, model.config.n_heads, device=model.embed.weight.device)
    for layer, head in heads:
        stays[layer, :, head] = 0
    with without_heads(model, stays):
        return exact_match(model, tasks, "needle", T, documents)


@torch.no_grad()
def importance(model, tasks: Tasks, documents: int = 32, T: int = 512, sinks: int = 4, window: int = 16,
               seed: int = 0, of: tuple[str, ...] = ("needle", "pairs")) -> Tensor:
    """Return the loss of log p per answer token if one head keeps only sinks and window, (L, H), in nats.

    Mean over the tasks `of`, with `documents` of T tokens each; sinks and window as in `gates`.
    """
    c = model.config
    asked = ask(model, tasks, of, documents, T, seed, documents)

    def nll(gates: Tensor) -> float:
        each = [predictions(model, part, gates, sinks, window) for part in asked]
        return sum(F.nll_loss(log_p.flatten(0, 1), part.tokens[:, -part.n:].flatten()).item()
                   for log_p, part in zip(each, asked)) / len(asked)

    heads = torch.eye(c.n_layers * c.n_kv_heads).view(-1, c.n_layers, c.n_kv_heads)
    full = nll(torch.ones_like(heads[0]))
    return torch.tensor([nll(1 - head) - full for head in heads]).view_as(heads[0])


def layer(model, *numbers: int) -> list[tuple[int, int]]:
    """Return all (layer, query head) of these layers."""
    return [(i, head) for i in numbers for head in range(model.config.n_heads)]


def without_pairs(model, tasks: Tasks, **size) -> Tensor:
    """Return the accuracy without the attention of two layers, (L, L); of one layer on the diagonal."""
    L = model.config.n_layers
    found = torch.empty(L, L)
    for i in range(L):
        for j in range(i + 1):
            found[i, j] = found[j, i] = found_without(model, tasks, layer(model, i, j), **size)
    return found


def without_each(model, tasks: Tasks, **size) -> Tensor:
    """Return the accuracy without one query head, (L, heads)."""
    c = model.config
    found = [found_without(model, tasks, [head], **size) for head in layer(model, *range(c.n_layers))]
    return torch.tensor(found).view(c.n_layers, c.n_heads)


@torch.no_grad()
def read_at_question(model, batch) -> Tensor:
    """Return the attention weight (L, heads) from the question's last token to the answer's first token.

    The answer's place is where the prompt states it.
    """
    asking, stated = batch.answers[0].start - 1, torch.from_numpy(batch.stated)
    tokens = torch.from_numpy(batch.tokens[:, :asking + 1]).to(model.embed.weight.device)
    weights = [attention_maps(model, row)[:, 0, :, -1, position]
               for row, position in zip(tokens.split(1), stated)]
    return torch.stack(weights).mean(0)


# ---- sinks and norms ---

@torch.no_grad()
def sinks(model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return two mean weights (L, heads) that the second half of texts (B, T) gives to one token.

    First, the text's first token. Second, the token of the first half with the largest mean weight.
    """
    half = tokens.shape[1] // 2
    maps = (attention_maps(model, text)[:, 0] for text in tokens.split(1))  # (L, heads, T, T)
    read = torch.stack([p[:, :, half:, :half].mean(2) for p in maps])
    return read[..., 0].mean(0), read.amax(-1).mean(0)


def norm_spread(model, tokens: Tensor) -> Tensor:
    """Return the 95 % quantile over the 5 % quantile of the norms ‖𝒱‖₁, (L, heads), mean over texts."""
    with torch.no_grad():
        norms = [seen_by_window(model, text, 8)[1] for text in tokens.split(1)]
    ends = torch.cat(norms).float().quantile(torch.tensor([0.05, 0.95], device=norms[0].device), -1)
    return (ends[1] / ends[0]).mean(0)


# ---- how long window scores hold ---

@torch.no_grad()
def scores_kept(model, tokens: Tensor, window: int = 16, share: float = 0.25) -> Tensor:
    """Return the overlap of an observation window's top tokens with a later window's, (L, distances).

    Top tokens are the `share` of the first half's tokens with the highest window scores. The first window
    ends with the first half of the text. Random scores give `share`. Mean over texts (B, T) and query heads.
    """
    half = tokens.shape[1] // 2
    most, overlaps = round(share * half), []
    if max(DISTANCES) > half:
        raise ValueError(f"texts have {2 * half} tokens; they must have at least {2 * max(DISTANCES)}")
    for text in tokens.split(1):
        p = attention_maps(model, text)[:, 0, :, :, :half]  # (L, heads, T, half)
        scores = [p[:, :, end - window:end].mean(2) for end in (half, *(half + d for d in DISTANCES))]
        none = torch.zeros_like(scores[0], dtype=torch.bool)
        first, *later = (none.scatter(-1, x.topk(most).indices, True) for x in scores)
        overlaps.append(torch.stack([(first & x).sum(-1) / most for x in later], -1).mean(1))
    return torch.stack(overlaps).mean(0)


# ---- the table ---

def page(model, tasks: Tasks, documents: int = 16) -> dict[str, list[float]]:
    """Return each measurement by layer: the largest over heads, or the mean of spreads and exponents."""
    batch, tokens = tasks.batch("needle", 0, documents, 256), text_windows(tasks, documents, 512, model)
    tokens = tokens.to(model.embed.weight.device)
    first, strongest = sinks(model, tokens)
    ratio, cosine, exponent, chance = observed(model, tokens).mean(1)
    scores = scores_kept(model, tokens)
    rows = {
        "needles without its attention": without_pairs(model, tasks).diagonal(),
        "needles without its weightiest head": without_each(model, tasks).amin(1),
        "question → value, strongest head": read_at_question(model, batch).amax(1),
        "weight on the first token, strongest head": first.amax(1),
        "weight on the most read, strongest head": strongest.amax(1),
        "value norms, 95 % over 5 %, mean": norm_spread(model, tokens).mean(1),
        "exponent of the weights' tail": exponent,
        "pivotal tokens that were so before": ratio,
        "the same by chance": chance,
        "cosine of x and F(x)": cosine}
    rows |= {f"window scores still true {d} tokens later": x for d, x in zip(DISTANCES, scores.T)}
    return {name: x.tolist() for name, x in rows.items()}


LABELS = {
    "needles without its attention": "accuracy without this layer's attention",
    "needles without its weightiest head": "accuracy without its most needed head",
    "question → value, strongest head": "weight from question to answer",
    "weight on the first token, strongest head": "weight on the first token",
    "weight on the most read, strongest head": "weight on the top token",
    "value norms, 95 % over 5 %, mean": "spread of value norms",
    "pivotal tokens that were so before": "pivotal tokens that were pivotal before",
} | {f"window scores still true {d} tokens later": f"top tokens still on top {d} tokens later"
     for d in DISTANCES}
TERMS = """\
accuracy without      share of needles found if the layer's attention, or its most needed head, is left out
weight from question  attention weight from the question's last token to the answer in the prompt, in the head
                      with the most
weight on             mean attention weight of later queries on the text's first token, and on the token that
                      gets the most, in the head with the most; a large weight shows a sink
spread of norms       95 % quantile of ‖v W_O‖₁ over the 5 % quantile, mean over heads
exponent of the tail  k of a power law x^−k through the large attention weights x
pivotal tokens        a query gives a pivotal token more than the even weight 1/t. Share of the tokens pivotal
                      in the text's second half that were pivotal in the first; by chance the next row
cosine                of the MLP's input x and x + MLP(x)
top tokens            the quarter of the tokens with the highest window scores; share that a later window
                      also has on top; by chance 0.25"""


def show(rows: list[dict]) -> str:
    """Return a table for each decoder, with a column for each layer."""
    tables = [TERMS]
    for (decoder,), each in grouped(rows, "decoder").items():
        header = [f"layer of {decoder}", *map(str, range(len(each[0]["layers"])))]
        tables.append(text_table([header, *([LABELS.get(row["measurement"], row["measurement"]),
                                             *(f"{x:.3g}" for x in row["layers"])]
                                            for row in each)]))
    return "\n\n".join(tables)


def measured(model, encoding) -> list[dict]:
    """Return a row for each measurement of `page`."""
    return [dict(measurement=name, layers=x) for name, x in page(model, Tasks(encoding, "test")).items()]


if __name__ == "__main__":
    run("experiments.inside", __doc__, measured, show)
