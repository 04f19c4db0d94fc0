"""Where a model of transformers keeps what methods ask for: output projections, RoPE's angles, masks."""
import sys

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nanollm.model import rope, rotate

OUTPUTS = "o_proj", "out_proj", "dense", "c_proj", "wo"  # what families call an output projection


def output_projections(model) -> list[nn.Module]:
    """What multiplies the heads' outputs, a layer each: found by name, beside the number of the layer."""
    found, layers = {}, model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        for name in OUTPUTS if hasattr(module, "layer_idx") else ():
            if isinstance(child := getattr(module, name, None), (nn.Linear, Conv1D)):
                found.setdefault(module.layer_idx, child)
    if sorted(found) != [*range(layers)]:
        raise ValueError(f"{type(model).__name__} has {layers} layers and {len(found)} output projections by "
                         f"a known name ({', '.join(OUTPUTS)}); take another model")
    return [found[layer] for layer in range(layers)]


def w_o(projection: nn.Module, heads: int) -> Tensor:
    """Its weights as (d_model, H·G, D): a view."""
    weight = projection.weight.T if isinstance(projection, Conv1D) else projection.weight
    return weight.detach().unflatten(1, (heads, -1))


def frequencies(model, head_dim: int) -> Tensor | None:
    """RoPE's angles per token (D/2,), if this model rotates keys as our decoder does; else None."""
    rotary = next((module for module in model.modules() if hasattr(module, "inv_freq")), None)
    turn = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
    if turn is None or rotary is None or 2 * len(rotary.inv_freq) != head_dim or rotary.inv_freq.is_meta:
        return None
    freq = rotary.inv_freq.float()
    pos = torch.tensor([[0, 1, 7]], device=freq.device)
    x = torch.linspace(-1, 1, 3 * head_dim, device=freq.device).view(1, 1, 3, -1)
    try:
        theirs = turn(x, x, *rotary(x, pos))[1]
    except (TypeError, ValueError, RuntimeError):  # a rotation of another kind
        return None
    return freq if torch.allclose(theirs, rotate(x, *rope(freq, pos)), atol=1e-5) else None


def windows(config) -> list[int | None]:
    """How many of the last tokens each layer attends to, None for all; [] if the config does not say."""
    sizes = {kind: getattr(config, name, None) for kind, name in (
        ("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size"))}
    return [sizes.get(kind) for kind in getattr(config, "layer_types", None) or ()]


def causal(mask: Tensor) -> bool:
    """Whether a mask (B, 1, T, S) for the last T of S tokens hides later tokens and nothing else."""
    shown = mask if mask.dtype == torch.bool else mask == 0
    return torch.equal(shown, torch.ones_like(shown).tril(mask.shape[-1] - mask.shape[-2]))
