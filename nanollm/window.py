"""The observation window: at the prompt's end its last queries tell which entries stay.

`WindowCache` is what SnapKV, PyramidKV, AdaKV, CriticalKV and ChunkKV share (Algorithm 2 of CriticalKV, arXiv
2502.03805). methods/snap_kv.py says what stays. What builds on it has another number of entries (`budgets`),
or another choice (`select`, a `Selection`):

    make_cache(model, methods.ada_kv.AdaKV, budget=64, select=methods.critical_kv.Critical(alpha=0.25))
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
    """Which entries stay."""
    again = True  # may be applied again to its own output (methods/compress_again.py)

    def __post_init__(self):
        check_options(self)

    def check(self, cache: "WindowCache"):
        """ValueError if this selection cannot work with the cache's options, when the cache is made."""

    def __call__(self, cache: "WindowCache", scores: Tensor, budget: int | Tensor) -> Tensor:
        """Mask (B, H, S − w) of `budget` entries per head, a number or (B, H), by window scores
        (B, H, G, S − w).
        """
        raise NotImplementedError(f"{type(self).__name__} needs __call__(self, cache, scores, budget)")


@dataclass(eq=False)
class WindowCache(PackedCache):
    """Remembers the prompt's last queries, and compresses once, at its end. Decoding then appends."""
    budget: int            # slots per key/value head, window included
    window_size: int = 32  # queries of the observation window, w
    kernel_size: int = 7   # width of the max-pool over neighbouring tokens; 1 switches it off

    def __post_init__(self):
        super().__post_init__()
        w, kernel = self.window_size, self.kernel_size
        if w < 1 or kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"window {w} must be at least 1 and kernel {kernel} an odd number")
        if self.budget <= w:
            raise ValueError(f"budget {self.budget} must exceed the window {w}")
        self.queries = None  # (B, H, G, ≤ w, D): the last ones

    def observe(self, q: Tensor, p: Tensor | None):
        if not self.prompt_done:
            self.remember(q)
        super().observe(q, p)

    def remember(self, q: Tensor):
        """Keep the last w queries of those before and q (B, H·G, T, D)."""
        new = q.unflatten(1, (self.k.shape[1], -1))
        last = new if self.queries is None else torch.cat((self.queries, new), 3)
        self.queries = last[:, :, :, -self.window_size:].clone()  # not a view that would hold all of them

    def end_prefill(self):
        if self.prompt_done:
            raise ValueError("end_prefill was already called for this cache; call it once per prompt")
        if self.length > self.budget:
            self.compress()
        self.queries = None
        super().end_prefill()

    def compress(self):
        self.keep(self.chosen())
        if self.packs:
            self.pack()

    def chosen(self) -> Tensor:
        """Slots that stay, (B, H, n), −1 for none."""
        raise NotImplementedError(f"{type(self).__name__} needs a method chosen(self) -> (B, H, n)")

    def empty(self) -> Tensor | None:
        """Mask (B, H, S) of the slots without an entry; None if there are none."""
        return self.pos == NEVER if self.ragged else None

    def pool(self, score: Tensor) -> Tensor:
        """The best of `kernel_size` neighbours, (..., S) → (..., S): a token is read with those around it."""
        score = max_pool(score, self.kernel_size)
        if self.ragged:  # an empty slot lies below any score
            empty = self.empty()[:, :, :score.shape[-1]]
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


def window_scores(q: Tensor, k: Tensor, empty: Tensor | None = None) -> Tensor:
    """Their mean over the window, of the keys before it, (B, H, G, S − w), in 32 bits at least."""
    if empty is None and q.shape[3] <= 128 and (fast := kernel_for(k, "window_scores")):
        return fast(q, k)
    rows, wide = window_rows(q, k, empty), torch.promote_types(q.dtype, torch.float32)
    return rows[..., :-q.shape[3]].mean(3, dtype=wide)
