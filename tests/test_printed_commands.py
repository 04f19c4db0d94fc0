"""Commands in DOCUMENTS have arguments that nanollm or lab accepts, but for LEFT_OUT."""

import argparse
from importlib import import_module
from pathlib import Path
import re
import shlex

import pytest

from lab.methods_by_name import pick
from nanollm.__main__ import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["*.md", "notebooks/*.py", "course/*/handout.py"]
# one needs kvpress, two have no parser, and the others are mentioned without their arguments
LEFT_OUT = re.compile(
    "lab.kvpress|lab.corpus|lab.render_results|--help|nanollm (compress|ask|teach)$"
)


READER_S = {"kvzip_by_value", "kvzip_by_value@4", "NAME"}  # methods of the reader's own


class Accepted(Exception):
    """The arguments were read."""


def printed() -> list[str]:
    """Return the commands of nanollm and lab in DOCUMENTS, but for LEFT_OUT."""
    found = set()
    for pattern in DOCUMENTS:
        for file in ROOT.glob(pattern):
            text = file.read_text()
            for start in re.finditer(r"python -m (nanollm|lab)\b", text):
                found.add(re.split("`|\n|  +#| && | \\|", text[start.start() :])[0])
    return sorted(x for x in found if not LEFT_OUT.search(x.strip()))


@pytest.mark.parametrize("command", printed())
def test_its_arguments_are_accepted(command, monkeypatch):
    def parse(parser, *given):
        args = read(parser, *given)
        names = {*(getattr(args, "methods", None) or ())} - READER_S
        pick([*names, "full"])  # ValueError if one is unknown
        raise Accepted

    read = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    _, _, module, *argv = shlex.split(command.rstrip(" .,;:…"))
    run = main if module == "nanollm" else import_module(module).main
    with pytest.raises(Accepted):
        run(argv)
