"""Any causal language model of transformers, with this project's caches as its memory.

Each layer of such a model shows its new keys and values to a cache, and then calls an attention function.
`Memory` is that cache, and stores nothing: it marks the keys with the layer's LayerCache. `attention` finds
the mark and asks the LayerCache.

    memory = attach(model, H2O, budget=64)
    model(prompt[:, :-1], past_key_values=memory)
    memory.end_prompt()
    model.generate(prompt, past_key_values=memory, max_new_tokens=20)  # goes on from the compressed cache
    detach(model)

A memory answers as the model's own cache would, or raises a ValueError. It looks at each call before the
first layer runs, so a call that it refuses leaves it as it was. Beam search, assisted decoding, `reset`,
`crop` and `copy.deepcopy` work as with the model's own cache, as far as the method's state allows.

Needs transformers 4.56 or newer; tested with 4.56.2, 4.57.6, 5.0.0, 5.2.0, 5.6.2, 5.12.1 and 5.23.0.
"""
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import fields
import functools
from inspect import signature
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

from nanollm.cache import ALL, TILE, LayerCache, end_prefill, make_cache
from nanollm.check import check_call, check_forward, check_window, whole
from nanollm.hf.anatomy import causal, frequencies, output_projections, w_o, windows

NAME = "nanollm"  # of the attention function, to transformers
PAST = "does not go through transformers' attention interface; take another model"
REFUSED = {"softcap": "caps its scores", "s_aux": "has sink logits", "position_bias": "biases its scores"}


# ---- the memory: what transformers sees ------------------------------------------------------------------

