"""Write a compressed cache to a file, and read it again in another process.

The file is safetensors: the tensors of every layer, and a header with the rest of its state, the method's
options and a fingerprint of the decoder. A loaded cache answers to the last bit as the one that was saved.

    save(caches, "page.cache", method="kvzip_4")
    caches = make_cache(model, KVzip4, **header("page.cache")["options"])
    load("page.cache", caches)
"""
from dataclasses import fields
from hashlib import sha256
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
import torch
from torch import Tensor

from nanollm.cache import LayerCache

VERSION = 1
LEFT_OUT = "model", "previous", "chunk_ends"  # set from outside, and not needed after the prompt
PLAIN = bool, int, float, str, type(None)


def save(caches: list[LayerCache], file: Path | str, **note):
    """Write the caches of all layers, after the prompt's end, to a file. `note` goes into its header.

    Raises ValueError if the method keeps state that is neither a tensor nor a number, or before the
    prompt's end.
    """
    Path(file).write_bytes(packed(caches, **note))


def packed(caches: list[LayerCache], **note) -> bytes:
    """Return the bytes that `save` writes."""
    if not all(cache.prompt_done for cache in caches):
        raise ValueError("the prompt has not ended; call end_prompt(model, prompt, caches) before saving")
    tensors, layers = {}, []
    for i, cache in enumerate(caches):
        state = {}
        for name, x in vars(cache).items():
            if name not in LEFT_OUT and name not in options_of(cache):
                state[name] = put(trimmed(cache, name, x), f"{i}.{name}", tensors, type(cache).__name__)
        layers.append(state)
    options = {name: x for name, x in options_of(caches[0]).items() if isinstance(x, PLAIN)}
    head = dict(version=VERSION, decoder=fingerprint(caches[0].model), options=options, layers=layers) | note
    return as_bytes(tensors, {"cache": json.dumps(head)})


def options_of(cache: LayerCache) -> dict:
    """Return a cache's options by name."""
    return {field.name: getattr(cache, field.name) for field in fields(cache)}


def trimmed(cache: LayerCache, name: str, x):
    """Return an attribute of a cache; of `slots` only those in use."""
    if name != "slots":
        return x
    used = cache.length - getattr(cache, "longest", 0)  # a packed cache counts its packed slots, too
    return {key: tensor[:, :, :used] for key, tensor in x.items()}


def put(x, name: str, tensors: dict[str, Tensor], method: str):
    """Add the tensors in x to `tensors`, and return x as JSON, with "tensor NAME" in their places."""
    if isinstance(x, Tensor):
        tensors[name] = x.contiguous()
        return {"tensor": name}
    if isinstance(x, dict) and all(isinstance(y, Tensor) for y in x.values()):
        return {"dict": {key: put(y, f"{name}.{key}", tensors, method) for key, y in x.items()}}
    if isinstance(x, PLAIN) or isinstance(x, list) and all(isinstance(y, PLAIN) for y in x):
        return x
    raise ValueError(f"{method} cannot be saved: its {name.partition('.')[2]} is a {type(x).__name__}, not a "
                     "tensor or a number; use a method that only appends after the prompt")


def fingerprint(model) -> str:
    """Return a hash of a decoder: its config, and the first numbers of every parameter."""
    c, parts = model.config, [p.detach().flatten()[:1024].float().cpu() for p in model.parameters()]
    shape = f"{c.vocab_size} {c.n_layers} {c.n_heads} {c.n_kv_heads} {c.head_dim} {parts[0].dtype}"
    return sha256(shape.encode() + torch.cat(parts).numpy().tobytes()).hexdigest()[:16]


def header(file: Path | str) -> dict:
    """Return the header of a file: version, decoder, options, layers, and the note given to `save`."""
    try:
        with safe_open(file, "pt") as opened:
            head = json.loads((opened.metadata() or {})["cache"])
    except (SafetensorError, KeyError, json.JSONDecodeError):
        raise ValueError(f"{file} is not a cache that was saved here; name a file of save()") from None
    if head.get("version") != VERSION:
        raise ValueError(f"{file} has version {head.get('version')}; this program reads version {VERSION}; "
                         "save the cache again")
    return head


def load(file: Path | str, caches: list[LayerCache]):
    """Fill fresh caches of the same method and options with a file's state.

    Raises ValueError if the file is of another decoder, or of another number of layers.
    """
    head, model = header(file), caches[0].model
    if head["decoder"] != fingerprint(model):
        raise ValueError(f"{file} was written by another decoder; use the one that read the text")
    device = caches[0].w_o.device
    with safe_open(file, "pt", device=str(device)) as opened:
        def get(x):
            if isinstance(x, dict):
                if "dict" in x:
                    return {key: get(y) for key, y in x["dict"].items()}
                return opened.get_tensor(x["tensor"]).clone()  # aligned in memory, else last bits may differ
            return x

        for cache, state in zip(caches, head["layers"], strict=True):
            for name, x in state.items():
                setattr(cache, name, get(x))
