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

Needs transformers 4.56 or newer; tried with 4.56.2 and the version in requirements.txt.
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
from nanollm.check import whole
from nanollm.check_model import check_forward
from nanollm.model import rope, rotate

NAME = "nanollm"  # of the attention function, to transformers
PAST = "does not go through transformers' attention interface; take another model"
REFUSED = {"softcap": "caps its scores", "s_aux": "has sink logits", "position_bias": "biases its scores"}
OUTPUTS = "o_proj", "out_proj", "dense", "c_proj", "wo"  # what families call an output projection


# ---- the memory: what transformers sees ------------------------------------------------------------------

class Layer(CacheLayerMixin):
    """What transformers sees of one LayerCache."""

    def __init__(self, cache: LayerCache):
        super().__init__()
        self.cache = cache
        self.is_croppable = type(cache) is LayerCache  # slot i holds token i, and nothing else remembers it

    def update(self, k: Tensor, v: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if k.shape != v.shape:
            raise ValueError(f"layer {self.cache.layer} has keys of {k.shape[-1]} numbers and values of "
                             f"{v.shape[-1]}; take another model")
        k = k.view_as(k)  # a tensor object of its own, to carry the mark
        k.cache = self.cache
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


class Memory(Cache):
    """A cache of transformers made of LayerCaches, one a layer, for one batch of texts."""

    def __init__(self, model: "Bridged", make: Callable[[], list[LayerCache]]):
        super().__init__(layers=[Layer(cache) for cache in make()])
        self.model, self.make = model, make
        self.texts, self.expected = 0, None  # tokens that each layer will have seen when this call ends
        model.attach()

    @property
    def caches(self) -> list[LayerCache]:
        return [layer.cache for layer in self.layers]

    def begin(self, decoder: nn.Module, call: dict):
        """Called before the first layer runs: ValueError if the answer would not be the model's own."""
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
            if pos is not None and pos.dim() < 3 and (  # in three dimensions: of an image
                    pos.shape[-1] != end - seen or (pos != torch.arange(seen, end, device=pos.device)).any()):
                raise ValueError(f"{name} must be {seen} … {end - 1}, as the memory has seen {seen} tokens; "
                                 f"leave {name} out, give each text a row of its own, and begin assisted "
                                 "decoding with an empty memory")
        if isinstance(mask, Tensor) and mask.dim() == 2 and (mask.shape[1] < end or not mask.all()):
            raise ValueError(f"attention_mask must show all {end} tokens, those in the memory included; "
                             "give a batch texts of one length, and leave attention_mask out")
        self.texts, self.expected = len(tokens), end

    def end(self):
        """Called after the last layer: ValueError unless every layer has read the new tokens once."""
        for layer, cache in enumerate(self.caches):
            if cache.seen != self.expected:
                raise ValueError(f"layer {layer} {PAST}")
        self.expected = None

    def check_whole(self):
        """ValueError if an earlier call was broken off when some layers had read its tokens."""
        if len({cache.seen for cache in self.caches}) > 1:
            raise ValueError("an earlier call was broken off after some layers had read its tokens; "
                             "call reset() and read the prompt again")

    def update(self, *given, **named) -> tuple[Tensor, Tensor]:
        if not self.expected or self.model.model.config._attn_implementation != NAME:
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
        Memory.__init__(self, self.model, self.make)

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
        if not self.texts:
            return
        try:
            i = torch.arange(self.texts, device=getattr(i, "device", None))[i]  # i may be a mask, or a list
            states = [vars(texts_of(cache, i, self.texts)) for cache in self.caches]
        except IndexError:
            raise ValueError(f"texts {i} are not all among 0 … {self.texts - 1}; choose from these") from None
        except TypeError:
            raise ValueError(f"{type(self.caches[0]).__name__} cannot repeat or choose texts, as beam search "
                             "does; take another method") from None
        for cache, state in zip(self.caches, states):
            vars(cache).update(state)
        self.texts = len(i)

    reorder_cache = batch_select_indices  # after each step of beam search

    def batch_repeat_interleave(self, repeats: int):
        self.batch_select_indices(torch.arange(self.texts).repeat_interleave(repeats))

    def __deepcopy__(self, memo):
        """A copy that goes its own way. What belongs to the model is shared."""
        memory = copy(self)
        memory.layers = [Layer(cache) for cache in copied(self.caches)]
        return memory


def texts_of(x, i: Tensor, texts: int):
    """The texts i of a cache, or of anything that it holds; TypeError where texts cannot be told apart.

    The first dimension of a cache's tensors is the texts.
    """
    if isinstance(x, LayerCache) and not getattr(x, "packed", None):  # `packed` has one row for all texts
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


# ---- the attention function: what a layer calls ------------------------------------------------------------

def attention(module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None,
              dropout: float = 0.0, **more) -> tuple[Tensor, None]:
    """q (B, H·G, T, D), k and v (B, H, T, D) of new tokens → (B, T, H·G, D), by the cache that k names."""
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

    ValueError if its attention cannot be replaced. The first Memory replaces it, until `detach`; without a
    Memory the model answers as before.
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
        self.decoder = model.get_decoder()

    def __call__(self, tokens: Tensor, caches: list[LayerCache] | None = None, last: int = 0) -> Tensor:
        """tokens (B, T) int64 → logits (B, T, V); of the `last` tokens alone, if that is not 0."""
        check_forward(self, tokens, caches, None, last or None)
        memory = caches and Memory(self, lambda: caches)
        return self.model(tokens, past_key_values=memory, use_cache=bool(memory), logits_to_keep=last).logits

    def attach(self):
        """Replace the model's attention, unless that is done."""
        own = self.model.config._attn_implementation
        if own == NAME and hasattr(self.model, "attention_before"):
            return
        detach(self.model)  # it was attached, if another attention was set by hand since
        hooks = (self.decoder.register_forward_pre_hook(before, with_kwargs=True),
                 self.decoder.register_forward_hook(after, with_kwargs=True))
        # a config that is shared with an attached model says NAME, too
        self.model.attention_before = "eager" if own == NAME else own, hooks
        self.model.set_attn_implementation(NAME)


def before(decoder: nn.Module, given: tuple, named: dict):
    """A hook: shows a call of the decoder to its memory, if it has one."""
    call = by_name(decoder, given, named)
    if isinstance(memory := call.get("past_key_values"), Memory):
        memory.begin(decoder, call)


def after(decoder: nn.Module, given: tuple, named: dict, _):
    """A hook: tells the memory that every layer has run."""
    if isinstance(memory := by_name(decoder, given, named).get("past_key_values"), Memory):
        memory.end()


def by_name(decoder: nn.Module, given: tuple, named: dict) -> dict:
    """Return all arguments of a call under their names."""
    return dict(zip([*signature(type(decoder).forward).parameters][1:], given)) | named if given else named


def attach(model, Method=LayerCache, **options) -> Memory:
    """A memory for one batch of texts, to pass as `past_key_values`; its `end_prompt` compresses it."""
    bridged = Bridged(model)
    return Memory(bridged, partial(make_cache, bridged, Method, **options))


def detach(model):
    """Give the model its own attention back."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "attention_before"):
        name, hooks = vars(model).pop("attention_before")
        model.set_attn_implementation(name)
        for hook in hooks:
            hook.remove()


# ---- where a model keeps what methods ask for: output projections, RoPE's angles, masks --------------------

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
    """Return how many of the last tokens each layer attends to, None for all."""
    sizes = dict(sliding_attention=getattr(config, "sliding_window", None),
                 chunked_attention=getattr(config, "attention_chunk_size", None))
    kinds = getattr(config, "layer_types", None) or config.num_hidden_layers * ["sliding_attention"]
    return [sizes.get(kind) for kind in kinds]


def causal(mask: Tensor) -> bool:
    """Whether a mask (B, 1, T, S) for the last T of S tokens hides later tokens and nothing else."""
    shown = mask if mask.dtype == torch.bool else mask == 0
    return torch.equal(shown, torch.ones_like(shown).tril(mask.shape[-1] - mask.shape[-2]))
