"""The decoder: Llama and GPT-2 in one file. Read it from top to bottom.

The cache is explicit. Attention projects q, k and v, rotates q and k (not in GPT-2), and calls
`y = cache.attend(q, k, v, pos)` (slots.py). Without a cache it is causal attention over the text.

Shapes: B batch, T new tokens, H key/value heads, G query heads per key/value head, D head dim,
V vocabulary.
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor, nn
import torch.nn.functional as F

from nanollm.check import check_config, check_forward
from nanollm.slots import note_ids


@dataclass
class Config:
    """Shape of a decoder."""

    vocab_size: int
    max_len: int  # longest sequence, in tokens
    n_layers: int
    n_heads: int  # query heads, H·G
    n_kv_heads: int  # key/value heads, H
    d_model: int
    d_ff: int
    head_dim: int = 0  # D; 0 means d_model / n_heads
    # RMSNorm, RoPE, SwiGLU; or "gpt2": LayerNorm, learned positions, GELU
    family: str = "llama"
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None  # Llama 3.1's; its keys are check.SCALING
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = True  # the output head is the embedding matrix
    # BOS token; used by code that builds prompts, not by the decoder
    bos: int | None = None

    def __post_init__(self):
        check_config(self)
        self.head_dim = self.head_dim or self.d_model // self.n_heads


# ---- RoPE: a token's position turns its queries and keys ---


def rope_frequencies(config: Config, device=None) -> Tensor:
    """Return RoPE's angle per token for each pair of dimensions, (D/2,) (arXiv 2104.09864)."""
    D = config.head_dim
    # on the CPU, so that all devices get the same numbers
    dim = torch.arange(0, D, 2, device="cpu")
    freq = config.rope_theta ** -(dim.float() / D)

    if config.rope_scaling:
        # Pairs with at most `low` turns in the original context rotate `factor` times slower.
        # Pairs with at least `high` turns stay as they are. Between the two the change is linear.
        scaling = config.rope_scaling
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        context = scaling["original_max_position_embeddings"]
        turns = context * freq / (2 * math.pi)
        ramp = (turns - low) / (high - low)
        ramp = ramp.clamp(0, 1)
        freq = freq * (ramp + (1 - ramp) / scaling["factor"])

    return freq if device is None else freq.to(device)


def rope(freq: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of RoPE's angles at pos (..., T): (..., 1, T, D) each, 1 for the heads."""
    angle = pos[..., None].float() * freq
    angle = angle.unsqueeze(-3)
    cos, sin = angle.cos(), angle.sin()
    # both dimensions of a pair turn by its angle; the minus is that of transformers' rotate_half
    cos = torch.cat((cos, cos), -1)
    sin = torch.cat((-sin, sin), -1)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, T, D). Dimension i pairs with i + D/2, as in transformers."""
    # in x = a b c d, a pairs with c and b with d; the partners are c d a b
    D = x.shape[-1]
    partner = x.roll(D // 2, -1)
    # x * cos + partner * sin, rounded once less, and in place: a tensor more cost a small
    # model's prefill 5 % where measured
    turned = x * cos
    return turned.addcmul_(partner, sin)


# ---- A layer: attention, then an MLP ---


def norm(config: Config) -> nn.Module:
    kind = nn.RMSNorm if config.family == "llama" else nn.LayerNorm
    return kind(config.d_model, eps=config.norm_eps)


class Attention(nn.Module):
    """Grouped-query attention: query heads h·G … h·G+G−1 share key/value head h.

    arXiv 2305.13245.
    """

    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.config = config
        D = c.head_dim
        # one matrix for all three: its rows are the heads of q, then those of k, then those of v
        self.heads = c.n_heads, c.n_kv_heads, c.n_kv_heads
        self.qkv = nn.Linear(c.d_model, sum(self.heads) * D, bias=c.qkv_bias)
        self.o = nn.Linear(c.n_heads * D, c.d_model, bias=c.o_bias)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv's weight or bias into the rows of q, k and v; these are views."""
        D = self.config.head_dim
        return x.split([heads * D for heads in self.heads])

    @property
    def w_o(self) -> Tensor:
        """Return the output projection W_O as (d_model, H·G, D), a view."""
        c = self.config
        weight = self.o.weight.detach()
        return weight.unflatten(1, (c.n_heads, c.head_dim))

    def project(self, x: Tensor, angles) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, d_model) to q (B, H·G, T, D), k and v (B, H, T, D).

        With angles, rotate q and k.
        """
        B, T, _ = x.shape
        D = self.config.head_dim
        qkv = self.qkv(x).view(B, T, -1, D)
        qkv = qkv.transpose(1, 2)  # (B, sum of heads, T, D)
        if angles is None:
            return qkv.split(self.heads, 1)

        # q and k lie side by side, so one rotation serves both
        queries, keys, values = self.heads
        qk, v = qkv.split((queries + keys, values), 1)
        qk = rotate(qk, *angles)
        q, k = qk.split((queries, keys), 1)
        return q, k, v

    def forward(self, x: Tensor, angles, pos: Tensor, cache=None) -> Tensor:
        q, k, v = self.project(x, angles)
        if cache is not None:
            y = cache.attend(q, k, v, pos)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        # (B, H·G, T, D) → (B, T, H·G·D) → (B, T, d_model)
        y = y.transpose(1, 2).flatten(2)
        return self.o(y)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202) for Llama; GELU in its tanh form for GPT-2."""

    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.gate = None
        if c.family == "llama":
            self.gate = nn.Linear(c.d_model, c.d_ff, bias=c.mlp_bias)
        self.up = nn.Linear(c.d_model, c.d_ff, bias=c.mlp_bias)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            hidden = F.gelu(self.up(x), approximate="tanh")
        else:
            # silu(gate) * up, in place: else a prefill took 5 to 10 % longer where measured
            gate = self.gate(x)
            hidden = F.silu(gate, inplace=True)
            hidden.mul_(self.up(x))
        return self.down(hidden)


