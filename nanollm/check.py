"""Checks of input: each raises a ValueError of one line, which names what was given and what would be right.
"""
from dataclasses import fields
from inspect import signature
from numbers import Integral, Real
from typing import ClassVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor


def whole(name: str, x, least: int, most: int | None = None):
    """x, or a ValueError if it is no whole number from `least` to `most`."""
    if not isinstance(x, Integral) or isinstance(x, bool) or x < least or most is not None and x > most:
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} {x!r:.60} must be a whole number {bounds}")
    return x


def check_seed(seed: int, times: int = 1):
    """ValueError if this is no seed for both NumPy and PyTorch, or would be none when it is multiplied by
    `times`.
    """
    whole("seed", seed, 0, 2 ** 63 // times - 1)


def check_budget(budget: int, least: int, why: str):
    """ValueError unless budget, in slots per key/value head, is at least `least`."""
    if budget < least:
        raise ValueError(f"budget {budget} must be at least {least}: {why}")


def fits(x, kind) -> bool:
    """Whether a knob declared as `kind` may be x. A float is a finite number, whole ones included; a bool is
    no number.
    """
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(x, number) and not isinstance(x, bool) and -2 ** 63 <= x < 2 ** 63

    if get_origin(kind) is tuple:
        of, *rest = get_args(kind)
        if rest == [...]:
            return isinstance(x, tuple) and all(fits(y, of) for y in x)
        return isinstance(x, tuple) and len(x) == 1 + len(rest) and all(map(fits, x, (of, *rest)))

    if get_origin(kind) is list:
        return isinstance(x, list) and x != [] and all(fits(y, get_args(kind)[0]) for y in x)

    if get_origin(kind) is not None:  # a union, but for generics that no knob is declared with
        return any(fits(x, one) for one in get_args(kind))

    return not isinstance(kind, type) or isinstance(x, kind)


def check_row(row: dict, kinds: dict, file):
    """ValueError unless a row that was stored in `file` holds, under each key of `kinds`, what fits."""
    for key, kind in kinds.items():
        if key not in row:
            raise ValueError(f"a row in {file} has no {key!r}, as if of another version; name another file")
        if not fits(row[key], kind):
            raise ValueError(f"{key!r} of a row in {file} is {row[key]!r:.60}, which cannot be; "
                             "name another file")


def check_knobs(method):
    """ValueError unless every knob of a cache or selection is a dataclass field and holds what it is declared
    to hold.
    """
    name, hints = type(method).__name__, get_type_hints(type(method))
    knobs = {knob.name: hints[knob.name] for knob in fields(method)}

    lost = [knob for knob, kind in hints.items() if knob not in knobs and get_origin(kind) is not ClassVar]
    if lost:
        raise ValueError(f"{name} declares {', '.join(lost)} but is no dataclass; "
                         "put @dataclass(eq=False) above the class")

    for knob, kind in knobs.items():
        x = getattr(method, knob)
        if not fits(x, kind):
            words = {int: "a whole number", float: "a finite number"}
            right = words.get(kind, getattr(kind, "__name__", str(kind)))
            raise ValueError(f"{knob} {' '.join(repr(x).split()):.60} of {name} must be {right}")


def constructed(Method, knobs: dict):
    """Method(**knobs), a cache, or a ValueError that says what a method's author or user has to change."""
    try:
        cache = Method(**knobs)
    except TypeError as error:
        raise ValueError(f"{error}; a method's knobs are its dataclass fields") from error
    if not hasattr(cache, "slots"):
        raise ValueError(f"__post_init__ of {type(cache).__name__} must begin with super().__post_init__()")
    return cache


def check_attend(cache, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, vectors: int = 1):
    """ValueError unless these are new tokens of the texts that a cache holds. `vectors`: keys of a token (2:
    pairs).
    """
    if not all(isinstance(x, Tensor) for x in (q, k, v, pos)):
        raise ValueError("q, k, v and pos must be tensors")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or not q.is_floating_point():
        types = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k and v are {types}; they must be of one floating dtype on one device")

    B, H, T, D = k.shape if k.dim() == 4 else (0,) * 4
    right = k.numel() and v.shape == k.shape and q.dim() == 4 and q.numel()
    if not right or q.shape[::2] != (B, T) or q.shape[1] % H or q.shape[3] * vectors != D:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        twice = "" if vectors == 1 else str(vectors)
        raise ValueError(f"q, k and v of shapes {shapes} are not (B, H·G, T, D), (B, H, T, {twice}D) "
                         f"and (B, H, T, {twice}D) with T at least 1")

    if pos.shape not in ((1, T), (B, T)) or pos.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"pos of shape {tuple(pos.shape)} must be ({B} or 1, {T}), "
                         f"whole numbers and not {pos.dtype}")
    if "k" in cache.slots and (held := cache.slots["k"].shape[:2]) != (B, H):
        raise ValueError(f"{B} texts of {H} heads come to a cache that holds {held[0]} of {held[1]}; "
                         "make a new cache for a new batch")


