"""What commands share: one-line errors, quick help, and threads."""

import re

import pytest

from commands import in_shell, refused
from lab.command_line import set_threads


@pytest.mark.parametrize(
    "end, flush", [("| true", ""), ("> /dev/full", ", flush=True")]
)
def test_output_that_cannot_be_written_is_one_line(end, flush):
    code = (
        "import time; from lab import command_line; time.sleep(0.3)\n"
        f"command_line.command(lambda: print('a text'{flush}))"
    )
    done = in_shell(f'"$@" {end}', "-c", code)
    assert done.returncode == 2, done.stderr
    line = "error: (nobody reads|.*No space left).*\n"
    assert re.fullmatch(line, done.stderr), done.stderr


@pytest.mark.parametrize(
    "argument, code", [("--help", 0), ("nope", 2), ("--keep=0", 2)]
)
def test_help_and_mistakes_are_answered_before_torch_is_loaded(argument, code):
    done = in_shell('"$@"', "-X", "importtime", "-m", "nanollm", argument)
    assert done.returncode == code
    lines = done.stderr.splitlines()
    loaded = {line.rpartition("|")[2].strip() for line in lines}
    assert "lab.command_line" in loaded
    assert not loaded & {"torch", "numpy"}


def test_threads_are_those_asked_for_or_one_for_small_models(monkeypatch):
    asked = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    for threads, parameters in (3, 10**6), (0, 10**6), (0, 10**9), (3, 10**9):
        set_threads(threads, parameters)
    assert asked == [3, 1, 3]


def test_an_unknown_command_is_one_line(capsys):
    message = "unknown command 'nope'; known are ask, claims, compare"
    assert refused(capsys, ["nope"], message) == ""
