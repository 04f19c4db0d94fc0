"""What methods and the bridge must know of the layers of a transformers model.

Output projections, RoPE's angles, windows and masks.
"""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nanollm.attention import Sliding, visible
from nanollm.model import rope, rotate

# names of the output projection in model families
OUTPUTS = "o_proj", "out_proj", "dense", "c_proj", "wo"
# layer types and options of models that have states in place of entries begin so
WITHOUT_ATTENTION = "mamba_", "ssm_", "linear_attention", "conv", "recurrent"


def device_of(weight: Tensor) -> torch.device:
    """Return where a weight takes its inputs: the CPU if accelerate has offloaded it."""
    return torch.device("cpu") if weight.is_meta else weight.device


class Attention:
    """The part of a layer's attention that methods ask for. dtype: of the numbers that o takes."""

    def __init__(self, o: nn.Module, heads: int, dtype: torch.dtype):
        self.o = o
        self.heads = heads
        self.dtype = dtype
        self.known = None  # W_O, if it had to be computed

    @property
    def w_o(self) -> Tensor:
        """Return W_O as (d_model, H·G, D), a view.

        If the layer is quantized, offloaded or adapted, it is a copy, made at first use.
        """
        weight = self.o.weight.detach()
        plain = weight.is_floating_point() and not weight.is_meta
        if plain and type(self.o) in (nn.Linear, Conv1D):
            if type(self.o) is Conv1D:
                weight = weight.T
            return weight.unflatten(1, (self.heads, -1))

        # bits, or an adapter: W_O is what the module makes of each unit vector, less its bias
        if self.known is None:
            n = getattr(self.o, "in_features", weight.shape[0])
            with torch.no_grad():
                units = torch.eye(n, dtype=self.dtype, device=device_of(weight))
                products = self.o(units) - self.o(0 * units[:1])
            self.known = products.T.unflatten(1, (self.heads, -1))
        return self.known


def output_projections(model) -> list[nn.Module]:
    """Return each layer's output projection W_O, found by its name (OUTPUTS) and `layer_idx`."""
    name = type(model).__name__
    config = model.config.get_text_config()
    kinds = [*(getattr(config, "layer_types", None) or []), *vars(config)]
    lacking = [
        x for x in WITHOUT_ATTENTION if any(kind.startswith(x) for kind in kinds)
    ]
    if lacking:
        raise ValueError(
            f"{name} has layers without attention ({', '.join(lacking)}…), whose state no "
            "method here compresses; take another model"
        )

    by_layer = {}
    for module in model.get_decoder().modules():
        if not hasattr(module, "layer_idx"):
            continue
        for part in OUTPUTS:
            child = getattr(module, part, None)
            if isinstance(child, nn.Module) and hasattr(child, "weight"):
                by_layer.setdefault(module.layer_idx, child)

    layers = range(config.num_hidden_layers)
    if sorted(by_layer) != [*layers]:
        raise ValueError(
            f"{name} has {len(layers)} layers and {len(by_layer)} output projections "
            f"by a known name ({', '.join(OUTPUTS)}); take another model"
        )
    return [by_layer[layer] for layer in layers]


def rotations(model, keys: list[Tensor]) -> list[Tensor | None]:
    """Return each layer's angles per token (D/2,): zeros if it does not rotate, None if unknown.

    keys: each layer's (1, H, T, D), of a text of T equal tokens. Attention over equal values gives
    that value. So without learned positions the layers' inputs are equal at all positions, and the
    keys differ by their rotation alone.
    """
    config = model.config.get_text_config()
    kind = str(getattr(config, "rope_parameters", None))
    if "dynamic" in kind or "longrope" in kind:  # angles depend on the text's length
        return [None] * len(keys)
    known = []
    for name, x in model.named_buffers():
        if name.endswith("inv_freq") and not x.is_meta:
            known.append(x.float())

    found = []
    for k in keys:
        k = k.float()
        T, D = k.shape[2:]
        pos = torch.arange(T, device=k.device)[None]
        first = k[:, :, :1].expand_as(k)
        fitting = [freq for freq in known if 2 * len(freq) == D]
        best = None
        least = 0.02  # of the keys' norm; the angles that leave less are the layer's
        for freq in [torch.zeros(D // 2), *fitting]:
            turned = rotate(first, *rope(freq.to(k.device), pos))
            error = float((turned - k).norm() / k.norm())
            if error < least:
                best, least = freq, error
        found.append(best)
    return found


def windows(config) -> list[Sliding | None]:
    """Return how far back each layer sees, None if it sees everything."""
    sizes = dict(
        sliding_attention=getattr(config, "sliding_window", None),
        chunked_attention=getattr(config, "attention_chunk_size", None),
    )
    kinds = getattr(config, "layer_types", None)
    if not kinds:  # a model that names no types is taken to have one window for all layers, or none
        kinds = ["sliding_attention"] * config.num_hidden_layers
    found = []
    for kind in kinds:
        size = sizes.get(kind)
        found.append(size and Sliding(size, kind == "chunked_attention"))
    return found


def causal(mask: Tensor, pos: Tensor, sliding: Sliding | None) -> bool:
    """Return whether a mask (B, 1, T, T) for new tokens at pos (1, T) hides just what it must.

    That is later tokens, and what a layer that slides no longer sees.
    """
    shown = mask if mask.dtype == torch.bool else mask == 0
    expected = visible(pos[:, None], None, pos, sliding)
    return torch.equal(shown, expected.expand_as(shown))
