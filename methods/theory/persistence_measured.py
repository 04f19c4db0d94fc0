"""Measure Scissorhands' observations (Section 3, Appendix A) on a decoder; variants of its cache.

The paper (arXiv 2305.17118) observes three things: tokens stay important, an MLP block hardly changes the
direction of its input, and attention weights follow a power law (claim S7). The variants follow other
interpretations of Algorithm 2 and Section 4.2. Notebook 03 shows the measurements.
`python -m nanollm claims --claims S7` and `python -m experiments.readings` print tables.
"""
from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.scissorhands import Scissorhands
from nanollm.attention import probabilities
from nanollm.cache import LayerCache, end_prefill, make_cache
from nanollm.measure.evaluate import Reference, continuation, held, reading_within
from nanollm.measure.replay import Recorder, feed, record
from nanollm.model import Decoder

# ---- attention that persists, and the other observations ---------------------------------------------------


@torch.no_grad()
def attention_maps(model, tokens: Tensor) -> Tensor:
    """Return the weights of full attention for tokens (B, T): (L, B, H·G, T, T)."""
    caches = make_cache(model, Recorder)
    recordings = record(model, caches, tokens)
    return torch.stack([probabilities(part.q, cache.k, cache.pos, None, part.pos).flatten(1, 2)
                        for cache, part in zip(caches, recordings)])


def persistence_ratio(p: Tensor, distance: int = 1, times: float = 1) -> tuple[Tensor, Tensor]:
    """Return Section 3.2's persistence ratio of weights p (..., T, T), and chance; (...) each.

    A token is pivotal to query t = 1 … T if its weight exceeds times/t and the query is at least `distance`
    tokens later. The paper has times = 1. Take the tokens that are pivotal to a query of the second half. The
    ratio is the fraction of them that was pivotal to a query of the first half; nan if there are none. Chance
    is this fraction of all tokens. Only the first T/2 − distance tokens count: later ones have no query in
    the first half that is far enough behind.
    """
    T = p.shape[-1]
    half, position = T // 2, torch.arange(T, device=p.device)
    if not 0 <= distance < half:
        raise ValueError(f"distance is {distance}; it must be at least 0 and below half of the {T} queries")

    pivotal = (p > times / (position + 1)[:, None]) & (position[:, None] - position >= distance)
    pivotal = pivotal[..., :half - distance]
    first, second = pivotal[..., :half, :].any(-2), pivotal[..., half:, :].any(-2)
    return (first & second).sum(-1) / second.sum(-1), first.float().mean(-1)


