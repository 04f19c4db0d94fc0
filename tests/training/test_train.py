"""The training loop: documents that teach what they say, a start that looks back, runs cut off."""
from copy import copy
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
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
import torch
import torch.nn.functional as F

from common import decode, tasks
from nanollm.commands.shell import set_threads
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.tasks import ANSWER, FACT
from nanollm.model import Config, Decoder, rope
from nanollm.training import train
from nanollm.training.initial_weights import induction_start, learned_start, left_out, without_heads
from nanollm.training.train import (CONFIG, LEARNED, STAGES, batch, document, main, position_jumps, schedule,
                                    stage)

# ---- documents ---


class Greatest(np.random.Generator):
    """Draws the largest of every single number, and heads whenever a coin decides."""
    def integers(self, low, high=None, size=None, **options):
        if size is None:
            return (low if high is None else high) - 1
        return super().integers(low, high, size, **options)

    def random(self, size=None):
        return 0.0 if size is None else super().random(size)


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_every_document_fits_its_stage(stage):
    _, T, _, mixture = STAGES[stage]
    for task in mixture:
        for rng in (np.random.default_rng(0),) * 40 + (Greatest(np.random.PCG64(0)),):
            tokens, weights = document(rng, T + 1, task, tasks("train"))
            assert tokens.shape == weights.shape == (T + 1,) and weights.dtype == np.float32
            assert weights[1:].max() == (1 if task in ("plain", "periodic", "associative") else 4), task
    longest = copy(tasks("train"))
    longest.lines = [[line for line in kind if len(line) == 12] for kind in longest.lines]
    document(Greatest(np.random.PCG64(0)), T + 1, "few_shot", longest)


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


def test_a_batch_is_a_function_of_seed_and_step_and_follows_the_mixture(monkeypatch):
    mixture = STAGES[1][3]
    (a, w), (again, w_again), *others = (batch(seed, step, 6, 128, mixture, tasks("train"))
                                         for seed, step in ((0, 5), (0, 5), (0, 6), (1, 5), (5, 0)))
    assert a.shape == w.shape == (6, 129) and a.dtype == torch.int64
    assert torch.equal(a, again) and torch.equal(w, w_again)
    assert all((a != other).float().mean() > 0.5 for other, _ in others)
    of_kind = lambda rng, n, kind, tasks, bos: (np.full(n, "ab".index(kind)), np.ones(n))
    monkeypatch.setattr(train, "document", of_kind)
    kinds = batch(0, 0, 4000, 1, dict(a=1, b=3), None)[0][:, 0]
    assert abs(kinds.float().mean() - 0.75) < 0.03


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


def test_stages_share_out_all_steps_at_4096_tokens_each():
    seen = [stage(step, 1000) for step in range(1000)]
    assert [seen.count((T, B, mixture)) for _, T, B, mixture in STAGES] == [80, 100, 420, 400]
    assert [T for T, _, _ in seen] == sorted(T for T, _, _ in seen)
    assert all(T * B == 4096 and sum(mixture.values()) == pytest.approx(1) for T, B, mixture in seen)


# ---- the start ---


@torch.no_grad()
def test_layer_0_starts_by_looking_back_1_2_1_3_1_4_tokens():
    model = Decoder(Config(**CONFIG | dict(n_layers=2)))
    induction_start(model, 0)
    tokens = torch.randint(0, 2047, (8, 100), generator=torch.Generator().manual_seed(0))
    x, block = model.embed(tokens), model.blocks[0]
    q, k, _ = block.attention.project(block.norm1(x), rope(model.freq, torch.arange(100)[None]))
    score = q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5
    p = score.masked_fill(torch.ones(100, 100).triu(1).bool(), -math.inf).softmax(-1)
    for h, back in enumerate([1, 2, 1, 3, 1, 4]):
        weight = torch.stack([p[:, h].diagonal(-d, 1, 2)[:, 10:].mean() for d in range(50)])
        assert weight.argmax() == back and weight[back] > 0.75, h


