"""Fast KVzip: gates tell from a token what a second reading would look at (Kim et al., arXiv 2601.17668).

KVzip ranks entries by a second reading of the prompt, which takes longer than the first. But most of what
that finds out can be told from the token itself. So a gate for each head learns KVzip's scores, once for a
decoder. From then on a prompt is read once.

    s_i = σ(x_i W + b),   W, b:  min Σ_i BCE(s_i, S_i),   S_i KVzip's score of entry i
    keep the L·H·b entries with the highest s;   x_i of token i: q, k and v of all heads, before rotation

BCE is the cross-entropy −S log s − (1 − S) log(1 − s): its least is where s is the mean of S.

Differs from the paper: gates there read the hidden state, which no cache is told. Queries, keys and values of
all heads are a linear map of it; where they have as many numbers or more, nothing is lost. There a gate is an
attention of low rank over learned sinks; here one linear map, a logistic regression. There entries also go
while a prompt is read and while tokens come; here at the prompt's end, as in KVzip. As there the newest are
safe, here 8: without them a question at the prompt's end is lost. The authors' code never evicts the system
prompt; NVIDIA/kvpress keeps the first 4 tokens, and so does `sinks` here. (Without them and with a quarter of
the entries, the KL on `learned` is 0.343 in place of 0.083.) Gates, which belong to the decoder, are not
counted in `bytes`. They learn from plain text, without questions or facts. Without gates the newest entries
stay.
"""
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.kvzip import KVzip
from nanollm.cache import LayerCache, make_cache
from nanollm.generate import prefill, reread
from nanollm.measure.tasks import Tasks
from nanollm.model import rope, rotate


def told(cache: LayerCache, q: Tensor) -> Tensor:
    """Of the newest tokens, those of q (B, H·G, T, D): q, k and v of all heads before rotation, (B, T, n)."""
    k, v, at = (x[:, :, -q.shape[2]:] for x in (cache.k, cache.v, cache.pos))
    if cache.freq is not None:  # undo the rotation
        cos, sin = rope(cache.freq, at[:, 0])
        q, k = rotate(q, cos, -sin), rotate(k, cos, -sin)
    return torch.cat((q, k, v), 1).transpose(1, 2).flatten(2).float()


@dataclass(eq=False)
class FastKVzip(KVzip):
    gates: Tensor | None = None  # (L, n + 1, H): of each layer, W and below it b; None: the newest stay
    recent: int = 8              # newest entries of each head that stay, whatever their scores
    sinks: int = 4               # first tokens whose entries stay, in each head
    rereads = 0

    def __post_init__(self):
        super().__post_init__()
        if self.gates is not None and not self.gates.isfinite().all():
            raise ValueError("gates hold NaN or infinite numbers; take those that FastKVzip.calibrate makes")

    def observe(self, q: Tensor, p: Tensor | None):
        if not self.prompt_done:
            x = told(self, q)
            if self.gates is None:
                score = self.pos[:, :, -q.shape[2]:].float()
            elif self.gates.shape != (right := (len(self.model.blocks), x.shape[2] + 1, self.k.shape[1])):
                raise ValueError(f"gates {tuple(self.gates.shape)} must be {right} for this decoder; "
                                 "take those that FastKVzip.calibrate makes for it")
            else:
                *W, b = self.gates[self.layer].to(x).split((x.shape[2], 1))
                score = (x @ W[0] + b).mT  # σ does not change the order
            self.looked = score if self.looked is None else torch.cat((self.looked, score), 2)
        super().observe(q, p)

    @staticmethod
    def calibrate(model, encoding) -> dict:
        """The options that depend on the decoder, as arguments for the constructor."""
        if not hasattr(encoding, "encode_ordinary_batch"):
            raise ValueError("gates are trained on text, which needs a tiktoken tokenizer; "
                             "give FastKVzip its gates instead")
        return dict(gates=fit(*lessons(model, Tasks(encoding, "train"))))


@dataclass(eq=False)
class Teacher(KVzip):
    """KVzip that also remembers what gates are told."""

    def __post_init__(self):
        super().__post_init__()
        self.heard = []

    def observe(self, q: Tensor, p: Tensor | None):
        if not self.rereading:
            self.heard.append(told(self, q).cpu())
        super().observe(q, p)


@torch.no_grad()
def lessons(model, tasks: Tasks, documents: int = 64, T: int = 512, seed: int = 0,
            of: tuple[str, ...] = ("plain",), rows: int = 8) -> tuple[Tensor, Tensor]:
    """What gates are told of all tokens of `documents` of the tasks `of`, (L, tokens, n), and KVzip's scores,
    (L, tokens, H). `rows` documents are read at a time.
    """
    x, y, T = [], [], min(T, (model.config.max_len - 8) // 2)  # it is read twice
    for task in of:
        for text in torch.from_numpy(tasks.batch(task, seed, documents // len(of), T).tokens).split(rows):
            text, caches = text.to(model.embed.weight.device), make_cache(model, Teacher, budget=T)
            prefill(model, text, caches, 64)
            reread(caches, lambda part: prefill(model, text[:, part], caches, 64))
            x.append(torch.stack([torch.cat(cache.heard, 1).flatten(0, 1) for cache in caches]))
            y.append(torch.stack([cache.scores().mT.flatten(0, 1).cpu() for cache in caches]))
    return torch.cat(x, 1), torch.cat(y, 1)


def fit(x: Tensor, y: Tensor, steps: int = 600, rows: int = 512, rate: float = 0.003,
        seed: int = 0) -> Tensor:
    """Gates (L, n + 1, H), from x (L, tokens, n) and KVzip's scores y (L, tokens, H): Adam on their BCE,
    `rows` tokens a step.
    """
    mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-6
    W, b = x.new_zeros(len(x), x.shape[2], y.shape[2]), y.mean(1, keepdim=True).clamp(1e-6, 1 - 1e-6).logit()
    adam = torch.optim.Adam([W.requires_grad_(), b.requires_grad_()], rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        i = torch.randint(x.shape[1], (rows,), generator=generator)
        with torch.enable_grad():
            s = (x[:, i] - mean) / spread @ W + b
            loss = F.binary_cross_entropy_with_logits(s, y[:, i])
            W.grad, b.grad = torch.autograd.grad(loss, (W, b))
        adam.step()
    W = W.detach() / spread.mT
    return torch.cat((W, b.detach() - mean @ W), 1)


variants = {"kvzip_fast": FastKVzip}
