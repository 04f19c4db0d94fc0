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
- There two neighbouring layers share one choice (the variant `chunk_kv_reuse`, reuse=2). Here the
  default is that each layer chooses (reuse=1).

A fact may lie across the border of two chunks. Then its chunks share the attention that it gets,
and it may be lost. `ChunkKV(kernel_size=7, select=Chunks(score="max"))` mends that on *built* for
values of two tokens, with a quarter of the entries (claim C1). Ours: chunks that end with a line,
sentence or clause, in methods/ours/chunk_kv_semantic.py.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from methods.baselines.snap_kv import SnapKV
from nanollm.cache import NEVER, Slots
from nanollm.check import whole
from nanollm.window import Selection, Window, WindowMethod


@dataclass(frozen=True)
class Chunks(Selection):
    """Select chunks by their scores, the highest first, while there is room."""

    chunk_size: int = 10  # tokens per chunk, c
    # of a chunk: "sum", "mean" or "max" of its tokens' window scores
    score: str = "sum"
    # cut the last chunk to the room left; False: keep only whole chunks
    fill: bool = True

    def __post_init__(self):
        whole("chunk_size", self.chunk_size, 1)
        if self.score not in ("sum", "mean", "max"):
            raise ValueError(
                f"score is {self.score!r}; it must be 'sum', 'mean' or 'max'"
            )

    def check(self, method: WindowMethod):
        least = self.chunk_size + method.window_size
        if method.budget < least and not self.fill:
            raise ValueError(
                f"budget {method.budget} has no room for a chunk of {self.chunk_size} tokens and "
                f"the window of {method.window_size}; raise it to {least}, or set fill=True"
            )

    def __call__(
        self,
        window: Window,
        scores: Tensor,
        budget: int | Tensor,
    ) -> Tensor:
        scores = self.pooled(window, scores)
        chunk = self.cut(window, scores)
        score, length = chunk_scores(scores, chunk, self.score)
        if self.fill:
            return cut_to(score, chunk, budget)
        return fit(score, length, budget).gather(-1, chunk)

    def pooled(self, window: Window, scores: Tensor) -> Tensor:
        """Return one score per token and key/value head: (B, H, G, n) → (B, H, n)."""
        return window.pool(scores.mean(2))

    def cut(self, window: Window, scores: Tensor) -> Tensor:
        """Return the chunk number of every token, (B, H, n)."""
        return grid(places(window), self.chunk_size)


def places(window: Window) -> Tensor:
    """Return the index in the text, from 0, of each slot before the window, (B, H, n).

    An empty slot has −1. The last slot holds the newest of the `seen` tokens.
    """
    layer = window.layer
    pos = layer.pos[:, :, : window.n].long()
    back = layer.pos[:, :, -1:] - pos  # tokens between a slot and the newest
    return (layer.seen - 1 - back).masked_fill(pos == NEVER, -1)


def grid(place: Tensor, size: int) -> Tensor:
    """Return chunk numbers (..., n), from 1 on, of tokens at `place` (..., n) in the text.

    A chunk covers `size` places. An empty slot has a negative place and gets number 0.
    """
    return torch.where(place < 0, 0, place // size + 1)


def chunk_scores(
    scores: Tensor,
    chunk: Tensor,
    how: str,
) -> tuple[Tensor, Tensor]:
    """Return score and length of every chunk, both (..., chunks).

    scores (..., n): window scores, at least 0, and below 0 for empty slots. chunk (..., n): each
    token's chunk number. how: "sum", "mean" or "max".
    """
    empty = scores.new_zeros(*scores.shape[:-1], int(chunk.max()) + 1)
    length = empty.long().scatter_add(-1, chunk, torch.ones_like(chunk))
    if how == "max":
        # chunk 0 holds empty slots alone, whose scores are below 0
        score = empty.scatter_reduce(-1, chunk, scores, "amax", include_self=False)
        return score, length
    total = empty.scatter_add(-1, chunk, scores)
    if how == "mean":
        total = total / length.clamp(min=1)
    return total, length


def ranking(score: Tensor) -> Tensor:
    """Return chunk numbers (..., chunks), the highest score first; ties: the newest chunk first."""
    # A stable sort of the flipped scores puts the newest of equal chunks first. Example: scores
    # 5 7 5 7, flipped 7 5 7 5, sorted 0 2 1 3; these are the chunks 3 1 2 0.
    newest_first = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return score.shape[-1] - 1 - newest_first


def cut_to(
    score: Tensor,
    chunk: Tensor,
    budget: int | Tensor,
) -> Tensor:
    """Return the mask (..., n) of the first `budget` tokens, chunks taken by their scores."""
    # Example: tokens of the chunks 1 1 2 2, chunk 2 scores higher, budget 3. Their ranks are
    # 1 1 0 0; sorted by rank, the tokens are 2 3 0 1. The first three stay: mask 1 0 1 1.
    rank = ranking(score).argsort(-1).gather(-1, chunk)  # rank of each token's chunk
    by_rank = rank.argsort(dim=-1, stable=True)
    place = torch.arange(chunk.shape[-1], device=chunk.device).expand(chunk.shape)
    first = place < torch.as_tensor(budget, device=chunk.device)[..., None]
    return torch.zeros_like(first).scatter(-1, by_rank, first)


def fit(
    score: Tensor,
    length: Tensor,
    budget: int | Tensor,
) -> Tensor:
    """Return the mask (..., chunks) of the chunks that fit whole, tried by their scores."""
    order = ranking(score)
    length = length.gather(-1, order)
    room = torch.as_tensor(budget, device=score.device)
    room = room.expand(score.shape[:-1]).unsqueeze(-1)
    taken = torch.zeros_like(length, dtype=torch.bool)

    # Each round takes all chunks up to the first that does not fit. Example: lengths 3 4 2 1, room
    # 6. Round 1 takes 3 (4 does not fit beside it); round 2 takes 2 and 1. So two rounds serve four
    # chunks.
    while True:
        fits = ~taken & (length <= room)
        more = fits & ((fits * length).cumsum(-1) <= room)
        if not more.any():
            return torch.zeros_like(taken).scatter(-1, order, taken)
        taken = taken | more
        room = room - (more * length).sum(-1, keepdim=True)


@dataclass
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

    def observe(
        self,
        layer: Slots,
        q: Tensor,
        p: Tensor | None,
    ):
        # only the lowest layer of a group needs its queries
        if layer.index % self.reuse == 0:
            super().observe(layer, q, p)

    def compress(
        self,
        model,
        tokens: Tensor,
        layers: list[Slots],
    ):
        for i in range(0, len(layers), self.reuse):
            lowest, *others = layers[i : i + self.reuse]
            if lowest.seen > self.budget:
                window = self.window(lowest, tokens)
                scores = window.scores()
                kept = self.select(window, scores, self.budgets(window, scores))
                kept = window.with_window(kept)
                for layer in (lowest, *others):
                    layer.keep_chosen(kept.to(layer.pos.device))


variants = {"chunk_kv": ChunkKV, "chunk_kv_reuse": partial(ChunkKV, reuse=2)}
additions = {"chunk": dict(select=Chunks(), kernel_size=1)}
