"""Load what a command runs: a decoder, its tokenizer, and what methods learn of it."""

from functools import lru_cache
import os
from pathlib import Path
import sys

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
import torch

from lab.command_line import set_threads
from lab.methods_by_name import Variant
from lab.saved import fingerprint
from lab.tasks import Tasks
from nanollm import checkpoint, gguf, tokenizer
from nanollm.block_linear import BYTES, fast_in_bfloat16, number_format

# what is downloaded of a model: never pickles
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt"]
# a folder for each decoder
CALIBRATED = Path(__file__).parents[1] / "nanollm" / "calibrated"


def load(
    folder: str | Path,
    device: str = "cpu",
    engine: str = "auto",
    dtype: str = "auto",
):
    """Return decoder and tokenizer of a folder, a GGUF file, "smollm2", or an id of the hub.

    engine: "ours", "transformers", or "auto" (ours if it supports the model's family). dtype:
    torch's name of the number format of weights, keys and values; "4bit", a GGUF file's blocks as
    they are (block_linear.py); or "auto" (a GGUF file as for 4bit, if `refusal` allows it; else
    float32). ValueError if "4bit" is not possible, or refused.
    """
    folder = Path(folder)
    is_smollm2 = folder == Path(gguf.SMOLLM2) and not folder.exists()
    is_file = folder.suffix == ".gguf" or is_smollm2
    if not is_file and not folder.is_dir():
        folder = downloaded(folder)
    if dtype in ("auto", "4bit"):
        why = refusal(device)
        if not is_file:
            why = f"{folder} is no GGUF file"
        elif engine == "transformers":
            why = "transformers has no such layers"
        if not why:
            numbers = torch.bfloat16 if fast_in_bfloat16() else torch.float32
            found = gguf.read(folder, numbers, device, packed=True)
            if dtype == "auto" or number_format(found[0]) == dtype:
                return found
            why = f"{folder} has no blocks of {', '.join(BYTES)}"
        if dtype == "4bit":
            raise ValueError(f"dtype is 4bit, but {why}; use float32 or bfloat16")
        dtype = "float32"
    numbers = getattr(torch, dtype)
    is_ours = is_file or checkpoint.is_known(folder)
    if engine != "auto":
        is_ours = engine == "ours"
    if is_file:
        model, encoding = gguf.read(folder, numbers, device)
        return model if is_ours else bridged(checkpoint.as_hf(model)), encoding
    if is_ours:
        model = checkpoint.from_hf(folder, numbers, device)
    else:
        model = bridged(checkpoint.hf_model(folder, numbers, device))
    return model, tokenizer_of(folder, model)


def downloaded(name: Path) -> Path:
    """Return the folder of a model of the Hugging Face hub. ValueError if the hub gives none."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(str(name), allow_patterns=HUB_FILES)
    except Exception:  # of many kinds: no such model, no network, no rights
        raise ValueError(
            f"{name} is no folder here, and the Hugging Face hub does not give it (offline?); "
            "name a folder that save_pretrained wrote, or a GGUF file"
        ) from None
    return Path(found)


def refusal(device: torch.device | str) -> str | None:
    """Return why the product in 4 bits is not used on this machine, or None if it is.

    PyTorch has it on every processor, but without vector instructions it can take over 100 times as
    long as in 32 bits.
    """
    if not str(device).startswith("cpu"):
        return f"it runs on the CPU, and the device is {device}"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX512":
        return f"it needs a processor with AVX512, and this one has {capability}"
    return None


def bridged(model):
    """Return a model of transformers, called as our decoder."""
    # here, because transformers takes seconds to import
    from nanollm.bridge import Bridged

    return Bridged(model)


def tokenizer_of(folder: Path, model):
    """Return the tokenizer in a model's folder. ValueError if it does not suit the model."""
    own = folder / "tokenizer.tiktoken"
    encoding = tokenizer.load(own) if own.exists() else checkpoint.hf_tokenizer(folder)
    tokenizer.check_vocabulary(encoding, model.config.vocab_size)
    return encoding


def loaded(args, folder: Path | None = None):
    """Return `load` for the options of `command_line.model_options`, and set the threads.

    folder: of a model in place of the one that --model names.
    """
    folder = folder or args.model
    model, encoding = load(folder, args.device, args.engine, args.dtype)
    if args.dtype == "auto" and number_format(model) == "4bit":
        print(
            f"{folder}: weights in 4 bits, since this processor is fast with them; "
            "--dtype float32 has them in 32",
            file=sys.stderr,
        )
    set_threads(args.threads, sum(p.numel() for p in model.parameters()))
    return model, encoding


def calibrated(variant: Variant, model, encoding, folder: Path | None = None) -> dict:
    """Return the options that a method learns of the decoder, such as its gates; {} if none.

    folder: keeps them in METHOD.safetensors. ValueError if that file is of another decoder. Without
    a folder, those that ship are used, if they are of this decoder.
    """
    kind = variant.calibrates
    if kind is None:
        return {}
    name = f"{kind.__name__}.safetensors"
    decoder = fingerprint(model)
    for file in [folder / name] if folder else CALIBRATED.glob(f"*/{name}"):
        if not file.exists():
            continue
        try:
            with safe_open(file, "pt") as stored:
                if stored.metadata().get("decoder") == decoder:
                    return {name: stored.get_tensor(name) for name in stored.keys()}
        except (AttributeError, SafetensorError):  # without metadata, or cut off
            raise ValueError(
                f"{file} does not hold what a method learned, or is damaged; remove it"
            ) from None
        if folder:
            raise ValueError(
                f"{file} was calibrated on another decoder; name another folder"
            )
    if folder:  # found out before minutes of learning
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ValueError(f"{folder} is write-protected; name another")
    learn = kind.calibrate
    options = learn(model, training_tasks(encoding))
    if folder:
        save_learned(options, folder / name, model)
    return options


def save_learned(options: dict, file: Path, model):
    """Write what a method learned of a decoder, as `calibrated` reads it."""
    save_file(options, file, {"decoder": fingerprint(model)})


class TrainingTasks(Tasks):
    """The tasks of the training text."""

    def asked(self, config) -> list:
        """Return the contexts from which question_gates learns, as `lessons.Asked`."""
        from lab.lessons import lessons  # which imports this file

        return lessons(self, config)


@lru_cache(1)
def training_tasks(encoding) -> TrainingTasks:
    """Return the tasks from which methods learn; the same for all methods of a command."""
    return TrainingTasks(encoding, "train")