class Layer(CacheLayerMixin):
    """What transformers sees of one LayerCache."""

    def __init__(self, cache: LayerCache):
        super().__init__()
        self.cache, self.texts, self.kind = cache, 0, None  # as `attention` says of what it has stored

    def update(self, k: Tensor, v: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if k.shape != v.shape:
            raise ValueError(f"layer {self.cache.layer} has keys of {k.shape[-1]} numbers and values of "
                             f"{v.shape[-1]}; take another model")
        if self.kind not in (None, (k.dtype, k.device)):
            old, new = ("{} on {}".format(*kind) for kind in (self.kind, (k.dtype, k.device)))
            raise ValueError(f"this memory was written in {old}, and new keys are {new}; "
                             "go on as before, or call reset() and read the prompt again")
        k = k.view_as(k)  # a tensor object of its own, to carry the mark
        k.layer = self
        return k, v

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_mask_sizes(self, new) -> tuple[int, int]:
        """Of a mask for the new tokens alone. `new`: their number; in older versions, their positions."""
        return len(new) if isinstance(new, Tensor) else new, self.cache.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its older name

    def lazy_initialization(self, *_):
        pass

    @property
    def is_croppable(self) -> bool:
        """Whether slot i holds token i still, and nothing but the slots remembers the tokens."""
        method, own = type(self.cache), ("attend", "write", "read", "observe")
        return (self.cache.length == self.cache.seen and not self.cache.ragged
                and all(getattr(method, name) is getattr(LayerCache, name) for name in own))


class Memory(Cache):
    """A cache of transformers made of LayerCaches, one a layer, for one batch of texts."""

    def __init__(self, model: "Bridged", make: Callable[[], list[LayerCache]]):
        super().__init__(layers=[Layer(cache) for cache in make()])
        self.model, self.make = model, make
        self.running = None  # tokens seen before and after the call that now runs, or that was broken off

    @property
    def caches(self) -> list[LayerCache]:
        return [layer.cache for layer in self.layers]

    def begin(self, decoder: nn.Module, call: dict):
        """Called before the first layer runs: ValueError if the answer would not be the model's own."""
        if decoder is not self.model.decoder:
            raise ValueError("this memory belongs to another model; make one by attach(model, …)")
        self.check_whole()
        tokens, seen = call.get("input_ids"), self.get_seq_length()
        given = call.get("inputs_embeds") if tokens is None else tokens
        end = seen + (0 if given is None else given.shape[1])
        check_call(self.model, seen, end, call)
        self.running = seen, end

    def end(self):
        """Called after the last layer: ValueError unless every layer has read the new tokens once."""
        for layer, cache in enumerate(self.caches):
            if cache.seen != self.running[1]:
                raise ValueError(f"layer {layer} {PAST}")
        self.running = None

    def check_whole(self):
        """ValueError if an earlier call was broken off when some layers had read its tokens."""
        if self.running and any(cache.seen != self.running[0] for cache in self.caches):
            raise ValueError("an earlier call was broken off after some layers had read its tokens; "
                             "call reset() and read the prompt again")

    def update(self, *given, **named) -> tuple[Tensor, Tensor]:
        if not self.running or self.model.model.config._attn_implementation != NAME:
            raise ValueError("the model was detached, or never attached; "
                             "call attach(model, …) before using a memory")
        return super().update(*given, **named)

    def end_prompt(self):
        """Tell every layer, lowest first, that the prompt is over: compress.

        Where a method reads the prompt twice, call generate.end_prompt(Bridged(model), tokens, caches).
        """
        self.check_whole()
        if not self.get_seq_length():
            raise ValueError("no prompt was read; call the model with past_key_values=memory first")
        end_prefill(self.caches)

    # ---- what transformers' own caches can do --------------------------------------------------------------

    def reset(self):
        """Forget everything: a new memory of the same method."""
        self.layers, self.running = [Layer(cache) for cache in self.make()], None

    def crop(self, tokens: int):
        """Take out the last −`tokens` tokens; or, above 0, all but the first `tokens`."""
        seen = self.get_seq_length()
        left = whole("crop", tokens, -seen) + (0 if tokens > 0 else seen)
        self.check_whole()
        if left < seen:
            self.activate_past_recording()
            for cache in self.caches:
                cache.length = cache.seen = left

    def activate_past_recording(self):
        """Called before assisted decoding. ValueError if `crop` could not take its tokens out again."""
        if not all(layer.is_croppable for layer in self.layers):
            raise ValueError(f"{type(self.caches[0]).__name__} cannot take tokens out again, as crop, prompt "
                             "lookup and an assistant do; take the full cache, LayerCache")

    def batch_select_indices(self, i: Tensor):
        """Go on with the texts i (N,), in this order. One may come twice."""
        self.check_whole()
        if not (texts := self.layers[0].texts):
            return
        try:
            i = torch.arange(texts, device=getattr(i, "device", None))[i]  # i may be a mask, or a list
            states = [vars(texts_of(cache, i, texts)) for cache in self.caches]
        except IndexError:
            raise ValueError(f"there are {texts} texts, 0 … {texts - 1}, and not all of {i}") from None
        except TypeError:
            raise ValueError(f"{type(self.caches[0]).__name__} cannot repeat or choose texts, as beam search "
                             "does; take another method") from None
        for layer, state in zip(self.layers, states):
            vars(layer.cache).update(state)
            layer.texts = len(i)

    reorder_cache = batch_select_indices  # after each step of beam search

    def batch_repeat_interleave(self, repeats: int):
        self.batch_select_indices(torch.arange(self.layers[0].texts).repeat_interleave(repeats))

    def __deepcopy__(self, memo):
        """A copy that goes its own way. What belongs to the model is shared."""
        shared = [self.model, self.make, *(x for cache in self.caches for x in (cache.w_o, cache.freq))]
        memory = copy(self)
        vars(memory).update(deepcopy(vars(self), memo | {id(x): x for x in shared}))
        return memory


def texts_of(x, i: Tensor, texts: int):
    """The texts i of a cache, or of anything that it holds; TypeError where texts cannot be told apart.

    The first dimension of a cache's tensors is the texts.
    """
    if isinstance(x, LayerCache) and not getattr(x, "packed", None):  # `packed` has one row for all texts
        options, new = {field.name for field in fields(x)}, copy(x)
        for name in vars(x).keys() - options - {"w_o", "freq", "below"}:
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


# ---- the attention function: what a layer calls ------------------------------------------------------------

def attention(module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None,
              dropout: float = 0.0, **more) -> tuple[Tensor, None]:
    """q (B, H·G, T, D), k and v (B, H, T, D) of new tokens → (B, T, H·G, D), by the cache that k names."""
    if not hasattr(k, "layer"):
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, dropout=dropout, **more)
    layer, cache, T, D = k.layer, k.layer.cache, *q.shape[2:]
    seen = cache.seen + T
    if refused := next((name for name in REFUSED if more.get(name) is not None), None):
        raise ValueError(f"layer {cache.layer} {REFUSED[refused]} ({refused}); take another model")
    check_window(cache.layer, more.get("sliding_window"), seen)
    if dropout:
        raise ValueError(f"the model drops {dropout:g} of the attention weights, and no cache here does; "
                         "call model.eval()")
    if mask is not None and not causal(mask):
        raise ValueError("the mask is not causal; give a batch texts of one length, and no mask")
    if scaling is not None and scaling != D ** -0.5:
        q = q * (scaling * D ** 0.5)  # LayerCache multiplies by 1/√D itself
    y = attend(cache, q, k, v, torch.arange(cache.seen, seen, device=q.device)[None])
    layer.texts, layer.kind = len(k), (k.dtype, k.device)
    return y.transpose(1, 2).contiguous(), None


