"""Attention matching: fit the kept entries so that attention stays as it was (arXiv 2602.16284).

Eviction leaves fewer entries, unchanged. Here they are changed afterwards: each kept key gets a bias b and a
new value v′. For reference queries, attention to the kept entries K shall have the mass and the output of
attention to all n entries of the prompt. With E_tj = e^{q_t·k_j/√D}:

    mass:    Σ_{j ∈ K} E_tj w_j ≈ Σ_{j ≤ n} E_tj,  w ≥ 0,  b = ln w       non-negative least squares
    output:  Σ_{j ∈ K} p_tj v′_j ≈ y_t,   p_tj ∝ E_tj w_j                 least squares

KVzip chooses the entries, and its reread gives the queries. Each head of each text is fitted by itself, in 64
bits.

Differs from the paper: rows of the first fit are divided by their mass, so that relative errors count.

A more careful fit: methods/ours/careful_matching.py.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.kvzip import KVzip

LEAST = 1e-3  # smallest w; its logarithm must be finite


def nnls(A: Tensor, y: Tensor, steps: int = 300) -> Tensor:
    """Return w ≥ 0 with small ‖A w − y‖ for A ≥ 0, by accelerated projected gradients, beginning at 1."""
    G, c = A.mT @ A, A.mT @ y
    largest = G.sum(1).amax().clamp(min=1e-9)  # at least the largest eigenvalue, as A ≥ 0
    w = z = torch.ones_like(c)
    t = 1.0
    for _ in range(steps):
        new, after = (z - (G @ z - c) / largest).clamp(min=0), (1 + (1 + 4 * t * t) ** 0.5) / 2
        z, w, t = new + (t - 1) / after * (new - w), new, after
    return w


def fitted(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, weight: Tensor, careful: bool,
           ridge: float) -> tuple[Tensor, Tensor]:
    """Return bias (m,) and values (m, D) of the kept entries of one head.

    q (N, D): reference queries. k, v (n, D): all entries. kept (m,): indices. weight (N,): how much each
    query counts.
    """
    q, k, v, weight = (x.double() for x in (q, k, v, weight))
    score = q @ k.mT * q.shape[1] ** -0.5
    E = (score - score.amax(1, keepdim=True)).exp()
    mass, y, left = E.sum(1), E @ v / E.sum(1, keepdim=True), E[:, kept]
    root, w = weight.sqrt(), torch.ones(len(kept), dtype=E.dtype, device=E.device)
    if careful:
        root = root * left.sum(1) / mass
    else:
        w = nnls(left / mass[:, None] * root[:, None], root).clamp(min=LEAST)
    p = left * w
    p = p / p.sum(1, keepdim=True).clamp(min=1e-30)
    A, missing = p * root[:, None], (y - p @ v[kept]) * root[:, None]
    G = A.mT @ A + ridge * torch.eye(len(kept), dtype=E.dtype, device=E.device)
    return w.log(), v[kept] + torch.linalg.solve(G, A.mT @ missing)


@dataclass(eq=False)
class AttentionMatching(KVzip):
    ridge: float = 1e-3  # pull of each value towards what it was
    careful = False

    def __post_init__(self):
        super().__post_init__()
        if not self.ridge > 0:
            raise ValueError(f"ridge {self.ridge} must be above 0")
        self.asked: list[tuple[Tensor, Tensor]] = []  # the reread's queries (B, H·G, T, D), weights (B, T)

    def look_at_own(self, q: Tensor):
        super().look_at_own(q)
        self.asked.append((q, self.weights(q)))

    def weights(self, q: Tensor) -> Tensor:
        return q.new_ones(len(q), q.shape[2])

    def keep(self, i: Tensor):
        k, v = self.k, self.v
        super().keep(i)
        if not self.asked:
            raise ValueError("attention matching has no queries to fit to; reread the prompt with this cache")
        q, weight = (torch.cat(x, dim) for x, dim in zip(zip(*self.asked), (2, 1)))
        q, self.asked = q.unflatten(1, (k.shape[1], -1)), []
        bias, values = torch.zeros_like(self.pos, dtype=torch.float32), self.v.clone()
        for row in range(len(k)):
            for head in range(k.shape[1]):
                there = i[row, head] >= 0
                kept = i[row, head][there]
                if 0 < len(kept) < k.shape[2]:
                    new = fitted(q[row, head].flatten(0, 1), k[row, head], v[row, head], kept,
                                 weight[row].repeat(q.shape[2]), self.careful, self.ridge)
                    for x, y in zip((bias, values), new):
                        x[row, head, there] = y.to(x)
        self.slots |= dict(v=values) if self.careful else dict(v=values, bias=bias)

    def beside(self) -> list[Tensor]:
        return super().beside() + [q for q, _ in self.asked]


variants = {"attention_matching": AttentionMatching}
