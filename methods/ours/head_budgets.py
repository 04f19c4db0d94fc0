"""Ours: each head's budget is fixed by one calibration text; within a head, KeyDiff chooses.

In KVzip's ranking a head that copies gets many entries, and most heads get few. Here one training
text decides how many. It is read twice, when a decoder is met for the first time; all later texts
are read once.

    share_h = entries of head h among the quarter with the highest KVzip scores, mean over heads 1
    head h keeps the b·share_h entries whose keys are least like the others
    (methods/baselines/key_diff.py)

On SmolLM2 the heads matter more than the tokens: with these budgets even a random choice keeps more
later needles than KeyDiff with equal budgets (RESULTS.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.baselines.key_diff import likeness
from methods.baselines.kvzip import KVzip
from nanollm.cache import NEVER, make_cache
from nanollm.generate import prefill


@dataclass(eq=False)
class HeadBudgets(KVzip):
    shares: Tensor | None = None  # (L, H), mean 1; None: equal budgets
    # newest entries of each head, which stay whatever their keys
    recent: int = 8
    sinks: int = 4  # first entries of each head, likewise

    @classmethod
    def scores(cls, model, tokens: Tensor, caches: list["HeadBudgets"]) -> list[Tensor]:
        """Return −(rank in the head)/share: a head with twice the share keeps twice as many entries."""
        shares = (
            torch.ones(len(caches), 1) if caches[0].shares is None else caches[0].shares
        )
        ranks = [
            likeness(cache.k)
            .masked_fill(cache.pos == NEVER, torch.inf)
            .argsort(-1)
            .argsort(-1)
            for cache in caches
        ]
        return [
            -rank / share[:, None].clamp(min=1e-6).to(rank.device)
            for rank, share in zip(ranks, shares)
        ]

    @staticmethod
    @torch.no_grad()
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the decoder. tasks: `lab.tasks.Tasks` of the training text."""
        # half of max_len: the text is read twice
        T = min(512, (model.config.max_len - 8) // 2)
        text = torch.from_numpy(tasks.batch("plain", 0, 1, T).tokens).to(
            model.embed.weight.device
        )
        prefill(model, text, caches := make_cache(model, KVzip, budget=T))
        # (L, H, T)
        scores = torch.stack([x[0] for x in KVzip.scores(model, text, caches)])
        count = (
            (scores >= scores.flatten().topk(scores.numel() // 4).values[-1])
            .sum(-1)
            .float()
        )
        return dict(shares=count / count.mean())


variants = {"head_budgets": HeadBudgets}
