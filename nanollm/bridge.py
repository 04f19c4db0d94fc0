"""Any causal language model of transformers, with this project's caches as its memory.

A layer shows k and v to the model's cache and then hands q, k, v to an attention function. `Memory` stores
nothing: it marks k with the layer's LayerCache, and the attention function asks the cache that it finds.

    memory = attach(model, H2O, budget=64)
    model(prompt[:, :-1], past_key_values=memory)
    memory.end_prompt()
    model.generate(prompt, past_key_values=memory, max_new_tokens=20)  # goes on from the compressed cache
    detach(model)
"""
from types import SimpleNamespace

from torch import Tensor, arange
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from nanollm.anatomy import causal, chunk_of, frequencies, output_projections, w_o
from nanollm.cache import LayerCache, end_prefill, make_cache
from nanollm.check import check_forward

NAME = "nanollm"  # of the attention function, to transformers
PAST = "does not go through transformers' attention interface; take another model"
REFUSED = {"softcap": "caps its scores", "s_aux": "has sink logits", "position_bias": "biases its scores"}


class Layer(CacheLayerMixin):
    """What transformers sees of one LayerCache."""

    def __init__(self, cache: LayerCache):
        super().__init__()
        self.cache, self.asked = cache, True

    def update(self, k: Tensor, v: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        self.check()
        if k.shape != v.shape:
            raise ValueError(f"layer {self.cache.layer} has keys of {k.shape[-1]} numbers and values of "
                             f"{v.shape[-1]}; take another model")
        k = k.view_as(k)  # a tensor object of its own, to carry the mark
        k.layer, self.asked = self, False
        return k, v

    def check(self):
        """ValueError if the layer showed k and v and then did not ask."""
        if not self.asked:
            raise ValueError(f"layer {self.cache.layer} {PAST}")

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.cache.seen  # a mask is made of the new tokens alone

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *_):
        pass


class Memory(Cache):
    """A cache of transformers made of `caches`, one LayerCache a layer of the model of this config."""

    def __init__(self, caches: list[LayerCache], config):
        super().__init__(layers=[Layer(cache) for cache in caches])
        self.caches, self.of = caches, config

    def update(self, *told, **more) -> tuple[Tensor, Tensor]:
        if self.of._attn_implementation != NAME:  # it would see the new tokens alone
            raise ValueError("the model has its own attention back, which reads no memory; attach it again")
        return super().update(*told, **more)

    def end_prompt(self):
        """Tell every layer, lowest first, that the prompt is over: compress.

        Where a method reads the prompt twice, call generate.end_prompt(Bridged(model), tokens, caches).
        """
        if not (seen := max(cache.seen for cache in self.caches)):
            raise ValueError("no prompt was read; call the model with past_key_values=memory first")
        for layer in self.layers:
            layer.asked = layer.asked and layer.cache.seen == seen
            layer.check()
        end_prefill(self.caches)


def attention(module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None,
              **more) -> tuple[Tensor, None]:
    """q (B, H·G, T, D), k and v (B, H, T, D) of new tokens → (B, T, H·G, D), by the cache that k names."""
    if not hasattr(k, "layer"):
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **more)
    cache, T, D = k.layer.cache, *q.shape[2:]
    seen, window = cache.seen + T, more.get("sliding_window") or chunk_of(module)
    if refused := next((name for name in REFUSED if more.get(name) is not None), None):
        raise ValueError(f"layer {cache.layer} {REFUSED[refused]} ({refused}); take another model")
    if window is not None and seen > window:
        raise ValueError(f"layer {cache.layer} attends to the last {window} tokens alone, and the text has "
                         f"{seen}; shorten the text, or take another model")
    if mask is not None and not causal(mask):
        raise ValueError("a text is padded, or its mask is not causal; give a batch texts of one length")
    if scaling is not None and scaling != D ** -0.5:
        q = q * (scaling * D ** 0.5)  # LayerCache multiplies by 1/√D itself
    k.layer.asked = True
    y = cache.attend(q, k, v, arange(cache.seen, seen, device=q.device)[None])
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class Bridged:
    """A causal language model of transformers, called as our decoder is: tokens, caches → logits.

    ValueError if its attention cannot be replaced. Until `detach` it goes by NAME, and answers as before
    without a Memory.
    """

    def __init__(self, model):
        c = model.config.get_text_config()
        if model.config.is_encoder_decoder or not model._can_set_attn_implementation():
            raise ValueError(f"{type(model).__name__} " + (
                "has an encoder; take another model" if model.config.is_encoder_decoder else PAST))
        heads = c.num_attention_heads
        self.blocks = [SimpleNamespace(attention=SimpleNamespace(o=o, w_o=w_o(o, heads)))
                       for o in output_projections(model)]
        self.model, self.parameters, self.embed = model, model.parameters, model.get_input_embeddings()
        self.config = SimpleNamespace(
            n_layers=len(self.blocks), n_heads=heads, n_kv_heads=getattr(c, "num_key_value_heads", heads),
            head_dim=self.blocks[0].attention.w_o.shape[2], d_model=c.hidden_size,
            vocab_size=self.embed.num_embeddings, max_len=c.max_position_embeddings,
            bos=getattr(c, "bos_token_id", None))
        self.freq = frequencies(model, self.config.head_dim)
        if model.config._attn_implementation != NAME:
            model.attention_before = model.config._attn_implementation
            model.set_attn_implementation(NAME)

    def __call__(self, tokens: Tensor, caches: list[LayerCache] | None = None, last: int = 0) -> Tensor:
        """tokens (B, T) int64 → logits (B, T, V); of the `last` tokens alone, if that is not 0."""
        check_forward(self, tokens, caches, None, last or None)
        memory = caches and Memory(caches, self.model.config)
        return self.model(tokens, past_key_values=memory, use_cache=bool(memory), logits_to_keep=last).logits


def attach(model, Method=LayerCache, **knobs) -> Memory:
    """A memory for one batch of texts, to pass as `past_key_values`; its `end_prompt` compresses it."""
    return Memory(make_cache(Bridged(model), Method, **knobs), model.config)


def detach(model):
    """Give the model its own attention back."""
    if hasattr(model, "attention_before"):
        model.set_attn_implementation(vars(model).pop("attention_before"))
