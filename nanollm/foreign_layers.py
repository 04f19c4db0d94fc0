"""What methods must know of a transformers model's layers: projections, RoPE's angles, windows, masks."""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nanollm.model import rope, rotate

# names of the output projection in model families
OUTPUTS = "o_proj", "out_proj", "dense", "c_proj", "wo"
# states in place of entries
WITHOUT_ATTENTION = "mamba_", "ssm_", "linear_attention", "conv", "recurrent"


class Attention:
    """The part of a layer's attention that methods ask for. dtype: of the numbers that o takes."""

    def __init__(self, o: nn.Module, heads: int, dtype: torch.dtype):
        self.o, self.heads, self.dtype, self.known = o, heads, dtype, None

    @property
    def w_o(self) -> Tensor:
        """Return W_O as (d_model, H·G, D): a view; of quantized weights a copy, made at first use."""
        weight = self.o.weight.detach()
        if type(self.o) in (nn.Linear, Conv1D) and weight.is_floating_point():
            return (weight.T if type(self.o) is Conv1D else weight).unflatten(
                1, (self.heads, -1)
            )
        # bits, or an adapter: what the module makes of each unit vector
        if self.known is None:
            with torch.no_grad():
                units = torch.eye(
                    self.o.in_features, dtype=self.dtype, device=weight.device
                )
                products = self.o(units) - self.o(0 * units[:1])  # without a bias
                self.known = products.T.unflatten(1, (self.heads, -1))
        return self.known


def output_projections(model) -> list[nn.Module]:
    """Return each layer's output projection W_O, found by its name (OUTPUTS) and `layer_idx`."""
    config, name, by_layer = model.config.get_text_config(), type(model).__name__, {}
    # options may be mamba_…
    kinds = [*(getattr(config, "layer_types", None) or []), *vars(config)]
    if lacking := [
        x for x in WITHOUT_ATTENTION if any(kind.startswith(x) for kind in kinds)
    ]:
        raise ValueError(
            f"{name} has layers without attention ({', '.join(lacking)}…), whose state no "
            "method here compresses; take another model"
        )
    for module in model.get_decoder().modules():
        for part in OUTPUTS if hasattr(module, "layer_idx") else ():
            if isinstance(child := getattr(module, part, None), nn.Module) and hasattr(
                child, "weight"
            ):
                by_layer.setdefault(module.layer_idx, child)
    if sorted(by_layer) != [*range(layers := config.num_hidden_layers)]:
        raise ValueError(
            f"{name} has {layers} layers and {len(by_layer)} output projections "
            f"by a known name ({', '.join(OUTPUTS)}); take another model"
        )
    return [by_layer[layer] for layer in range(layers)]


def rotations(model, keys: list[Tensor]) -> list[Tensor | None]:
    """Return each layer's angles per token (D/2,): zeros if it does not rotate, None if unknown.

    keys (1, H, T, D) are a layer's keys of a text of T equal tokens. Attention over equal values
    gives that value, so the layers' inputs are equal at all positions, and the keys differ by their
    rotation alone.
    """
    rope_config = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    # angles depend on the text's length
    if "dynamic" in str(rope_config) or "longrope" in str(rope_config):
        return [None] * len(keys)
    known = [
        x.float()
        for name, x in model.named_buffers()
        if name.endswith("inv_freq") and not x.is_meta
    ]
    found = []
    for k in keys:
        k, D = k.float(), k.shape[-1]
        pos, best = torch.arange(k.shape[2], device=k.device)[None], (0.02, None)
        for freq in [torch.zeros(D // 2), *(x for x in known if 2 * len(x) == D)]:
            turned = rotate(k[:, :, :1].expand_as(k), *rope(freq.to(k.device), pos))
            best = min(
                best,
                (((turned - k).norm() / k.norm()).item(), freq),
                key=lambda x: x[0],
            )
        found.append(best[1])
    return found


def windows(config) -> list[int | None]:
    """Return how many of the last tokens each layer attends to, None for all."""
    sizes = dict(
        sliding_attention=getattr(config, "sliding_window", None),
        chunked_attention=getattr(config, "attention_chunk_size", None),
    )
    kinds = getattr(config, "layer_types", None) or config.num_hidden_layers * [
        "sliding_attention"
    ]
    return [sizes.get(kind) for kind in kinds]


def causal(mask: Tensor) -> bool:
    """Return whether a mask (B, 1, T, S) for the last T of S tokens hides only later tokens."""
    shown = mask if mask.dtype == torch.bool else mask == 0
    return torch.equal(
        shown, torch.ones_like(shown).tril(mask.shape[-1] - mask.shape[-2])
    )
