"""What all commands share: errors of one line, files read and written, options, processes and threads.

Importing this file takes no time: `--help` and mistakes on the command line are answered before torch loads.
"""
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
import json
import os
from pathlib import Path
from select import select as wait
import signal
import sys

from nanollm import TINY

LONGEST = 10 ** 8  # bytes of a text that is read
DTYPES = "float32", "bfloat16", "float16"


def ranks() -> tuple[int, int]:
    """This process's number and how many there are, as torchrun says it; (0, 1) for a process alone."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ValueError(f"RANK {rank!r} must be a whole number below WORLD_SIZE {world!r}, as torchrun sets "
                         "them; unset both for a process alone")
    return int(rank), int(world)


def load_module(name: str):
    """Import a module that takes seconds to load. Ctrl-C meanwhile ends the program silently."""
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return import_module(name)
    finally:
        signal.signal(signal.SIGINT, heard)


def model_options(parser):
    """Add the options of every command that runs a model; `registry.loaded` goes by them."""
    parser.add_argument("--model", type=Path, default=TINY,
                        help="folder of a checkpoint in Hugging Face layout")
    parser.add_argument("--engine", choices=("auto", "ours", "transformers"), default="auto",
                        help="whose decoder runs; auto: ours, if it knows the family")
    parser.add_argument("--device", default="cpu", help="as torch names it; default cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32",
                        help="of weights, keys and values; default float32")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as suits the model's size")


def set_threads(asked: int, parameters: int):
    """PyTorch's CPU threads: as many as asked for; by 0 what suits a decoder of so many parameters.

    A small one gets one. A second thread with a core to itself saves a sixth of the time at 2048 tokens, and
    none at 128 (RESULTS.md). But two wait for each other at every operation, which takes long on a busy core.
    """
    import torch
    from nanollm.check import whole
    if whole("threads", asked, 0, 1024):
        torch.set_num_threads(asked)
    elif parameters < 50_000_000:
        torch.set_num_threads(1)


def command(run: Callable, *arguments):
    """Run a command of a shell: whatever its user can cause becomes one line and exit code 2. A bug keeps its
    traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run(*arguments)
        print(end="", flush=True)  # where stdout is closed, nothing
    except BrokenPipeError:
        fail("nobody reads the output any more")
    except KeyboardInterrupt:
        fail("interrupted")
    except (ValueError, OSError, MemoryError, RecursionError) as error:
        fail(str(error) or "not enough memory")
    except RuntimeError as error:
        if "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        fail(f"not enough memory ({error})")
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a tokenizer's own, in Rust; it is no Exception
            raise
        fail(f"the tokenizer breaks off ({error}); give another text, or a model with another tokenizer")


def fail(why: str):
    """One line on stderr and exit code 2."""
    try:
        print(end="", flush=True)  # where stdout is closed, nothing
    except OSError:  # Python's own flush at the end would fail again, in other words and with another code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        print("error:", " ".join(why.split()), file=sys.stderr, flush=True)
    except OSError:  # it may be closed as well
        os._exit(2)
    sys.exit(2)


def check_output(file: Path, what: str, ours: Callable[[bytes], bool]) -> bytes:
    """What `file` holds. ValueError or OSError, before any work, unless it can be written and holds nothing
    or what this program wrote.
    """
    if not file.parent.is_dir():
        raise ValueError(f"folder {file.parent} for {file.name} is not there; make it first")
    with suppress(FileNotFoundError):
        file.stat()  # an OSError where a link leads to itself
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no file; name one for the {what}")
    if file.exists() and not os.access(file, os.W_OK):
        raise ValueError(f"{file} must not be written to; name another file for the {what}")
    held = file.read_bytes() if file.exists() else b""
    if held and not ours(held):
        raise ValueError(f"{file} holds something else than the {what} of an earlier run; "
                         "name another file or remove it")
    replace(file, None)
    return held


def read_text(file: Path) -> str:
    """The text of a file or a pipe. ValueError if it is none, is too long, or nobody writes to the pipe."""
    pipe = file.is_fifo()
    opener = (lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) if pipe else None  # or it may wait
    with open(file, "rb", opener=opener) as source:
        data = b""
        if pipe:
            wait([source], [], [], 2)
            with suppress(BlockingIOError):  # one who writes is there, and slow
                if not (data := os.read(source.fileno(), 1)):
                    raise ValueError(f"nobody writes to {file}; name a file that holds a text")
            os.set_blocking(source.fileno(), True)
        data += source.read(LONGEST)
    if len(data) >= LONGEST:
        raise ValueError(f"{file} is longer than a text may be, {LONGEST // 10 ** 6} MB; name a shorter one")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8 ({error.reason} at byte {error.start}); "
                         "name another file") from error
    if "\0" in text:
        raise ValueError(f"{file} is not text (it holds zeros); name another file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(data: bytes):
    """What JSON text holds; None for anything else."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def replace(file: Path, data: bytes | None, before: bytes | None = None) -> bytes | None:
    """Write data to a new file and put it in place at once, so that what was there is whole until then. None:
    only try. Returns data.

    before: what this run left there; ValueError if it is something else now.
    """
    if before is not None and file.exists() and file.read_bytes() != before:
        raise ValueError(f"{file} was changed by another program, perhaps a second run; it stays as it is, "
                         "and this run stops: give each run a file of its own")
    part = file.resolve().with_name(f".{file.name}.{os.getpid()}")
    try:
        with part.open("xb") as out:
            out.write(data or b"")
        if data is not None:
            part.replace(file.resolve())
    finally:
        part.unlink(missing_ok=True)
    return data
