"""Tensor attention (arXiv 2503.11108): lower bounds on a cache's memory, cost of a step, a task of pairs.

The lower bounds are games: Alice stores bits in a cache, and Bob reads them with queries. A cache that can
answer every later query must hold every bit that a query can ask for.

    python -m methods.theory.index_game     # a step of each cache: time, bytes, multiplications
"""
import argparse
import copy
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from methods.tensor_attention import FactoredFourCache, FourCache, TwoCache
from nanollm.cache import LayerCache
from nanollm.commands.text_table import text_table
from nanollm.measure.timing import best
from nanollm.model import Config, Decoder, rope, rope_frequencies, rotate

# ---- keys that stand apart ---------------------------------------------------------------------------------


def projected_basis(n: int, d: int, generator: torch.Generator) -> Tensor:
    """Return Johnson-Lindenstrauss projections of e_1 … e_n (Lemma 3.5), Gaussian / √d: (n, d), float64."""
    return torch.randn(n, d, dtype=torch.float64, generator=generator) / d ** 0.5


def spread_out(n: int, d: int, most: float, generator: torch.Generator) -> tuple[Tensor, float]:
    """n unit vectors (n, d), float64, no two with a cosine above `most`, and the largest cosine of two.

    Where a random projection is too crowded these keys still serve: with C = ln(4n)/(1 − cosine) every other
    key weighs less than 1/4n of Bob's own. Some e^d of them fit if most² = 1 − 1/e², so most = 0.93 (Gilbert
    and Varshamov). Vectors are drawn until enough are found; ValueError if they are not.
    """
    keys = torch.empty(0, d, dtype=torch.float64)
    for _ in range(1000 * n):
        key = F.normalize(torch.randn(1, d, dtype=torch.float64, generator=generator), dim=1)
        if not len(keys) or (keys @ key.T).max() <= most:
            keys = torch.cat((keys, key))
        if len(keys) == n:
            return keys, (keys @ keys.T - 2 * torch.eye(n)).max().item()
    raise ValueError(f"{n} unit vectors of {d} dimensions with cosines up to {most} were not found; "
                     "allow larger ones")


def distortion(keys: Tensor) -> float:
    """Return ε of Lemma 3.5: the keys' (n, d) largest distance from orthonormal inner products."""
    return (keys @ keys.T - torch.eye(len(keys), dtype=keys.dtype)).abs().max().item()


# ---- the Index game ----------------------------------------------------------------------------------------


def separation(n: int, eps: float, C: float, four: bool) -> tuple[float, float]:
    """Return the most that Bob reads for a bit 0 and the least for a bit 1 (δ, Δ; Theorems B.1, B.2).

    Each of n keys stands in n pairs if there are `four` matrices, else in 1. The proof of the former leaves
    out the 2n + 1 pairs with Bob's zero key, of weight e⁰ = 1 each, and the latter Bob's one; they are
    counted here.
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

    def right(self, bits: Tensor) -> float:
        """Return the fraction of Bob's guesses that are right."""
        return (self.guesses() == bits).double().mean().item()

    def learned(self, bits: Tensor) -> float:
        """How many of the bits (n, d) his guesses tell Bob, over n·d.

        A row of which the share a is right tells d(1 − h(a)), h the binary entropy. An estimate, too high by
        about 0.7 bits a row. Readings may tell more than guesses: where keys blur, n of them are n equations
        for n bits.
        """
        a = (self.guesses() == bits).double().mean(1)
        entropy = -(torch.special.xlogy(a, a) + torch.special.xlog1py(1 - a, -a)) / math.log(2)
        return (1 - entropy).mean().item()


