"""Window methods that compress again during decoding, for the long answers of CriticalKV's Table 7.

After every `every` new tokens, the last w queries choose again among the entries that are left. A head never
has more than `budget` + `every` slots. Nothing else differs:

    make_cache(model, again(SnapKV), budget=64, every=32)
"""
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanollm.cache import NEVER
from nanollm.check import whole
from nanollm.window import WindowCache


@dataclass(eq=False)
class CompressAgain:
    """Mix-in for a window method, whose options stay the same: class Again(CompressAgain, Method)."""
    every: int = field(default=32, kw_only=True)  # new tokens between two compressions
    appends = False

    def __post_init__(self):
        super().__post_init__()
        whole("every", self.every, 1)
        if not self.select.again:
            raise ValueError(f"{type(self.select).__name__} cannot be applied to its own output; "
                             "use another selection")
        if getattr(self, "reuse", 1) > 1:
            raise ValueError(f"reuse is {self.reuse}; it must be 1 if a method compresses again")
        self.full = self.budget + self.every  # slots in use when it compresses again

    def pieces(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Cut the tokens after the prompt into pieces that fit into the free slots."""
        if not self.prompt_done:
            return super().pieces(q, k, v, pos)
        ends = [*range(self.full - self.length, q.shape[2], self.every)]
        return zip(*(x.tensor_split(ends, 2) for x in (q, k, v)), pos.tensor_split(ends, 1))

    def observe(self, q: Tensor, p: Tensor | None):
        super().observe(q, p)
        if self.prompt_done:
            self.remember(q)
            if self.length == self.full:
                self.choose_again()

    @classmethod
    def compress(cls, model, tokens: Tensor, caches: list["CompressAgain"]):
        super().compress(model, tokens, caches)
        for cache in caches:
            kept = cache.length if cache.seen > cache.budget else cache.budget
            cache.full = kept + cache.every

    def forget_prompt(self):
        """Keep the queries: decoding adds to them."""

    def choose_again(self):
        if self.ragged:  # move empty slots to the front: the last slots must be every head's newest tokens
            self.keep((self.pos != NEVER).to(torch.uint8).argsort(dim=-1, stable=True))
        self.keep_chosen(self.chosen())
        self.full = self.length + self.every


def again(Method: type[WindowCache]) -> type[WindowCache]:
    """Return a subclass of Method that compresses again; it adds the option `every`."""
    return dataclass(eq=False)(type(f"Again{Method.__name__}", (CompressAgain, Method), {}))


variants = {}  # not in the tables; claim P12 measures it
