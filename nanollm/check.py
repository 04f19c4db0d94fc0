"""Checks that several modules share. Each raises a ValueError of one line."""
from dataclasses import fields
from inspect import signature
from numbers import Integral, Real
from typing import ClassVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, int32, int64

# ---- numbers, options: what a user gives -------------------------------------------------------------------


def whole(name: str, x, least: int, most: int | None = None):
    """Return x if it is a whole number from `least` to `most`, or else raise a ValueError."""
    if not isinstance(x, Integral) or isinstance(x, bool) or x < least or most is not None and x > most:
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} {x!r:.60} must be a whole number {bounds}")
    return x


def check_seed(seed: int, times: int = 1):
    """Raise ValueError unless NumPy and PyTorch both accept seed and seed · times as seeds."""
    whole("seed", seed, 0, 2 ** 63 // times - 1)


def check_budget(budget: int, least: int, why: str):
    """Raise ValueError unless budget, in entries per key/value head, is at least `least`."""
    if budget < least:
        raise ValueError(f"budget {budget} must be at least {least}: {why}")


def fits(x, kind) -> bool:
    """Return whether x fits a declared type. A finite number fits float; a bool is no number."""
    parts = get_args(kind)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(x, number) and not isinstance(x, bool) and -2 ** 63 <= x < 2 ** 63
    if get_origin(kind) is list:
        return isinstance(x, list) and x != [] and all(fits(y, parts[0]) for y in x)
    if get_origin(kind) is tuple:
        parts = parts[:1] * len(x) if parts[-1] is ... and isinstance(x, tuple) else parts
        return isinstance(x, tuple) and len(x) == len(parts) and all(map(fits, x, parts))
    if parts:  # a union
        return any(fits(x, part) for part in parts)
    return not isinstance(kind, type) or isinstance(x, kind)


def check_type(name: str, x, kind, owner: str = ""):
    """Raise ValueError unless x fits the type of `name`. owner: " of Class", for the message."""
    if not fits(x, kind):
        words = {int: "a whole number", float: "a finite number", bool: "True or False", dict: "an object"}
        expected = words.get(kind, getattr(kind, "__name__", str(kind)))
        raise ValueError(f"{name} {' '.join(repr(x).split()):.60}{owner} must be {expected}")


def check_options(method):
    """Raise ValueError unless all options of a method are dataclass fields that fit their types."""
    name, kinds = type(method).__name__, get_type_hints(type(method))
    options = {field.name for field in fields(method)}
    for option, kind in kinds.items():
        if option in options:
            check_type(option, getattr(method, option), kind, f" of {name}")
        elif get_origin(kind) is not ClassVar:
            raise ValueError(f"{name} declares {option} but is not a dataclass; "
                             "put @dataclass(eq=False) above the class")


# ---- caches: input from a method's author or from a caller -------------------------------------------------

def constructed(Method, options: dict):
    """Return the cache Method(**options), or raise a ValueError that says what to change."""
    try:
        cache = Method(**options)
    except TypeError as error:
        raise ValueError(f"{error}; a method's options are its dataclass fields") from error
    if not hasattr(cache, "slots"):
        raise ValueError(f"__post_init__ of {type(cache).__name__} must begin with super().__post_init__()")
    return cache


def check_watch(cache):
    """Raise ValueError unless `watch` is a number, and above 0 if `observe` needs probabilities.

    An `observe` that works without them declares `p: Tensor | None`.
    """
    if type(cache.watch) is not int or cache.watch < 0:
        raise ValueError(f"watch {cache.watch!r} of {type(cache).__name__} "
                         "must be a number of queries, 0 or more, or ALL")
    p = [*signature(cache.observe).parameters.values()][1:2]
    if not cache.watch and p and "None" not in str(p[0].annotation):
        raise ValueError(f"observe of {type(cache).__name__} gets no probabilities, because watch is 0; set "
                         "watch to ALL or to a number of queries, or declare p: Tensor | None")


def check_attend(cache, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, vectors: int = 1):
    """Raise ValueError unless q, k, v and pos are new tokens that fit this cache.

    vectors: a key has `vectors` times the numbers of a query (2 in tensor attention, whose keys are pairs).
    """
    if not all(isinstance(x, Tensor) for x in (q, k, v, pos)):
        raise ValueError("q, k, v and pos must be tensors")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or not q.is_floating_point():
        types = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k and v are {types}; they must be of one floating dtype on one device")

    B, H, T, D = k.shape if k.dim() == 4 else (0,) * 4
    alike = k.numel() and v.shape == k.shape and q.dim() == 4 and q.numel()
    if not alike or q.shape[::2] != (B, T) or q.shape[1] % H or q.shape[3] * vectors != D:
        shapes, D = ", ".join(str(tuple(x.shape)) for x in (q, k, v)), "D" if vectors == 1 else f"{vectors}D"
        raise ValueError(f"q, k and v of shapes {shapes} are not (B, H·G, T, D), (B, H, T, {D}) "
                         f"and (B, H, T, {D}) with T at least 1")
    if pos.shape not in ((1, T), (B, T)) or pos.dtype not in (int32, int64):
        raise ValueError(f"pos of shape {tuple(pos.shape)} must be ({B} or 1, {T}), "
                         f"whole numbers and not {pos.dtype}")
    if "k" in cache.slots and (old := cache.slots["k"].shape[:2]) != (B, H):
        raise ValueError(f"{B} texts of {H} heads do not fit a cache that holds {old[0]} texts of {old[1]} "
                         "heads; make a new cache for a new batch")


def check_kept(i: Tensor, shape: tuple[int, int, int]):
    """Raise ValueError unless i (B, H, n) are slots of a cache of `shape` (B, H, S), or below 0."""
    B, H, S = shape
    if not isinstance(i, Tensor) or i.dim() != 3 or i.shape[:2] != (B, H) or i.dtype != int64:
        given = f"of shape {tuple(i.shape)}, {i.dtype}," if isinstance(i, Tensor) else f"{i!r:.60}"
        raise ValueError(f"slots to keep {given} must be an int64 tensor ({B}, {H}, n)")
    if i.numel() and int(i.max()) >= S:
        raise ValueError(f"slot {int(i.max())} does not exist; the slots to keep must be in 0 … {S - 1}")


def check_score(score: Tensor, shape: tuple[int, int, int]):
    """Raise ValueError unless there is a score for every slot of a cache of `shape` (B, H, S)."""
    if not isinstance(score, Tensor) or score.shape != shape:
        given = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        raise ValueError(f"scores {given} must be a tensor {tuple(shape)}, one for each slot of each head")


def check_numbers(score: Tensor):
    """Raise ValueError if any of the scores (B, H, S) is NaN, because NaN has no order."""
    if n := int(score.isnan().sum()):
        raise ValueError(f"{n} of {score.numel()} scores are NaN; give each slot a number or ±inf")


def check_caches(caches: list, layers: int, B: int):
    """Raise ValueError unless each layer has a cache of its own, all for B texts of one length."""
    if not isinstance(caches, (list, tuple)) or not all(hasattr(cache, "slots") for cache in caches):
        raise ValueError(f"{caches!r:.60} is not a list of caches; use make_cache")
    if len(caches) != layers or len({*map(id, caches)}) != layers:
        raise ValueError(f"{layers} layers need a cache each; the list has {len(caches)}, "
                         f"{len({*map(id, caches)})} of them different; use make_cache")
    if len(seen := {cache.seen for cache in caches}) > 1:
        raise ValueError(f"the layers' caches have seen {min(seen)} to {max(seen)} tokens "
                         "and must agree; make new ones")
    for cache in caches:
        if "k" in cache.slots and (texts := cache.slots["k"].shape[0]) != B:
            raise ValueError(f"{B} texts do not fit caches that hold {texts}; make new ones for a new batch")


def check_tokens(x: Tensor, name: str = "tokens"):
    """Raise ValueError unless x is an int64 tensor (B, T) with B and T at least 1."""
    if not isinstance(x, Tensor) or x.dtype != int64 or x.dim() != 2:
        given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"{name} are {given}; they must be an int64 tensor (B, T), like torch.tensor([[3]])")
    if not x.numel():
        raise ValueError(f"{name} are empty, of shape {tuple(x.shape)}; give at least one")


