"""Run any causal language model of transformers with this project's caches.

Each layer of such a model first gives its new keys and values to a transformers cache, and then calls an
attention function. Here the cache is `Memory`, which only counts tokens. The attention function is
`attention`. It finds the layer's LayerCache in the memory of the current call, and calls its `attend`.

    memory = attach(model, H2O, budget=64)
    model(prompt, past_key_values=memory)
    memory.compress(prompt)
    model.generate(prompt, past_key_values=memory, max_new_tokens=20)  # goes on from the compressed cache
    detach(model)

With LayerCache the model computes the same as with its own cache. A call that the bridge cannot serve raises
a ValueError. Calls are checked before the first layer runs, so a refused call changes nothing. Beam search,
assisted decoding and gradients are refused.
"""
from inspect import signature
import sys
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.pytorch_utils import Conv1D

from nanollm.cache import LayerCache, begin_turn, compress, copied, crop, make_cache
from nanollm.check import check_forward
from nanollm.model import rope, rotate

NAME = "nanollm"  # the name under which transformers knows our attention function
PAST = "does not go through transformers' attention interface; take another model"
# arguments of an attention function that `attention` does not implement
REFUSED = {"softcap": "caps its scores", "s_aux": "has sink logits", "position_bias": "biases its scores"}
OUTPUTS = "o_proj", "out_proj", "dense", "c_proj", "wo"  # names of the output projection in model families


# ---- the memory: the cache that transformers sees ----------------------------------------------------------

class Memory(Cache):
    """A transformers cache made of one LayerCache per layer, for one batch of texts.

    Any objects with `attend`, `seen` and `slots` may stand for the LayerCaches.
    """

    def __init__(self, model: "Bridged", caches: list[LayerCache]):
        super().__init__(layers=[])  # those of transformers, which would store keys and values
        self.model, self.caches = model, caches
        self.expected = None  # during a call: how many tokens each layer has seen when the call ends
        model.attach()

    def compress(self, tokens: Tensor):
        """Compress the prompt, tokens (B, T), which the model has read, or the conversation so far.

        First the last token's entry is forgotten, because `generate` goes on by feeding that token again; the
        method has seen its query, and its second reading attends to the compressed cache.
        """
        self.check_whole()
        if self.get_seq_length() != tokens.shape[1]:
            raise ValueError(f"the memory has seen {self.get_seq_length()} tokens, but the prompt has "
                             f"{tokens.shape[1]}; call the model with past_key_values=memory first")
        crop(self.caches, tokens.shape[1] - 1)
        compress(self.model, tokens[:, :-1], self.caches)

    def begin_turn(self):
        """Read on as in a prompt: a conversation's next turn, after which `compress` is called again."""
        begin_turn(self.caches)

    def begin(self, decoder: nn.Module, call: dict):
        """Check a call before the first layer runs: ValueError if the bridge cannot serve it."""
        if decoder is not self.model.decoder:
            raise ValueError("this memory belongs to another model; make one by attach(model, …)")
        if decoder.training:
            raise ValueError("the model is being trained, with dropout or checkpoints; call model.eval()")
        self.check_whole()
        tokens, mask, seen = call.get("input_ids"), call.get("attention_mask"), self.get_seq_length()
        tokens = call.get("inputs_embeds") if tokens is None else tokens
        end = seen + (0 if tokens is None else tokens.shape[1])
        if end == seen:
            raise ValueError(f"the call has no tokens beyond the {seen} that the memory has seen; give some")
        for layer, window in enumerate(self.model.windows):
            if window is not None and end > window:
                raise ValueError(f"layer {layer} attends to the last {window} tokens alone, and the text has "
                                 f"{end}; shorten the text, or take another model")
        for name in ("position_ids", "cache_position"):
            pos = call.get(name)
            if pos is not None and pos.dim() < 3 and (  # positions of images have three dimensions
                    pos.shape[-1] != end - seen or (pos != torch.arange(seen, end, device=pos.device)).any()):
                raise ValueError(f"{name} must be {seen} … {end - 1}, as the memory has seen {seen} tokens; "
                                 f"leave {name} out, and give each text a row of its own")
        if isinstance(mask, Tensor) and mask.dim() == 2 and (mask.shape[1] < end or not mask.all()):
            raise ValueError(f"attention_mask must show all {end} tokens, those in the memory included; "
                             "give a batch texts of one length, and leave attention_mask out")
        self.expected = end

    def end(self):
        """Check after the last layer: ValueError unless every layer has read the new tokens once."""
        for layer, cache in enumerate(self.caches):
            if cache.seen != self.expected:
                raise ValueError(f"layer {layer} {PAST}")
        self.expected = None

    def check_whole(self):
        """Raise ValueError if an earlier call stopped after only some layers had read its tokens."""
        if len({cache.seen for cache in self.caches}) > 1:
            raise ValueError("an earlier call stopped after only some layers had read its tokens; "
                             "make another memory by attach(model, …) and feed the prompt again")

    # ---- what transformers asks of a cache ----

    def update(self, k: Tensor, v: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        """Return k and v as they are. `attention`, which is called next, stores them."""
        if not self.expected or self.model.model.config._attn_implementation != NAME:
            raise ValueError("the model was detached, or never attached; "
                             "call attach(model, …) before using a memory")
        return k, v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.caches[layer_idx].seen

    def get_mask_sizes(self, new, layer_idx: int) -> tuple[int, int]:
        """Return (length, offset) of a mask that covers only the new tokens.

        new: their number; in older versions of transformers, their positions.
        """
        return len(new) if isinstance(new, Tensor) else new, self.get_seq_length(layer_idx)

    def __len__(self) -> int:
        return len(self.caches)

    def __deepcopy__(self, _) -> "Memory":
        """Return an independent copy. Both refer to the same model."""
        return Memory(self.model, copied(self.caches))

    def refuse(self, *_):
        raise ValueError("a memory cannot repeat texts or take tokens back, as beam search and assisted "
                         "decoding need; use greedy decoding or sampling")

    reorder_cache = batch_select_indices = batch_repeat_interleave = refuse
    crop = activate_past_recording = reset = refuse


# ---- the attention function, called by each layer ----------------------------------------------------------

def attention(module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None,
              dropout: float = 0.0, **more) -> tuple[Tensor, None]:
    """Return attention's output (B, T, H·G, D) for new tokens, from the layer's cache in the memory in use.

    q (B, H·G, T, D), k and v (B, H, T, D). In a call without a memory this is the model's usual attention.
    """
    memory = module.attachment.memory if hasattr(module, "attachment") else None
    if memory is None:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, dropout=dropout, **more)
    cache, T, D = memory.caches[module.layer_idx], *q.shape[2:]
    if refused := next((name for name in REFUSED if more.get(name) is not None), None):
        raise ValueError(f"layer {module.layer_idx} {REFUSED[refused]} ({refused}); take another model")
    if k.shape != v.shape:
        raise ValueError(f"layer {module.layer_idx} has keys of {k.shape[-1]} numbers and values of "
                         f"{v.shape[-1]}; take another model")
    if mask is not None and not causal(mask):
        raise ValueError("the mask is not causal; give a batch texts of one length, and no mask")
    if scaling is not None and scaling != D ** -0.5:
        q = q * (scaling * D ** 0.5)  # LayerCache multiplies by 1/√D itself
    with torch.no_grad():
        y = cache.attend(q, k, v, torch.arange(cache.seen, cache.seen + T, device=q.device)[None])
    if q.requires_grad:
        y.requires_grad_().register_hook(no_gradient)
    return y.transpose(1, 2).contiguous(), None


