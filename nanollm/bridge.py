"""Run many decoders of transformers with this project's caches.

Each layer of such a model first gives its new keys and values to a transformers cache, and then
calls an attention function. Here the cache is `Memory`, which returns keys and values as they are.
The attention function is `attention`. It finds the layer's stores in the memory of the current
call, and calls their `attend`.

    memory = attach(model, H2O, budget=64)
    model(prompt, past_key_values=memory)
    memory.compress(prompt)
    model.generate(prompt, past_key_values=memory, max_new_tokens=20)  # from the compressed cache
    detach(model)

With full attention the model computes the same as with its own cache, but for rounding. With
`attach` each text of a batch has caches of its own, so a batch may be repeated and reordered. It
may also be padded on the left: give every call the `attention_mask`, and each text is read as it
would be alone.
Positions then count a text's own tokens, without its padding; `position_ids` may add one number to
all of them.

Layers that see the last tokens alone keep those, and a method compresses the others (sliding.py).
If all layers of a model are such, see `make_cache`.

Tried with transformers 5.2, 5.23 and 5.24. From 5.24 on, the argument `past_key_values` is called
`cache`. There the bridge takes either name, as transformers does.

Most calls that the bridge cannot serve raise a ValueError before the first layer runs, and change
nothing. If a layer refuses (it has sink logits, the mask is not causal), make a new memory.
"""

from functools import cached_property, partial
from inspect import signature
from threading import local
from types import SimpleNamespace

import torch
from torch import Tensor, nn
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from nanollm.cache import Method, Slots, copied, make_cache
from nanollm.check import check_forward
from nanollm.foreign_layers import (
    Attention,
    causal,
    device_of,
    output_projections,
    rotations,
    windows,
)
from nanollm.memory import PAST, Memory, new_positions
from nanollm.slots import note_ids

NAME = "nanollm"  # the name under which transformers knows our attention function
# arguments of an attention function that `attention` does not implement
REFUSED = {
    "s_aux": "has sink logits",
    "position_bias": "biases its scores",
}


class InUse(local):
    """The memory of the call that runs in this thread, and the decoder of its `generate`."""

    memory = None
    generates = None


in_use = InUse()

# ---- the attention function, called by each layer ----


def attention(
    module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more,
) -> tuple[Tensor, None]:
    """Return attention's output (B, T, H·G, D) for new tokens, from the layer's caches.

    q (B, H·G, T, D), k and v (B, H, T, D). The caches are those of the memory in use. In a call
    without a memory this is PyTorch's attention, as transformers calls it.
    """
    memory = in_use.memory if hasattr(module, "attachment") else None
    if memory is None:
        return sdpa_attention_forward(
            module, q, k, v, attention_mask, dropout, scaling, **more
        )
    for name, does in REFUSED.items():
        if more.get(name) is not None:
            raise ValueError(
                f"layer {module.layer_idx} {does} ({name}); take another model"
            )
    if k.shape != v.shape:
        raise ValueError(
            f"layer {module.layer_idx} has keys of {k.shape[-1]} numbers and values of "
            f"{v.shape[-1]}; take another model"
        )
    T, D = q.shape[2:]
    if scaling is not None and scaling != D**-0.5:
        q = q * (scaling * D**0.5)  # Slots multiplies by 1/√D itself
    outputs = []
    for rows, caches, skip in memory.parts(T):
        cache = caches[module.layer_idx]
        new_q, new_k, new_v = (x[rows, :, skip:] for x in (q, k, v))
        pos = torch.arange(cache.seen, cache.seen + T - skip, device=q.device)[None]
        if attention_mask is not None and skip < T:
            mask = attention_mask[rows][:, :, skip:, skip - T :]  # of the new tokens
            if not causal(mask, pos, memory.model.windows[module.layer_idx]):
                raise ValueError(
                    "the mask is not causal; leave it out, or give an attention_mask of padding"
                )
        # a model that is called as a decoder may have caches that learn
        learns = torch.is_grad_enabled() and not memory.make
        with torch.set_grad_enabled(learns):
            # a text of which this call brings padding alone attends to nothing
            y = cache.attend(new_q, new_k, new_v, pos) if skip < T else new_q
        outputs.append(F.pad(y, (0, 0, skip, 0)))
    y = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if memory.make:
        y = NoGradient.apply(y, q)
    return y.transpose(1, 2).contiguous(), None


