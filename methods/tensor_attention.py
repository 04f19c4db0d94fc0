"""Tensor attention with two or four cache matrices (Chen et al., arXiv 2503.11108).

Each token has two keys and two values. A query attends to *pairs* of tokens: at step i, to all i²
pairs.

    out = (V₁ ⊘ V₂)ᵀ softmax((K₁ ⊘ K₂) q),   row (a, b) of K₁ ⊘ K₂ is k_{1,a} ∘ k_{2,b}

The paper has two caches. `FourCache` stores four matrices of i·D numbers and forms the pairs at
each step. `TwoCache` stores the two matrices of pairs, i²·D numbers each. The paper sees a
trade-off between time and memory. But no pair has to be formed: all scores are one small matrix
product, and the output needs one more (`FactoredFourCache`):

    score of (a, b) = Σ_j k_{1,a,j} q_j k_{2,b,j} = [(K₁ ∘ q) K₂ᵀ]_{a,b}
    out_j = Σ_a V₁[a, j] (P V₂)[a, j]

Differs from the paper: scores are scaled by 1/√D, as in the decoder. The paper has no scale
(`scale=1`).

Not in the paper:
- The factored form. It needs one tile of scores at a time.
- The decoder of pairs (`pair_decoder`).
"""

import math

import torch
from torch import Tensor, nn

from nanollm.attention import wide
from nanollm.cache import Slots
from nanollm.model import Attention, Config, Decoder
from nanollm.slots import Stored


def pairs(x: Tensor, y: Tensor) -> Tensor:
    """Return x ⊘ y: (..., n, D) and (..., m, D) → (..., n·m, D).

    Row a·m + b is x_a ∘ y_b, the order of Def. 3.6.
    """
    return (x.unsqueeze(-2) * y.unsqueeze(-3)).flatten(-3, -2)


def tensor_attention(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
) -> Tensor:
    """Return tensor attention in which every query sees every pair (Def. 3.6), (..., T, D).

    q is (..., T, D); k1, k2, v1, v2 are (..., n, D).
    """
    return (q @ pairs(k1, k2).mT).softmax(-1) @ pairs(v1, v2)


# ---- three stores ------------------------------------------------------------------------------


class PairSlots(Slots):
    """Base of the stores for pairs, which take k = [k₁ | k₂] and v = [v₁ | v₂], each (B, H, T, 2D).

    scale: factor of the scores; None: 1/√D, as in the decoder; the paper: 1.
    """

    def __init__(self, *place, scale: float | None = None):
        super().__init__(*place)
        self.scale = scale


class FourCache(PairSlots):
    """Def. 3.7: stores K₁, K₂, V₁, V₂, 4·i·D numbers, and forms all pairs for each query."""

    def attention(
        self,
        q: Tensor,
        pos: Tensor,
    ) -> tuple[Tensor, None]:
        """Attend causally with q (B, H·G, T, D): a query sees a pair if it sees both tokens."""
        B, _, T, D = q.shape
        scale = D**-0.5 if self.scale is None else self.scale
        q = scale * q.view(B, self.k.shape[1], -1, T, D)  # (B, H, G, T, D)

        outputs = []
        for t in range(T):
            n = self.length - T + t + 1
            k1, k2 = self.k[:, :, :n].chunk(2, -1)
            v1, v2 = self.v[:, :, :n].chunk(2, -1)
            y = self.one_query(q[:, :, :, t], k1, k2, v1, v2)
            outputs.append(y.flatten(1, 2))
        return torch.stack(outputs, 2), None

    def one_query(
        self,
        q: Tensor,
        k1: Tensor,
        k2: Tensor,
        v1: Tensor,
        v2: Tensor,
    ) -> Tensor:
        """Attend with q (B, H, G, D) to all pairs of n tokens, (B, H, n, D) each → (B, H, G, D)."""
        return tensor_attention(*map(wide, (q, k1, k2, v1, v2))).to(q)


