"""ChunkKV: keep whole chunks (Liu et al., arXiv 2502.00299).

A token means little without its neighbours. So the unit that stays or goes is a chunk of c consecutive tokens: its
score is the attention that the prompt's last w queries gave it, and the chunks with the highest scores are kept whole,
beside the window itself. The indices kept in one layer may serve the layers above it, which then need no scores.

    a_i = 1/w Σ_{t ≥ S−w} α_{t,i},   score_m = Σ_{i in chunk m} a_i,   keep Top_{⌊(b−w)/c⌋}(score) ∪ {S−w … S−1}

Differs from the paper: chunks are taken in the order of their score, each that still fits whole, so the short last chunk
may go into room that ⌊(b−w)/c⌋ leaves. Room in which no chunk fits stays empty, since half a chunk is what the paper
argues against; `fill` gives it to single tokens. The window counts inside the budget, and the query heads of a group
vote together, as in SnapKV. The authors' code in NVIDIA/kvpress is ChunkKV(chunk=20, score="mean", kernel=5,
per_head=False), but for its average pool and a count of kept tokens that drifts from the budget.

The grid cuts facts: a value that begins a chunk is scored without the words before it, on which the votes
fall. `kernel=7, score="max"` mends that for values of two tokens (C1).

Beyond the paper: `SemanticChunkKV`, whose chunks end where a line or sentence does. Below: what is kept, and the appendix's
theory with its constants.
"""
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.cache import NEVER, WindowCache, finish_prompt, held, top
from nanollm.data import Batch
from nanollm.evaluate import Make, Told, replay


@dataclass(eq=False)
class ChunkKV(WindowCache):
    """Whole chunks, and the window. On top of a rule that gives heads budgets of their own (AdaKV, PyramidKV), a head
    with less room than a chunk keeps only the window (and perhaps the short last chunk)."""
    kernel: int = 1        # votes are not pooled: the chunk keeps neighbours together (kvpress pools over 5)
    chunk: int = 10        # tokens of a chunk, c (kvpress: 20)
    score: str = "sum"     # of a chunk: "sum", "mean" (kvpress) or "max" of its tokens' votes
    per_head: bool = True  # each key/value head keeps its own chunks; False: one choice per layer (kvpress)
    reuse: int = 1         # layers of a group: the lowest selects, the others take its indices; the paper uses 2
    first: int = 0         # where the first group begins; the layers below select for themselves (beyond the paper)
    fill: bool = False     # single tokens with the highest votes go where no chunk fits any more

    def __post_init__(self):
        super().__post_init__()
        if self.chunk < 1 or self.reuse < 1 or self.first < 0:
            raise ValueError(f"chunk {self.chunk} and reuse {self.reuse} must be at least 1, first {self.first} at least 0")
        if self.score not in ("sum", "mean", "max"):
            raise ValueError(f"score {self.score!r} must be 'sum', 'mean' or 'max'")
        if self.reuse > 1 and (type(self).budgets, type(self).select) != (WindowCache.budgets, ChunkKV.select):
            raise ValueError(f"reuse {self.reuse} needs the same budget in every layer and nothing on top of the chunks; "
                             f"use reuse=1 with {type(self).__name__}")
        self.check_room()

    def check_room(self):
        if self.chunk > self.budget - self.window and not self.fill:
            raise ValueError(f"budget {self.budget} has no room for a chunk of {self.chunk} beside the window "
                             f"{self.window}; make it at least {self.chunk + self.window}, or the chunk shorter")

    def link(self, layer, layers, below, w_o, freq):
        super().link(layer, layers, below, w_o, freq)
        if self.follows:
            self.voters = 0  # the choice is that of a layer below

    @property
    def follows(self) -> bool:
        return self.layer > self.first and (self.layer - self.first) % self.reuse > 0

    def chosen(self) -> Tensor:
        if not self.follows:
            return super().chosen()
        if not self.below.prompt_done:
            raise ValueError(f"layer {self.layer} takes the indices of layer {self.layer - 1}, whose prompt is not over; "
                             f"call finish_prompt(caches), lowest layer first")
        at = self.below.pos  # slot i still holds the prompt's token i
        return torch.where(at == NEVER, -1, at - self.pos[:, :, :1]).long()

    def select(self, votes: Tensor, budget: int | Tensor) -> Tensor:
        votes = self.pool(votes.mean(2))  # (B, H, n)
        if not self.per_head:
            votes = votes.mean(1, keepdim=True).expand_as(votes)
        unit = cut(self.ends_at(votes), self.chunk).unsqueeze(1).expand(votes.shape)
        score, length = scores(votes, unit, self.score)
        kept = fit(score, length, budget).gather(-1, unit)
        if self.fill:
            kept |= top(votes.masked_fill(kept, -1), budget - kept.sum(-1))
        return kept

    def ends_at(self, votes: Tensor) -> Tensor:
        """Tokens (B, n) of bool after which a chunk ends before it is full: here none."""
        return torch.zeros_like(votes[:, 0], dtype=torch.bool)