class NoGradient(torch.autograd.Function):
    """Returns y, which came from q. A derivative with respect to q is an error."""

    @staticmethod
    def forward(_, y: Tensor, q: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(*_):
        raise ValueError("no gradient goes through a memory; read the text without one")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


# ---- the model ----


class Bridged:
    """A causal language model of transformers, called as our decoder: tokens, caches → logits.

    Raises ValueError for models that it knows it cannot run; others may be refused at a call. The
    first Memory replaces the model's attention, until `detach`. Calls without a Memory use
    PyTorch's attention meanwhile.
    """

    def __init__(self, model):
        model = bare(model)
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"{type(model).__name__} is not a model of transformers; "
                "load one with AutoModelForCausalLM.from_pretrained"
            )
        name = type(model).__name__
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if model.config.is_encoder_decoder:
            raise ValueError(f"{name} has an encoder; take another model")
        if getattr(config, "attn_logit_softcapping", None):
            raise ValueError(f"{name} caps its scores; take another model")
        if not heads:
            raise ValueError(f"{name} has no attention heads; take another model")
        if not model._can_set_attn_implementation():
            raise ValueError(f"{name} {PAST}")
        self.model = model
        self.parameters = model.parameters
        self.embed = model.get_input_embeddings()
        self.blocks = [
            SimpleNamespace(attention=Attention(o, heads, self.embed.weight.dtype))
            for o in output_projections(model)
        ]
        o = self.blocks[0].attention.o
        self.config = SimpleNamespace(
            n_layers=len(self.blocks),
            n_heads=heads,
            d_model=config.hidden_size,
            n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            bos=getattr(config, "bos_token_id", None),
            # GPT-2's Conv1D has no in_features, and its weight is (in, out)
            head_dim=getattr(o, "in_features", o.weight.shape[0]) // heads,
            vocab_size=self.embed.num_embeddings,
            max_len=config.max_position_embeddings,
        )
        self.windows = windows(config)
        self.sliding: list[Slots] = []  # caches that a reread leaves as they are
        # whether the ids that a method has are what the model has read, and may be read again
        self.reads_again = True
        self.decoder = model.get_decoder()
        # tables of learned positions
        self.positions = [
            child
            for child in self.decoder.children()
            if isinstance(child, nn.Embedding) and child is not self.embed
        ]

    def __call__(
        self, tokens: Tensor, caches: list[Slots] | None = None, last: int = 0
    ) -> Tensor:
        """Return logits (B, T, V) for tokens (B, T) int64; if `last` > 0, only (B, last, V).

        caches: of all layers, or in a reread (`rereading`) of those that do not slide.
        """
        if caches and len(caches) < len(self.blocks):
            given, others = iter(caches), iter(copied(self.sliding))
            caches = [next(given if x is None else others) for x in self.windows]
        check_forward(self, tokens, caches, last or None)
        if not self.reads_again:
            raise ValueError(
                "this method reads the text again, but it was embeddings or an image; use snap_kv"
            )
        if self.model.get_output_embeddings() is None:
            raise ValueError(
                f"{type(self.model).__name__} has no head; load AutoModelForCausalLM"
            )
        memory = None
        if caches:
            note_ids(caches, tokens)
            memory = Memory(self, caches)
        return self.model(
            tokens, past_key_values=memory, use_cache=bool(caches), logits_to_keep=last
        ).logits

    @cached_property
    def freq(self) -> list[Tensor | None]:
        """Return each layer's angles per token, from eight equal tokens; see `rotations`."""
        caches = make_cache(self)
        token = min(5, self.config.vocab_size - 1)
        tokens = torch.full((1, 8), token, device=device_of(self.embed.weight))
        self.attach()
        interrupted = in_use.memory  # a method may ask in the midst of another call
        with torch.no_grad():
            self(tokens, caches)
        in_use.memory = interrupted
        return rotations(self.model, [cache.k for cache in caches])

    @property
    def adapters(self) -> list:
        """Return PEFT's active adapters, and whether they are disabled, module by module."""
        acting = []
        for module in self.model.modules():
            if isinstance(getattr(module, "disable_adapters", None), bool):
                acting.append((module.active_adapters, module.disable_adapters))
        return acting

    @property
    def attached(self) -> bool:
        return self.model.config._attn_implementation == NAME

    def attach(self):
        """Replace the model's attention, unless it is replaced already."""
        if not hasattr(self.model, "attachment"):
            attachment = SimpleNamespace(
                before=self.model.config._attn_implementation,
                hooks=[
                    self.decoder.register_forward_pre_hook(before, with_kwargs=True),
                    self.decoder.register_forward_hook(after, with_kwargs=True),
                ],
            )
            # only a layer with an attachment looks up the memory in use
            for module in self.model.modules():
                module.attachment = attachment
            self.model.generate = partial(generate, self.model)
        if not self.attached:
            self.model.set_attn_implementation(NAME)