# ---- a decoder: its Config and its arguments ---------------------------------------------------------------

SCALING = dict(factor=float, low_freq_factor=float, high_freq_factor=float,
               original_max_position_embeddings=int)  # keys of Llama 3.1's rope_scaling


def check_field(name: str, x, kind: type):
    """Raise ValueError unless x fits `kind`; a number must be above 0, also in 32 bits."""
    if kind is int:
        whole(name, x, 1, 2 ** 31 - 1)
    else:
        check_type(name, x, kind)
    if kind is float and x < torch.finfo(torch.float32).tiny:
        raise ValueError(f"{name} {x!r:.60} must be a finite number above 0")


def check_config(c):
    """Raise ValueError unless a decoder can have this shape; make all numbers Python's, for json."""
    if c.family not in ("llama", "gpt2"):
        raise ValueError(f"family {c.family!r} is unknown; use 'llama' or 'gpt2'")
    for name, kind in type(c).__annotations__.items():
        x = getattr(c, name)
        if kind in (int, float, bool):
            if (name, x) != ("head_dim", 0):  # head_dim 0: Config computes it
                check_field(name, x, kind)
            setattr(c, name, kind(x))

    if not c.head_dim and c.d_model % c.n_heads:
        raise ValueError(f"d_model {c.d_model} is not a multiple of n_heads {c.n_heads}; set head_dim")
    if c.n_heads % c.n_kv_heads:
        raise ValueError(f"n_heads {c.n_heads} is not a multiple of n_kv_heads {c.n_kv_heads}")
    head_dim = c.head_dim or c.d_model // c.n_heads
    if c.family == "llama" and head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; RoPE rotates pairs, so make it even")

    if c.rope_scaling is not None:
        check_field("rope_scaling", c.rope_scaling, dict)
        if c.rope_scaling.keys() != SCALING.keys():
            raise ValueError(f"rope_scaling {c.rope_scaling!r:.60} must hold {', '.join(SCALING)} "
                             "and nothing else")
        for name, kind in SCALING.items():
            check_field(name, c.rope_scaling[name], kind)
        c.rope_scaling = {name: kind(c.rope_scaling[name]) for name, kind in SCALING.items()}
        low, high = c.rope_scaling["low_freq_factor"], c.rope_scaling["high_freq_factor"]
        if low >= high:
            raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")


