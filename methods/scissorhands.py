"""Scissorhands: a KV cache with a fixed budget (Liu et al., NeurIPS 2023, arXiv 2305.17118).

Persistence of importance: a token that was attended to will be attended to again. So the cache never exceeds its budget,
neither while the prompt is read nor later: whenever it is full, the entries that were unimportant most often in the last
w steps make room, but for the newest r. Of equal counts, and there are many, the newest stay.

    unimportance I_j = Σ_{s > t−w} 1{α_{s,j} < 1/s},   drop the m entries with the highest I_j outside the newest r

Differs from the paper: the query heads of a group share an entry, so their mean weight is compared with 1/s. The
authors' code has no budget: it keeps everything that once exceeded the 90th percentile of its row.

Beyond the paper: `MeanWeight`, which keeps what has had the largest mean weight. Then the appendix, which stands alone:
the theorems' one-layer model, the bounds as printed and as they hold; last, what Section 3 observes in a real model.
"""
from dataclasses import dataclass
import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.cache import ALL, LayerCache, check_budget, make_cache, probabilities
from nanollm.evaluate import Recorder, record


# ---- 1. the budget cache ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class BudgetCache(LayerCache):
    """Algorithm 1: never more than `budget` slots, from the first token on. Override `importance` to say what stays; as it
    stands, the newest."""
    budget: int                   # slots per key/value head, B
    recent: int = 10              # newest entries, never dropped, r
    at_a_time: int | None = None  # entries dropped when the cache is full, m; None: half of the budget, but not of the newest

    def __post_init__(self):
        super().__post_init__()
        self.most = self.budget
        if self.recent < 0 or (self.at_a_time is not None and self.at_a_time < 1):
            raise ValueError(f"recent {self.recent} must be at least 0 and at_a_time {self.at_a_time} at least 1")
        check_budget(self.budget, self.recent + (self.at_a_time or 1),
                     f"the newest {self.recent} stay and {self.at_a_time or 1} leave at a time; lower recent or at_a_time")
        if self.at_a_time is None:
            self.at_a_time = max(1, min(self.budget // 2, self.budget - self.recent))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """In pieces as long as the room there is: chunks of any length give what single tokens would."""
        self.check(q, k, v, pos)
        parts, start, T = [], 0, q.shape[2]
        while start < T:
            if self.length == self.budget:
                newest = self.pos >= self.seen - self.recent
                self.shrink(self.importance().masked_fill(newest, math.inf), self.budget - self.at_a_time)
            end = min(start + self.budget - self.length, T)
            parts.append(super().attend(q[:, :, start:end], k[:, :, start:end], v[:, :, start:end], pos[:, start:end]))
            start = end
        return torch.cat(parts, 2)

    def importance(self) -> Tensor:
        """(B, H, S): the slots with the lowest leave."""
        return self.pos.float()


@dataclass(eq=False)
class Scissorhands(BudgetCache):
    """Algorithm 2. Beside its entry, a slot remembers a bit for each of the last w steps and their sum: ⌈w/8⌉ + 4 bytes."""
    history: int = 400  # steps over which an entry's unimportance is counted, w

    def __post_init__(self):
        super().__post_init__()
        if self.history < 1:
            raise ValueError(f"history {self.history} must be at least 1 step")
        self.watch = self.history  # so that no place of the ring comes up twice in one `observe`

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        bits = k.new_zeros(*k.shape[:3], math.ceil(self.history / 8), dtype=torch.uint8)  # a ring: step s has place s mod w
        super().write(k, v, pos, unimportant=bits, count=k.new_zeros(k.shape[:3], dtype=torch.int32))

    def observe(self, q: Tensor, p: Tensor):
        step = torch.arange(self.seen - p.shape[3], self.seen, device=p.device) + 1  # s, (n,)
        ring, place = self.slot("unimportant"), step % self.history
        byte, bit = place // 8, (place % 8).to(torch.uint8)
        # 1{α_{s,j} < 1/s} of tokens that were there
        now = ((p.mean(2, dtype=torch.float32).mT < 1 / step) & (self.pos[..., None] < step)).to(torch.uint8)  # (B, H, S, n)
        before = ring[..., byte] >> bit & 1                                               # of step s − w
        ring ^= torch.zeros_like(ring).index_add_(-1, byte, (before ^ now) << bit)        # flip the bits that differ
        self.slot("count").add_(now.sum(-1, dtype=torch.int32) - before.sum(-1, dtype=torch.int32))
        super().observe(q, p)

    def importance(self) -> Tensor:
        return -self.slot("count").float()


@dataclass(eq=False)
class MeanWeight(BudgetCache):
    """The mean weight since the entry arrived, in place of counts, which grow with age: 4 bytes a slot. RoCo (Ren and Zhu,
    arXiv 2402.06262) scores entries alike."""
    at_a_time: int | None = 8
    watch = ALL

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        super().write(k, v, pos, weight=k.new_zeros(k.shape[:3], dtype=torch.float32))

    def observe(self, q: Tensor, p: Tensor):
        self.slot("weight").add_(p.mean(2, dtype=torch.float32).sum(2))
        super().observe(q, p)

    def importance(self) -> Tensor:
        return self.slot("weight") / (self.seen - self.pos)


variants = {"scissorhands": Scissorhands, "scissorhands_weight": MeanWeight}


# ---- 2. the theorems' model -------------------------------------------------------------------------------------


@dataclass
class OneLayer:
    """One layer with one head and no residual around its attention, Eq. 5 and 6; a token is a row (d,).

    a_t = softmax(1/t · x_t W_Q W_Kᵀ X_{t−1}ᵀ) X_{t−1} W_V W_O,   x_{t+1} = F(a_t),   F(x) = x + W_2 relu(W_1 x)
    """
    q: Tensor   # W_Q, (d, p), as are W_K and W_V
    k: Tensor
    v: Tensor
    o: Tensor   # W_O, (p, d)
    w1: Tensor  # (hidden, d)
    w2: Tensor  # (d, hidden)

    @staticmethod
    def draw(d: int, p: int, hidden: int, norms: tuple[float, ...], generator: torch.Generator) -> "OneLayer":
        """Gaussian weights in float64, scaled to the largest singular values λ_Q, λ_K, λ_V, λ_O, λ_1, λ_2."""
        shapes = (d, p), (d, p), (d, p), (p, d), (hidden, d), (d, hidden)
        drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        return OneLayer(*(w * (norm / torch.linalg.matrix_norm(w, 2)) for w, norm in zip(drawn, norms)))

    def norms(self) -> tuple[float, ...]:
        """λ_Q, λ_K, λ_V, λ_O, λ_1, λ_2."""
        return tuple(torch.linalg.matrix_norm(w, 2).item() for w in (self.q, self.k, self.v, self.o, self.w1, self.w2))

    def scores(self, x: Tensor, past: Tensor) -> Tensor:
        """x W_Q W_Kᵀ pastᵀ, before the 1/t: (d,) and (n, d) → (n,)."""
        return x @ self.q @ self.k.T @ past.T

    def mlp(self, a: Tensor) -> Tensor:
        """F of Eq. 6, (..., d) → (..., d)."""
        return a + torch.relu(a @ self.w1.T) @ self.w2.T


def write_on(layer: OneLayer, start: Tensor, T: int, budget: int | None = None, strength: Tensor | None = None,
             normalise: bool = False) -> tuple[Tensor, Tensor]:
    """The tokens (T, d) that follow `start` (n, d), and the attention mass that each of the T − n steps lost.

    budget: keys that are attended to, Ŝ_t (Algorithm 2 with m = 1: at each step the entry with the lowest score leaves
    before the rest is attended to; the start is cut down to its highest scores at once). The mass lost is Σ_{j∉Ŝ_t} β_{t,j}
    over all tokens so far, Eq. 9. strength (T,): weights β_{t,j} ∝ v_j in place of the softmax, as Theorem B.2 assumes;
    their ranking is stable. normalise: x/‖x‖ after F, for the theorem that assumes ‖x‖ = 1 (B.1); B.2's condition on the
    λ makes ‖F(a)‖ ≤ 1/2, so that its tokens cannot have norm 1; its proof needs only ‖x‖ ≤ 1, which holds without `normalise`.
    """
    n = len(start)
    if not 2 <= n < T or budget is not None and budget < 1:
        raise ValueError(f"start has {n} tokens, which must be at least 2 and fewer than T {T}; "
                         f"budget {budget} must be at least 1, or None")
    x, kept, lost = torch.cat((start, start.new_zeros(T - n, start.shape[1]))), torch.arange(n - 1), []
    for t in range(n, T):
        past = x[:t - 1]                                                              # X_{t−1}; the last token is x_t
        score = layer.scores(x[t - 1], past) / t if strength is None else strength[:t - 1].log()
        if budget is not None and len(kept) > budget:
            kept = kept[score[kept].topk(budget).indices]
        a = score[kept].softmax(0) @ past[kept] @ layer.v @ layer.o
        lost.append(1 - score.softmax(0)[kept].sum())
        x[t] = layer.mlp(a)
        if normalise:
            x[t] /= x[t].norm()
        kept = torch.cat((kept, torch.tensor([t - 1])))
    return x, torch.stack(lost)


def own_weights(sharpness: float, draws: int = 10) -> tuple[float, float]:
    """What the softmax of Eq. 5, with its 1/t, makes of λ_Q λ_K = sharpness where `condition` is just met.

    How many times the smallest of 399 weights the largest is, and the most mass that a budget of 100 keys loses: means of
    so many Gaussian layers of 32 dimensions. Tokens are kept at norm 1, which gives attention the most to work with.
    """
    found, root = [], sharpness ** 0.5
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        layer = OneLayer.draw(32, 32, 64, (root, root, 0.4, 1 / (1 + sharpness), 0.5, 0.5), generator)
        start = F.normalize(torch.randn(100, 32, dtype=torch.float64, generator=generator), dim=-1)
        x, lost = write_on(layer, start, 400, budget=100, normalise=True)
        weight = (layer.scores(x[-1], x[:-1]) / 400).softmax(0)
        found.append((weight.max() / weight.min(), lost.max()))
    return tuple(torch.tensor(found).mean(0).tolist())


class Persistence(NamedTuple):
    """Theorem B.1 at one step, for each ℓ < t, (t − 1,). Where eps is inf no ε > 0 fulfils its conditions."""
    eps: Tensor    # the smallest ε that does
    alpha: Tensor  # α_{t,ℓ}
    lower: Tensor
    score: Tensor  # x_{t+1} W_Q W_Kᵀ x_ℓᵀ
    upper: Tensor


def persistence_bounds(layer: OneLayer, x: Tensor, after: Tensor) -> Persistence:
    """Theorem B.1 from tokens x (t, d) and x_{t+1} `after` (d,), all of norm 1: attended to now, attended to next.

    Eq. 7: (x_ℓ A x_ℓᵀ/‖a_t‖)(α_{t,ℓ} ∓ 3ε), A = W_V W_O W_Q W_Kᵀ. The paper prints x_j between these bounds where x_ℓ is meant,
    and asks x_ℓ A x_ℓᵀ ≥ ε⁻¹ max_{j≠ℓ} x_j A x_ℓᵀ. The proof (Lemma B.2) needs absolute values there, and only j < t: j = t
    would rule out a query that is like a key it attends to.
    """
    t, past = len(x), x[:-1]
    alpha = (layer.scores(x[-1], past) / t).softmax(0)
    a = alpha @ past @ layer.v @ layer.o
    products = past @ layer.v @ layer.o @ layer.q @ layer.k.T @ past.T                # x_j A x_ℓᵀ, (t − 1, t − 1)
    own = products.diagonal()
    others = products.abs().fill_diagonal_(0).amax(0)
    delta = (1 - a @ after / a.norm()).clamp(min=0)                                   # a_t x_{t+1}ᵀ ≥ (1 − δ)‖a_t‖
    lq, lk, lv, lo, *_ = layer.norms()
    # δ ≤ (cε/(λ_Q λ_K λ_V λ_O))², with the largest c that x_ℓ A x_ℓᵀ ≥ c allows
    eps = torch.maximum(others, delta.sqrt() * lq * lk * lv * lo) / own
    eps[own <= 0] = math.inf
    lower = torch.where(own > 0, own / a.norm() * (alpha - 3 * eps), -math.inf)
    upper = torch.where(own > 0, own / a.norm() * (alpha + 3 * eps), math.inf)
    return Persistence(eps, alpha, lower, layer.scores(after, past), upper)


# Lemmas B.3 to B.5, for tokens of norm at most 1


def weights_bound(layer: OneLayer, t: int, drift: float) -> float:
    """Lemma B.3: ‖α_t − β_t‖₂ ≤ 2 √(t−1)/t λ_Q λ_K Δ, where all tokens up to t differ by at most Δ; printed is x_t alone.

    Half of it holds as well, since softmax is ½-Lipschitz; the proof takes 1.
    """
    lq, lk, *_ = layer.norms()
    return 2 * math.sqrt(t - 1) / t * lq * lk * drift


def eviction_bound(layer: OneLayer, lost):
    """Lemma B.4: ‖ã_t − b_t‖₂ ≤ 2 λ_V λ_O Σ_{j∉Ŝ_t} β_{t,j}; printed without the 2 that its proof ends with."""
    _, _, lv, lo, *_ = layer.norms()
    return 2 * lv * lo * lost


def mlp_bound(layer: OneLayer, drift):
    """Lemma B.5: ‖F(x) − F(y)‖₂ ≤ (1 + λ_1 λ_2) ‖x − y‖₂."""
    *_, l1, l2 = layer.norms()
    return (1 + l1 * l2) * drift


def condition(layer: OneLayer) -> float:
    """λ_V λ_O (1 + λ_1 λ_2)(1 + λ_Q λ_K), which Theorem B.2 wants to be at most 1/2."""
    lq, lk, lv, lo, l1, l2 = layer.norms()
    return lv * lo * (1 + l1 * l2) * (1 + lq * lk)


def drift_bound(layer: OneLayer, lost: Tensor, n: int) -> Tensor:
    """‖x_t − x̃_t‖₂ ≤ this for the tokens after the first n, from the mass `lost` (steps,) of `write_on`; no chance is involved.

    The recursion in the proof of Theorem B.2, Δ ← max(Δ, λ_V λ_O (1 + λ_1 λ_2)(2 lost + (1 + 2(1 − 1/t) λ_Q λ_K) Δ)), with Δ
    over all tokens so far. If `condition` ≤ 1/2 it is at most twice the largest mass lost. For a start of norms up to 1,
    and tokens that are not normalised. Raises ValueError where they may grow beyond norm 1.
    """
    lq, lk, lv, lo, l1, l2 = layer.norms()
    gain = lv * lo * (1 + l1 * l2)
    if gain > 1:
        raise ValueError(f"λ_V λ_O (1 + λ_1 λ_2) = {gain:.3g} must be at most 1, or tokens outgrow norm 1; scale W_O down")
    drift, bounds = 0.0, []
    for t, mass in enumerate(lost.tolist(), n):
        drift = max(drift, gain * (2 * mass + (1 + 2 * (1 - 1 / t) * lq * lk) * drift))
        bounds.append(drift)
    return torch.tensor(bounds, dtype=lost.dtype)


# Theorem B.3: v_j drawn from c (x + b)^{−k} on [0, u − b], weights v_j/Σv. Here b = 1: x and u are in units of b


def check_law(beta: float, k: float, u: float = math.inf, eps: float = 0):
    if not 0 < beta <= 1:
        raise ValueError(f"beta {beta} is the share that is kept; it must lie above 0 and up to 1")
    if u <= 1 or k <= (2 if u == math.inf else 1):
        raise ValueError(f"exponent k {k} must exceed 2, or 1 with a finite u; u {u} must exceed 1")
    if not 0 <= eps < beta:
        raise ValueError(f"eps {eps} must be at least 0 and below beta {beta}")


def draw_power_law(shape: tuple[int, ...], k: float, u: float, generator: torch.Generator) -> Tensor:
    """v, by inverting P(v > x) = ((x + 1)^{1−k} − u^{1−k})/(1 − u^{1−k}); float64."""
    check_law(1, k, u)
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
    return (1 - uniform * (1 - u ** (1 - k))) ** (1 / (1 - k)) - 1


def moment(order: int, y: float, k: float) -> float:
    """∫_0^{y−1} x^order (x + 1)^{−k} dx; for order 1 the proof has it as g(y − 1) − g(0)."""
    def power(m: float) -> float:  # ∫_1^y s^m ds
        return math.log(y) if m == -1 else math.expm1((m + 1) * math.log(y)) / (m + 1)
    return sum(math.comb(order, i) * (-1) ** (order - i) * power(i - k) for i in range(order + 1))


def tail_mass(beta: float, k: float, u: float = math.inf) -> float:
    """Share of Σv that the 1 − β smallest of many draws hold: what eviction loses.

    For u → ∞ it is 1 + (k−2)β − (k−1)β^{(k−2)/(k−1)}.
    """
    check_law(beta, k, u)
    y = (1 - (1 - beta) * (1 - u ** (1 - k))) ** (1 / (1 - k))  # γ + 1, where P(v ≤ γ) = 1 − β
    return moment(1, y, k) / moment(1, u, k)


def printed_bound(beta: float, k: float, eps: float = 0) -> float:
    """Eq. 11 as printed: (1−β)/(0.98(1−ε)²) · (k − (k−1)((1−ε)/(β−ε))^{1/(k−1)}).

    Negative, so no bound of a mass, for β < ((k−1)/k)^{k−1} as ε → 0. Two steps slip: (1 − β) is factored out of a product
    with (β − ε), which is smaller unless β ≥ (1 + ε)/2; and 0.98 b stands for Δ, which divides, where a lower bound of Δ
    is needed ("Δ ≤ 0.98 b" fails besides, as Δ → b for large u). The line before them is right for every u.
    """
    check_law(beta, k, eps=eps)
    return (1 - beta) / (0.98 * (1 - eps) ** 2) * (k - (k - 1) * ((1 - eps) / (beta - eps)) ** (1 / (k - 1)))


def printed_failure(beta: float, k: float, u: float, eps: float, n: int) -> float:
    """The probability of failure printed with it, of one step with n = t − 1 draws.

    The second term has lost the ε² of its proof, and the first needs Δ ≥ b/√2.
    """
    check_law(beta, k, eps=eps)
    return math.exp(-eps ** 2 * n / ((k - 2) * (u - 1)) ** 2) + math.exp(-2 * n * (1 - beta) ** 2 / (1 - eps) ** 2)


def failure(beta: float, k: float, u: float, eps: float, n: int) -> float:
    """Bound of the probability that Σv ≤ (1−ε) E[Σv], or that at most (1−β)n draws lie below the
    (1−β)/(1−ε) quantile.

    Hoeffding for the second, as in the proof. For the first Maurer (2003), P(Σv ≤ (1−ε) E[Σv]) ≤ exp(−n ε² E[v]²/(2 E[v²])):
    Hoeffding's (u − b)² in place of 4 E[v²] says nothing about a heavy tail.
    """
    check_law(beta, k, u, eps)
    mean, square = (moment(order, u, k) / moment(0, u, k) for order in (1, 2))
    return math.exp(-n * (eps * mean) ** 2 / (2 * square)) + math.exp(-2 * n * (eps * (1 - beta) / (1 - eps)) ** 2)


def repaired_bound(beta: float, k: float, u: float, eps: float, n: int) -> float:
    """E[mass lost] with n draws, of which at least the βn largest stay: at most this, for every n and every ε < β.

    tail_mass(β')/(1−ε) with β' = (β−ε)/(1−ε) where the two events of `failure` do not happen, and 1 − β, the most that the
    smallest can hold, where they do.
    """
    inside = tail_mass((beta - eps) / (1 - eps), k, u) / (1 - eps)
    return min(1 - beta, inside + (1 - beta) * failure(beta, k, u, eps, n))


# ---- 3. what is observed in a trained decoder -------------------------------------------------------------------


@torch.no_grad()
def attention_maps(model, tokens: Tensor) -> Tensor:
    """The decoder's own attention weights for tokens (B, T): (L, B, H·G, T, T)."""
    caches = make_cache(model, Recorder)
    return torch.stack([probabilities(q, cache.k, cache.pos, None, pos).flatten(1, 2)
                        for cache, (_, q, _, _, pos) in zip(caches, record(model, caches, tokens))])


def persistence_ratio(p: Tensor, distance: int = 1, times: float = 1) -> tuple[Tensor, Tensor]:
    """Section 3.2 from probabilities p (..., T, T): a token is pivotal if some query, at least `distance` tokens behind it,
    gives it more than times/t. Of the tokens pivotal to the second half's queries, the share that already was to the first
    half's (nan if there are none); and, to compare with, the share of all tokens that was.

    Tokens are those that the first half has a query for, the first T/2 − distance. The paper has times = 1.
    """
    T = p.shape[-1]
    half, at = T // 2, torch.arange(T, device=p.device)
    if not 0 <= distance < half:
        raise ValueError(f"distance {distance} must be at least 0 and below half of the {T} queries")
    pivotal = ((p > times / (at + 1)[:, None]) & (at[:, None] - at >= distance))[..., :half - distance]
    first, second = pivotal[..., :half, :].any(-2), pivotal[..., half:, :].any(-2)
    return (first & second).sum(-1) / second.sum(-1), first.float().mean(-1)


@torch.no_grad()
def block_similarity(model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Appendix A.2, per layer, means over tokens (B, T): cosine of x and F(x) = x + MLP(x), ‖x‖ and ‖MLP(x)‖; (L,) each."""
    seen = []
    hooks = [part.register_forward_hook(lambda module, args, out, which=which: seen.append(args[0] if which else out))
             for block in model.blocks for part, which in ((block.norm2, True), (block.mlp, False))]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    x, change = torch.stack(seen[::2]), torch.stack(seen[1::2])  # (L, B, T, d_model)
    measured = F.cosine_similarity(x, x + change, dim=-1), x.norm(dim=-1), change.norm(dim=-1)
    return tuple(m.mean((1, 2)) for m in measured)


def even_shares(p: Tensor, last: int = 64, most: int = 20_000) -> Tensor:
    """Weights that the last queries of p (..., T, T) give, in units of the even share 1/t: those above 0 (n,), or every
    second, third … of them, so that n ≤ most."""
    t = torch.arange(p.shape[-1] - last, p.shape[-1], device=p.device)[:, None] + 1
    x = p[..., -last:, :] * t
    x = x[x > 0]
    return x[::math.ceil(len(x) / most)]


class Tail(NamedTuple):
    """A power law x^{−k} fitted to the largest values."""
    k: float
    error: float     # standard error of k for this `least`, of independent values; that it was chosen is not in it
    least: float     # fitted to the n values from here on
    most: float      # the largest of them
    n: int
    distance: float  # Kolmogorov-Smirnov, between the fit and those values


def tail_exponent(x: Tensor, candidates: int = 100) -> Tail:
    """Maximum likelihood k = 1 + n/Σ ln(x_i/least), with the `least` that brings fit and data closest together
    (Clauset, Shalizi and Newman 2009, arXiv 0706.1062, Eq. 3.1 and Section 3.3); x (N,) positive, at least 100 of them."""
    x = x.double().sort().values
    if len(x) < 100 or not (x > 0).all():
        raise ValueError(f"{len(x)} values, of which {int((x > 0).sum())} are positive; a fit needs at least 100, all positive")
    fits = []
    for start in torch.linspace(0, 0.99 * len(x) - 1, candidates).long().unique().tolist():
        tail = x[start:]
        n, least = len(tail), tail[0]
        k = 1 + n / (tail / least).log().sum()
        rank = torch.arange(n + 1, dtype=x.dtype, device=x.device) / n
        fit = 1 - (tail / least) ** (1 - k)
        distance = torch.maximum((fit - rank[:-1]).abs(), (fit - rank[1:]).abs()).max()
        fits.append(Tail(k.item(), (k.item() - 1) / n ** 0.5, least.item(), x[-1].item(), n, distance.item()))
    return min(fits, key=lambda fit: fit.distance)
