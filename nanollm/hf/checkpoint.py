"""Read and write weights in Hugging Face's layout: config.json and model.safetensors.

`from_hf` reads GPT-2 and models of Llama's form: Llama 2 and 3.1, Mistral without a sliding window, Qwen2.5.
It raises a ValueError if Decoder would compute anything else than the model's authors; it never approximates.
transformers reads all other families and every tokenizer (`hf_model`, `hf_tokenizer`).
"""
from contextlib import contextmanager
import json
from os.path import isfile  # unlike Path.is_file, also false for invalid names
from pathlib import Path
import re

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
import torch
from torch.overrides import TorchFunctionMode
from torch import Tensor

from nanollm.check import SCALING, check_field, whole
from nanollm.model import Attention, Config, Decoder
from nanollm.tokenizer import Foreign

# ---- config.json ---------------------------------------------------------------------------------------

# field of Config → its name in config.json
KEYS = {
    "gpt2": dict(vocab_size="vocab_size", max_len="n_positions", n_layers="n_layer", n_heads="n_head",
                 d_model="n_embd", d_ff="n_inner", norm_eps="layer_norm_epsilon",
                 tie_embeddings="tie_word_embeddings"),
    "llama": dict(vocab_size="vocab_size", max_len="max_position_embeddings", n_layers="num_hidden_layers",
                  n_heads="num_attention_heads", n_kv_heads="num_key_value_heads", head_dim="head_dim",
                  d_model="hidden_size", d_ff="intermediate_size", norm_eps="rms_norm_eps",
                  tie_embeddings="tie_word_embeddings")}


def require(hf: dict, key: str, *allowed):
    """Raise ValueError unless hf[key] is one of `allowed`; if absent, it is the first of them."""
    if hf.get(key, allowed[0]) not in allowed:
        words = " or ".join(map(repr, allowed))
        raise ValueError(f"{key} {hf[key]!r:.60} is not implemented; only {words} is")


def fields(hf: dict, family: str, **default) -> dict:
    """Return the fields of Config that KEYS lists, checked; null or absent takes the default."""
    values = dict(bos=hf.get("bos_token_id"))
    for ours, theirs in KEYS[family].items():
        if (x := hf.get(theirs)) is not None:
            check_field(theirs, x, Config.__annotations__[ours])
        values[ours] = default[theirs] if x is None else x
    return values


def gpt2_config(hf: dict) -> Config:
    require(hf, "activation_function", "gelu_new", "gelu_pytorch_tanh")  # two names of one function
    require(hf, "scale_attn_weights", True)
    require(hf, "scale_attn_by_inverse_layer_idx", False)
    require(hf, "add_cross_attention", False)
    width = whole("n_embd", hf["n_embd"], 1)
    return Config(family="gpt2", n_kv_heads=hf["n_head"], qkv_bias=True, o_bias=True, mlp_bias=True,
                  **fields(hf, "gpt2", n_inner=4 * width, tie_word_embeddings=True))


def llama_config(hf: dict) -> Config:
    kind, max_len = hf["model_type"], whole("max_position_embeddings", hf["max_position_embeddings"], 1)
    require(hf, "hidden_act", "silu")
    if kind == "qwen2":
        require(hf, "use_sliding_window", False)
    if kind == "mistral":
        window = hf.get("sliding_window", 4096)  # absent means 4096, null means none
        if window is not None and whole("sliding_window", window, 1) < max_len:
            raise ValueError(f"sliding_window {window} is below max_position_embeddings {max_len}, "
                             "and windowed attention is not implemented; use a Mistral from v0.2 on")
    # transformers 5 writes rope_parameters, with rope_theta inside, in place of rope_scaling
    for key in ("rope_scaling", "rope_parameters"):
        if hf.get(key) is not None:
            check_field(key, hf[key], dict)
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {"rope_type": "default"}
    rope = {"rope_type": rope.get("type"), "rope_theta": hf.get("rope_theta", 10_000.0), **rope}
    require(rope, "rope_type", "default", "llama3")
    require(hf | rope, "partial_rotary_factor", 1.0)
    old, scaled = "original_max_position_embeddings", rope["rope_type"] == "llama3"
    if scaled and hf.get(old, rope.get(old)) != rope.get(old):  # transformers shows one and uses the other
        raise ValueError(f"{old} is {hf[old]} at the top level and {rope.get(old)} in rope_scaling; "
                         "give the right one in rope_scaling and remove the other")
    llama = kind == "llama"
    bias = llama and hf.get("attention_bias", False)
    return Config(rope_theta=rope["rope_theta"],
                  rope_scaling={key: rope[key] for key in SCALING} if scaled else None,
                  qkv_bias=bias or kind == "qwen2", o_bias=bias, mlp_bias=llama and hf.get("mlp_bias", False),
                  **fields(hf, "llama", num_key_value_heads=hf["num_attention_heads"], head_dim=0,
                           tie_word_embeddings=False))