@dataclass(eq=False)
class SemanticChunkKV(ChunkKV):
    """Chunks end where a line, sentence or clause does (beyond the paper). They differ in length, so the mean decides:
    it is what a slot of the chunk gathers. Pooled, so that a vote beside a cut counts on both sides. They are as
    good as the marks in the text: a list without any falls into chunks of the longest length, and few have room."""
    kernel: int = 7
    chunk: int = 32             # the longest (chosen on our own tasks), or what has room beside the window
    score: str = "mean"
    ends: Tensor | None = None  # (V,) of bool, tokens that end a chunk: `tokenizer.boundaries(encoding, V)`

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.ends, Tensor) or self.ends.dtype != torch.bool or self.ends.dim() != 1:
            raise ValueError("ends must be a tensor (V,) of bool, the tokens that end a chunk; "
                             "give tokenizer.boundaries(encoding, vocab_size)")
        self.heard = []  # (B, T) of bool for every part of the prompt

    def check_room(self):
        self.chunk = min(self.chunk, self.budget - self.window)  # a longer one could never be kept

    def hear(self, tokens: Tensor):
        if not self.prompt_done:
            if (most := int(tokens.max())) >= len(self.ends):
                raise ValueError(f"token {most} lies beyond the {len(self.ends)} of ends; "
                                 "give tokenizer.boundaries(encoding, vocab_size)")
            self.heard.append(self.ends.to(tokens.device)[tokens])

    def ends_at(self, votes: Tensor) -> Tensor:
        heard = sum(part.shape[1] for part in self.heard)
        if heard != self.seen:
            raise ValueError(f"{heard} tokens were heard and {self.seen} seen; call cache.hear(tokens) before each attend, "
                             f"as the decoder does")
        return torch.cat(self.heard, 1)[:, :votes.shape[-1]]

    def finish_prompt(self):
        super().finish_prompt()
        self.heard = []


def cut(ends: Tensor, longest: int) -> Tensor:
    """Number of the chunk of every token, (..., n): one ends at each of `ends` (..., n), and after `longest` tokens."""
    i = torch.arange(ends.shape[-1], device=ends.device)
    after_end = F.pad(ends, (1, 0), value=True)[..., :-1]
    begin = torch.where(after_end, i, 0).cummax(-1).values
    return ((i - begin) % longest == 0).cumsum(-1) - 1