def play(cache: LayerCache, k: Tensor, v: Tensor, keys: Tensor, C: float | None = None, compress=None,
         eta: float = 0.0, generator: torch.Generator | None = None) -> Game:
    """Alice stores tokens k, v (n, d), or (n, 2d) with four matrices, under keys (n, d). Bob asks for rows.

    For each he asks in a copy of the cache, with a zero token whose query is C · k_i. C defaults to 2 ln n.
    `compress(cache)` is what is done to the cache before Bob gets it. eta: what he reads is off by a factor 1
    ± η, each by chance (Corollaries 4.4 and 4.5).
    """
    n, d = keys.shape
    four = k.shape[1] == 2 * d
    C = 2 * math.log(n) if C is None else C
    cache.write(k[None, None], v[None, None], torch.arange(n)[None])  # her queries are zero: ask for nothing
    if compress:
        compress(cache)

    scale = 1.0 if four else d ** 0.5  # undoes LayerCache's 1/√D
    nothing, read = torch.zeros_like(k[None, None, :1]), []
    for key in keys:
        query = (C * scale * key).view(1, 1, 1, d)
        answer = copy.deepcopy(cache).attend(query, nothing, nothing, torch.tensor([[n]]))
        read.append(answer.flatten())

    read = torch.stack(read)
    if eta:
        sign = 2 * torch.randint(0, 2, read.shape, generator=generator) - 1
        read = read * (1 + eta * sign)
    zero, one = separation(n, distortion(keys), C, four)
    return Game(read, zero * (1 + eta), one * (1 - eta))


def index_game_four(bits: Tensor, keys: Tensor, C: float | None = None, Cache=FactoredFourCache,
                    **how) -> Game:
    """Theorem 4.1/B.1, four matrices: V₁ are Alice's bits (n, d), K₁ her keys, and K₂ = V₂ = 1."""
    ones = torch.ones_like(keys)
    k, v = torch.cat((keys, ones), 1), torch.cat((bits.to(keys), ones), 1)
    return play(Cache(scale=1.0), k, v, keys, C, **how)


