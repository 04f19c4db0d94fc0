"""The training loop: documents that teach what they say, runs that learn, are cut off and go on."""
from itertools import count
import json
import math
import os
from pathlib import Path
import re
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch
import torch.nn.functional as F

from common import decode, tasks
from nanollm.commands.shell import set_threads
from nanollm.hf.checkpoint import from_hf, to_hf
from nanollm.measure.tasks import ANSWER, FACT
from nanollm.model import Config, Decoder
from nanollm.training import train
from nanollm.training.initial_weights import induction_start
from nanollm.training.train import (CONFIG, HARDER, LEARNED, STAGES, batch, document, main, position_jumps,
                                    schedule, stage)

# ---- documents ---


@pytest.mark.parametrize("stages, bos", [(STAGES, False), (LEARNED, True)])
def test_every_document_fits_its_stage(stages, bos):
    made = tasks("train")
    for _, T, _, mixture in stages:
        for task in mixture:
            for seed in range(30):
                tokens, weights = document(np.random.default_rng(seed), T + 1, task, made, bos)
                assert tokens.shape == weights.shape == (T + 1,) and weights.dtype == np.float32
                assert weights[1:].max() == (1 if task in ("plain", "periodic", "associative") else 4), task
                assert tokens[0] == made.bos != tokens[1] or not bos


def test_the_loss_asks_for_answers_and_leaves_out_facts():
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens, weights = document(rng, 257, "needle", tasks("train"))
        assert {*weights.tolist()} <= {np.float32(x) for x in (0.3, 0, 0.1, 4)}
        assert re.fullmatch(r"(\d{4})+", decode(tokens[weights == 4]))
        assert re.fullmatch(r"( The code of [a-z]+ is \d{4}\.)+", decode(tokens[weights == 0]))
        assert re.fullmatch(r"(\nQ: The code of [a-z]+ is \.)+", decode(tokens[weights == np.float32(0.1)]))
        assert (document(rng, 257, "plain", tasks("train"))[1] == 1).all()


def test_periodic_answers_are_what_came_a_period_ago():
    rng = np.random.default_rng(0)
    for _ in range(30):
        tokens, roles = train.periodic(rng, 65, tasks("train"))
        period = (roles == FACT).sum()
        assert 4 <= period <= 32 and (roles[period:] == ANSWER).all()
        assert (tokens[period:] == tokens[:-period]).all()


def test_associative_answers_follow_from_the_first_list():
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens, roles = train.associative(rng, 129, tasks("train"))
        edges = np.flatnonzero(np.diff(roles)) + 1  # in turn the start and the end of an answer
        first, listed = edges[0], "".join(f"{t} " for t in tokens[:edges[0]])
        assert (roles[:first] == FACT).all() and first <= 129 // 2 + 2
        for end, start in zip(edges[1::2], edges[2::2]):  # a key, then its value
            stop = next((e for e in edges if e > start), 129)
            assert f" {' '.join(map(str, tokens[end:stop]))} " in " " + listed


def test_a_batch_is_a_function_of_seed_and_step():
    mixture = STAGES[1][3]
    (a, w), (again, w_again), *others = (batch(seed, step, 6, 128, mixture, tasks("train"))
                                         for seed, step in ((0, 5), (0, 5), (0, 6), (1, 5), (5, 0)))
    assert a.shape == w.shape == (6, 129) and a.dtype == torch.int64
    assert torch.equal(a, again) and torch.equal(w, w_again)
    assert all((a != other).float().mean() > 0.5 for other, _ in others)
    _, weights = batch(0, 0, 400, 64, dict(plain=1, periodic=3), tasks("train"))
    assert abs((weights == 1).all(1).float().mean() - 0.25) < 0.07  # the mixture


