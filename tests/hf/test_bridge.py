"""A LayerCache as the memory of transformers' own models: their logits, their tokens, and real eviction."""
from copy import deepcopy
import functools
import logging
import runpy
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from methods.duo_gates import gates, retrieval_heads
from methods.streaming_llm import StreamingLLM
from nanollm import TINY, tokenizer
from nanollm.cache import make_cache
from nanollm.commands.registry import given, pick
from nanollm.generate import end_prompt, tell_chunk_ends
from nanollm.hf import checkpoint
from nanollm.hf.bridge import Bridged, attach, detach
from nanollm.measure.replay import feed
from nanollm.measure.tasks import Tasks

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
# families that rotate keys as our decoder does: others pair other dimensions, rotate a part, or none
ROPE = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Olmo", "Olmo2", "SmolLM3", "Granite", "Mixtral",
        "Olmoe", "Starcoder2", "Gemma", "Qwen3Moe")
LATE = "StableLm", "Olmoe", "Nemotron"  # whose attention older versions of transformers cannot replace
TOKENS = torch.randint(3, V, (3, T), generator=torch.Generator().manual_seed(1))
logging.getLogger("transformers").setLevel(logging.ERROR)


def tiny(family: str, **changed):
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**FAMILIES.get(family, WIDE) | changed)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    if family in LATE and hf.__version__ < "5" and not model._can_set_attn_implementation():
        pytest.skip(f"{family} has its own attention in transformers {hf.__version__}")
    return model


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
    o, heads = memory.model.blocks[0].attention.o, torch.randn(5, *memory.caches[0].w_o.shape[1:])
    products = o(heads.flatten(1)) - o(0 * heads.flatten(1))  # without a bias
    torch.testing.assert_close(torch.einsum("thd,ohd->to", heads, memory.caches[0].w_o), products)
    assert (memory.model.freq is not None) == (family in ROPE)  # StreamingLLM moves its keys by it
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
    return checkpoint.from_hf(TINY), Bridged(theirs), tokenizer.load(TINY / "tokenizer.tiktoken")


@torch.no_grad()
@pytest.mark.parametrize("name", pick([]))
def test_the_shipped_model_keeps_and_answers_the_same_in_both(both, name):
    *models, encoding = both
    tokens = torch.tensor([encoding.encode("A method keeps some of these tokens. " * 9)] * 2)[:, :90]
    ends = tokenizer.boundaries(encoding, encoding.n_vocab)[tokens[:, :-1]]
    told = []
    for model in models:
        Method = pick([name])[name]
        options = given(Method, budget=40, window_size=8)
        if name == "duo_attention":  # as it calibrates itself, on less
            options["heads"] = retrieval_heads(gates(model, Tasks(encoding, "test"), 2, 128, steps=20), 0.6)
        caches = make_cache(model, Method, **options)
        tell_chunk_ends(caches, ends)
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
    ("DeepseekV3", DEEPSEEK, "keys of 8 numbers and values of [46]; take"),
    ("Falcon", SHAPE, "FalconForCausalLM does not go through"),
    ("Mamba", dict(vocab_size=V, hidden_size=32, num_hidden_layers=2), "no attention heads; take")])
def test_what_no_cache_here_knows_is_refused_by_name(monkeypatch, family, shape, message):
    monkeypatch.setitem(FAMILIES, family, shape)
    model = tiny(family)
    written = own(model)
    with pytest.raises(ValueError, match=message) as error:
        model(TOKENS, past_key_values=attach(model))
    assert "\n" not in str(error.value) and str(error.value).endswith("another model")
    detach(model)
    assert torch.equal(own(model), written)


def test_what_is_no_decoder_of_transformers_is_refused():
    encoder = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=V, d_model=32, num_layers=1))
    for model, message in ((None, "NoneType is not a model of transf.*; load"), (torch.nn.ReLU(), "ReLU is"),
                           (encoder, "T5ForConditionalGeneration has an encoder; take")):
        with pytest.raises(ValueError, match=message):
            attach(model)


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.55.4")
    with pytest.raises(ValueError, match="4.56 or newer; 4.55.4 is installed; pip install -U"):
        runpy.run_module("nanollm.hf.bridge")


def test_an_attach_that_is_refused_leaves_the_model_as_it_was():
    model = tiny("Llama")
    with pytest.raises(ValueError, match="budget"):
        attach(model, StreamingLLM, budget=0)
    assert model.config._attn_implementation == "sdpa" and not model.get_decoder()._forward_pre_hooks


READ, NEW, HIDDEN = TOKENS[:, :30], TOKENS[:, 30:], torch.ones(3, T).index_fill(1, torch.tensor(0), 0)
SLIDES = dict(use_sliding_window=True, sliding_window=35,
              layer_types=["full_attention", "sliding_attention", "full_attention"])


