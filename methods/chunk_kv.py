"""ChunkKV: keep whole chunks (Liu et al., arXiv 2502.00299).

A token means little without its neighbours. So what stays or goes is a chunk of c consecutive tokens. Its
score is the attention that the prompt's last w queries gave it. The best chunks are kept whole, beside the
window. The indices kept in one layer may serve the layers above it, which then need no scores.

    a_i = 1/w Σ_{t≥S−w} α_{t,i},   score_m = Σ_{i ∈ chunk m} a_i
    keep the first b − w tokens of Top(score), and {S−w … S−1}

As in Algorithm 1 the chosen chunks are cut to b − w tokens, so that the budget is used to the full.
`Chunks(fill=False)` keeps none but whole chunks: half a chunk is what the paper argues against.

Differs from the paper: it does not say in which order the chosen chunks stand when they are cut. Here they
stand in the order of their score, and the last to be chosen keeps its first tokens. The query heads of a
group vote together.

The grid cuts facts: window scores fall on the words before a value, and a value that begins a chunk is scored without
them. `ChunkKV(kernel_size=7, select=Chunks(score="max"))` mends that for values of two tokens (claim C1).
Ours: chunks that end where a line or sentence does, in methods/ours/chunk_kv_semantic.py.
"""
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from methods.snap_kv import SnapKV
from nanollm.cache import NEVER
from nanollm.check import whole
from nanollm.window import Selection, WindowCache


@dataclass(frozen=True)
class Chunks(Selection):
    """Down the ranking of chunks, until the budget is full."""
    chunk_size: int = 10  # tokens of a chunk, c
    score: str = "sum"    # of a chunk: "sum", "mean" or "max" of its tokens' window scores
    fill: bool = True     # the last chunk is cut to the room left; False: each that still fits whole

    def __post_init__(self):
        super().__post_init__()
        whole("chunk", self.chunk_size, 1)
        if self.score not in ("sum", "mean", "max"):
            raise ValueError(f"score {self.score!r} must be 'sum', 'mean' or 'max'")

    def check(self, cache: WindowCache):
        least = self.chunk_size + cache.window_size
        if cache.budget < least and not self.fill:
            raise ValueError(f"budget {cache.budget} has no room for a chunk of {self.chunk_size} beside the "
                             f"window {cache.window_size}; make it at least {least}, or set fill")

    def __call__(self, cache: WindowCache, scores: Tensor, budget: int | Tensor) -> Tensor:
        scores = self.pooled(cache, scores)
        chunk = self.cut(cache, scores)
        score, length = chunk_scores(scores, chunk, self.score)
        if self.fill:
            return cut_to(score, chunk, budget)
        return fit(score, length, budget).gather(-1, chunk)

    def pooled(self, cache: WindowCache, scores: Tensor) -> Tensor:
        """(B, H, G, n) → (B, H, n): each key/value head chooses for itself."""
        return cache.pool(scores.mean(2))

    def cut(self, cache: WindowCache, scores: Tensor) -> Tensor:
        """Number of the chunk of every token, (B, H, n)."""
        pos = cache.pos[:, :, :scores.shape[-1]]
        place = (pos - cache.pos[:, :, -1:]).long() + cache.seen - 1  # in the text, from 0
        return grid(place.masked_fill(pos == NEVER, -1), self.chunk_size)


