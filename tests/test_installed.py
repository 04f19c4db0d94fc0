"""An installed copy runs from another folder: four packages and their data files are in it."""

from pathlib import Path
import shutil
import subprocess
import sys

import pytest

from forks import Forks

ROOT = Path(__file__).parents[1]
PACKAGES = ("nanollm", "methods", "kernels", "lab")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder into which pip has installed a copy of this repository."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=skip)
    for file in "pyproject.toml", "LICENSE":
        shutil.copy(ROOT / file, source)
    target = folder / "target"
    options = "--no-deps --no-build-isolation --no-compile --quiet --target".split()
    command = [sys.executable, "-m", "pip", "install", *options, target, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


def test_every_file_is_installed(installed):
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                if file.suffix not in (".part", ".pyc"):
                    place = file.relative_to(ROOT)
                    assert (installed / place).exists(), place


@pytest.mark.parametrize(
    "command, says",
    [
        ("--methods full kvzip@4 --keep 25 --documents 2 --lengths 256", "kvzip@4"),
        ("generate", "Right answer: 2356; snap_kv answers 2356, the full"),
        (
            "claims --claims P6 --documents 2 --length 128",
            "verdict at 50, 25, 12.5, 6.25 %",
        ),
    ],
)
def test_commands_run_in_another_folder(installed, tmp_path, command, says):
    with Forks(PYTHONPATH=str(installed)) as forks:
        done = forks.run("python", "-m", "nanollm", *command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