def check_kept(i: Tensor, shape: tuple[int, int, int]):
    """ValueError unless i (B, H, n) are slots of a cache of `shape` (B, H, S), below 0 for an empty one."""
    B, H, S = shape
    if not isinstance(i, Tensor):
        raise ValueError(f"slots to keep are a {type(i).__name__}; give an int64 tensor ({B}, {H}, n)")
    if i.shape[:2] != (B, H) or i.dim() != 3 or i.dtype != torch.int64:
        raise ValueError(f"slots to keep of shape {tuple(i.shape)}, {i.dtype}, "
                         f"must be ({B}, {H}, n) of int64")
    if i.numel() and int(i.max()) >= S:
        raise ValueError(f"slot {int(i.max())} is to be kept, but there are {S}, 0 … {S - 1}")


def check_score(score: Tensor, shape: tuple[int, int, int]):
    """ValueError unless there is a score for every slot of a cache of `shape` (B, H, S)."""
    if not isinstance(score, Tensor) or score.shape != shape:
        given = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        raise ValueError(f"scores {given} must be a tensor {tuple(shape)}, one for each slot of each head")


def check_numbers(score: Tensor):
    """ValueError if scores (B, H, S) are NaN: no order would mean anything."""
    if n := int(score.isnan().sum()):
        raise ValueError(f"{n} of {score.numel()} scores are NaN; score each slot by a number, or by ±inf")


def check_watch(cache):
    """ValueError unless `watch` is a number of queries, and above 0 if `observe` counts on probabilities.

    An `observe` that can do without declares `p: Tensor | None`.
    """
    if type(cache.watch) is not int or cache.watch < 0:
        raise ValueError(f"watch {cache.watch!r} of {type(cache).__name__} "
                         "must be a number of queries, 0 or more, or ALL")
    p = [*signature(cache.observe).parameters.values()][1:2]
    if not cache.watch and p and "None" not in str(p[0].annotation):
        raise ValueError(f"observe of {type(cache).__name__} gets no probabilities, since watch is 0; write "
                         "watch = ALL, or how many of the last queries, or declare p: Tensor | None")


def check_caches(caches: list, layers: int, B: int):
    """ValueError unless there is one cache a layer, in step with the others, for B texts. Asked before any is
    written to.
    """
    from nanollm.cache import LayerCache

    if not isinstance(caches, (list, tuple)) or not all(isinstance(cache, LayerCache) for cache in caches):
        raise ValueError(f"{caches!r:.60} is no list of caches; use make_cache")
    if len(caches) != layers or len({*map(id, caches)}) != layers:
        raise ValueError(f"{layers} layers need a cache each, not {len(caches)} "
                         f"of which {len({*map(id, caches)})} differ; use make_cache")

    if len(seen := {cache.seen for cache in caches}) > 1:
        raise ValueError(f"the layers' caches have seen {min(seen)} to {max(seen)} tokens "
                         "and must agree; make new ones")
    for cache in caches:
        if "k" in cache.slots and (held := cache.slots["k"].shape[0]) != B:
            raise ValueError(f"{B} texts come to caches that hold {held}; make new ones for a new batch")


# ---- the decoder's input -----------------------------------------------------------------------------------

SCALING = dict(factor=float, low_freq_factor=float, high_freq_factor=float,
               original_max_position_embeddings=int)  # Llama-3.1's scaling of RoPE


def check_field(name: str, x, kind: type):
    """ValueError unless x may stand under a name of this type; numbers are above 0, also in 32 bits."""
    if kind is int:
        whole(name, x, 1, 2 ** 31 - 1)
    elif kind is float:
        if not fits(x, float) or not x >= torch.finfo(torch.float32).tiny:
            raise ValueError(f"{name} {x!r:.60} must be a finite number above 0")
    elif not isinstance(x, kind):
        right = "True or False" if kind is bool else "an object, {name: value}"
        raise ValueError(f"{name} {x!r:.60} must be {right}")


