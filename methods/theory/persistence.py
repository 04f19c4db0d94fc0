"""Compute Scissorhands' bounds, corrected, and the quantities that they bound.

1. Eq. 5 and 6: a one-layer model (claims S1, S2).
2. Theorem 3.1/B.1: a token attended to now is attended to at the next step (S3).
3. Theorem 4.1/B.2: the drift of the tokens under a budget (S6). λ_Q is the largest singular value
   of W_Q. The theorem's condition is λ_V λ_O (1 + λ_1 λ_2)(1 + λ_Q λ_K) ≤ 1/2.
4. Theorem B.3: the mass that eviction loses if the weights follow a power law (S5).
5. The persistence ratio and the power law's exponent of given attention weights (S7).

The paper is Liu et al., NeurIPS 2023, arXiv 2305.17118. Mass is the sum of some attention weights.
Docstrings and comments say where the paper's formulas are wrong.
"""

from dataclasses import dataclass
import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F

# ---- 1. the one-layer model ---


@dataclass
class OneLayer:
    """Hold one layer with one head and no residual around attention (Eq. 5, 6).

    Tokens are rows (d,).

    a_t = softmax(1/t · x_t W_Q W_Kᵀ X_{t−1}ᵀ) X_{t−1} W_V W_O
    x_{t+1} = F(a_t),   F(x) = x + W_2 relu(W_1 x)
    """

    q: Tensor  # W_Q, (d, p)
    k: Tensor  # W_K, (d, p)
    v: Tensor  # W_V, (d, p)
    o: Tensor  # W_O, (p, d)
    w1: Tensor  # (hidden, d)
    w2: Tensor  # (d, hidden)

    @staticmethod
    def draw(
        d: int,
        p: int,
        hidden: int,
        norms: tuple[float, ...],
        generator: torch.Generator,
    ) -> "OneLayer":
        """Draw Gaussian weights in float64, scaled to the `norms` λ_Q, λ_K, λ_V, λ_O, λ_1, λ_2."""
        shapes = [
            (d, p),  # W_Q
            (d, p),  # W_K
            (d, p),  # W_V
            (p, d),  # W_O
            (hidden, d),  # W_1
            (d, hidden),  # W_2
        ]
        weights = []
        for shape, norm in zip(shapes, norms):
            w = torch.randn(shape, dtype=torch.float64, generator=generator)
            w *= norm / torch.linalg.matrix_norm(w, 2)
            weights.append(w)
        return OneLayer(*weights)

    def norms(self) -> tuple[float, ...]:
        """Return the largest singular values λ_Q, λ_K, λ_V, λ_O, λ_1, λ_2."""
        matrices = self.q, self.k, self.v, self.o, self.w1, self.w2
        return tuple(torch.linalg.matrix_norm(w, 2).item() for w in matrices)

    def scores(self, x: Tensor, past: Tensor) -> Tensor:
        """Return x W_Q W_Kᵀ pastᵀ, without the 1/t: (d,) and (n, d) → (n,)."""
        return x @ self.q @ self.k.T @ past.T

    def weights(self, x: Tensor) -> Tensor:
        """Return the weights α_t (t − 1,) of the last of t tokens (t, d) over the earlier ones."""
        score = self.scores(x[-1], x[:-1])
        return (score / len(x)).softmax(0)

    def mlp(self, a: Tensor) -> Tensor:
        """Return F(a) of Eq. 6, (..., d) → (..., d)."""
        return a + torch.relu(a @ self.w1.T) @ self.w2.T


