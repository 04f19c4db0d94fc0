"""Fast KVzip: gates predict KVzip's scores from the token alone (Kim et al., arXiv 2601.17668).

KVzip's reread takes longer than the first pass. But most of its scores can be predicted from the
token itself. So each head has a gate, which learns KVzip's scores once for a decoder. After that a
prompt is read only once.

    s_i = σ(x_i W + b),   W, b:  min Σ_i BCE(s_i, S_i),   S_i KVzip's score of entry i
    keep the L·H·b entries with the highest s;   x_i of token i: q, k and v of all heads, before rotation

BCE is the cross-entropy −S log s − (1 − S) log(1 − s). It is smallest if s is the mean of S.

Differs from the paper:
- There a gate reads the hidden state, which a cache does not receive. Here it reads the queries,
  keys and values of all heads, a linear map of it. If they have at least as many numbers, nothing
  is lost.
- There a gate is a low-rank attention over learned sinks; here it is one linear map, a logistic
  regression.
- There entries are also evicted while the prompt is read and during decoding; here only at the
  prompt's end, as in KVzip.
- The newest entries stay, as in the paper; here 8. Without them a question at the end is lost.
- The authors' code never evicts the system prompt; NVIDIA/kvpress keeps the first 4 tokens. Here
  `sinks` keeps the first 4, because attention sinks are there on *learned* and on SmolLM2.
- The gates learn from plain text, without questions or facts.

The gates belong to the decoder, so `bytes` does not count them. Without gates the newest entries
stay.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import tqdm

from methods.baselines.kvzip import KVzip
from nanollm.cache import LayerCache, make_cache
from nanollm.generate import prefill
from nanollm.model import rope, rotate


def gate_inputs(cache: LayerCache, q: Tensor) -> Tensor:
    """Return x, (B, T, n): q, k and v of all heads before rotation, of the T newest tokens.

    q (B, H·G, T, D) are their queries; keys and values come from the cache.
    """
    k, v, pos = (x[:, :, -q.shape[2] :] for x in (cache.k, cache.v, cache.pos))
    cos, sin = rope(cache.freq, pos[:, 0])  # undo the rotation
    q, k = rotate(q, cos, -sin), rotate(k, cos, -sin)
    return torch.cat((q, k, v), 1).transpose(1, 2).flatten(2).float()


@dataclass(eq=False)
class FastKVzip(KVzip):
    # (L, n + 1, H): per layer W, then b as the last row; None: the newest stay
    gates: Tensor | None = None
    # newest entries of each head, which stay whatever their scores
    recent: int = 8
    # first entries of each head, which stay whatever their scores
    sinks: int = 4

    def __post_init__(self):
        super().__post_init__()
        self.entry_scores = None  # s, (B, H, tokens of the prompt so far)
        if self.gates is not None and not self.gates.isfinite().all():
            raise ValueError(
                "gates contain NaN or infinite numbers; "
                "use those that FastKVzip.calibrate makes"
            )

    def link(self, model, layer: int):
        super().link(model, layer)
        if self.freq is None:
            raise ValueError(
                "FastKVzip undoes the keys' rotation, and this model's is not known; use KVzip"
            )

    def observe(self, q: Tensor, p: Tensor | None):
        if not self.prompt_done:
            x = gate_inputs(self, q)
            if self.gates is None:
                score = self.pos[:, :, -q.shape[2] :].float()
            elif self.gates.shape != (
                right := (len(self.model.blocks), x.shape[2] + 1, self.k.shape[1])
            ):
                raise ValueError(
                    f"gates {tuple(self.gates.shape)} must be {right} for this decoder; "
                    "use those that FastKVzip.calibrate makes for it"
                )
            else:
                *W, b = self.gates[self.layer].to(x).split((x.shape[2], 1))
                score = (x @ W[0] + b).mT  # without σ, which does not change the order
            before = [] if self.entry_scores is None else [self.entry_scores]
            self.entry_scores = torch.cat((*before, score), 2)
        super().observe(q, p)

    def crop(self, n: int):
        super().crop(n)
        if self.entry_scores is not None:
            self.entry_scores = self.entry_scores[:, :, :n]

    @classmethod
    def scores(cls, model, tokens: Tensor, caches: list["FastKVzip"]) -> list[Tensor]:
        """Return the scores from the first pass; nothing is read again."""
        if caches[0].entry_scores.shape[2] < tokens.shape[1]:
            raise ValueError(
                "FastKVzip has forgotten the scores of earlier turns; compress once, "
                "or use KVzip"
            )
        return [cache.entry_scores for cache in caches]

    def forget_prompt(self):
        self.entry_scores = None

    def beside(self) -> list[Tensor]:
        return super().beside() + (
            [] if self.entry_scores is None else [self.entry_scores]
        )

    @staticmethod
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the decoder. tasks: `lab.tasks.Tasks` of the training text."""
        return dict(gates=fit(*lessons(model, tasks)))


@dataclass(eq=False)
class Teacher(KVzip):
    """KVzip that also records the gates' inputs."""

    def __post_init__(self):
        super().__post_init__()
        self.inputs = []  # one tensor per piece of the prompt

    def observe(self, q: Tensor, p: Tensor | None):
        self.inputs.append(gate_inputs(self, q).cpu())
        super().observe(q, p)


@torch.no_grad()
def lessons(
    model,
    tasks,
    documents: int = 64,
    T: int = 512,
    seed: int = 0,
    task_names: tuple[str, ...] = ("plain",),
    rows: int = 8,
) -> tuple[Tensor, Tensor]:
    """Return the training data: the gates' inputs (L, tokens, n) and KVzip's scores (L, tokens, H).

    They are of all tokens of `documents` documents, divided evenly among `task_names`. `rows`
    documents are read at a time.
    """
    # half of max_len: a document is read twice
    x, y, T = [], [], min(T, (model.config.max_len - 8) // 2)
    for task in task_names:
        batch = tasks.batch(task, seed, documents // len(task_names), T)
        parts = torch.from_numpy(batch.tokens).split(rows)
        for text in tqdm(parts, "lessons of the gates", leave=False, disable=None):
            text, caches = (
                text.to(model.embed.weight.device),
                make_cache(model, Teacher, budget=T),
            )
            prefill(model, text, caches, 64)
            x.append(
                torch.stack(
                    [torch.cat(cache.inputs, 1).flatten(0, 1) for cache in caches]
                )
            )
            scores = KVzip.scores(model, text, caches)
            y.append(torch.stack([x.mT.flatten(0, 1).cpu() for x in scores]))
    return torch.cat(x, 1), torch.cat(y, 1)


def fit(
    x: Tensor,
    y: Tensor,
    steps: int = 600,
    rows: int = 512,
    rate: float = 0.003,
    seed: int = 0,
) -> Tensor:
    """Return gates (L, n + 1, H) trained on x (L, tokens, n) and KVzip's scores y (L, tokens, H).

    Adam minimises the BCE, with `rows` random tokens per step.
    """
    mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-6
    W, b = (
        x.new_zeros(len(x), x.shape[2], y.shape[2]),
        y.mean(1, keepdim=True).clamp(1e-6, 1 - 1e-6).logit(),
    )
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
