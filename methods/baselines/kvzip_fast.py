"""Fast KVzip: gates predict KVzip's scores in the first pass (Kim et al., arXiv 2601.17668).

KVzip's reread takes longer than the first pass (4096 tokens of SmolLM2, on one CPU). So each head
has a gate, which learns once for a decoder to predict KVzip's scores from the token. After that a
prompt is read only once.

    s_i = σ(x_i W + b),   W, b:  min Σ_i BCE(s_i, S_i),   S_i KVzip's score of entry i
    keep the L·H·b entries with the highest s
    x_i of token i: q, k and v of all heads, before rotation

BCE is the cross-entropy −S log s − (1 − S) log(1 − s). It is smallest if s is the mean of S.

Differs from the paper:
- There a gate reads the hidden state, which a cache does not receive. Here it reads the queries,
  keys and values of all heads. In most models these are a linear map of the state, up to a bias; as
  a rule nothing is lost if they have at least as many numbers. Where queries and keys are
  normalised (Qwen3) they are not.
- There a gate is a low-rank attention over learned sinks; here it is one linear map, a logistic
  regression.
- There entries are also evicted while the prompt is read and during decoding; here at the prompt's
  end, as in KVzip, or while it is read, by `prefill_evicting` (nanollm/generate.py).
- The newest entries stay, as in the paper; here 8. Without them a question at the end may be lost.
- The authors' code never evicts the system prompt; NVIDIA/kvpress keeps the first 4 tokens. Here
  `sinks` keeps the first 4, because *learned* and SmolLM2 have attention sinks there.
- As there, the gates learn from plain text, without questions.

The gates belong to the decoder, so `bytes` does not count them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
import torch.nn.functional as F
from tqdm import tqdm

from methods.baselines.kvzip import KVzip
from nanollm.cache import Slots, full_layers, make_cache, rereading
from nanollm.generate import prefill
from nanollm.model import rope, rotate


def gate_inputs(layer: Slots, q: Tensor) -> Tensor:
    """Return x, (B, T, n): q, k and v of all heads before rotation, of the T newest tokens.

    q (B, H·G, T, D) are their queries; keys and values come from the cache.
    """
    T = q.shape[2]
    k = layer.k[:, :, -T:]
    v = layer.v[:, :, -T:]
    cos, sin = rope(layer.freq, layer.pos[:, 0, -T:])
    q = rotate(q, cos, -sin)  # undo the rotation
    k = rotate(k, cos, -sin)
    return torch.cat((q, k, v), 1).transpose(1, 2).flatten(2).float()


@dataclass
class FastKVzip(KVzip):
    # (L, n + 1, H): per layer W, then b as the last row; `calibrate` makes them
    gates: Tensor | None = None
    recent: int = 8  # newest entries of each head, which stay whatever their scores
    sinks: int = 4  # first entries of each head, which stay whatever their scores

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        if self.gates is None:
            raise ValueError(
                f"{name} needs gates; give those that {name}.calibrate makes"
            )
        if not self.gates.isfinite().all():
            raise ValueError(
                f"gates contain NaN or infinite numbers; use those that {name}.calibrate makes"
            )

    def observe(self, layer: Slots, q: Tensor, p: Tensor | None):
        if layer.prompt_done:
            return
        x = gate_inputs(layer, q)
        right = layer.of, x.shape[2] + 1, layer.k.shape[1]
        if self.gates.shape != right:
            raise ValueError(
                f"gates {tuple(self.gates.shape)} must be {right} for this decoder; "
                "use those that FastKVzip.calibrate makes for it"
            )
        W, b = self.gates[layer.index].to(x).split((x.shape[2], 1))
        score = (x @ W + b[0]).mT  # without σ, which does not change the order
        earlier = [layer.notes["score"]] if "score" in layer.notes else []
        layer.notes["score"] = torch.cat((*earlier, score), 2)

    def scores(self, model, tokens: Tensor, layers: list[Slots]) -> list[Tensor]:
        """Return the scores from the first pass, (B, H, S) each; nothing is read again."""
        T = tokens.shape[1]
        if layers[0].notes["score"].shape[2] < T:
            raise ValueError(
                "FastKVzip has forgotten the scores of earlier turns; compress once, or use KVzip"
            )
        return [
            # of each slot's token; an empty slot's NEVER would be too large an index
            layer.notes["score"].gather(2, layer.pos.clamp(max=T - 1).long())
            for layer in layers
        ]

    @staticmethod
    def calibrate(model, tasks) -> dict:
        """Return the options that depend on the decoder. tasks: `Tasks` of the training text."""
        return dict(gates=fit(*lessons(model, tasks)))


class Teacher(KVzip):
    """KVzip that also notes the gates' inputs, (B, prompt's tokens so far, n), in CPU memory."""

    def observe(self, layer: Slots, q: Tensor, p: Tensor | None):
        earlier = [layer.notes["inputs"]] if "inputs" in layer.notes else []
        layer.notes["inputs"] = torch.cat((*earlier, gate_inputs(layer, q).cpu()), 1)


@torch.no_grad()
def lessons(
    model,
    tasks,
    documents: int = 64,
    T: int = 512,
    seed: int = 0,
    rows: int = 8,
) -> tuple[Tensor, Tensor]:
    """Return the training data: the gates' inputs (L, tokens, n) and KVzip's scores (L, tokens, H).

    They are of all tokens of `documents` plain texts, of which `rows` are read at a time.
    """
    # half of max_len: a document is read twice
    T = min(T, (model.config.max_len - 8) // 2)
    device = model.embed.weight.device
    x = []
    y = []
    batch = tasks.batch("plain", seed, documents, T)
    parts = torch.from_numpy(batch.tokens).split(rows)
    for text in tqdm(parts, "lessons of the gates", leave=False, disable=None):
        text = text.to(device)
        caches = make_cache(model, Teacher, budget=T)
        prefill(model, text, caches, 64)
        layers = full_layers(caches)
        again = rereading(model, caches)
        scores = layers[0].method.scores(again, text, layers)
        x.append(torch.stack([layer.notes["inputs"].flatten(0, 1) for layer in layers]))
        y.append(torch.stack([score.mT.flatten(0, 1).cpu() for score in scores]))
    return torch.cat(x, 1), torch.cat(y, 1)


class Learner(nn.Module):
    """Gates that learn. Inside, their inputs have mean 0 and spread 1."""

    def __init__(self, gates: Tensor, x: Tensor):
        """gates (L, n + 1, H): to begin with. x (L, tokens, n): examples of their inputs."""
        super().__init__()
        self.mean = x.mean(1, keepdim=True)
        self.spread = x.std(1, keepdim=True) + 1e-6
        W, b = gates.to(x).split((x.shape[2], 1), 1)
        self.W = nn.Parameter(W * self.spread.mT)
        self.b = nn.Parameter(b + self.mean @ W)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (L, T, H), without σ, of inputs (L, T, n)."""
        return (x - self.mean) / self.spread @ self.W + self.b

    def learned(self) -> Tensor:
        """Return the gates (L, n + 1, H)."""
        W = self.W.detach() / self.spread.mT
        return torch.cat((W, self.b.detach() - self.mean @ W), 1)


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
    # begin with the mean score of each head
    W = x.new_zeros(len(x), x.shape[2], y.shape[2])
    b = y.mean(1, keepdim=True).clamp(1e-6, 1 - 1e-6).logit()
    learner = Learner(torch.cat((W, b), 1), x)
    adam = torch.optim.Adam(learner.parameters(), rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        i = torch.randint(x.shape[1], (rows,), generator=generator)
        with torch.enable_grad():
            s = learner(x[:, i])
            loss = F.binary_cross_entropy_with_logits(s, y[:, i])
        descend(adam, learner, loss)
    return learner.learned()


def descend(adam: torch.optim.Adam, learner: Learner, loss: Tensor):
    """Take a step. The decoder gets no gradients."""
    parameters = [*learner.parameters()]
    grads = torch.autograd.grad(loss, parameters)
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad
    adam.step()


variants = {"kvzip_fast": FastKVzip}
