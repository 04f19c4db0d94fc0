"""Quest: keep every entry, read only the pages that the query may need (Tang et al., arXiv 2406.10774).

Which entries matter depends on the query, so nothing is evicted. The cache is cut into pages of 16 tokens.
Each page stores the smallest and the largest key value of every channel. From these two vectors and a query
follows an upper bound of the scores in the page. Attention reads the pages with the highest bounds, `budget`
entries in all.

    u_j = max_g Σ_d max(q_gd · min_jd, q_gd · max_jd) ≥ max_g q_g·k_i  for every key i of page j
    read the b/16 pages with the highest u

So a keep ratio of 25 % means that a quarter of the entries is *read*, and two vectors per page, 1/16 of a
full cache's bytes. The memory is larger than the full cache, and `bytes` says so.

Differs from the paper:
- The query heads of a group (g) share their entries, so they read the same pages; their largest bound
  decides. In the authors' evaluation each query head has pages of its own.
- The query's own page is always read, as one of the b/16. The authors' kernel does so too, their evaluation
  does not. Their evaluation reads at least three pages; here one page is possible.
- A question after the prompt selects pages, each token its own. There the question is part of the prompt and
  sees everything.
- There the first two layers read everything. Two of our six layers are a third of all entries, more than the
  budget, so here `dense` is 0.

Prompts of 512 tokens have 32 pages, not thousands. A keep ratio of 6.25 % is one page, and no needle is
found. With `page=4` it is seven pages, and 0.97 of the needles are found. But then two vectors per page are a
quarter of a full cache's bytes.
"""
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.attention import fused, split
from nanollm.cache import LayerCache
from nanollm.check import check_budget, whole
from nanollm.ranking import taken


@dataclass(eq=False)
class Quest(LayerCache):
    budget: int     # entries per key/value head that a query reads, in whole pages
    page: int = 16  # tokens per page
    dense: int = 0  # first layers, which read everything; the paper: 2
    keeps_all = True

    def __post_init__(self):
        super().__post_init__()
        whole("page", self.page, 1)
        whole("dense", self.dense, 0)
        check_budget(self.budget, self.page, f"a page has {self.page} tokens (page)")
        self.low = self.high = None  # (B, H, pages, D): smallest and largest key of each page and channel
        self.covered = 0             # slots that `low` and `high` cover

    def pieces(self, *new: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Return the tokens after the prompt one by one, because each query has its own pages."""
        return split(1, *new) if self.by_pages else super().pieces(*new)

    @property
    def by_pages(self) -> bool:
        """Whether this layer reads pages now, not the whole cache."""
        return self.prompt_done and self.layer >= self.dense

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend to the pages with the highest bounds; no other entry is read."""
        if not self.by_pages:
            return super().attention(q, pos)
        self.bound()
        u, n = self.bounds(q), min(self.budget // self.page, self.low.shape[2])
        u[..., -1] = torch.inf  # the query's own page
        pages = u.topk(n, sorted=False).indices  # (B, H, n)
        token = torch.arange(self.page, device=q.device)
        used = (pages[..., None] * self.page + token).flatten(2) < self.length  # the last page may be partial
        # a page is one row of a view, so it is copied at once; self.k would copy every slot
        k, v = (taken(self.slots[name].unflatten(2, (-1, self.page)).flatten(3), pages) for name in "kv")
        k, v = (x.view(*pages.shape[:2], -1, q.shape[3]) for x in (k, v))
        return fused(q, k, v, used.unsqueeze(2), causal=False), None

    def capacity(self, n: int) -> int:
        return -(-super().capacity(n) // self.page) * self.page    # whole pages, to read each as one row

    def bounds(self, q: Tensor) -> Tensor:
        """Return the upper bound of the scores in each page: one query (B, H·G, 1, D) → (B, H, pages)."""
        q = q.unflatten(1, (self.low.shape[1], -1)).flatten(2, 3)  # (B, H, G, D)
        return (q.clamp(min=0) @ self.high.mT + q.clamp(max=0) @ self.low.mT).amax(2)

    def bound(self):
        """Update `low` and `high` with the keys that came since the last call."""
        done = 0 if self.low is None else self.covered // self.page  # full pages, which stay the same
        new, self.covered = self.k[:, :, done * self.page:], self.length
        room = -new.shape[2] % self.page
        pages = lambda value: F.pad(new, (0, 0, 0, room), value=value).unflatten(2, (-1, self.page))
        low, high = pages(torch.inf).amin(3), pages(-torch.inf).amax(3)
        if self.low is not None and done + low.shape[2] == self.low.shape[2]:  # no new page
            self.low[:, :, done:], self.high[:, :, done:] = low, high
            return
        if done:
            low, high = (torch.cat((old[:, :, :done], x), 2)
                         for old, x in ((self.low, low), (self.high, high)))
        self.low, self.high = low, high

    def end_prefill(self):
        super().end_prefill()
        if self.seen and self.layer >= self.dense:
            self.bound()

    def beside(self) -> list[Tensor]:
        return [] if self.low is None else [self.low, self.high]


variants = {"quest": Quest}
