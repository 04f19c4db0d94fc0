"""Write a compressed cache to a file, and read it again in another process.

The file is safetensors with a JSON header: the method, its options, the rest of its state, and a
fingerprint of the decoder. A loaded cache answers bit for bit as the one that was saved.

    save(caches, "page.cache")
    caches = make_cache(model, RoundedKVzip, **header("page.cache")["options"])
    load("page.cache", caches)

For the transformers bridge: save(memory, …), then attach(model, …) and load(…, memory).
"""

from dataclasses import fields
from hashlib import sha256
import json
from pathlib import Path
import sys

from safetensors.torch import load as from_safetensors, save as as_bytes
import torch
from torch import Tensor

from nanollm.cache import LayerCache

VERSION = 3
# make_cache and tell_chunk_ends give these to a cache
GIVEN = "model", "layer", "chunk_ends"
JSON_TYPES = bool, int, float, str, type(None)


def save(caches, file: Path | str, **note):
    """Write the caches of all layers to a file, after the prompt was compressed.

    caches: what `make_cache` or the bridge's `attach` returned. note: JSON that `header` returns as
    "note". Raises ValueError before the compression, or if the state has a part that `encode` does
    not know.
    """
    Path(file).write_bytes(to_bytes(caches, **note))


def to_bytes(caches, **note) -> bytes:
    """Return the bytes that `save` writes."""
    if len(getattr(caches, "texts", [0])) > 1:
        raise ValueError(
            f"this memory has {len(caches.texts)} texts; save those of one, memory.texts[i]"
        )
    # those of a bridge's memory
    caches, tensors, layers = getattr(caches, "caches", caches), {}, []
    if not all(cache.prompt_done for cache in caches):
        raise ValueError(
            "the prompt has not ended; call compress(model, prompt, caches) before saving"
        )
    for i, cache in enumerate(caches):
        left_out = *GIVEN, *(field.name for field in fields(cache))
        state = {name: x for name, x in state_of(cache).items() if name not in left_out}
        layers.append(encode(state, str(i), tensors, cache))
    model = caches[0].model
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    head = dict(
        version=VERSION,
        decoder=fingerprint(model),
        dtype=dtype,
        method=type(caches[0]).__name__,
        options=plain_options(caches[0]),
        note=note,
        layers=layers,
    )
    return as_bytes(tensors, {"cache": json.dumps(head)})


def plain_options(cache: LayerCache) -> dict:
    """Return the options that JSON can hold. The others, such as selections, act only in the
    compression."""
    options = {field.name: getattr(cache, field.name) for field in fields(cache)}
    return {name: x for name, x in options.items() if isinstance(x, JSON_TYPES)}


def state_of(x) -> dict:
    """Return the attributes of a cache or of a part of one; of a cache's buffers, only the slots in use."""
    if not isinstance(x, LayerCache):
        return vars(x)
    return vars(x) | dict(
        slots={name: slots[:, :, : x.length] for name, slots in x.slots.items()}
    )


def part_class(cache: LayerCache, name: str) -> type | None:
    """Return the class `name` of a part of a cache, as the file of the cache's class knows it, or None."""
    # all but object's
    files = [vars(sys.modules[kind.__module__]) for kind in type(cache).__mro__[:-1]]
    return next(
        (file[name] for file in files if isinstance(file.get(name), type)), None
    )


def encode(x, path: str, tensors: dict[str, Tensor], cache: LayerCache):
    """Return x as JSON, in which tuples are lists; put its tensors into `tensors`, by their paths."""
    name = type(x).__name__
    if isinstance(x, JSON_TYPES):
        return x
    if isinstance(x, list | tuple):
        return [encode(y, f"{path}.{i}", tensors, cache) for i, y in enumerate(x)]
    if isinstance(x, dict):
        return {key: encode(y, f"{path}.{key}", tensors, cache) for key, y in x.items()}
    if isinstance(x, Tensor):
        tensors[path] = x.contiguous()
        return {"$tensor": path}
    if isinstance(x, torch.Generator):
        return {"$generator": encode(x.get_state(), path, tensors, cache)}
    if part_class(cache, name) is type(x):
        return {"$part": name, "state": encode(state_of(x), path, tensors, cache)}
    raise ValueError(
        f"{type(cache).__name__} cannot be saved: its {path.partition('.')[2]} is a {name}; "
        "save another method's cache"
    )


def decode(x, tensors: dict[str, Tensor], cache: LayerCache):
    """Return what `encode` was given."""
    if isinstance(x, list):
        return [decode(y, tensors, cache) for y in x]
    if not isinstance(x, dict):
        return x
    if "$tensor" in x:
        # this aligns it in memory; otherwise last bits may differ
        return tensors[x["$tensor"]].clone()
    content = {key: decode(y, tensors, cache) for key, y in x.items()}
    if "$generator" in x:
        return torch.Generator().set_state(content["$generator"].cpu())
    if "$part" in x:
        Part = part_class(cache, x["$part"])
        part = Part.__new__(Part)
        vars(part).update(content["state"])
        return part
    return content


def fingerprint(model) -> str:
    """Return a hash of a decoder: its config, number format, and the first numbers of every parameter."""
    parts = [p.detach().flatten()[:1024].float().cpu() for p in model.parameters()]
    shape = json.dumps(vars(model.config), sort_keys=True, default=str) + str(
        next(model.parameters()).dtype
    )
    return sha256(shape.encode() + torch.cat(parts).numpy().tobytes()).hexdigest()[:16]


def header(file: Path | str) -> dict:
    """Return a file's header: version, decoder, dtype, method, options, note, layers."""
    data = Path(file).read_bytes()
    try:
        # safetensors begins with the length of its JSON
        end = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(json.loads(data[8:end])["__metadata__"]["cache"])
        if head["version"] != VERSION:
            raise ValueError
        return head
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{file} is not a saved cache, of another version, or damaged; write it with "
            "python -m nanollm compress, or with save()"
        ) from None


def load(file: Path | str, caches):
    """Fill fresh caches of the same method and options with a file's state.

    Raises ValueError if another decoder, number format or method wrote it, or if the caches have
    seen tokens.
    """
    head, memory, caches = header(file), caches, getattr(caches, "caches", caches)
    if head["decoder"] != fingerprint(caches[0].model):
        raise ValueError(
            f"{file} was written by another decoder or engine, or in another number format than "
            f"this decoder has; use the one that read the text, in {head['dtype']}"
        )
    method, options = type(caches[0]).__name__, plain_options(caches[0])
    if method != head["method"] or {**options, **head["options"]} != options:
        raise ValueError(
            f"{file} is of {head['method']} with {head['options']}, and these caches are "
            f"{method} with {options}; make caches of that method, with header(file)['options']"
        )
    if caches[0].seen:
        raise ValueError(
            f"these caches have seen {caches[0].seen} tokens; load into fresh ones"
        )

    tensors = from_safetensors(Path(file).read_bytes())
    tensors = {name: x.to(caches[0].w_o.device) for name, x in tensors.items()}
    for cache, state in zip(caches, head["layers"], strict=True):
        vars(cache).update(decode(state, tensors, cache))
    if hasattr(memory, "texts"):  # of the bridge
        memory.seen, memory.tokens = caches[0].seen, None
