"""Ours: gates that learn from questions which entries an answer needs.

Fast KVzip's gates (methods/baselines/kvzip_fast.py) imitate KVzip's scores. These learn from what
eviction does to answers. A step of the training reads questions behind a context that the gates
have thinned. The scores s of entries that would have made the right answers likelier rise:

    keep_i = 1 if s_i ≥ θ, else 0,   θ lets a share of all heads' entries stay
    s_i = x_i W + b + (a if i is one of the first 4) + (c if i is one of the newest 8)
    p_i = keep_i e^{q·k_i/√D} / Σ_j keep_j e^{q·k_j/√D},   loss = −mean log p(right answer)
    ∂keep_i/∂s_j := w_i (δ_ij − w_j / Σw),   w the slope of the sigmoid σ((s − θ)/τ) in s

Attention is exact: an entry is there or not. The derivative is that of a soft choice σ((s − θ)/τ)
whose θ moves so that its sum stays (a straight-through estimator, Bengio et al., arXiv 1308.3432).

x_i is taken before rotation. So that a gate knows the ends of the text, each head learns a and c.
Fast KVzip always keeps the first 4 and the newest 8 entries of every head; with a thirty-second of
512 tokens, that is most of the budget. Here only the first always stays.

The training begins with gates that imitate KVzip on a few texts. Its questions are those of
lab/lessons.py; lab/teach.py adds yours. A question that the full cache cannot answer does not
teach.

Nearest in print, where the parts come from:
- DuoAttention (arXiv 2410.10819): synthetic questions behind long texts teach a frozen decoder's
  gates. There a gate decides about a head, not an entry, and learns from the outputs' distance.
- Locret (2410.01805): answers teach an entry's score. There the target is the answer's attention;
  nothing is evicted while learning.
- DMS (2506.05345), Attention-Gate (2410.12876): decisions about entries, learned through the loss.
  There the decoder, or a module of attention, learns too.
- KV-Distill (2503.10337), TrimKV (2512.03324), WG-KV (2512.17452): no question is known. There the
  full cache's outputs teach.
- KVP (2602.10238): a ranking by head learns from stored texts, by reinforcement.
- RestoreKV (2608.01247): the decoder reads eight learned tokens, which store what eviction would
  lose. Here nothing is added.
- KVzap (2601.07891) imitates KVzip, as Fast KVzip does, and keeps what lies above a threshold.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
import torch.nn.functional as F
from tqdm import tqdm, trange

from methods.baselines.kvzip_fast import (
    FastKVzip,
    Learner,
    Teacher,
    descend,
    fit,
    lessons,
)
from nanollm.attention import probabilities, visible, wide
from nanollm.cache import Slots, copied, full_layers, make_cache
from nanollm.generate import prefill
from nanollm.model import rope, rotate


FIRST = 4  # entries with a weight of their own, a
NEWEST = 8  # and c
# nats a token; if the full cache's −log p is above, a question does not teach
HARD = 2.0


@dataclass
class QuestionGates(FastKVzip):
    # (2, L, H): a and c of each head; `calibrate` makes them
    edges: Tensor | None = None
    recent: int = 0  # newest entries of each head, which stay whatever their scores
    sinks: int = 1  # first entries of each head, which stay whatever their scores

    def __post_init__(self):
        super().__post_init__()
        if self.edges is None:
            raise ValueError(
                "QuestionGates needs edges; give those that QuestionGates.calibrate makes"
            )

    def scores(self, model, tokens: Tensor, layers: list[Slots]) -> list[Tensor]:
        found = super().scores(model, tokens, layers)
        T = tokens.shape[1]
        for i, layer in enumerate(layers):
            found[i] += edged(self.edges[:, i].to(found[i]), layer.pos, T)
        return found

    @staticmethod
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the decoder. tasks: `TrainingTasks`."""
        imitating = fit(*lessons(model, tasks, documents=8))
        return taught(model, tasks.asked(model.config), imitating)


def edged(edges: Tensor, pos: Tensor, T: int) -> Tensor:
    """Return what `edges` (2, …, H) adds to scores (…, H, S) of the entries at `pos` of T."""
    first, newest = edges[..., None]
    return first * (pos < FIRST) + newest * (pos >= T - NEWEST)


class Lesson(NamedTuple):
    """A context that has been read, and R questions on it."""

    inputs: Tensor  # of the gates, (L, T, n), in 16 bits, in CPU memory
    sliding: list[Slots]  # caches of the layers that slide; they have no gates
    tokens: Tensor  # (R, T'), questions and answers
    right: Tensor  # (R, T') of bool, the answers' tokens


