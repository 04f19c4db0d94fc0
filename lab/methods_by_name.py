"""Find methods by name.

    snap_kv              a variant: a name that a file of methods/ has in its `variants`
    ada_kv+critical      a window method with another selection, which is in `additions` of a file
    ada_kv+critical@3    the same method; what it keeps is stored in 3 bits

A file of methods/ gives its names like this:

    variants = {"kvzip": KVzip, "kvzip_recent": partial(KVzip, recent=8)}
    additions = {"critical": dict(select=Critical())}
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
import sys
import traceback
from typing import NamedTuple

from methods.baselines.snap_kv import SnapKV
from methods.baselines.rounded import RoundedSlots
from nanollm.cache import Method, Slots, make_cache
from nanollm.check import closest

METHODS = Path(__file__).parents[1] / "methods"
FOLDERS = (".", "baselines", "ours")
# names with bits that stand beside the variants if all methods are asked for
IN_FEW_BITS = ("full@2", "full@3", "full@4", "kvzip@4", "question_gates@4")
MOST_BITS = 8


class Variant(NamedTuple):
    """What a name stands for."""

    kind: type[Method]
    options: dict  # those that the name sets
    store: Callable | None = None  # None: the method's own, or packed slots

    def takes(self, option: str) -> bool:
        """Return whether the method has an option that the name leaves open."""
        names = {field.name for field in fields(self.kind)}
        return option in names - self.options.keys()

    def given(self, **known) -> dict:
        """Return the name's own options, and of the known values those that it leaves open."""
        open_ones = {name: x for name, x in known.items() if self.takes(name)}
        return open_ones | self.options

    def caches(self, model, **known) -> list[Slots]:
        """Return new caches of the method, with the options of `given`."""
        return make_cache(model, self.kind, self.store, **self.given(**known))

    @property
    def calibrates(self) -> type[Method] | None:
        """Return the class whose `calibrate` finds some of the options, or None."""
        for base in self.kind.__mro__:
            if "calibrate" in vars(base):
                return base
        return None


def pick(names: list[str]) -> dict[str, Variant]:
    """Return the named methods; all variants and IN_FEW_BITS if `names` is empty."""
    variants, additions, broken = known_names()
    for file, why in broken.items():
        print(f"methods/{file} is left out: {why}", file=sys.stderr)
    if not names:
        rounded = [x for x in IN_FEW_BITS if x.partition("@")[0] in variants]
        names = ["full", *sorted({*variants, *rounded} - {"full"})]
    return {name: named(name, variants, additions) for name in names}


def known_names() -> tuple[dict[str, Variant], dict[str, dict], dict[str, str]]:
    """Return variants and additions by name, and the files left out, each with the reason."""
    variants = {"full": Variant(Method, {})}
    additions = {}
    broken = {}
    files = [x for folder in FOLDERS for x in sorted((METHODS / folder).glob("*.py"))]
    for file in files:
        place = file.relative_to(METHODS)
        try:
            module = import_module(".".join(("methods", *place.with_suffix("").parts)))
            found = {name: variant(x) for name, x in module.variants.items()}
            more = getattr(module, "additions", {})
            taken = (variants | additions).keys() & {*found, *more}
            if taken:
                raise ValueError(
                    f"another file already has a method {min(taken)!r}; choose another name"
                )
        except (Exception, SystemExit) as error:  # importing a file may raise anything
            broken[str(place)] = one_line(error)
        else:
            variants |= found
            additions |= more
    return variants, additions, broken


def variant(x) -> Variant:
    """Return what a file of methods/ wrote: a method, or partial(a method, option=value, …)."""
    options = {}
    kind = x
    if isinstance(x, partial) and not x.args:
        options = x.keywords
        kind = x.func
    if isinstance(kind, type) and issubclass(kind, Method):
        return Variant(kind, options)
    raise ValueError(
        f"{x!r:.80} is no variant; write a method, or partial(a method, option=value)"
    )


def named(name: str, variants: dict, additions: dict) -> Variant:
    """Return the method of a name. ValueError if there is none."""
    if name in variants:
        return variants[name]
    stem, at, bits = name.partition("@")
    if at:
        return in_few_bits(named(stem, variants, additions), stem, bits)
    base, plus, addition = name.rpartition("+")
    if not plus:
        known = [*variants, *IN_FEW_BITS, *(f"+{x}" for x in additions)]
        raise ValueError(f"unknown method {name!r}; {closest(name, known)}")
    left = named(base, variants, additions)
    if addition not in additions:
        hint = closest(addition, additions)
        raise ValueError(f"unknown addition {addition!r} in {name!r}; {hint}")
    return with_addition(left, base, additions[addition])


def with_addition(left: Variant, name: str, addition: dict) -> Variant:
    """Return a method, which must choose as SnapKV does, with the options of an addition."""
    if "select" not in {field.name for field in fields(left.kind)}:
        raise ValueError(
            f"{name} has no selection that an addition could change; "
            "put additions on a method that has one, as in ada_kv+critical"
        )
    before = left.options.get("select", left.kind.select)
    if before != SnapKV.select:
        raise ValueError(
            f"{type(addition['select']).__name__} would undo {type(before).__name__}; "
            "put it on a method that chooses as SnapKV does"
        )
    return left._replace(options=left.options | addition)


def in_few_bits(variant: Variant, name: str, bits: str) -> Variant:
    """Return a method whose entries are stored in few bits."""
    if not bits.isdecimal() or not 1 <= int(bits) <= MOST_BITS:
        raise ValueError(
            f"{name}@{bits}: {bits!r} is no number of bits; give 1 to {MOST_BITS}, "
            f"at the name's end, as in {name}@4"
        )
    if variant.kind.store is not None:
        raise ValueError(
            f"{name}@{bits}: {name} keeps its entries in a store of its own, "
            f"{variant.kind.store.__name__}; leave out @{bits}"
        )
    return variant._replace(store=partial(RoundedSlots, bits=int(bits)))


def one_line(error: BaseException) -> str:
    """Return an error as a line; if no ValueError, with its type and, if any, line in methods/."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if METHODS in file.parents:  # the last one that is
            where = f", line {frame.lineno} of {file.name}"
    return f"{type(error).__name__}{where}: {error}"