def scores(votes: Tensor, unit: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Score and length of every chunk, (..., chunks), from votes (..., n) ≥ 0 and the number of each token's chunk."""
    empty = votes.new_zeros(*votes.shape[:-1], int(unit.max()) + 1)
    length = empty.long().scatter_add(-1, unit, torch.ones_like(unit))
    if how == "max":
        return empty.scatter_reduce(-1, unit, votes, "amax"), length
    total = empty.scatter_add(-1, unit, votes)
    return (total / length.clamp(min=1) if how == "mean" else total), length


def fit(score: Tensor, length: Tensor, budget: int | Tensor) -> Tensor:
    """Mask (..., chunks): down the ranking, ties newest first, each chunk that fits whole into what is left of `budget`."""
    order = score.shape[-1] - 1 - score.flip(-1).argsort(dim=-1, descending=True, stable=True)
    length = length.gather(-1, order)
    room = torch.as_tensor(budget, device=score.device).expand(score.shape[:-1])[..., None]
    taken = torch.zeros_like(length, dtype=torch.bool)
    while True:  # one round takes all up to the first that does not fit: a few rounds, not one per chunk
        fits = ~taken & (length <= room)
        more = fits & ((fits * length).cumsum(-1) <= room)
        if not more.any():
            return torch.zeros_like(taken).scatter(-1, order, taken)
        taken, room = taken | more, room - (more * length).sum(-1, keepdim=True)


# ---- what is kept -----------------------------------------------------------------------------------------------

def jaccard(kept: Tensor, other: Tensor) -> Tensor:
    """|A ∩ B| / |A ∪ B| of two sets (..., n) of bool, the similarity of two layers' choices; nan if both are empty."""
    return (kept & other).sum(-1) / (kept | other).sum(-1)


def kept_whole(kept: Tensor, examples: list[slice]) -> Tensor:
    """Share of the examples of a prompt of which no token is missing, (...), from kept (..., n) of bool."""
    return torch.stack([kept[..., example].all(-1) for example in examples]).float().mean(0)


def examples(batch: Batch, line_break: int) -> list[list[slice]]:
    """Of every document, the labelled lines: each begins with the token `line_break`."""
    starts = [row.nonzero()[0].tolist() for row in batch.facts & (batch.tokens == line_break)]
    return [[slice(a, b) for a, b in zip(at, [*at[1:], batch.question])] for at in starts]


@torch.no_grad()
def at_the_answer(model, batch: Batch, told: list[Told], make: Make, blind=False) -> tuple[Tensor, Tensor]:
    """log-probabilities (B, V) of the first answer's first token, and which tokens of the context were held then,
    (B, L, H, question) of bool. `told` is the record of context and question (nanollm/evaluate.py)."""
    last, caches = batch.answers[0].start, make(batch.question)
    for n in range(1, 2 if blind else 3):
        replay(told[:n], caches)
    finish_prompt(caches)
    kept = held(caches, batch.question)
    tokens = torch.from_numpy(batch.tokens[:, batch.question if blind else last - 1:last])
    for token in tokens.unbind(1):
        logits = model(token[:, None], caches)
    return logits[:, -1].log_softmax(-1), kept


@dataclass(eq=False)
class PlacedChunkKV(ChunkKV):
    """A grid of its own for every document, to measure what grids do: token `at` has place `place` in its chunk."""
    at: Tensor | None = None  # (B,)
    place: int = 0            # from 0

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.at, Tensor):
            raise ValueError("at must be a tensor (B,), a token's index for each document; give batch.stated")

    def ends_at(self, votes: Tensor) -> Tensor:
        first = (self.at.to(votes.device) - self.place - 1) % self.chunk  # ends the first chunk
        return super().ends_at(votes).scatter(1, first[:, None], True)


# ---- the theory: an example O = [x, y] of k tokens is drawn from θ*, and a wrong θ must be told from it --------------
# A distribution of O is a table (V, …, V) of k dimensions.

def markov(theta: Tensor, k: int, noise: float = 0.0) -> Tensor:
    """Table (2, …, 2), k dimensions, of a chain whose state is 1 with probability theta[state before], at first 1/2.

    A token is the state, or with probability `noise` the other one: a hidden Markov model.
    """
    move = torch.stack((1 - theta, theta), 1)
    show = torch.tensor([[1 - noise, noise], [noise, 1 - noise]], dtype=theta.dtype)
    table = show.mT / 2  # (token, state)
    for _ in range(k - 1):
        table = torch.einsum("...s,st,to->...ot", table, move, show)
    return table.sum(-1)


