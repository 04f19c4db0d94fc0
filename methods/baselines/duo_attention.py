"""DuoAttention: few heads keep everything, the others sinks and new tokens (Xiao et al., arXiv 2410.10819).

Few heads attend to tokens far back; these are the retrieval heads. The others, the streaming heads, attend to
the first and the newest tokens. So only retrieval heads need a full cache.

    S_t = {0 … t} in a retrieval head,   S_t = {0 … s−1} ∪ {t−(w−s)+1 … t} in a streaming head

As in the paper, the retrieval heads are learned: each head has a gate, and all gates are trained together
(methods/baselines/duo_gates.py).

Differs from the paper:
- There the streaming heads also stream while the prompt is read; here only from its end on.
- There the gates are trained on the distance of last hidden states; here on the KL of predicted tokens.
- Here the penalty on open gates grows during training, which ranks the heads.
- The budget is the mean over all heads. It determines w and how many heads keep everything.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.baselines.duo_gates import gates, retrieval_heads
from methods.baselines.streaming_llm import StreamingLLM
from nanollm.cache import NEVER, LayerCache, Stored
from nanollm.check import check_budget


@dataclass(eq=False)
class DuoAttention(LayerCache):
    """One cache until the prompt ends, then two: one for the retrieval heads, one for the streaming heads."""
    budget: int                              # entries at the prompt's end, mean over all heads of all layers
    heads: tuple[tuple[int, int], ...] = ()  # retrieval heads, (layer, key/value head), the best first
    sinks: int = 4                           # first tokens that a streaming head keeps, s
    least: int = 16                          # fewest entries of a streaming head; limits the retrieval heads

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.sinks < self.least:
            raise ValueError(f"sinks is {self.sinks}; it must be at least 0 and below least ({self.least}), "
                             "the fewest entries of a streaming head")
        if len({*self.heads}) < len(self.heads):
            raise ValueError(f"heads {self.heads} contain a head twice; list each once")
        check_budget(self.budget, self.least, f"a streaming head has {self.least} entries (least)")
        self.parts: list[tuple[list[int], LayerCache]] = []  # (key/value heads, their cache)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.check(q, k, v, pos)
        H = k.shape[1]
        if not self.parts:
            return super().attend(q, k, v, pos)

        q = q.unflatten(1, (H, -1))  # (B, H·G, T, D) → (B, H, G, T, D)
        y = torch.empty_like(q)
        for heads, part in self.parts:
            part_y = part.attend(q[:, heads].flatten(1, 2), k[:, heads], v[:, heads], pos)
            y[:, heads] = part_y.unflatten(1, (len(heads), -1))
        self.seen += k.shape[2]
        self.length = max(part.length for _, part in self.parts)
        return y.flatten(1, 2)

    @classmethod
    def compress(cls, model, tokens: Tensor, caches: list["DuoAttention"]):
        for cache in caches:
            if not cache.parts:  # in a later turn the streaming heads have streamed already
                cache.split(cache.k.shape[1])

    def split(self, H: int):
        """Move the slots of the H heads into two caches: one for retrieval heads, one for streaming heads."""
        every = [(layer, head) for layer in range(len(self.model.blocks)) for head in range(H)]
        if not {*self.heads} <= {*every}:
            raise ValueError(f"heads {self.heads} must be among {len(self.model.blocks)} layers of {H} "
                             "key/value heads")

        # m heads keep all n tokens, the others w: m·n + (LH − m)·w = LH·budget, with least ≤ w ≤ budget
        total, n, m = len(every) * self.budget, self.seen, len(self.heads)
        if n > self.least:
            m = min(m, (total - len(every) * self.least) // (n - self.least))
        w = (total - m * n) // max(len(every) - m, 1)
        w = min(w, self.budget)  # after a short prompt w would be more

        retrieving = sorted(head for layer, head in self.heads[:m] if layer == self.layer)
        streaming = [head for head in range(H) if head not in retrieving]
        parts = []
        for heads, keeps_all in (retrieving, True), (streaming, False):
            if heads:
                part = LayerCache() if keeps_all else StreamingLLM(w, self.sinks, relative=False)
                if n:
                    part.write(self.k[:, heads], self.v[:, heads], self.pos[:, 0])
                part.evict()
                part.prompt_done = True
                parts.append((heads, part))
        self.parts, self.slots, self.length = parts, {}, max(part.length for _, part in parts)

    @property
    def pos(self) -> Tensor:
        """Positions (B, H, S); NEVER fills up the shorter streaming heads."""
        if not self.parts:
            return self.slot("pos")
        B, H = self.parts[0][1].pos.shape[0], sum(len(heads) for heads, _ in self.parts)
        pos = self.parts[0][1].pos.new_full((B, H, self.length), NEVER)
        for heads, part in self.parts:
            pos[:, heads, :part.length] = part.pos
        return pos

    def stored(self) -> list[Stored]:
        return [x for _, part in self.parts for x in part.stored()] if self.parts else super().stored()

    @staticmethod
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the decoder. tasks: `lab.tasks.Tasks` of the training text."""
        mean_gates = gates(model, tasks, T=min(512, model.config.max_len))
        return dict(heads=retrieval_heads(mean_gates, least=0.3))


variants = {"duo_attention": DuoAttention}
