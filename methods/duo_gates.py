"""Which heads retrieve, for DuoAttention (arXiv 2410.10819): a gate α for each, all trained together.

    y = α · full attention + (1 − α) · streaming attention,   loss = KL(full ‖ gated) + λ · mean α

λ closes the gates that answers do not need, also where heads can stand in for one another. It is simpler to
let one head alone stream, but that may find none of those (`importance` in experiments/inside.py).

Differs from the paper (section 2.3): its distillation is the squared distance of the last hidden states, with
λ = 0.05. One λ tells a set of heads, but nearly no order: gates of use stay near 1. So here λ grows, in nats,
and heads go by how long their gates stay open. The paper trains for 2,000 steps on whole texts; here contexts
are read once, and only questions and answers run with gates.

`heads_by_kvzip` trains nothing: it asks which heads' entries a second reading of plain text looks at.
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
import torch.nn.functional as F

from methods.kvzip_fast import lessons
from nanollm.attention import fused, visible
from nanollm.cache import LayerCache, make_cache
from nanollm.measure.evaluate import prompt_and_question, wide
from nanollm.measure.replay import Recorder, Recording, record
from nanollm.measure.tasks import Tasks


@dataclass(eq=False)
class Gated(LayerCache):
    """Of each head, `gates` (L, H) of full attention and the rest of a streaming head's.

    It is told the context by `write`, and question and answer by one `attend`. Of the context a streaming
    head sees `sinks` first tokens and the newest, `window` in all.
    """
    gates: Tensor
    sinks: int
    window: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        context = self.length
        self.write(k, v, pos)
        slot = torch.arange(self.length, device=q.device)
        stays = (slot < self.sinks) | (slot >= context - (self.window - self.sinks))
        k, v, at, _ = self.read()
        seen = visible(at, None, pos)
        full = fused(q, k, v, seen, causal=False)
        streaming = fused(q, k[:, :, stays], v[:, :, stays], seen[..., stays], causal=False)
        alpha = self.gates[self.layer].to(q).repeat_interleave(q.shape[1] // k.shape[1])[:, None, None]
        return alpha * full + (1 - alpha) * streaming  # section 2.3


class Asked(NamedTuple):
    """Documents of one task whose contexts have been read."""
    context: list[Recording]  # one a layer
    tokens: Tensor            # (B, T') from the question on, up to the answer's last token
    n: int                    # tokens of the answer, the last of T'


def ask(model, tasks: Tasks, of: tuple[str, ...], documents: int, T: int, seed: int,
        rows: int) -> list[Asked]:
    """`documents` of T tokens of each of the tasks `of`, at most `rows` at a time, tasks by turns."""
    batches = [tasks.batch(task, seed, documents, T) for task in of]
    asked = []
    for first in range(0, len(batches[0].tokens), rows):
        for batch in batches:
            tokens, context, _ = (x[first:first + rows] for x in prompt_and_question(model, batch))
            answer = batch.answers[0]
            read = record(model, make_cache(model, Recorder), context)
            asked.append(Asked(read, tokens[:, batch.question:answer.stop], answer.stop - answer.start))
    return asked


def predictions(model, asked: Asked, gates: Tensor, sinks: int, window: int) -> Tensor:
    """log p of the answer's tokens, (B, n, V), under gates (L, H)."""
    caches = make_cache(model, Gated, gates=gates, sinks=sinks, window=window)
    for cache, read in zip(caches, asked.context):
        cache.write(*(x.to(cache.w_o.device) for x in (read.k, read.v, read.pos)))
    return wide(model(asked.tokens[:, :-1], caches, last=asked.n)).log_softmax(-1)


def gates(model, tasks: Tasks, documents: int = 32, T: int = 512, sinks: int = 4, window: int = 16,
          seed: int = 0, of: tuple[str, ...] = ("needle", "pairs"), steps: int = 200,
          penalty: tuple[float, float] = (0.05, 10.0), rate: float = 0.02, rows: int = 8) -> Tensor:
    """The gates (L, H), 0 … 1, mean over a training in which λ grows and closes one after the other.

    λ goes geometrically from the first to the last `penalty`, in nats. Adam trains the gates from 1 on, at a
    learning rate of `rate`, with `rows` documents of one task a step. Each task in `of` has `documents` of T
    tokens. Of the context a streaming head sees `sinks` first tokens and the newest, `window` in all; the
    question comes after that. A head that nobody needs is at 25/steps at a rate of 0.02.
    """
    c = model.config
    asked = ask(model, tasks, of, documents, T, seed, rows)
    alpha = torch.ones(c.n_layers, c.n_kv_heads, requires_grad=True)  # on the CPU
    with torch.no_grad():
        full = [predictions(model, part, alpha, sinks, window) for part in asked]

    adam, open_for = torch.optim.Adam([alpha], rate), torch.zeros(alpha.shape)
    for step, weight in enumerate(np.geomspace(*penalty, steps).tolist()):
        i = step % len(asked)
        with torch.enable_grad():
            mixed = predictions(model, asked[i], alpha, sinks, window)
            kl = F.kl_div(mixed, full[i], log_target=True, reduction="none").sum(-1).mean()
            (alpha.grad,) = torch.autograd.grad(kl + weight * alpha.mean(), alpha)  # no weight has one
        adam.step()
        alpha.data.clamp_(0, 1)
        open_for += alpha.detach() / steps
    return open_for


def heads_by_kvzip(model, tasks: Tasks, documents: int = 16, T: int = 512, seed: int = 0,
                   rows: int = 8) -> tuple[tuple[int, int], ...]:
    """All (layer, head) by the mean of KVzip's scores (arXiv 2505.23416) over the entries of plain text, the
    highest first. Their maximum is near 1 for several heads, and tells them hardly apart.
    """
    _, scores = lessons(model, tasks, documents, T, seed, rows=rows)  # (L, tokens, H)
    return retrieval_heads(scores.mean(1), least=0.0)


def retrieval_heads(score: Tensor, least: float = 0.1) -> tuple[tuple[int, int], ...]:
    """(layer, head) of those whose importance or gate (L, H) is above `least`, the most first."""
    flat, H = score.flatten(), score.shape[1]
    order = flat.argsort(descending=True, stable=True).tolist()
    return tuple(divmod(i, H) for i in order if flat[i] > least)


variants = {}  # by these functions DuoAttention finds its heads
