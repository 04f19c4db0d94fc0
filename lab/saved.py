"""Write a compressed cache to a file, and read it again in another process.

The file is safetensors with a JSON header: the method, its options, the store, the state of each
layer, and a fingerprint of the decoder. On the same machine a loaded cache answers bit for bit
as the saved one.

    save(caches, "page.cache")
    caches = make_cache(model, KVzip, **header("page.cache")["options"])
    load("page.cache", caches)

For the transformers bridge: save(memory, …), then attach(model, …) and load(…, memory).
"""

from dataclasses import fields
from hashlib import sha256
import json
from pathlib import Path
import sys

from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors, save as as_bytes
import torch
from torch import Tensor

from nanollm.block_linear import number_format
from nanollm.cache import Method, Slots, full_layers

VERSION = 7
# make_cache gives these to a store
GIVEN = "method", "model", "index", "block", "of", "watch", "sliding"
JSON_TYPES = bool, int, float, str, type(None)


def save(caches, file: Path | str, **note):
    """Write the caches of all layers to a file, after the prompt was compressed.

    caches: what `make_cache` or the bridge's `attach` returned. note: JSON that `header` returns as
    "note". Raises ValueError before the compression, for several texts or a padded one in a memory,
    or if the state has a part that `encode` does not know.
    """
    Path(file).write_bytes(to_bytes(caches, **note))


def to_bytes(caches, **note) -> bytes:
    """Return the bytes that `save` writes."""
    if len(getattr(caches, "texts", [0])) > 1:
        raise ValueError(
            f"this memory has {len(caches.texts)} texts; save those of one, memory.texts[i]"
        )
    if any(getattr(caches, "pads", [])):
        raise ValueError("this memory's text is padded; read it without padding")
    layers = layers_of(caches)
    if not all(layer.prompt_done for layer in layers):
        raise ValueError(
            "the prompt has not ended; call compress(model, prompt, caches) before saving"
        )
    tensors = {}
    states = []
    for i, layer in enumerate(layers):
        state = {name: x for name, x in state_of(layer).items() if name not in GIVEN}
        states.append(encode(state, str(i), tensors, layer))
    if torch.is_tensor(getattr(caches, "tokens", None)):  # what a memory has read
        tensors["tokens"] = caches.tokens

    model = layers[0].model
    head = dict(
        version=VERSION,
        checksum=checksum(tensors),
        decoder=fingerprint(model),
        dtype=number_format(model),
        numbers=str(model.embed.weight.dtype),
        **kind_of(layers),
        note=note,
        layers=states,
    )
    return as_bytes(tensors, {"cache": json.dumps(head)})


def layers_of(caches) -> list[Slots]:
    """Return the stores of a list of them, or of a bridge's memory with one text."""
    return getattr(caches, "caches", caches)


def kind_of(layers: list[Slots]) -> dict:
    """Return method, options and store of caches, as a file's header has them."""
    first = full_layers(layers)[0]
    options, other_options = options_of(first.method)
    return dict(
        method=type(first.method).__name__,
        options=options,
        other_options=other_options,
        store=dict(name=type(first).__name__, **first.options),
    )


def options_of(method: Method) -> tuple[dict, dict[str, str]]:
    """Return the options that JSON can hold, and the others in words: of a tensor, its checksum.

    An empty tensor stands for one that is not needed, as the prompt has been compressed.
    """
    plain = {}
    words = {}
    for field in fields(method):
        x = getattr(method, field.name)
        if isinstance(x, JSON_TYPES):
            plain[field.name] = x
        elif isinstance(x, Tensor):
            words[field.name] = checksum({"": x.cpu()}) if x.numel() else ""
        else:
            words[field.name] = repr(x)
    return plain, words


def checksum(tensors: dict[str, Tensor]) -> str:
    """Return a hash of tensors and their names, in any order."""
    digest = sha256()
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.cpu().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def state_of(x) -> dict:
    """Return the attributes of a store or of a part of one; of its buffers, the slots in use."""
    state = dict(vars(x))
    if isinstance(x, Slots):
        state["slots"] = {
            name: slots[:, :, : x.length] for name, slots in x.slots.items()
        }
    return state


def part_class(layer: Slots, name: str) -> type | None:
    """Return the class `name` of a part of a store, or None.

    It must stand in a file that defines the store, its method, or a base of these.
    """
    for kind in (*type(layer).__mro__[:-1], *type(layer.method).__mro__[:-1]):
        found = vars(sys.modules[kind.__module__]).get(name)
        if isinstance(found, type):
            return found
    return None


