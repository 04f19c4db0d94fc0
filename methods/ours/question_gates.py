"""Ours: gates that learn from questions which entries an answer needs.

Fast KVzip's gates (methods/baselines/kvzip_fast.py) imitate KVzip's scores. These learn from what
eviction does to answers. A step of the training reads a question behind a context that the gates
have thinned. The scores s of entries that would have made the right answer likelier rise:

    keep_i = 1 if s_i ≥ θ, else 0,   s_i = x_i W + b;   θ lets a share of all heads' entries stay
    p_i = keep_i e^{q·k_i/√D} / Σ_j keep_j e^{q·k_j/√D},   loss = −mean log p(right answer)
    ∂keep_i/∂s_j := w_i (δ_ij − w_j / Σw),   w the slope of the sigmoid σ((s − θ)/τ) in s

Attention is exact: an entry is there or not. The derivative is that of a soft choice σ((s − θ)/τ)
whose θ moves so that its sum stays (a straight-through estimator, Bengio et al., arXiv 1308.3432).

The first and the newest entries of a head stay, as in Fast KVzip: keep is 1 and w is 0.

The training begins with gates that imitate KVzip on a few texts. Its questions are those of four
tasks, worded as in the tests, about text, words and numbers that no test uses.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import trange

from methods.baselines.kvzip_fast import FastKVzip, Teacher, fit, lessons
from methods.ours.kvzip_4 import Rounded
from nanollm.attention import probabilities, wide
from nanollm.cache import LayerCache, make_cache
from nanollm.generate import prefill
from nanollm.model import rope, rotate


class QuestionGates(FastKVzip):
    @staticmethod
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the decoder. tasks: `lab.tasks.Tasks` of the training text."""
        return dict(
            gates=taught(model, tasks, fit(*lessons(model, tasks, documents=8)))
        )


@dataclass(eq=False)
class RoundedQuestionGates(Rounded, QuestionGates):
    """The same entries in few bits."""


class Asked(NamedTuple):
    """Documents of one task, whose contexts have been read."""

    # of each layer, the gates' inputs (B, T, n), in 16 bits and in CPU memory
    context: list[Tensor]
    tokens: Tensor  # (B, T'), question and answer
    n: int  # tokens of the answer, at the end of T'


@torch.no_grad()
def ask(
    model,
    tasks,
    task_names: tuple[str, ...],
    documents: int,
    T: int,
    seed: int,
    rows: int,
) -> list[Asked]:
    """Read `documents` of T tokens for each task, `rows` at a time. In the result the tasks take turns."""
    batches = [
        tasks.batch(task, seed, documents, min(T, model.config.max_len))
        for task in task_names
    ]
    asked = []
    for first in trange(
        0, documents, rows, desc="questions", leave=False, disable=None
    ):
        for batch in batches:
            tokens = torch.from_numpy(batch.tokens[first : first + rows]).to(
                model.embed.weight.device
            )
            answer, caches = batch.answers[0], make_cache(model, Teacher, budget=T)
            prefill(model, tokens[:, : batch.question], caches, 64)
            context = [torch.cat(cache.inputs, 1).half() for cache in caches]
            asked.append(
                Asked(
                    context,
                    tokens[:, batch.question : answer.stop],
                    answer.stop - answer.start,
                )
            )
    return asked


@dataclass(eq=False)
class Kept(LayerCache):
    """A cache of whose context, which comes by `write`, a question sees a part: keep (B, L, H, T),
    1 or 0."""

    keep: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.write(k, v, pos)
        k, v, slot_pos, _ = self.read()
        p = probabilities(q, k, slot_pos, None, pos)  # (B, H, G, w, S)
        keep = self.keep[:, self.layer]
        p = (
            p
            * F.pad(keep, (0, p.shape[-1] - keep.shape[-1]), value=1.0)[
                :, :, None, None
            ]
        )
        p = p / p.sum(-1, keepdim=True)
        return (p.flatten(2, 3).to(v) @ v).view(q.shape)