READERS = {"gpt2": gpt2_config, "llama": llama_config, "mistral": llama_config, "qwen2": llama_config}


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object {{…}}; download it again")
    return content


def config_file(folder: str | Path) -> dict:
    """Return the content of config.json. ValueError if it is missing or has too many layers."""
    path = Path(folder) / "config.json"
    if not isfile(path):
        raise ValueError(f"{path} is missing; give the folder of a Hugging Face checkpoint")
    hf = read_json(path)
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if hf.get(key) is not None:
            whole(f"{path}: {key}", hf[key], 1, 1000)  # building more would take minutes
    return hf


def read_config(folder: Path) -> Config:
    hf, path = config_file(folder), Path(folder) / "config.json"
    kind = str(hf.get("model_type"))
    if kind not in READERS:
        raise ValueError(f"{path}: model_type {kind!r:.60} is unknown; known are {', '.join(READERS)}")
    try:
        require(hf, "quantization_config", None)
        return READERS[kind](hf)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; download it again") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def hf_config(c: Config) -> dict:
    """Return config.json for c, with rope_theta and rope_scaling: every transformers reads them."""
    biases = c.qkv_bias, c.o_bias, c.mlp_bias
    if c.family == "gpt2":
        kind, name = "gpt2", "GPT2LMHeadModel"
        fits = all(biases) and c.n_heads == c.n_kv_heads == c.d_model / c.head_dim
    elif biases == (True, False, False):
        kind, name, fits = "qwen2", "Qwen2ForCausalLM", True
    else:
        kind, name, fits = "llama", "LlamaForCausalLM", c.qkv_bias == c.o_bias and c.d_model % c.n_heads == 0
    if not fits:
        raise ValueError(f"{c} fits no Hugging Face model: GPT-2 has every bias and n_heads = n_kv_heads "
                         "= d_model / head_dim; Llama has qkv_bias = o_bias and d_model a multiple of "
                         "n_heads; Qwen2 has qkv_bias alone")
    hf = dict(model_type=kind, architectures=[name])
    hf |= {theirs: getattr(c, ours) for ours, theirs in KEYS[c.family].items()}
    if c.family == "gpt2":
        return hf | dict(activation_function="gelu_new")
    return hf | dict(hidden_act="silu", attention_bias=c.o_bias, mlp_bias=c.mlp_bias, rope_theta=c.rope_theta,
                     rope_scaling=c.rope_scaling and {"rope_type": "llama3", **c.rope_scaling})


# ---- model.safetensors ---------------------------------------------------------------------------------

