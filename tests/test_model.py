"""The decoder against transformers: tiny random models of every kind it reads, cached and uncached."""
import pytest
import torch
from transformers import (AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config,
                          logging as transformers_logging)

from nanollm.cache import make_cache
from nanollm.model import Config, Decoder
from nanollm.weights import from_hf

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
IDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)  # generate() shall not stop early
SIZE = dict(vocab_size=61, num_hidden_layers=2, max_position_embeddings=64, **IDS)
SMALL = dict(vocab_size=61, n_layer=2, n_positions=64, **IDS)
# angles of θ=100 over D=16 turn 5 times to 0.1 times in 32 tokens: some stay, some are on the ramp, some are stretched
LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)


def shape(d_model, heads, kv_heads, d_ff=48, **more):
    return dict(hidden_size=d_model, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=d_ff,
                **SIZE, **more)


CASES = {
    "gpt2": GPT2Config(n_embd=32, n_head=4, **SMALL),
    "gpt2 3 heads": GPT2Config(n_embd=24, n_head=3, n_inner=40, activation_function="gelu_pytorch_tanh", **SMALL),
    "gpt2 untied": GPT2Config(n_embd=32, n_head=4, tie_word_embeddings=False, layer_norm_epsilon=1e-3, **SMALL),
    "llama multi-head": LlamaConfig(**shape(32, 4, 4)),
    "llama grouped tied": LlamaConfig(**shape(32, 4, 2, tie_word_embeddings=True, rms_norm_eps=1e-3)),
    "llama 3 heads 1 kv": LlamaConfig(**shape(24, 3, 1)),
    "llama 5 heads": LlamaConfig(**shape(40, 5, 5, head_dim=16)),
    "llama biases": LlamaConfig(**shape(32, 4, 2, attention_bias=True, mlp_bias=True)),
    "llama3.1": LlamaConfig(**shape(32, 4, 2, head_dim=16, rope_parameters=LLAMA3)),
    "mistral": MistralConfig(**shape(32, 4, 2, sliding_window=None, head_dim=4)),
    "qwen2": Qwen2Config(**shape(32, 4, 2, rope_parameters=dict(rope_type="default", rope_theta=300.0))),
    "qwen2 tied 1 kv": Qwen2Config(**shape(24, 6, 1, tie_word_embeddings=True)),
}


def oracle(case: str):
    """transformers' model of a case, every parameter drawn at random: its own initialisation leaves biases zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CASES[case]).eval()
    for name, p in model.named_parameters():
        is_norm = "norm" in name or "ln_" in name
        torch.nn.init.normal_(p, mean=float(is_norm and name.endswith("weight")), std=0.25)
    return model


def same(a, b, atol=1e-4):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """transformers' model and ours, read from the folder it saved."""
    theirs = oracle(request.param)
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    return theirs, from_hf(folder)


TOKENS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits_equal_transformers(pair):
    theirs, ours = pair
    want = theirs(TOKENS).logits
    assert want.std() > 0.3  # else the tolerance would hide everything
    same(ours(TOKENS), want)
    same(ours(TOKENS, last=3), want[:, -3:])


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 7, 20])
def test_cached_decoding_equals_transformers(pair, prompt):
    theirs, ours = pair
    cache = make_cache(ours)
    chunks = [prompt, 9] + [1] * (40 - prompt - 9)  # a second chunk attends to the first
    got = torch.cat([ours(chunk, cache) for chunk in TOKENS.split(chunks, 1)], 1)
    same(got, theirs(TOKENS).logits)
    assert cache[0].seen == cache[1].seen == 40


@torch.no_grad()
def test_greedy_tokens_equal_transformers_generate(pair):
    theirs, ours = pair
    prompt = TOKENS[:, :12]
    want = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False,
                           pad_token_id=0)
    cache, new, got = make_cache(ours), prompt, prompt
    for _ in range(24):
        new = ours(new, cache, last=1).argmax(-1)
        got = torch.cat((got, new), 1)
    assert got.tolist() == want.tolist()


@torch.no_grad()
def test_given_positions_equal_transformers(pair):
    theirs, ours = pair
    pos = torch.stack((torch.arange(20), torch.arange(20) + 30))
    pos[:, 8:] += 11  # a jump in the middle
    want = theirs(TOKENS[:, :20], position_ids=pos, attention_mask=torch.ones(2, 20)).logits
    same(ours(TOKENS[:, :20], pos=pos), want)
    assert (ours(TOKENS[:, :20]) - want).abs().max() > 1e-2  # the positions matter


def tiny(**changed) -> Config:
    return Config(**dict(vocab_size=61, max_len=16, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=48) | changed)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sequences_end_at_max_len(family):
    model = Decoder(tiny(family=family))
    assert model(TOKENS[:, :16]).shape == (2, 16, 61)
    with pytest.raises(ValueError, match="17 tokens exceed the model's length of 16"):
        model(TOKENS[:, :17])
    cache = make_cache(model)
    model(TOKENS[:, :15], cache)
    with pytest.raises(ValueError, match="17 tokens exceed"):
        model(TOKENS[:, :2], cache)
    model(TOKENS[:, :1], cache)  # the refused call left no trace


@pytest.mark.parametrize("changed, message", [
    (dict(family="bert"), "family 'bert' is unknown"),
    (dict(n_layers=0), "n_layers 0 must be at least 1"),
    (dict(vocab_size=-1), "vocab_size -1 must be at least 1"),
    (dict(d_model=30), "d_model 30 is not a multiple of n_heads 4"),
    (dict(n_kv_heads=3), "n_heads 4 is not a multiple of n_kv_heads 3"),
    (dict(head_dim=7), "head_dim 7 is odd"),
])
def test_a_bad_config_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changed)


def test_head_dim_follows_from_d_model_unless_set():
    assert tiny().head_dim == 8 and tiny(d_model=30, head_dim=6).head_dim == 6
    assert tiny(family="gpt2", head_dim=7).head_dim == 7  # only RoPE needs pairs


def test_gradients_reach_every_parameter():
    for family in ("llama", "gpt2"):
        model = Decoder(tiny(family=family, tie_embeddings=False, qkv_bias=True, o_bias=True, mlp_bias=True))
        model(TOKENS[:, :16]).square().mean().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all(), name