def no_gradient(_):
    raise ValueError("no gradient goes through a memory; read the text without one")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


# ---- the model ---------------------------------------------------------------------------------------------

class Bridged:
    """A causal language model of transformers, called as our decoder: tokens, caches → logits.

    Raises ValueError if the model's attention cannot be replaced. The first Memory replaces it, until
    `detach`. Calls without a Memory still use the model's usual attention.
    """

    def __init__(self, model):
        model = getattr(model, "_orig_mod", model)  # unwraps torch.compile
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"{type(model).__name__} is not a model of transformers; "
                             "load one with AutoModelForCausalLM.from_pretrained")
        c, name = model.config.get_text_config(), type(model).__name__
        heads = getattr(c, "num_attention_heads", None)
        if model.config.is_encoder_decoder or not heads:
            lacks = "has an encoder" if model.config.is_encoder_decoder else "has no attention heads"
            raise ValueError(f"{name} {lacks}; take another model")
        if not model._can_set_attn_implementation():
            raise ValueError(f"{name} {PAST}")
        self.blocks = [SimpleNamespace(attention=SimpleNamespace(o=o, w_o=w_o(o, heads)))
                       for o in output_projections(model)]
        self.model, self.parameters, self.embed = model, model.parameters, model.get_input_embeddings()
        self.config = SimpleNamespace(
            n_layers=len(self.blocks), n_heads=heads, n_kv_heads=getattr(c, "num_key_value_heads", heads),
            head_dim=self.blocks[0].attention.w_o.shape[2], d_model=c.hidden_size,
            vocab_size=self.embed.num_embeddings, max_len=c.max_position_embeddings,
            bos=getattr(c, "bos_token_id", None))
        self.freq, self.windows = frequencies(model, self.config.head_dim), windows(c)
        self.decoder = model.get_decoder()

    def __call__(self, tokens: Tensor, caches: list[LayerCache] | None = None, last: int = 0) -> Tensor:
        """Return logits (B, T, V) for tokens (B, T) int64; if `last` > 0, only the last ones."""
        check_forward(self, tokens, caches, last or None)
        memory = Memory(self, caches) if caches else None
        return self.model(tokens, past_key_values=memory, use_cache=bool(caches), logits_to_keep=last).logits

    def attach(self):
        """Replace the model's attention, unless it is replaced already."""
        if not hasattr(self.model, "attachment"):
            attachment = SimpleNamespace(memory=None, before=self.model.config._attn_implementation, hooks=[
                self.decoder.register_forward_pre_hook(before, with_kwargs=True),
                self.decoder.register_forward_hook(after, with_kwargs=True)])
            for module in self.model.modules():  # a layer's attention looks up the memory of the current call
                module.attachment = attachment
        if self.model.config._attn_implementation != NAME:
            self.model.set_attn_implementation(NAME)


