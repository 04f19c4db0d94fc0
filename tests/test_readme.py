"""The README: commands and snippets run as a reader types them, and its numbers are those of results/."""
import json
import os
from pathlib import Path
import re
import shlex
import subprocess

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common import B, D, FREQ, G, H, checkpoint_of_two_layers, link
from experiments import render as results
from forks import PATH, Forks
from methods.random_eviction import RandomEviction
from nanollm import SHIPPED, TINY
from nanollm.commands.table import ACCURACIES, SHOWN
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.benchmark import Benchmark
from nanollm.measure.evaluate import maker
from nanollm.measure.tasks import Tasks
from nanollm.tokenizer import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(?:python)?\n(.*?)```", README, re.S)
COMMANDS = {line.split("  #")[0].strip().removeprefix("pip install -r requirements.txt && "): None
            for block in BLOCKS for line in block.splitlines()}
COMMANDS = [line for line in COMMANDS if re.match("python |torchrun ", line) and "--all" not in line]
COMMANDS += ["python -m nanollm generate"]  # no part of --all is short; --methods all has its table
ROWS = "--documents 2 --lengths 256 --model {small} --json {folder}/rows.json --figure {folder}/compare.svg"
SMALLER = [  # what makes a long command a short one; the first that fits
    (" train", "--out {folder}/run --steps 1 --documents 1"), ("generate --method", "--tokens 3"),
    (" plan", "--methods full snap_kv+critical quantized_2"), (" generate", ""), (" course", "--only chunks"),
    (" claims", "--claims P6 --documents 2"),
    ("experiments.speed", "--methods snap_kv --lengths 168 --new 1 --repeat 1 --model {small}"),
    ("experiments.growth", "--lengths 16 24 --methods full h2o"),
    ("experiments.large", "--device cpu --shape small --methods full h2o --lengths 9 --new 1"),
    ("--methods full", f"--budgets 20 10 {ROWS}"),
    ("--methods all", f"--budgets 25 --methods snap_kv snap_kv+residual {ROWS}"),
    ("torchrun", f"--methods full h2o --budgets 20 10 {ROWS}"), ("-m nanollm", ROWS)]


def run(forks: Forks, command: str, folder: Path, small: Path) -> subprocess.CompletedProcess:
    """In a new process, from the root, with nothing but PATH and HOME in its environment."""
    more = next(more for part, more in SMALLER if part in command)
    more = more.format(folder=folder, small=small)
    words = shlex.split(f"{command} {more}".replace("COPY", str(folder / "copy")))
    if words[0] == "python":
        return forks.run(words, folder, ROOT)
    return subprocess.run(words, cwd=ROOT, text=True, env=dict(PATH=PATH, HOME=os.environ["HOME"]),
                          capture_output=True, timeout=300, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Every command of the README, run, and its folder."""
    small, *folders = (tmp_path_factory.mktemp("command") for _ in range(len(COMMANDS) + 1))
    checkpoint_of_two_layers(small)
    with Forks() as forks:
        return {command: (run(forks, command, folder, small), folder)
                for command, folder in zip(COMMANDS, folders)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_runs(done, command):
    run, _ = done[command]
    assert run.returncode == 0 and run.stdout and "Traceback" not in run.stderr, run.stderr
    if command == "python -m nanollm":
        # the short table; this small checkpoint answers nothing
        assert run.stdout.count("cannot judge this model") == 3
        assert run.stdout.count(" 25 % ") == len(SHOWN) - 2  # but for full and quantized_2


def test_two_processes_make_the_rows_of_one(done):
    (one, folder), (two, other) = (next(done[command] for command in COMMANDS if part in command)
                                   for part in ("--methods full", "torchrun"))
    for a, b in zip(*(json.loads((x / "rows.json").read_text()) for x in (folder, other)), strict=True):
        a, b = (row | {f"each {key}": x for key, x in row["each"].items()} for row in (a, b))
        for key in a.keys() - {"tokens_per_s", "each"}:
            exact = a[key] is None or isinstance(a[key], str)
            assert a[key] == b[key] if exact else np.allclose(a[key], b[key], 1e-3, 1e-5), key
    shown = [[line.split()[:2] for line in run.stdout.splitlines() if line.startswith(("full ", "h2o "))]
             for run in (one, two)]
    assert shown[0] == shown[1] == [["full", "all"], ["h2o", "20"], ["h2o", "10"]]


def test_the_readme_is_short_and_what_it_names_exists():
    assert README.count("\n") <= 150 and len(README.split()) <= 1800 and len(COMMANDS) >= 8
    names = re.findall(r"`((?:nanollm|methods|notebooks|tests|results)/[\w./]*)`|\]\(([\w./]+)\)", README)
    assert len(names) > 10
    for name in map("".join, names):
        assert (ROOT / name).exists(), name
    tree = re.search(r"```\n(nanollm/ .*?)```", README, re.S)[1]
    for folder in ("nanollm", "methods"):
        section = re.search(rf"^{folder}/.*?(?=^\w|\Z)", tree, re.S | re.M)[0]
        for name in re.findall(r"[\w/]+\.py|\w+/(?= )", section.split("\n", 1)[1]):
            assert (ROOT / folder / name).exists(), name
    missing = {file.name for file in (ROOT / "nanollm").glob("[!_]*.py")} - {*re.findall(r"\w+\.py", tree)}
    assert not missing


# ---- its numbers ---


def stored() -> dict:
    """The rows of stored/all.txt by method and budget: budget, KiB, six accuracies, perplexity, KL …"""
    rows = {}
    for line in (ROOT / "experiments" / "stored" / "all.txt").read_text().splitlines():
        if found := re.fullmatch(r"(\S+) +([\d.]+ %|all) +(\d+(?: +[\d.]+){10})", line):
            rows[found[1], found[2]] = found[3].split()
    return rows


def test_the_tables_are_made_of_stored_rows(monkeypatch, tmp_path):
    table = next(block for block in BLOCKS if block.lstrip().startswith("16-bit"))
    rows, lines = stored(), table.splitlines()[2:]
    for line in lines:
        name, budget, cells = re.fullmatch(r"(\S+) +([\d.]+ %|all) +(.*)", line).groups()
        row = rows[name, budget]
        assert cells.split() == [*row[:7], row[8]], name  # KiB, six accuracies, KL
    assert [line.split()[0] for line in lines] == [*SHOWN] and len(rows) >= 80
    results.main(["--check"])  # RESULTS.md
    monkeypatch.setattr(results, "TARGET", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results, "run", None)
    for asked, told in (["--check"], "RESULTS.md is not what"), (["short", "nope"], "unknown section 'nope'"):
        with pytest.raises(SystemExit, match=told):
            results.main(asked)


def test_both_decoders_have_a_column_in_the_results(monkeypatch, tmp_path):
    assert results.SHIPPED == SHIPPED
    told = json.loads((TINY / "train.json").read_text()) | {"note": "In two stretches."}
    other = told | {"minutes": 7.2, "exact_match": {"needle_256": dict(value=0.5, standard_error=0.031)}}
    for name, run in ("built", told), ("learned", {key: x for key, x in other.items() if key != "note"}):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.json").write_text(json.dumps(run))
    monkeypatch.setattr(results, "SHIPPED", {name: tmp_path / name for name in SHIPPED})
    text = results.checkpoint()
    assert "\n|  | built | learned |\n| --- | --- | --- |\n| command | `python -m nanollm train " in text
    assert "\n| minutes | 89 | 7 |\n" in text and " % | 50.0 ± 3.1 % |\n" in text and " % |  |\n" in text
    assert text.endswith("\n\nbuilt: In two stretches.")
    shown = [results.shown(results.SECTIONS[name][1]) for name in ("all", "learned", "claims")]
    assert shown == ["python -m nanollm --all", "python -m nanollm --all --model nanollm/tiny_learned",
                     "python -m nanollm claims"]


