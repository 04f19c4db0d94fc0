"""Write a compressed cache to a file, and read it again in another process.

The file is safetensors with a JSON header: the method, its options, the rest of its state, and a fingerprint
of the decoder. A loaded cache answers bit for bit as the one that was saved.

    save(caches, "page.cache")
    caches = make_cache(model, RoundedKVzip, **header("page.cache")["options"])
    load("page.cache", caches)

For the transformers bridge: save(memory, …), then attach(model, …) and load(…, memory).
"""
from dataclasses import fields
from hashlib import sha256
import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors, save as as_bytes
import torch
from torch import Tensor

from nanollm.cache import LayerCache

VERSION = 2
# set by make_cache, or used only until the prompt ends
NOT_SAVED = ("model", "layer", "previous", "chunk_ends", "rereading", "first_pass", "entry_scores", "scores",
             "prompt_tokens", "gain", "place")
JSON_TYPES = bool, int, float, str, type(None)


def save(caches, file: Path | str, **note):
    """Write the caches of all layers to a file, after the prompt's end.

    caches: what `make_cache` or the bridge's `attach` returned. note: JSON that `header` returns as "note".
    Raises ValueError before the prompt's end, or if the state has parts that are neither tensors nor numbers.
    """
    Path(file).write_bytes(to_bytes(caches, **note))


def to_bytes(caches, half: bool = False, **note) -> bytes:
    """Return the bytes that `save` writes. half: store numbers of 32 and 64 bits in 16 where they fit.

    Whole numbers stay exact. Others lose digits, so the loaded cache may answer otherwise.
    """
    caches = getattr(caches, "caches", caches)  # those of a bridge's memory
    if not all(cache.prompt_done for cache in caches):
        raise ValueError("the prompt has not ended; call end_prompt(model, prompt, caches) before saving")
    tensors, layers = {}, []
    for i, cache in enumerate(caches):
        left_out = *NOT_SAVED, *(field.name for field in fields(cache))
        used = cache.length - getattr(cache, "longest", 0)  # a packed cache's length includes packed slots
        state = vars(cache) | dict(slots={name: x[:, :, :used] for name, x in cache.slots.items()})
        layers.append({name: encode(x, f"{i}.{name}", tensors, type(cache).__name__)
                       for name, x in state.items() if name not in left_out})
    head = dict(version=VERSION, decoder=fingerprint(caches[0].model), dtype=dtype_of(caches[0].model),
                method=type(caches[0]).__name__, options=plain_options(caches[0]), note=note, layers=layers,
                types={name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()})
    if half:
        tensors = {name: in_16_bits(x) for name, x in tensors.items()}
    return as_bytes(tensors, {"cache": json.dumps(head | dict(hash=hash_of(tensors)))})


def in_16_bits(x: Tensor) -> Tensor:
    """Return x with numbers of 16 bits, if they hold its numbers; else x."""
    half = x.half() if x.is_floating_point() else x.short()
    fits = half.isfinite().all() if x.is_floating_point() else (half == x).all()
    return half if x.element_size() > 2 and fits else x


def plain_options(cache: LayerCache) -> dict:
    """Return the options that JSON can hold. The others, such as selections, act only at the prompt's end."""
    options = {field.name: getattr(cache, field.name) for field in fields(cache)}
    return {name: x for name, x in options.items() if isinstance(x, JSON_TYPES)}


def encode(x, name: str, tensors: dict[str, Tensor], method: str):
    """Add the tensors in x to `tensors`, and return x as JSON, with {"tensor": name} in their places."""
    if isinstance(x, Tensor):
        tensors[name] = x.contiguous()
        return {"tensor": name}
    if isinstance(x, dict) and all(isinstance(y, Tensor) for y in x.values()):
        return {"dict": {key: encode(y, f"{name}.{key}", tensors, method) for key, y in x.items()}}
    if isinstance(x, JSON_TYPES) or isinstance(x, list) and all(isinstance(y, JSON_TYPES) for y in x):
        return x
    raise ValueError(f"{method} cannot be saved: its {name.partition('.')[2]} is a {type(x).__name__}, not a "
                     "tensor or a number; save another method's cache")


