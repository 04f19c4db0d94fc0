"""Scissorhands' theorems (Liu et al., NeurIPS 2023, arXiv 2305.17118), each as it holds.

1. The one-layer model, Eq. 5 and 6.
2. Theorem 3.1/B.1: what is attended to now is attended to next.
3. Theorem 4.1/B.2: how far a budget makes the tokens drift.
4. Theorem B.3: the mass that eviction loses where weights follow a power law.

Where the paper prints a bound otherwise, its docstring says what slips. The test of a lemma or a printed
number that nothing else needs holds its formula. persistence_measured.py measures a trained decoder.
"""
from dataclasses import dataclass
import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F


# ---- 1. the theorems' model --------------------------------------------------------------------------------


@dataclass
class OneLayer:
    """One layer with one head and no residual around its attention, Eq. 5 and 6. A token is a row (d,).

    a_t = softmax(1/t · x_t W_Q W_Kᵀ X_{t−1}ᵀ) X_{t−1} W_V W_O
    x_{t+1} = F(a_t),   F(x) = x + W_2 relu(W_1 x)
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
        matrices = self.q, self.k, self.v, self.o, self.w1, self.w2
        return tuple(torch.linalg.matrix_norm(w, 2).item() for w in matrices)

    def scores(self, x: Tensor, past: Tensor) -> Tensor:
        """x W_Q W_Kᵀ pastᵀ, before the 1/t: (d,) and (n, d) → (n,)."""
        return x @ self.q @ self.k.T @ past.T

    def weights(self, x: Tensor) -> Tensor:
        """α_t of the last of the tokens x (t, d), over those before it: (t − 1,)."""
        return (self.scores(x[-1], x[:-1]) / len(x)).softmax(0)

    def mlp(self, a: Tensor) -> Tensor:
        """F of Eq. 6, (..., d) → (..., d)."""
        return a + torch.relu(a @ self.w1.T) @ self.w2.T


def rollout(layer: OneLayer, start: Tensor, T: int, budget: int | None = None, strength: Tensor | None = None,
            normalise: bool = False) -> tuple[Tensor, Tensor]:
    """The tokens (T, d) that follow `start` (n, d), and the attention mass that each of the T − n steps lost.

    budget: keys that are attended to, Ŝ_t. This is Algorithm 2 with m = 1: at each step the entry with the
        lowest score leaves before the rest is attended to. The start is cut down to its highest at once.
        The mass lost is Σ_{j∉Ŝ_t} β_{t,j} over all tokens so far, Eq. 9.
    strength (T,): weights β_{t,j} ∝ v_j in place of the softmax, as Theorem B.2 assumes. Their ranking is
        stable.
    normalise: x/‖x‖ after F, for Theorem B.1, which assumes ‖x‖ = 1. B.2 assumes it too, but its condition on
        the λ makes ‖F(a)‖ ≤ 1/2. Its proof needs only ‖x‖ ≤ 1, which holds without `normalise`.
    """
    n = len(start)
    if not 2 <= n < T or budget is not None and budget < 1:
        raise ValueError(f"start has {n} tokens, which must be at least 2 and fewer than T {T}; "
                         f"budget {budget} must be at least 1, or None")
    x, kept, lost = torch.cat((start, start.new_zeros(T - n, start.shape[1]))), torch.arange(n - 1), []

    for t in range(n, T):
        past = x[:t - 1]  # X_{t−1}; the last token is x_t
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


def softmax_spread(sharpness: float, draws: int = 10) -> tuple[float, float]:
    """What the softmax of Eq. 5, with its 1/t, makes of λ_Q λ_K = sharpness where `condition` is just met.

    Returns how many times the smallest of 399 weights the largest is, and the most mass that a budget of 100
    keys loses: means of so many Gaussian layers of 32 dimensions. Tokens are kept at norm 1, which gives
    attention the most to work with.
    """
    found, root = [], sharpness ** 0.5
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        layer = OneLayer.draw(32, 32, 64, (root, root, 0.4, 1 / (1 + sharpness), 0.5, 0.5), generator)
        start = F.normalize(torch.randn(100, 32, dtype=torch.float64, generator=generator), dim=-1)

        x, lost = rollout(layer, start, 400, budget=100, normalise=True)
        weight = layer.weights(x)
        found.append((weight.max() / weight.min(), lost.max()))
    return tuple(torch.tensor(found).mean(0).tolist())


# ---- 2. Theorem B.1: persistence ---------------------------------------------------------------------------


class Persistence(NamedTuple):
    """Theorem B.1 at one step, for each ℓ < t, (t − 1,). Where eps is inf no ε > 0 fulfils its conditions."""
    eps: Tensor    # the smallest ε that does
    alpha: Tensor  # α_{t,ℓ}
    lower: Tensor
    score: Tensor  # x_{t+1} W_Q W_Kᵀ x_ℓᵀ
    upper: Tensor


def persistence_bounds(layer: OneLayer, x: Tensor, after: Tensor) -> Persistence:
    """Theorem B.1 from tokens x (t, d) and x_{t+1} `after` (d,), all of norm 1.

    Eq. 7: (x_ℓ A x_ℓᵀ/‖a_t‖)(α_{t,ℓ} ∓ 3ε), A = W_V W_O W_Q W_Kᵀ. The paper prints x_j between these bounds
    where x_ℓ is meant, and asks x_ℓ A x_ℓᵀ ≥ ε⁻¹ max_{j≠ℓ} x_j A x_ℓᵀ. The proof (Lemma B.2) needs absolute
    values there, and only j < t: j = t would rule out a query that is like a key it attends to.
    """
    past, alpha = x[:-1], layer.weights(x)
    a = alpha @ past @ layer.v @ layer.o

    # x_j A x_ℓᵀ, (t − 1, t − 1)
    products = past @ layer.v @ layer.o @ layer.q @ layer.k.T @ past.T
    own = products.diagonal()
    others = products.abs().fill_diagonal_(0).amax(0)

    # δ ≤ (cε/(λ_Q λ_K λ_V λ_O))², with the largest c that x_ℓ A x_ℓᵀ ≥ c allows
    delta = (1 - a @ after / a.norm()).clamp(min=0)  # a_t x_{t+1}ᵀ ≥ (1 − δ)‖a_t‖
    lq, lk, lv, lo, *_ = layer.norms()
    eps = torch.maximum(others, delta.sqrt() * lq * lk * lv * lo) / own
    eps[own <= 0] = math.inf

    lower = torch.where(own > 0, own / a.norm() * (alpha - 3 * eps), -math.inf)
    upper = torch.where(own > 0, own / a.norm() * (alpha + 3 * eps), math.inf)
    return Persistence(eps, alpha, lower, layer.scores(after, past), upper)


def next_step(layer: OneLayer, x: Tensor) -> Persistence:
    """Theorem B.1 for the token that the layer writes after x (t, d)."""
    after = rollout(layer, x, len(x) + 1, normalise=True)[0][-1]
    return persistence_bounds(layer, x, after)


def gauss(rows: int, d: int, generator: torch.Generator) -> Tensor:
    """Rows of about norm 1, (rows, d), float64."""
    return torch.randn(rows, d, dtype=torch.float64, generator=generator) / d ** 0.5


def nearly_orthogonal(noise: float, sharp: float, generator: torch.Generator, d: int = 64, n: int = 24):
    """A layer and tokens (n + 1, d) that meet the conditions of B.1 with a small ε.

    The first n tokens are nearly orthogonal, the newest is a mix of them. W_V W_O and W_Q W_Kᵀ are nearly
    multiples of 1, the latter sharp · n times it, where n undoes the 1/t of the softmax.
    """
    def near_one(scale: float) -> Tensor:
        return scale * (torch.eye(d, dtype=torch.float64) + noise * gauss(d, d, generator))

    layer = OneLayer(near_one(sharp * n), near_one(1), near_one(0.9), near_one(1),
                     noise * near_one(0.3), near_one(0.3))
    orthogonal = torch.linalg.qr(gauss(d, d, generator))[0][:n]
    past = F.normalize(orthogonal + noise * gauss(n, d, generator), dim=-1)
    mix = torch.rand(1, n, dtype=torch.float64, generator=generator) ** 4 @ past
    return layer, torch.cat((past, F.normalize(mix, dim=-1)))


def random_step(d: int, generator: torch.Generator, n: int = 24) -> Persistence:
    """Theorem B.1 for a layer and n + 1 tokens that are nothing but Gaussian."""
    layer = OneLayer.draw(d, d, 2 * d, (1, 1, 1, 1, 0.05, 0.05), generator)
    return next_step(layer, F.normalize(gauss(n + 1, d, generator), dim=-1))


# ---- 3. Theorem B.2, for tokens of norm at most 1 ----------------------------------------------------------


def drift_bound(layer: OneLayer, lost: Tensor, n: int) -> Tensor:
    """‖x_t − x̃_t‖₂ ≤ this for the tokens after the first n, from the mass `lost` (steps,) of `rollout`.

    No chance is involved. It is the recursion in the proof of Theorem B.2, with Δ over all tokens so far:

        Δ ← max(Δ, λ_V λ_O (1 + λ_1 λ_2)(2 lost + (1 + 2(1 − 1/t) λ_Q λ_K) Δ))

    If `condition` ≤ 1/2 it is at most twice the largest mass lost. For a start of norms up to 1, and tokens
    that are not normalised. Raises ValueError where they may grow beyond norm 1.
    """
    lq, lk, lv, lo, l1, l2 = layer.norms()
    gain = lv * lo * (1 + l1 * l2)
    if gain > 1:
        raise ValueError(f"λ_V λ_O (1 + λ_1 λ_2) = {gain:.3g} must be at most 1, or tokens outgrow norm 1; "
                         "scale W_O down")
    drift, bounds = 0.0, []
    for t, mass in enumerate(lost.tolist(), n):
        drift = max(drift, gain * (2 * mass + (1 + 2 * (1 - 1 / t) * lq * lk) * drift))
        bounds.append(drift)
    return torch.tensor(bounds, dtype=lost.dtype)


def drifts(layer: OneLayer, start: Tensor, T: int, budget: int, strength: Tensor | None = None):
    """‖x_t − x̃_t‖₂ of the tokens after `start` with all keys and with `budget`, and the mass lost."""
    whole, _ = rollout(layer, start, T, strength=strength)
    cut, lost = rollout(layer, start, T, budget, strength)
    return (whole - cut).norm(dim=-1)[len(start):], lost


def drift_under_power_law(k: float, beta: float, opposed: bool = False,
                          n: int = 200, T: int = 400, d: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Each step's drift, its bound, and the mass lost, with `strength` from a power law: (T − n,) each.

    `condition` is just met. Tokens have random directions; opposed: the lost ones are minus the kept ones.
    Runs with the same k have the same weights, so one bound serves both kinds of tokens.
    """
    generator = torch.Generator().manual_seed(0)
    v = draw_power_law((T,), k, 50, generator)
    layer = OneLayer.draw(d, d, 2 * d, (0.5, 0.5, 0.8, 0.4, 0.5, 0.5), generator)
    start = F.normalize(torch.randn(n, d, dtype=torch.float64, generator=generator), dim=-1)

    if opposed:
        layer.v, layer.o = (scale * torch.eye(d, dtype=torch.float64) for scale in (0.8, 0.4))
        start = start[:1] * torch.where(v[:n] > v.quantile(1 - beta), 1.0, -1.0)[:, None]

    drift, lost = drifts(layer, start, T, round(beta * T), strength=v)
    return drift, drift_bound(layer, lost, n), lost