@torch.no_grad()
@pytest.mark.parametrize("start, copies", [(induction_start, True), (learned_start, False)])
def test_the_built_start_continues_what_repeats_and_the_learned_does_not(start, copies):
    """Induction before any training: chance is 1/2048, and 5 standard errors of that 0.4 %."""
    tokens = torch.randint(0, 2047, (8, 40), generator=torch.Generator().manual_seed(0)).repeat(1, 3)
    for n_layers in (2, 6):
        model = Decoder(Config(**CONFIG | dict(n_layers=n_layers)))
        start(model, 1)
        right = model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]
        again = right[:, 40:].float().mean()
        assert again > 0.1 if copies else again < 0.004
        assert right[:, :39].float().mean() < 0.01
    if start is learned_start:  # what is not built is drawn
        drawn = torch.cat([block.attention.o.weight.flatten() for block in model.blocks[1:]])
        assert drawn.std().item() == pytest.approx((192 * 12) ** -0.5, rel=0.02)


@torch.no_grad()
def test_heads_and_layers_are_left_out_but_not_of_the_first():
    stays = left_out(np.random.default_rng(0), 2000, 3, 4)
    assert (stays[0] == 1).all() and {*stays.unique().tolist()} == {0, 1}
    whole_layer, head = (stays[1:] == 0).all(-1).float().mean(), (stays[1:] == 0).float().mean()
    assert whole_layer == pytest.approx(0.15, abs=0.02) and head == pytest.approx(1 - 0.85 ** 2, abs=0.02)

    model = Decoder(Config(64, 32, n_layers=3, n_heads=4, n_kv_heads=2, d_model=32, d_ff=32))
    tokens, stays = torch.randint(0, 64, (5, 9)), stays[:, :5]
    with without_heads(model, stays):
        logits = model(tokens)
    for i in range(5):  # as if these heads' columns of W_O were 0
        copied = Decoder(model.config)
        copied.load_state_dict(model.state_dict())
        for block, heads in zip(copied.blocks, stays[:, i]):
            block.attention.o.weight.mul_(heads.repeat_interleave(model.config.head_dim))
        torch.testing.assert_close(logits[i], copied(tokens[i:i + 1])[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(model(tokens[:1]), model(tokens)[:1], atol=1e-5, rtol=0)  # all is back
    assert not torch.allclose(model(tokens), logits, atol=1e-3)


def test_a_learned_runs_documents_begin_with_bos():
    made = tasks("train")
    for _, T, _, mixture in LEARNED:
        for task in mixture:
            tokens, weights = document(np.random.default_rng(0), T + 1, task, made, bos=True)
            assert tokens[0] == made.bos != tokens[1] and tokens.shape == weights.shape == (T + 1,)
    assert sum(share for share, *_ in LEARNED) == pytest.approx(1)
    assert all(T * B == 4096 for _, T, B, _ in LEARNED)


# ---- the loop ---


def shrink(set_):
    """A run of seconds, through set_(object, name, value): a small model and small batches, no measuring."""
    size = dict(max_len=600, n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=32)
    set_(train, "CONFIG", CONFIG | size)
    for name in ("STAGES", "LEARNED"):
        stages = [(share, T, max(B // 16, 2), mixture) for share, T, B, mixture in getattr(train, name)]
        set_(train, name, stages)
    set_(train, "Tasks", lambda encoding, split: tasks("train"))  # the held-out ones are for measuring
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


@pytest.fixture(scope="module", params=["built", "learned"])
def whole(request, tmp_path_factory):
    """The folder of an uninterrupted run, and how it starts."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch.setattr)
        run(folder, 6, "--start", request.param)
    return folder, request.param


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


def test_a_run_cut_off_twice_and_resumed_equals_the_whole_one(whole, small, tmp_path, monkeypatch, capsys):
    whole, start = whole
    cut_off(tmp_path, monkeypatch, 3, "--start", start)
    assert len(log(tmp_path)) == 3
    for name in ("induction_start", "learned_start"):
        monkeypatch.setattr(train, name, lambda model, seed: None)  # all comes from the checkpoint
    with monkeypatch.context() as patch, pytest.raises(NameError):  # while it measures at its end
        patch.delattr(train, "ngram_bits")
        patch.setattr(sys.stderr, "isatty", lambda: True)  # a bar is for a terminal
        run(tmp_path, 6, "--start", start)
    assert not {*held(tmp_path)} & {*train.MADE}  # no half of a result
    assert "| 6/6 [" in capsys.readouterr().err  # the bar goes on, too
    assert run(tmp_path, 6, "--start", start) == log(whole)
    assert {*held(tmp_path)} == {*train.MADE, "checkpoint.safetensors", "log.jsonl"}
    for name in ("checkpoint.safetensors", "model.safetensors"):
        a, b = load_file(tmp_path / name), load_file(whole / name)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def noise(seed, step, B, T, *_):
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 2047, (B, T + 1), generator=g), torch.rand(B, T + 1, generator=g)


def shrink_more(set_):
    """Without any text, which takes a process long to prepare."""
    shrink(set_)
    set_(train, "Tasks", lambda *_: None)
    set_(train, "batch", noise)


@pytest.mark.parametrize("start", ["built", "learned"])
def test_a_run_reads_what_its_start_asks_for(small, tmp_path, monkeypatch, start):
    asked, thinned = [], []
    monkeypatch.setattr(train, "batch", lambda *x: asked.append(x) or batch(*x))
    monkeypatch.setattr(train, "left_out", lambda *x: thinned.append(x) or left_out(*x))
    run(tmp_path, 12, "--start", start)
    learned = start == "learned"
    assert [x[6] for x in asked] == 12 * [learned] and asked[0][4] == (LEARNED if learned else STAGES)[0][3]
    assert len(thinned) == (10 if learned else 0)  # from 0.96 to 10.2 of 12 steps


def test_two_processes_learn_what_one_learns(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    root, recipe = Path(__file__).parents[2], ["--lr", "0.05", "--start", "learned"]
    script = "import sys, test_train\ntest_train.shrink_more(setattr)\ntest_train.run(*sys.argv[1:])"
    command = [sys.executable, "-c", script, tmp_path / "two", "3", *recipe]
    path = f"{root}:{root / 'tests/helpers'}:{root / 'tests/training'}"
    env = os.environ | dict(PYTHONPATH=path, OMP_NUM_THREADS="1", WORLD_SIZE="2", MASTER_ADDR="localhost",
                            MASTER_PORT=str(port))  # as torchrun sets them
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL,
                             env=env | dict(RANK=str(rank))) for rank in range(2)]
    shrink_more(monkeypatch.setattr)
    alone = run(tmp_path / "one", 3, *recipe)
    for one in both:
        _, error = one.communicate(timeout=300)
        assert one.returncode == 0, error
    for two, one in zip(log(tmp_path / "two"), alone, strict=True):
        assert two == pytest.approx(one, rel=1e-3)


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


def test_a_run_ends_with_a_checkpoint_and_its_report(whole):
    whole, start = whole
    model, last = from_hf(whole), load_file(whole / "checkpoint.safetensors")
    for name, p in model.named_parameters():
        assert torch.equal(p, last[name].half().float()), name
    assert (whole / "tokenizer.tiktoken").read_bytes() == (train.TINY / "tokenizer.tiktoken").read_bytes()
    assert [row["tokens_per_document"] for row in log(whole)] == [64, 128, 256, 256, 512, 512]
    assert from_hf(train.TINY).config == Config(**CONFIG)
    assert model.config.bos == (2047 if start == "learned" else None)  # its documents began so
    report = json.loads((whole / "train.json").read_text())
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    options = f"--steps 6 --start {start} --lr 0.002 --seed 0 --device cpu --threads 0 --documents 256"
    assert report["command"] == "python -m nanollm train " + options
    assert report["exact_match"]["needle_2048"] == dict(value=0.25, standard_error=0.0271)  # √(¼·¾/256)
    assert report["bits_per_byte"] == {"model": round(model.embed.weight.sum().item(), 3), "2-gram": 3.0}


@pytest.mark.parametrize("wrong, message", [
    ("--every 0", "every 0 must be"), ("--steps 1" + "0" * 400, "steps 10"), ("--documents 0", "documents 0"),
    *((f"--lr {lr}", f"lr {lr} must lie above 0 and be at") for lr in ("nan", "0.0", "1.5")),
    ("--seed -1", "seed -1"), ("--device meta", "device 'meta'"), ("--threads -1", "threads -1")])
def test_a_run_that_cannot_be_is_refused_before_any_work(tmp_path, wrong, message, monkeypatch):
    monkeypatch.delattr(train, "induction_start")
    with pytest.raises(ValueError, match=message):
        main(["--out", str(tmp_path / "run"), *wrong.split()])
    assert not (tmp_path / "run").exists()


# ---- nothing is lost, and nothing of another's is written over ---


def held(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def change(file: Path, drop: str = "", tensor: dict | None = None, **known: str):
    """The checkpoint with some of what it says and holds changed."""
    with safe_open(file, "pt") as f:
        known = f.metadata() | known
    tensors = load_file(file) | (tensor or {})
    save_file(tensors, file, metadata={name: x for name, x in known.items() if name != drop})


def refused(folder: Path, message: str, *options: str):
    before = held(folder)
    with pytest.raises(ValueError, match=message) as error:
        run(folder, 6, *options)
    assert "\n" not in str(error.value) and held(folder) == before


@pytest.mark.parametrize("name", ["built", "learned"])
def test_a_shipped_checkpoint_is_never_written_over(name, tmp_path, monkeypatch):
    shipped = tmp_path / "tiny"
    shutil.copytree(train.TINY, shipped)
    monkeypatch.setattr(train, "SHIPPED", {"built": tmp_path / "gone", name: shipped})
    (tmp_path / "link").symlink_to(shipped)
    monkeypatch.chdir(tmp_path)
    for folder in (shipped, "tiny/../link", "tiny/new/.."):
        refused(Path(folder), "is in the folder of a checkpoint that ships")


@pytest.mark.parametrize("name, message", [
    ("checkpoint.safetensors", "checkpoint.safetensors is damaged or another's"),
    ("config.json", "holds config.json and no run")])
def test_a_folder_of_another_s_is_refused(name, message, tmp_path):
    (tmp_path / name).write_text("mine")
    refused(tmp_path, message)
    with pytest.raises(ValueError, match="is a file; name a folder"):
        run(tmp_path / name)


def test_a_run_goes_on_with_what_it_began_with_and_counts_on(small, tmp_path, monkeypatch):
    cut_off(tmp_path, monkeypatch, 2)
    for name, begun, other in ("seed", "0", "1"), ("lr", "0.002", "0.001"), ("steps", "6", "7"), (
            "start", "built", "learned"):
        refused(tmp_path, f"has --{name} {begun}, not {other}; go on", f"--{name}", other)
    (tmp_path / "config.json").write_text("mine")
    refused(tmp_path, "holds config.json, which its run has not written")
    (tmp_path / "config.json").unlink()
    change(tmp_path / "checkpoint.safetensors", minutes="50.0")
    asked = []
    monkeypatch.setattr(train, "exact_match", lambda *x, **_: asked.append(x[2:]) or 0.0)
    monkeypatch.setattr(train, "ngram_bits", lambda *x: asked.append(x[-1]) or {})
    run(tmp_path, 6, "--documents", "16")
    minutes = [json.loads(row)["minutes"] for row in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert minutes[1] < 10 and all(50 < x < 60 for x in minutes[2:]) and len(minutes) == 6
    report = json.loads((tmp_path / "train.json").read_text())
    assert 50 < report["minutes"] < 60 and report["documents_per_figure"] == 16
    # fewer documents make the measuring short; needles are looked for in more than is learned from
    assert asked == [ask for T in (256, 256, 512, 512) for ask in (
        ("needle", 2 * T, 2), ("recall", 256, 2), ("few_shot", 256, 2))] + [
        ("needle", T, 16) for T in (256, 512, 1024, 2048)] + [
        (task, 512, 16) for task in ("recall", "few_shot", "copy")] + [4]
    refused(tmp_path, "is finished; name a new folder")


def test_a_damaged_checkpoint_is_refused(small, tmp_path, monkeypatch):
    cut_off(tmp_path, monkeypatch, 1)
    file = tmp_path / "checkpoint.safetensors"
    right, damaged = file.read_bytes(), "is damaged or another's"
    for message, changed in (
            (damaged, dict(drop="seed")), *((damaged, dict(step=x)) for x in ("two", "7")),
            (damaged, dict(minutes="nan")),
            (r"no norm.weight of shape \(64,\)", dict(tensor={"norm.weight": torch.ones(63)})),
            ("m of .*, or not a finite one", dict(tensor={"norm.weight.m": torch.full((64,), math.nan)}))):
        file.write_bytes(right)
        change(file, **changed)
        refused(tmp_path, message)
    file.write_bytes(right[:-100])
    refused(tmp_path, damaged)


def test_a_loss_that_is_not_finite_stops_the_run_before_it_saves(small, tmp_path, monkeypatch):
    whole_loss, calls, utils = F.cross_entropy, count(1), train.torch.nn.utils
    overflow = lambda *x, **how: whole_loss(*x, **how) * (math.inf if next(calls) == 4 else 1)
    monkeypatch.setattr(train.F, "cross_entropy", overflow)
    monkeypatch.setattr(utils, "clip_grad_norm_", lambda *_: torch.tensor(1.0))  # the loss alone tells
    with pytest.raises(ValueError, match="^step 4 has loss (inf|nan) .* checkpoint of step 3 in .* is untou"):
        run(tmp_path)
    with safe_open(tmp_path / "checkpoint.safetensors", "pt") as f:
        assert f.metadata()["step"] == "3" and len(log(tmp_path)) == 3
    monkeypatch.setattr(utils, "clip_grad_norm_", lambda *_: torch.tensor(math.nan))
    with pytest.raises(ValueError, match="^step 1 has .* norm nan.* checkpoint of step 0 in .* is untouched"):
        run(tmp_path / "new")


def test_a_folder_that_cannot_be_written_to_is_found_before_any_work(small, tmp_path, monkeypatch):
    full = Mock(side_effect=SafetensorError("No space left on device"))
    monkeypatch.setattr(train, "save_file", full)
    monkeypatch.delattr(train, "Tasks")
    with pytest.raises(OSError, match="checkpoint.part cannot be written: No space left on device"):
        run(tmp_path / "run")


@pytest.mark.parametrize("rank, world", [("", "2"), ("2", "2"), ("0", "two")])
def test_ranks_that_cannot_be_are_refused(rank, world, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ValueError, match=f"RANK '{rank}' must be a whole number below WORLD_SIZE '{world}'"):
        run(tmp_path)


def test_threads_are_those_asked_for_and_one_for_a_small_model():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for asked, parameters, threads in ((3, 10, 3), (0, 10 ** 10, 3), (0, 3_000_000, 1)):
            set_threads(asked, parameters)
            assert torch.get_num_threads() == threads  # of a large model PyTorch's choice stays
    finally:
        torch.set_num_threads(before)
