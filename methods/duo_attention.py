"""DuoAttention: few heads keep everything, the others sinks and new tokens (Xiao et al., arXiv 2410.10819).

Few heads fetch what stands far back (retrieval heads). The others look at the first tokens and the newest
(streaming heads), so only the few need a whole cache.

    S_t = {0 … t} in a retrieval head,   S_t = {0 … s−1} ∪ {t−(w−s)+1 … t} in a streaming head

Which heads retrieve is learned, as in the paper: a gate for each, trained with all others
(methods/duo_gates.py).

Differs from the paper: there, streaming heads stream while the prompt is read, too; here from its end on.
Gates are trained on the KL of the predicted tokens, not on the distance of the last hidden states, and their
penalty grows, which puts the heads in order. The budget is one of all heads together. From it follows how
many heads may keep everything, and w.

`duo_attention_kvzip` takes the heads whose entries KVzip ranks highest in plain text, as KVzip's authors do.
Nothing is trained then, no question is asked, and as many answers are found (python -m
experiments.kvzip_parts).
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.duo_gates import gates, heads_by_kvzip, retrieval_heads
from methods.streaming_llm import StreamingLLM
from nanollm.cache import NEVER, LayerCache, Stored
from nanollm.check import check_budget
from nanollm.measure.tasks import Tasks


@dataclass(eq=False)
class DuoAttention(LayerCache):
    """One cache until the prompt ends, then two: of a layer's retrieval heads, and of its streaming heads."""
    budget: int                              # entries at the prompt's end, mean over all heads of all layers
    heads: tuple[tuple[int, int], ...] = ()  # (layer, key/value head) that retrieve, the most important first
    sinks: int = 4                           # first tokens that a streaming head keeps
    least: int = 16                          # its fewest entries: of `heads`, as many keep all as this allows

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.sinks < self.least:
            raise ValueError(f"sinks {self.sinks} must be at least 0 and less than the {self.least} entries "
                             "(least) of a streaming head")
        if len({*self.heads}) < len(self.heads):
            raise ValueError(f"heads {self.heads} name a head twice")
        check_budget(self.budget, self.least, f"a streaming head has {self.least} entries (least)")
        self.parts: list[tuple[list[int], LayerCache]] = []  # key/value heads, and their cache

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.check(q, k, v, pos)
        H = k.shape[1]
        if self.prompt_done and not self.parts:  # the prompt was one token
            self.split(H)
        if not self.parts:
            return super().attend(q, k, v, pos)

        q = q.unflatten(1, (H, -1))  # (B, H·G, T, D) → (B, H, G, T, D)
        y = torch.empty_like(q)
        for heads, part in self.parts:
            of_heads = part.attend(q[:, heads].flatten(1, 2), k[:, heads], v[:, heads], pos)
            y[:, heads] = of_heads.unflatten(1, (len(heads), -1))
        self.seen += k.shape[2]
        self.length = max(part.length for _, part in self.parts)
        return y.flatten(1, 2)

    def end_prefill(self):
        super().end_prefill()
        if self.seen and not self.parts:
            self.split(self.k.shape[1])

    def split(self, H: int):
        """Hand the H heads' slots to two caches: of those that keep everything, and of those that stream."""
        every = [(layer, head) for layer in range(len(self.model.blocks)) for head in range(H)]
        if not {*self.heads} <= {*every}:
            raise ValueError(f"heads {self.heads} must be among {len(self.model.blocks)} layers of {H} "
                             "key/value heads")

        # m heads keep all n tokens, the others w: m·n + (LH − m)·w = LH·budget, least ≤ w ≤ budget
        total, n, m = len(every) * self.budget, self.seen, len(self.heads)
        if n > self.least:
            m = min(m, (total - len(every) * self.least) // (n - self.least))
        w = (total - m * n) // max(len(every) - m, 1)
        w = min(w, self.budget)  # it is more only after a short prompt

        whole = sorted(head for layer, head in self.heads[:m] if layer == self.layer)
        rest = [head for head in range(H) if head not in whole]
        parts = []
        for heads, keeps_all in (whole, True), (rest, False):
            if heads:
                part = LayerCache() if keeps_all else StreamingLLM(w, self.sinks, relative=False)
                if n:
                    part.write(self.k[:, heads], self.v[:, heads], self.pos[:, 0])
                part.end_prefill()
                parts.append((heads, part))
        self.parts, self.slots, self.length = parts, {}, max(part.length for _, part in parts)

    @property
    def pos(self) -> Tensor:
        """(B, H, S): a streaming head's is filled up with NEVER."""
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
    def calibrate(model, encoding) -> dict:
        """The options that depend on the decoder, as arguments for the constructor."""
        open_for = gates(model, training(encoding), T=min(512, model.config.max_len))
        return dict(heads=retrieval_heads(open_for, least=0.3))


class DuoByKVzip(DuoAttention):
    """The heads that retrieve are those that a second reading of plain text looks at."""

    @staticmethod
    def calibrate(model, encoding) -> dict:
        return dict(heads=heads_by_kvzip(model, training(encoding)))


def training(encoding) -> Tasks:
    if not hasattr(encoding, "encode_ordinary_batch"):
        raise ValueError("heads are told apart on tasks, which need a tiktoken tokenizer; "
                         "give DuoAttention its heads instead")
    return Tasks(encoding, "train")


variants = {"duo_attention": DuoAttention, "duo_attention_kvzip": DuoByKVzip}
