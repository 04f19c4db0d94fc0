"""Run commands as python -m nanollm does, and lines of bash."""

from pathlib import Path
import re
import subprocess
import sys

import pytest

from nanollm.__main__ import main

ROOT = Path(__file__).parents[2]


def refused(capsys, arguments, message) -> str:
    """Check that a command ends with exit code 2 and an error line; return its output before."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, error = capsys.readouterr()
    line = error.splitlines()[-1]
    assert stop.value.code == 2
    assert line.startswith("error: ")
    assert re.search(message, line), line
    return out


def in_shell(command: str, *python: str):
    """Run a line of bash, in which "$@" is Python with arguments; its output is buffered."""
    script = f"set -o pipefail; unset PYTHONUNBUFFERED; {command}"
    line = ["bash", "-c", script, "-", sys.executable, *python]
    return subprocess.run(line, cwd=ROOT, timeout=300, capture_output=True, text=True)
