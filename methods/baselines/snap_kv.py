"""SnapKV: the end of the prompt shows which entries the answer needs (arXiv 2404.14469).

The prompt's last w queries are the observation window. An entry's window score is the mean
attention that they give it. Scores are max-pooled over neighbouring tokens, so the neighbours of a
high score get it, too. Each head keeps the entries with the highest scores, and the window itself.

    c = maxpool( 1/w Σ_{t ≥ S−w} α_t ),   keep Top_{b−w}(c) ∪ {S−w … S−1}

Differs from the paper:
- The window has 32 queries and the max-pool width 7, as in CriticalKV's experiments (arXiv
  2502.03805). SnapKV's code has an average pool of 5 and a window of 32 (64 by its
  class default).
- The query heads of a group share an entry, so its score is their mean.
"""

from dataclasses import dataclass

from torch import Tensor

from nanollm.cache import Slots
from nanollm.ranking import top
from nanollm.window import Selection, Window, WindowMethod


@dataclass(frozen=True)
class HighestScores(Selection):
    """Select the entries with the highest pooled window scores."""

    def __call__(self, window: Window, scores: Tensor, budget: int | Tensor) -> Tensor:
        # c, with the mean over the group's query heads
        pooled = window.pool(scores.mean(2))
        return top(pooled, budget)  # Top_{b−w}(c)


@dataclass
class SnapKV(WindowMethod):
    """Keep the window, and the entries that `select` chooses, by default those of highest score.

    WindowMethod remembers the window's queries. Later tokens are appended. PyramidKV and AdaKV
    override `budgets`; CriticalKV and ChunkKV set another `select`.
    """

    # chooses the entries kept in addition to the window
    select: Selection = HighestScores()

    def __post_init__(self):
        super().__post_init__()
        self.select.check(self)

    def compress(self, model, tokens: Tensor, layers: list[Slots]):
        for layer in layers:
            if layer.seen > self.budget:
                window = self.window(layer, tokens)
                scores = window.scores()  # 1/w Σ_t α_t, before the window
                kept = self.select(window, scores, self.budgets(window, scores))
                layer.keep_chosen(window.with_window(kept))

    def budgets(self, window: Window, scores: Tensor) -> int | Tensor:
        """Return how many entries each head keeps beside the window: a number, or (B, H)."""
        return window.room


variants = {"snap_kv": SnapKV}
