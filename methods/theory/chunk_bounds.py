"""Compute the bounds of ChunkKV's appendix on in-context learning exactly (claim C3).

The paper is Liu et al., arXiv 2502.00299, Eq. 10 to 16. A prompt contains examples O = [x, y] of k
tokens, drawn with the true parameters θ*. The bounds limit how far a wrong θ can be from θ* if the
prompt does not rule it out. The distribution of O is a table (V, …, V) of k dimensions. Eq. 11
drops the Taylor remainder: without it the bounds can fail, and with it they hold.
"""

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

# ---- distributions of an example O, as tables ---


def independent(chances: list[Tensor]) -> Tensor:
    """Return the table (2, …, 2) of independent tokens, each 1 with its own probability."""
    table = torch.ones_like(chances[0])
    for chance in chances:
        token = torch.stack((1 - chance, chance))
        table = table[..., None] * token
    return table


def mirrored(theta: Tensor, k: int = 10) -> Tensor:
    """Return the table of k tokens that are 1 with probability θ, the last one with 0.6 − θ.

    At θ* = 0.3 the last token has the others' Fisher information, but a remainder of the opposite
    sign.
    """
    others = [theta[0]] * (k - 1)
    last = 0.6 - theta[0]
    return independent([*others, last])


def markov(theta: Tensor, k: int, noise: float = 0.0) -> Tensor:
    """Return the table of a Markov chain: a state is 1 with probability theta[previous state].

    The first of its k states is 0 or 1 with probability 1/2. A token is the state or, with
    probability `noise`, the other one: then the chain is a hidden Markov model.
    """
    move = torch.stack((1 - theta, theta), 1)
    show = torch.tensor(
        [[1 - noise, noise], [noise, 1 - noise]],
        dtype=theta.dtype,
    )
    table = show.mT / 2  # (token, state)
    for _ in range(k - 1):
        table = torch.einsum("...s,st,to->...ot", table, move, show)
    return table.sum(-1)


# ---- Eq. 10 to 16 ---


def divergence(p: Tensor, q: Tensor, kept: list[int] | None = None) -> Tensor:
    """Return KL(p ‖ q) of two tables, in nats; if `kept` is given, of these tokens alone."""
    if kept is not None:
        seen = [j % p.dim() for j in kept]
        lost = [j for j in range(p.dim()) if j not in seen]
        if lost:  # sum([]) would sum over all tokens
            p = p.sum(lost)
            q = q.sum(lost)
    possible = p > 0
    p, q = p[possible], q[possible]
    return (p * (p / q).log()).sum()


def token_divergences(p: Tensor, q: Tensor) -> Tensor:
    """Return KL_j(θ* ‖ θ) of each token given the earlier ones, (k,).

    Their sum is the tables' KL.
    """
    prefixes = []
    for j in range(p.dim() + 1):
        prefixes.append(divergence(p, q, list(range(j))))
    return torch.stack(prefixes).diff()


def fisher(table, theta: Tensor) -> Tensor:
    """Return each token's Fisher information I_{j,θ*}, (k, P, P), of the distribution table(θ).

    θ has P parameters. I_{j,θ*} is the matrix of second derivatives of KL_j(θ* ‖ θ) at θ = θ*.
    """

    def each(other):
        return token_divergences(table(theta), table(other))

    def slopes(other):
        return jacobian(each, other, create_graph=True)

    return jacobian(slopes, theta)


def remainder(each: Tensor, information: Tensor, delta: Tensor) -> Tensor:
    """Return R = max_j |KL_j − ½ δᵀ I_j δ| / ‖δ‖²: Eq. 10's O(‖δ‖³), divided by ‖δ‖².

    each: the tokens' KL_j, (k,).
    """
    quadratic = torch.einsum("p,jpq,q->j", delta, information, delta) / 2
    largest = (each - quadratic).abs().max()
    return largest / (delta @ delta)


def distance_bound(
    noise: Tensor,
    information: Tensor,
    remainder: float = 0.0,
) -> Tensor:
    """Return the bound ‖θ − θ*‖² ≤ noise / (½ (k−1) min λ_min − (k−1) R) of Eq. 12.

    information: I_2 … I_k, (k − 1, P, P). noise: Σ_{j≥2} KL_j, or its bound ε_θ + ξ_θ(r) if the
    prompt does not rule out θ; the paper gives no formula for ξ_θ(r). remainder: R of the same
    tokens; Eq. 11 drops it (R = 0), though the terms that it bounds may be negative. The result is
    inf if there is no bound.
    """
    smallest = torch.linalg.eigvalsh(information)[:, 0].min()
    curvature = smallest / 2 - remainder
    bound = noise / (len(information) * curvature)
    return torch.where(curvature > 0, bound, torch.inf)


def answer_bound(
    noise: Tensor,
    information: Tensor,
    remainder: float = 0.0,
) -> Tensor:
    """Return the bound on KL_k of Eq. 13 to 16.

    KL_k ≤ noise (max λ_max + 2 R) / ((k−1) (min λ_min − 2 R)). The paper writes O(1) for 2 R, and
    only in the numerator. It belongs in the denominator as well: in the numerator alone it may have
    to be larger.
    """
    distance = distance_bound(noise, information, remainder)
    largest = torch.linalg.eigvalsh(information)[:, -1].max()
    bound = (largest / 2 + remainder) * distance
    return torch.where(distance < torch.inf, bound, torch.inf)


def bounds(table, theta: Tensor, delta: Tensor) -> dict[str, float]:
    """Return bound / bounded value of Eq. 12 ("distance_…") and Eq. 15 ("answer_…") at θ* + δ.

    A ratio below 1 refutes the bound. "…_paper" has R = 0, as in the paper; "…_repaired" has the
    remainder. Also return "R" and "least", the smallest λ_min.
    """
    other = table(theta + delta)
    each = token_divergences(table(theta), other)[1:]
    information = fisher(table, theta)[1:]
    noise = each.sum()
    R = remainder(each, information, delta)
    least = torch.linalg.eigvalsh(information)[:, 0].min()

    values = dict(R=R, least=least)
    for name, r in (("paper", 0.0), ("repaired", R)):
        distance = distance_bound(noise, information, r)
        answer = answer_bound(noise, information, r)
        values[f"distance_{name}"] = distance / (delta @ delta)
        values[f"answer_{name}"] = answer / each[-1]
    return {name: x.item() for name, x in values.items()}
