"""Read and write weights in Hugging Face's layout: config.json and model.safetensors.

`from_hf` reads GPT-2 and models of Llama's form, such as Llama 2 and 3.1, Mistral without a sliding
window and Qwen2.5. It refuses known options that Decoder does not implement.
transformers reads its other families, and Hugging Face's tokenizers (`hf_model`, `hf_tokenizer`).
"""

from contextlib import contextmanager
from functools import partial
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nanollm.check import SCALING
from nanollm.model import Attention, Config, Decoder
from nanollm.tokenizer import Foreign

# model_type → family
FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "gpt2": "gpt2"}
# field of Config → its name in config.json
KEYS = {
    "llama": dict(
        vocab_size="vocab_size",
        max_len="max_position_embeddings",
        n_layers="num_hidden_layers",
        n_heads="num_attention_heads",
        n_kv_heads="num_key_value_heads",
        head_dim="head_dim",
        d_model="hidden_size",
        d_ff="intermediate_size",
        norm_eps="rms_norm_eps",
        rope_theta="rope_theta",
    ),
    "gpt2": dict(
        vocab_size="vocab_size",
        max_len="n_positions",
        n_layers="n_layer",
        n_heads="n_head",
        n_kv_heads="n_head",
        d_model="n_embd",
        d_ff="n_inner",
        norm_eps="layer_norm_epsilon",
    ),
}
# what Decoder computes; an absent key has the first value
ALLOWED = dict(
    hidden_act=["silu"],
    activation_function=["gelu_new", "gelu_pytorch_tanh"],  # two names of one function
    scale_attn_weights=[True],
    scale_attn_by_inverse_layer_idx=[False],
    add_cross_attention=[False],
    use_sliding_window=[False],
    rope_type=["default", "llama3"],
    partial_rotary_factor=[1.0],
    quantization_config=[None],
)
# Hugging Face's module → ours
LLAMA = {
    "embed_tokens": "embed",
    "norm": "norm",
    "lm_head": "head",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    **{f"self_attn.{name}_proj": f"attention.{name}" for name in ("q", "k", "v", "o")},
    **{f"mlp.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")},
}
GPT2 = {
    "wte": "embed",
    "wpe": "positions",
    "ln_f": "norm",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.o",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
# masks and angles in old checkpoints; they follow from the configuration
DERIVED = ".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"


def is_known(folder: str | Path) -> bool:
    """Return whether `from_hf` should read the folder: it knows the family, or names the error."""
    file = Path(folder) / "config.json"
    try:
        return json.loads(file.read_text())["model_type"] in FAMILIES
    except (OSError, KeyError, TypeError, ValueError):
        return True


def config_of(hf: dict) -> Config:
    """Return the Config of a config.json.

    KeyError, TypeError or ValueError if Decoder cannot compute it.
    """
    kind = hf["model_type"]
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    if kind == "mistral" and hf.get("sliding_window", 4096):  # null means none
        raise ValueError(
            "a sliding window is not implemented; Mistral has none from v0.2 on"
        )
    # transformers 4 writes rope_scaling, transformers 5 rope_parameters
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    hf = hf | rope
    hf = {key: x for key, x in hf.items() if x is not None}  # null means the default
    hf["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    for key, values in ALLOWED.items():
        if hf.get(key, values[0]) not in values:
            allowed = " or ".join(map(repr, values))
            raise ValueError(f"{key} {hf[key]!r:.60} is not {allowed}")

    rope_scaling = None
    if hf["rope_type"] == "llama3":
        rope_scaling = {key: hf[key] for key in SCALING}

    biases = mlp_bias = kind == "gpt2"
    if kind == "llama":
        biases = hf.get("attention_bias", False)
        mlp_bias = hf.get("mlp_bias", False)

    default = dict(
        head_dim=0,
        rope_theta=10_000.0,
        num_key_value_heads=hf.get("num_attention_heads"),
        n_inner=4 * hf.get("n_embd", 0),
    )
    hf = default | hf
    return Config(
        family=family,
        qkv_bias=biases or kind == "qwen2",
        o_bias=biases,
        mlp_bias=mlp_bias,
        tie_embeddings=hf.get("tie_word_embeddings", kind == "gpt2"),
        bos=hf.get("bos_token_id"),
        rope_scaling=rope_scaling,
        **{ours: hf[theirs] for ours, theirs in KEYS[family].items()},
    )


def our_name(name: str) -> str:
    """Return our name of a tensor: layers.3.input_layernorm.weight → blocks.3.norm1.weight."""
    name = name.removeprefix("transformer.")
    name = name.removeprefix("model.")
    module, _, kind = name.rpartition(".")
    block = ""
    if module.startswith(("layers.", "h.")):
        _, layer, module = module.split(".", 2)
        block = f"blocks.{layer}."
    module = (LLAMA | GPT2).get(module, module)
    return f"{block}{module}.{kind}"


def our_weights(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return a folder's weights by our names, cast to dtype, with the rows of q, k and v joined."""
    files = [folder / "model.safetensors"]
    if not files[0].exists():
        files = sorted(folder.glob("model-*.safetensors"))

    weights = {}
    for file in files:
        with safe_open(file, "pt") as shard:
            for name in shard.keys():
                if name.endswith(DERIVED):
                    continue
                x = shard.get_tensor(name)
                x = x.to(device, dtype, copy=True)
                if ".c_" in name and x.dim() == 2:  # GPT-2's matrices are transposed
                    x = x.T.contiguous()
                weights[our_name(name)] = x

    join_qkv(weights)
    return weights


def join_qkv(weights: dict[str, Tensor]):
    """Put the rows of each layer's q, k and v into one tensor, as Decoder has them."""
    for name in [name for name in weights if ".q." in name]:
        rows = [weights.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
        weights[name.replace(".q.", ".qkv.")] = torch.cat(rows)


@torch.no_grad()
def from_hf(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """Return the decoder in a Hugging Face folder, in eval mode, with weights cast to dtype.

    ValueError if Decoder cannot compute this model, if a file is missing or cannot be read, or if a
    tensor is missing, unknown or not finite.
    """
    folder = Path(folder)
    device = check_device(device)
    try:
        text = (folder / "config.json").read_text()
        config = config_of(json.loads(text))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}/config.json is not one that this decoder can run ({error!r}); "
            "--engine transformers runs more models"
        ) from None
    try:
        weights = our_weights(folder, dtype, device)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{folder}/model.safetensors is damaged ({one_line(error):.300}); "
            "download it again"
        ) from None
    return assembled(config, weights, folder / "model.safetensors", device)


def one_line(error: Exception) -> str:
    """Return an error's message without its line breaks."""
    return " ".join(str(error).split())


class NoRandomWeights(TorchFunctionMode):
    """While this context lasts, nn.init.normal_ leaves a tensor as it is; in this thread alone."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.init.normal_:
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def assembled(
    config: Config, weights: dict[str, Tensor], source: Path, device
) -> Decoder:
    """Return a decoder with all of these tensors, by our names, and no others.

    ValueError names `source` if they do not fit.
    """
    # On meta, weights take no memory. But to draw random numbers there, PyTorch would import
    # its compiler, which took seconds on one CPU.
    with torch.device("meta"), NoRandomWeights():
        model = Decoder(config)
    if config.tie_embeddings and "embed.weight" in weights:
        weights["head.weight"] = weights["embed.weight"]
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {source} do not fit its configuration "
            f"({one_line(error):.300}); download both again"
        ) from None
    if config.tie_embeddings:  # `assign` has made two parameters of one
        model.head.weight = model.embed.weight
    check_finite(weights)
    return model.to(device).eval()


@torch.no_grad()
def check_finite(tensors: dict[str, Tensor]):
    """Raise ValueError if a tensor holds inf or nan."""
    for name, x in tensors.items():
        # its two extremes tell; isfinite of all took 24 times as long in 32 bits on one CPU
        lowest, highest = x.aminmax()
        if not (lowest.isfinite() and highest.isfinite()):
            raise ValueError(
                f"tensor {name} holds inf or nan as {x.dtype}; use a wider one, as bfloat16"
            )


def to_hf(model: Decoder, folder: str | Path, dtype: torch.dtype = torch.float16):
    """Write config.json and model.safetensors in Llama's layout, weights cast to dtype.

    ValueError if the decoder has another form than Llama, or if a weight is not finite in dtype.
    """
    c = model.config
    layer = type(model.blocks[0].attention)
    if c.family != "llama" or c.qkv_bias != c.o_bias or layer is not Attention:
        raise ValueError(
            f"{layer.__name__} in {c} has not Llama's form: RoPE, and qkv_bias = o_bias"
        )
    config = {theirs: getattr(c, ours) for ours, theirs in KEYS["llama"].items()}
    config |= dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_act="silu",
        attention_bias=c.o_bias,
        mlp_bias=c.mlp_bias,
        tie_word_embeddings=c.tie_embeddings,
        bos_token_id=c.bos,
        eos_token_id=None,
        torch_dtype=str(dtype).removeprefix("torch."),
        rope_scaling=c.rope_scaling and {"rope_type": "llama3", **c.rope_scaling},
    )

    weights = dict(model.named_parameters())  # a tied head is not among them
    for i, block in enumerate(model.blocks):
        attention = block.attention
        for kind, x in attention.qkv.named_parameters():
            for part, rows in zip("qkv", attention.split(x)):
                weights[f"blocks.{i}.attention.{part}.{kind}"] = rows

    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    for i in range(c.n_layers):
        modules += [f"model.layers.{i}.{module}" for module in LLAMA]
    tensors = {}
    for module in modules:
        for kind in ("weight", "bias"):
            name = f"{module}.{kind}"
            x = weights.get(our_name(name))
            if x is not None:
                tensors[name] = x.to("cpu", dtype).contiguous()
    check_finite(tensors)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_device(name: str | torch.device) -> torch.device:
    """Return the device, or raise a ValueError if this machine cannot compute on it."""
    try:
        torch.ones(1, device=name).item()  # fails on meta, which has no numbers
        return torch.device(name)
    except Exception as error:  # each backend raises its own error
        raise ValueError(
            f"device {str(name)!r} is not available ({error!s:.200}); use cpu"
        ) from None


# ---- what transformers reads ---


@contextmanager
def reading(folder: str | Path):
    """Turn whatever transformers raises into a ValueError of one line."""
    from transformers.utils import logging  # here, because importing it takes seconds

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # several libraries read, each with its own errors
        line = one_line(error) or type(error).__name__
        raise ValueError(
            f"transformers cannot read {folder} ({line:.300}); download it again"
        ) from error


def hf_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
):
    """Return transformers' own model of a folder, in eval mode. ValueError if it cannot be read."""
    with reading(folder):
        from transformers import AutoModelForCausalLM

        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            dtype=dtype,
            output_loading_info=True,
        )
        missing = report["missing_keys"]
        if missing:  # transformers would draw them at random
            raise ValueError(f"it lacks {len(missing)} tensors, such as {min(missing)}")
    return model.to(check_device(device)).eval()


def as_hf(model: Decoder):
    """Return transformers' model with the weights of a decoder of Llama's form."""
    x = model.embed.weight
    with TemporaryDirectory() as folder:
        to_hf(model, folder, x.dtype)
        return hf_model(folder, x.dtype, x.device)


def hf_tokenizer(folder: str | Path) -> Foreign:
    """Return the folder's tokenizer, read by transformers. ValueError if it cannot be read."""
    files = [*Path(folder).glob("tokenizer*"), *Path(folder).glob("vocab*")]
    if not files:
        raise ValueError(
            f"{folder} has no tokenizer; copy the model's tokenizer.json into it"
        )
    with reading(folder):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        # some broken ones load, but then encode to nothing or fail
        ids = tokenizer.encode("The")
        if not ids:
            raise ValueError("its tokenizer encodes a text as no tokens")

    def raw(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    # config.json may name a BOS token that is not used
    bos = ids[0] if ids[0] == tokenizer.bos_token_id else None
    chat = partial(
        tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True
    )
    highest = max(tokenizer.get_vocab().values(), default=-1)
    special = tokenizer.all_special_ids
    return Foreign(raw, tokenizer.decode, highest + 1, bos, chat, special)