@torch.no_grad()
def learn_from(model, asked) -> Lesson | None:
    """Read the context of `asked`, a context (1, T), tokens and right (R, T').

    Return None if the full cache answers none of the questions.
    """
    device = model.embed.weight.device
    context, tokens, right = (x.to(device) for x in asked)
    T = context.shape[1]
    caches = make_cache(model, Teacher, budget=T)
    prefill(model, context, caches, 128)
    layers = full_layers(caches)
    inputs = torch.cat([layer.notes["inputs"].half() for layer in layers])
    sliding = [layer for layer in caches if layer not in layers]
    lesson = Lesson(inputs, sliding, tokens, right)
    heads = layers[0].k.shape[1]
    everything = torch.ones(1, len(layers), heads, T, device=device)
    some = surprise(model, lesson, everything) < HARD
    if not some.any():
        return None
    return lesson._replace(tokens=tokens[some], right=right[some])


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
    """Return keep (B, L, H, T) from scores s (B, L, H, T); its derivative is at the file's top.

    The first `sinks` and the newest `recent` entries of each head always stay, and at least
    one more on average.
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
    dims = (1, 2, 3)  # all entries of a text
    moved = (slope * s).sum(dims, keepdim=True)
    s = s - moved / slope.sum(dims, keepdim=True)
    return (ranked >= theta).to(s) + slope * (s - s.detach())


def surprise(model, lesson: Lesson, keep: Tensor) -> Tensor:
    """Return each question's mean −log p of its answer, (R,), if `keep` (1, L, H, T) stay."""
    c = model.config
    R = len(lesson.tokens)
    keep = keep.expand(R, -1, -1, -1)
    store = partial(Kept, keep=keep)
    layers = make_cache(model, store=store)
    for layer in copied(lesson.sliding):
        layer.ids = None  # it forgets which tokens it has read
        for name, x in layer.slots.items():
            layer.slots[name] = x.repeat_interleave(R, 0)
        layers[layer.block] = layer
    for layer, x in zip(full_layers(layers), lesson.inputs):
        x = x.to(layer.w_o)
        x = x.unflatten(1, (-1, c.head_dim))
        x = x.transpose(0, 1)
        x = x.expand(R, -1, -1, -1)
        heads = c.n_heads, c.n_kv_heads, c.n_kv_heads
        _, k, v = x.split(heads, 1)
        pos = torch.arange(x.shape[2], device=x.device)[None]
        angles = rope(layer.freq, pos)
        layer.write(rotate(k, *angles), v, pos.expand(R, -1))
    logits = model(lesson.tokens[:, :-1], layers)
    logits = wide(logits).mT  # (R, V, T' − 1)
    following = lesson.tokens[:, 1:]
    right = lesson.right[:, 1:]
    nats = F.cross_entropy(logits, following, reduction="none")
    return (nats * right).sum(1) / right.sum(1)


class EdgedLearner(Learner):
    """Gates that learn, with the edges."""

    def __init__(self, gates: Tensor, edges: Tensor | None, x: Tensor):
        super().__init__(gates, x)
        if edges is None:
            edges = torch.full((2, len(x), gates.shape[2]), 6.0)
        self.edges = nn.Parameter(edges.to(x, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (1, L, H, T) of inputs (L, T, n)."""
        s = super().forward(x).mT
        T = x.shape[1]
        return (s + edged(self.edges, torch.arange(T, device=x.device), T))[None]


def taught(
    model,
    asked: Iterable,
    gates: Tensor,
    edges: Tensor | None = None,
    steps: int = 450,
    rate: float = 0.0015,
    edges_rate: float = 0.05,
    shares: tuple[float, ...] = (1 / 4, 1 / 8, 1 / 16, 1 / 32),
    seed: int = 0,
) -> dict:
    """Return gates (L, n + 1, H), which begin with `gates`, and edges (2, L, H), learned.

    asked: as in `learn_from`, many; ValueError if the full cache answers none. A step takes one
    context and one of `shares`. Adam's rates fall from `rate` and `edges_rate` to 0.
    """
    lessons = []
    for x in tqdm(asked, "lessons", leave=False, disable=None):
        lesson = learn_from(model, x)
        if lesson:
            lessons.append(lesson)
    if not lessons:
        raise ValueError(
            "the full cache answers none of the questions that would teach the gates; take "
            "kvzip_fast, whose gates need none"
        )
    device = model.embed.weight.device
    # examples enough for mean and spread
    x = torch.cat([lesson.inputs for lesson in lessons[::4]], 1)
    learner = EdgedLearner(gates, edges, x.to(device, torch.float))
    slow = dict(params=[learner.W, learner.b])
    fast = dict(params=[learner.edges], lr=edges_rate)
    adam = torch.optim.Adam([slow, fast], rate, betas=(0.9, 0.99))
    falling = torch.optim.lr_scheduler.LinearLR(adam, 1, 0, steps)

    generator = torch.Generator().manual_seed(seed)
    order = []
    for _ in trange(steps, desc="gates", leave=False, disable=None):
        if not order:
            order = torch.randperm(len(lessons), generator=generator).tolist()
        lesson = lessons[order.pop()]
        i = torch.randint(len(shares), (), generator=generator)
        with torch.enable_grad():
            s = learner(lesson.inputs.to(learner.mean))
            keep = chosen(s, shares[i], QuestionGates.sinks, QuestionGates.recent)
            loss = surprise(model, lesson, keep).mean()
        descend(adam, learner, loss)
        falling.step()
    edges = learner.edges.detach()
    return dict(gates=learner.learned().cpu(), edges=edges.cpu())


variants = {"question_gates": QuestionGates}
