"""SnapKV: the end of the prompt shows which entries the answer will need (Li et al., arXiv 2404.14469).

The prompt's last w queries are the observation window. An entry's window score is the mean
attention that they give it. Scores are max-pooled over neighbouring tokens, so the neighbours of a
high score survive too. Each head keeps the entries with the highest scores, and the window itself.

    c = maxpool( 1/w Σ_{t ≥ S−w} α_t ),   keep Top_{b−w}(c) ∪ {S−w … S−1}

Differs from the paper:
- The window has 32 queries and the max-pool width 7, as in CriticalKV's experiments (arXiv
  2502.03805, Algorithm 2). The authors' code has an average pool of 5 and a window of 32 (64 by its
  class default).
- The query heads of a group share an entry, so its score is their mean.
"""

from dataclasses import dataclass

from torch import Tensor
import torch.nn.functional as F

from nanollm.ranking import top
from nanollm.window import Selection, WindowCache, window_scores


@dataclass(frozen=True)
class HighestScores(Selection):
    """Select the entries with the highest pooled window scores."""

    def __call__(
        self, cache: WindowCache, scores: Tensor, budget: int | Tensor
    ) -> Tensor:
        # c, with the mean over the group's query heads
        pooled = cache.pool(scores.mean(2))
        return top(pooled, budget)  # Top_{b−w}(c)


@dataclass(eq=False)
class SnapKV(WindowCache):
    """Keep the window, and each head's highest pooled window scores.

    WindowCache stores the window's queries and calls `chosen` when the prompt ends. Later tokens
    are appended. PyramidKV and AdaKV override `budgets`; CriticalKV and ChunkKV set another
    `select`.
    """

    # chooses the entries kept in addition to the window
    select: Selection = HighestScores()

    def __post_init__(self):
        super().__post_init__()
        self.select.check(self)

    def chosen(self) -> Tensor:
        if self.length < self.seen and not self.select.again:
            raise ValueError(
                f"{type(self.select).__name__} cannot choose among the entries that an earlier "
                "turn left; compress once, or use another selection"
            )
        scores = window_scores(*self.observed())  # 1/w Σ_t α_t, before the window
        kept = self.select(self, scores, self.budgets(scores))
        # and the window itself
        return F.pad(kept, (0, self.length - self.before), value=True)

    def budgets(self, scores: Tensor) -> int | Tensor:
        """Return how many entries each head keeps in addition to the window: a number, or (B, H)."""
        return self.room


variants = {"snap_kv": SnapKV}