def grid(place: Tensor, size: int) -> Tensor:
    """Chunks of `size` tokens: place (..., n) in the text → number (..., n), from 1 on; 0 for an empty slot,
    whose place is negative.
    """
    return torch.where(place < 0, 0, place // size + 1)


def chunk_scores(scores: Tensor, chunk: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Score and length of every chunk, (..., chunks), from window scores ≥ 0 and chunks of tokens, (..., n)."""
    empty = scores.new_zeros(*scores.shape[:-1], int(chunk.max()) + 1)
    length = empty.long().scatter_add(-1, chunk, torch.ones_like(chunk))
    if how == "max":
        return empty.scatter_reduce(-1, chunk, scores, "amax"), length
    total = empty.scatter_add(-1, chunk, scores)
    return (total / length.clamp(min=1) if how == "mean" else total), length


def ranking(score: Tensor) -> Tensor:
    """Chunks (..., chunks), the highest score first; ties newest first."""
    return score.shape[-1] - 1 - score.flip(-1).argsort(dim=-1, descending=True, stable=True)


def cut_to(score: Tensor, chunk: Tensor, budget: int | Tensor) -> Tensor:
    """Mask (..., n): of all tokens, chunk after chunk down the ranking, the first `budget`."""
    rank = ranking(score).argsort(-1).gather(-1, chunk)  # of each token's chunk
    place = torch.arange(chunk.shape[-1], device=chunk.device).expand(chunk.shape)
    first = place < torch.as_tensor(budget, device=chunk.device)[..., None]
    return torch.zeros_like(first).scatter(-1, rank.argsort(dim=-1, stable=True), first)


def fit(score: Tensor, length: Tensor, budget: int | Tensor) -> Tensor:
    """Mask (..., chunks): down the ranking, each chunk that still fits whole."""
    order = ranking(score)
    length = length.gather(-1, order)
    room = torch.as_tensor(budget, device=score.device).expand(score.shape[:-1])[..., None]
    taken = torch.zeros_like(length, dtype=torch.bool)

    while True:  # one round takes all up to the first that does not fit: a few rounds, not one per chunk
        fits = ~taken & (length <= room)
        more = fits & ((fits * length).cumsum(-1) <= room)
        if not more.any():
            return torch.zeros_like(taken).scatter(-1, order, taken)
        taken, room = taken | more, room - (more * length).sum(-1, keepdim=True)


@dataclass(eq=False)
class ChunkKV(SnapKV):
    """Chunks, and the window. Of `reuse` layers the lowest selects, the others take its indices."""
    kernel_size: int = 1         # window scores are not pooled: the chunk keeps neighbours together
    select: Selection = Chunks()
    reuse: int = 1               # layers of a group; the paper uses 2

    def __post_init__(self):
        super().__post_init__()
        whole("reuse", self.reuse, 1)
        if self.reuse > 1 and not isinstance(self.select, Chunks):
            raise ValueError(f"reuse {self.reuse} needs Chunks; use 1 with {type(self.select).__name__}")

    @property
    def follows(self) -> bool:
        return self.layer % self.reuse > 0

    def link(self, model, layer: int, previous):
        super().link(model, layer, previous)
        self.previous = previous

    def remember(self, q: Tensor):
        if not self.follows:  # else no queries are needed
            super().remember(q)

    def chosen(self) -> Tensor:
        if not self.follows:
            return super().chosen()
        if not self.previous.prompt_done:
            raise ValueError(f"layer {self.layer} takes the indices of layer {self.layer - 1}, whose prompt "
                             "is not over; call end_prefill(caches), lowest layer first")
        at = self.previous.pos.to(self.pos.device)  # slot i still holds the prompt's token i
        return torch.where(at == NEVER, -1, at - self.pos[:, :, :1]).long()


@dataclass(frozen=True)
class ChunksCode(Chunks):
    """As in NVIDIA/kvpress, by the paper's author, with kernel_size=5: the heads of a layer choose together.
    But there the pool is an average, and the count of kept tokens drifts from the budget."""
    chunk_size: int = 20
    score: str = "mean"
    fill: bool = False

    def pooled(self, cache: WindowCache, scores: Tensor) -> Tensor:
        return super().pooled(cache, scores).mean(1, keepdim=True).expand(-1, scores.shape[1], -1)


variants = {"chunk_kv": ChunkKV, "chunk_kv_reuse": partial(ChunkKV, reuse=2)}
additions = {"chunk": dict(select=Chunks(), kernel_size=1)}
