"""The decoder against transformers: tiny random models of every kind it reads, cached and uncached; attention to pairs against a loop."""
from itertools import product
import json
import math

import numpy as np
import pytest
import torch
from transformers import (AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config,
                          logging as transformers_logging)

from methods.tensor_attention import FourCache
from nanollm.cache import make_cache
from nanollm.model import Config, Decoder, rope, rope_frequencies, rotate
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
    "llama attention biases": LlamaConfig(**shape(32, 4, 2, attention_bias=True)),
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


@pytest.mark.parametrize("call, message", [
    (dict(last=0), "last 0 must be a whole number from 1 to 5"),
    (dict(last=-1), "last -1"),
    (dict(last=6), "last 6 .* to 5"),
    (dict(last=2.0), "last 2.0"),
    (dict(tokens=[[1, 2]]), "tokens are a list; give an int64 tensor"),
    (dict(tokens=TOKENS.numpy()), "tokens are a ndarray"),
    (dict(tokens=TOKENS[:, :5].float()), r"tokens are torch.float32 .* cast by .long\(\)"),
    (dict(tokens=TOKENS[:, :5] > 30), "tokens are torch.bool"),
    (dict(tokens=TOKENS[0]), r"tokens are empty or not of shape \(B, T\): \(40,\)"),
    (dict(tokens=TOKENS[:, :0]), r"tokens are empty or .*: \(2, 0\)"),
    (dict(tokens=TOKENS[:, :5] + 57), "token ids 58 … 116 must lie in the vocabulary 0 … 60"),
    (dict(pos=torch.arange(5)), r"positions are empty or not of shape \(B, T\): \(5,\)"),
    (dict(pos=torch.arange(4)[None]), r"positions 0 … 3 of shape \(1, 4\) .* shape \(2, 5\) or \(1, 5\)"),
    (dict(pos=torch.arange(12, 17)[None]), "positions 12 … 16 .* must lie in 0 … 15"),
    (dict(pos=torch.arange(-1, 4)[None]), "positions -1 … 3"),
])
def test_a_call_that_does_not_fit_is_refused_before_a_cache_is_touched(call, message):
    model = Decoder(tiny(family="gpt2"))
    cache = make_cache(model)
    for memory in cache:
        memory.hear = lambda tokens: pytest.fail("the cache has heard of it")
    with pytest.raises(ValueError, match=message) as error:
        model(**dict(tokens=TOKENS[:, :5], cache=cache) | call)
    assert "\n" not in str(error.value) and [memory.seen for memory in cache] == [0, 0]


SCALED = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


@pytest.mark.parametrize("changed, message", [
    (dict(family="bert"), "family 'bert' is unknown"),
    (dict(n_layers=0), "n_layers 0 must be a whole number from 1 to 2147483647"),
    (dict(vocab_size=-1), "vocab_size -1 must be a whole number"),
    (dict(d_model=32.0), "d_model 32.0 must be a whole number"),
    (dict(d_ff=True), "d_ff True must be a whole number"),
    (dict(max_len="16"), "max_len '16' must be a whole number"),
    (dict(head_dim=-8), "head_dim -8 must be a whole number"),
    (dict(o_bias=1), "o_bias 1 must be True or False"),
    *((dict(rope_theta=x), f"rope_theta {x} must be a finite") for x in (0, -1e4, math.nan, math.inf, None)),
    *((dict(norm_eps=x), f"norm_eps {x} must be a finite") for x in (0.0, -1, math.nan, 1e-50)),
    (dict(rope_scaling=8.0), "rope_scaling 8.0 must be an object"),
    (dict(rope_scaling=dict(factor=8.0)), "rope_scaling .* must hold factor, .* and nothing else"),
    (dict(rope_scaling=SCALED | dict(rope_type="yarn")), "and nothing else"),
    (dict(rope_scaling=SCALED | dict(factor=0)), "factor 0 must be a finite number above 0"),
    (dict(rope_scaling=SCALED | dict(low_freq_factor=4.0)), "low_freq_factor 4.0 must be below .* 4.0"),
    (dict(rope_scaling=SCALED | dict(original_max_position_embeddings=32.0)), "32.0 must be a whole number"),
    (dict(d_model=30), "d_model 30 is not a multiple of n_heads 4"),
    (dict(n_kv_heads=3), "n_heads 4 is not a multiple of n_kv_heads 3"),
    (dict(head_dim=7), "head_dim 7 is odd"),
    (dict(vectors=3), "vectors 3 must be 1 .* or 2"),
    (dict(vectors=0), "vectors 0 must be a whole number"),
])
def test_a_bad_config_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changed)


def test_head_dim_follows_from_d_model_unless_set():
    assert tiny().head_dim == 8 and tiny(d_model=30, head_dim=6).head_dim == 6
    assert tiny(family="gpt2", head_dim=7).head_dim == 7  # only RoPE needs pairs


