"""Make tiny random models of transformers, with which tests compare our decoder."""

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    logging as transformers_logging,
)

from nanollm.model import Config

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
# generate() does not stop early
IDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
SIZE = dict(vocab_size=61, num_hidden_layers=2, max_position_embeddings=64, **IDS)
SMALL = dict(vocab_size=61, n_layer=2, n_positions=64, **IDS)
# with θ = 100 and D = 16 the angles turn 5 to 0.1 times in 32 tokens: all three cases of Llama 3
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=100.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


def shape(d_model, heads, kv_heads, d_ff=48, **more):
    return dict(
        hidden_size=d_model,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=d_ff,
        **SIZE,
        **more,
    )


CASES = {
    "gpt2": GPT2Config(n_embd=32, n_head=4, **SMALL),
    "gpt2 3 heads": GPT2Config(
        n_embd=24,
        n_head=3,
        n_inner=40,
        activation_function="gelu_pytorch_tanh",
        **SMALL,
    ),
    "gpt2 untied": GPT2Config(
        n_embd=32, n_head=4, tie_word_embeddings=False, layer_norm_epsilon=1e-3, **SMALL
    ),
    "llama multi-head": LlamaConfig(**shape(32, 4, 4)),
    "llama grouped tied": LlamaConfig(
        **shape(32, 4, 2, tie_word_embeddings=True, rms_norm_eps=1e-3)
    ),
    "llama 3 heads 1 kv": LlamaConfig(**shape(24, 3, 1)),
    "llama 5 heads": LlamaConfig(**shape(40, 5, 5, head_dim=16)),
    "llama biases": LlamaConfig(**shape(32, 4, 2, attention_bias=True, mlp_bias=True)),
    "llama attention biases": LlamaConfig(**shape(32, 4, 2, attention_bias=True)),
    "llama3.1": LlamaConfig(**shape(32, 4, 2, head_dim=16, rope_parameters=LLAMA3)),
    "mistral": MistralConfig(**shape(32, 4, 2, sliding_window=None, head_dim=4)),
    "qwen2": Qwen2Config(
        **shape(32, 4, 2, rope_parameters=dict(rope_type="default", rope_theta=300.0))
    ),
    # 3 · 14 is not 20
    "qwen2 heads of 14": Qwen2Config(**shape(20, 3, 3, head_dim=14)),
    "qwen2 tied 1 kv": Qwen2Config(**shape(24, 6, 1, tie_word_embeddings=True)),
}


def oracle(case: str):
    """Return transformers' model of a case with random parameters.

    Its own initialisation has zero biases.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CASES[case]).eval()
    for name, p in model.named_parameters():
        is_norm = "norm" in name or "ln_" in name
        mean = 1.0 if is_norm and name.endswith("weight") else 0.0
        torch.nn.init.normal_(p, mean=mean, std=0.25)
    return model


def same(a, b, atol=1e-4):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


TOKENS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))


def tiny(**changed) -> Config:
    """Return a small configuration of our decoder, by default with groups of two query heads."""
    size = dict(
        vocab_size=61,
        max_len=16,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_model=32,
        d_ff=48,
    )
    return Config(**size | changed)
