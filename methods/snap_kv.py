"""SnapKV: the end of a prompt tells what its answer will attend to (Li et al., arXiv 2404.14469).

The prompt's last w queries, the observation window, score all earlier entries. Each head keeps the entries
with the highest scores, and the window itself. A score counts for its neighbours, too.

    c = maxpool( 1/w Σ_{t ≥ S−w} α_t ),   keep Top_{b−w}(c) ∪ {S−w … S−1}

Differs from the paper: window and pool are those of CriticalKV's experiments (arXiv 2502.03805, Algorithm 2).
The window counts inside the budget. The query heads of a group score together, since they share the entry.
The authors' code has an average pool of 5, and a window of 32 (64 in its class, if nothing sets it).
"""
from dataclasses import dataclass

from torch import Tensor
import torch.nn.functional as F

from nanollm.ranking import indices, top
from nanollm.window import Selection, WindowCache, window_scores


@dataclass(frozen=True)
class HighestScores(Selection):

    def __call__(self, cache: WindowCache, scores: Tensor, budget: int | Tensor) -> Tensor:
        pooled = cache.pool(scores.mean(2))  # c, with the mean over the group's query heads
        return top(pooled, budget)           # Top_{b−w}(c)


@dataclass(eq=False)
class SnapKV(WindowCache):
    """PyramidKV and AdaKV change `budgets`; CriticalKV and ChunkKV change `select`."""
    select: Selection = HighestScores()

    def __post_init__(self):
        super().__post_init__()
        self.select.check(self)

    def chosen(self) -> Tensor:
        scores = window_scores(self.queries, self.k, self.empty())  # 1/w Σ_t α_t, of the entries before it
        kept = self.select(self, scores, self.budgets(scores))
        return indices(F.pad(kept, (0, self.window_size), value=True))  # … and the window itself

    def budgets(self, scores: Tensor) -> int | Tensor:
        """Entries that each head keeps beside the window, a number or (B, H)."""
        return self.budget - self.window_size


variants = {"snap_kv": SnapKV}
