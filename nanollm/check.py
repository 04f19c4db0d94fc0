"""Checks of what users and authors of methods give. One that fails raises a ValueError."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import ClassVar, get_origin, get_type_hints

from torch import Tensor, int64

# ---- numbers, options: what a user gives -------------------------------------------------------


def whole(name: str, x, least: int, most: int | None = None):
    """Return x if it is a whole number from `least` to `most`, or else raise a ValueError."""
    if not fits(x, int) or x < least or most is not None and x > most:
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} {x!r:.60} must be a whole number {bounds}")
    return x


def check_seed(seed: int, times: int = 1):
    """Raise ValueError unless seed is 0 … 2⁶³/times − 1, so that seed · times is a seed, too."""
    whole("seed", seed, 0, 2**63 // times - 1)


def check_budget(budget: int, least: int, why: str):
    """Raise ValueError unless budget, in entries per key/value head, is at least `least`."""
    if budget < least:
        raise ValueError(f"budget {budget} must be at least {least}: {why}")


def closest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name closest to `name`; if none is close, one with all names."""
    known = [*known]
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def fits(x, kind) -> bool:
    """Return whether x fits a type. A number in ±2⁶³ fits float, and a bool is no number.

    Types with parts, such as `int | None`, are not looked into: anything fits them.
    """
    if kind in (int, float):
        number = Integral if kind is int else Real
        if isinstance(x, bool) or not isinstance(x, number):
            return False
        return -(2**63) <= x < 2**63
    if not isinstance(kind, type) or get_origin(kind) is not None:
        return True
    return isinstance(x, kind)


def constructed(Kind: type, options: dict):
    """Return the method Kind(**options). ValueError if an option is unknown, missing or wrong."""
    if not isinstance(Kind, type):
        raise ValueError(
            f"{Kind!r:.60} is not a class, such as SnapKV; lab.questions takes names"
        )
    name = Kind.__name__
    known = [field.name for field in fields(Kind)]
    kinds = get_type_hints(Kind)
    for option, kind in kinds.items():
        if option not in known and get_origin(kind) is not ClassVar:
            raise ValueError(
                f"{name} declares {option} but is not a dataclass; "
                "put @dataclass above the class"
            )
    for option, x in options.items():
        if option not in known:
            raise ValueError(
                f"{name} has no option {option!r}; {closest(option, known)}"
            )
        if not fits(x, kinds[option]):
            words = {
                int: "a whole number",
                float: "a finite number",
                bool: "True or False",
            }
            kind = words.get(kinds[option], kinds[option].__name__)
            raise ValueError(f"{option} {x!r:.60} of {name} must be {kind}")
    for field in fields(Kind):
        if field.name not in options and field.default is MISSING:
            raise ValueError(f"{name} needs the option {field.name!r}")
    return Kind(**options)


# ---- caches: input from a method's author or from a caller -------------------------------------


def check_attend(cache, k: Tensor):
    """Raise ValueError unless keys k (B, H, T, D) fit in B and H, and observed tokens are there."""
    looked = cache.notes or cache.method.entry
    if cache.forgotten is not None and looked:
        raise ValueError(
            "the method has looked at tokens that were forgotten; compress first, or read the text "
            "into new caches"
        )
    B, H = k.shape[:2]
    if "k" in cache.slots and cache.slots["k"].shape[:2] != (B, H):
        texts, heads = cache.slots["k"].shape[:2]
        raise ValueError(
            f"{B} texts of {H} heads do not fit a cache that holds {texts} texts of {heads} "
            "heads; make a new cache for a new batch"
        )


def check_kept(i: Tensor, shape: tuple[int, int, int]):
    """Raise ValueError unless i (B, H, n) are slots of a cache of `shape` (B, H, S), or below 0."""
    B, H, S = shape
    if i.dim() != 3 or i.shape[:2] != (B, H):
        raise ValueError(
            f"slots to keep {tuple(i.shape)} must be an int64 tensor ({B}, {H}, n)"
        )
    if i.numel() and int(i.max()) >= S:
        raise ValueError(
            f"slot {int(i.max())} does not exist; the slots to keep must be in 0 … {S - 1}"
        )


