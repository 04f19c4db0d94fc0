"""ChunkKV (arXiv 2502.00299): variants to measure by, what is kept of a prompt, and the appendix's theory.

The theory: an example O = [x, y] of k tokens is drawn from θ*, and a wrong θ must be told from it. A
distribution of O is a table (V, …, V) of k dimensions.
"""
from dataclasses import dataclass
import time

import torch
from torch import Tensor
from torch.autograd.functional import jacobian
import torch.nn.functional as F

from methods.chunk_kv import ChunkKV, Chunks
from methods.ours.chunk_kv_semantic import cut_at
from nanollm.cache import LayerCache, end_prefill, make_cache
from nanollm.check import whole
from nanollm.measure.evaluate import Make, answer, held, maker, prompt_and_question
from nanollm.measure.replay import Recorder, Recording, feed, record, replay
from nanollm.measure.tasks import Batch
from nanollm.window import WindowCache


# ---- variants of the method, to measure what its parts do --------------------------------------------------

@dataclass(frozen=True)
class PlacedChunks(Chunks):
    """A grid of its own for every document: token `at` has place `place` in its chunk."""
    again = False             # the grid is that of a prompt
    at: Tensor | None = None  # (B,)
    place: int = 0            # from 0

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.at, Tensor):
            raise ValueError("at must be a tensor (B,), a token's index for each document; give batch.stated")

    def cut(self, cache: WindowCache, scores: Tensor) -> Tensor:
        first = (self.at.to(scores.device) - self.place - 1) % self.chunk_size  # ends the first chunk
        ends = torch.zeros_like(scores[:, 0], dtype=torch.bool).scatter(1, first[:, None], True)
        return cut_at(ends, self.chunk_size).unsqueeze(1).expand(scores.shape)


@dataclass(eq=False)
class LaterGroups(ChunkKV):
    """Index reuse whose first group begins at layer `first`; the layers below select for themselves."""
    first: int = 0

    def __post_init__(self):
        super().__post_init__()
        whole("first", self.first, 0)

    @property
    def follows(self) -> bool:
        return self.layer > self.first and (self.layer - self.first) % self.reuse > 0


# ---- what is kept, and what it is good for -----------------------------------------------------------------

def jaccard(kept: Tensor, other: Tensor) -> Tensor:
    """|A ∩ B| / |A ∪ B| of two sets (..., n) of bool: how alike two layers choose; nan if both are empty."""
    return (kept & other).sum(-1) / (kept | other).sum(-1)


def examples(batch: Batch, line_break: int) -> list[list[slice]]:
    """Of every document, the labelled lines: each begins with the token `line_break`."""
    starts = [row.nonzero()[0].tolist() for row in batch.facts & (batch.tokens == line_break)]
    return [[slice(a, b) for a, b in zip(at, [*at[1:], batch.question])] for at in starts]


@torch.no_grad()
def read(model, batch: Batch) -> list[list[Recording]]:
    """Recordings of a batch's context and of its question: one reading for all methods."""
    caches = make_cache(model, Recorder)
    return [record(model, caches, part) for part in prompt_and_question(model, batch)[1:]]


def replayed(batch: Batch, recordings: list[list[Recording]], make: Make, agnostic: bool = False) -> list:
    """Caches that have read the context and, unless `agnostic`, the question."""
    caches = make(batch.question, torch.from_numpy(batch.tokens))
    for n in range(1, 2 if agnostic else 3):
        replay(recordings[:n], caches)
    return caches


@torch.no_grad()
def aware(model, batch: Batch, recordings: list[list[Recording]], make: Make) -> Tensor:
    """Share of each document's questions answered, (B,); the first of them is part of the prompt."""
    caches, spans = replayed(batch, recordings, make), batch.answers
    return answer(model, torch.from_numpy(batch.tokens), spans, spans[0].start - 1, caches)


@torch.no_grad()
def at_the_answer(model, batch: Batch, recordings: list[list[Recording]], make: Make,
                  agnostic: bool = False) -> tuple[Tensor, Tensor]:
    """Before the first answer: log-probabilities (B, V) of its first token, and which tokens of the context
    are held, (B, L, H, question) of bool."""
    last, caches = batch.answers[0].start, replayed(batch, recordings, make, agnostic)
    end_prefill(caches)
    kept = held(caches, batch.question)
    tokens = torch.from_numpy(batch.tokens[:, batch.question if agnostic else last - 1:last])
    for token in tokens.unbind(1):
        logits = model(token[:, None], caches)
    return logits[:, -1].log_softmax(-1), kept