def check_config(c):
    """ValueError unless a decoder can have this shape. NumPy's numbers become Python's, which json writes."""
    if c.family not in ("llama", "gpt2"):
        raise ValueError(f"family {c.family!r} is unknown; use 'llama' or 'gpt2'")

    for name, kind in type(c).__annotations__.items():
        x = getattr(c, name)
        if kind in (int, float, bool):
            if (name, x) != ("head_dim", 0):  # 0: yet to be computed
                check_field(name, x, kind)
            setattr(c, name, kind(x))

    if not c.head_dim and c.d_model % c.n_heads:
        raise ValueError(f"d_model {c.d_model} is not a multiple of n_heads {c.n_heads}; set head_dim")
    if c.n_heads % c.n_kv_heads:
        raise ValueError(f"n_heads {c.n_heads} is not a multiple of n_kv_heads {c.n_kv_heads}")
    head_dim = c.head_dim or c.d_model // c.n_heads
    if c.family == "llama" and head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; RoPE rotates pairs, so make it even")

    if (scaling := c.rope_scaling) is not None:
        check_field("rope_scaling", scaling, dict)
        if scaling.keys() != SCALING.keys():
            raise ValueError(f"rope_scaling {scaling!r:.60} must hold {', '.join(SCALING)} and nothing else")
        for name, kind in SCALING.items():
            check_field(name, scaling[name], kind)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if low >= high:
            raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")
        c.rope_scaling = {name: kind(scaling[name]) for name, kind in SCALING.items()}


def check_tokens(x: Tensor, name: str = "tokens"):
    """ValueError unless x is an int64 tensor (B, T) with B and T at least 1."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} are a {type(x).__name__}; give an int64 tensor (B, T), torch.tensor([[3]])")
    if x.dtype != torch.int64:
        raise ValueError(f"{name} are {x.dtype} and must be torch.int64; give whole numbers, cast by .long()")
    if x.dim() != 2 or not x.numel():
        raise ValueError(f"{name} are empty or not of shape (B, T): {tuple(x.shape)}; give at least one")


def check_forward(model, tokens: Tensor, caches, pos: Tensor | None, last: int | None):
    """ValueError unless these are arguments for the decoder, and the text stays within its length."""
    check_tokens(tokens)
    if caches is not None:
        check_caches(caches, len(model.blocks), len(tokens))
    seen, T, longest = caches[0].seen if caches else 0, tokens.shape[1], model.config.max_len
    if last is not None:
        whole("last", last, 1, T)
    if seen + T > longest:
        raise ValueError(f"{seen + T} tokens exceed the model's length of {longest}; shorten the text")

    if pos is not None:
        check_tokens(pos, "positions")
        low, high = int(pos.min()), int(pos.max())
        if pos.shape not in ((1, T), tokens.shape) or low < 0 or high >= longest:
            raise ValueError(f"positions {low} … {high} of shape {tuple(pos.shape)} must lie in "
                             f"0 … {longest - 1} and have the shape {tuple(tokens.shape)} or (1, {T})")


def outside(tokens: Tensor, V: int) -> ValueError:
    """What to raise where the embedding does not know a token."""
    low, high = int(tokens.min()), int(tokens.max())
    return ValueError(f"token ids {low} … {high} must lie in the vocabulary 0 … {V - 1}; "
                      "use the model's own tokenizer")


# ---- a call of a model of transformers, by the names of its arguments --------------------------------------

def check_call(model, seen: int, end: int, call: dict):
    """ValueError unless a memory of `seen` tokens can answer a call, up to token `end`, as the model does."""
    tokens, mask, longest = call.get("input_ids"), call.get("attention_mask"), model.config.max_len
    if call.get("use_cache") is False:
        raise ValueError("use_cache is False, and a memory is given; leave one of them out")
    if model.decoder.training and getattr(model.decoder, "gradient_checkpointing", False):
        raise ValueError("gradient checkpointing reads no memory; call model.eval()")

    if end == seen:
        raise ValueError(f"the call has no tokens beyond the {seen} that the memory has seen; give it some")
    if tokens is not None and tokens.device.type == "cpu":  # a GPU would have to wait
        if int(tokens.min()) < 0 or int(tokens.max()) >= model.config.vocab_size:
            raise outside(tokens, model.config.vocab_size)
    if model.table and end > longest:
        raise ValueError(f"{end} tokens exceed the model's length of {longest}; shorten the text")
    for layer, window in enumerate(model.windows):
        check_window(layer, window, end)

    for name in ("position_ids", "cache_position"):
        pos = call.get(name)
        if pos is None or pos.dim() > 2:  # in three dimensions: of an image
            continue
        if pos.shape[-1] != end - seen or (pos != torch.arange(seen, end, device=pos.device)).any():
            raise ValueError(f"{name} must be {seen} … {end - 1}, as the memory has seen {seen} tokens; "
                             f"leave {name} out, give each text a row of its own, and begin assisted "
                             "decoding with an empty memory")
    if isinstance(mask, Tensor) and mask.dim() == 2 and (mask.shape[1] < end or not mask.all()):
        raise ValueError(f"attention_mask must show all {end} tokens, with those that the memory has seen; "
                         "give a batch texts of one length, and leave attention_mask out")


def check_window(layer: int, window: int | None, tokens: int):
    """ValueError if a layer that attends to the last `window` tokens would not see all of a text."""
    if window is not None and tokens > window:
        raise ValueError(f"layer {layer} attends to the last {window} tokens alone, and the text has "
                         f"{tokens}; shorten the text, or take another model")
