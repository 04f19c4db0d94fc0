"""Tensor attention with two or four cache matrices (Chen et al., arXiv 2503.11108).

A token has two keys and two values, and a query attends to *pairs* of tokens: all i² of them at step i.

    out = (V₁ ⊘ V₂)ᵀ softmax((K₁ ⊘ K₂) q),   row (a, b) of K₁ ⊘ K₂ is k_{1,a} ∘ k_{2,b}

Four matrices of i·D numbers can be cached and the pairs formed at each step (`FourCache`), or the two matrices of pairs,
i²·D numbers each (`TwoCache`); the paper finds a trade-off of time against memory. But the pairs need never be formed:

    score of (a, b) = Σ_j k_{1,a,j} q_j k_{2,b,j},  so all of them are (K₁ ∘ q) K₂ᵀ,  and out_j = Σ_a V₁[a, j] (P V₂)[a, j]

which is one small matrix product each (`FactoredFourCache`): the memory of the four, and less time than the two.

Differs from the paper: scores are scaled by 1/√D as in the decoder; the paper has no scale (`scale=1`). Beyond it: the
factored form, in tiles of pairs with an online softmax, so that no more than a tile of the i² scores is held at once.
"""
import copy
from dataclasses import dataclass
import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import tqdm

from nanollm.cache import LayerCache, kernel_for
from nanollm.model import Config, Decoder
from nanollm.speed import Count, best


def pairs(x: Tensor, y: Tensor) -> Tensor:
    """x ⊘ y (Def. 3.1, in the order of Def. 3.6): (..., n, D) and (..., m, D) → (..., n·m, D), row a·m + b is x_a ∘ y_b."""
    return (x.unsqueeze(-2) * y.unsqueeze(-3)).flatten(-3, -2)


def tensor_attention(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor) -> Tensor:
    """Def. 3.6: (V₁ ⊘ V₂)ᵀ softmax((K₁ ⊘ K₂) q); q (..., T, D), the others (..., n, D) → (..., T, D). Every query sees all."""
    return (q @ pairs(k1, k2).mT).softmax(-1) @ pairs(v1, v2)


# ---- 1. three caches, one interface: that of LayerCache, with k = [k₁ | k₂] and v = [v₁ | v₂], each (B, H, T, 2D) ----


@dataclass(eq=False)
class FourCache(LayerCache):
    """Def. 3.7: caches K₁, K₂, V₁, V₂, 4·i·D numbers, and forms the pairs for each query, as described."""
    vectors = 2
    scale: float | None = None  # of the scores; None: 1/√D, as in the decoder; the paper has 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q (B, H·G, T, D), k and v (B, H, T, 2D) → (B, H·G, T, D). A pair is seen by queries from its later token on."""
        self.check(q, k, v, pos)
        B, heads, T, D = q.shape
        self.write(k, v, pos)
        q = q.view(B, k.shape[1], -1, T, D) * (D ** -0.5 if self.scale is None else self.scale)
        outputs = []
        for t in range(T):
            n = self.length - T + t + 1
            k1, k2, v1, v2 = (x for both in (self.k, self.v) for x in both[:, :, :n].chunk(2, -1))
            outputs.append(self.one_query(q[:, :, :, t], k1, k2, v1, v2).flatten(1, 2))
        return torch.stack(outputs, 2)

    def one_query(self, q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor) -> Tensor:
        """q (B, H, G, D) over n tokens, the others (B, H, n, D) → (B, H, G, D)."""
        return tensor_attention(q, k1, k2, v1, v2)