def lessons(model, batch: Batch, recordings: list[list[Recording]], makes: dict[str, Make], line_break: int,
            agnostic: bool = False) -> dict[str, dict[str, Tensor]]:
    """What each method keeps of a few-shot prompt's examples, per document, (B,): the share that a head has
    whole, the share of labels that it has, and KL(full ‖ compressed) at the answer, in nats."""
    lines, measured = examples(batch, line_break), {}
    full, _ = at_the_answer(model, batch, recordings, maker(model, LayerCache, None), agnostic)
    for name, make in makes.items():
        log_p, kept = at_the_answer(model, batch, recordings, make, agnostic)
        labels = [[line.stop - 1 for line in row] for row in lines]
        measured[name] = dict(
            whole=torch.stack([torch.stack([x[..., line].all(-1) for line in row]).float().mean()
                               for x, row in zip(kept, lines)]),
            labels=torch.stack([x[..., at].float().mean() for x, at in zip(kept, labels)]),
            kl=F.kl_div(log_p, full, log_target=True, reduction="none").sum(-1))
    return measured


@torch.no_grad()
def seconds(model, tokens: Tensor, makes: dict[str, Make], rounds: int = 9) -> dict[str, float]:
    """Best time of each method to take a recorded prompt (B, T) and compress it; "reading": to read it."""
    recordings, best = [record(model, make_cache(model, Recorder), tokens)], {}
    makes = makes | dict(reading=lambda *_: make_cache(model))
    for name in [*makes] * rounds:
        caches = makes[name](tokens.shape[1], tokens)
        began = time.perf_counter()
        if name == "reading":
            feed(model, tokens, caches, tokens.shape[1])
        else:
            replay(recordings, caches)
            end_prefill(caches)
        best[name] = min(time.perf_counter() - began, best.get(name, float("inf")))
    return best


# ---- the appendix's example O as a table -------------------------------------------------------------------

def independent(chances: list[Tensor]) -> Tensor:
    """Table (2, …, 2) of tokens that are 1, each with its own chance."""
    table = torch.ones_like(chances[0])
    for chance in chances:
        table = table[..., None] * torch.stack((1 - chance, chance))
    return table


def mirrored(theta: Tensor, k: int = 10) -> Tensor:
    """Tokens that are 1 with chance θ, but the last with 0.6 − θ. At θ* = 0.3 it says as much about θ as the
    others, but its remainder has the other sign."""
    return independent([theta[0]] * (k - 1) + [0.6 - theta[0]])


def together(theta: Tensor) -> Tensor:
    """x is a fair coin, and y = x with chance θ: neither says anything alone."""
    return torch.stack((torch.cat((theta, 1 - theta)), torch.cat((1 - theta, theta)))) / 2


def copies(theta: Tensor) -> Tensor:
    """x is 0 with chance θ, and y = x: each says everything."""
    return torch.diag(torch.cat((theta, 1 - theta)))


def markov(theta: Tensor, k: int, noise: float = 0.0) -> Tensor:
    """A chain of k states, at first 0 or 1 alike, then 1 with chance theta[state before].

    A token is the state, or with probability `noise` the other one: a hidden Markov model.
    """
    move = torch.stack((1 - theta, theta), 1)
    show = torch.tensor([[1 - noise, noise], [noise, 1 - noise]], dtype=theta.dtype)
    table = show.mT / 2  # (token, state)
    for _ in range(k - 1):
        table = torch.einsum("...s,st,to->...ot", table, move, show)
    return table.sum(-1)


# ---- Eq. 10 to 16 ------------------------------------------------------------------------------------------

def divergence(p: Tensor, q: Tensor, kept: list[int] | None = None) -> Tensor:
    """KL(p ‖ q) of two tables, in nats; of the `kept` tokens alone, if given."""
    if kept is not None:
        lost = {*range(p.dim())} - {j % p.dim() for j in kept}
        p, q = (x.sum([*lost]) if lost else x for x in (p, q))
    there = p > 0
    return (p[there] * (p[there] / q[there]).log()).sum()


