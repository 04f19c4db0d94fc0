"""Ours: each head's budget is fixed by one calibration text; within a head, KeyDiff chooses.

In KVzip's ranking a head that copies gets many entries, and most heads get few. Here one training
text decides how many. It is read twice, when a decoder is met for the first time; all later texts
are read once.

    share_h = entries of head h among the quarter with the highest KVzip scores, mean over heads 1
    head h keeps the b·share_h entries whose keys are least like the others
    (methods/baselines/key_diff.py)

On SmolLM2, with a quarter of the entries, it finds 0.59 of the later needles. KeyDiff alone, with
equal budgets, finds 0.06 (RESULTS.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.baselines.key_diff import likeness
from methods.baselines.kvzip import KVzip
from nanollm.cache import NEVER, Slots, full_layers, make_cache, rereading
from nanollm.generate import prefill


@dataclass
class HeadBudgets(KVzip):
    shares: Tensor | None = None  # (L, H), mean 1; None: equal budgets
    recent: int = 8  # newest entries of each head, which stay whatever their keys
    sinks: int = 4  # first entries of each head, likewise

    def __post_init__(self):
        super().__post_init__()
        if self.shares is not None and not (self.shares >= 0).all():
            raise ValueError(
                "shares contain NaN or negative numbers; use those that HeadBudgets.calibrate makes"
            )

    def scores(
        self,
        model,
        tokens: Tensor,
        layers: list[Slots],
    ) -> list[Tensor]:
        """Return −(rank in the head)/share: a head with twice the share keeps twice as many."""
        right = len(layers), layers[0].k.shape[1]
        if self.shares is not None and self.shares.shape != right:
            raise ValueError(
                f"shares {tuple(self.shares.shape)} must be {right}, layers and heads of the model"
            )
        scores = []
        for i, layer in enumerate(layers):
            alike = likeness(layer).masked_fill(layer.pos == NEVER, torch.inf)
            rank = alike.argsort(-1).argsort(-1)
            share = torch.ones(1) if self.shares is None else self.shares[i]
            scores.append(-rank / share[:, None].clamp(min=1e-6).to(rank.device))
        return scores

    @staticmethod
    @torch.no_grad()
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the decoder. tasks: `Tasks` of the training text."""
        # half of max_len: the text is read twice
        T = min(512, (model.config.max_len - 8) // 2)
        text = torch.from_numpy(tasks.batch("plain", 0, 1, T).tokens)
        text = text.to(model.embed.weight.device)
        caches = make_cache(model, KVzip, budget=T)
        prefill(model, text, caches)
        layers = full_layers(caches)
        again = rereading(model, caches)
        scores = layers[0].method.scores(again, text, layers)
        scores = torch.stack([x[0] for x in scores])  # (L, H, T)
        least = scores.flatten().topk(scores.numel() // 4).values[-1]
        count = (scores >= least).sum(-1).float()
        return dict(shares=count / count.mean())


variants = {"head_budgets": HeadBudgets}
