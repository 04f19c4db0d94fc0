"""Coordinates of a token's keys and values that are uncorrelated, and in which all errors cost the same.

The keys and values of a token come from one hidden state, so they depend on each other. And many errors in
them never reach a score. So all keys and values of a token in a layer (H heads of D numbers each), 2HD
numbers x, are coded together:

    z = Uᵀ M^½ (x − μ),   x = μ + M^-½ U z

μ is the mean of x. M says what an error costs. For a key Δkᵀ M Δk is Δkᵀ E[q qᵀ] Δk / (D · KEY_STEP²), with q
the queries of later questions; for a value it is ‖W_O Δv‖² / VALUE_STEP². So if z is rounded to whole
numbers, an error costs the same in any direction. U holds the eigenvectors of the covariance of M^½ x (the
Karhunen-Loève transform).

Keys are stored rotated by their positions (RoPE). They are turned back first, because only then do the keys
of different positions share one covariance. M, μ, U and the spread (standard deviation) of each coordinate
belong to the decoder. They are measured on the training text: on the tokens that stay in 32 documents, and on
all tokens of the first document, because a layer may keep none.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.ours.kvzip_gain import GainKVzip
from nanollm.cache import NEVER, make_cache
from nanollm.generate import end_prompt, prefill
from nanollm.model import rope, rotate

KEY_STEP = 1 / 4  # error of an attention score that costs 1
VALUE_STEP = 1.5  # error, as a length in the residual stream, of a value with attention 1 that costs 1


@dataclass(eq=False)
class TokenGainKVzip(GainKVzip):
    """GainKVzip that keeps a token in all heads of a layer or in none, by its highest score in a head."""
    least: float = 0.0  # lowest score that stays, in nats; the budget is then an upper bound
    always, packs = True, True

    def scores(self) -> Tensor:
        score = super().scores().amax(1, keepdim=True)
        return score.masked_fill(score < self.least, -torch.inf)

    def keep(self, i: Tensor):
        super().keep(i.expand(-1, self.k.shape[1], -1))

    def turned(self, x: Tensor, pos: Tensor, back: bool = False) -> Tensor:
        """Rotate x (B, heads, n, D) to positions pos (B, n), or from there back to position 0."""
        if self.freq is None:
            return x
        cos, sin = rope(self.freq, pos)
        return rotate(x, cos, -sin if back else sin)

    def vectors(self) -> Tensor:
        """Return each token's keys, turned back, and values, (B, n, N) with N = 2HD."""
        k = self.turned(self.k, self.pos[:, 0], back=True)
        return torch.cat((k, self.v), 1).transpose(1, 2).flatten(2)


@dataclass(eq=False)
class Watched(TokenGainKVzip):
    """TokenGainKVzip that records what it keeps, and the queries after the prompt."""
    budget: int = 38  # a twelfth of the documents' tokens

    def end_prefill(self):
        self.kept = self.vectors()[0]
        super().end_prefill()

    def pack(self):
        self.kept = torch.cat((self.kept, self.vectors()[self.pos[:, 0] != NEVER]))
        super().pack()

    def observe(self, q: Tensor, p: Tensor | None):
        self.q = q
        super().observe(q, p)


@torch.no_grad()
def watched(model, tasks, Cache=Watched, documents: int = 32, T: int = 512, seed: int = 0) -> list[Watched]:
    """Return the caches of documents of T tokens with facts, and of questions about them."""
    batch = tasks.batch("turns", seed, documents, min(T, model.config.max_len // 2))
    tokens = torch.from_numpy(batch.tokens).to(model.embed.weight.device)
    text, later = tokens.tensor_split([batch.question], 1)
    caches = make_cache(model, Cache)
    prefill(model, text, caches)
    end_prompt(model, text, caches)
    model(later, caches)
    return caches


def measured(model, tasks, Cache=Watched, **options) -> Tensor:
    """Return the bases (L, 2N + 2, N) of a decoder; options as in `watched`."""
    caches = watched(model, tasks, Cache, **options)
    return torch.stack([basis(cache.kept, metric(cache)) for cache in caches])


def metric(cache: Watched) -> Tensor:
    """Return M of each head's key, then of each head's value, (2H, D, D)."""
    H, q = cache.k.shape[1], cache.q.repeat(8, 1, 1, 1)
    places = torch.randint(cache.seen - q.shape[2], (len(q), q.shape[2]),
                           generator=torch.Generator().manual_seed(0)).to(q.device)
    q = cache.turned(q, places, back=True)  # (R_t q)·(R_i k) = (R_-i R_t q)·k, for any place i of k
    q, w = (y.double().unflatten(1, (H, -1)).movedim(1, 0).flatten(1, -2) for y in (q, cache.w_o))
    key = q.mT @ q / (q.shape[1] * q.shape[2] * KEY_STEP ** 2)
    value = w.mT @ w * H / (cache.w_o.shape[1] * VALUE_STEP ** 2)
    return torch.cat((key, value))


def basis(x: Tensor, M: Tensor) -> Tensor:
    """Return the basis (2N + 2, N) of vectors x (n, N) with a metric M (N/D, D, D) of blocks."""
    cost, turn = torch.linalg.eigh(M)
    cost = (cost + 1e-3 * cost.mean(-1, keepdim=True)).sqrt().unsqueeze(1)
    root, inverse = (torch.block_diag(*turn * y @ turn.mT) for y in (cost, 1 / cost))
    x, mean = x.double(), x.double().mean(0, keepdim=True)
    variance, U = torch.linalg.eigh(((x - mean) @ root).mT.cov())
    return torch.cat((root @ U, U.mT @ inverse, mean, variance.clamp(min=0).sqrt()[None])).float()


variants = {}  # not a method: kvzip_gain_coded stores what it keeps in these coordinates
