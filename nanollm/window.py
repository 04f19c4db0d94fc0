"""The observation window: the prompt's last queries vote on what stays.

`WindowCache` is the workflow that SnapKV, PyramidKV, AdaKV, CriticalKV and ChunkKV share. They differ in how
many entries a head keeps (`budgets`, which a subclass overrides) and in which (`select`, a `Selection`):

    make_cache(model, methods.ada_kv.AdaKV, budget=64, select=methods.critical_kv.Critical(alpha=0.25))
"""
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.cache import NEVER, LayerCache, probabilities
from nanollm.check import check_knobs, whole
from nanollm.kernel_switch import kernel_for
from nanollm.packed import PackedCache
from nanollm.ranking import indices, top


@dataclass(frozen=True)
class Selection:
    """Which entries stay: here those with the highest pooled vote (SnapKV, arXiv 2404.14469)."""
    again = True  # can choose among the entries that it left itself, as `every` asks

    def __post_init__(self):
        check_knobs(self)

    def check(self, cache: "WindowCache"):
        """ValueError if this selection cannot work with the cache's knobs. Called when the cache is made."""

    def __call__(self, cache: "WindowCache", votes: Tensor, budget: int | Tensor) -> Tensor:
        """Mask (B, H, S − w) of `budget` entries per head, a number or (B, H), by votes (B, H, G, S − w)."""
        return top(cache.pool(votes.mean(2)), budget)


@dataclass(eq=False)
class WindowCache(PackedCache):
    """Algorithm 2 of CriticalKV (arXiv 2502.03805); as it stands, SnapKV.

    The last `window_size` queries of the prompt vote on every earlier token. At the prompt's end `budgets`
    says how many entries each head keeps and `select` which. Decoding then appends. With `every` it
    compresses again after so many new tokens, whose last queries vote: never more than budget + every slots.
    """
    budget: int            # slots per key/value head, window included
    window_size: int = 32  # queries that vote, w
    kernel_size: int = 7   # width of the max-pool over neighbouring tokens; 1 switches it off
    select: Selection = Selection()
    every: int = 0         # new tokens after which it compresses again; 0: never

    def __post_init__(self):
        super().__post_init__()
        w, kernel = self.window_size, self.kernel_size
        if w < 1 or kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"window {w} must be at least 1 and kernel {kernel} an odd number")
        if self.budget <= w:
            raise ValueError(f"budget {self.budget} must exceed the window {w}")
        if whole("every", self.every, 0) and not self.select.again:
            raise ValueError(f"every {self.every} needs a selection that can choose again; "
                             f"make it 0 with {type(self.select).__name__}")
        self.select.check(self)
        self.full = self.budget + self.every  # slots at which it compresses again
        self.queries = None  # (B, H, G, ≤ w, D): the last ones, without `every` the prompt's

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """With `every`, what comes after the prompt is attended to in pieces as long as the room there is."""
        if not (self.every and self.prompt_done):
            return super().attend(q, k, v, pos)
        self.check(q, k, v, pos)
        ends = [*range(self.full - self.length, q.shape[2], self.every)]
        parts = zip(*(x.tensor_split(ends, 2) for x in (q, k, v)), pos.tensor_split(ends, 1))
        return torch.cat([LayerCache.attend(self, *part) for part in parts], 2)

    def observe(self, q: Tensor, p: Tensor | None):
        if self.every or not self.prompt_done:
            new = q.unflatten(1, (self.k.shape[1], -1))
            last = new if self.queries is None else torch.cat((self.queries, new), 3)
            self.queries = last[:, :, :, -self.window_size:].clone()  # not a view that would hold all of them
        super().observe(q, p)
        if self.every and self.prompt_done and self.length == self.full:
            self.compress()

    def end_prefill(self):
        if self.length > self.budget:
            self.compress()
        if not self.every:
            self.queries = None
        super().end_prefill()

    def compress(self):
        if self.ragged and self.every:  # heads end together: the last slots are the newest tokens of all
            self.keep((self.pos != NEVER).to(torch.uint8).argsort(dim=-1, stable=True))
        self.keep(self.chosen())
        if self.packs:
            self.pack()
        self.full = self.length + self.every

    def chosen(self) -> Tensor:
        """Slots that stay, (B, H, n), −1 for none."""
        if self.queries is None:
            raise ValueError("the prompt is over and the window's queries are gone; call end_prefill once")
        votes = window_votes(self.queries, self.k, self.pos == NEVER if self.ragged else None)
        kept = self.select(self, votes, self.budgets(votes))
        return indices(F.pad(kept, (0, self.window_size), value=True))

    def budgets(self, votes: Tensor) -> int | Tensor:
        """Entries that each head keeps beside the window, by votes (B, H, G, S − w): a number or (B, H)."""
        return self.budget - self.window_size

    def pool(self, score: Tensor) -> Tensor:
        """The best of `kernel_size` neighbours, (..., S) → (..., S): a token is read with those around it."""
        score = max_pool(score, self.kernel_size)
        if self.ragged:  # an empty slot lies below any vote
            empty = (self.pos == NEVER)[:, :, :score.shape[-1]]
            score = score.masked_fill(empty if score.dim() == 3 else empty.unsqueeze(2), -1)
        return score

    def beside(self) -> list[Tensor]:
        return super().beside() + ([] if self.queries is None else [self.queries])


def max_pool(score: Tensor, width: int) -> Tensor:
    """Max over `width` neighbours, an odd number, (..., S) → (..., S)."""
    return F.max_pool1d(score.flatten(0, -2), width, stride=1, padding=width // 2).view_as(score)


def window_rows(q: Tensor, k: Tensor, empty: Tensor | None = None) -> Tensor:
    """Probabilities (B, H, G, w, S) of the last queries (B, H, G, w, D) over keys (B, H, S, D), none `empty`.
    """
    token = torch.arange(k.shape[2], device=k.device)
    at = token.expand(k.shape[:3]) if empty is None else token.masked_fill(empty, NEVER)
    return probabilities(q.flatten(1, 2), k, at, None, token[None, -q.shape[3]:])


def window_votes(q: Tensor, k: Tensor, empty: Tensor | None = None) -> Tensor:
    """Their mean over the window, of the keys before it, (B, H, G, S − w), in 32 bits at least."""
    if empty is None and q.shape[3] <= 128 and (fast := kernel_for(k, "window_votes")):
        return fast(q, k)
    rows, wide = window_rows(q, k, empty), torch.promote_types(q.dtype, torch.float32)
    return rows[..., :-q.shape[3]].mean(3, dtype=wide)