def chosen(
    s: Tensor, share: float, sinks: int, recent: int, tau: float = 2.0
) -> Tensor:
    """Return keep (B, L, H, T) from scores s (B, L, H, T); the derivative is the one above.

    The first `sinks` and the newest `recent` entries of each head always stay, and one more on
    average.
    """
    i, T = torch.arange(s.shape[-1], device=s.device), s.shape[-1]
    ranked = s.detach().masked_fill((i < sinks) | (i >= T - recent), torch.inf)
    most = int(max(share * T, sinks + recent + 1) * s[0, ..., 0].numel())
    theta = ranked.flatten(1).topk(most).values[:, -1, None, None, None]
    soft = ((ranked - theta) / tau).sigmoid()
    slope = soft * (1 - soft) / tau
    s = s - (slope * s).sum((1, 2, 3), keepdim=True) / slope.sum(
        (1, 2, 3), keepdim=True
    )
    return (ranked >= theta).to(s) + slope * (s - s.detach())


def surprise(model, asked: Asked, keep: Tensor) -> Tensor:
    """Return −log p of the right answer's tokens, their mean, if `keep` (B, L, H, T) of the context
    stay."""
    c = model.config
    caches = make_cache(model, Kept, keep=keep)
    for cache, x in zip(caches, asked.context):
        x = x.to(cache.w_o).unflatten(2, (-1, c.head_dim)).transpose(1, 2)
        _, k, v = x.split((c.n_heads, c.n_kv_heads, c.n_kv_heads), 1)
        pos = torch.arange(x.shape[2], device=x.device)[None]
        cache.write(rotate(k, *rope(cache.freq, pos)), v, pos)
    logits = wide(model(asked.tokens[:, :-1], caches, last=asked.n))
    return F.cross_entropy(logits.flatten(0, 1), asked.tokens[:, -asked.n :].flatten())


def taught(
    model,
    tasks,
    gates: Tensor,
    documents: int = 32,
    T: int = 512,
    steps: int = 300,
    rows: int = 4,
    rate: float = 0.001,
    shares: tuple[float, ...] = (1 / 4, 1 / 8, 1 / 16),
    seed: int = 0,
    task_names: tuple[str, ...] = ("needle", "copy", "pairs", "few_shot"),
) -> Tensor:
    """Return gates (L, n + 1, H) that have learned from questions, beginning with `gates`.

    Each task has `documents` of T tokens. A step takes `rows` of them, all of one task, and evicts
    all but one of `shares`. Adam's rate, in units of the inputs' spread in the first step, falls
    from `rate` to 0.
    """
    asked = ask(model, tasks, task_names, documents, T, seed, rows)
    device = model.embed.weight.device
    x = torch.stack(asked[0].context).float().flatten(1, 2).to(device)  # (L, B·T, n)
    mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-6
    W, b = gates.to(device).split((x.shape[2], 1), 1)
    W, b = (W * spread.mT).requires_grad_(), (b + mean @ W).requires_grad_()
    adam = torch.optim.Adam([W, b], rate, betas=(0.9, 0.99))
    for step in trange(steps, desc="gates", leave=False, disable=None):
        part = asked[step % len(asked)]
        with torch.enable_grad():
            s = [
                ((x.to(W) - mean[i]) / spread[i] @ W[i] + b[i]).mT
                for i, x in enumerate(part.context)
            ]
            keep = chosen(
                torch.stack(s, 1),
                shares[step % len(shares)],
                FastKVzip.sinks,
                FastKVzip.recent,
            )
            W.grad, b.grad = torch.autograd.grad(surprise(model, part, keep), (W, b))
        adam.param_groups[0]["lr"] = rate * (1 - step / steps)
        adam.step()
    W = W.detach() / spread.mT
    return torch.cat((W, b.detach() - mean @ W), 1).cpu()


variants = {"question_gates": QuestionGates, "question_gates_4": RoundedQuestionGates}