def before(decoder: nn.Module, args: tuple, kwargs: dict):
    """Let the memory check a call before the first layer, if the call has one (pre-hook)."""
    decoder.attachment.memory = None  # an earlier call may have been broken off
    call = by_name(decoder, args, kwargs)
    if isinstance(memory := call.get("past_key_values"), Memory):
        memory.begin(decoder, call)
        decoder.attachment.memory = memory


def after(decoder: nn.Module, *_):
    """Let the memory check a call after the last layer, if the call has one (hook)."""
    memory, decoder.attachment.memory = decoder.attachment.memory, None
    if memory is not None:
        memory.end()


def by_name(decoder: nn.Module, args: tuple, kwargs: dict) -> dict:
    """Return all arguments of a call by name."""
    return dict(zip([*signature(type(decoder).forward).parameters][1:], args)) | kwargs


def attach(model, Method=LayerCache, **options) -> Memory:
    """Return a memory to pass as `past_key_values`; its `compress` compresses the prompt."""
    bridged = Bridged(model)
    return Memory(bridged, make_cache(bridged, Method, **options))


def detach(model):
    """Restore the model's own attention."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "attachment"):
        attachment = model.attachment
        model.set_attn_implementation(attachment.before)
        for hook in attachment.hooks:
            hook.remove()
        for module in model.modules():
            vars(module).pop("attachment", None)


# ---- parts of a model that methods need: output projections, RoPE's angles, masks --------------------------

def output_projections(model) -> list[nn.Module]:
    """Return each layer's output projection W_O, found by its name (OUTPUTS) and `layer_idx`."""
    by_layer, layers = {}, model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        for name in OUTPUTS if hasattr(module, "layer_idx") else ():
            if isinstance(child := getattr(module, name, None), (nn.Linear, Conv1D)):
                by_layer.setdefault(module.layer_idx, child)
    if sorted(by_layer) != [*range(layers)]:
        raise ValueError(f"{type(model).__name__} has {layers} layers and {len(by_layer)} output projections "
                         f"by a known name ({', '.join(OUTPUTS)}); take another model")
    return [by_layer[layer] for layer in range(layers)]


def w_o(projection: nn.Module, heads: int) -> Tensor:
    """Return an output projection's weights as (d_model, H·G, D), a view."""
    weight = projection.weight.T if isinstance(projection, Conv1D) else projection.weight
    return weight.detach().unflatten(1, (heads, -1))


def frequencies(model, head_dim: int) -> Tensor | None:
    """Return RoPE's angles per token (D/2,) if the model rotates as our decoder, else None."""
    rotary = next((module for module in model.modules() if hasattr(module, "inv_freq")), None)
    rotate_qk = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
    if rotate_qk is None or rotary is None or 2 * len(rotary.inv_freq) != head_dim or rotary.inv_freq.is_meta:
        return None
    freq = rotary.inv_freq.float()
    pos = torch.tensor([[0, 1, 7]], device=freq.device)
    x = torch.linspace(-1, 1, 3 * head_dim, device=freq.device).view(1, 1, 3, -1)
    try:
        theirs = rotate_qk(x, x, *rotary(x, pos))[1]
    except (TypeError, ValueError, RuntimeError):  # another kind of rotation
        return None
    return freq if torch.allclose(theirs, rotate(x, *rope(freq, pos)), atol=1e-5) else None


def windows(config) -> list[int | None]:
    """Return how many of the last tokens each layer attends to, None for all."""
    sizes = dict(sliding_attention=getattr(config, "sliding_window", None),
                 chunked_attention=getattr(config, "attention_chunk_size", None))
    kinds = getattr(config, "layer_types", None) or config.num_hidden_layers * ["sliding_attention"]
    return [sizes.get(kind) for kind in kinds]


def causal(mask: Tensor) -> bool:
    """Return whether a mask (B, 1, T, S) for the last T of S tokens hides only later tokens."""
    shown = mask if mask.dtype == torch.bool else mask == 0
    return torch.equal(shown, torch.ones_like(shown).tril(mask.shape[-1] - mask.shape[-2]))