# ---- 4. Theorem B.3: v_j drawn from c (x + b)^{−k} on [0, u − b], weights v_j/Σv ---------------------------
# Here b = 1: x and u are in units of b


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


def smallest_share(v: Tensor, beta: float) -> Tensor:
    """Share of Σv that the (1 − β)n smallest hold, for v (..., n) sorted along its last dimension."""
    return v[..., :round((1 - beta) * v.shape[-1])].sum(-1) / v.sum(-1)


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


def paper_bound(beta: float, k: float, eps: float = 0) -> float:
    """Eq. 11 as the paper prints it: (1−β)/(0.98(1−ε)²) · (k − (k−1)((1−ε)/(β−ε))^{1/(k−1)})."""
    check_law(beta, k, eps=eps)
    root = ((1 - eps) / (beta - eps)) ** (1 / (k - 1))
    return (1 - beta) / (0.98 * (1 - eps) ** 2) * (k - (k - 1) * root)


class ProofSteps(NamedTuple):
    delta: float     # Δ, in units of b
    line: float      # the last line that holds
    factored: float  # after the first slip
    printed: float   # after the second: Eq. 11


def proof_steps(beta: float, k: float, u: float, eps: float = 0) -> ProofSteps:
    """The last lines of the proof of Theorem B.3, and the two steps that slip."""
    # 1. (1 − β) is factored out of a product with (β − ε), which is smaller unless β ≥ (1 + ε)/2. That makes
    #    Eq. 11 negative, so no bound of a mass, for β < ((k−1)/k)^{k−1} as ε → 0.
    # 2. 0.98 b stands for Δ. Δ divides, so a lower bound of it is needed. "Δ ≤ 0.98 b" is the other
    #    direction, and fails besides, as Δ → b for large u.
    # The line before them is right for every u.
    check_law(beta, k, u, eps)
    gamma = ((beta - eps) / (1 - eps)) ** (1 / (1 - k)) - 1  # the threshold, as the proof takes it
    delta = (k - 2) * moment(1, u, k) / moment(0, u, k)

    line = ((1 - beta) - (k - 1) * (beta - eps) * gamma) / (delta * (1 - eps) ** 2)
    factored = (1 - beta) * (1 - (k - 1) * gamma) / (delta * (1 - eps) ** 2)
    return ProofSteps(delta, line, factored, factored * delta / 0.98)