@torch.no_grad()
@pytest.mark.parametrize("message, family, changed, mode, call", [
    ("must show all 40 tokens, those", "Llama", {}, "eval", dict(attention_mask=HIDDEN)),
    ("must show all 40 tokens, those", "GPT2", {}, "eval", dict(attention_mask=HIDDEN[:, -10:])),
    ("not causal", "Llama", {}, "eval", dict(attention_mask=torch.zeros(3, 1, 10, T))),
    ("position_ids must be 30 … 39", "Llama", {}, "eval", dict(position_ids=torch.arange(5).repeat(2)[None])),
    ("no tokens beyond the 30", "Llama", {}, "eval", dict(input_ids=NEW[:, :0])),
    ("1 texts of 2 heads do not fit", "Llama", {}, "eval", dict(input_ids=NEW[:1])),
    ("layer 1 attends to the last 35 tokens alone", "Qwen2", SLIDES, "eval", {}),
    ("call model.eval", "Llama", dict(attention_dropout=0.5), "train", {})])
def test_a_refused_call_leaves_the_memory_as_it_was(message, family, changed, mode, call):
    model = tiny(family, **changed)
    memory, expected = attach(model), model(TOKENS[:, :35]).logits[:, 30:]
    model(READ, past_key_values=memory)
    getattr(model, mode)()
    with pytest.raises(ValueError, match=message) as error:
        model(**dict(input_ids=NEW, past_key_values=memory) | call)
    assert "\n" not in str(error.value)
    model.eval()
    torch.testing.assert_close(model(NEW[:, :5], past_key_values=memory).logits, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_right_positions_and_masks_are_accepted():
    model = tiny("Llama")
    memory, expected = attach(model), model(TOKENS).logits[:, 30:]
    model(READ, past_key_values=memory, attention_mask=torch.ones_like(READ))
    shown = torch.zeros(3, 1, 10, T).masked_fill(~torch.ones(10, T).tril(30).bool(), -torch.inf)
    right = dict(past_key_values=memory, attention_mask=shown, position_ids=torch.arange(30, T)[None])
    torch.testing.assert_close(model(NEW, **right).logits, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_call_that_was_broken_off_is_told_of_until_reset(monkeypatch):
    model = tiny("Llama")
    memory, expected = attach(model), model(TOKENS).logits
    with pytest.raises(ValueError, match="no prompt was read; call the model with past_key_values=memory"):
        memory.end_prompt()
    deaf = lambda *_, **__: (torch.zeros(3, T, 32), None)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].self_attn, "forward", deaf)
        with pytest.raises(ValueError, match="layer 1 does not go through transformers' attention interface"):
            model(TOKENS, past_key_values=memory)
    for call in (lambda: model(TOKENS, past_key_values=memory), memory.end_prompt, lambda: memory.crop(-1),
                 lambda: memory.reorder_cache(torch.tensor([0]))):
        with pytest.raises(ValueError, match="call stopped after only some layers had read"):
            call()
    memory.reset()
    torch.testing.assert_close(model(TOKENS, past_key_values=memory).logits, expected, atol=1e-5, rtol=0)
    for layer in model.model.layers:
        del layer.self_attn.o_proj
    with pytest.raises(ValueError, match="3 layers and 0 output projections by a known name"):
        attach(model)


@torch.no_grad()
def test_a_memory_is_read_by_its_own_model_while_that_is_attached():
    model, other = tiny("Llama"), tiny("Llama")
    bridged, memory = Bridged(model), attach(model)
    model(READ, past_key_values=memory)
    with pytest.raises(ValueError, match="never attached; call attach"):
        other(NEW, past_key_values=memory)
    attach(other)
    with pytest.raises(ValueError, match="belongs to another model; make one"):
        other(NEW, past_key_values=memory)
    detach(model)
    with pytest.raises(ValueError, match="was detached, or never attached"):
        model(NEW, past_key_values=memory)
    attach(SimpleNamespace(_orig_mod=model))  # as torch.compile wraps it: the model itself
    twin = type(model)(model.config).eval()  # whose config is the same object, and so names our attention
    twin.load_state_dict(model.state_dict())
    of_twin = attach(twin)
    twin(READ, past_key_values=of_twin)
    for one, of_one in (model, memory), (twin, of_twin):
        torch.testing.assert_close(one(NEW, past_key_values=of_one).logits, bridged(TOKENS)[:, 30:],
                                   atol=1e-5, rtol=0)


def test_gradients_go_through_the_first_call_and_are_refused_after_it():
    model = tiny("Llama")
    expected = torch.autograd.grad(model(READ).logits.square().mean(), model.parameters())
    memory = attach(model)
    first, later = (model(part, past_key_values=memory).logits.square().mean() for part in (READ, NEW))
    for a, b in zip(torch.autograd.grad(first, model.parameters()), expected):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    with pytest.raises(ValueError, match="no gradient goes through a memory that has read earlier tokens"):
        later.backward()


