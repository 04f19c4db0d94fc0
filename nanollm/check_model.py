"""Checks of a decoder's Config and of its arguments. Each raises a ValueError of one line."""
import torch
from torch import Tensor

from nanollm.check import check_caches, check_tokens, check_type, whole

SCALING = dict(factor=float, low_freq_factor=float, high_freq_factor=float,
               original_max_position_embeddings=int)  # keys of Llama 3.1's rope_scaling


def check_field(name: str, x, kind: type):
    """Raise ValueError unless x fits `kind`; numbers must be above 0, also after rounding to 32 bits."""
    if kind is int:
        whole(name, x, 1, 2 ** 31 - 1)
    else:
        check_type(name, x, kind)
    if kind is float and x < torch.finfo(torch.float32).tiny:
        raise ValueError(f"{name} {x!r:.60} must be a finite number above 0")


def check_config(c):
    """Raise ValueError unless a decoder can have this shape; turn NumPy's numbers into Python's, for json."""
    if c.family not in ("llama", "gpt2"):
        raise ValueError(f"family {c.family!r} is unknown; use 'llama' or 'gpt2'")
    for name, kind in type(c).__annotations__.items():
        x = getattr(c, name)
        if kind in (int, float, bool):
            if (name, x) != ("head_dim", 0):  # head_dim 0: Config computes it
                check_field(name, x, kind)
            setattr(c, name, kind(x))

    if not c.head_dim and c.d_model % c.n_heads:
        raise ValueError(f"d_model {c.d_model} is not a multiple of n_heads {c.n_heads}; set head_dim")
    if c.n_heads % c.n_kv_heads:
        raise ValueError(f"n_heads {c.n_heads} is not a multiple of n_kv_heads {c.n_kv_heads}")
    head_dim = c.head_dim or c.d_model // c.n_heads
    if c.family == "llama" and head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; RoPE rotates pairs, so make it even")

    if c.rope_scaling is not None:
        check_field("rope_scaling", c.rope_scaling, dict)
        if c.rope_scaling.keys() != SCALING.keys():
            raise ValueError(f"rope_scaling {c.rope_scaling!r:.60} must hold {', '.join(SCALING)} "
                             "and nothing else")
        for name, kind in SCALING.items():
            check_field(name, c.rope_scaling[name], kind)
        c.rope_scaling = {name: kind(c.rope_scaling[name]) for name, kind in SCALING.items()}
        low, high = c.rope_scaling["low_freq_factor"], c.rope_scaling["high_freq_factor"]
        if low >= high:
            raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")


def check_forward(model, tokens: Tensor, caches, pos: Tensor | None, last: int | None):
    """Raise ValueError unless the arguments fit the decoder and the text is not too long."""
    check_tokens(tokens)
    V, longest, T = model.config.vocab_size, model.config.max_len, tokens.shape[1]
    # not on a GPU, where reading the two numbers would wait for all work before it
    if tokens.device.type == "cpu" and (int(tokens.min()) < 0 or int(tokens.max()) >= V):
        raise ValueError(f"token ids {int(tokens.min())} … {int(tokens.max())} must lie in the vocabulary "
                         f"0 … {V - 1}; use the model's own tokenizer")
    if caches is not None:
        check_caches(caches, len(model.blocks), len(tokens))
    if last is not None:
        whole("last", last, 1, T)
    if (end := T + (caches[0].seen if caches else 0)) > longest:
        raise ValueError(f"{end} tokens exceed the model's length of {longest}; shorten the text")
    if pos is not None:
        check_tokens(pos, "positions")
        low, high = int(pos.min()), int(pos.max())
        if pos.shape not in ((1, T), tokens.shape) or low < 0 or high >= longest:
            raise ValueError(f"positions {low} … {high} of shape {tuple(pos.shape)} must lie in "
                             f"0 … {longest - 1} and have the shape {tuple(tokens.shape)} or (1, {T})")
