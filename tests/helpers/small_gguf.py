"""Small GGUF files of random weights."""

import gguf as files
import numpy as np
import torch
import transformers as hf

from nanollm import gguf

SIZE = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    rope_theta=5000.0,
)
stand_in = {b: c for c, b in gguf.stand_ins().items()}
PIECES = [stand_in[b] for b in range(256) if b != 7]
PIECES += ["Ġt", "he", "Ġthe", *[f"Ġ{c}" for c in "ABCDEFGHIJKLM"], "<|im_end|>"]
MODELS = {"llama": hf.LlamaConfig, "qwen2": hf.Qwen2Config}
NAMES = files.get_tensor_name_map(files.MODEL_ARCH.LLAMA, n_blocks=2)  # Qwen2's, too


def neighbours(x, heads):
    """Put dimension i + D/2 beside dimension i, as llama.cpp does for Llama."""
    D = x.shape[0] // heads
    halves = x.reshape(heads, 2, D // 2, -1)
    return halves.swapaxes(1, 2).reshape(x.shape)


def close(out):
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def written(file, kind, about=(), quantised=None, **config):
    """Write a small random model of transformers as a GGUF file; return the model."""
    torch.manual_seed(0)
    shape = MODELS[kind](vocab_size=len(PIECES), **SIZE | config)
    model = hf.AutoModelForCausalLM.from_config(shape).eval()
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    out = files.GGUFWriter(file, kind)
    given = {
        f"{kind}.context_length": 96,
        f"{kind}.embedding_length": model.config.hidden_size,
        f"{kind}.block_count": 2,
        f"{kind}.feed_forward_length": model.config.intermediate_size,
        f"{kind}.attention.head_count": 4,
        f"{kind}.attention.head_count_kv": 2,
        f"{kind}.rope.freq_base": 5000.0,
        f"{kind}.attention.layer_norm_rms_epsilon": model.config.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": [1] * (len(PIECES) - 1) + [3],
        "tokenizer.ggml.eos_token_id": len(PIECES) - 1,
        "tokenizer.chat_template": (
            "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}\n"
            "{% endgeneration %}{% if strftime_now('%Y') | tojson %}{% break %}{% endif %}"
            "{% endfor %}A:"
        ),
    }
    for name, x in (given | dict(about)).items():
        out.add_key_value(name, x, files.GGUFValueType.get_type(x))
    for name, x in model.state_dict().items():
        if "lm_head" in name and model.config.tie_word_embeddings:
            continue
        x = x.numpy()
        if kind == "llama" and "q_proj" in name:
            x = neighbours(x, heads=4)
        if kind == "llama" and "k_proj" in name:
            x = neighbours(x, heads=2)
        name = NAMES.get_name(name, (".weight", ".bias"))
        if quantised and x.ndim == 2:
            blocks = files.GGMLQuantizationType[quantised]
            out.add_tensor(name, files.quantize(x, blocks), raw_dtype=blocks)
        else:
            out.add_tensor(name, np.ascontiguousarray(x))
    freq = model.model.rotary_emb.inv_freq
    pair = torch.arange(len(freq)) / len(freq)
    plain = model.config.rope_parameters["rope_theta"] ** -pair
    if not torch.allclose(freq, plain):
        out.add_tensor("rope_freqs.weight", (plain / freq).numpy())
    close(out)
    return model