# our module → Hugging Face's; the modules of a layer are inside LAYERS
NAMES = {
    "gpt2": dict(
        embed="transformer.wte", positions="transformer.wpe", norm="transformer.ln_f", head="lm_head",
        norm1="ln_1", norm2="ln_2", qkv="attn.c_attn", o="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj"),
    "llama": dict(
        embed="model.embed_tokens", norm="model.norm", head="lm_head",
        norm1="input_layernorm", norm2="post_attention_layernorm",
        q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj",
        gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")}
LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
TRANSPOSED = re.compile(r"\.c_\w+\.weight$")  # GPT-2's Conv1D stores weights as (in, out)
DERIVED = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # masks and angles in old checkpoints


def layout(model: Decoder) -> dict[str, Tensor]:
    """Return a dict from Hugging Face's tensor names to our parameters, or to parts of them."""
    family, names = model.config.family, {}
    for ours, x in model.named_parameters():  # e.g. blocks.3.attention.qkv.weight; a tied head is not listed
        *path, module, kind = ours.split(".")
        parts = {module: x}
        if module not in NAMES[family]:  # q, k and v are rows of qkv
            parts = dict(zip("qkv", model.get_submodule(".".join(path)).split(x)))
        for part, rows in parts.items():
            above = f"{LAYERS[family]}.{path[1]}." if path else ""
            names[f"{above}{NAMES[family][part]}.{kind}"] = rows
    return names


def open_shards(folder: Path) -> dict[Path, safe_open]:
    """Return the checkpoint's files, memory-mapped. ValueError if one is missing or damaged."""
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if not isfile(folder / names[0]) and isfile(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map, an object {{tensor: file}}; download it again")
        names = sorted({str(name) for name in weight_map.values()})
    elif not isfile(folder / names[0]) and (pickled := [*folder.glob("*.bin"), *folder.glob("*.pt*")]):
        raise ValueError(f"{pickled[0]} is a pickle, which can run code when opened; convert it "
                         "to safetensors (transformers: load it, then save_pretrained)")
    shards = {}
    for name in names:
        file = folder / name
        if Path(name).name != name or not isfile(file):  # an index must not lead out of the folder
            raise ValueError(f"{str(file)!r:.200} is missing; give the folder of a whole checkpoint")
        try:
            shards[file] = safe_open(file, "pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is truncated or not a safetensors file ({error}); "
                             "download it again") from None
    return shards


def check_device(name: str | torch.device) -> torch.device:
    """Return the device, or raise a ValueError if this machine cannot compute on it."""
    try:
        one = torch.ones(1, device=name)
        one.item()  # fails on a meta tensor, which has no numbers
        return one.device
    except Exception as error:  # each backend raises its own error
        raise ValueError(f"device {str(name)!r} is not available ({brief(error)}); use cpu") from None


def check_dtype(dtype: torch.dtype):
    """Raise ValueError unless weights can be stored and multiplied in this dtype."""
    allowed = torch.float16, torch.bfloat16, torch.float32, torch.float64
    if dtype not in allowed:
        raise ValueError(f"dtype {dtype!r:.60} is not for weights; use one of {', '.join(map(str, allowed))}")


class NoDraws(TorchFunctionMode):
    """Skip random initialisation of meta tensors, which would import PyTorch's compiler (2 s)."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.init.normal_:
            return kwargs["tensor"]  # nn.init passes it by name
        return function(*args, **kwargs or {})


def brief(error: Exception) -> str:
    """Return the first 200 characters of an error's first line, or its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@torch.no_grad()
def from_hf(folder: str | Path, dtype: torch.dtype = torch.float32,
            device: str | torch.device = "cpu") -> Decoder:
    """Return the decoder in a Hugging Face folder, in eval mode, with weights cast to dtype.

    Tensors are copied one by one from memory-mapped files, so memory holds the weights only once. Raises
    ValueError with the name of the file, the key of config.json or the tensor that is missing, damaged or
    unknown.
    """
    folder, device = Path(folder), check_device(device)
    check_dtype(dtype)
    config = read_config(folder)
    prefix = LAYERS[config.family].split(".")[0] + "."  # base models are saved without it
    stored = {}  # full name → its shard, and its name in that shard
    for file, shard in open_shards(folder).items():
        for name in shard.keys():
            full = name if name.startswith((prefix, "lm_head.")) else prefix + name
            if full in stored:
                raise ValueError(f"{name!r} in {file} is the second tensor {full}; remove one of them")
            if not DERIVED.search(full):
                stored[full] = shard, name

    hint = "is config.json that of these weights?"
    try:
        with torch.device("meta"), NoDraws():  # costs neither memory nor the time for random weights
            model = Decoder(config).to(dtype)
    except RuntimeError:
        raise ValueError(f"{folder} should hold a tensor of more than 2**63 bytes; {hint}") from None
    names = layout(model)
    tied = config.tie_embeddings and stored.pop("lm_head.weight", None)
    if extra := stored.keys() - names:
        raise ValueError(f"tensor {min(extra)!r} has no place in a {config.family} decoder "
                         f"({len(extra)} such tensors); {hint}")
    for name, p in names.items():
        expected = list(p.T.shape if TRANSPOSED.search(name) else p.shape)
        if name not in stored:
            raise ValueError(f"tensor {name} {expected} is missing from {folder}; {hint}")
        shard, its_name = stored[name]
        if (shape := shard.get_slice(its_name).get_shape()) != expected:
            raise ValueError(f"tensor {its_name} is {shape} and should be {expected}; {hint}")

    model.to_empty(device=device)
    if config.tie_embeddings:  # to_empty has untied them
        model.head.weight = model.embed.weight
    for name, p in layout(model).items():
        shard, its_name = stored[name]
        x = shard.get_tensor(its_name)
        if not x.is_floating_point():
            raise ValueError(f"tensor {its_name} holds {x.dtype}, as if quantized; use weights in floats")
        if not p.copy_(x.T if TRANSPOSED.search(name) else x).isfinite().all():
            raise ValueError(f"tensor {its_name} holds inf or nan as {dtype}; use a wider dtype "
                             "or download it again")
    if tied and not torch.equal(tied[0].get_tensor(tied[1]).to(model.head.weight), model.head.weight):
        raise ValueError("tensor lm_head.weight differs from the embedding, but config.json says "
                         "tie_word_embeddings; set it to false there")
    return model.eval()


@torch.no_grad()
def to_hf(model: Decoder, folder: str | Path, dtype: torch.dtype = torch.float16):
    """Write config.json and model.safetensors, weights cast to dtype.

    The layout is gpt2 or llama, as the family, or qwen2 if only q, k and v have biases. Raises ValueError if
    the biases or heads fit no layout, if dtype is not a float type, or if a weight is not finite in dtype.
    """
    c = model.config
    check_dtype(dtype)
    if type(kind := model.blocks[0].attention) is not Attention:
        raise ValueError(f"the layers of this decoder are {type(kind).__name__}, "
                         "which fits no Hugging Face model")
    config = hf_config(c) | dict(
        torch_dtype=str(dtype).removeprefix("torch."),
        bos_token_id=c.bos, eos_token_id=None)  # else transformers assumes those of the family's tokenizer
    tensors = {}
    for name, p in layout(model).items():
        x = p.detach().to("cpu", dtype)
        if not x.isfinite().all():
            raise ValueError(f"tensor {name} holds inf or nan as {dtype}; "
                             "use a wider dtype such as torch.float32")
        tensors[name] = (x.T if TRANSPOSED.search(name) else x).contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # an interrupted save leaves the old checkpoint whole
    parts = {name: folder / f"{name}.part" for name in ("model.safetensors", "config.json")}
    try:
        save_file(tensors, parts["model.safetensors"], metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{parts['model.safetensors']} cannot be written: {error}") from None
    parts["config.json"].write_text(json.dumps(config, indent=2) + "\n")
    for name, part in parts.items():
        part.replace(folder / name)


def is_known(folder: str | Path) -> bool:
    """Return whether `from_hf` should read the folder: it knows the family or names the error."""
    return not isfile(Path(folder) / "config.json") or str(config_file(folder).get("model_type")) in READERS


@contextmanager
def reading(problem: str):
    """Silence transformers, and turn whatever it raises into a ValueError of one line."""
    from transformers.utils import logging
    shows, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # several libraries read, each with its own errors
        raise ValueError(f"{problem} ({brief(error)}); download it again, or update transformers") from error
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()


def hf_model(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
    """Return transformers' own model of a folder, in eval mode. ValueError if it cannot be read."""
    config_file(folder)
    from transformers import AutoModelForCausalLM  # here, because importing it takes seconds
    with reading(f"{folder} cannot be read"):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=dtype,
            output_loading_info=True, ignore_mismatched_sizes=True)  # mismatches are refused by name below
    if mismatched := sorted(report["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        raise ValueError(f"tensor {name} of {folder} is {list(shape)} and should be {list(expected)}; "
                         "is config.json that of these weights?")
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder} lacks {len(missing)} tensors, such as {missing[0]}; download it again")
    return model.to(check_device(device)).eval()


def hf_skeleton(folder: str | Path):
    """Return transformers' model of a folder's config.json, without memory for its weights."""
    config_file(folder)
    from transformers import AutoConfig, AutoModelForCausalLM
    with reading(f"{folder}/config.json is not understood"), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config)


def hf_tokenizer(folder: str | Path):
    """Return the folder's tokenizer, read by transformers. ValueError if missing or broken."""
    folder = Path(folder)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any(isfile(folder / name) for name in names):
        raise ValueError(f"{folder} has no tokenizer, neither {', '.join(names[:-1])} nor {names[-1]}; "
                         "download one of them")
    for file in (*folder.glob("*token*.json"), *folder.glob("vocab.json")):
        read_json(file)  # transformers would not say which file is broken
    from transformers import AutoTokenizer  # here, because importing it takes seconds
    with reading(f"{folder} has a broken tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not tokenizer.encode("The"):  # some broken ones load, but then encode to nothing or fail
            raise ValueError("it encodes a text as no tokens")
        return Foreign(tokenizer)