def bare(model):
    """Return the model that torch.compile or an adapter of PEFT wraps, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_memory(call: dict) -> Memory | None:
    """Return the memory among a call's arguments; None if there is none.

    The argument is called `cache` since transformers 5.24, which also takes the old name.
    """
    cache = call.get("cache")
    if cache is None:
        cache = call.get("past_key_values")
    return cache if isinstance(cache, Memory) else None


def generate(model, *args, **kwargs):
    """Call the model's own `generate`.

    A memory must have compressed its prompt, but for full attention. Every call of the decoder must
    use the memory.
    """
    memory = find_memory(kwargs)
    if memory is not None:
        prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        memory.check_prompt(prompt)
        if kwargs.get("guidance_scale") not in (None, 1):
            raise ValueError(
                "guidance_scale reads a second text, with a full cache of its own; leave it out"
            )
        drafts = "assistant_model", "prompt_lookup_num_tokens"
        if any(kwargs.get(name) for name in drafts):
            memory.expect_drafts()
        in_use.generates = memory.model.decoder
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        in_use.generates = None
        if memory is not None:
            memory._is_user_defined = False  # transformers' mark, from 5.23 on


def before(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Let the memory check a call before the first layer, if the call has one (pre-hook).

    Return the call's arguments if positions had to be added, else None.
    """
    in_use.memory = None  # an earlier call may have been broken off
    names = list(signature(type(decoder).forward).parameters)[1:]  # without self
    call = dict(zip(names, args)) | kwargs
    if "cache" not in names:  # a decoder of transformers before 5.24 would ignore it
        call.pop("cache", None)
    memory = find_memory(call)
    if memory is None:
        if in_use.generates is decoder:
            raise ValueError(
                "a call within `generate` has no memory: Phi-3 leaves it behind past its original "
                "length, so keep the text shorter; and a logits processor may not call the model"
            )
        return None
    if memory._is_user_defined and in_use.generates is not decoder:
        # model.generate(…, past_key_values=attach(model)) is looked up before it is replaced
        memory._is_user_defined = False
        memory.check_prompt(None)
    memory.begin(decoder, call)
    in_use.memory = memory
    takes_positions = "position_ids" in names
    if takes_positions and call.get("position_ids") is None and any(memory.pads):
        # Most decoders would count the padding. `generate` does not, and would go on at other
        # positions than those at which the prompt was read.
        pos = new_positions(memory.seen, memory.expected, memory.pads, decoder.device)
        return (), call | dict(position_ids=pos.clamp(min=0))
    return None


def after(decoder: nn.Module, *_):
    """Let the memory check a call after the last layer, if the call has one (hook)."""
    memory = in_use.memory
    in_use.memory = None
    if memory is not None:
        memory.end()


def attach(model, Kind: type[Method] = Method, store=None, **options) -> Memory:
    """Return a memory to pass as `past_key_values`; its `compress` compresses the prompt.

    Kind, store and options are those of `make_cache`.
    """
    bridged = Bridged(model)
    make = partial(make_cache, bridged, Kind, store, **options)
    return Memory(bridged, make(), make)


def detach(model):
    """Restore the model's own attention."""
    model = bare(model)
    if hasattr(model, "attachment"):
        attachment = model.attachment
        model.set_attn_implementation(attachment.before)
        for hook in attachment.hooks:
            hook.remove()
        del model.generate
        for module in model.modules():
            vars(module).pop("attachment", None)
