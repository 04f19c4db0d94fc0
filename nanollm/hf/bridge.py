"""Run any causal language model of transformers with this project's caches.

Each layer of such a model first gives its new keys and values to a transformers cache, and then calls an
attention function. Here the cache is `Memory`. It stores nothing, but attaches the layer's LayerCache to the
keys. The attention function is `attention`. It takes the LayerCache from the keys and calls its `attend`.

    memory = attach(model, H2O, budget=64)
    model(prompt[:, :-1], past_key_values=memory)
    memory.end_prompt()
    model.generate(prompt, past_key_values=memory, max_new_tokens=20)  # goes on from the compressed cache
    detach(model)

With LayerCache the model computes the same as with its own cache. A call that the bridge cannot serve raises
a ValueError. Calls are checked before the first layer runs, so a refused call changes nothing. Beam search,
assisted decoding, `reset`, `crop` and `copy.deepcopy` work as with the model's own cache, unless the method's
state does not allow it.

Needs transformers 4.56 or newer; tested with 4.56.2 and the version in requirements.txt.
"""
from collections.abc import Callable
from copy import copy
from dataclasses import fields
from functools import partial
from inspect import signature
import sys
from types import SimpleNamespace

import torch
from torch import Tensor, nn
import transformers

if tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 56):
    raise ValueError("nanollm.hf.bridge needs transformers 4.56 or newer; "
                     f"{transformers.__version__} is installed; pip install -U transformers")

from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.pytorch_utils import Conv1D

from nanollm.cache import ALL, TILE, LayerCache, copied, end_prefill, make_cache
from nanollm.check import check_forward, whole
from nanollm.model import rope, rotate

NAME = "nanollm"  # the name under which transformers knows our attention function
PAST = "does not go through transformers' attention interface; take another model"
# arguments of an attention function that `attention` does not implement
REFUSED = {"softcap": "caps its scores", "s_aux": "has sink logits", "position_bias": "biases its scores"}
OUTPUTS = "o_proj", "out_proj", "dense", "c_proj", "wo"  # names of the output projection in model families


# ---- the memory: the cache that transformers sees ----------------------------------------------------------

