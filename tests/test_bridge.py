"""A LayerCache as the memory of transformers' own models: their logits, their tokens, and real eviction."""
import logging

import pytest
import torch
import transformers as hf

from methods.duo_gates import gates, retrieval_heads
from methods.streaming_llm import StreamingLLM
from nanollm import TINY, tokenizer, weights
from nanollm.bridge import Bridged, attach, detach
from nanollm.cache import cache_bytes, make_cache
from nanollm.data import Tasks
from nanollm.evaluate import for_text
from nanollm.generate import end_prompt
from nanollm.replay import feed
from nanollm.select import given, pick

V, T = 97, 40
SHAPE = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
             pad_token_id=0)
WIDE = SHAPE | dict(head_dim=16)  # heads that together are wider than the model
EXPERTS = dict(moe_intermediate_size=16, num_experts_per_tok=2)
FAMILIES = {
    "Llama": SHAPE, "Qwen2": SHAPE, "Qwen3": WIDE, "Mistral": SHAPE | dict(sliding_window=None), "Phi": SHAPE,
    "Phi3": SHAPE, "Olmo": SHAPE, "Olmo2": SHAPE, "SmolLM3": SHAPE, "GPTNeoX": SHAPE, "StableLm": SHAPE,
    "GPT2": dict(vocab_size=V, n_embd=32, n_layer=3, n_head=4, n_positions=128, eos_token_id=2),
    "Granite": SHAPE | dict(attention_multiplier=0.3), "Cohere": SHAPE,
    "Starcoder2": SHAPE | dict(sliding_window=None),
    "Mixtral": SHAPE | dict(num_local_experts=4, sliding_window=None), "Gemma": WIDE, "Glm": WIDE,
    "Glm4": WIDE, "Qwen3Moe": WIDE | EXPERTS | dict(num_experts=4),
    "Olmoe": SHAPE | dict(num_experts=4, num_experts_per_tok=2),
    "Nemotron": SHAPE, "Llama4Text": WIDE | dict(num_local_experts=2, intermediate_size_mlp=48),
    "OPT": dict(vocab_size=V, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
                max_position_embeddings=128, word_embed_proj_dim=32)}
TOKENS = torch.randint(3, V, (3, T), generator=torch.Generator().manual_seed(1))
logging.getLogger("transformers").setLevel(logging.ERROR)


def tiny(family: str, **changed):
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**FAMILIES.get(family, WIDE) | changed)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def own(model, **memory):
    """What the model's own `generate` writes."""
    return model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=6, do_sample=False,
                          **memory)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_memory_changes_no_logit_and_no_token(family):
    model = tiny(family)
    expected, written = model(TOKENS).logits, own(model)
    for sizes in ([T], [23, 16, 1], [1] * T):
        memory = attach(model)
        parts = [model(part, past_key_values=memory).logits for part in TOKENS.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=0)
    memory = attach(model)
    model(TOKENS[:, :-1], past_key_values=memory)
    memory.end_prompt()
    assert torch.equal(own(model, past_key_values=memory), written)
    assert memory.get_seq_length() == memory.caches[0].seen == T + 5
    assert torch.equal(own(model), written)  # the model's own, with a memory of its own, meanwhile
    detach(model)
    assert torch.equal(own(model), written) and model.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def both():
    """The shipped decoder, ours and transformers', and its tokenizer."""
    theirs = hf.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return weights.from_hf(TINY), Bridged(theirs), tokenizer.load(TINY / "tokenizer.tiktoken")


@torch.no_grad()
@pytest.mark.parametrize("name", pick([]))
def test_the_shipped_model_keeps_and_answers_the_same_in_both(both, name):
    *models, encoding = both
    tokens = torch.tensor([encoding.encode("A method keeps some of these tokens. " * 9)] * 2)[:, :90]
    ends = tokenizer.boundaries(encoding, encoding.n_vocab)[tokens[:, :-1]]
    told = []
    for model in models:
        Method = pick([name])[name]
        knobs = given(Method, budget=40, window_size=8)
        if name == "duo_attention":  # as it calibrates itself, on less
            knobs["heads"] = retrieval_heads(gates(model, Tasks(encoding, "test"), 2, 128, steps=60), 0.6)
        caches = make_cache(model, for_text(Method, ends), **knobs)
        feed(model, tokens[:, :-1], caches)
        end_prompt(model, tokens[:, :-1], caches)
        told.append((model(tokens[:, -1:], caches), caches))
    (expected, ours), (logits, theirs) = told
    few_bits = "quantized" in name or name.endswith("_4")  # between two codes, the last digit decides
    torch.testing.assert_close(logits, expected, atol=1e-3 if few_bits else 1e-4, rtol=0)
    for a, b in zip(ours, theirs):
        assert torch.equal(a.pos, b.pos) and a.bytes() == b.bytes()


# ---- what is refused ---