@dataclass(eq=False)
class FactoredFourCache(FourCache):
    """The same four matrices, and no pair is ever formed."""
    tile: int = 2 ** 18  # pairs per tile, query and head, at most (but at least one row): in float32 a MiB of scores

    def __post_init__(self):
        super().__post_init__()
        if self.tile < 1:
            raise ValueError(f"tile {self.tile} must be at least 1 pair")

    def one_query(self, q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor) -> Tensor:
        if fast := kernel_for(q, "tensor_attention"):
            return fast(q, k1, k2, v1, v2, scale=1.0)
        # online softmax over tiles of rows a (Milakov and Gimelshein, arXiv 1805.02867)
        top, total, out = q.new_full((*q.shape[:-1], 1), -math.inf), 0.0, 0.0
        rows = max(1, self.tile // k2.shape[2])
        for a, b in zip(k1.split(rows, 2), v1.split(rows, 2)):
            split = q.shape[2], a.shape[2]                                            # G, rows: one matrix for all of them
            score = ((a.unsqueeze(2) * q.unsqueeze(3)).flatten(2, 3) @ k2.mT).unflatten(2, split)  # (K₁ ∘ q) K₂ᵀ
            new = torch.maximum(top, score.amax((-2, -1)).unsqueeze(-1))
            p, keep = (score - new.unsqueeze(-1)).exp_(), (top - new).exp()
            out = out * keep + (b.unsqueeze(2) * (p.flatten(2, 3) @ v2).unflatten(2, split)).sum(3)  # Σ_a V₁[a] ∘ (P V₂)[a]
            total = total * keep + p.sum((-2, -1)).unsqueeze(-1)
            top = new
        return out / total


@dataclass(eq=False)
class TwoCache(LayerCache):
    """Def. 3.8: caches the pairs, 2·i²·D numbers; token i adds 2i − 1 of them, appended in the order they come.

    To form them it needs every earlier k₁, k₂, v₁, v₂ as well, so it holds the four matrices too (`tokens`).
    """
    vectors = 2
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        self.tokens = LayerCache()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """As in FourCache: pairs are slots like any others, as late as their later token."""
        return super().attend(q if self.scale is None else q * (self.scale * q.shape[-1] ** 0.5), k, v, pos)

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        T = k.shape[2]
        self.tokens.write(k, v, pos)
        for t in range(T):
            n = self.tokens.length - T + t + 1
            new = [torch.cat((pairs(x[:, :, :n], y[:, :, n - 1:n]), pairs(x[:, :, n - 1:n], y[:, :, :n - 1])), 2)
                   for x, y in (self.tokens.k.chunk(2, -1), self.tokens.v.chunk(2, -1))]
            super().write(*new, pos[:, t:t + 1].expand(-1, 2 * n - 1))
        self.seen = self.tokens.seen

    def bytes(self) -> tuple[int, int]:
        return tuple(pair + token for pair, token in zip(super().bytes(), self.tokens.bytes()))


# ---- 2. the lower bounds as games: whoever must answer any later query has to hold all bits ----------------------


def projected_basis(n: int, d: int, generator: torch.Generator) -> Tensor:
    """The Johnson-Lindenstrauss projections of e_1 … e_n (Lemma 3.5), rows of (n, d), float64: S = R/√d, R Gaussian."""
    return torch.randn(n, d, dtype=torch.float64, generator=generator) / d ** 0.5


def spread_out(n: int, d: int, most: float, generator: torch.Generator) -> tuple[Tensor, float]:
    """n unit vectors (n, d), float64, drawn until no two have a cosine above `most`, and the largest cosine of two.

    Where a random projection is too crowded these keys still serve: with C = ln(4n)/(1 − cosine) every other key weighs less
    than 1/4n of Bob's own. Some e^d of them fit if most² = 1 − 1/e², so most = 0.93 (Gilbert and Varshamov).
    """
    keys = torch.empty(0, d, dtype=torch.float64)
    for _ in range(1000 * n):
        key = F.normalize(torch.randn(1, d, dtype=torch.float64, generator=generator), dim=1)
        if not len(keys) or (keys @ key.T).max() <= most:
            keys = torch.cat((keys, key))
        if len(keys) == n:
            return keys, (keys @ keys.T - 2 * torch.eye(n)).max().item()
    raise ValueError(f"{n} unit vectors of {d} dimensions with cosines up to {most} were not found; allow larger ones")


def distortion(keys: Tensor) -> float:
    """The ε of Lemma 3.5: how far the inner products of the rows (n, d) are from those of an orthonormal basis, at most."""
    return (keys @ keys.T - torch.eye(len(keys), dtype=keys.dtype)).abs().max().item()


def separation(n: int, eps: float, C: float, four: bool) -> tuple[float, float]:
    """At most this much is read where a bit is 0, and at least this much where it is 1 (δ and Δ of Theorems B.1 and B.2).

    Each of n keys stands in n pairs if there are `four` matrices, else in 1. The proof of the former leaves out the 2n + 1
    pairs with Bob's zero key, of weight e⁰ = 1 each, and the latter Bob's one; they are counted here.
    """
    repeats, nothing = (n, 2 * n + 1) if four else (1, 1)
    own, others = repeats * math.exp(C * (1 - eps)), repeats * (n - 1) * math.exp(C * eps)
    return others / (own + others + nothing), own / (own + others + nothing)


class Game(NamedTuple):
    """What Bob reads, (n, d), and what he may expect of a 0 (at most `zero`) and of a 1 (at least `one`)."""
    read: Tensor
    zero: float
    one: float

    def guesses(self) -> Tensor:
        return self.read > (self.zero + self.one) / 2


def learned(game: Game, bits: Tensor) -> float:
    """How many of the bits (n, d) his guesses tell Bob: d(1 − h(a)) of a row of which the share a is right, h the binary entropy.

    An estimate, too high by about 0.7 bits a row. Readings may tell more than guesses: where keys blur, n of them are n
    equations for n bits.
    """
    right = (game.guesses() == bits).double().mean(1)
    entropy = -(torch.special.xlogy(right, right) + torch.special.xlog1py(1 - right, -right)) / math.log(2)
    return bits.shape[1] * (1 - entropy).sum().item()


def play(cache: LayerCache, k: Tensor, v: Tensor, keys: Tensor, C: float | None = None, compress=None,
         eta: float = 0.0, generator: torch.Generator | None = None) -> Game:
    """Alice stores n tokens k, v (n, vectors · d) under her keys (n, d); Bob asks for each of her rows, each time in a copy
    of the cache, with a zero token whose query is C · k_i. The `vectors` of a token are 2 with four cache matrices, else 1.

    C defaults to 2 ln n. `compress(cache)` is what is done to the cache before Bob gets it. eta: what he reads is off by a
    factor 1 ± η, each by chance (Corollaries 4.4 and 4.5).
    """
    n, d = keys.shape
    four = k.shape[1] == 2 * d
    C = 2 * math.log(n) if C is None else C
    cache.write(k[None, None], v[None, None], torch.arange(n)[None])  # her queries are zero and ask for nothing
    if compress:
        compress(cache)
    zero, one = separation(n, distortion(keys), C, four)
    scale = 1.0 if four else d ** 0.5  # undoes LayerCache's 1/√D
    nothing, read = torch.zeros_like(k[None, None, :1]), []
    for key in keys:
        query = (C * scale * key).view(1, 1, 1, d)
        read.append(copy.deepcopy(cache).attend(query, nothing, nothing, torch.tensor([[n]])).flatten())
    read = torch.stack(read)
    if eta:
        read = read * (1 + eta * (2 * torch.randint(0, 2, read.shape, generator=generator) - 1))
    return Game(read, zero * (1 + eta), one * (1 - eta))


def index_game_four(bits: Tensor, keys: Tensor, C: float | None = None, Cache=FactoredFourCache, **how) -> Game:
    """Theorem 4.1/B.1: Alice stores bits (n, d) in four matrices: k₁ = her keys, v₁ = the bits, k₂ = v₂ = 1. The rest as in
    `play`."""
    ones = torch.ones_like(keys)
    return play(Cache(scale=1.0), torch.cat((keys, ones), 1), torch.cat((bits.to(keys), ones), 1), keys, C, **how)


def index_game_two(bits: Tensor, keys: Tensor, C: float | None = None, **how) -> Game:
    """Theorem 4.2/B.2: n² rows of bits (n², d) under as many keys, stored as K̃ and Ṽ; its C of 4 ln n is 2 ln n².

    These rows are arbitrary, and no K₁ ⊘ K₂: so the n²·d bits are a bound for the *format*, not for tensor attention,
    which four matrices of n·d numbers compute exactly. The game itself is that of ordinary attention.
    """
    return play(LayerCache(), keys, bits.to(keys), keys, C, **how)


def quantise(cache: LayerCache, bits: int, vectors: int = 2):
    """Round the keys and values, `vectors` of each in a slot, to 2^bits evenly spaced levels from the least to the greatest
    number of each vector."""
    for x in (cache.k, cache.v):
        x = x.unflatten(-1, (vectors, -1))
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = ((high - low) / (2 ** bits - 1)).clamp(min=1e-30)
        x.copy_(low + ((x - low) / step).round() * step)


# ---- 3. a decoder that uses it, and a task that asks about pairs --------------------------------------------------


def match3(n: int, T: int, p: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Match-3 (Sanford et al., arXiv 2306.02896) for a decoder: is there a pair a, b ≤ i with x_a + x_b + x_i ≡ 0 mod p?

    n texts of T random numbers below p behind a first token p, (n, T + 1), and the answers (n, T): p + 1 is no, p + 2 yes.
    """
    x = torch.randint(p, (n, T), generator=generator)
    zero = (x[:, :, None, None] + x[:, None, :, None] + x[:, None, None]) % p == 0  # (n, i, a, b)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    found = (zero & seen[:, :, None] & seen[:, None]).flatten(2).any(-1)
    return F.pad(x, (1, 0), value=p), p + 1 + found.long()


def learn(steps: int, T: int = 12, p: int = 31, batch: int = 64, lr: float = 5e-3, seed: int = 0, every: int = 50, **shape):
    """Train a decoder of this shape (fields of Config) on Match-3, to answer at every number.

    Returns it and [(step, share of right answers in 1000 texts that it never saw)].
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder(Config(vocab_size=p + 3, max_len=T + 1, **shape))
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(4)  # a product of three small numbers learns slowly
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / 50) * (1 + math.cos(math.pi * i / (steps + 1))) / 2)
    held_out, generator, log = match3(1000, T, p, torch.Generator().manual_seed(seed + 1)), torch.Generator().manual_seed(seed), []
    for step in tqdm(range(1, steps + 1), desc="Match-3", disable=None):
        tokens, answers = match3(batch, T, p, generator)
        with torch.enable_grad():
            loss = F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), answers.flatten())
            loss.backward()
        optimizer.step(), rate.step(), optimizer.zero_grad()
        if step % every == 0 or step == steps:
            with torch.no_grad():
                right = model(held_out[0])[:, 1:].argmax(-1) == held_out[1]
            log.append((step, right.double().mean().item()))
    return model.eval(), log


