"""Measure Scissorhands' observations (arXiv 2305.17118, Section 3, Appendix A) on a decoder.

The paper observes that tokens stay important, that an MLP block hardly changes the direction of its
input, and that attention weights follow a power law (claim S7).
"""

import torch
from torch import Tensor
import torch.nn.functional as F

from lab.replay import Recorder, record
from methods.scissorhands import BudgetSlots, Scissorhands
from methods.theory.persistence import even_shares, persistence_ratio, tail_exponent
from methods.baselines.rounded import rounded
from nanollm.attention import probabilities, visible
from nanollm.cache import make_cache
from nanollm.model import Decoder


class FourBitSlots(BudgetSlots):
    """Round keys and values to 4 bits, each head of a token by itself. Bytes count as exact."""

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        super().write(rounded(k, 4, -1), rounded(v, 4, -1), pos)


class FourBits(Scissorhands):
    """Scissorhands in 4 bits (claim S9)."""

    store = FourBitSlots


@torch.no_grad()
def attention_maps(model, tokens: Tensor) -> Tensor:
    """Return the weights of full attention for tokens (B, T): (L, B, H·G, T, T)."""
    recordings = record(model, make_cache(model, store=Recorder), tokens)
    windows = getattr(model, "windows", [None] * len(recordings))
    maps = []
    for part, sliding in zip(recordings, windows):
        mask = visible(part.pos[:, None], None, part.pos, sliding)
        p = probabilities(part.q, part.k, mask)
        maps.append(p.flatten(1, 2).to(tokens.device))
    return torch.stack(maps)


@torch.no_grad()
def block_similarity(model, tokens: Tensor) -> Tensor:
    """Return each layer's cosine of x and F(x) = x + MLP(x), (L,) (Appendix A.2).

    It is the mean over tokens (B, T).
    """
    inputs = []
    outputs = []
    hooks = []
    for norm, mlp in feed_forwards(model):
        hooks += [
            norm.register_forward_hook(lambda _, given, out: inputs.append(given[0])),
            mlp.register_forward_hook(lambda _, given, out: outputs.append(out)),
        ]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    x = torch.stack(inputs)  # (L, B, T, d_model)
    change = torch.stack(outputs)
    return F.cosine_similarity(x, x + change, dim=-1).mean((1, 2))


def feed_forwards(model) -> list[tuple]:
    """Return each layer's norm before its MLP, and the MLP.

    ValueError unless every layer of a transformers model has a post_attention_layernorm and an mlp,
    and no post_feedforward_layernorm.
    """
    if isinstance(model, Decoder):
        return [(block.norm2, block.mlp) for block in model.blocks]
    pairs = []
    for x in model.model.modules():
        # where there is one (Gemma 2, OLMo 2), the other norm is not the MLP's
        both = hasattr(x, "mlp") and hasattr(x, "post_attention_layernorm")
        if both and not hasattr(x, "post_feedforward_layernorm"):
            pairs.append((x.post_attention_layernorm, x.mlp))
    if len(pairs) != len(model.blocks):
        raise ValueError(
            f"only {len(pairs)} of {len(model.blocks)} layers have a post_attention_layernorm "
            "directly before an mlp; take a model in which all do"
        )
    return pairs


@torch.no_grad()
def observed(model, tokens: Tensor) -> Tensor:
    """Return the observations on texts (B, T): (4, B, L).

    They are the persistence ratio, the cosine of x and F(x), the tail exponent, and the ratio by
    chance.
    """
    texts = []
    # one at a time, because its weights take T × T numbers per head
    for text in tokens.split(1):
        p = attention_maps(model, text)
        ratio, chance = (x.nanmean((1, 2)) for x in persistence_ratio(p))
        exponent = torch.tensor([tail_exponent(even_shares(x)) for x in p])
        each = ratio, block_similarity(model, text), exponent, chance
        texts.append(torch.stack([x.cpu() for x in each]))
    return torch.stack(texts, 1)