def test_numbers_of_numpy_become_those_that_json_writes():
    scaled = SCALED | dict(factor=np.int32(8))
    config = tiny(d_model=np.int64(32), rope_theta=np.float32(500), rope_scaling=scaled)
    assert config == tiny(rope_theta=500.0, rope_scaling=SCALED) and json.dumps(vars(config))


def test_residual_branches_start_smaller_by_the_root_of_their_number():
    """GPT-2, section 2.3: 1/√N for N residual layers, two in each block."""
    torch.manual_seed(0)
    model = Decoder(tiny(n_layers=8))
    drawn = {"qkv": [], "o": [], "up": [], "down": []}
    for name, p in model.named_parameters():
        if name.startswith("blocks") and (part := name.split(".")[-2]) in drawn:
            drawn[part].append(p.flatten())
    std = {part: torch.cat(p).std().item() for part, p in drawn.items()}  # of 8192 numbers or more: ± 0.8 %
    assert std == pytest.approx(dict(qkv=0.02, o=0.005, up=0.02, down=0.005), rel=0.04)


def test_gradients_reach_every_parameter():
    for family, vectors in product(("llama", "gpt2"), (1, 2)):
        model = Decoder(tiny(family=family, vectors=vectors, tie_embeddings=False, qkv_bias=True, o_bias=True, mlp_bias=True))
        model(TOKENS[:, :16]).square().mean().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all(), name


# ---- two vectors: attention to pairs ---


def pair_model(**changed) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(tiny(vectors=2, **changed)).double()
    for p in model.parameters():
        p.data.mul_(4)  # sharp attention
    return model


@pytest.mark.claim("T13")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_with_two_vectors_is_the_loop_over_pairs_from_its_own_weights(family):
    """The rows of qkv: H·G queries, then k₁ and k₂ of head 0, of head 1, and the same of v. None is rotated."""
    attention = pair_model(family=family, n_heads=6, n_kv_heads=2, head_dim=4).blocks[0].attention
    x = torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = ([x @ w.T for w in part.split(4)] for part in attention.qkv.weight.split((24, 16, 16)))  # each (B, T, D)
    heads = []
    for h in range(6):
        (k1, k2), (v1, v2) = (both[h // 3 * 2:h // 3 * 2 + 2] for both in (k, v))
        y = torch.zeros(2, 7, 4, dtype=torch.float64)
        for b in range(2):
            for i in range(7):
                pairs = list(product(range(i + 1), repeat=2))
                p = torch.stack([(q[h][b, i] * k1[b, a] * k2[b, c]).sum() / 2 for a, c in pairs]).softmax(0)
                y[b, i] = sum(w * v1[b, a] * v2[b, c] for w, (a, c) in zip(p, pairs))
        heads.append(y)
    angles = rope(rope_frequencies(attention.config), torch.arange(7)[None])
    got = attention(x, angles if family == "llama" else None, torch.arange(7)[None])
    assert torch.allclose(got, torch.cat(heads, -1) @ attention.o.weight.T, rtol=0, atol=1e-12)


@pytest.mark.claim("T13")
def test_three_rotated_vectors_see_where_the_text_begins_and_two_do_not_so_pairs_are_not_rotated():
    freq = rope_frequencies(tiny(head_dim=8))
    q, k1, k2 = torch.randn(3, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def scores(shift):
        a, b, c = (rotate(x, *rope(freq, torch.tensor([at + shift]))) for x, at in ((q, 9), (k1, 4), (k2, 2)))
        return (a * b).sum(), (a * b * c).sum(), (a * b * k2).sum()  # attention; all three rotated; q and k₁ alone

    for shift in (1, 10, 100):
        same, three, two = (abs(x - y) for x, y in zip(scores(shift), scores(0)))
        assert same < 1e-5 and three > 0.05 and two > 0.05
    model = pair_model()
    assert torch.equal(model(TOKENS[:, :9], pos=torch.arange(9)[None] + 5), model(TOKENS[:, :9]))
    assert not torch.allclose(model(TOKENS[:, :9]), model(TOKENS[:, :9].flip(1)))  # but causality tells an order


@pytest.mark.claim("T13")
def test_tensor_attention_has_the_parameters_of_ordinary_attention_with_one_and_a_half_times_the_heads():
    def count(**changed):
        return sum(p.numel() for p in Decoder(tiny(head_dim=8, **changed)).parameters())

    assert count(vectors=2, n_heads=4, n_kv_heads=4) == count(n_heads=6, n_kv_heads=6)


def test_a_cache_for_single_keys_is_refused_by_a_decoder_with_two_and_the_other_way_round():
    with pytest.raises(ValueError, match="LayerCache is for 1 key and value vectors a token, the decoder has 2; .*sub_gen"):
        make_cache(pair_model())
    with pytest.raises(ValueError, match="FourCache is for 2 key and value vectors a token, the decoder has 1"):
        make_cache(Decoder(tiny()), FourCache)
