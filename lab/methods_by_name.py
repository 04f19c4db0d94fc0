"""Find methods by name: the variants in methods/, alone or as window methods with additions (a+b)."""

from dataclasses import replace
from functools import partial
from importlib import import_module
import inspect
from pathlib import Path
import sys
import traceback

from safetensors import safe_open
from safetensors.torch import save_file
import torch

from lab.command_line import set_threads
from lab.tasks import Tasks
from methods.baselines.snap_kv import SnapKV
from nanollm import checkpoint, gguf, tokenizer
from nanollm.cache import LayerCache
from nanollm.saved import fingerprint

METHODS = Path(__file__).parents[1] / "methods"
# a folder for each decoder
CALIBRATED = Path(__file__).parents[1] / "nanollm" / "calibrated"


def methods() -> tuple[dict, dict, dict]:
    """Return the variants by name, the additions by name, and the files left out, each with the reason.

    Full attention comes first. An addition is a dict with another selection for a window method.
    """
    variants, additions, broken = {}, {}, {}
    folders = METHODS, METHODS / "baselines", METHODS / "ours"
    for file in [file for folder in folders for file in sorted(folder.glob("*.py"))]:
        try:
            module = import_module(
                ".".join(file.relative_to(METHODS.parent).with_suffix("").parts)
            )
            found, more = module.variants, getattr(module, "additions", {})
            if taken := (variants | additions).keys() & {*found, *more}:
                raise ValueError(
                    f"another file already has a method {min(taken)!r}; choose another name"
                )
        except (Exception, SystemExit) as error:  # importing a file may raise anything
            broken[str(file.relative_to(METHODS))] = one_line(error)
            continue
        variants |= found
        additions |= more
    return (
        {"full": LayerCache} | dict(sorted(variants.items())),
        dict(sorted(additions.items())),
        broken,
    )


def one_line(error: BaseException) -> str:
    """Return an error in one line. Any but a ValueError also names its type and its line in methods/."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = next(
        (
            frame
            for frame in reversed(frames)
            if METHODS in Path(frame.filename).parents
        ),
        None,
    )
    where = f", line {place.lineno} of {Path(place.filename).name}" if place else ""
    return f"{type(error).__name__}{where}: {error}"


def pick(names: list[str]) -> dict:
    """Return the named methods, such as "ada_kv+critical"; every variant if `names` is empty."""
    variants, additions, broken = methods()
    for file, why in broken.items():
        print(f"methods/{file} is left out: {why}", file=sys.stderr)
    chosen = {}
    for name in names or variants:
        base, *more = name.split("+")
        if name in variants:
            chosen[name] = variants[name]
        # of a window method
        elif hasattr(variants.get(base), "select") and additions.keys() >= {*more}:
            chosen[name] = compose(
                variants[base], [additions[addition] for addition in more]
            )
        else:
            raise ValueError(
                f"unknown method {name!r}; known are {', '.join(variants)}; "
                f"on window methods, as in ada_kv+critical: {', '.join(additions)}"
            )
    return chosen


def compose(Method, additions: list[dict]) -> partial:
    """Return a window method with the options of these additions, from left to right.

    A selection with an `inner` wraps the one to its left; any other takes the place of SnapKV's.
    """
    options = dict(select=Method.select)
    for addition in additions:
        outer = addition["select"]
        if hasattr(outer, "inner"):
            outer = replace(outer, inner=options["select"])
        elif options["select"] != SnapKV.select:
            raise ValueError(
                f"{type(outer).__name__} would undo {type(options['select']).__name__}; name it "
                "first, on a method that chooses as SnapKV does"
            )
        options |= addition | dict(select=outer)
    return partial(Method, **options)


def given(Method, **known) -> dict:
    """Return those of the given values for which the method has an option."""
    return {
        name: value
        for name, value in known.items()
        if name in inspect.signature(Method).parameters
    }


def has_budget(Method) -> bool:
    """Return whether a method has the option `budget`."""
    return "budget" in inspect.signature(Method).parameters


def calibrated(Method, model, encoding, folder: Path | None = None) -> dict:
    """Return the options that a method measures on the decoder, such as its gates; {} if none.

    folder: keeps them in METHOD.safetensors. ValueError if that file is of another decoder. Without
    a folder, those that ship are used, if they are of this decoder.
    """
    if not hasattr(Method, "calibrate"):
        return {}
    calibrates = next(base for base in Method.__mro__ if "calibrate" in vars(base))
    name, own = f"{calibrates.__name__}.safetensors", fingerprint(model)
    files = [folder / name] if folder else CALIBRATED.glob(f"*/{name}")
    for file in filter(Path.exists, files):
        with safe_open(file, "pt") as stored:
            if stored.metadata().get("decoder") == own:
                return {option: stored.get_tensor(option) for option in stored.keys()}
        if folder:
            raise ValueError(
                f"{file} was calibrated on another decoder; name another folder"
            )
    options = Method.calibrate(model, Tasks(encoding, "train"))
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(options, folder / name, {"decoder": own})
    return options


# ---- the model that a command runs ---


def load(
    folder: str | Path,
    device: str = "cpu",
    engine: str = "auto",
    dtype: str = "float32",
):
    """Return the decoder and the tokenizer of a folder, of a GGUF file, or of "smollm2".

    engine: "ours", "transformers", or "auto" (ours if it supports the model's family). dtype:
    torch's name of the number format of weights, keys and values.
    """
    folder = Path(folder)
    if folder.suffix == ".gguf" or folder == Path(gguf.SMOLLM2) and not folder.exists():
        model, encoding = gguf.read(folder, getattr(torch, dtype), device)
        if engine == "transformers":
            # here, because transformers takes seconds to import
            from nanollm.bridge import Bridged

            model = Bridged(checkpoint.as_hf(model))
        return model, encoding
    if engine == "ours" or engine == "auto" and checkpoint.is_known(folder):
        model = checkpoint.from_hf(folder, getattr(torch, dtype), device)
    else:
        # here, because transformers takes seconds to import
        from nanollm.bridge import Bridged

        model = Bridged(checkpoint.hf_model(folder, getattr(torch, dtype), device))
    own = folder / "tokenizer.tiktoken"
    encoding = tokenizer.load(own) if own.exists() else checkpoint.hf_tokenizer(folder)
    tokenizer.check_vocabulary(encoding, model.config.vocab_size)
    return model, encoding


def loaded(args, folder: Path | None = None):
    """Return `load` for the options of `command_line.model_options`; set the threads too. folder:
    another."""
    model, encoding = load(folder or args.model, args.device, args.engine, args.dtype)
    set_threads(args.threads, sum(p.numel() for p in model.parameters()))
    return model, encoding