class Layer(CacheLayerMixin):
    """One LayerCache, with the interface that transformers expects of a cache's layer."""

    def __init__(self, cache: LayerCache):
        super().__init__()
        self.cache = cache
        self.is_croppable = type(cache) is LayerCache  # slot i holds token i, and there is no other state

    def update(self, k: Tensor, v: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if k.shape != v.shape:
            raise ValueError(f"layer {self.cache.layer} has keys of {k.shape[-1]} numbers and values of "
                             f"{v.shape[-1]}; take another model")
        k = k.view_as(k)  # a new tensor object, which can carry the cache as an attribute
        k.cache = self.cache
        return k, v

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_mask_sizes(self, new) -> tuple[int, int]:
        """Return (length, offset) of a mask that covers only the new tokens.

        new: their number; in older versions of transformers, their positions.
        """
        return len(new) if isinstance(new, Tensor) else new, self.cache.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the older name

    def lazy_initialization(self, *_):
        pass


class Memory(Cache):
    """A transformers cache made of one LayerCache per layer, for one batch of texts."""

    def __init__(self, model: "Bridged", make: Callable[[], list[LayerCache]]):
        super().__init__(layers=[Layer(cache) for cache in make()])
        self.model, self.make = model, make
        self.texts = 0        # texts in the batch
        self.expected = None  # during a call: how many tokens each layer has seen when the call ends
        model.attach()

    @property
    def caches(self) -> list[LayerCache]:
        return [layer.cache for layer in self.layers]

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
                                 f"leave {name} out, give each text a row of its own, and begin assisted "
                                 "decoding with an empty memory")
        if isinstance(mask, Tensor) and mask.dim() == 2 and (mask.shape[1] < end or not mask.all()):
            raise ValueError(f"attention_mask must show all {end} tokens, those in the memory included; "
                             "give a batch texts of one length, and leave attention_mask out")
        self.texts, self.expected = len(tokens), end

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
                             "call reset() and feed the prompt again")

    def update(self, *given, **named) -> tuple[Tensor, Tensor]:
        if not self.expected or self.model.model.config._attn_implementation != NAME:
            raise ValueError("the model was detached, or never attached; "
                             "call attach(model, …) before using a memory")
        return super().update(*given, **named)

    def end_prompt(self):
        """Tell every layer that the prompt is over; the caches then compress it.

        If the method rereads the prompt, call generate.end_prompt(Bridged(model), tokens, caches) instead.
        """
        self.check_whole()
        if not self.get_seq_length():
            raise ValueError("no prompt was read; call the model with past_key_values=memory first")
        end_prefill(self.caches)

    # ---- other methods of transformers' caches -------------------------------------------------------------

    def reset(self):
        """Empty the memory; method and options stay."""
        Memory.__init__(self, self.model, self.make)

    def crop(self, tokens: int):
        """Keep only the first `tokens` tokens; if `tokens` ≤ 0, remove the last −`tokens`."""
        seen = self.get_seq_length()
        whole("crop", tokens, -seen)
        left = tokens if tokens > 0 else seen + tokens
        self.check_whole()
        if left < seen:
            self.activate_past_recording()
            for cache in self.caches:
                cache.length = cache.seen = left

    def activate_past_recording(self):
        """Raise ValueError if `crop` cannot remove tokens. Called before assisted decoding."""
        if not all(layer.is_croppable for layer in self.layers):
            raise ValueError(f"{type(self.caches[0]).__name__} cannot remove tokens, which crop, prompt "
                             "lookup and assisted decoding need; use the full cache, LayerCache")

    def batch_select_indices(self, i: Tensor):
        """Replace the batch by its texts i (N,), in this order. A text may be taken twice."""
        self.check_whole()
        if not self.texts:
            return
        try:
            i = torch.arange(self.texts, device=getattr(i, "device", None))[i]  # i may be a mask, or a list
            states = [vars(texts_of(cache, i, self.texts)) for cache in self.caches]
        except IndexError:
            raise ValueError(f"texts {i} must all be among 0 … {self.texts - 1}") from None
        except TypeError:
            raise ValueError(f"{type(self.caches[0]).__name__} cannot repeat or choose texts, which beam "
                             "search needs; take another method") from None
        for cache, state in zip(self.caches, states):
            vars(cache).update(state)
        self.texts = len(i)

    reorder_cache = batch_select_indices  # called after each step of beam search

    def batch_repeat_interleave(self, repeats: int):
        self.batch_select_indices(torch.arange(self.texts).repeat_interleave(repeats))

    def __deepcopy__(self, memo):
        """Return an independent copy. Both refer to the same model."""
        memory = copy(self)
        memory.layers = [Layer(cache) for cache in copied(self.caches)]
        return memory


def texts_of(x, i: Tensor, texts: int):
    """Return the texts i (first dimension) of a cache or of one of its attributes.

    TypeError if an attribute cannot be split by text.
    """
    if isinstance(x, LayerCache) and not getattr(x, "packed", None):  # `packed` joins all texts
        options, new = {field.name for field in fields(x)}, copy(x)
        for name in vars(x).keys() - options - {"model", "previous"}:
            setattr(new, name, texts_of(getattr(x, name), i, texts))
        return new
    if isinstance(x, Tensor) and len(x) == texts:
        return x.index_select(0, i.to(x.device))
    if isinstance(x, dict):
        return {name: texts_of(y, i, texts) for name, y in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(texts_of(y, i, texts) for y in x)
    if x is None or isinstance(x, (int, float)):
        return x
    raise TypeError(type(x))


# ---- the attention function, called by each layer ----------------------------------------------------------

def attention(module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None,
              dropout: float = 0.0, **more) -> tuple[Tensor, None]:
    """Return attention's output (B, T, H·G, D) for new tokens, from the cache attached to k.

    q (B, H·G, T, D), k and v (B, H, T, D). Without a cache on k this is the model's usual attention.
    """
    if not hasattr(k, "cache"):
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, dropout=dropout, **more)
    cache, T, D = k.cache, *q.shape[2:]
    if refused := next((name for name in REFUSED if more.get(name) is not None), None):
        raise ValueError(f"layer {cache.layer} {REFUSED[refused]} ({refused}); take another model")
    if mask is not None and not causal(mask):
        raise ValueError("the mask is not causal; give a batch texts of one length, and no mask")
    if scaling is not None and scaling != D ** -0.5:
        q = q * (scaling * D ** 0.5)  # LayerCache multiplies by 1/√D itself
    y = attend(cache, q, k, v, torch.arange(cache.seen, cache.seen + T, device=q.device)[None])
    return y.transpose(1, 2).contiguous(), None