def failure(beta: float, k: float, u: float, eps: float, n: int) -> float:
    """Bound of the probability that Σv ≤ (1−ε) E[Σv], or that at most (1−β)n draws lie below the
    (1−β)/(1−ε) quantile.

    Hoeffding for the second, as in the proof. For the first Maurer (2003), P(Σv ≤ (1−ε) E[Σv]) ≤
    exp(−n ε² E[v]²/(2 E[v²])): Hoeffding's (u − b)² in place of 4 E[v²] says nothing about a heavy tail.
    """
    check_law(beta, k, u, eps)
    mean, square = (moment(order, u, k) / moment(0, u, k) for order in (1, 2))
    return (math.exp(-n * (eps * mean) ** 2 / (2 * square))
            + math.exp(-2 * n * (eps * (1 - beta) / (1 - eps)) ** 2))


def repaired_bound(beta: float, k: float, u: float, eps: float, n: int) -> float:
    """E[mass lost] with n draws, of which at least the βn largest stay: at most this, for every n and ε < β.

    tail_mass(β')/(1−ε) with β' = (β−ε)/(1−ε) where the two events of `failure` do not happen, and 1 − β, the
    most that the smallest can hold, where they do.
    """
    failed = failure(beta, k, u, eps, n)  # first: it refuses an ε that divides by 0 below
    inside = tail_mass((beta - eps) / (1 - eps), k, u) / (1 - eps)
    return min(1 - beta, inside + (1 - beta) * failed)


def best_bound(beta: float, k: float, u: float, n: int) -> float:
    """`repaired_bound` with the best of 39 values of ε."""
    return min(repaired_bound(beta, k, u, beta * i / 40, n) for i in range(1, 40))
