"""The README: most of its commands run; its method works; its table is of stored rows."""

from pathlib import Path
import re
import shlex

import pytest
import torch

from common import checkpoint_of_two_layers
from lab import question_table, render_results
from methods.baselines.kvzip import KVzip
from nanollm import TINY
from nanollm.cache import make_cache
from nanollm.checkpoint import from_hf
from nanollm.generate import prefill

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(?:python)?\n(.*?)```", README, re.S)
COMMANDS = []
for line in "\n".join(BLOCKS).splitlines():
    command = line.split("  #")[0].strip()
    command = command.removeprefix("pip install -r requirements.txt && ")
    needs_more = "--all" in command or "lab.ruler" in command  # minutes; lm-eval
    if command.startswith("python -m") and not needs_more:
        COMMANDS.append(command)
ROWS = (
    "--documents 2 --lengths 256 --model {small} "
    "--json {folder}/rows.json --figure {folder}/compare.svg"
)
SMALLER = [  # what makes a long command a short one; the first that fits
    (" generate", ""),
    (" course", "--only chunks"),
    (" compress", ""),
    (" ask", ""),
    (" claims", "--claims P6 --documents 2"),
    (" --questions", "--keep 50 --model nanollm/tiny --figure {folder}/compare.svg"),
    ("--methods full", f"--keep 20 10 {ROWS}"),
    ("-m nanollm", ROWS),
]


@pytest.fixture(scope="module")
def done(typed, tmp_path_factory):
    """Return the results of COMMANDS, made shorter and run at the root with only PATH and HOME."""
    results = {}
    small = tmp_path_factory.mktemp("small")
    page = tmp_path_factory.mktemp("page") / "page.cache"
    asked = small / "ruler.jsonl"
    context = "a b " * 50
    asked.write_text(f'{{"context": "{context}", "question": "c", "answers": ["a"]}}')
    checkpoint_of_two_layers(small)
    for command in COMMANDS:
        folder = tmp_path_factory.mktemp("command")
        more = next(more for part, more in SMALLER if part in command).format(
            folder=folder, small=small
        )
        line = f"{command} {more}".replace("COPY", f"{folder}/copy").replace(
            "TEXT", f"{ROOT}/LICENSE"
        )
        line = line.replace("ruler.jsonl", str(asked))
        words = shlex.split(line.replace("FILE", str(page)))
        results[command] = typed(*words)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_runs(done, command):
    run = done[command]
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert "Traceback" not in run.stderr


def test_what_the_readme_names_exists():
    names = re.findall(r"`([\w.]+/[\w./]*)`|\]\(([\w./]+)\)", README)
    names = ["".join(pair) for pair in names]
    assert len(names) > 10
    for name in names:
        assert (ROOT / name).exists(), name


def test_the_table_of_ruler_is_made_of_stored_rows():
    frame = question_table.frame_of_rows(render_results.rows("ruler"))
    scores = question_table.wide(frame[frame.setting == "agnostic"], "score")
    table = question_table.percentages(scores.loc[question_table.judging(scores)])
    block = next(block for block in BLOCKS if "±" in block)
    ratios, *lines = [line.split() for line in block.strip().splitlines()]
    assert [float(cell) for cell in ratios[1::2]] == [*table]
    for method, *cells in lines:
        expected = [*filter(None, table.loc[method])]
        given = " ".join(cells).replace(" ±", "±").split()
        assert given == [cell.replace(" ", "") for cell in expected], method
    render_results.main(["--check"])  # RESULTS.md


def test_the_readme_s_method_multiplies_kvzip_s_scores_by_the_sizes_of_the_values():
    (code,) = (block for block in BLOCKS if "class KVzipByValue" in block)
    names = {}
    exec(code, names)
    model = from_hf(TINY)
    tokens = torch.arange(40)[None]
    layers = make_cache(model, names["KVzipByValue"], budget=8)
    prefill(model, tokens, layers)
    scores = KVzip(budget=8).scores(model, tokens, layers)
    own = layers[0].method.scores(model, tokens, layers)
    for layer, one, other in zip(layers, scores, own):
        size = layer.v.square().sum(-1).sqrt()
        torch.testing.assert_close(other, one * size)
