"""DuoAttention: retrieval heads keep everything, streaming heads sinks and recent tokens (Xiao et al., arXiv 2410.10819).

Few heads fetch what stands far back; all others look at the first tokens and the newest, so only those few need a whole cache.

    S_t = {0 … t} in a retrieval head,   S_t = {0 … s−1} ∪ {t−(w−s)+1 … t} in a streaming head

Differs from the paper: it learns a gate for each head; here each head in turn is made to stream, and what that does to answers
tells (`importance`). There, streaming heads stream while the prompt is read, too; here from its end on. The budget is one of
all heads together, from which follows how many may keep everything, and w.

One head at a time is enough for the shipped decoder, whose three retrieving heads were built into its starting weights
(`induction_start` in nanollm/train.py). Heads that can stand in for one another would not be found so.
"""
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.cache import NEVER, LayerCache, check_budget, indices, make_cache
from nanollm.data import Tasks
from nanollm.evaluate import Recorder, prompt_and_question, record


@dataclass(eq=False)
class Streaming(LayerCache):
    """Sinks and the newest tokens, `size` together, at the positions that they have in the text."""
    size: int
    sinks: int

    def forget(self):
        if self.length > self.size:
            self.shrink(self.pos.masked_fill(self.pos < self.sinks, NEVER), self.size)


@dataclass(eq=False)
class DuoAttention(LayerCache):
    """One cache until the prompt ends, from then on two: of the layer's heads that keep everything, and of the others."""
    budget: int                              # entries per key/value head at the prompt's end, mean over all heads of all layers
    heads: tuple[tuple[int, int], ...] = ()  # (layer, key/value head): those that retrieve, the most important first; none: all stream
    sinks: int = 4                           # first tokens that a streaming head keeps
    least: int = 16                          # fewest entries of a streaming head: as many of `heads` keep everything as this allows

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.sinks < self.least:
            raise ValueError(f"sinks {self.sinks} must be at least 0 and less than the {self.least} entries (least) of a streaming head")
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

    def finish_prompt(self):
        super().finish_prompt()
        if self.seen and not self.parts:
            self.split(self.k.shape[1])

    def split(self, H: int):
        every = [(layer, head) for layer in range(self.layers) for head in range(H)]
        if not {*self.heads} <= {*every}:
            raise ValueError(f"heads {self.heads} must be among {self.layers} layers of {H} key/value heads")
        # m heads keep all n tokens, the others w: m·n + (LH − m)·w = LH·budget, least ≤ w ≤ budget
        total, n, m = len(every) * self.budget, self.seen, len(self.heads)
        if n > self.least:
            m = min(m, (total - len(every) * self.least) // (n - self.least))
        window = min((total - m * n) // max(len(every) - m, 1), self.budget)  # more than the budget only after a short prompt
        whole = [head for layer, head in self.heads[:m] if layer == self.layer]
        rest = [head for head in range(H) if head not in whole]
        parts = [part for part in ((sorted(whole), LayerCache()), (rest, Streaming(window, self.sinks))) if part[0]]
        for heads, part in parts:
            if n:
                part.write(self.k[:, heads], self.v[:, heads], self.pos[:, 0])
            part.finish_prompt()
        self.parts, self.slots, self.length = parts, {}, max(part.length for _, part in parts)

    @property
    def pos(self) -> Tensor:
        """(B, H, S): a streaming head's is filled up with NEVER."""
        if not self.parts:
            return super().pos
        B, H = self.parts[0][1].pos.shape[0], sum(len(heads) for heads, _ in self.parts)
        pos = self.parts[0][1].pos.new_full((B, H, self.length), NEVER)
        for heads, part in self.parts:
            pos[:, heads, :part.length] = part.pos
        return pos

    def bytes(self) -> tuple[int, int]:
        return tuple(map(sum, zip(*(part.bytes() for _, part in self.parts)))) if self.parts else super().bytes()

    @staticmethod
    def calibrate(model, encoding) -> dict:
        """The knobs that depend on the decoder, as arguments for the constructor."""
        if not hasattr(encoding, "encode_ordinary_batch"):
            raise ValueError("heads are told apart on tasks, which need a tiktoken tokenizer; give DuoAttention its heads instead")
        return dict(heads=retrieval_heads(importance(model, Tasks(encoding, "train"), T=min(512, model.config.max_len))))


@torch.no_grad()
def importance(model, tasks: Tasks, documents: int = 32, T: int = 512, sinks: int = 4, window: int = 16, seed: int = 0,
               of: tuple[str, ...] = ("needle", "recall")) -> Tensor:
    """How many nats per token the right answers become less likely when one head alone streams after the context, (L, H).

    Mean over the tasks `of`, with `documents` each; the question comes later. T tokens, of which a streaming head keeps `window`.
    """
    c = model.config
    loss = torch.zeros(c.n_layers, c.n_kv_heads)
    for task in of:
        batch = tasks.batch(task, seed, documents, T)
        tokens, context, _ = prompt_and_question(model, batch)
        told, answer = record(model, make_cache(model, Recorder), context), batch.answers[0]

        def nll(streams: tuple[int, int] | None) -> float:
            caches = make_cache(model)
            for layer, (cache, (_, _, k, v, pos)) in enumerate(zip(caches, told)):
                cache.write(k, v, pos)
                if streams is not None and streams[0] == layer:
                    kept = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
                    kept[:, streams[1], sinks:max(k.shape[2] - window + sinks, 0)] = False
                    cache.keep(indices(kept))
            logits = model(tokens[:, batch.question:answer.stop - 1], caches, last=answer.stop - answer.start)
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, answer].flatten()).item()

        full = nll(None)
        loss += torch.tensor([[nll((layer, head)) - full for head in range(c.n_kv_heads)] for layer in range(c.n_layers)]) / len(of)
    return loss


def retrieval_heads(importance: Tensor, least: float = 0.1) -> tuple[tuple[int, int], ...]:
    """(layer, head) of those without which answers lose more than `least` nats per token, the most important first."""
    order = importance.flatten().argsort(descending=True, stable=True).tolist()
    return tuple(divmod(i, importance.shape[1]) for i in order if importance.flatten()[i] > least)


variants = {"duo_attention": DuoAttention}
