"""The process that runs one submitted function for the grader.

It is forked before the grader imports a test, so it holds no expected values. It answers calls of
course/ASSIGNMENT/adapter.py. The submitted file takes the place of ours when it is imported.
"""
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader
import io
import linecache
from multiprocessing.connection import Connection
import os
from pathlib import Path
import resource
import sys
from threading import Thread
import traceback

import psutil
import torch

from lab.processes import end_with_parent

ROOT = Path(__file__).resolve().parents[1]
GiB = 2 ** 30
MEMORY, SECONDS = 2 * GiB, 120  # limits of a process: bytes, beside what it has when forked; processor time


class Submitted(MetaPathFinder, Loader):
    """Imports the submitted source in place of our file."""

    def __init__(self, file: str, source: str):
        self.module = file.removesuffix(".py").replace("/", ".")
        self.path, self.source = str(ROOT / file), source
        linecache.cache[self.path] = len(source), None, source.splitlines(keepends=True), self.path

    def find_spec(self, name, path, target=None):
        return spec_from_loader(name, self, origin=self.path) if name == self.module else None

    def exec_module(self, module):
        exec(compile(self.source, self.path, "exec"), vars(module))


def serve(connection: Connection, assignment: str, file: str, source: str):
    """Answer calls until the grader ends this process. `source` takes the place of the text of `file`."""
    Thread(target=end_with_parent, daemon=True).start()
    os.setsid()  # what the submission starts is in its group, and ends with it
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in 1, 2:  # the grader prints its results there
        os.dup2(nowhere, stream)
    sys.meta_path.insert(0, Submitted(file, source))
    while True:
        connection.send_bytes(answer(f"course.{assignment}.adapter", *unpacked(connection.recv_bytes())))


def answer(adapter: str, call: str, args: bytes) -> bytes:
    """Return the packed result of a function of the adapter module, or what it raised.

    args: its packed keyword arguments. `changed` names the tensors among them that the call changed.
    """
    given, before = unpacked(args), unpacked(args)
    try:
        value = getattr(import_module(adapter), call)(**given)
        changed = [name for name, x in before.items()
                   if isinstance(x, torch.Tensor) and not torch.equal(x, given[name])]
        return packed(dict(value=value, changed=changed))
    except BaseException as error:
        return packed(dict(raised=described(error)))


def described(error: BaseException) -> dict[str, str]:
    """Return the error's kind, message and place, and a traceback through nanollm/ and methods/."""
    theirs = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)
              if frame.f_code.co_filename.startswith((f"{ROOT}/nanollm/", f"{ROOT}/methods/"))]
    place = ""
    if theirs:  # count lines from the function's start: the file may be put together from two
        frame, line = theirs[-1]
        place = f"line {line - frame.f_code.co_firstlineno + 1} of {frame.f_code.co_name}"
    trace = "".join(traceback.StackSummary.extract(theirs).format()).replace(f"{ROOT}/", "")
    return dict(kind=type(error).__name__, message=str(error)[:2000], place=place, trace=trace[:4000])


def packed(x) -> bytes:
    """Return the bytes of x: tensors, numbers, strings, None, and lists, tuples and dicts of these."""
    data = io.BytesIO()
    torch.save(x, data)
    return data.getvalue()


def unpacked(data: bytes):
    """Return what `packed` made the bytes of. Code in them is not run: weights_only refuses it."""
    return torch.load(io.BytesIO(data), weights_only=True)