class FactoredFourCache(FourCache):
    """FourCache that never forms a pair.

    tile: the most pairs in a tile (but at least one row); in float32 1 MiB of scores per query.
    """

    def __init__(
        self,
        *place,
        scale: float | None = None,
        tile: int = 2**18,
    ):
        super().__init__(*place, scale=scale)
        self.tile = tile

    def one_query(
        self,
        q: Tensor,
        k1: Tensor,
        k2: Tensor,
        v1: Tensor,
        v2: Tensor,
    ) -> Tensor:
        # online softmax over tiles of rows a (Milakov and Gimelshein, arXiv 1805.02867)
        dtype = q.dtype
        q, k1, k2, v1, v2 = map(wide, (q, k1, k2, v1, v2))
        top = q.new_full((*q.shape[:-1], 1), -math.inf)
        total = 0.0
        out = 0.0
        rows = max(1, self.tile // k2.shape[2])
        for k1_a, v1_a in zip(k1.split(rows, 2), v1.split(rows, 2)):
            # one matrix for all queries of the group
            G_rows = (
                q.shape[2],
                k1_a.shape[2],
            )

            # scores of the pairs (a, b): (K₁ ∘ q) K₂ᵀ
            k1_q = k1_a.unsqueeze(2) * q.unsqueeze(3)  # (B, H, G, rows, D)
            score = k1_q.flatten(2, 3) @ k2.mT
            score = score.unflatten(2, G_rows)  # (B, H, G, rows, n)

            # earlier tiles were weighted against the old maximum: rescale them by e^(top − new)
            new = torch.maximum(top, score.amax((-2, -1)).unsqueeze(-1))
            p = (score - new.unsqueeze(-1)).exp_()
            keep = (top - new).exp()

            # Σ_a V₁[a] ∘ (P V₂)[a]
            p_v2 = (p.flatten(2, 3) @ v2).unflatten(2, G_rows)  # (B, H, G, rows, D)
            out = out * keep + (v1_a.unsqueeze(2) * p_v2).sum(3)
            total = total * keep + p.sum((-2, -1)).unsqueeze(-1)
            top = new
        return (out / total).to(dtype)


class TwoCache(PairSlots):
    """Def. 3.8: stores the pairs, 2·i²·D numbers. Token i adds 2i − 1 pairs.

    New pairs are formed from every earlier k₁, k₂, v₁, v₂, so the four matrices are stored too
    (`tokens`).
    """

    def __init__(self, *place, scale: float | None = None):
        super().__init__(*place, scale=scale)
        self.tokens = Slots()

    def attention(
        self,
        q: Tensor,
        pos: Tensor,
    ) -> tuple[Tensor, None]:
        """Attend as in FourCache. Each pair has a slot, so the attention of Slots does it."""
        if self.scale is not None:
            q = q * (self.scale * q.shape[-1] ** 0.5)  # Slots multiplies by 1/√D
        return super().attention(q, pos)

    def write(
        self,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ):
        tokens = self.tokens
        tokens.write(k, v, pos)
        T = k.shape[2]
        for t in range(T):
            n = tokens.length - T + t + 1
            new_k = new_pairs(*tokens.k[:, :, :n].chunk(2, -1))
            new_v = new_pairs(*tokens.v[:, :, :n].chunk(2, -1))
            super().write(new_k, new_v, pos[:, t : t + 1].expand(-1, 2 * n - 1))
        self.seen = tokens.seen

    def stored(self) -> list[Stored]:
        return super().stored() + self.tokens.stored()


def new_pairs(x: Tensor, y: Tensor) -> Tensor:
    """Return the pairs that contain the last token: x and y (..., n, D) → (..., 2n − 1, D)."""
    left = x * y[..., -1:, :]
    right = x[..., -1:, :] * y[..., :-1, :]
    return torch.cat((left, right), -2)


# ---- a decoder of pairs ------------------------------------------------------------------------


def pair_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Return causal tensor attention over a whole text, (B, H·G, T, D).

    q is (B, H·G, T, D), k and v are (B, H, T, 2D). Query i attends to all pairs of tokens a, b ≤ i.
    It computes T³ scores per head, so it is for training on short texts.
    """
    T, D = q.shape[2:]
    G = q.shape[1] // k.shape[1]
    k1, k2 = k.repeat_interleave(G, 1).chunk(2, -1)
    v1, v2 = v.repeat_interleave(G, 1).chunk(2, -1)

    score = torch.einsum("bhid,bhxd,bhyd->bhixy", q * D**-0.5, k1, k2)
    seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    score = score.masked_fill(~(seen[:, :, None] & seen[:, None]), -math.inf)
    p = score.flatten(3).softmax(-1).view_as(score)
    return torch.einsum("bhixy,bhxd,bhyd->bhid", p, v1, v2)


class PairAttention(nn.Module):
    """The attention layer of a decoder of pairs. A key is [k₁ | k₂] and a value [v₁ | v₂].

    Keys are not rotated: a product of *three* rotated vectors depends on absolute positions, not
    only on distances. So a Llama knows positions here only through the causal mask.
    """

    w_o = Attention.w_o
    project = Attention.project

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        c = config
        # of q, k, v, stacked in qkv
        self.heads = (
            c.n_heads,
            2 * c.n_kv_heads,
            2 * c.n_kv_heads,
        )
        self.qkv = nn.Linear(c.d_model, sum(self.heads) * c.head_dim, bias=c.qkv_bias)
        self.o = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=c.o_bias)

    def forward(
        self,
        x: Tensor,
        angles,
        pos: Tensor,
        cache=None,
    ) -> Tensor:
        q, k, v = self.project(x, None)
        # (B, H, T, 2D): each head's two vectors
        k = torch.cat((k[:, ::2], k[:, 1::2]), -1)
        v = torch.cat((v[:, ::2], v[:, 1::2]), -1)
        if cache is None:
            y = pair_attention(q, k, v)
        else:
            y = cache.attend(q, k, v, pos)
        return self.o(y.transpose(1, 2).flatten(2))  # (B, H·G, T, D) → (B, T, H·G·D)


def pair_decoder(config: Config) -> Decoder:
    """Return a decoder whose layers attend to pairs of tokens; its caches are `PairSlots`."""
    return Decoder(config, PairAttention)


variants = {}  # not in the tables: these caches keep every token
