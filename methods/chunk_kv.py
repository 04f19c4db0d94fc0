"""ChunkKV: keep whole chunks of tokens (Liu et al., arXiv 2502.00299).

A token means little without its neighbours. So the prompt is cut into chunks of c consecutive
tokens. The score of a chunk is the attention that the prompt's last w queries give to its tokens.
The chunks with the highest scores stay, and the window. A layer's choice may also serve the layers
above it, which then need no scores.

    a_i = 1/w Σ_{t≥S−w} α_{t,i},   score_m = Σ_{i ∈ chunk m} a_i
    keep the first b − w tokens of Top(score), and {S−w … S−1}

As in Algorithm 1, the chosen chunks are cut to b − w tokens, so the whole budget is used.
`Chunks(fill=False)` keeps only whole chunks, because the paper argues against half a chunk.

Differs from the paper:
- The paper does not say in which order the chosen chunks are cut. Here the chunk with the lowest
  score is cut and keeps its first tokens.
- The query heads of a group share an entry, so its score is their mean.

A fact may lie across the border of two chunks. Then its chunks share the attention that it gets,
and it may be lost. `ChunkKV(kernel_size=7, select=Chunks(score="max"))` mends that on *built* for
values of two tokens (claim C1). Ours: chunks that end with a line or sentence, in
methods/ours/chunk_kv_semantic.py.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from methods.baselines.snap_kv import SnapKV
from nanollm.cache import NEVER
from nanollm.check import whole
from nanollm.window import Selection, WindowCache


@dataclass(frozen=True)
class Chunks(Selection):
    """Select chunks by their scores, the highest first, until the budget is full."""

    chunk_size: int = 10  # tokens per chunk, c
    # score of a chunk: "sum", "mean" or "max" of its tokens' window scores
    score: str = "sum"
    # True: cut the last chunk to the room left; False: keep only chunks that fit whole
    fill: bool = True

    def __post_init__(self):
        super().__post_init__()
        whole("chunk", self.chunk_size, 1)
        if self.score not in ("sum", "mean", "max"):
            raise ValueError(
                f"score is {self.score!r}; it must be 'sum', 'mean' or 'max'"
            )

    def check(self, cache: WindowCache):
        least = self.chunk_size + cache.window_size
        if cache.budget < least and not self.fill:
            raise ValueError(
                f"budget {cache.budget} has no room for a chunk of {self.chunk_size} tokens and "
                f"the window of {cache.window_size}; raise it to {least}, or set fill=True"
            )

    def __call__(
        self, cache: WindowCache, scores: Tensor, budget: int | Tensor
    ) -> Tensor:
        scores = self.pooled(cache, scores)
        chunk = self.cut(cache, scores)
        score, length = chunk_scores(scores, chunk, self.score)
        if self.fill:
            return cut_to(score, chunk, budget)
        return fit(score, length, budget).gather(-1, chunk)

    def pooled(self, cache: WindowCache, scores: Tensor) -> Tensor:
        """Return one score per token and key/value head: (B, H, G, n) → (B, H, n)."""
        return cache.pool(scores.mean(2))

    def cut(self, cache: WindowCache, scores: Tensor) -> Tensor:
        """Return the chunk number of every token, (B, H, n)."""
        pos = cache.pos[:, :, : scores.shape[-1]]
        # index in the text, from 0
        place = (pos - cache.pos[:, :, -1:]).long() + cache.seen - 1
        return grid(place.masked_fill(pos == NEVER, -1), self.chunk_size)


def grid(place: Tensor, size: int) -> Tensor:
    """Return chunk numbers (..., n), from 1 on, of tokens at `place` (..., n) in the text.

    Every chunk has `size` tokens. An empty slot has a negative place and gets number 0.
    """
    return torch.where(place < 0, 0, place // size + 1)


def chunk_scores(scores: Tensor, chunk: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Return score and length of every chunk, both (..., chunks).

    scores (..., n): window scores, at least 0. chunk (..., n): each token's chunk number. how:
    "sum", "mean" or "max".
    """
    empty = scores.new_zeros(*scores.shape[:-1], int(chunk.max()) + 1)
    length = empty.long().scatter_add(-1, chunk, torch.ones_like(chunk))
    if how == "max":
        return empty.scatter_reduce(-1, chunk, scores, "amax"), length
    total = empty.scatter_add(-1, chunk, scores)
    return (total / length.clamp(min=1) if how == "mean" else total), length


