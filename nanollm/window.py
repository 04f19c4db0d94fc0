"""The observation window: the prompt's last queries decide which entries stay.

SnapKV, PyramidKV, AdaKV, CriticalKV and ChunkKV share `WindowMethod` and `Window` (Algorithm 2 of
CriticalKV, arXiv 2502.03805). methods/baselines/snap_kv.py chooses the entries. The other methods
build on it and change the number of entries (`budgets`), the choice (`select`, a `Selection`) or
which layers choose (ChunkKV's `reuse`):

    make_cache(model, AdaKV, budget=64, select=Critical(alpha=0.25))
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.attention import probabilities, visible
from nanollm.kernel_switch import kernel_for
from nanollm.method import NEVER, Method
from nanollm.slots import Slots


@dataclass
class WindowMethod(Method):
    """Remembers the prompt's last queries for `compress`, which subclasses define."""

    # entries that a key/value head may keep, window included; a mean in PyramidKV and AdaKV
    budget: int
    window_size: int = 32  # queries of the observation window, w
    # width of the max-pool over neighbouring tokens; 1 turns it off
    kernel_size: int = 7

    def __post_init__(self):
        w = self.window_size
        kernel = self.kernel_size
        if w < 1 or kernel < 1 or kernel % 2 == 0:
            raise ValueError(
                f"window_size {w} must be at least 1, and kernel_size {kernel} an odd number"
            )
        if self.budget <= w:
            raise ValueError(f"budget {self.budget} must exceed the window {w}")

    def observe(self, layer: Slots, q: Tensor, p: Tensor | None):
        if layer.prompt_done:
            return
        H = layer.k.shape[1]
        last = q.unflatten(1, (H, -1))  # (B, H, G, T, D)
        if "window" in layer.notes:
            last = torch.cat((layer.notes["window"], last), 3)
        last = last[:, :, :, -self.window_size :]
        layer.notes["window"] = last.clone()  # a view would keep all in memory

    def window(self, layer: Slots, tokens: Tensor) -> "Window":
        """Return the observation window of a layer that has read tokens (B, T)."""
        if "window" not in layer.notes:
            raise ValueError(
                "no query was observed since the last compression; call begin_turn and read "
                "tokens before you compress again"
            )
        return Window(self, layer, tokens)


class Window:
    """What one layer's observation window sees, when the prompt has ended.

    Example: 10 tokens were read with a window of 4, and the last was forgotten. Then the layer has
    9 slots, of which 6 are before the window: n = 6, w = 3. But 4 queries saw 10 keys.
    """

    def __init__(self, method: WindowMethod, layer: Slots, tokens: Tensor):
        self.method = method
        self.layer = layer
        self.tokens = tokens  # (B, T)
        self.q = layer.notes["window"]  # (B, H, G, queries, D)
        self.k = layer.k  # (B, H, S, D), the keys that they saw
        self.empty = None  # (B, H, S): slots without an entry; None if there are none
        if layer.ragged:
            self.empty = layer.pos == NEVER
        if layer.forgotten is not None:
            self.k = torch.cat((self.k, layer.forgotten), 2)
            forgotten = layer.forgotten.shape[2]
            if layer.ragged:
                self.empty = F.pad(self.empty, (0, forgotten))
        self.n = self.k.shape[2] - self.q.shape[3]  # slots before the window
        self.w = layer.length - self.n  # the window's own slots, which stay
        if self.w < 0:
            raise ValueError(
                f"of the window's {self.q.shape[3]} tokens and {-self.w} before it none are left; "
                "read the text into new caches"
            )

    @property
    def room(self) -> int:
        """Return the budget less the window: entries before it a head may keep, or the mean."""
        return self.method.budget - self.w

    def scores(self) -> Tensor:
        """Return window scores (B, H, G, n), the mean of `window_rows` over the queries."""
        return window_scores(self.q, self.k, self.empty)

    def pool(self, score: Tensor) -> Tensor:
        """Max-pool scores (..., n) over neighbours, so that the text around facts stays."""
        score = max_pool(score, self.method.kernel_size)
        if self.empty is None:
            return score
        empty = self.empty[:, :, : score.shape[-1]]
        if score.dim() > 3:
            empty = empty.unsqueeze(2)
        return score.masked_fill(empty, -1)  # −1 is below every score

    def with_window(self, kept: Tensor) -> Tensor:
        """Add the window's own slots to a mask of those before it: (B, H, n) → (B, H, S)."""
        return F.pad(kept, (0, self.w), value=True)


@dataclass(frozen=True)
class Selection:
    """A rule that chooses which entries stay beside the window."""

    def check(self, method: WindowMethod):
        """Raise ValueError if the selection does not suit a method's options."""

    def __call__(self, window: Window, scores: Tensor, budget: int | Tensor) -> Tensor:
        """Return a mask (B, H, n) of the entries that stay, at most `budget` per head.

        budget is a number or (B, H); scores are the window scores (B, H, G, n).
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs __call__(self, window, scores, budget)"
        )


def max_pool(score: Tensor, width: int) -> Tensor:
    """Return the maximum over `width` neighbours, an odd number: (..., S) → (..., S)."""
    rows = score.flatten(0, -2)
    highest = F.max_pool1d(rows, width, stride=1, padding=width // 2)
    return highest.view_as(score)


def window_rows(q: Tensor, k: Tensor, empty: Tensor | None = None) -> Tensor:
    """Return the probabilities (B, H, G, w, S) that the window's queries give to all keys.

    q (B, H, G, w, D) are the last w queries over keys k (B, H, S, D). No query sees the slots where
    `empty` (B, H, S) is true.
    """
    w = q.shape[3]
    token = torch.arange(k.shape[2], device=k.device)
    slot_pos = token.view(1, 1, -1)
    if empty is not None:
        slot_pos = token.masked_fill(empty, NEVER)
    mask = visible(slot_pos, None, token[None, -w:])
    return probabilities(q.flatten(1, 2), k, mask)


def window_scores(q: Tensor, k: Tensor, empty: Tensor | None = None) -> Tensor:
    """Return window scores (B, H, G, S − w): the mean of `window_rows` over the queries.

    Only the keys before the window get a score. The scores have at least 32 bits.
    """
    if empty is None and q.shape[3] <= 128:
        fast = kernel_for(k, "window_scores")
        if fast:
            return fast(q, k)
    w = q.shape[3]
    return window_rows(q, k, empty)[..., :-w].mean(3)
