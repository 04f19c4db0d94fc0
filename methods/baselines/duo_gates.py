"""Retrieval heads for DuoAttention (arXiv 2410.10819): one gate α per head, all trained together.

A gate mixes the head's full attention with its streaming attention. The loss keeps the predictions of the
full model, and λ closes every gate that the answers do not need.

    y = α · full attention + (1 − α) · streaming attention,   loss = KL(full ‖ gated) + λ · mean α

Training all gates together also works where one head can replace another. Letting a single head stream is
simpler, but may find no head that matters in that case.

Differs from the paper (section 2.3):
- Its loss is the squared distance of the last hidden states; here it is the KL of the predictions.
- Its λ is 0.05 throughout. One λ selects a set of heads but hardly ranks them, because needed gates stay near
  1. Here λ grows, in nats, and heads are ranked by how long their gates stay open.
- It trains for 2,000 steps on whole texts. Here each context is read once, and only the questions and answers
  run with gates.
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import tqdm

from nanollm.attention import fused, visible, wide
from nanollm.cache import LayerCache, make_cache
from nanollm.generate import prefill


@dataclass(eq=False)
class Gated(LayerCache):
    """A cache whose heads mix full attention and streaming attention, by their gates.

    The context comes by `write`, then question and answer by one `attend`. A streaming head sees `window`
    tokens of the context: its first `sinks` and its newest.
    """
    gates: Tensor  # (L, H), the fraction of full attention
    sinks: int     # first tokens of the context that a streaming head sees
    window: int    # all tokens of the context that it sees, sinks included

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        context = self.length
        self.write(k, v, pos)
        slot = torch.arange(self.length, device=q.device)
        stays = (slot < self.sinks) | (slot >= context - (self.window - self.sinks))
        k, v, slot_pos, _ = self.read()
        mask = visible(slot_pos, None, pos)
        full = fused(q, k, v, mask, causal=False)
        streaming = fused(q, k[:, :, stays], v[:, :, stays], mask[..., stays], causal=False)
        alpha = self.gates[self.layer].to(q).repeat_interleave(q.shape[1] // k.shape[1])[:, None, None]
        return alpha * full + (1 - alpha) * streaming  # section 2.3


class Asked(NamedTuple):
    """Documents of one task, with their contexts already read."""
    context: list[tuple[Tensor, ...]]  # k, v and positions of each layer, in CPU memory
    tokens: Tensor                     # (B, T'), question and answer
    n: int                             # tokens of the answer, at the end of T'


def ask(model, tasks, task_names: tuple[str, ...], documents: int, T: int, seed: int,
        rows: int) -> list[Asked]:
    """Read `documents` of T tokens for each task name, at most `rows` at a time.

    In the result the tasks take turns.
    """
    batches = [tasks.batch(task, seed, documents, T) for task in task_names]
    asked = []
    for first in range(0, len(batches[0].tokens), rows):
        for batch in batches:
            tokens = torch.from_numpy(batch.tokens[first:first + rows]).to(model.embed.weight.device)
            answer, caches = batch.answers[0], make_cache(model)
            prefill(model, tokens[:, :batch.question], caches, 64)
            context = [(cache.k.cpu(), cache.v.cpu(), cache.pos[:, 0].cpu()) for cache in caches]
            questions = tokens[:, batch.question:answer.stop]
            asked.append(Asked(context, questions, answer.stop - answer.start))
    return asked


def predictions(model, asked: Asked, gates: Tensor, sinks: int, window: int) -> Tensor:
    """Return the log-probabilities of the answer's n tokens, (B, n, V), under gates (L, H)."""
    caches = make_cache(model, Gated, gates=gates, sinks=sinks, window=window)
    for cache, context in zip(caches, asked.context):
        cache.write(*(x.to(cache.w_o.device) for x in context))
    return wide(model(asked.tokens[:, :-1], caches, last=asked.n)).log_softmax(-1)


def gates(model, tasks, documents: int = 32, T: int = 512, sinks: int = 4, window: int = 16,
          seed: int = 0, task_names: tuple[str, ...] = ("needle", "pairs"), steps: int = 200,
          penalty: tuple[float, float] = (0.05, 10.0), rate: float = 0.02, rows: int = 8) -> Tensor:
    """Return the gates (L, H), each between 0 and 1, as means over the steps of a training.

    λ grows and closes one gate after the other, so the mean tells how long a gate stayed open.

    - `tasks`: `lab.tasks.Tasks` of the training text, or any object with its method `batch`.
    - `penalty`: the first and the last λ, in nats; λ grows geometrically.
    - `rate`: Adam's learning rate. All gates start at 1.
    - `rows`: documents in a step, all of one task. Each task in `task_names` has `documents` of T tokens.
    - `sinks`, `window`: a streaming head sees the first `sinks` tokens of the context and its newest,
      `window` in all, and the question.

    The mean gate of a head that no answer needs is 25/steps at a rate of 0.02.
    """
    c = model.config
    asked = ask(model, tasks, task_names, documents, T, seed, rows)
    alpha = torch.ones(c.n_layers, c.n_kv_heads, requires_grad=True)  # on the CPU
    with torch.no_grad():
        full = [predictions(model, part, alpha, sinks, window) for part in asked]

    adam = torch.optim.Adam([alpha], rate)
    mean_gates = torch.zeros(alpha.shape)
    for step, weight in enumerate(tqdm(np.geomspace(*penalty, steps), "gates", leave=False, disable=None)):
        i = step % len(asked)
        with torch.enable_grad():
            mixed = predictions(model, asked[i], alpha, sinks, window)
            kl = F.kl_div(mixed, full[i], log_target=True, reduction="none").sum(-1).mean()
            # not backward(), which would store gradients in the decoder's weights
            (alpha.grad,) = torch.autograd.grad(kl + weight * alpha.mean(), alpha)
        adam.step()
        alpha.data.clamp_(0, 1)
        mean_gates += alpha.detach() / steps
    return mean_gates


def retrieval_heads(score: Tensor, least: float = 0.1) -> tuple[tuple[int, int], ...]:
    """Return the (layer, head) whose score (L, H), such as a gate, exceeds `least`, the highest first."""
    flat, H = score.flatten(), score.shape[1]
    order = flat.argsort(descending=True, stable=True).tolist()
    return tuple(divmod(i, H) for i in order if flat[i] > least)


variants = {}  # not a method: DuoAttention finds its heads with these functions
