"""Methods by name: what the files of methods/ offer, and what can be composed of it."""
from dataclasses import replace
from functools import partial
import importlib
import inspect
from pathlib import Path
import sys
import traceback

from nanollm import TINY
from nanollm.commands.shell import set_threads

METHODS = Path(__file__).parents[2] / "methods"
DTYPES = "float32", "bfloat16", "float16"


def methods() -> tuple[dict, dict, dict]:
    """Of all files in methods/: every variant by name, after full attention; selections that go on top of a
    window method, as knobs by name; and the files that cannot be used, by name, with the reason."""
    from nanollm.cache import LayerCache
    found, additions, broken = {"full": LayerCache}, {}, {}
    for file in sorted(METHODS.glob("*.py")) + sorted(METHODS.glob("ours/*.py")):
        try:
            path = file.relative_to(METHODS.parent).with_suffix("")
            module = importlib.import_module(".".join(path.parts))
            if not hasattr(module, "variants"):
                raise ValueError("it names no methods; end it with variants = {'name': Class}")
            more = getattr(module, "additions", {})
            check_names(module.variants, more, found | additions)
        except (Exception, SystemExit) as error:  # whatever a file may do when it is imported
            broken[str(file.relative_to(METHODS))] = one_line(error)
            continue
        found |= module.variants
        additions |= more
    return {"full": LayerCache} | dict(sorted(found.items())), dict(sorted(additions.items())), broken


def check_names(variants: dict, additions: dict, taken: dict):
    """ValueError unless a file's variants are caches and its additions knobs with a selection, under names of
    their own.
    """
    from nanollm.cache import LayerCache
    from nanollm.window import Selection

    for name, what in (variants | additions).items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name; write variants = {{'name': Class}}")
        if taken.get(name, what) is not what:
            raise ValueError(f"another file has a method {name!r} already; take another name")

    for name, Method in variants.items():
        of = Method.func if isinstance(Method, partial) else Method
        if not isinstance(of, type) or not issubclass(of, LayerCache):
            raise ValueError(f"{name!r} stands for {of!r}, which is no LayerCache")

    for name, knobs in additions.items():
        if not isinstance(knobs, dict) or not isinstance(knobs.get("select"), Selection):
            raise ValueError(f"the addition {name!r} goes on top of window methods; "
                             "write additions = {'name': dict(select=YourSelection())}")


def one_line(error: BaseException) -> str:
    """An error in one line. One that no check foresaw also says its kind and where in methods/ it arose."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if METHODS in Path(frame.filename).parents), None)
    where = f", line {place.lineno} of {Path(place.filename).name}" if place else ""
    return f"{type(error).__name__}{where}: {error}"


def composed(found: dict, additions: dict) -> set[str]:
    """Names of every window method with each addition, but for those that `compose` refuses and those that
    are found.
    """
    names = set()
    for name, Method in found.items():
        if has_window(Method) and "+" not in name:
            names |= {f"{name}+{more}" for more in additions if wraps(additions[more]) or not chooses(Method)}
    return names - found.keys()


def has_window(Method) -> bool:
    from nanollm.window import WindowCache
    return isinstance(Method, type) and issubclass(Method, WindowCache)


def chooses(Method) -> bool:
    """Whether this window method has a selection of its own, which another would undo."""
    from methods.snap_kv import HighestScores
    return Method.select != HighestScores()


def wraps(knobs: dict) -> bool:
    """Whether an addition's selection leaves the choice to another one, its `inner`."""
    return hasattr(knobs["select"], "inner")


def compose(name: str, found: dict, additions: dict) -> partial:
    """The method of a name like "ada_kv+critical+residual": a window method and selections, the innermost
    first.
    """
    base, *more = name.split("+")
    Method, knobs = found[base], {}
    if len({*more}) < len(more):
        raise ValueError(f"{name} names an addition twice")

    select = Method.select
    for i, addition in enumerate(more):
        outer = additions[addition]["select"]
        if wraps(additions[addition]):
            outer = replace(outer, inner=select)
        elif chooses(Method):
            raise ValueError(f"{name}: {addition} chooses the entries itself and would undo {base}; "
                             "put it on another method")
        elif i:
            raise ValueError(f"{name}: {addition} chooses the entries itself and would undo {more[0]}; "
                             "put it first")
        select, knobs = outer, knobs | additions[addition]
    return partial(Method, **knobs | dict(select=select))


def pick(names: list[str]) -> dict:
    """Methods by name, all variants for no name. "ada_kv+critical" is a window method with an addition on
    top.

    "all" is every variant, and every window method with each addition.
    """
    found, additions, broken = methods()
    for file, why in broken.items():
        print(f"methods/{file} is left out: {why}", file=sys.stderr)
    both = composed(found, additions)
    if "all" in names:
        names = dict.fromkeys(["full", *sorted(found.keys() - {"full"} | both), *names])
        del names["all"]

    chosen = {}
    for name in names or found:
        base, *more = name.split("+")
        if name in found:
            chosen[name] = found[name]
        elif has_window(found.get(base)) and additions.keys() >= {*more}:
            chosen[name] = compose(name, found, additions)
        else:
            raise ValueError(f"unknown method {name!r}; known are {', '.join(found)}, all; "
                             f"on window methods, as in ada_kv+critical: {', '.join(additions)}")
    return chosen


def given(Method, **known) -> dict:
    """Those of the known values for which the method has a knob."""
    return {name: value for name, value in known.items() if name in inspect.signature(Method).parameters}


def has_budget(Method) -> bool:
    return "budget" in inspect.signature(Method).parameters


def calibrated(Method, model, encoding) -> dict:
    """What a method finds out about the decoder: knobs, or none."""
    return Method.calibrate(model, encoding) if hasattr(Method, "calibrate") else {}


def load(folder: Path, device: str, engine: str = "auto", dtype: str = "float32"):
    """Decoder and tokenizer of a folder. engine: "ours", "transformers", or "auto": ours, if it knows the
    family. dtype: of the weights, and so of keys and values, by torch's name.
    """
    import torch
    from nanollm import tokenizer
    from nanollm.hf import checkpoint
    if engine == "ours" or engine == "auto" and checkpoint.is_known(folder):
        model = checkpoint.from_hf(folder, getattr(torch, dtype), device)
    else:
        from nanollm.hf.bridge import Bridged
        model = Bridged(checkpoint.hf_model(folder, getattr(torch, dtype), device))
    own = folder / "tokenizer.tiktoken"
    encoding = tokenizer.load(own) if own.exists() else checkpoint.hf_tokenizer(folder)
    tokenizer.check_vocabulary(encoding, model.config.vocab_size)
    return model, encoding


def model_options(parser):
    """The options of every command that runs a model; `loaded` goes by them."""
    parser.add_argument("--model", type=Path, default=TINY,
                        help="folder of a checkpoint in Hugging Face layout")
    parser.add_argument("--engine", choices=("auto", "ours", "transformers"), default="auto",
                        help="whose decoder runs; auto: ours, if it knows the family")
    parser.add_argument("--device", default="cpu", help="as torch names it; default cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32",
                        help="of weights, keys and values; default float32")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as suits the model's size")


def loaded(args, folder: Path | None = None):
    """`load` of what the options say, or of another folder, and the threads that suit it."""
    model, encoding = load(folder or args.model, args.device, args.engine, args.dtype)
    set_threads(args.threads, sum(p.numel() for p in model.parameters()))
    return model, encoding