def test_the_headline_says_what_the_rows_say():
    rows, (sentence,) = stored(), re.findall("With the question known, .*", README)
    windows = "snap_kv", "pyramid_kv", "ada_kv"
    (aware,) = {rows[name, "6.25 %"][1] for name in windows}
    blind = {name: row[2] for (name, budget), row in rows.items() if budget == "25 %"}
    labels = sorted(rows[name, "6.25 %"][5] for name in windows)
    lost, once = max(blind[name] for name in windows), max(
        found for name, found in blind.items() if not name.startswith(("kvzip", "duo_attention", "quest")))
    bits, full = rows["quantized_2", "all"], rows["full", "all"]
    share = f"{100 * int(bits[0]) / int(full[0]):.0f}"
    rounded = (ROOT / "experiments" / "stored" / "kvzip.txt").read_text()
    needle, kib = re.search(r"kvzip +12.5 % +4 +([\d.]+) ± [\d.]+ +(\d+)", rounded).groups()
    assert re.findall(r"\d+\.\d+|\d+(?= %)", sentence) == [
        aware, labels[0], labels[-1], lost, once, share, bits[1], blind["kvzip"], needle,
        f"{100 * int(kib) / int(full[0]):.0f}", blind["kvzip_fast"], blind["duo_attention"], blind["quest"]]
    assert bits[1] == bits[2]


# ---- its snippets ---


def snippet(name: str):
    """The method that the README defines."""
    (code,) = (block for block in BLOCKS if f"class {name}" in block)
    exec(code, found := {})
    (Method,) = found["variants"].values()
    return Method


def test_the_readme_s_method_does_what_it_says():
    cache, T = snippet("UnlikeKeys")(budget=40), 50
    link(cache, freq=FREQ)
    q, k, v = (torch.randn(B, heads, T, D, generator=torch.Generator().manual_seed(heads))
               for heads in (H * G, H, H))
    for part in torch.arange(T).split(8):
        cache.attend(*(x[:, :, part] for x in (q, k, v)), part[None])
    cache.end_prefill()
    for keys, kept in zip(k.flatten(0, 1), cache.pos.flatten(0, 1).tolist()):
        mean = keys.mean(0)
        like = [(key @ mean / key.norm() / mean.norm()).item() for key in keys]
        old = sorted(range(T - 32), key=like.__getitem__)[:8]
        assert sorted(kept) == sorted([*old, *range(T - 32, T)])
    cache.attend(*(x[:, :, :1] for x in (q, k, v)), torch.tensor([[T]]))
    assert cache.length == 40


def test_the_readme_s_method_beats_random_in_every_column():
    model, tasks = from_hf(TINY), Tasks(load(TINY / "tokenizer.tiktoken"), "test")
    bench = Benchmark.build(model, tasks, 512, 32)
    own, random = (bench.run(model, maker(model, Method, 0.25))
                   for Method in (snippet("UnlikeKeys"), RandomEviction))
    assert all(own[column] > random[column] for column in ACCURACIES) and own["kl"] < random["kl"] / 2
    assert own["needle_blind"] >= 0.5 and random["needle_blind"] < 0.1


def test_transformers_opens_the_shipped_weights():
    assert AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").config.model_type == "llama"
