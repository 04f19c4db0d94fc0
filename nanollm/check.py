"""Checks that several modules share: each raises a ValueError of one line that says what would be right."""
from dataclasses import fields
from inspect import signature
from numbers import Integral, Real
from typing import ClassVar, get_args, get_origin, get_type_hints

from torch import Tensor, int32, int64

# ---- numbers, options, rows: what a user gives -------------------------------------------------------------


def whole(name: str, x, least: int, most: int | None = None):
    """Return x, or raise a ValueError if it is no whole number from `least` to `most`."""
    if not isinstance(x, Integral) or isinstance(x, bool) or x < least or most is not None and x > most:
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} {x!r:.60} must be a whole number {bounds}")
    return x


def check_seed(seed: int, times: int = 1):
    """ValueError unless seed, and seed · times, is a seed for both NumPy and PyTorch."""
    whole("seed", seed, 0, 2 ** 63 // times - 1)


def check_budget(budget: int, least: int, why: str):
    """ValueError unless budget, in slots per key/value head, is at least `least`."""
    if budget < least:
        raise ValueError(f"budget {budget} must be at least {least}: {why}")


def fits(x, kind) -> bool:
    """Return whether x is of a declared type. A float is a finite number, whole ones included; a bool is no
    number.
    """
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


def check_type(name: str, x, kind, of: str = ""):
    """ValueError unless x fits the type that is declared for `name`."""
    if not fits(x, kind):
        words = {int: "a whole number", float: "a finite number", bool: "True or False", dict: "an object"}
        right = words.get(kind, getattr(kind, "__name__", str(kind)))
        raise ValueError(f"{name} {' '.join(repr(x).split()):.60}{of} must be {right}")


def check_row(row: dict, kinds: dict, file):
    """ValueError unless a row that was stored in `file` holds, under each key of `kinds`, what fits."""
    for key, kind in kinds.items():
        if key not in row:
            raise ValueError(f"a row in {file} has no {key!r}, as if of another version; name another file")
        if not fits(row[key], kind):
            raise ValueError(f"{key!r} of a row in {file} is {row[key]!r:.60}, which cannot be; "
                             "name another file")


def check_options(method):
    """ValueError unless every option of a cache or selection is a dataclass field and fits its type."""
    name, kinds = type(method).__name__, get_type_hints(type(method))
    options = {field.name for field in fields(method)}
    for option, kind in kinds.items():
        if option in options:
            check_type(option, getattr(method, option), kind, f" of {name}")
        elif get_origin(kind) is not ClassVar:
            raise ValueError(f"{name} declares {option} but is no dataclass; "
                             "put @dataclass(eq=False) above the class")


# ---- caches: what a method's author or a caller gives ------------------------------------------------------

def constructed(Method, options: dict):
    """Return Method(**options), a cache, or raise a ValueError that says what is to be changed."""
    try:
        cache = Method(**options)
    except TypeError as error:
        raise ValueError(f"{error}; a method's options are its dataclass fields") from error
    if not hasattr(cache, "slots"):
        raise ValueError(f"__post_init__ of {type(cache).__name__} must begin with super().__post_init__()")
    return cache


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


def check_attend(cache, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, vectors: int = 1):
    """ValueError unless these are new tokens of a cache's texts. vectors: keys of a token (2: pairs)."""
    if not all(isinstance(x, Tensor) for x in (q, k, v, pos)):
        raise ValueError("q, k, v and pos must be tensors")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or not q.is_floating_point():
        types = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k and v are {types}; they must be of one floating dtype on one device")

    B, H, T, D = k.shape if k.dim() == 4 else (0,) * 4
    right = k.numel() and v.shape == k.shape and q.dim() == 4 and q.numel()
    if not right or q.shape[::2] != (B, T) or q.shape[1] % H or q.shape[3] * vectors != D:
        shapes, D = ", ".join(str(tuple(x.shape)) for x in (q, k, v)), "D" if vectors == 1 else f"{vectors}D"
        raise ValueError(f"q, k and v of shapes {shapes} are not (B, H·G, T, D), (B, H, T, {D}) "
                         f"and (B, H, T, {D}) with T at least 1")
    if pos.shape not in ((1, T), (B, T)) or pos.dtype not in (int32, int64):
        raise ValueError(f"pos of shape {tuple(pos.shape)} must be ({B} or 1, {T}), "
                         f"whole numbers and not {pos.dtype}")
    if "k" in cache.slots and (held := cache.slots["k"].shape[:2]) != (B, H):
        raise ValueError(f"{B} texts of {H} heads come to a cache that holds {held[0]} of {held[1]}; "
                         "make a new cache for a new batch")


def check_kept(i: Tensor, shape: tuple[int, int, int]):
    """ValueError unless i (B, H, n) are slots of a cache of `shape` (B, H, S), below 0 for an empty one."""
    B, H, S = shape
    if not isinstance(i, Tensor) or i.dim() != 3 or i.shape[:2] != (B, H) or i.dtype != int64:
        given = f"of shape {tuple(i.shape)}, {i.dtype}," if isinstance(i, Tensor) else f"{i!r:.60}"
        raise ValueError(f"slots to keep {given} must be an int64 tensor ({B}, {H}, n)")
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


def check_caches(caches: list, layers: int, B: int):
    """ValueError unless there is one cache a layer, in step with the others, for B texts."""
    if not isinstance(caches, (list, tuple)) or not all(hasattr(cache, "slots") for cache in caches):
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


def check_tokens(x: Tensor, name: str = "tokens"):
    """ValueError unless x is an int64 tensor (B, T) with B and T at least 1."""
    if not isinstance(x, Tensor) or x.dtype != int64 or x.dim() != 2 or not x.numel():
        given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"{name} are empty or no int64 tensor (B, T) but {given}; give torch.tensor([[3]])")