def fingerprint(model) -> str:
    """Return a hash of a decoder: its config, and the first numbers of every parameter."""
    parts = [p.detach().flatten()[:1024].float().cpu() for p in model.parameters()]
    shape = json.dumps(vars(model.config), sort_keys=True, default=str)
    return sha256(shape.encode() + torch.cat(parts).numpy().tobytes()).hexdigest()[:16]


def dtype_of(model) -> str:
    """Return the number format of a decoder's weights, such as "float32"."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def hash_of(tensors: dict[str, Tensor]) -> str:
    """Return a hash of all numbers, which shows damage."""
    numbers = sha256()
    for name in sorted(tensors):
        numbers.update(tensors[name].cpu().flatten().view(torch.uint8).numpy().tobytes())
    return numbers.hexdigest()[:16]


def header(file: Path | str) -> dict:
    """Return a file's header: version, decoder, dtype, method, options, note, layers, types, hash."""
    return header_of(Path(file).read_bytes(), file)


def header_of(data: bytes, name="the file") -> dict:
    """Return the header in the bytes of a file; name: what messages call it."""
    try:
        end = 8 + int.from_bytes(data[:8], "little")  # safetensors begins with the length of its JSON
        head = json.loads(json.loads(data[8:end])["__metadata__"]["cache"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name} is not a saved cache, or is damaged; write it with python -m nanollm "
                         "compress, or with save()") from None
    if head["version"] != VERSION:
        raise ValueError(f"{name} has version {head['version']}; this program reads version {VERSION}; "
                         "save the cache again")
    return head


def load(file: Path | str, caches):
    """Fill fresh caches of the same method and options with a file's state.

    Raises ValueError if the file is damaged, if another decoder, number format or method wrote it, or if the
    caches have seen tokens.
    """
    from_bytes(Path(file).read_bytes(), caches, file)


def from_bytes(data: bytes, caches, file="the file"):
    """Fill fresh caches with what `to_bytes` returned; file: what messages call it. Raises as `load`."""
    head, memory = header_of(data, file), caches
    caches = getattr(memory, "caches", memory)
    model, options = caches[0].model, plain_options(caches[0])  # None stands where a tensor was
    own = type(caches[0]).__name__, {name: x for name, x in options.items() if name in head["options"]}
    if head["dtype"] != dtype_of(model):
        raise ValueError(f"{file} was written in {head['dtype']}, and this decoder has {dtype_of(model)}; "
                         f"load the decoder in {head['dtype']}")
    if head["decoder"] != fingerprint(model):
        raise ValueError(f"{file} was written by another decoder, or by another engine; use the one that "
                         "read the text")
    if own != (head["method"], head["options"]):
        raise ValueError(f"{file} is of {head['method']} with {head['options']}, and these caches are "
                         f"{own[0]} with {own[1]}; make caches of that method, with header(file)['options']")
    if caches[0].seen:
        raise ValueError(f"these caches have seen {caches[0].seen} tokens; load into fresh ones")

    device = caches[0].w_o.device
    try:
        tensors = from_safetensors(data)
    except SafetensorError:
        tensors = {}
    if hash_of(tensors) != head["hash"]:
        raise ValueError(f"{file} is damaged: its numbers are not those that were saved; "
                         "save the cache again")
    tensors = {name: x.to(device, getattr(torch, head["types"][name])) for name, x in tensors.items()}

    def decode(x):
        if not isinstance(x, dict):
            return x
        if "dict" in x:
            return {key: decode(y) for key, y in x["dict"].items()}
        return tensors[x["tensor"]].clone()  # this aligns it in memory; otherwise last bits may differ

    for cache, state in zip(caches, head["layers"], strict=True):
        for name, x in state.items():
            setattr(cache, name, decode(x))
    if memory is not caches:
        memory.texts = len(caches[0].pos)