# ---- 4. one step of each cache: python -m methods.tensor_attention ----------------------------------------------


def race(n: int, D: int, Caches, repeat: int = 3):
    """Yields per cache: the class, the least seconds of one decoding step at n tokens, live bytes, and what `Count` counts."""
    generator = torch.Generator().manual_seed(n)
    k, v, q = (torch.randn(1, 1, n, size, generator=generator) for size in (2 * D, 2 * D, D))
    for Cache in Caches:
        full = Cache()
        for t in range(n - 1):
            full.write(k[:, :, t:t + 1], v[:, :, t:t + 1], torch.tensor([[t]]))

        def step() -> LayerCache:
            cache = copy.copy(full)  # its buffers are shared, and the new token is written over again
            cache.slots = dict(full.slots)
            if Cache is TwoCache:
                cache.tokens = copy.copy(full.tokens)
            cache.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], torch.tensor([[n - 1]]))
            return cache

        seconds = best(step, repeat)
        with Count() as count:
            held = step().bytes()[0]
        yield Cache, seconds, held, count


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    print("one decoding step, one head, D = 64, float32, one thread, best of 3; M: 10⁶")
    print(f"{'tokens':>7} {'cache':<18}{'time':>10}{'cached':>12}{'multiplied':>13}{'moved':>12}")
    for n in (256, 512, 1024, 2048, 16384):
        for Cache, seconds, held, count in race(n, 64, (TwoCache, FourCache, FactoredFourCache) if n <= 2048 else (FactoredFourCache,)):
            print(f"{n:>7} {Cache.__name__:<18}{seconds * 1e3:>7.1f} ms{held / 1e6:>9.2f} MB{count.multiplications / 1e6:>11.1f} M"
                  f"{count.bytes / 1e6:>9.1f} MB", flush=True)


variants = {}  # these keep every token, and need Config(vectors=2)

if __name__ == "__main__":
    main()