def rollout(
    layer: OneLayer,
    start: Tensor,
    T: int,
    budget: int | None = None,
    strength: Tensor | None = None,
    normalise: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `start` (n, d) extended to T tokens (T, d), and the mass lost per step, (T − n,).

    n must be at least 2 and below T.

    budget: the most keys that a step attends to, |Ŝ_t|; None: all. This is Algorithm 2 with m = 1:
        a step with more keys evicts the one with the lowest score, then attends to the rest. The
        first step evicts as many as necessary. The mass lost is Σ_{j∉Ŝ_t} β_{t,j} over all tokens
        so far (Eq. 9).
    strength (T,): v_j. Weights are β_{t,j} ∝ v_j instead of a softmax, as Theorem B.2 assumes.
        Their ranking is the same at every step.
    normalise: divide new tokens by their norms, as Theorem B.1 assumes. Theorem B.2 assumes it too,
        but its condition makes ‖F(a)‖ ≤ 1/2. Its proof needs only ‖x‖ ≤ 1, which holds without
        `normalise`.
    """
    n, d = start.shape
    x = torch.cat((start, start.new_zeros(T - n, d)))
    kept = torch.arange(n - 1)
    lost = []

    for t in range(n, T):
        past = x[: t - 1]  # X_{t−1}; the query is x_t
        if strength is None:
            score = layer.scores(x[t - 1], past) / t
        else:
            score = strength[: t - 1].log()

        if budget is not None and len(kept) > budget:
            kept = kept[score[kept].topk(budget).indices]
        weights = score[kept].softmax(0)
        a = weights @ past[kept] @ layer.v @ layer.o
        lost.append(1 - score.softmax(0)[kept].sum())

        x[t] = layer.mlp(a)
        if normalise:
            x[t] /= x[t].norm()
        kept = torch.cat((kept, torch.tensor([t - 1])))

    return x, torch.stack(lost)


# ---- 2. Theorem B.1: persistence ---


class Persistence(NamedTuple):
    """Hold Theorem B.1 at one step: one number for each ℓ < t in each field, (t − 1,)."""

    eps: Tensor  # the smallest ε that meets the conditions; inf: no ε does
    alpha: Tensor  # α_{t,ℓ}
    lower: Tensor  # lower bound of `score`
    score: Tensor  # x_{t+1} W_Q W_Kᵀ x_ℓᵀ
    upper: Tensor  # upper bound of `score`


def persistence_bounds(layer: OneLayer, x: Tensor, after: Tensor) -> Persistence:
    """Return Theorem B.1's bounds from tokens x (t, d) and x_{t+1} `after` (d,), all of norm 1.

    Eq. 7: the bounds are (x_ℓ A x_ℓᵀ/‖a_t‖)(α_{t,ℓ} ∓ 3ε), A = W_V W_O W_Q W_Kᵀ. The paper prints
    x_j between them and means x_ℓ. Its condition is x_ℓ A x_ℓᵀ ≥ ε⁻¹ max_{j≠ℓ} x_j A x_ℓᵀ. The
    proof (Lemma B.2) needs absolute values there, and only j < t: j = t would exclude a query that
    resembles a key it attends to.
    """
    past = x[:-1]
    alpha = layer.weights(x)
    a = alpha @ past @ layer.v @ layer.o

    # x_j A x_ℓᵀ, (t − 1, t − 1)
    products = past @ layer.v @ layer.o @ layer.q @ layer.k.T @ past.T
    own = products.diagonal()
    others = products.abs().fill_diagonal_(0).amax(0)

    # condition δ ≤ (cε/(λ_Q λ_K λ_V λ_O))² for a c ≤ x_ℓ A x_ℓᵀ; the largest c gives the smallest ε
    delta = (1 - a @ after / a.norm()).clamp(min=0)  # a_t x_{t+1}ᵀ ≥ (1 − δ)‖a_t‖
    lq, lk, lv, lo, *_ = layer.norms()
    apart = delta.sqrt() * lq * lk * lv * lo
    eps = torch.maximum(others, apart) / own
    eps[own <= 0] = math.inf

    scale = own / a.norm()
    lower = torch.where(own > 0, scale * (alpha - 3 * eps), -math.inf)
    upper = torch.where(own > 0, scale * (alpha + 3 * eps), math.inf)
    score = layer.scores(after, past)
    return Persistence(eps, alpha, lower, score, upper)


def next_step(layer: OneLayer, x: Tensor) -> Persistence:
    """Return Theorem B.1's bounds for the token that the layer writes after x (t, d)."""
    after = rollout(layer, x, len(x) + 1, normalise=True)[0][-1]
    return persistence_bounds(layer, x, after)


def gauss(rows: int, d: int, generator: torch.Generator) -> Tensor:
    """Return Gaussian rows of norm about 1, (rows, d), float64."""
    return torch.randn(rows, d, dtype=torch.float64, generator=generator) / d**0.5


def nearly_orthogonal(
    noise: float,
    sharp: float,
    generator: torch.Generator,
    d: int = 64,
    n: int = 24,
):
    """Return a layer and tokens (n + 1, d) that meet the conditions of B.1 with a small ε.

    The first n tokens are nearly orthogonal; the newest is a mix of them. W_V W_O is nearly 0.9
    times the identity, and W_Q W_Kᵀ sharp · n times. The factor n nearly cancels the softmax's 1/t.
    """

    def near_identity(scale: float) -> Tensor:
        identity = torch.eye(d, dtype=torch.float64)
        return scale * (identity + noise * gauss(d, d, generator))

    layer = OneLayer(
        near_identity(sharp * n),
        near_identity(1),
        near_identity(0.9),
        near_identity(1),
        noise * near_identity(0.3),
        near_identity(0.3),
    )
    orthogonal, _ = torch.linalg.qr(gauss(d, d, generator))
    noisy = orthogonal[:n] + noise * gauss(n, d, generator)
    past = F.normalize(noisy, dim=-1)
    share = torch.rand(1, n, dtype=torch.float64, generator=generator) ** 4
    newest = F.normalize(share @ past, dim=-1)
    return layer, torch.cat((past, newest))


# ---- 3. Theorem B.2, for tokens of norm at most 1 ---


def drift_bound(layer: OneLayer, lost: Tensor, n: int) -> Tensor:
    """Return a bound of ‖x_t − x̃_t‖₂ for each token after the first n, from `lost` (steps,).

    lost: the mass lost, from `rollout` without `normalise` and with start norms of at most 1. The
    bound holds for every such run. It is the recursion in the proof of Theorem B.2, with Δ over all
    tokens so far:

        Δ ← max(Δ, λ_V λ_O (1 + λ_1 λ_2)(2 lost + (1 + 2(1 − 1/t) λ_Q λ_K) Δ))

    Under the theorem's condition it is at most twice the largest mass lost. Raise ValueError if
    tokens may grow beyond norm 1.
    """
    lq, lk, lv, lo, l1, l2 = layer.norms()
    gain = lv * lo * (1 + l1 * l2)
    if gain > 1:
        raise ValueError(
            f"λ_V λ_O (1 + λ_1 λ_2) is {gain:.3g}; it must be at most 1, or tokens outgrow "
            "norm 1; scale W_O down"
        )
    drift, bounds = 0.0, []
    for t, mass in enumerate(lost.tolist(), n):
        growth = 1 + 2 * (1 - 1 / t) * lq * lk
        drift = max(drift, gain * (2 * mass + growth * drift))
        bounds.append(drift)
    return torch.tensor(bounds, dtype=lost.dtype)


def drifts(
    layer: OneLayer,
    start: Tensor,
    T: int,
    budget: int,
    strength: Tensor | None = None,
):
    """Return ‖x_t − x̃_t‖₂ and the mass lost, (T − n,) each.

    x̃_t attends to `budget` keys, x_t to all.
    """
    full, _ = rollout(layer, start, T, strength=strength)
    evicted, lost = rollout(layer, start, T, budget, strength)
    distance = (full - evicted).norm(dim=-1)
    return distance[len(start) :], lost


def drift_under_power_law(
    k: float,
    beta: float,
    opposed: bool = False,
    n: int = 200,
    T: int = 400,
    d: int = 32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each step's drift, its bound and the mass lost under a power law, (T − n,) each.

    Theorem B.2's condition holds with equality. The first n tokens have random directions; opposed:
    the evicted ones are minus the kept ones. Both kinds of tokens have the same weights, so the
    same bound.
    """
    generator = torch.Generator().manual_seed(0)
    v = draw_power_law((T,), k, 50, generator)
    layer = OneLayer.draw(d, d, 2 * d, (0.5, 0.5, 0.8, 0.4, 0.5, 0.5), generator)
    directions = torch.randn(n, d, dtype=torch.float64, generator=generator)
    start = F.normalize(directions, dim=-1)

    if opposed:
        identity = torch.eye(d, dtype=torch.float64)
        layer.v = 0.8 * identity
        layer.o = 0.4 * identity
        kept = v[:n] > v.quantile(1 - beta)
        sign = torch.where(kept, 1.0, -1.0)
        start = start[:1] * sign[:, None]

    drift, lost = drifts(layer, start, T, round(beta * T), strength=v)
    return drift, drift_bound(layer, lost, n), lost


# ---- 4. Theorem B.3: v_j drawn from c (x + b)^{−k} on [0, u − b], weights v_j/Σv ---
# Here b = 1: x and u are in units of b.


def check_law(beta: float, k: float, u: float = math.inf, eps: float = 0):
    """Raise ValueError if β (the fraction kept), k, u or ε is out of range."""
    if not 0 < beta <= 1:
        raise ValueError(
            f"beta is {beta}; the fraction kept must be above 0 and at most 1"
        )
    least = 2 if u == math.inf else 1
    if u <= 1 or k <= least:
        raise ValueError(
            f"k is {k} and u is {u}; u must exceed 1, and k must exceed 1 (2 if u is infinite)"
        )
    if not 0 <= eps < beta:
        raise ValueError(f"eps is {eps}; it must be at least 0 and below beta, {beta}")


def draw_power_law(
    shape: tuple[int, ...],
    k: float,
    u: float,
    generator: torch.Generator,
) -> Tensor:
    """Return draws v, float64: invert P(v > x) = ((x + 1)^{1−k} − u^{1−k})/(1 − u^{1−k})."""
    check_law(1, k, u)
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
    power = 1 - uniform * (1 - u ** (1 - k))  # (x + 1)^{1−k}
    return power ** (1 / (1 - k)) - 1


def smallest_share(v: Tensor, beta: float) -> Tensor:
    """Return the fraction of Σv in the (1 − β)n smallest: (..., n), sorted along n → (...)."""
    smallest = round((1 - beta) * v.shape[-1])
    return v[..., :smallest].sum(-1) / v.sum(-1)


def moment(order: int, y: float, k: float) -> float:
    """Return ∫_0^{y−1} x^order (x + 1)^{−k} dx; the proof writes order 1 as g(y − 1) − g(0)."""

    def power(m: float) -> float:  # ∫_1^y s^m ds
        if m == -1:
            return math.log(y)
        return math.expm1((m + 1) * math.log(y)) / (m + 1)

    # with s = x + 1: x^order = (s − 1)^order = Σ_i (order choose i) (−1)^{order − i} s^i
    integral = 0.0
    for i in range(order + 1):
        sign = (-1) ** (order - i)
        integral += math.comb(order, i) * sign * power(i - k)
    return integral


def tail_mass(beta: float, k: float, u: float = math.inf) -> float:
    """Return the mass that eviction loses: the part of Σv in the 1 − β smallest of many draws.

    For u → ∞ it is 1 + (k−2)β − (k−1)β^{(k−2)/(k−1)}.
    """
    check_law(beta, k, u)
    # γ + 1, where P(v ≤ γ) = 1 − β
    y = (1 - (1 - beta) * (1 - u ** (1 - k))) ** (1 / (1 - k))
    return moment(1, y, k) / moment(1, u, k)


def paper_bound(beta: float, k: float, eps: float = 0) -> float:
    """Return Eq. 11 as printed: (1−β)/(0.98(1−ε)²) · (k − (k−1)((1−ε)/(β−ε))^{1/(k−1)})."""
    check_law(beta, k, eps=eps)
    root = ((1 - eps) / (beta - eps)) ** (1 / (k - 1))
    factor = (1 - beta) / (0.98 * (1 - eps) ** 2)
    return factor * (k - (k - 1) * root)


class ProofSteps(NamedTuple):
    """Hold the end of the proof of Theorem B.3."""

    delta: float  # Δ, in units of b
    line: float  # the last line that holds
    factored: float  # after the first slip
    printed: float  # after the second slip: Eq. 11


def proof_steps(beta: float, k: float, u: float, eps: float = 0) -> ProofSteps:
    """Return the last correct line of the proof of Theorem B.3 and the two wrong steps after it."""
    # 1. The proof factors 1 − β out of both terms, but the second term has β − ε. That is smaller
    #    than 1 − β unless β ≥ (1 + ε)/2. Eq. 11 becomes negative for β < ((k−1)/k)^{k−1} as ε → 0;
    #    no mass is negative.
    # 2. The proof replaces Δ by 0.98 b. Δ is a divisor, so the step needs a lower bound of Δ.
    #    "Δ ≤ 0.98 b" is an upper bound, and false for large u, where Δ → b.
    # The line before both steps holds for every u.
    check_law(beta, k, u, eps)
    gamma = ((beta - eps) / (1 - eps)) ** (1 / (1 - k)) - 1  # the proof's threshold
    delta = (k - 2) * moment(1, u, k) / moment(0, u, k)

    divisor = delta * (1 - eps) ** 2
    line = ((1 - beta) - (k - 1) * (beta - eps) * gamma) / divisor
    factored = (1 - beta) * (1 - (k - 1) * gamma) / divisor
    printed = factored * delta / 0.98
    return ProofSteps(delta, line, factored, printed)


def failure(beta: float, k: float, u: float, eps: float, n: int) -> float:
    """Return a bound of the probability that one of two bad events happens in n draws.

    1. Σv ≤ (1−ε) E[Σv]. Maurer (2003): the probability is at most exp(−n ε² E[v]²/(2 E[v²])).
       Hoeffding's bound has (u − b)²/2 for 2 E[v²], and says nothing about a heavy tail.
    2. At most (1−β)n draws lie below the (1−β)/(1−ε) quantile. Hoeffding's bound, as in the proof.
    """
    check_law(beta, k, u, eps)
    total = moment(0, u, k)
    mean = moment(1, u, k) / total
    square = moment(2, u, k) / total
    slack = eps * (1 - beta) / (1 - eps)
    small_sum = math.exp(-n * (eps * mean) ** 2 / (2 * square))
    few_small = math.exp(-2 * n * slack**2)
    return small_sum + few_small


def repaired_bound(beta: float, k: float, u: float, eps: float, n: int) -> float:
    """Return a bound of E[mass lost] if at least the βn largest of n draws stay; ε < β.

    If neither event of `failure` happens, the mass lost is at most tail_mass(β')/(1−ε), β' =
    (β−ε)/(1−ε). Otherwise it is at most 1 − β, the most that the smallest draws can hold.
    """
    # first, because it rejects an ε that would divide by 0 below
    failed = failure(beta, k, u, eps, n)
    smaller = (beta - eps) / (1 - eps)  # β'
    usual = tail_mass(smaller, k, u) / (1 - eps)
    return min(1 - beta, usual + (1 - beta) * failed)


def best_bound(beta: float, k: float, u: float, n: int) -> float:
    """Return the lowest `repaired_bound` over 39 values of ε."""
    return min(repaired_bound(beta, k, u, beta * i / 40, n) for i in range(1, 40))


# ---- 5. what is observed in attention weights (Section 3, Appendix A) ---


def persistence_ratio(
    p: Tensor, distance: int = 1, times: float = 1
) -> tuple[Tensor, Tensor]:
    """Return Section 3.2's persistence ratio of weights p (..., T, T), and chance; (...) each.

    A token is pivotal to query t = 1 … T if its weight exceeds times/t and the query is at least
    `distance` tokens later. The paper has times = 1. Take the tokens that are pivotal to a query of
    the second half. The ratio is the fraction of them that was pivotal to a query of the first
    half; nan if there are none. Chance is this fraction of all tokens. Only the first T/2 −
    distance tokens count: later ones have no query in the first half that is far enough behind.
    """
    T = p.shape[-1]
    half = T // 2
    if not 0 <= distance < half:
        raise ValueError(
            f"distance is {distance}; it must be at least 0 and below half of the {T} queries"
        )

    token = torch.arange(T, device=p.device)
    query = token[:, None]
    far = query - token >= distance
    pivotal = far & (p > times / (query + 1))
    pivotal = pivotal[..., : half - distance]
    first = pivotal[..., :half, :].any(-2)
    second = pivotal[..., half:, :].any(-2)
    ratio = (first & second).sum(-1) / second.sum(-1)
    return ratio, first.float().mean(-1)


def even_shares(p: Tensor, last: int = 64, most: int = 20_000) -> Tensor:
    """Return the weights above 0 of the last queries of p (..., T, T), in units of 1/t: (n,).

    If there are more than `most`, only every second, third, … of them, so that n ≤ most.
    """
    T = p.shape[-1]
    t = torch.arange(T - last, T, device=p.device)[:, None] + 1
    x = p[..., -last:, :] * t
    x = x[x > 0]
    step = math.ceil(len(x) / most)
    return x[::step]


def tail_exponent(x: Tensor, candidates: int = 100) -> float:
    """Return k of the power law x^{−k} that fits the largest values of x (N,) best.

    Maximum likelihood gives k = 1 + n/Σ ln(x_i/least) for the n values from `least` on. Of the
    candidates for `least`, the one with the smallest Kolmogorov-Smirnov distance counts (Clauset,
    Shalizi and Newman 2009, arXiv 0706.1062, Eq. 3.1 and Section 3.3). ValueError unless x has at
    least 100 values, all positive.
    """
    x = x.double().sort().values
    if len(x) < 100 or not (x > 0).all():
        raise ValueError(
            f"x has {len(x)} values, {int((x > 0).sum())} of them positive; "
            "give at least 100 values, all positive"
        )
    log = x.log()
    starts = torch.linspace(0, 0.99 * len(x) - 1, candidates).long().unique()
    fits = []
    for start in starts.tolist():
        above = log[start:] - log[start]  # ln(x_i/least)
        n = len(above)
        k = 1 + n / above.sum().item()
        fit = 1 - (above * (1 - k)).exp()
        rank = torch.arange(n + 1, dtype=x.dtype, device=x.device) / n
        # the data's distribution jumps at each value: compare before and after the jump
        before = (fit - rank[:-1]).abs()
        after = (fit - rank[1:]).abs()
        distance = torch.maximum(before, after).max().item()
        fits.append((distance, k))
    return min(fits)[1]