@torch.no_grad()
def block_similarity(model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each layer's cosine of x and F(x) = x + MLP(x), ‖x‖ and ‖MLP(x)‖; (L,) each.

    They are means over tokens (B, T), as in Appendix A.2.
    """
    inputs, outputs = [], []
    norms, mlps = zip(*feed_forwards(model))
    hooks = [norm.register_forward_hook(lambda module, args, out: inputs.append(args[0])) for norm in norms]
    hooks += [mlp.register_forward_hook(lambda module, args, out: outputs.append(out)) for mlp in mlps]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()

    x, change = torch.stack(inputs), torch.stack(outputs)  # (L, B, T, d_model)
    measured = F.cosine_similarity(x, x + change, dim=-1), x.norm(dim=-1), change.norm(dim=-1)
    return tuple(m.mean((1, 2)) for m in measured)


def feed_forwards(model) -> list[tuple]:
    """Return each layer's norm before its MLP, and the MLP.

    In a model of transformers, an MLP must directly follow its layer's post_attention_layernorm; else
    ValueError.
    """
    if isinstance(model, Decoder):
        return [(block.norm2, block.mlp) for block in model.blocks]
    pairs = [(x.post_attention_layernorm, x.mlp) for x in model.model.modules()
             if hasattr(x, "mlp") and hasattr(x, "post_attention_layernorm")
             and not hasattr(x, "pre_feedforward_layernorm")]  # Gemma has this norm between the two
    if len(pairs) != len(model.blocks):
        raise ValueError(f"only {len(pairs)} of {len(model.blocks)} layers have a post_attention_layernorm "
                         "directly before an mlp; take a model in which all do")
    return pairs


def even_shares(p: Tensor, last: int = 64, most: int = 20_000) -> Tensor:
    """Return the weights above 0 of the last queries of p (..., T, T), in units of 1/t: (n,).

    If there are more than `most`, only every second, third, … of them, so that n ≤ most.
    """
    t = torch.arange(p.shape[-1] - last, p.shape[-1], device=p.device)[:, None] + 1
    x = p[..., -last:, :] * t
    x = x[x > 0]
    return x[::math.ceil(len(x) / most)]


def mass_lost(p: Tensor, betas: Sequence[float], last: int = 64) -> list[Tensor]:
    """Return the sum of all but query t's largest βt weights, (L,) for each β.

    This is the mean over the last queries of p (L, ..., T, T).
    """
    T = p.shape[-1]
    t = torch.arange(T - last, T, device=p.device)[:, None] + 1
    largest = p[..., -last:, :].sort(-1, descending=True).values.cumsum(-1)  # of the top 1, 2, … weights

    lost = []
    for beta in betas:
        n = (beta * t).round().long().expand(*largest.shape[:-1], 1)
        lost.append(1 - largest.gather(-1, n - 1).flatten(1).mean(1))
    return lost


class Tail(NamedTuple):
    """A power law x^{−k} fitted to the largest values."""
    k: float
    error: float     # standard error of k for independent values; ignores that `least` was chosen
    least: float     # the smallest of the n fitted values
    most: float      # the largest of them
    n: int
    distance: float  # Kolmogorov-Smirnov distance between the fit and these values


def tail_exponent(x: Tensor, candidates: int = 100) -> Tail:
    """Return the power law that fits the largest values of x (N,) best.

    Maximum likelihood gives k = 1 + n/Σ ln(x_i/least); `least` is the candidate with the smallest distance
    (Clauset, Shalizi and Newman 2009, arXiv 0706.1062, Eq. 3.1 and Section 3.3). ValueError unless x has at
    least 100 values, all positive.
    """
    x = x.double().sort().values
    if len(x) < 100 or not (x > 0).all():
        raise ValueError(f"x has {len(x)} values, {int((x > 0).sum())} of them positive; "
                         "give at least 100 values, all positive")
    log, fits = x.log(), []

    for start in torch.linspace(0, 0.99 * len(x) - 1, candidates).long().unique().tolist():
        above = log[start:] - log[start]  # ln(x_i/least)
        n = len(above)
        k = 1 + n / above.sum().item()

        rank = torch.arange(n + 1, dtype=x.dtype, device=x.device) / n
        fit = 1 - (above * (1 - k)).exp()
        distance = torch.maximum((fit - rank[:-1]).abs(), (fit - rank[1:]).abs()).max().item()
        fits.append(Tail(k, (k - 1) / n ** 0.5, x[start].item(), x[-1].item(), n, distance))
    return min(fits, key=lambda fit: fit.distance)


@torch.no_grad()
def observed(model, tokens: Tensor) -> Tensor:
    """Return the observations on texts (B, T): (4, B, L).

    They are the persistence ratio, the cosine of x and F(x), the tail exponent, and the persistence ratio by
    chance.
    """
    measured = []
    for text in tokens.split(1):  # one at a time, because its weights take T × T numbers per head
        p = attention_maps(model, text)
        ratio, chance = (x.nanmean((1, 2)) for x in persistence_ratio(p))
        k = torch.tensor([tail_exponent(even_shares(x)).k for x in p])
        measured.append(torch.stack([x.cpu() for x in (ratio, block_similarity(model, text)[0], k, chance)]))
    return torch.stack(measured, 1)


# ---- variants of the cache ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Padded(Scissorhands):
    """Count the steps before an entry came as unimportant, as the paper does."""

    def importance(self) -> Tensor:
        steps = min(self.history, self.seen)
        return super().importance() - (steps - (self.seen - self.pos).clamp(max=steps))


@dataclass(eq=False)
class Rate(Scissorhands):
    """Rank an entry by the fraction of its last steps, at most w, at which it was unimportant."""

    def importance(self) -> Tensor:
        return super().importance() / (self.seen - self.pos).clamp(max=self.history)


def tilted(model, budget: int, tilt: float, Method=Scissorhands, **options) -> list[LayerCache]:
    """Return caches whose budgets rise linearly over the layers; their mean is `budget`.

    They rise from 1 − tilt to 1 + tilt times the mean. Section 4.2 gives later layers more, because
    importance persists less there.
    """
    budgets = (budget * (1 + torch.linspace(-tilt, tilt, len(model.blocks)))).round().int().tolist()
    return [make_cache(model, Method, budget=n, **options)[layer] for layer, n in enumerate(budgets)]


# ---- kept entries and cost ---------------------------------------------------------------------------------


@torch.no_grad()
def newest_share(model, tokens: Tensor, Method: type[LayerCache], **options) -> tuple[list[float], int]:
    """Return, per layer, the fraction of a head's n entries that are the newest n tokens; and n.

    The caches evict while they read tokens (B, T).
    """
    caches = make_cache(model, Method, **options)
    end_prefill(caches)
    feed(model, tokens, caches)
    n = caches[0].length
    newest = held(caches, tokens.shape[1])[..., -n:].sum(-1) / n
    return newest.mean((0, 2)).tolist(), n


def cost_of_reading(model, full: Reference, Method: type[LayerCache], **options) -> tuple[Tensor, float]:
    """Return each text's KL (B,) and the peak KiB of a text if the caches evict while they read."""
    make = reading_within(lambda tokens, prompt: make_cache(model, Method, **options))
    row = continuation(model, full, make, chunk_size=16)
    return row["kl"], row["peak"] / len(full.tokens) / 1024
