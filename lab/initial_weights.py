"""Initial weights of the shipped decoders: with induction heads (`built`), or look-back heads alone."""
from contextlib import contextmanager
from functools import partial
import math

import torch
from torch import Tensor

from nanollm.model import Decoder

CONFIG = dict(vocab_size=2048, max_len=3072, n_layers=6, n_heads=6, n_kv_heads=3, d_model=192, d_ff=512,
              rope_theta=5e5)  # of both


@torch.no_grad()
def looking_back(model: Decoder, seed: int, residual: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """Draw random weights, and make the heads of layer 0 look back 1 to 4 tokens.

    Matrices that write into the residual stream have `residual` times the standard deviation of the others.

    Embedding dimension 0 is the same for every token. A head whose queries and keys read only this dimension
    depends only on RoPE's angles, so a query turned by −Δ has its highest score at the token Δ back. The head
    copies that token's content in a random subspace U into a subspace S, which nothing else uses.

    Returns all U and S, (D, d_model) each; the dimensions of a head in which RoPE turns slowly; and the
    embedding's standard deviation.
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
    fast, half = 6, D // 2  # the six fastest of RoPE's D/2 angles distinguish neighbours
    first = model.blocks[0].attention
    q, k, v = first.split(first.qkv.weight)
    q.mul_(0.1)
    k.mul_(0.1)

    # score 30 at the peak; dimension 0 is about 3 after the norm
    sharpness = math.sqrt(30 * math.sqrt(D) / fast) / 3
    back = [1 if h % G == 0 else 2 + h // G for h in range(c.n_heads)]  # Δ of each head: 1, 2, 1, 3, 1, 4
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
    """Set weights with which layers 0 and 1 form induction heads (arXiv 2209.11895).

    In layer 0 each token gets the content U of an earlier token in S. In layer 1 the query reads the current
    token's U, and the key reads S. They match at the token *after* an earlier occurrence. The head copies
    that token's embedding to where the output head reads it. Training changes all these weights.
    """
    # layer 1 matches in the slow dimensions, where a score hardly depends on distance
    U, S, slow, std = looking_back(model, seed, residual=0)
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
    """Set weights with which layer 0 looks back. Matching and copying must be learned."""
    looking_back(model, seed, residual=(2 * model.config.n_layers) ** -0.5)


@contextmanager
def without_heads(model: Decoder, stays: Tensor):
    """Multiply each head's output by `stays` (layers, B, heads) within a `with` block."""
    def multiply(_, args, factor):
        return (args[0].unflatten(2, (factor.shape[1], -1)) * factor[:, None, :, None]).flatten(2)

    hooks = [block.attention.o.register_forward_pre_hook(partial(multiply, factor=factor))
             for block, factor in zip(model.blocks, stays)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
