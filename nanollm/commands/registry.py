"""Methods by name: what the files of methods/ offer, and additions on top of window methods."""
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
    """Return every variant by name, every addition by name, and the files left out, each with the reason.

    Full attention is the first variant. An addition is the options that put a selection on a window method.
    """
    found, additions, broken = {"full": LayerCache}, {}, {}
    for file in sorted(METHODS.glob("*.py")) + sorted(METHODS.glob("ours/*.py")):
        try:
            path = file.relative_to(METHODS.parent).with_suffix("")
            module = importlib.import_module(".".join(path.parts))
            check_names(module, found | additions)
        except (Exception, SystemExit) as error:  # whatever a file may do when it is imported
            broken[str(file.relative_to(METHODS))] = one_line(error)
            continue
        found |= module.variants
        additions |= getattr(module, "additions", {})
    return {"full": LayerCache} | dict(sorted(found.items())), dict(sorted(additions.items())), broken


def check_names(module, taken: dict):
    """ValueError unless a file's variants are caches and its additions selections, under names of their own.
    """
    if not hasattr(module, "variants"):
        raise ValueError("it names no methods; end it with variants = {'name': Class}")
    additions = getattr(module, "additions", {})
    for name in [*module.variants, *additions]:
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name; write variants = {{'name': Class}}")
        if name in taken:
            raise ValueError(f"another file has a method {name!r} already; take another name")
    for name, Method in module.variants.items():
        kind = getattr(Method, "func", Method)  # of a partial
        if not isinstance(kind, type) or not issubclass(kind, LayerCache):
            raise ValueError(f"{name!r} stands for {kind!r}, which is no LayerCache")
    for name, options in additions.items():
        if not isinstance(options, dict) or not isinstance(options.get("select"), Selection):
            raise ValueError(f"the addition {name!r} goes on top of window methods; "
                             "write additions = {'name': dict(select=YourSelection())}")


def one_line(error: BaseException) -> str:
    """Return an error in one line. One that no check foresaw also says its kind and its line in methods/."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if METHODS in Path(frame.filename).parents), None)
    where = f", line {place.lineno} of {Path(place.filename).name}" if place else ""
    return f"{type(error).__name__}{where}: {error}"


def has_window(Method) -> bool:
    """Return whether additions can go on top of a method: it has a window, and a selection to replace."""
    return isinstance(Method, type) and issubclass(Method, WindowCache) and hasattr(Method, "select")


def compose(name: str, found: dict, additions: dict) -> partial:
    """Return the method of a name like "ada_kv+critical+residual": each addition goes on what is left of it.

    A selection with an `inner` wraps the one before it. Any other would undo it, and is a ValueError.
    """
    base, *more = name.split("+")
    if len({*more}) < len(more):
        raise ValueError(f"{name} names an addition twice")
    select, options = found[base].select, {}
    plain = getattr(found.get("snap_kv"), "select", None)  # what an addition takes the place of
    for before, addition in zip([base, *more], more):
        outer = additions[addition]["select"]
        if hasattr(outer, "inner"):
            outer = replace(outer, inner=select)
        elif select != plain:
            raise ValueError(f"{name}: {addition} chooses the entries itself and would undo {before}; "
                             f"put it {'first' if before in more else 'on another method'}")
        select, options = outer, options | additions[addition]
    return partial(found[base], **options | dict(select=select))


def pick(names: list[str]) -> dict:
    """Return methods by name, all variants for no name.

    "ada_kv+critical" is a window method with an addition on top. "all" is every variant, and every window
    method with each addition.
    """
    found, additions, broken = methods()
    for file, why in broken.items():
        print(f"methods/{file} is left out: {why}", file=sys.stderr)
    windows = [name for name, Method in found.items() if has_window(Method)]
    every = dict(found)
    for name in [f"{base}+{addition}" for base in windows for addition in additions if "all" in names]:
        with suppress(ValueError):
            every.setdefault(name, compose(name, found, additions))

    chosen = {"full": LayerCache} | dict(sorted(every.items())) if not names or "all" in names else {}
    for name in names:
        base, *more = name.split("+")
        if name in found:
            chosen[name] = found[name]
        elif base in windows and additions.keys() >= {*more}:
            chosen[name] = compose(name, found, additions)
        elif name != "all":
            raise ValueError(f"unknown method {name!r}; known are {', '.join(found)}, all; "
                             f"on window methods, as in ada_kv+critical: {', '.join(additions)}")
    return chosen


def given(Method, **known) -> dict:
    """Return those of the known values for which the method has an option."""
    return {name: value for name, value in known.items() if name in inspect.signature(Method).parameters}


def has_budget(Method) -> bool:
    return "budget" in inspect.signature(Method).parameters


def calibrated(Method, model, encoding) -> dict:
    """Return the options that a method finds out about the decoder, or none."""
    return Method.calibrate(model, encoding) if hasattr(Method, "calibrate") else {}


# ---- the model that a command runs ---

def load(folder: Path, device: str, engine: str = "auto", dtype: str = "float32"):
    """Return the decoder and the tokenizer of a folder.

    engine: "ours", "transformers", or "auto": ours, if it knows the family. dtype: of the weights, and so of
    keys and values, by torch's name.
    """
    if engine == "ours" or engine == "auto" and checkpoint.is_known(folder):
        model = checkpoint.from_hf(folder, getattr(torch, dtype), device)
    else:
        from nanollm.hf.bridge import Bridged  # transformers takes seconds to load
        model = Bridged(checkpoint.hf_model(folder, getattr(torch, dtype), device))
    own = folder / "tokenizer.tiktoken"
    encoding = tokenizer.load(own) if own.exists() else checkpoint.hf_tokenizer(folder)
    tokenizer.check_vocabulary(encoding, model.config.vocab_size)
    return model, encoding


def loaded(args, folder: Path | None = None):
    """`load` of what `shell.model_options` say, or of another folder, and the threads that suit it."""
    model, encoding = load(folder or args.model, args.device, args.engine, args.dtype)
    set_threads(args.threads, sum(p.numel() for p in model.parameters()))
    return model, encoding
