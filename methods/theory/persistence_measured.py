"""Measure Scissorhands' observations (Section 3, Appendix A) on a decoder; other readings of its cache."""
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
    """The decoder's own attention weights for tokens (B, T): (L, B, H·G, T, T)."""
    caches = make_cache(model, Recorder)
    recordings = record(model, caches, tokens)
    return torch.stack([probabilities(part.q, cache.k, cache.pos, None, part.pos).flatten(1, 2)
                        for cache, part in zip(caches, recordings)])


def persistence_ratio(p: Tensor, distance: int = 1, times: float = 1) -> tuple[Tensor, Tensor]:
    """Section 3.2 from probabilities p (..., T, T); (...) each.

    A token is pivotal if some query, at least `distance` tokens behind it, gives it more than times/t. The
    paper has times = 1. Returns, of the tokens pivotal to the second half's queries, the share that already
    was to the first half's (nan if there are none); and, to compare with, the share of all tokens that was.
    Tokens are those that the first half has a query for, the first T/2 − distance.
    """
    T = p.shape[-1]
    half, at = T // 2, torch.arange(T, device=p.device)
    if not 0 <= distance < half:
        raise ValueError(f"distance {distance} must be at least 0 and below half of the {T} queries")

    pivotal = (p > times / (at + 1)[:, None]) & (at[:, None] - at >= distance)
    pivotal = pivotal[..., :half - distance]
    first, second = pivotal[..., :half, :].any(-2), pivotal[..., half:, :].any(-2)
    return (first & second).sum(-1) / second.sum(-1), first.float().mean(-1)