def test_positions_jump_ahead_and_stay_below_the_longest():
    pos = position_jumps(np.random.default_rng(0), 500, 64, 1000)
    steps = pos.diff(dim=1)
    assert pos.shape == (500, 64) and (pos[:, 0] == 0).all() and (steps >= 1).all()
    assert ((steps > 1).sum(1) <= 3).all() and ((steps > 1).sum(1) >= 2).float().mean() > 0.9
    assert (steps > 1).any(0).all()  # a jump may lie anywhere
    assert pos.max() < 1000 and pos.max() > 980  # lengths far beyond 64 are seen as positions
    assert (position_jumps(np.random.default_rng(0), 50, 64, 64) == torch.arange(64)).all()  # no room to jump


def test_schedule_warms_up_stays_and_decays():
    lr = [schedule(step, 1000) for step in range(1000)]
    assert lr[:50] == pytest.approx([(i + 1) / 50 for i in range(50)])
    assert lr[50:601] == pytest.approx([1] * 551)
    assert lr[800] == pytest.approx(0.5) and np.diff(lr[600:992]) == pytest.approx(np.full(391, -1 / 400))
    assert lr[-5:] == [0.02] * 5


@pytest.mark.parametrize("stages, steps", [(STAGES, [80, 100, 420, 400]), (LEARNED, [50, 40, 90, 420, 400]),
                                           (HARDER, [50, 450, 500])])
def test_stages_share_out_all_steps_at_4096_tokens_each(stages, steps):
    seen = [tuple(stage(step, 1000, stages)) for step in range(1000)]
    assert [seen.count(tuple(rest)) for _, *rest in stages] == steps
    assert [T for T, _, _ in seen] == sorted(T for T, _, _ in seen)
    assert all(T * B == 4096 and sum(mixture.values()) == pytest.approx(1) for T, B, mixture in seen)


# ---- the loop ---