# ---- what transformers' own caches can do ----------------------------------------------------------------

@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_beams_and_drafts_are_those_of_the_models_own_cache(family):
    model, changed = tiny(family), {"n_layer" if family == "GPT2" else "num_hidden_layers": 1}
    for weight in model.parameters():
        weight.data *= 3  # so that beams part
    alone = functools.partial(model.generate, TOKENS[:1], max_new_tokens=20, do_sample=False)
    beams, written = own(model, num_beams=3), alone()
    assert torch.equal(own(model, num_beams=3, past_key_values=attach(model)), beams)
    memory = attach(model)
    model(TOKENS[:, :-1], past_key_values=memory)
    memory.end_prompt()
    memory.batch_repeat_interleave(3)
    assert torch.equal(own(model, num_beams=3, past_key_values=memory), beams)
    for draft in dict(prompt_lookup_num_tokens=3), dict(assistant_model=tiny(family, **changed)):
        assert torch.equal(alone(past_key_values=attach(model), **draft), written)


@torch.no_grad()
@pytest.mark.parametrize("name", pick([]))
def test_chosen_texts_are_answered_as_if_they_had_been_read(both, name):
    (_, bridged, encoding), Method = both, pick([name])[name]
    ids = encoding.encode("A method keeps some of these tokens. " * 18)
    tokens, chosen = torch.tensor([ids[:94], ids[45:139]]), torch.tensor([1, 0, 1])
    ends = tokenizer.boundaries(encoding, encoding.n_vocab)[tokens[:, :90]]
    options = given(Method, budget=40, window_size=8) | ({"heads": ((0, 0), (2, 1))} if "duo" in name else {})
    memories = []
    for rows in torch.arange(2), chosen:
        memories.append(attach(bridged.model, Method, **options))
        tell_chunk_ends(memories[-1].caches, ends[rows])
        bridged.model(tokens[rows, :90], past_key_values=memories[-1])
        end_prompt(bridged, tokens[rows, :90], memories[-1].caches)
    try:
        memories[0].batch_select_indices(chosen)
    except ValueError as error:
        assert "cannot repeat or choose texts" in str(error)
        assert name not in ("full", "h2o", "snap_kv", "tova", "streaming_llm", "quantized_2", "quest")
        return
    for token in tokens[chosen, 90:].split(1, 1):
        logits, expected = (bridged.model(token, past_key_values=memory).logits for memory in memories)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("crop, left", [(-5, 35), (35, 35), (40, 40), (0, 40), (-40, 0)])
def test_tokens_are_taken_out_of_a_full_cache(crop, left):
    model = tiny("Llama")
    memory, expected = attach(model), model(TOKENS).logits
    model(TOKENS, past_key_values=memory)
    memory.crop(crop)
    assert memory.get_seq_length() == left
    if left < T:
        logits = model(TOKENS[:, left:], past_key_values=memory).logits
        torch.testing.assert_close(logits, expected[:, left:], atol=1e-5, rtol=0)


@torch.no_grad()
def test_what_cannot_be_taken_out_or_chosen_is_refused():
    model = tiny("Llama")
    memory = attach(model, StreamingLLM, budget=8)
    model(TOKENS, past_key_values=memory)
    draft = dict(prompt_lookup_num_tokens=2, past_key_values=attach(model, StreamingLLM, budget=8))
    for call, message in ((lambda: memory.crop(-1), "StreamingLLM cannot remove tokens"),
                          (lambda: model.generate(TOKENS[:1], **draft), "StreamingLLM cannot remove tokens"),
                          (lambda: memory.crop(-41), "crop -41 must be a whole number of at least -40"),
                          (lambda: memory.reorder_cache(torch.tensor([3])), "must all be among 0 … 2")):
        with pytest.raises(ValueError, match=message):
            call()


@torch.no_grad()
def test_a_copy_of_a_memory_goes_its_own_way_and_reset_begins_anew():
    model = tiny("Llama")
    memory = attach(model, StreamingLLM, budget=8)
    model(READ, past_key_values=memory)
    memory.end_prompt()
    twin = deepcopy(memory)
    assert twin.caches[0].w_o is memory.caches[0].w_o and twin.model is memory.model
    logits = [model(NEW, past_key_values=one).logits for one in (memory, twin)]
    assert torch.equal(*logits) and memory.caches[2].k.data_ptr() != twin.caches[2].k.data_ptr()
    memory.reset()
    assert torch.equal(model(NEW, past_key_values=memory).logits, model(NEW).logits)
    memory.end_prompt()
    assert memory.caches[0].length == 8 and twin.get_seq_length() == T