@torch.no_grad()
def block_similarity(model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Appendix A.2, per layer, means over tokens (B, T): cosine of x and F(x) = x + MLP(x), ‖x‖ and ‖MLP(x)‖.

    Returns (L,) each.
    """
    before, added = [], []
    norms, mlps = zip(*feed_forwards(model))
    hooks = [norm.register_forward_hook(lambda module, args, out: before.append(args[0])) for norm in norms]
    hooks += [mlp.register_forward_hook(lambda module, args, out: added.append(out)) for mlp in mlps]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()

    x, change = torch.stack(before), torch.stack(added)  # (L, B, T, d_model)
    measured = F.cosine_similarity(x, x + change, dim=-1), x.norm(dim=-1), change.norm(dim=-1)
    return tuple(m.mean((1, 2)) for m in measured)


def feed_forwards(model) -> list[tuple]:
    """Each layer's norm before its MLP, and the MLP. Of transformers' those whose layers add just these."""
    if isinstance(model, Decoder):
        return [(block.norm2, block.mlp) for block in model.blocks]
    found = [(x.post_attention_layernorm, x.mlp) for x in model.model.modules()
             if hasattr(x, "mlp") and hasattr(x, "post_attention_layernorm")
             and not hasattr(x, "pre_feedforward_layernorm")]  # Gemma's norms stand elsewhere
    if len(found) != len(model.blocks):
        raise ValueError(f"{len(found)} of {len(model.blocks)} layers have a post_attention_layernorm and an "
                         "mlp, and nothing between; take another model")
    return found


def even_shares(p: Tensor, last: int = 64, most: int = 20_000) -> Tensor:
    """Weights that the last queries of p (..., T, T) give, in units of the even share 1/t.

    Those above 0, (n,), or every second, third … of them, so that n ≤ most.
    """
    t = torch.arange(p.shape[-1] - last, p.shape[-1], device=p.device)[:, None] + 1
    x = p[..., -last:, :] * t
    x = x[x > 0]
    return x[::math.ceil(len(x) / most)]


def mass_lost(p: Tensor, betas: Sequence[float], last: int = 64) -> list[Tensor]:
    """Mean mass beside the largest βt weights of the last queries of p (L, ..., T, T): (L,) for each β."""
    T = p.shape[-1]
    t = torch.arange(T - last, T, device=p.device)[:, None] + 1
    largest = p[..., -last:, :].sort(-1, descending=True).values.cumsum(-1)  # of the largest 1, 2, … weights

    lost = []
    for beta in betas:
        n = (beta * t).round().long().expand(*largest.shape[:-1], 1)
        lost.append(1 - largest.gather(-1, n - 1).flatten(1).mean(1))
    return lost


class Tail(NamedTuple):
    """A power law x^{−k} fitted to the largest values."""
    k: float
    error: float     # standard error of k for independent values; that `least` was chosen is not in it
    least: float     # fitted to the n values from here on
    most: float      # the largest of them
    n: int
    distance: float  # Kolmogorov-Smirnov, between the fit and those values


def tail_exponent(x: Tensor, candidates: int = 100) -> Tail:
    """Maximum likelihood k = 1 + n/Σ ln(x_i/least), with the `least` that brings fit and data closest.

    Clauset, Shalizi and Newman 2009 (arXiv 0706.1062), Eq. 3.1 and Section 3.3. x (N,) are positive, at least
    100 of them.
    """
    x = x.double().sort().values
    if len(x) < 100 or not (x > 0).all():
        raise ValueError(f"{len(x)} values, of which {int((x > 0).sum())} are positive; "
                         "a fit needs at least 100, all positive")
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
    """Of texts (B, T), in every layer: persistence ratio, cosine of x and F(x), tail exponent, and the
    persistence ratio's chance: (4, B, L). One text at a time, for its attention is T × T."""
    found = []
    for text in tokens.split(1):
        p = attention_maps(model, text)
        ratio, chance = (x.nanmean((1, 2)) for x in persistence_ratio(p))
        k = torch.tensor([tail_exponent(even_shares(x)).k for x in p])
        found.append(torch.stack([x.cpu() for x in (ratio, block_similarity(model, text)[0], k, chance)]))
    return torch.stack(found, 1)


# ---- other readings of the budget cache --------------------------------------------------------------------


@dataclass(eq=False)
class Padded(Scissorhands):
    """A step before an entry came counts as unimportant."""

    def importance(self) -> Tensor:
        steps = min(self.history, self.seen)
        return super().importance() - (steps - (self.seen - self.pos).clamp(max=steps))


@dataclass(eq=False)
class Rate(Scissorhands):
    """The share of the steps at which an entry was unimportant, of those since it came."""

    def importance(self) -> Tensor:
        return super().importance() / (self.seen - self.pos).clamp(max=self.history)


def tilted(model, budget: int, tilt: float, Method=Scissorhands, **options) -> list[LayerCache]:
    """Caches with budgets that rise evenly over the layers, from 1 − tilt to 1 + tilt times their mean.

    Section 4.2: later layers have the lower persistence, and so get more.
    """
    budgets = (budget * (1 + torch.linspace(-tilt, tilt, len(model.blocks)))).round().int().tolist()
    return [make_cache(model, Method, budget=n, **options)[layer] for layer, n in enumerate(budgets)]


# ---- what the budget cache keeps and costs -----------------------------------------------------------------


@torch.no_grad()
def newest_share(model, tokens: Tensor, Method: type[LayerCache], **options) -> tuple[list[float], int]:
    """Share of the kept entries that are among the newest as many, per layer; and how many a head keeps.

    Tokens (B, T) are all read under the budget.
    """
    caches = make_cache(model, Method, **options)
    end_prefill(caches)
    feed(model, tokens, caches)
    n = caches[0].length
    newest = held(caches, tokens.shape[1])[..., -n:].sum(-1) / n
    return newest.mean((0, 2)).tolist(), n


def cost_of_reading(model, full: Reference, Method: type[LayerCache], **options) -> tuple[Tensor, float]:
    """KL of each text (B,) with a method that evicts while it reads, and the peak of a text's KiB."""
    make = reading_within(lambda tokens, prompt: make_cache(model, Method, **options))
    row = continuation(model, full, make, chunk_size=16)
    return row["kl"], row["peak"] / len(full.tokens) / 1024