def token_divergences(p: Tensor, q: Tensor) -> Tensor:
    """KL_j(θ* ‖ θ) of each token given those before it, (k,); they add up to the tables' KL (chain rule)."""
    upto = [divergence(p, q, list(range(j))) for j in range(p.dim() + 1)]
    return torch.stack([after - before for before, after in zip(upto, upto[1:])])


def fisher(table, theta: Tensor) -> Tensor:
    """I_{j,θ*} of each token, (k, P, P): second derivatives of KL_j(θ* ‖ θ) at θ = θ*, of table(θ)."""
    each = lambda other: token_divergences(table(theta), table(other))
    return jacobian(lambda other: jacobian(each, other, create_graph=True), theta)


def remainder(each: Tensor, information: Tensor, delta: Tensor) -> Tensor:
    """R = max_j |KL_j − ½ δᵀ I_j δ| / ‖δ‖² of tokens' KL_j (k,): Eq. 10's O(‖δ‖³), over ‖δ‖²."""
    quadratic = torch.einsum("p,jpq,q->j", delta, information, delta) / 2
    return (each - quadratic).abs().max() / (delta @ delta)


def distance_bound(noise: Tensor, information: Tensor, remainder: float = 0.0) -> Tensor:
    """‖θ − θ*‖² ≤ noise / (½ (k−1) min λ_min − (k−1) R), from I_2 … I_k (k − 1, P, P) (Eq. 12).

    noise is Σ_{j≥2} KL_j, or its bound ε_θ + ξ_θ(r) as long as θ cannot be told from θ*. R is the remainder
    of those tokens. Eq. 11 drops it (R = 0), though what it bounds may be negative. inf: no bound at all.
    """
    curvature = torch.linalg.eigvalsh(information)[:, 0].min() / 2 - remainder
    return torch.where(curvature > 0, noise / (len(information) * curvature), torch.inf)


def answer_bound(noise: Tensor, information: Tensor, remainder: float = 0.0) -> Tensor:
    """KL_k ≤ noise (max λ_max + 2 R) / ((k−1) (min λ_min − 2 R)) (Eq. 13 to 16).

    The paper's O(1) is 2 R, and it belongs below the line as well: above alone it may have to be nearly twice
    as large.
    """
    distance = distance_bound(noise, information, remainder)
    bound = (torch.linalg.eigvalsh(information)[:, -1].max() / 2 + remainder) * distance
    return torch.where(distance < torch.inf, bound, torch.inf)


def bounds(table, theta: Tensor, delta: Tensor) -> dict[str, float]:
    """Eq. 12 and 15 for θ* + δ: each bound over what it bounds, with R = 0 as in the paper ("paper") and
    with the remainder ("repaired"); R; and the least λ_min."""
    each, information = token_divergences(table(theta), table(theta + delta))[1:], fisher(table, theta)[1:]
    R, noise = remainder(each, information, delta), each.sum()
    found = dict(R=R, least=torch.linalg.eigvalsh(information)[:, 0].min())
    for name, r in (("paper", 0.0), ("repaired", R)):
        found[f"distance_{name}"] = distance_bound(noise, information, r) / (delta @ delta)
        found[f"answer_{name}"] = answer_bound(noise, information, r) / each[-1]
    return {name: x.item() for name, x in found.items()}


# ---- noise -------------------------------------------------------------------------------------------------

def token_noise(p: Tensor, q: Tensor, kept: list[int], examples: int) -> Tensor:
    """ξ of a selection that leaves the same tokens of every example: what the lost ones would have added.

    The paper gives ξ_θ(r) no formula. This one takes a lost token for one that was never seen.
    """
    return examples * (divergence(p, q) - divergence(p, q, kept))


def chunk_noise(p: Tensor, q: Tensor, whole: int, examples: int) -> Tensor:
    """ξ of a selection that keeps some examples whole and loses the others.

    At equal budgets, examples · |kept| = whole · k, it is below `token_noise` if and only if the kept tokens
    say less per token than a whole example does.
    """
    return (examples - whole) * divergence(p, q)