def check_forward(model, tokens: Tensor, caches, pos: Tensor | None, last: int | None):
    """Raise ValueError unless the arguments fit the decoder and the text is not too long."""
    check_tokens(tokens)
    V, longest, T = model.config.vocab_size, model.config.max_len, tokens.shape[1]
    # not on a GPU, where reading the two numbers would wait for all work before it
    if tokens.device.type == "cpu" and (int(tokens.min()) < 0 or int(tokens.max()) >= V):
        raise ValueError(f"token ids {int(tokens.min())} … {int(tokens.max())} must lie in the vocabulary "
                         f"0 … {V - 1}; use the model's own tokenizer")
    if caches is not None:
        check_caches(caches, len(model.blocks), len(tokens))
    if last is not None:
        whole("last", last, 1, T)
    if (end := T + (caches[0].seen if caches else 0)) > longest:
        raise ValueError(f"{end} tokens exceed the model's length of {longest}; shorten the text")
    if pos is not None:
        check_tokens(pos, "positions")
        low, high = int(pos.min()), int(pos.max())
        if pos.shape not in ((1, T), tokens.shape) or low < 0 or high >= longest:
            raise ValueError(f"positions {low} … {high} of shape {tuple(pos.shape)} must lie in "
                             f"0 … {longest - 1} and have the shape {tuple(tokens.shape)} or (1, {T})")
