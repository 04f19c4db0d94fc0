"""Initial weights: `built` has induction heads in layers 0 and 1, `learned` look-back heads in layer 0."""
from contextlib import contextmanager
import math

import numpy as np
import torch
from torch import Tensor

from nanollm.model import Decoder


@torch.no_grad()
def looking_back(model: Decoder, seed: int, residual: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """Set random weights, but let the heads of layer 0 look back 1 to 4 tokens.

    Outputs into the residual stream have `residual` times the other matrices' standard deviation.
    Embedding dimension 0 is the same for every token. Queries and keys that read only it see nothing but
    RoPE's angle, and a query turned by −Δ peaks at the token Δ back. Such a head copies a random subspace U
    of that token into a free subspace S. Returns all such U and S, (D, d_model) each, the dimensions of a
    head in which RoPE turns slowly, and the embedding's standard deviation.
    """
    c = model.config
    generator = torch.Generator().manual_seed(seed)
    std = c.d_model ** -0.5
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            into_stream = name.endswith(("o.weight", "down.weight"))
            size = weight.shape[1] ** -0.5 * (residual if into_stream else 1)
            weight.copy_(torch.randn(weight.shape, generator=generator) * size)
    model.embed.weight.copy_(torch.randn(model.embed.weight.shape, generator=generator) * std)
    model.embed.weight[:, 0] = 4 * std

    D, H, G = c.head_dim, c.n_kv_heads, c.n_heads // c.n_kv_heads
    drawn = (torch.randn(c.d_model, c.d_model, generator=generator) for _ in range(2))
    U, S = (torch.linalg.qr(x)[0].split(D) for x in drawn)
    fast, half = 6, D // 2  # the six fastest of RoPE's D/2 angles tell neighbours apart
    first = model.blocks[0].attention
    q, k, v = first.split(first.qkv.weight)
    q.mul_(0.1)
    k.mul_(0.1)

    # score 30 at the peak; dimension 0 is about 3 after the norm
    sharpness = math.sqrt(30 * math.sqrt(D) / fast) / 3
    back = [1 if h % G == 0 else 2 + h // G for h in range(c.n_heads)]  # how far: 1, 2, 1, 3, 1, 4
    for h in range(c.n_heads):
        angle = -back[h] * model.freq[:fast]
        q[h * D:h * D + fast, 0] = sharpness * angle.cos()
        q[h * D + half:h * D + half + fast, 0] = sharpness * angle.sin()
        first.o.weight[:, h * D:(h + 1) * D] = std * S[h].T
    for h in range(H):
        k[h * D:h * D + fast, 0] = sharpness
        v[h * D:(h + 1) * D] = U[h]
    return U, S, torch.tensor([i for i in range(D) if i % half >= fast]), std


@torch.no_grad()
def induction_start(model: Decoder, seed: int):
    """Set weights under which layers 0 and 1 form induction heads (arXiv 2209.11895); all are trained.

    Layer 0 looks back. Layer 1: query U of the current token against key S meets the token *after* an earlier
    occurrence, and the value head copies that token's embedding to where the output head reads it.
    """
    U, S, slow, std = looking_back(model, seed, residual=0)  # slow: content must not depend on distance
    c, second = model.config, model.blocks[1].attention
    D, H, G = c.head_dim, c.n_kv_heads, c.n_heads // c.n_kv_heads
    q, k, v = second.split(second.qkv.weight)
    for h in range(H):
        q[h * G * D:(h * G + 1) * D] *= 0.1
        k[h * D:(h + 1) * D] *= 0.1
        q[h * G * D + slow] = 3 * U[h][slow]
        k[h * D + slow] = 3 * S[h * G][slow]
        v[h * D:(h + 1) * D] = U[H + h]
        second.o.weight[:, h * G * D:(h * G + 1) * D] = 4 * std * U[H + h].T


def learned_start(model: Decoder, seed: int):
    """Set weights under which layer 0 looks back and no head matches or copies: retrieval must be learned."""
    looking_back(model, seed, residual=(2 * model.config.n_layers) ** -0.5)


# ---- so that retrieval spreads over layers ---

def left_out(rng: np.random.Generator, B: int, layers: int, heads: int, share: float = 0.15) -> Tensor:
    """Return (layers, B, heads): 0 where a document's head, or its layer, is left out; never layer 0."""
    stays = (rng.random((layers, B, heads)) >= share) & (rng.random((layers, B, 1)) >= share)
    stays[0] = True
    return torch.from_numpy(stays.astype(np.float32))


@contextmanager
def without_heads(model: Decoder, stays: Tensor):
    """Within, the output of each head (layers, B, heads) counts as often as `stays` says."""
    def weigh(of_layer: Tensor):
        def hook(module, args):
            B, T, _ = args[0].shape
            heads = args[0].view(B, T, of_layer.shape[1], -1) * of_layer[:, None, :, None].to(args[0])
            return heads.view(B, T, -1)
        return hook

    hooks = [block.attention.o.register_forward_pre_hook(weigh(of_layer))
             for block, of_layer in zip(model.blocks, stays)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