class Block(nn.Module):
    def __init__(self, config: Config, attention=Attention):
        super().__init__()
        self.norm1 = norm(config)
        self.attention = attention(config)
        self.norm2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles, pos: Tensor, cache=None) -> Tensor:
        x = x + self.attention(self.norm1(x), angles, pos, cache)
        x = x + self.mlp(self.norm2(x))
        return x


# ---- The whole model ---


class Decoder(nn.Module):
    """Tokens in, next-token logits out.

    With a cache (a list from `make_cache`, one per layer) only the new tokens are computed. Their
    positions follow all tokens that the cache has seen, evicted ones too. `attention`: the class
    of its layers' attention.
    """

    def __init__(self, config: Config, attention=Attention):
        super().__init__()
        c = config
        self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = None
        if c.family == "gpt2":
            self.positions = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c, attention) for _ in range(c.n_layers))
        self.norm = norm(c)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        if c.family == "llama":
            self.register_buffer("freq", rope_frequencies(c), persistent=False)
        self.apply(self._init)

    def _init(self, module: nn.Module):
        is_linear = isinstance(module, nn.Linear)
        if is_linear or isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if is_linear and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            # x is the sum of 2L branches; if each starts small, the sum keeps its scale
            # (GPT-2, section 2.3)
            std = 0.02 / math.sqrt(2 * self.config.n_layers)
            nn.init.normal_(module.attention.o.weight, std=std)
            nn.init.normal_(module.mlp.down.weight, std=std)

    def _apply(self, fn, recurse=True):
        # .half() must not round RoPE's angles: at position 4000 the worst would be off by a
        # quarter radian in the tiny decoders, and by more in SmolLM2
        super()._apply(fn, recurse)
        if self.config.family == "llama":
            device = self.embed.weight.device
            self.freq = rope_frequencies(self.config, device)
        return self

    def forward(
        self,
        tokens: Tensor,
        cache=None,
        pos: Tensor | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) for tokens (B, T) int64.

        With `last`, only the logits of the last tokens, (B, last, V). `pos` (B or 1, T) overrides
        the positions, and is not checked. Raises ValueError, before a cache changes, if the
        sequence would exceed config.max_len or another check of `check_forward` fails.
        """
        check_forward(self, tokens, cache, last)
        if cache:
            note_ids(cache, tokens)
        if pos is None:
            seen = cache[0].seen if cache else 0
            end = seen + tokens.shape[1]
            pos = torch.arange(seen, end, device=tokens.device)[None]

        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(pos)
            angles = None
        else:
            cos, sin = rope(self.freq, pos)
            angles = cos.to(x.dtype), sin.to(x.dtype)

        for i, block in enumerate(self.blocks):
            layer = cache[i] if cache else None
            x = block(x, angles, pos, layer)

        if last is not None:
            x = x[:, -last:]
        x = self.norm(x)
        return self.head(x)