def shrink(set_):
    """A run of seconds, through set_(object, name, value): a small model and small batches, no measuring."""
    size = dict(max_len=600, n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=32)
    set_(train, "CONFIG", CONFIG | size)
    for name in ("STAGES", "LEARNED", "HARDER"):
        stages = [(share, T, max(B // 16, 2), mixture) for share, T, B, mixture in getattr(train, name)]
        set_(train, name, stages)
    set_(train, "HardTasks", lambda encoding, split: tasks("train"))  # the held-out ones are for measuring
    set_(train, "bits_per_byte", lambda model, *_: model.embed.weight.sum().item())
    set_(train, "exact_match", lambda *_, **__: 0.25)
    set_(train, "ngram_bits", lambda *_: {"2-gram": 3.0})


@pytest.fixture
def small(monkeypatch):
    shrink(monkeypatch.setattr)


def run(folder: Path, steps=6, *more):
    main(["--out", str(folder), "--steps", str(steps), "--every", "1", *more])
    return log(Path(folder))


def log(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: x for key, x in row.items() if key != "minutes"} for row in rows]


def held(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module", params=["built", "learned", "a folder"])
def whole(request, tmp_path_factory):
    """The folder of an uninterrupted run, and how it starts."""
    folder, start = tmp_path_factory.mktemp("whole"), request.param
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch.setattr)
        if start == "a folder":
            start = str(tmp_path_factory.mktemp("first"))
            model = Decoder(Config(**train.CONFIG, bos=2047))
            induction_start(model, 5)
            to_hf(model, start)
        run(folder, 6, "--start", start)
    return folder, start


def cut_off(folder: Path, monkeypatch, at: int, *more):
    """A run that ends before this step."""
    def until(seed, step, *rest):
        if step == at:
            raise KeyboardInterrupt
        return batch(seed, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "batch", until)
        with pytest.raises(KeyboardInterrupt):
            run(folder, 6, *more)


def test_a_run_cut_off_twice_and_resumed_equals_the_whole_one(whole, small, tmp_path, monkeypatch):
    whole, start = whole
    cut_off(tmp_path, monkeypatch, 3, "--start", start)
    assert len(log(tmp_path)) == 3
    for name in ("induction_start", "learned_start"):
        monkeypatch.setattr(train, name, lambda model, seed: None)  # all comes from the checkpoint
    with monkeypatch.context() as patch, pytest.raises(NameError):  # while it measures at its end
        patch.delattr(train, "ngram_bits")
        run(tmp_path, 6, "--start", start)
    assert run(tmp_path, 6, "--start", start) == log(whole)
    assert held(tmp_path).keys() == held(whole).keys()
    for name in ("checkpoint.safetensors", "model.safetensors"):
        a, b = load_file(tmp_path / name), load_file(whole / name)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def shrink_more(set_):
    """Noise in place of text, which takes a process long to prepare."""
    def noise(seed, step, B, T, *_):
        g = torch.Generator().manual_seed(step)
        return torch.randint(0, 2047, (B, T + 1), generator=g), torch.rand(B, T + 1, generator=g)

    shrink(set_)
    set_(train, "HardTasks", lambda *_: None)
    set_(train, "batch", noise)


def test_two_processes_learn_what_one_learns(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    root, recipe = Path(__file__).parents[2], ["--lr", "0.05", "--start", "learned"]
    script = ("import os, sys, test_train, torch._dynamo\n"  # all that takes seconds, before the fork
              "child = os.fork()\nos.environ['RANK'] = str(int(child == 0))\n"
              "test_train.shrink_more(setattr)\ntest_train.run(*sys.argv[1:])\n"
              "sys.exit(child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))")
    command = [sys.executable, "-c", script, tmp_path / "two", "3", *recipe]
    path = f"{root}:{root / 'tests/helpers'}:{root / 'tests/training'}"
    env = os.environ | dict(PYTHONPATH=path, OMP_NUM_THREADS="1", WORLD_SIZE="2", MASTER_ADDR="localhost",
                            MASTER_PORT=str(port))  # as torchrun sets them
    both = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL, env=env)
    shrink_more(monkeypatch.setattr)
    alone = run(tmp_path / "one", 3, *recipe)
    _, error = both.communicate(timeout=300)
    assert both.returncode == 0, error
    for two, one in zip(log(tmp_path / "two"), alone, strict=True):
        assert two == pytest.approx(one, rel=1e-3)


def test_a_rank_without_its_world_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")  # would train on a part of each batch, and write nothing
    with pytest.raises(ValueError, match="RANK is 1 and WORLD_SIZE 1; .* unset both"):
        train.ranks()



def test_the_loss_is_the_weighted_mean_and_the_first_step_is_small(small, tmp_path):
    (row,) = run(tmp_path, 1, "--every", "2")
    model = Decoder(Config(**train.CONFIG))
    induction_start(model, 0)
    _, T, B, mixture = train.STAGES[0]
    tokens, weights = batch(0, 0, B, T, mixture, tasks("train"))
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:]
    assert row["loss"] == pytest.approx(((loss.view(B, T) * weights).sum() / weights.sum()).item(), abs=1e-4)
    trained = load_file(tmp_path / "checkpoint.safetensors")
    moved = max((trained[name] - p).abs().max().item() for name, p in model.named_parameters())
    assert moved == pytest.approx(2e-3 / 50, rel=0.1)  # Adam's first step has the size of the learning rate


def test_a_short_run_learns(small, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "LEARNED", [(1.0, 64, 8, dict(plain=1.0))])
    losses = [row["loss"] for row in run(tmp_path, 60, "--start", "learned", "--every", "20", "--lr", "0.01")]
    assert losses[-1] < losses[0] - 0.5, losses


def test_a_run_ends_with_a_checkpoint_and_its_report(whole):
    whole, start = whole
    model, last = from_hf(whole), load_file(whole / "checkpoint.safetensors")
    for name, p in model.named_parameters():
        assert torch.equal(p, last[name].half().float()), name
    assert (whole / "tokenizer.tiktoken").read_bytes() == (train.TINY / "tokenizer.tiktoken").read_bytes()
    lengths = [64, 128, 256, 256, 512, 512] if start in train.STARTS else [128, 256, 256, 512, 512, 512]
    assert [row["tokens_per_document"] for row in log(whole)] == lengths
    assert from_hf(train.TINY).config == Config(**CONFIG)
    assert model.config.bos == (None if start == "built" else 2047)  # its documents began so
    report = json.loads((whole / "train.json").read_text())
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert f"--steps 6 --start {start}" in report["command"] and "--out" not in report["command"]
    assert report["exact_match"]["needle_2048"] == dict(value=0.25, standard_error=0.0271)  # √(¼·¾/256)
    assert ("hops_512" in report["exact_match"]) == (start not in train.STARTS)
    assert report["bits_per_byte"] == {"model": round(model.embed.weight.sum().item(), 3), "2-gram": 3.0}


# ---- refusals: nothing is lost, and nothing of another's is written over ---


@pytest.mark.parametrize("wrong, message", [
    ("--every 0", "every 0"), ("--documents 0", "documents 0"), ("--lr nan", "lr nan"),
    ("--seed -1", "seed -1"), ("--device meta", "device 'meta'"), ("--threads -1", "threads -1"),
    ("--start nowhere", "start 'nowhere' must be built, learned or the folder")])
def test_a_run_that_cannot_be_is_refused_before_any_work(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        main(["--out", str(tmp_path / "run"), *wrong.split()])
    assert not (tmp_path / "run").exists()


def refused(folder: Path, message: str, *options: str):
    before = held(folder)
    with pytest.raises(ValueError, match=message) as error:
        run(folder, 6, *options)
    assert "\n" not in str(error.value) and held(folder) == before


def test_other_folders_and_a_shipped_checkpoint_are_never_written_to(tmp_path):
    shutil.copytree(train.TINY, tmp_path / "tiny")
    for folder in (tmp_path / "tiny", tmp_path / "new/../tiny"):
        refused(folder, "holds config.json and no run")
    (tmp_path / "checkpoint.safetensors").write_text("mine")
    refused(tmp_path, "is damaged or not from this program")


def test_a_run_goes_on_with_what_it_began_with_and_counts_on(small, tmp_path, monkeypatch):
    cut_off(tmp_path, monkeypatch, 2)
    for name, begun, other in ("seed", "0", "1"), ("lr", "0.002", "0.001"), ("steps", "6", "7"), (
            "start", "built", "learned"):
        refused(tmp_path, f"has --{name} {begun}, not {other}; give that value", f"--{name}", other)
    file = tmp_path / "checkpoint.safetensors"
    with safe_open(file, "pt") as f:
        known, right = f.metadata(), file.read_bytes()
    tensors = {name: x.clone() for name, x in load_file(file).items()}  # else they are pages of the file
    file.write_bytes(right[:-100])
    refused(tmp_path, "is damaged")
    save_file(tensors, file, metadata=known | dict(minutes="50.0"))
    run(tmp_path, 6)
    assert 50 < json.loads((tmp_path / "train.json").read_text())["minutes"] < 60
    refused(tmp_path, "is finished; name a new folder")


def test_a_loss_that_is_not_finite_stops_the_run_before_it_saves(small, tmp_path, monkeypatch):
    loss, calls = F.cross_entropy, count(1)
    overflow = lambda *x, **how: loss(*x, **how) * (math.inf if next(calls) == 4 else 1)
    monkeypatch.setattr(train.F, "cross_entropy", overflow)
    with pytest.raises(ValueError, match="^step 4 has loss (inf|nan) .* checkpoint in .* is untouched"):
        run(tmp_path)
    with safe_open(tmp_path / "checkpoint.safetensors", "pt") as f:
        assert f.metadata()["step"] == "3" and len(log(tmp_path)) == 3


def test_threads_are_those_asked_for_and_one_for_a_small_model():
    before = torch.get_num_threads()
    try:
        for asked, parameters, threads in (2, 10, 2), (0, 10 ** 10, 2), (0, 3_000_000, 1):
            set_threads(asked, parameters)
            assert torch.get_num_threads() == threads  # of a large model the choice stays
    finally:
        torch.set_num_threads(before)