def check_score(score: Tensor, shape: tuple[int, int, int]):
    """Raise ValueError unless there is a score for every slot of a cache of `shape` (B, H, S)."""
    if score.shape != shape:
        raise ValueError(
            f"scores {tuple(score.shape)} must be {tuple(shape)}, one for each slot"
        )


def check_numbers(score: Tensor):
    """Raise ValueError if any of the scores (B, H, S) is NaN, because NaN has no order."""
    n = int(score.isnan().sum())
    if n:
        raise ValueError(
            f"{n} of {score.numel()} scores are NaN; give each slot a number or ±inf"
        )


def check_caches(caches: list, layers: int, B: int):
    """Raise ValueError unless each layer has a cache, and the first holds B texts or nothing."""
    if len(caches) != layers:
        raise ValueError(
            f"{layers} layers need a cache each; the list has {len(caches)}; use make_cache"
        )
    if "k" in caches[0].slots:
        texts = caches[0].slots["k"].shape[0]
        if texts != B:
            raise ValueError(
                f"{B} texts do not fit caches that hold {texts}; make new ones for a new batch"
            )


def check_tokens(x: Tensor, name: str = "tokens"):
    """Raise ValueError unless x is an int64 tensor (B, T) with B and T at least 1."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{name} are a {type(x).__name__}; they must be a tensor (B, T), such as a tokenizer's "
            "input_ids"
        )
    if x.dtype != int64 or x.dim() != 2 or not x.numel():
        raise ValueError(
            f"{name} are {x.dtype} of shape {tuple(x.shape)}; they must be an int64 tensor "
            "(B, T) with at least one token, like torch.tensor([[3]])"
        )


def check_ids(tokens: Tensor, V: int):
    """Raise ValueError unless all ids lie in a vocabulary of V tokens."""
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high >= V:
        raise ValueError(
            f"token id {low if low < 0 else high} lies outside the vocabulary 0 … {V - 1}; "
            "use the model's own tokenizer"
        )


# ---- a decoder: its Config and its arguments ---------------------------------------------------

SCALING = (  # of Llama 3.1
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def check_config(c):
    """Raise ValueError if the family is unknown, or if the heads do not fit the shape."""
    if c.family not in ("llama", "gpt2"):
        raise ValueError(f"family {c.family!r} is unknown; use 'llama' or 'gpt2'")
    if not c.head_dim and c.d_model % c.n_heads:
        raise ValueError(
            f"d_model {c.d_model} is not a multiple of n_heads {c.n_heads}; set head_dim"
        )
    if c.n_heads % c.n_kv_heads:
        raise ValueError(
            f"n_heads {c.n_heads} is not a multiple of n_kv_heads {c.n_kv_heads}"
        )
    head_dim = c.head_dim or c.d_model // c.n_heads
    if c.family == "llama" and head_dim % 2:
        raise ValueError(
            f"head_dim {head_dim} is odd; RoPE rotates pairs, so make it even"
        )


def check_forward(model, tokens: Tensor, caches, last: int | None):
    """Raise ValueError if shapes, the text's length or, on a CPU, token ids do not fit."""
    check_tokens(tokens)
    longest = model.config.max_len
    T = tokens.shape[1]
    # not on a GPU, where reading the ids would wait for all work before it
    if tokens.device.type == "cpu":
        check_ids(tokens, model.config.vocab_size)
    if caches is not None:
        check_caches(caches, len(model.blocks), len(tokens))
    if last is not None:
        whole("last", last, 1, T)
    end = T
    if caches:
        end += caches[0].seen
    if end > longest:
        raise ValueError(
            f"{end} tokens exceed the model's length of {longest}; shorten the text"
        )