def encode(x, path: str, tensors: dict[str, Tensor], layer: Slots):
    """Return x as JSON, in which tuples are lists; put its tensors into `tensors`, by path."""
    name = type(x).__name__
    if isinstance(x, JSON_TYPES):
        return x
    if isinstance(x, list | tuple):
        return [encode(y, f"{path}.{i}", tensors, layer) for i, y in enumerate(x)]
    if isinstance(x, dict):
        return {key: encode(y, f"{path}.{key}", tensors, layer) for key, y in x.items()}
    if isinstance(x, Tensor):
        tensors[path] = x.contiguous()
        return {"$tensor": path}
    if isinstance(x, torch.Generator):
        return {"$generator": encode(x.get_state(), path, tensors, layer)}
    if part_class(layer, name) is type(x):
        return {"$part": name, "state": encode(state_of(x), path, tensors, layer)}
    raise ValueError(
        f"{type(layer.method).__name__} cannot be saved: its {path.partition('.')[2]} is a {name}; "
        "save another method's cache"
    )


def decode(x, tensors: dict[str, Tensor], layer: Slots):
    """Return what `encode` was given, with lists for tuples."""
    if isinstance(x, list):
        return [decode(y, tensors, layer) for y in x]
    if not isinstance(x, dict):
        return x
    if "$tensor" in x:
        # aligned in memory; otherwise last bits may differ
        return tensors[x["$tensor"]].clone()
    content = {key: decode(y, tensors, layer) for key, y in x.items()}
    if "$generator" in x:
        return torch.Generator().set_state(content["$generator"].cpu())
    if "$part" in x:
        Part = part_class(layer, x["$part"])
        part = Part.__new__(Part)
        vars(part).update(content["state"])
        return part
    return content


def fingerprint(model) -> str:
    """Return a hash of a decoder: its config, and all its weights, rounded to bfloat16.

    So it is the same in 32 bits, in bfloat16, and with weights in 4 bits.
    """
    shape = json.dumps(vars(model.config), sort_keys=True, default=str)
    digest = sha256(shape.encode())
    for acting in getattr(model, "adapters", []):  # of the bridge's models
        digest.update(str(acting).encode())
    for weight in model.parameters():
        if weight.is_meta:
            raise ValueError(
                "the model's weights are offloaded, so files cannot know it; load them into memory"
            )
        rounded = weight.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.int16).numpy())  # numpy has no bfloat16
    return digest.hexdigest()[:16]


def header(file: Path | str) -> dict:
    """Return a file's header: version, decoder, dtype, method, options, … (see `to_bytes`)."""
    data = Path(file).read_bytes()
    try:
        # safetensors begins with the length of its JSON
        end = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(json.loads(data[8:end])["__metadata__"]["cache"])
        version = head["version"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{file} is not a saved cache, or damaged; write it with "
            "python -m nanollm compress, or with save()"
        ) from None
    if version != VERSION:
        raise ValueError(
            f"{file} is a saved cache of version {version}, and this code reads version {VERSION}; "
            "read the text again with python -m nanollm compress"
        )
    return head


def load(file: Path | str, caches):
    """Fill fresh caches of the same method, options and store with a file's state.

    Raises ValueError if another decoder, number format, method, option or store wrote it, if it is
    damaged, or if the caches have seen tokens.
    """
    head = header(file)
    layers = layers_of(caches)
    if head["decoder"] != fingerprint(layers[0].model):
        raise ValueError(
            f"{file} was written by another decoder or engine; use the one that read the text"
        )
    dtype = number_format(layers[0].model)
    if head["dtype"] != dtype:
        raise ValueError(
            f"{file} was written in {head['dtype']}, and this decoder is in {dtype}; load it in "
            f"{head['dtype']}"
        )
    numbers = str(layers[0].model.embed.weight.dtype)
    if head["numbers"] != numbers:  # in 4 bits the processor decides
        raise ValueError(
            f"{file} was written on a processor that computes in {head['numbers']}, and this one "
            f"in {numbers}; read the text again"
        )
    kind = kind_of(layers)
    written = {name: head[name] for name in kind}
    for name, x in kind["other_options"].items():
        if not x:
            written["other_options"].pop(name, None)
    kind["other_options"] = {name: x for name, x in kind["other_options"].items() if x}
    if written != kind:
        raise ValueError(
            f"{file} is of {described(written)}, and these caches are {described(kind)}; "
            "make caches as header(file) says"
        )
    if layers[0].seen:
        raise ValueError(
            f"these caches have seen {layers[0].seen} tokens; load into fresh ones"
        )

    device = layers[0].w_o.device
    try:
        tensors = from_safetensors(Path(file).read_bytes())
    except SafetensorError:
        tensors = {}
    if checksum(tensors) != head["checksum"]:
        raise ValueError(
            f"{file} was cut off or damaged after it was written; read the text again"
        )
    tensors = {name: x.to(device) for name, x in tensors.items()}
    for layer, state in zip(layers, head["layers"], strict=True):
        vars(layer).update(decode(state, tensors, layer))
    if hasattr(caches, "texts"):  # of the bridge
        caches.seen = layers[0].seen
        caches.tokens = tensors.get("tokens")


def described(kind: dict) -> str:
    """Return method, options and store in words."""
    options = kind["options"] | kind["other_options"]
    return f"{kind['method']} with {options} in {kind['store']}"
