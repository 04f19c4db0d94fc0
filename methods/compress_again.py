"""Window methods that compress again while they write, as for the long answers of CriticalKV's Table 7.

After every so many new tokens the last w queries choose anew among the entries that are left: a head never
holds more than `budget` + `every` slots. Nothing else differs: `make_cache(model, again(SnapKV), budget=64,
every=32)`.
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
    """To stand before a window method, whose options it leaves as they are."""
    every: int = field(default=32, kw_only=True)  # new tokens after which it compresses again

    def __post_init__(self):
        super().__post_init__()
        whole("every", self.every, 1)
        if not self.select.again:
            raise ValueError(f"{type(self.select).__name__} cannot choose again; take another selection")
        if getattr(self, "reuse", 1) > 1:
            raise ValueError(f"every {self.every} needs a choice by each layer; make reuse {self.reuse} 1")
        self.full = self.budget + self.every  # slots at which it compresses again

    def pieces(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """After the prompt, pieces as long as the room there is."""
        if not self.prompt_done:
            return super().pieces(q, k, v, pos)
        ends = [*range(self.full - self.length, q.shape[2], self.every)]
        return zip(*(x.tensor_split(ends, 2) for x in (q, k, v)), pos.tensor_split(ends, 1))

    def observe(self, q: Tensor, p: Tensor | None):
        super().observe(q, p)
        if self.prompt_done:
            self.remember(q)
            if self.length == self.full:
                self.compress()

    def end_prefill(self):
        queries = self.queries
        super().end_prefill()
        self.queries = queries

    def compress(self):
        if self.ragged:  # heads end together: the last slots are the newest tokens of all
            self.keep((self.pos != NEVER).to(torch.uint8).argsort(dim=-1, stable=True))
        super().compress()
        self.full = self.length + self.every


def again(Method: type[WindowCache]) -> type[WindowCache]:
    """The window method that compresses again. With its option `every`."""
    return dataclass(eq=False)(type(f"Again{Method.__name__}", (CompressAgain, Method), {}))


variants = {}  # see the claim P12