def attend(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """cache.attend. Slots are written to in place, so its gradients are right in a prompt's first part alone,
    and refused elsewhere.
    """
    carries = any(x.requires_grad for x in cache.slots.values())
    if carries:  # what is there belongs to the graph of an earlier call: go on with a copy
        cache.slots = {name: x.detach().clone() for name, x in cache.slots.items()}
    several = carries or cache.prompt_done or cache.watch == ALL and q.shape[2] > TILE
    if not (several and torch.is_grad_enabled() and q.requires_grad):
        return cache.attend(q, k, v, pos)
    with torch.no_grad():
        y = cache.attend(q, k, v, pos)
    return NoGradient.apply(q, y)


class NoGradient(torch.autograd.Function):
    """y, and a ValueError for whoever asks for its gradient."""

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
    """A causal language model of transformers, called as our decoder is: tokens, caches → logits.

    ValueError if its attention cannot be replaced. Until `detach` it goes by NAME, and answers as before
    without a Memory.
    """

    def __init__(self, model):
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"{type(model).__name__} is no model of transformers; "
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
        self.table = not any(hasattr(module, "inv_freq") for module in model.modules())  # of positions
        self.decoder = model.get_decoder()
        own = model.config._attn_implementation
        if own != NAME or not hasattr(model, "attention_before"):
            detach(model)  # it was attached, if another attention was set by hand since
            hooks = (self.decoder.register_forward_pre_hook(before, with_kwargs=True),
                     self.decoder.register_forward_hook(after, with_kwargs=True))
            # a config that is shared with an attached model says NAME, too
            model.attention_before = "eager" if own == NAME else own, hooks
            model.set_attn_implementation(NAME)

    def __call__(self, tokens: Tensor, caches: list[LayerCache] | None = None, last: int = 0) -> Tensor:
        """tokens (B, T) int64 → logits (B, T, V); of the `last` tokens alone, if that is not 0."""
        check_forward(self, tokens, caches, None, last or None)
        memory = caches and Memory(self, lambda: caches)
        return self.model(tokens, past_key_values=memory, use_cache=bool(memory), logits_to_keep=last).logits


def before(decoder: nn.Module, given: tuple, named: dict):
    """A hook: shows a call of the decoder to its memory, if it has one."""
    call = dict(zip(names(type(decoder)), given)) | named
    if isinstance(memory := call.get("past_key_values"), Memory):
        memory.begin(decoder, call)


def after(decoder: nn.Module, given: tuple, named: dict, _):
    call = dict(zip(names(type(decoder)), given)) | named
    if isinstance(memory := call.get("past_key_values"), Memory):
        memory.end()


@functools.cache
def names(kind: type[nn.Module]) -> list[str]:
    """Of what `forward` takes by place."""
    return [*signature(kind.forward).parameters][1:]


def attach(model, Method=LayerCache, **options) -> Memory:
    """A memory for one batch of texts, to pass as `past_key_values`; its `end_prompt` compresses it."""
    attached = hasattr(getattr(model, "_orig_mod", model), "attention_before")
    try:
        return Memory(bridged := Bridged(model), functools.partial(make_cache, bridged, Method, **options))
    except Exception:
        if not attached:  # leave the model as it was
            detach(model)
        raise


def detach(model):
    """Give the model its own attention back."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "attention_before"):
        name, hooks = vars(model).pop("attention_before")
        model.set_attn_implementation(name)
        for hook in hooks:
            hook.remove()
