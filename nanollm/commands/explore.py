"""Make docs/index.html, a page in which a decoder runs: python -m nanollm explore."""
import base64

import torch
from torch import Tensor

from nanollm.model import rope_frequencies


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of a matrix to 8 bits. Return codes (n, m) of int8 and scales (n,)."""
    weight = weight.detach().float().cpu()
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def packed(model) -> tuple[dict, bytes]:
    """Return the decoder as nanollm/page/decoder.js reads it: sizes with names and shapes, and the file.

    All 32-bit numbers come first (norms, and a scale for each row of a matrix), then the matrices in 8 bits.
    """
    c = model.config
    if c.family != "llama" or c.qkv_bias or c.o_bias or c.mlp_bias or not c.tie_embeddings:
        raise ValueError("the page runs Llama decoders without biases and with tied embeddings; give --text "
                         "FILE, and the page shows stored results of this model")
    tensors, floats, codes = [], [], []
    for name, weight in model.named_parameters():
        tensors.append([name, list(weight.shape)])
        if weight.dim() == 2:
            code, weight = rounded(weight)
            codes.append(code)
        floats.append(weight.detach().float().cpu())
    config = {name: getattr(c, name) for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "d_model",
                                                  "d_ff", "vocab_size", "norm_eps", "max_len")}
    data = b"".join(x.numpy().tobytes() for x in floats + codes)
    return dict(config=config | dict(freq=rope_frequencies(c).tolist()), tensors=tensors), data


def vocabulary(encoding) -> list[str]:
    """Return the bytes of each token in base64, in the order of their ranks."""
    return [base64.b64encode(token).decode() for token in encoding.token_byte_values()]
