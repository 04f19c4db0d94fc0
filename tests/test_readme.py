"""The README: commands and snippets run as a reader types them; its first table is of stored rows."""

from pathlib import Path
import re
import shlex

import pytest
import torch

from common import checkpoint_of_two_layers
from lab import render_results, table
from methods.baselines.kvzip import KVzip
from methods.baselines.random_eviction import RandomEviction
from nanollm import TINY

from lab.benchmark import Benchmark
from lab.evaluate import maker
from lab.tasks import Tasks
from nanollm.cache import make_cache
from nanollm.checkpoint import from_hf
from nanollm.generate import prefill
from nanollm.tokenizer import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(?:python)?\n(.*?)```", README, re.S)
COMMANDS = {
    line.split("  #")[0]
    .strip()
    .removeprefix("pip install -r requirements.txt && "): None
    for block in BLOCKS
    for line in block.splitlines()
}
COMMANDS = [
    line for line in COMMANDS if line.startswith("python -m") and "--all" not in line
]
ROWS = "--documents 2 --lengths 256 --model {small} --json {folder}/rows.json --figure {folder}/compare.svg"
SMALLER = [  # what makes a long command a short one; the first that fits
    (" generate", ""),
    (" course", "--only chunks"),
    (" compress", ""),
    (" ask", ""),
    (" claims", "--claims P6 --documents 2"),
    ("--methods full", f"--keep 20 10 {ROWS}"),
    ("--tasks hard", f"--methods full --keep 25 {ROWS}"),
    ("-m nanollm", ROWS),
]


@pytest.fixture(scope="module")
def done(typed, tmp_path_factory):
    """Every command of the README and its folder: run from the root, with only PATH and HOME."""
    results, small = {}, tmp_path_factory.mktemp("small")
    page = tmp_path_factory.mktemp("page") / "page.cache"
    checkpoint_of_two_layers(small)
    for command in COMMANDS:
        folder = tmp_path_factory.mktemp("command")
        more = next(more for part, more in SMALLER if part in command).format(
            folder=folder, small=small
        )
        line = f"{command} {more}".replace("COPY", f"{folder}/copy").replace(
            "BOOK", f"{ROOT}/LICENSE"
        )
        words = shlex.split(line.replace("FILE", str(page)))
        results[command] = folder, typed(*words)
    return results


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_runs(done, command):
    _, run = done[command]
    assert run.returncode == 0 and run.stdout and "Traceback" not in run.stderr, (
        run.stderr
    )


def test_what_the_readme_names_exists():
    names = re.findall(r"`([\w.]+/[\w./]*)`|\]\(([\w./]+)\)", README)
    assert len(names) > 10 and not [
        name for name in map("".join, names) if not (ROOT / name).exists()
    ]


def test_the_first_table_is_made_of_stored_rows():
    rows = render_results.by_method("smollm2")
    lines = (
        next(block for block in BLOCKS if "16-bit" in block).strip().splitlines()[2:]
    )
    for method, budget, *cells in map(str.split, lines):
        row = rows[method, None if budget == "all" else float(budget) / 100]
        assert [method, budget, *cells] == table.show(row, short=True).split()
    assert [line.split()[0] for line in lines] == [*table.SHOWN]
    render_results.main(["--check"])  # RESULTS.md


def snippet():
    """The method that the README defines."""
    (code,) = (block for block in BLOCKS if "class KVzipByValue" in block)
    exec(code, found := {})
    return found["KVzipByValue"]


def test_the_readme_s_method_multiplies_kvzip_s_scores_by_the_sizes_of_the_values():
    model, tokens = from_hf(TINY), torch.arange(40)[None]
    caches = make_cache(model, snippet(), budget=8)
    prefill(model, tokens, caches)
    scores, own = (
        Method.scores(model, tokens, caches) for Method in (KVzip, snippet())
    )
    for layer, (one, other) in enumerate(zip(scores, own)):
        for score, value, found in zip(
            one.flatten(), caches[layer].v.flatten(0, 2), other.flatten()
        ):
            assert found == pytest.approx(
                score * sum(x**2 for x in value.tolist()) ** 0.5
            )


def test_the_readme_s_method_beats_random_eviction():
    model, tasks = from_hf(TINY), Tasks(load(TINY / "tokenizer.tiktoken"), "test")
    batches = {
        task: tasks.batch(task, 0, 4, 256) for task in ("needle", "pairs", "few_shot")
    }
    read = Benchmark.read(model, batches, None)
    own, random = (
        read.measured(model, maker(model, Method, 0.25))[0]
        for Method in (snippet(), RandomEviction)
    )
    assert all(own[column].mean() > random[column].mean() for column in own)