def divergence(p: Tensor, q: Tensor, kept: list[int] | None = None) -> Tensor:
    """KL(p ‖ q) of two tables, in nats; of the `kept` tokens alone, if given."""
    if kept is not None:
        lost = {*range(p.dim())} - {j % p.dim() for j in kept}
        p, q = (x.sum([*lost]) if lost else x for x in (p, q))
    there = p > 0
    return (p[there] * (p[there] / q[there]).log()).sum()


def token_divergences(p: Tensor, q: Tensor) -> Tensor:
    """KL_j(θ* ‖ θ) of each token given those before it, (k,); their sum is the KL of the tables (chain rule)."""
    upto = [divergence(p, q, list(range(j))) for j in range(p.dim() + 1)]
    return torch.stack([after - before for before, after in zip(upto, upto[1:])])


def fisher(table, theta: Tensor) -> Tensor:
    """I_{j,θ*} of each token, (k, P, P): the second derivatives of KL_j(θ* ‖ θ) at θ = θ*; table(theta) makes the table."""
    return torch.func.hessian(lambda other: token_divergences(table(theta), table(other)))(theta)


def distance_bound(noise: Tensor, information: Tensor, remainder: float = 0.0) -> Tensor:
    """‖θ − θ*‖² ≤ noise / (½ (k−1) min λ_min − (k−1) remainder), from I_2 … I_k (k − 1, P, P) (Eq. 12).

    noise is Σ_{j≥2} KL_j, or its bound ε_θ + ξ_θ(r) as long as θ cannot be told from θ*. remainder bounds
    |KL_j − ½ δᵀ I_j δ| / ‖δ‖² for all j, Eq. 10's O(‖δ‖³) over ‖δ‖²; Eq. 11 drops it (remainder 0), though it may be
    negative. inf: no bound at all.
    """
    curvature = torch.linalg.eigvalsh(information)[:, 0].min() / 2 - remainder
    return torch.where(curvature > 0, noise / (len(information) * curvature), torch.inf)


def answer_bound(noise: Tensor, information: Tensor, remainder: float = 0.0) -> Tensor:
    """KL_k ≤ noise (max λ_max + 2 remainder) / ((k−1) (min λ_min − 2 remainder)) (Eq. 13 to 16).

    The paper's O(1) is 2 remainder, and it belongs below the line as well: above alone it may have to be
    nearly twice as large.
    """
    distance = distance_bound(noise, information, remainder)
    bound = (torch.linalg.eigvalsh(information)[:, -1].max() / 2 + remainder) * distance
    return torch.where(distance < torch.inf, bound, torch.inf)


def token_noise(p: Tensor, q: Tensor, kept: list[int], examples: int) -> Tensor:
    """ξ of a selection that leaves the same tokens of every example: the divergence that the lost ones would have added.

    The paper gives ξ_θ(r) no formula. This one takes a lost token for one that was never seen.
    """
    return examples * (divergence(p, q) - divergence(p, q, kept))


def chunk_noise(p: Tensor, q: Tensor, whole: int, examples: int) -> Tensor:
    """ξ of a selection that keeps some examples whole and loses the others. At equal budgets, examples · |kept| =
    whole · k, it is below `token_noise` if and only if the kept tokens say less per token than a whole example does."""
    return (examples - whole) * divergence(p, q)


variants = {"chunk_kv": ChunkKV, "chunk_kv_reuse": partial(ChunkKV, reuse=2), "chunk_kv_semantic": SemanticChunkKV}
additions = {"chunk": ChunkKV, "semantic": SemanticChunkKV}  # on top of any window method, as in ada_kv+chunk
