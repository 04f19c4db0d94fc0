"""What a decoder is like inside: where it retrieves, what it reads anyway, how far window scores last.

    python -m experiments.inside                  both decoders that ship, a column a layer: two minutes
    python -m experiments.inside --model FOLDER   and one of yours

Verdicts on methods depend on this. Retrieval in few heads can be given whole caches; a sink has to be kept
whatever it says; norms can only tell entries apart if they differ; window scores can only tell what comes if they
last.
"""
from collections.abc import Iterable

import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import tqdm

from experiments.script import arguments, decoders, finish, grouped, parser
from methods.duo_gates import ask, predictions
from methods.theory.persistence_measured import attention_maps, observed
from methods.theory.perturbation import seen_by_window
from nanollm.commands.shell import command
from nanollm.commands.text_table import text_table
from nanollm.measure.evaluate import exact_match, text_windows
from nanollm.measure.tasks import Tasks
from nanollm.training.initial_weights import without_heads

DISTANCES = 16, 32, 64, 128  # tokens from one window's end to the other's


# ---- where it retrieves ---

@torch.no_grad()
def found_without(model, tasks: Tasks, heads: Iterable[tuple[int, int]], documents: int = 32, T: int = 256,
                  task: str = "needle") -> float:
    """Share of answers that are right while these (layer, query head) write nothing into the stream."""
    stays = torch.ones(model.config.n_layers, 1, model.config.n_heads, device=model.embed.weight.device)
    for layer, head in heads:
        stays[layer, :, head] = 0
    with without_heads(model, stays):
        return exact_match(model, tasks, task, T, documents)


@torch.no_grad()
def importance(model, tasks: Tasks, documents: int = 32, T: int = 512, sinks: int = 4, window: int = 16,
               seed: int = 0, of: tuple[str, ...] = ("needle", "pairs")) -> Tensor:
    """Nats per token by which right answers become less likely if this head alone streams, (L, H).

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
    """All (layer, query head) of these layers."""
    return [(i, head) for i in numbers for head in range(model.config.n_heads)]


def without_pairs(model, tasks: Tasks, **size) -> Tensor:
    """(L, L): answers found without the attention of two layers; on the diagonal, of one."""
    L = model.config.n_layers
    found = torch.empty(L, L)
    for i in range(L):
        for j in range(i + 1):
            found[i, j] = found[j, i] = found_without(model, tasks, layer(model, i, j), **size)
    return found


def without_each(model, tasks: Tasks, **size) -> Tensor:
    """(L, heads): answers found without one query head."""
    c = model.config
    found = [found_without(model, tasks, [head], **size) for head in layer(model, *range(c.n_layers))]
    return torch.tensor(found).view(c.n_layers, c.n_heads)


@torch.no_grad()
def read_at_question(model, batch) -> Tensor:
    """(L, heads): weight from the question's last token to the first of the value that it asks for."""
    asking, stated = batch.answers[0].start - 1, torch.from_numpy(batch.stated)
    tokens = torch.from_numpy(batch.tokens[:, :asking + 1]).to(model.embed.weight.device)
    weights = [attention_maps(model, row)[:, 0, :, -1, at] for row, at in zip(tokens.split(1), stated)]
    return torch.stack(weights).mean(0)


# ---- what it reads anyway ---

@torch.no_grad()
def sinks(model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean weight that the second half of texts (B, T) gives to the first token, and to that of the first
    half which it reads most: (L, heads) each.
    """
    half = tokens.shape[1] // 2
    maps = (attention_maps(model, text)[:, 0] for text in tokens.split(1))  # (L, heads, T, T)
    read = torch.stack([p[:, :, half:, :half].mean(2) for p in maps])
    return read[..., 0].mean(0), read.amax(-1).mean(0)


def norm_spread(model, tokens: Tensor, low: float = 0.05, high: float = 0.95) -> Tensor:
    """(L, heads): quantile `high` over quantile `low` of the norms ‖𝒱‖₁ in a head, mean over texts."""
    with torch.no_grad():
        norms = [seen_by_window(model, text, 8)[1] for text in tokens.split(1)]
    ends = torch.cat(norms).float().quantile(torch.tensor([low, high], device=norms[0].device), -1)
    return (ends[1] / ends[0]).mean(0)


# ---- how far window scores last ---

@torch.no_grad()
def scores_kept(model, tokens: Tensor, window: int = 16, share: float = 0.25) -> Tensor:
    """(L, distances): what a window's window scores know of later ones, mean over texts (B, T) and query heads.

    Of the first half's tokens that a window reads most, `share` of them, the part that was among those of
    the window which ended with the first half. By chance it is `share`.
    """
    half = tokens.shape[1] // 2
    most, found = round(share * half), []
    if max(DISTANCES) > half:
        raise ValueError(f"texts of {2 * half} tokens must have at least {2 * max(DISTANCES)}")
    for text in tokens.split(1):
        p = attention_maps(model, text)[:, 0, :, :, :half]  # (L, heads, T, half)
        scores = [p[:, :, end - window:end].mean(2) for end in (half, *(half + d for d in DISTANCES))]
        nobody = torch.zeros_like(scores[0], dtype=torch.bool)
        first, *later = (nobody.scatter(-1, x.topk(most).indices, True) for x in scores)
        found.append(torch.stack([(first & x).sum(-1) / most for x in later], -1).mean(1))
    return torch.stack(found).mean(0)


# ---- the page ---

def page(model, tasks: Tasks, documents: int = 16) -> dict[str, list[float]]:
    """Each measurement by layer: of heads the most, of spreads and exponents the mean."""
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


def show(rows: list[dict]) -> str:
    """A table a decoder, a column a layer."""
    tables = []
    for (decoder,), each in grouped(rows, "decoder").items():
        header = [f"layer of {decoder}", *map(str, range(len(each[0]["layers"])))]
        tables.append(text_table([header, *([row["measurement"], *(f"{x:.3g}" for x in row["layers"])]
                                            for row in each)]))
    return "\n\n".join(tables)


def main(argv: list[str] | None = None):
    args = arguments(parser("experiments.inside", __doc__), argv)
    rows = [dict(decoder=name, measurement=measurement, layers=x)
            for name, model, encoding in tqdm(decoders(args), unit="model", leave=False, disable=None)
            for measurement, x in page(model, Tasks(encoding, "test")).items()]
    finish(args, rows, show)


if __name__ == "__main__":
    command(main)