def deal(n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return Alice's fair random bits (n, d) and her keys (n, d)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, d, generator=generator) < 0.5, projected_basis(n, d, generator)


def keep_rows(kept: slice | Tensor, n: int, bits: int | None = None):
    """Return a `compress` that keeps only the tokens `kept` of n, rounded to `bits` bits a number."""
    def compress(cache: LayerCache):
        cache.keep(torch.arange(n)[kept][None, None])
        if bits is not None:
            quantise(cache, bits)
    return compress


def quantise(cache: LayerCache, bits: int):
    """Round both keys and both values of each slot to 2^bits even levels of each vector's range."""
    for x in (cache.k, cache.v):
        x = x.unflatten(-1, (2, -1))
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = ((high - low) / (2 ** bits - 1)).clamp(min=1e-30)
        x.copy_(low + ((x - low) / step).round() * step)


# ---- why keys of pairs are not rotated ---------------------------------------------------------------------


def rotated_scores(q: Tensor, k1: Tensor, k2: Tensor, shift: int) -> tuple[float, float]:
    """Return q·k₁ and q·(k₁ ∘ k₂) after RoPE to positions 9, 4, 2, each plus `shift`.

    The vectors are (1, 1, 1, D).
    """
    D = q.shape[-1]
    freq = rope_frequencies(Config(1, max_len=1, n_layers=1, n_heads=1, n_kv_heads=1, d_model=D, d_ff=1))
    q, k1, k2 = (rotate(x, *rope(freq, torch.tensor([at + shift]))) for x, at in ((q, 9), (k1, 4), (k2, 2)))
    return (q * k1).sum().item(), (q * k1 * k2).sum().item()


# ---- Match-3: a task that asks about pairs -----------------------------------------------------------------


def match3(n: int, T: int, p: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Match-3 (Sanford et al., arXiv 2306.02896): is there a pair a, b ≤ i with x_a + x_b + x_i ≡ 0 mod p?

    n texts of T random numbers below p behind a first token p, (n, T + 1), and the answers (n, T): p + 1 is
    no, p + 2 yes.
    """
    x = torch.randint(p, (n, T), generator=generator)
    zero = (x[:, :, None, None] + x[:, None, :, None] + x[:, None, None]) % p == 0  # (n, i, a, b)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    found = (zero & seen[:, :, None] & seen[:, None]).flatten(2).any(-1)
    return F.pad(x, (1, 0), value=p), p + 1 + found.long()


def simple_rules(tokens: Tensor, answers: Tensor, p: int) -> dict[str, float]:
    """Return the fraction of answers (n, T) that two rules without pairs get right.

    The second rule gives the commoner answer at each position. The first rule says yes if two numbers suffice
    (a = b or b = i); otherwise it gives the commoner answer at that position.
    """
    x, yes = tokens[:, 1:], answers == p + 2
    near = torch.zeros_like(yes)
    for i in range(x.shape[1]):
        before, here = x[:, :i + 1], x[:, i:i + 1]
        near[:, i] = ((2 * before + here) % p == 0).any(1) | ((before + 2 * here) % p == 0).any(1)

    commoner = (yes.double().mean(0) > 0.5).expand_as(yes)
    two_numbers = near | ((yes & ~near).sum(0) / (~near).sum(0) > 0.5)
    rules = {"hits among two numbers (a = b or b = i)": two_numbers, "always the commoner answer": commoner}
    return {name: (rule == yes).double().mean().item() for name, rule in rules.items()}


def learn(steps: int, T: int = 12, p: int = 31, batch: int = 64, lr: float = 5e-3, seed: int = 0,
          every: int = 50, build=Decoder, **shape) -> tuple[Decoder, list[tuple[int, float]]]:
    """Train a decoder, `build` of a Config of this shape, on Match-3, to answer at every number.

    Returns it and [(step, share of right answers in 1000 texts that it never saw)].
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(Config(vocab_size=p + 3, max_len=T + 1, **shape))
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(4)  # a product of three small numbers learns slowly

    def rate(step: int) -> float:
        """Up over 50 steps, then down along a cosine."""
        return min(1, (step + 1) / 50) * (1 + math.cos(math.pi * step / (steps + 1))) / 2

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(seed)
    test_tokens, test_answers = match3(1000, T, p, torch.Generator().manual_seed(seed + 1))

    log = []
    for step in tqdm(range(1, steps + 1), desc="Match-3", disable=None):
        tokens, answers = match3(batch, T, p, generator)
        with torch.enable_grad():
            logits = model(tokens)[:, 1:]
            F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        if step % every == 0 or step == steps:
            with torch.no_grad():
                right = model(test_tokens)[:, 1:].argmax(-1) == test_answers
            log.append((step, right.double().mean().item()))
    return model.eval(), log


# ---- one decoding step of each cache -----------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts multiplications, and the bytes that operations read and write, of all that runs under it.

    A view moves nothing. In a matrix product of (m, k) and (k, n) every product counts, m·k·n; elsewhere each
    number of what is made by mul, div or exp.
    """

    def __init__(self):
        super().__init__()
        self.multiplications = self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out, name = op(*args, **kwargs), op.overloadpacket.__name__
        if op.is_view or name == "_unsafe_view":
            return out
        read, made = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)]
                      for tree in ((args, kwargs), out))
        if name == "copy_" or name.startswith("new_"):  # their first argument is not read
            read = read[1:]
        self.bytes += sum(x.numel() * x.element_size() for x in read + made)
        if name in ("mm", "bmm"):
            self.multiplications += made[0].numel() * read[0].shape[-1]
        elif "scaled_dot_product" in name:
            q, k, *_ = read
            self.multiplications += 2 * q.numel() * k.shape[-2]
        elif name.rstrip("_") in ("mul", "div", "exp", "_softmax"):
            self.multiplications += made[0].numel()
        return out


def race(n: int, D: int, Caches, repeat: int = 3):
    """Measure one decoding step at n tokens; yield each cache's class, least seconds, bytes and `Count`."""
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


def show(rows: list[dict]) -> str:
    """Return the table of one decoding step of each cache."""
    table = [["cache", "tokens", "time", "cached", "multiplied", "moved"]]
    for row in rows:
        table.append([row["cache"], str(row["tokens"]), f"{row['seconds'] * 1e3:.1f} ms",
                      f"{row['bytes'] / 1e6:.2f} MB", f"{row['multiplications'] / 1e6:.1f} M",
                      f"{row['moved'] / 1e6:.1f} MB"])
    return ("one decoding step, one head, D = 64, float32, one thread, best of 3; M: 10⁶\n"
            + text_table(table))


@torch.no_grad()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m methods.theory.index_game")
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024, 2048, 16384],
                        metavar="TOKENS",
                        help="numbers of cached tokens; above 2048 only FactoredFourCache is timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write the rows to")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for n in args.lengths:
        Caches = (TwoCache, FourCache, FactoredFourCache) if n <= 2048 else (FactoredFourCache,)
        rows += [dict(tokens=n, cache=Cache.__name__, seconds=seconds, bytes=held,
                      multiplications=count.multiplications, moved=count.bytes)
                 for Cache, seconds, held, count in race(n, 64, Caches)]
    print(show(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