def ranking(score: Tensor) -> Tensor:
    """Return chunk numbers (..., chunks), the highest score first; ties: the newest chunk first."""
    return (
        score.shape[-1]
        - 1
        - score.flip(-1).argsort(dim=-1, descending=True, stable=True)
    )


def cut_to(score: Tensor, chunk: Tensor, budget: int | Tensor) -> Tensor:
    """Return the mask (..., n) of the first `budget` tokens when chunks are taken by their scores."""
    rank = ranking(score).argsort(-1).gather(-1, chunk)  # rank of each token's chunk
    place = torch.arange(chunk.shape[-1], device=chunk.device).expand(chunk.shape)
    first = place < torch.as_tensor(budget, device=chunk.device)[..., None]
    return torch.zeros_like(first).scatter(-1, rank.argsort(dim=-1, stable=True), first)


def fit(score: Tensor, length: Tensor, budget: int | Tensor) -> Tensor:
    """Return the mask (..., chunks) of the chunks that fit whole, tried by their scores."""
    order = ranking(score)
    length = length.gather(-1, order)
    room = torch.as_tensor(budget, device=score.device).expand(score.shape[:-1])[
        ..., None
    ]
    taken = torch.zeros_like(length, dtype=torch.bool)

    # Each round takes all chunks up to the first that does not fit. Example: lengths 3 4 2 1, room
    # 6. Round 1 takes 3 (4 does not fit beside it); round 2 takes 2 and 1. So two rounds serve four
    # chunks.
    while True:
        fits = ~taken & (length <= room)
        more = fits & ((fits * length).cumsum(-1) <= room)
        if not more.any():
            return torch.zeros_like(taken).scatter(-1, order, taken)
        taken, room = taken | more, room - (more * length).sum(-1, keepdim=True)


@dataclass(eq=False)
class ChunkKV(SnapKV):
    """Keep chunks and the window. In each group of `reuse` layers the lowest selects for all."""

    kernel_size: int = 1  # no pooling: chunks already keep neighbours together
    select: Selection = Chunks()  # chooses the entries beside the window
    reuse: int = 1  # layers that share one choice; the paper uses 2

    def __post_init__(self):
        super().__post_init__()
        whole("reuse", self.reuse, 1)
        if self.reuse > 1 and not isinstance(self.select, Chunks):
            raise ValueError(
                f"reuse is {self.reuse}, but only Chunks can be reused; "
                f"set reuse=1 with {type(self.select).__name__}"
            )

    @classmethod
    def compress(cls, model, tokens: Tensor, caches: list["ChunkKV"]):
        """Let the lowest layer of each group choose; the layers above it keep the same slots."""
        reuse = caches[0].reuse
        for lowest, *others in (
            caches[i : i + reuse] for i in range(0, len(caches), reuse)
        ):
            if lowest.seen > lowest.budget:
                chosen = lowest.chosen()
                for cache in (lowest, *others):
                    cache.keep_chosen(chosen.to(cache.pos.device))

    def observe(self, q: Tensor, p: Tensor | None):
        super().observe(q, p)
        if self.layer % self.reuse:  # only the lowest layer of a group computes scores
            self.queries = None


@dataclass(frozen=True)
class ChunksCode(Chunks):
    """The choice of NVIDIA/kvpress, written by the paper's author; use it with kernel_size=5.

    The heads of a layer keep the same chunks. There the pool is an average, and the number of kept
    tokens drifts from the budget; here neither is so.
    """

    chunk_size: int = 20
    score: str = "mean"
    fill: bool = False

    def pooled(self, cache: WindowCache, scores: Tensor) -> Tensor:
        return (
            super()
            .pooled(cache, scores)
            .mean(1, keepdim=True)
            .expand(-1, scores.shape[1], -1)
        )


variants = {"chunk_kv": ChunkKV, "chunk_kv_reuse": partial(ChunkKV, reuse=2)}
additions = {"chunk": dict(select=Chunks(), kernel_size=1)}