def attend(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """Call cache.attend, and refuse gradients that would be wrong.

    Slots are written in place, so gradients are right only for the first part of a prompt.
    """
    has_graph = any(x.requires_grad for x in cache.slots.values())
    if has_graph:  # the slots belong to the graph of an earlier call; continue with a copy
        cache.slots = {name: x.detach().clone() for name, x in cache.slots.items()}
    rewritten = has_graph or cache.prompt_done or cache.watch == ALL and q.shape[2] > TILE
    if not (rewritten and torch.is_grad_enabled() and q.requires_grad):
        return cache.attend(q, k, v, pos)
    with torch.no_grad():
        y = cache.attend(q, k, v, pos)
    return NoGradient.apply(q, y)


class NoGradient(torch.autograd.Function):
    """Pass y through; raise ValueError if its gradient is computed."""

    @staticmethod
    def forward(_, q: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(*_):
        raise ValueError("no gradient goes through a memory that has read earlier tokens; "
                         "read the whole text in one call, or without a memory")


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
        check_forward(self, tokens, caches, None, last or None)
        memory = caches and Memory(self, lambda: caches)
        return self.model(tokens, past_key_values=memory, use_cache=bool(memory), logits_to_keep=last).logits

    def attach(self):
        """Replace the model's attention, unless it is replaced already."""
        own = self.model.config._attn_implementation
        if own == NAME and hasattr(self.model, "attention_before"):
            return
        detach(self.model)  # undoes an earlier attach, after which somebody has set another attention
        hooks = (self.decoder.register_forward_pre_hook(before, with_kwargs=True),
                 self.decoder.register_forward_hook(after, with_kwargs=True))
        # own is also NAME if the model shares its config with an attached model
        self.model.attention_before = "eager" if own == NAME else own, hooks
        self.model.set_attn_implementation(NAME)


def before(decoder: nn.Module, args: tuple, kwargs: dict):
    """Let the memory check a call before the first layer, if the call has one (pre-hook)."""
    call = by_name(decoder, args, kwargs)
    if isinstance(memory := call.get("past_key_values"), Memory):
        memory.begin(decoder, call)


def after(decoder: nn.Module, args: tuple, kwargs: dict, _):
    """Let the memory check a call after the last layer, if the call has one (hook)."""
    if isinstance(memory := by_name(decoder, args, kwargs).get("past_key_values"), Memory):
        memory.end()


def by_name(decoder: nn.Module, args: tuple, kwargs: dict) -> dict:
    """Return all arguments of a call by name."""
    return dict(zip([*signature(type(decoder).forward).parameters][1:], args)) | kwargs if args else kwargs


def attach(model, Method=LayerCache, **options) -> Memory:
    """Return a memory to pass as `past_key_values`; its `end_prompt` compresses the prompt."""
    bridged = Bridged(model)
    return Memory(bridged, partial(make_cache, bridged, Method, **options))


def detach(model):
    """Restore the model's own attention."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "attention_before"):
        name, hooks = vars(model).pop("attention_before")
        model.set_attn_implementation(name)
        for hook in hooks:
            hook.remove()


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
