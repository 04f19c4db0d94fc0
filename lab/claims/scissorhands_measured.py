"""Measure Scissorhands' observations (arXiv 2305.17118, Section 3 and Appendix A) on a decoder.

The paper observes that tokens stay important, that an MLP block hardly changes the direction of its
input, and that attention weights follow a power law (claim S7).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from lab.evaluate import held
from lab.replay import Recorder, feed, record
from methods.baselines.quantized import quantise
from methods.scissorhands import Scissorhands
from methods.theory.persistence import even_shares, persistence_ratio, tail_exponent
from nanollm.attention import probabilities
from nanollm.cache import LayerCache, make_cache
from nanollm.model import Decoder


@dataclass(eq=False)
class FourBits(Scissorhands):
    """Round keys and values to 4 bits, each head of a token by itself (claim S9). Bytes are not counted."""

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        groups = [quantise(x, 4, -1) for x in (k, v)]
        super().write(
            *(zero.to(k) + code * scale.to(k) for code, zero, scale in groups), pos
        )


@torch.no_grad()
def attention_maps(model, tokens: Tensor) -> Tensor:
    """Return the weights of full attention for tokens (B, T): (L, B, H·G, T, T)."""
    caches = make_cache(model, Recorder)
    recordings = record(model, caches, tokens)
    return torch.stack(
        [
            probabilities(part.q, cache.k, cache.pos, None, part.pos).flatten(1, 2)
            for cache, part in zip(caches, recordings)
        ]
    )


@torch.no_grad()
def block_similarity(model, tokens: Tensor) -> Tensor:
    """Return each layer's cosine of x and F(x) = x + MLP(x), (L,), mean over tokens (B, T)
    (Appendix A.2)."""
    inputs, outputs = [], []
    norms, mlps = zip(*feed_forwards(model))
    hooks = [
        norm.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
        for norm in norms
    ]
    hooks += [
        mlp.register_forward_hook(lambda module, args, out: outputs.append(out))
        for mlp in mlps
    ]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    x, change = torch.stack(inputs), torch.stack(outputs)  # (L, B, T, d_model)
    return F.cosine_similarity(x, x + change, dim=-1).mean((1, 2))


def feed_forwards(model) -> list[tuple]:
    """Return each layer's norm before its MLP, and the MLP.

    ValueError unless a transformers model's MLP directly follows its layer's
    post_attention_layernorm.
    """
    if isinstance(model, Decoder):
        return [(block.norm2, block.mlp) for block in model.blocks]
    pairs = [
        (x.post_attention_layernorm, x.mlp)
        for x in model.model.modules()
        if hasattr(x, "mlp")
        and hasattr(x, "post_attention_layernorm")
        # Gemma has this norm between the two
        and not hasattr(x, "pre_feedforward_layernorm")
    ]
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
    measured = []
    # one at a time, because its weights take T × T numbers per head
    for text in tokens.split(1):
        p = attention_maps(model, text)
        ratio, chance = (x.nanmean((1, 2)) for x in persistence_ratio(p))
        k = torch.tensor([tail_exponent(even_shares(x)) for x in p])
        measured.append(
            torch.stack(
                [x.cpu() for x in (ratio, block_similarity(model, text), k, chance)]
            )
        )
    return torch.stack(measured, 1)


@torch.no_grad()
def newest_share(
    model, tokens: Tensor, Method: type[LayerCache], **options
) -> tuple[list[float], int]:
    """Return, per layer, the fraction of a head's n entries that are the newest n tokens; and n.

    The caches evict while they read tokens (B, T).
    """
    caches = make_cache(model, Method, **options)
    for cache in caches:
        cache.prompt_done = True
    feed(model, tokens, caches)
    n = caches[0].length
    newest = held(caches, tokens.shape[1])[..., -n:].sum(-1) / n
    return newest.mean((0, 2)).tolist(), n
