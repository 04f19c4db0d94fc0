"""The observation window: the prompt's last queries decide which entries stay.

SnapKV, PyramidKV, AdaKV, CriticalKV and ChunkKV share `WindowCache` (Algorithm 2 of CriticalKV,
arXiv 2502.03805). methods/baselines/snap_kv.py chooses the entries. The other methods build on it
and change the number of entries (`budgets`) or the choice (`select`, a `Selection`):

    make_cache(model, AdaKV, budget=64, select=Critical(alpha=0.25))
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.attention import probabilities
from nanollm.cache import NEVER
from nanollm.check import check_options
from nanollm.kernel_switch import kernel_for
from nanollm.packed import PackedCache


@dataclass(frozen=True)
class Selection:
    """A rule that chooses which entries stay."""

    again = True  # whether it can be applied to its own output, after a second turn

    def __post_init__(self):
        check_options(self)

    def check(self, cache: "WindowCache"):
        """Raise ValueError, when the cache is made, if the selection does not suit the cache's options."""

    def __call__(
        self, cache: "WindowCache", scores: Tensor, budget: int | Tensor
    ) -> Tensor:
        """Return a mask (B, H, S − w) of the entries that stay, `budget` per head.

        budget is a number or (B, H); scores are the window scores (B, H, G, S − w).
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs __call__(self, cache, scores, budget)"
        )


@dataclass(eq=False)
class WindowCache(PackedCache):
    """Stores the prompt's last queries, and evicts only when the prompt is compressed."""

    budget: int  # entries that each key/value head may keep, window included
    window_size: int = 32  # queries of the observation window, w
    # width of the max-pool over neighbouring tokens; 1 turns it off
    kernel_size: int = 7
    appends = True

    def __post_init__(self):
        super().__post_init__()
        w, kernel = self.window_size, self.kernel_size
        if w < 1 or kernel < 1 or kernel % 2 == 0:
            raise ValueError(
                f"window_size {w} must be at least 1, and kernel_size {kernel} an odd number"
            )
        if self.budget <= w:
            raise ValueError(f"budget {self.budget} must exceed the window {w}")
        self.queries = None  # the prompt's last queries so far, (B, H, G, ≤ w, D)
        # keys of the window's tokens that `crop` removed, (B, H, c, D), or None
        self.forgotten = None

    def observe(self, q: Tensor, p: Tensor | None):
        if not self.prompt_done:
            new = q.unflatten(1, (self.k.shape[1], -1))
            last = new if self.queries is None else torch.cat((self.queries, new), 3)
            # a view would keep all in memory
            self.queries = last[:, :, :, -self.window_size :].clone()
        super().observe(q, p)

    def crop(self, n: int):
        # the forgotten tokens' queries still count, and they saw these keys
        if self.queries is not None:
            gone = self.k[:, :, self.length - (self.seen - n) :].clone()
            self.forgotten = (
                gone if self.forgotten is None else torch.cat((gone, self.forgotten), 2)
            )
        super().crop(n)

    @property
    def before(self) -> int:
        """Return the number of slots before the window.

        Example: 10 tokens were read with a window of 4, and the last was cropped. Then 9 slots are
        left, and 6 of them are before the window.
        """
        return self.length + self.cropped - self.queries.shape[3]

    @property
    def cropped(self) -> int:
        """Return how many of the window's tokens `crop` removed."""
        return 0 if self.forgotten is None else self.forgotten.shape[2]

    @property
    def room(self) -> int:
        """Return how many entries before the window a head may keep."""
        return self.budget - (self.length - self.before)

    @classmethod
    def compress(cls, model, tokens: Tensor, caches: list["WindowCache"]):
        for cache in caches:
            if cache.seen > cache.budget:
                cache.keep_chosen(cache.chosen())

    def forget_prompt(self):
        self.queries = self.forgotten = None

    def chosen(self) -> Tensor:
        """Return a mask (B, H, S) of the slots that stay."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a method chosen(self) -> (B, H, S)"
        )

    def empty(self) -> Tensor | None:
        """Return a mask (B, H, S) of the slots without an entry; None if there are none."""
        return self.pos == NEVER if self.ragged else None

    def observed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what `window_rows` takes: queries, the keys that they saw, and which of these are
        empty."""
        if self.forgotten is None:
            return self.queries, self.k, self.empty()
        empty = F.pad(self.empty(), (0, self.cropped)) if self.ragged else None
        return self.queries, torch.cat((self.k, self.forgotten), 2), empty

    def pool(self, score: Tensor) -> Tensor:
        """Max-pool scores (..., S) over `kernel_size` neighbours, so that text around a fact stays."""
        score = max_pool(score, self.kernel_size)
        if self.ragged:  # −1 is below every score
            empty = self.empty()[:, :, : score.shape[-1]]
            score = score.masked_fill(
                empty if score.dim() == 3 else empty.unsqueeze(2), -1
            )
        return score

    def beside(self) -> list[Tensor]:
        return super().beside() + [
            x for x in (self.queries, self.forgotten) if x is not None
        ]


def max_pool(score: Tensor, width: int) -> Tensor:
    """Return the maximum over `width` neighbours, an odd number: (..., S) → (..., S)."""
    return F.max_pool1d(
        score.flatten(0, -2), width, stride=1, padding=width // 2
    ).view_as(score)


def window_rows(q: Tensor, k: Tensor, empty: Tensor | None = None) -> Tensor:
    """Return the probabilities (B, H, G, w, S) that the window's queries give to all keys.

    q (B, H, G, w, D) are the last w queries over keys k (B, H, S, D). No query sees the slots where
    `empty` (B, H, S) is true.
    """
    token = torch.arange(k.shape[2], device=k.device)
    slot_pos = (
        token.view(1, 1, -1) if empty is None else token.masked_fill(empty, NEVER)
    )
    return probabilities(q.flatten(1, 2), k, slot_pos, None, token[None, -q.shape[3] :])


def window_scores(q: Tensor, k: Tensor, empty: Tensor | None = None) -> Tensor:
    """Return window scores (B, H, G, S − w): the mean of `window_rows` over the queries.

    Only the keys before the window get a score. The scores have at least 32 bits.
    """
    if empty is None and q.shape[3] <= 128 and (fast := kernel_for(k, "window_scores")):
        return fast(q, k)
    return window_rows(q, k, empty)[..., : -q.shape[3]].mean(3)
