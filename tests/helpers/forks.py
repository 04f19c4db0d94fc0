"""Run commands in separate processes that get only PATH, HOME and what a test adds.

Importing torch takes seconds and a fork hardly any time, so each command is a fork of a process
that imported torch and matplotlib. Nothing of the repository is imported before the fork.
"""

import json
import os
from pathlib import Path
import runpy
import signal
import subprocess
import sys
from tempfile import TemporaryDirectory

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


class Forks:
    def __init__(self, **environment: str):
        self.environment = dict(PATH=PATH, HOME=os.environ["HOME"]) | environment

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=self.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_):
        self.process.communicate()  # closes its stdin, so it ends

    def run(self, *words, cwd=Path(__file__).parents[2]) -> subprocess.CompletedProcess:
        """Run `python -m MODULE ...` or `python FILE ...` in `cwd`, as a user types it."""
        python, *words = map(str, words)
        assert python == "python" and (words[0] == "-m" or words[0].endswith(".py"))
        with TemporaryDirectory() as folder:
            streams = [f"{folder}/stdout", f"{folder}/stderr"]
            order = json.dumps([words, streams, str(cwd)])
            print(order, file=self.process.stdin, flush=True)
            code = int(self.process.stdout.readline())
            printed = [Path(file).read_text() for file in streams]
            return subprocess.CompletedProcess(words, code, *printed)


def serve():
    """Run each order of stdin in a fork, and print its exit code."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return begin(*json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def begin(words, streams, cwd):
    signal.alarm(300)  # at most 300 seconds
    for stream, file in enumerate([os.devnull, *streams]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), stream)
    sys.stdin = open(os.devnull)  # drop input that the parent has read ahead
    os.chdir(cwd)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = cwd
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).absolute().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    import matplotlib.figure  # noqa: F401, a second that each command saves
    import torch

    torch.set_num_threads(1)
    serve()
