"""Play the Index game, which bounds a cache's memory from below (arXiv 2503.11108).

Alice stores bits in a cache, and Bob reads them with queries. A cache that can answer every later
query must hold every bit that a query can ask for (claims T5 to T8, T12).
"""

import copy
import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from methods.baselines.rounded import rounded
from methods.tensor_attention import FactoredFourCache
from nanollm.cache import Slots
from nanollm.model import rope, rope_frequencies, rotate

# ---- keys that stand apart ---


def projected_basis(n: int, d: int, generator: torch.Generator) -> Tensor:
    """Return Johnson-Lindenstrauss projections of e_1 … e_n (Lemma 3.5), (n, d) in float64.

    Their numbers are Gaussian, divided by √d.
    """
    return torch.randn(n, d, dtype=torch.float64, generator=generator) / d**0.5


def distortion(keys: Tensor) -> float:
    """Return ε of Lemma 3.5: how far the products of keys (n, d) are from orthonormal ones."""
    orthonormal = torch.eye(len(keys), dtype=keys.dtype)
    return (keys @ keys.T - orthonormal).abs().max().item()


# ---- the Index game ---


def separation(n: int, eps: float, C: float, four: bool) -> tuple[float, float]:
    """Return the most that Bob reads for a bit 0 and the least for a bit 1.

    They are δ and Δ of Theorems B.1 and B.2. Each of n keys stands in n pairs if there are `four`
    matrices, else in 1. The proof of B.1 leaves out the 2n + 1 pairs with Bob's zero key, of weight
    e⁰ = 1 each, and that of B.2 leaves out Bob's one pair; here they count.
    """
    repeats, nothing = (n, 2 * n + 1) if four else (1, 1)
    own = repeats * math.exp(C * (1 - eps))
    others = repeats * (n - 1) * math.exp(C * eps)
    total = own + others + nothing
    return others / total, own / total


class Game(NamedTuple):
    """Hold what Bob reads, and what he may expect to read."""

    read: Tensor  # (n, d)
    zero: float  # at most this for a bit 0
    one: float  # at least this for a bit 1

    def guesses(self) -> Tensor:
        """Return Bob's guesses of the bits (n, d)."""
        return self.read > (self.zero + self.one) / 2

    def right(self, bits: Tensor) -> float:
        """Return the fraction of Bob's guesses that are right."""
        return (self.guesses() == bits).double().mean().item()


def play(
    cache: Slots,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    C: float | None = None,
    compress=None,
    eta: float = 0.0,
    generator: torch.Generator | None = None,
) -> Game:
    """Let Alice store tokens k, v under keys (n, d), and let Bob ask for each key.

    k and v are (n, d), or (n, 2d) with four matrices. For each key Bob asks in a copy of the cache,
    with a zero token whose query is C · keys[i], times √d if the cache divides by it. C defaults to
    2 ln n. `compress(cache)` is what is done to the cache before Bob gets it. eta: what he reads is
    off by a factor 1 ± η, each by chance (Corollaries 4.4 and 4.5).
    """
    n, d = keys.shape
    four = k.shape[1] == 2 * d
    C = 2 * math.log(n) if C is None else C
    # Alice only writes: she asks for nothing
    cache.write(k[None, None], v[None, None], torch.arange(n)[None])
    if compress:
        compress(cache)

    scale = 1.0 if four else d**0.5  # undoes Slots's 1/√D
    nothing = torch.zeros_like(k[None, None, :1])
    position = torch.tensor([[n]])
    answers = []
    for key in keys:
        query = (C * scale * key).view(1, 1, 1, d)
        answer = copy.deepcopy(cache).attend(query, nothing, nothing, position)
        answers.append(answer.flatten())

    read = torch.stack(answers)
    if eta:
        sign = 2 * torch.randint(0, 2, read.shape, generator=generator) - 1
        read = read * (1 + eta * sign)
    zero, one = separation(n, distortion(keys), C, four)
    return Game(read, zero * (1 + eta), one * (1 - eta))


def index_game_four(
    bits: Tensor,
    keys: Tensor,
    C: float | None = None,
    Cache=FactoredFourCache,
    **how,
) -> Game:
    """Play Theorem 4.1/B.1 with four matrices.

    V₁ are Alice's bits (n, d), K₁ her keys, and K₂ = V₂ = 1.
    """
    ones = torch.ones_like(keys)
    k = torch.cat((keys, ones), 1)
    v = torch.cat((bits.to(keys), ones), 1)
    return play(Cache(scale=1.0), k, v, keys, C, **how)


def deal(n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return Alice's fair random bits (n, d) and her keys (n, d)."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.rand(n, d, generator=generator) < 0.5
    return bits, projected_basis(n, d, generator)


def keep_rows(kept: slice | Tensor, n: int, bits: int | None = None):
    """Return a `compress` that keeps the tokens `kept` of n, with `bits` rounded to that many."""

    def compress(cache: Slots):
        cache.keep(torch.arange(n)[kept][None, None])
        if bits is None:
            return
        for both in cache.k, cache.v:  # two keys, two values, each with a range
            x = both.unflatten(-1, (2, -1))
            x.copy_(rounded(x, bits, -1))

    return compress


# ---- why keys of pairs are not rotated ---


def rotated_scores(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    shift: int,
) -> tuple[float, float]:
    """Return q·k₁ and q·(k₁ ∘ k₂) after RoPE to positions 9, 4, 2, each plus `shift`.

    The vectors are (1, 1, 1, D).
    """
    config = SimpleNamespace(
        head_dim=q.shape[-1],
        rope_theta=10_000.0,
        rope_scaling=None,
    )
    freq = rope_frequencies(config)

    def rotated(x, position):
        return rotate(x, *rope(freq, torch.tensor([position + shift])))

    q = rotated(q, 9)
    k1 = rotated(k1, 4)
    k2 = rotated(k2, 2)
    return (q * k1).sum().item(), (q * k1 * k2).sum().item()