DEEPSEEK = SHAPE | EXPERTS | dict(
    num_key_value_heads=4, n_routed_experts=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4,
    qk_nope_head_dim=4, v_head_dim=6, n_group=1, topk_group=1)


@pytest.mark.parametrize("family, shape, message", [
    ("Gemma2", WIDE, "layer 0 caps its scores"),
    ("Gemma3Text", WIDE | dict(sliding_window=16), "last 16 tokens"),
    ("Mistral", SHAPE | dict(sliding_window=39), "last 39 tokens alone, and the text has 40; shorten"),
    ("Llama4Text", FAMILIES["Llama4Text"] | dict(attention_chunk_size=32), "last 32 tokens alone"),
    ("GptOss", WIDE | EXPERTS | dict(num_local_experts=4), "layer 0 has sink logits"),
    ("DeepseekV3", DEEPSEEK, "keys of 8 numbers and values of 4; take"),
    ("Falcon", SHAPE, "FalconForCausalLM does not go through"),
    ("Bloom", dict(vocab_size=V, hidden_size=32, n_layer=2, n_head=4), "BloomForCausalLM does not go")])
def test_what_no_cache_here_knows_is_refused_by_name(monkeypatch, family, shape, message):
    monkeypatch.setitem(FAMILIES, family, shape)
    model = tiny(family)
    written = own(model)
    with pytest.raises(ValueError, match=message) as error:
        model(TOKENS, past_key_values=attach(model))
    assert "\n" not in str(error.value) and str(error.value).endswith("another model")
    detach(model)
    assert torch.equal(own(model), written)


def test_an_encoder_is_refused():
    config = hf.T5Config(vocab_size=V, d_model=32, num_layers=1)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder; take"):
        attach(hf.T5ForConditionalGeneration(config))


@torch.no_grad()
def test_a_padded_batch_is_refused_and_texts_of_one_length_are_not():
    model, mask = tiny("Llama"), torch.ones_like(TOKENS)
    model(TOKENS, attention_mask=mask, past_key_values=attach(model))
    for place in ((0, 0), (1, -1)):  # left, right
        padded = mask.clone()
        padded[place] = 0
        with pytest.raises(ValueError, match="padded, .* not causal; give a batch texts of one length"):
            model(TOKENS, attention_mask=padded, past_key_values=attach(model))


@torch.no_grad()
def test_a_layer_that_never_asks_is_told_of(monkeypatch):
    model = tiny("Llama")
    memory = attach(model)
    deaf = lambda *_, **__: (torch.zeros(3, T, 32), None)
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", deaf)
    with pytest.raises(ValueError, match="no prompt was read; call the model with past_key_values=memory"):
        memory.end_prompt()
    model(TOKENS, past_key_values=memory)
    with pytest.raises(ValueError, match="layer 1 does not go through transformers' attention interface"):
        memory.end_prompt()
    for layer in model.model.layers:
        del layer.self_attn.o_proj
    with pytest.raises(ValueError, match="3 layers and 0 output projections by a known name"):
        attach(model)


@torch.no_grad()
def test_a_memory_is_not_read_past_a_model_that_was_detached():
    model = tiny("Llama")
    bridged, memory = Bridged(model), attach(model)
    model(TOKENS[:, :20], past_key_values=memory)
    detach(model)
    for call in (lambda: model(TOKENS[:, 20:], past_key_values=memory),
                 lambda: bridged(TOKENS, make_cache(bridged))):
        with pytest.raises(ValueError, match="its own attention back, .*; attach it again"):
            call()
    attach(model)
    expected = bridged(TOKENS)[:, 20:]
    torch.testing.assert_close(model(TOKENS[:, 20:], past_key_values=memory).logits, expected,
                               atol=1e-5, rtol=0)


@torch.no_grad()
def test_two_models_have_memories_of_their_own():
    models = tiny("Llama"), tiny("Qwen2")
    alone = [model(TOKENS).logits for model in models]
    memories = [attach(model) for model in models]
    for part in TOKENS.split(20, 1):
        last = [model(part, past_key_values=memory).logits for model, memory in zip(models, memories)]
    for expected, logits in zip(alone, last):
        torch.testing.assert_close(logits, expected[:, -20:], atol=1e-5, rtol=0)
    live, _ = cache_bytes(memories[0].caches)
    assert live == 3 * 3 * 2 * T * (2 * 8 * 4 + 4)  # layers, texts, heads, tokens, k and v and a position


@torch.no_grad()
def test_streaming_llm_moves_keys_only_where_rope_is_known():
    """Where a family pairs other dimensions, or rotates a part of them, its angles are not taken."""
    known = {family for family in FAMILIES if Bridged(tiny(family)).freq is not None}
    assert known == {"Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Olmo", "Olmo2", "SmolLM3", "Granite",
                     "Mixtral", "Starcoder2", "Gemma", "Qwen3Moe", "Olmoe"}
    with pytest.raises(ValueError, match="positions"):
        attach(tiny("GPT2"), StreamingLLM, budget=8)
