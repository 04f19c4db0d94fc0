"""Find methods by name: the variants in methods/, alone or as window methods with additions (a+b)."""
from contextlib import suppress
from dataclasses import replace
from functools import partial
import importlib
import inspect
from pathlib import Path
import sys
import traceback

import torch

from nanollm import tokenizer
from nanollm.cache import LayerCache
from nanollm.commands.shell import set_threads
from nanollm.hf import checkpoint
from nanollm.window import Selection, WindowCache

METHODS = Path(__file__).parents[2] / "methods"


def methods() -> tuple[dict, dict, dict]:
    """Return the variants by name, the additions by name, and the files left out, each with the reason.

    Full attention comes first. An addition is a dict with another selection for a window method.
    """
    variants, additions, broken = {"full": LayerCache}, {}, {}
    for file in sorted(METHODS.glob("*.py")) + sorted(METHODS.glob("ours/*.py")):
        try:
            path = file.relative_to(METHODS.parent).with_suffix("")
            module = importlib.import_module(".".join(path.parts))
            check_names(module, variants | additions)
        except (Exception, SystemExit) as error:  # importing a file may raise anything
            broken[str(file.relative_to(METHODS))] = one_line(error)
            continue
        variants |= module.variants
        additions |= getattr(module, "additions", {})
    return {"full": LayerCache} | dict(sorted(variants.items())), dict(sorted(additions.items())), broken


def check_names(module, taken: dict):
    """Raise ValueError unless variants are caches, additions selections, and no name is taken."""
    if not hasattr(module, "variants"):
        raise ValueError("it defines no variants; end it with variants = {'name': Class}")
    additions = getattr(module, "additions", {})
    for name in [*module.variants, *additions]:
        if name in taken:
            raise ValueError(f"another file already has a method {name!r}; choose another name")
    for name, Method in module.variants.items():
        kind = getattr(Method, "func", Method)  # the class, if Method is a partial
        if not isinstance(kind, type) or not issubclass(kind, LayerCache):
            raise ValueError(f"{name!r} is {kind!r}; it must be a subclass of LayerCache")
    for name, options in additions.items():
        if not isinstance(options, dict) or not isinstance(options.get("select"), Selection):
            raise ValueError(f"the addition {name!r} is not a dict with a selection; "
                             "write additions = {'name': dict(select=YourSelection())}")


def one_line(error: BaseException) -> str:
    """Return an error in one line. Any but a ValueError also names its type and its line in methods/."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if METHODS in Path(frame.filename).parents), None)
    where = f", line {place.lineno} of {Path(place.filename).name}" if place else ""
    return f"{type(error).__name__}{where}: {error}"


def has_window(Method) -> bool:
    """Return whether a method takes additions: it has an observation window and a selection to replace."""
    return isinstance(Method, type) and issubclass(Method, WindowCache) and hasattr(Method, "select")


def compose(name: str, variants: dict, additions: dict) -> partial:
    """Return the method that a name like "ada_kv+critical+residual" describes, built from left to right.

    A selection with an `inner` wraps the one to its left. Any other would replace it: a ValueError.
    """
    base, *more = name.split("+")
    if len({*more}) < len(more):
        raise ValueError(f"{name} names an addition twice; name it once")
    select, options = variants[base].select, {}
    plain = getattr(variants.get("snap_kv"), "select", None)  # the selection that an addition may replace
    for before, addition in zip([base, *more], more):
        outer = additions[addition]["select"]
        if hasattr(outer, "inner"):
            outer = replace(outer, inner=select)
        elif select != plain:
            raise ValueError(f"{name}: {addition} chooses the entries itself, which would undo {before}; "
                             f"put it {'first' if before in more else 'on another method'}")
        select, options = outer, options | additions[addition]
    return partial(variants[base], **options | dict(select=select))


def pick(names: list[str]) -> dict:
    """Return the named methods, such as "ada_kv+critical"; every variant if `names` is empty.

    "all" adds every variant, and every window method with each addition.
    """
    variants, additions, broken = methods()
    for file, why in broken.items():
        print(f"methods/{file} is left out: {why}", file=sys.stderr)
    windows = [name for name, Method in variants.items() if has_window(Method)]
    every = dict(variants)
    for name in [f"{base}+{addition}" for base in windows for addition in additions if "all" in names]:
        with suppress(ValueError):
            every.setdefault(name, compose(name, variants, additions))

    chosen = {"full": LayerCache} | dict(sorted(every.items())) if not names or "all" in names else {}
    for name in names:
        base, *more = name.split("+")
        if name in variants:
            chosen[name] = variants[name]
        elif base in windows and additions.keys() >= {*more}:
            chosen[name] = compose(name, variants, additions)
        elif name != "all":
            raise ValueError(f"unknown method {name!r}; known are {', '.join(variants)}, all; "
                             f"on window methods, as in ada_kv+critical: {', '.join(additions)}")
    return chosen


def given(Method, **known) -> dict:
    """Return those of the given values for which the method has an option."""
    return {name: value for name, value in known.items() if name in inspect.signature(Method).parameters}


def has_budget(Method) -> bool:
    """Return whether a method has the option `budget`."""
    return "budget" in inspect.signature(Method).parameters


def calibrated(Method, model, encoding) -> dict:
    """Return the options that a method measures on the decoder, such as its retrieval heads; {} if none."""
    return Method.calibrate(model, encoding) if hasattr(Method, "calibrate") else {}


# ---- the model that a command runs ---

def load(folder: Path, device: str, engine: str = "auto", dtype: str = "float32"):
    """Return the decoder and the tokenizer of a folder.

    engine: "ours", "transformers", or "auto" (ours if it supports the model's family). dtype: torch's name of
    the number format of weights, keys and values.
    """
    if engine == "ours" or engine == "auto" and checkpoint.is_known(folder):
        model = checkpoint.from_hf(folder, getattr(torch, dtype), device)
    else:
        from nanollm.hf.bridge import Bridged  # here, because transformers takes seconds to import
        model = Bridged(checkpoint.hf_model(folder, getattr(torch, dtype), device))
    own = folder / "tokenizer.tiktoken"
    encoding = tokenizer.load(own) if own.exists() else checkpoint.hf_tokenizer(folder)
    tokenizer.check_vocabulary(encoding, model.config.vocab_size)
    return model, encoding


def loaded(args, folder: Path | None = None):
    """Return `load` for the options of `shell.model_options`, or for another folder; set the threads too."""
    model, encoding = load(folder or args.model, args.device, args.engine, args.dtype)
    set_threads(args.threads, sum(p.numel() for p in model.parameters()))
    return model, encoding
