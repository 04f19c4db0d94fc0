"""SubGen for tensor attention (Chen et al., arXiv 2503.11108, Lemmas 5.1, 5.2): samples of pairs of tokens.

SubGen (sub_gen.py) is applied to the stream of all pairs (`SubGen2Cache`), which keeps every token to form
them. Or to one stream for each side of a pair, and all pairs are made of what both have kept
(`SubGen4Cache`):

    τ = Σ_{left, right samples} n_c/t · n_c'/t · e^⟨q, k₁ ∘ k₂⟩,   the same for z and the draws of both sides

Differs from the paper: Lemma 5.1 gives no algorithm, so SubGen4Cache is ours. theory/sub_gen.py gives the
constants that the lemmas leave open.
"""
from dataclasses import dataclass

from torch import Tensor

from methods.sub_gen import SubGen
from methods.tensor_attention import PairCache, remember
from nanollm.cache import LayerCache, Stored


@dataclass(eq=False)
class SubGen2Cache(SubGen):
    """Lemma 5.2: the stream of all pairs. To form them it needs every earlier token, so its memory grows."""
    check = PairCache.check

    def __post_init__(self):
        super().__post_init__()
        self.tokens = LayerCache()

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        for new_k, new_v in remember(self.tokens, k, v, pos):
            super().write(new_k, new_v, pos)
        self.seen = self.tokens.seen

    def stored(self) -> list[Stored]:
        return super().stored() + self.tokens.stored()


@dataclass(eq=False)
class SubGen4Cache(SubGen):
    """Lemma 5.1: K₁ and K₂ are clustered apart, V₁ and V₂ drawn apart.

    Every left sample meets every right one, and every left draw every right one, in the factored form: no
    pair is formed, neither of the text nor of what was kept.
    """
    sides = 2
    check = PairCache.check

    def logs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """As in SubGen, (B, H, G, M₁·t·M₂·t) and (B, H, G, s·s)."""
        found = []
        for (x1, log1), (x2, log2) in zip(*(stream.kept() for stream in self.streams)):  # samples, then draws
            score = (q.unsqueeze(3) * x1.unsqueeze(2)) @ x2.unsqueeze(2).mT  # (K₁ ∘ q) K₂ᵀ
            found.append((score + log1[:, :, None, :, None] + log2[:, :, None, None]).flatten(3))
        return tuple(found)

    def weigh(self, p: Tensor) -> Tensor:
        """Σ_a V₁[a] ∘ (P V₂)[a]."""
        one, two = self.streams
        p_v2 = p.unflatten(-1, (self.draws, -1)) @ two.v.unsqueeze(2)
        return (one.v.unsqueeze(2) * p_v2).sum(3)


variants = {}  # nothing here has a budget of entries, and only a decoder of pairs can use it
