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

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import trange

from methods.baselines.kvzip_fast import FastKVzip, Teacher, fit, lessons
from nanollm.attention import probabilities, visible, wide
from nanollm.cache import Slots, copied, full_layers, make_cache
from nanollm.generate import prefill
from nanollm.model import rope, rotate


class QuestionGates(FastKVzip):
    @staticmethod
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the decoder. tasks: `Tasks` of the training text."""
        imitating = fit(*lessons(model, tasks, documents=8))
        return dict(gates=taught(model, tasks, imitating))


class Asked(NamedTuple):
    """Documents of one task, whose contexts have been read."""

    # of each layer, the gates' inputs (B, T, n), in 16 bits, in CPU memory
    context: list[Tensor]
    sliding: list[Slots]  # caches of the layers that slide; they have no gates
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
    """Read `documents` of T tokens for each task, `rows` at a time. The tasks take turns."""
    device = model.embed.weight.device
    T = min(T, model.config.max_len)
    batches = [tasks.batch(task, seed, documents, T) for task in task_names]
    asked = []
    for first in trange(
        0, documents, rows, desc="questions", leave=False, disable=None
    ):
        for batch in batches:
            tokens = torch.from_numpy(batch.tokens[first : first + rows])
            tokens = tokens.to(device)
            answer = batch.answers[0]
            caches = make_cache(model, Teacher, budget=T)
            prefill(model, tokens[:, : batch.question], caches, 64)
            layers = full_layers(caches)
            context = [layer.notes["inputs"].half() for layer in layers]
            sliding = [layer for layer in caches if layer not in layers]
            question = tokens[:, batch.question : answer.stop]
            n = answer.stop - answer.start
            asked.append(Asked(context, sliding, question, n))
    return asked


class Kept(Slots):
    """Slots whose context, which comes by `write`, a question sees in part: keep (B, L, H, T)."""

    def __init__(self, *place, keep: Tensor):
        super().__init__(*place)
        self.kept = keep[:, self.index]  # (B, H, T), 1 or 0

    def attention(
        self,
        q: Tensor,
        pos: Tensor,
    ) -> tuple[Tensor, None]:
        k, v, slot_pos, _ = self.read()
        p = probabilities(q, k, visible(slot_pos, None, pos))  # (B, H, G, w, S)
        new = p.shape[-1] - self.kept.shape[-1]  # the question's own tokens, which stay
        kept = F.pad(self.kept, (0, new), value=1.0)
        p = p * kept[:, :, None, None]
        p = p / p.sum(-1, keepdim=True)
        y = p.flatten(2, 3).to(v) @ v
        return y.view(q.shape), None


def chosen(
    s: Tensor,
    share: float,
    sinks: int,
    recent: int,
    tau: float = 2.0,
) -> Tensor:
    """Return keep (B, L, H, T) from scores s (B, L, H, T); the derivative is the one above.

    The first `sinks` and the newest `recent` entries of each head always stay, and one more on
    average.
    """
    T = s.shape[-1]
    i = torch.arange(T, device=s.device)
    always = (i < sinks) | (i >= T - recent)
    ranked = s.detach().masked_fill(always, torch.inf)
    heads = s[0, ..., 0].numel()
    most = int(max(share * T, sinks + recent + 1) * heads)
    theta = ranked.flatten(1).topk(most).values[:, -1, None, None, None]

    soft = ((ranked - theta) / tau).sigmoid()
    slope = soft * (1 - soft) / tau
    layers = (1, 2, 3)  # all entries of a text
    moved = (slope * s).sum(layers, keepdim=True)
    s = s - moved / slope.sum(layers, keepdim=True)
    return (ranked >= theta).to(s) + slope * (s - s.detach())


def surprise(model, asked: Asked, keep: Tensor) -> Tensor:
    """Return the mean −log p of the right answer's tokens if `keep` (B, L, H, T) stay."""
    c = model.config
    layers = make_cache(model, store=partial(Kept, keep=keep))
    for layer in copied(asked.sliding):
        layers[layer.block] = layer
    for layer, x in zip(full_layers(layers), asked.context):
        x = x.to(layer.w_o).unflatten(2, (-1, c.head_dim))
        x = x.transpose(1, 2)
        _, k, v = x.split((c.n_heads, c.n_kv_heads, c.n_kv_heads), 1)
        pos = torch.arange(x.shape[2], device=x.device)[None]
        angles = rope(layer.freq, pos)
        layer.write(rotate(k, *angles), v, pos)
    logits = wide(model(asked.tokens[:, :-1], layers, last=asked.n))
    right = asked.tokens[:, -asked.n :]
    return F.cross_entropy(logits.flatten(0, 1), right.flatten())


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
    x = torch.stack(asked[0].context).float()
    x = x.flatten(1, 2).to(device)  # (L, B·T, n)
    mean = x.mean(1, keepdim=True)
    spread = x.std(1, keepdim=True) + 1e-6
    W, b = gates.to(device).split((x.shape[2], 1), 1)
    b = (b + mean @ W).requires_grad_()
    W = (W * spread.mT).requires_grad_()
    adam = torch.optim.Adam([W, b], rate, betas=(0.9, 0.99))

    for step in trange(steps, desc="gates", leave=False, disable=None):
        part = asked[step % len(asked)]
        share = shares[step % len(shares)]
        with torch.enable_grad():
            s = []
            for i, x in enumerate(part.context):
                inputs = (x.to(W) - mean[i]) / spread[i]
                s.append((inputs @ W[i] + b[i]).mT)
            s = torch.stack(s, 1)
            keep = chosen(s, share, FastKVzip.sinks, FastKVzip.recent)
            loss = surprise(model, part, keep)
            W.grad, b.grad = torch.autograd.grad(loss, (W, b))
        adam.param_groups[0]["lr"] = rate * (1 - step / steps)
        adam.step()
    W = W.detach() / spread.mT
    return torch.cat((W, b.detach() - mean @ W), 1).cpu()


variants = {"question_gates": QuestionGates}
