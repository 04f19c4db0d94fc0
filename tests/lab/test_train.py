"""The training loop: documents that teach what they say, runs that learn, are cut off and go on."""
import json
import math
from pathlib import Path
import re
import shutil

import numpy as np
import pytest
import torch

from common import decode, tasks
from lab.command_line import set_threads
from lab.training import train
from lab.training.initial_weights import induction_start, left_out
from lab.training.train import CONFIG, STAGES, batch, document, main, position_jumps, repeated, schedule
from nanollm import SHIPPED, TINY
from nanollm.checkpoint import from_hf
from nanollm.model import Config, Decoder

# ---- documents ---

@pytest.mark.parametrize("start", STAGES)
def test_every_document_fits_its_stage(start):
    made = tasks("train")
    for _, T, mixture in STAGES[start]:
        assert sum(mixture.values()) == pytest.approx(1)
        for task in mixture:
            for seed in range(40):
                tokens, weights = document(np.random.default_rng(seed), T + 1, task, made, start == "learned")
                assert tokens.shape == weights.shape == (T + 1,) and tokens.dtype == np.int64
                assert weights[1:].max() == (1 if task in ("plain", "periodic", "associative") else 4), task
                assert tokens[0] == made.bos != tokens[1] or start == "built"


def test_the_loss_asks_for_answers_and_leaves_out_facts():
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens, weights = document(rng, 257, "needle", tasks("train"))
        assert {*weights.tolist()} <= {0.3, 0, 0.1, 4}
        assert re.fullmatch(r"(\d{4})+", decode(tokens[weights == 4]))
        assert re.fullmatch(r"( The code of [a-z]+ is \d{4}\.)+", decode(tokens[weights == 0]))
        assert re.fullmatch(r"(\nQ: The code of [a-z]+ is \.)+", decode(tokens[weights == 0.1]))
        assert (document(rng, 257, "plain", tasks("train"))[1] == 1).all()


def test_what_repeats_follows_from_the_first_round():
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens, weights = repeated(rng, 65, "periodic", tasks("train"))
        period = (weights == 0).sum()
        assert 4 <= period <= 32 and (tokens[period:] == tokens[:-period]).all() and weights[period:].all()

        tokens, weights = repeated(rng, 129, "associative", tasks("train"))
        edges = np.flatnonzero(np.diff(weights)) + 1  # in turn the start and the end of an answer
        first = "".join(f" {t} " for t in tokens[:edges[0]])
        assert not weights[:edges[0]].any() and edges[0] <= 129 // 2 + 2
        for start, stop in zip(edges[1::2], [*edges[3::2], 129]):  # a key, then its value
            assert "".join(f" {t} " for t in tokens[start:stop]) in first


def test_a_batch_is_a_function_of_seed_and_step():
    mixture = STAGES["built"][1][2]
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


# ---- the loop ---

@pytest.fixture(scope="module", autouse=True)
def small():
    """Make a run one of seconds: a small model, small batches, and no measuring."""
    with pytest.MonkeyPatch.context() as patch:
        shape = dict(max_len=600, n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=32)
        patch.setattr(train, "CONFIG", CONFIG | shape)
        patch.setattr(train, "TOKENS", 512)
        patch.setattr(train, "EVERY", 1)
        patch.setattr(train, "HardTasks", lambda encoding, split: tasks("train"))  # "test" is for measuring
        patch.setattr(train, "bits_per_byte", lambda model, *_, **__: model.embed.weight.sum().item())
        yield


def run(folder: Path, *more, steps=5):
    """Return the report of a run."""
    main(["--out", str(folder), "--steps", str(steps), *more])
    return json.loads((folder / "train.json").read_text())


def held(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module", params=[*STAGES])
def whole(request, tmp_path_factory):
    """Return a start, and the folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, "--start", request.param)
    return request.param, folder


def cut_off(folder: Path, monkeypatch, at: int, *more) -> list[tuple[int, int]]:
    """Interrupt a run before this step; return (documents, tokens of each) of the steps before it."""
    sizes = []

    def until(seed, step, B, T, *rest, **options):
        if step == at:
            raise KeyboardInterrupt
        sizes.append((B, T))
        return batch(seed, step, B, T, *rest, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "batch", until)
        run(folder, *more)
    return sizes


def test_a_run_cut_off_twice_and_resumed_equals_the_whole_one(whole, tmp_path, monkeypatch):
    start, folder = whole
    sizes = cut_off(tmp_path, monkeypatch, 4, "--start", start)
    assert sizes == [(8, 64), (2, 256), (2, 256), (1, 512)] and {*held(tmp_path)} == {train.CHECKPOINT}
    for name in ("induction_start", "learned_start"):
        monkeypatch.setattr(train, name, lambda model, seed: None)  # all comes from the checkpoint
    with monkeypatch.context() as patch, pytest.raises(NameError):  # while it measures at its end
        patch.delattr(train, "bits_per_byte")
        run(tmp_path, "--start", start)
    resumed, report = run(tmp_path, "--start", start), json.loads((folder / "train.json").read_text())
    assert resumed | dict(minutes=0) == report | dict(minutes=0) and len(report["losses"]) == 5
    assert held(tmp_path).keys() == held(folder).keys()
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_run_ends_with_a_checkpoint_in_hugging_face_layout_and_its_report(whole):
    start, folder = whole
    model = from_hf(folder)
    assert {*held(folder)} == {"config.json", "model.safetensors", "tokenizer.tiktoken", "train.json"}
    assert (folder / "tokenizer.tiktoken").read_bytes() == (TINY / "tokenizer.tiktoken").read_bytes()
    bos = None if start == "built" else 2047  # its documents began so
    assert model.config.bos == bos and from_hf(SHIPPED[start]).config == Config(**CONFIG, bos=bos)
    report = json.loads((folder / "train.json").read_text())
    assert report["command"] == f"python -m nanollm train --start {start} --steps 5 --seed 0"
    assert report["bits_per_byte"]["model"] == round(model.embed.weight.sum().item(), 3)


def test_the_first_step_is_small_and_lowers_the_weighted_loss(tmp_path, monkeypatch):
    cut_off(tmp_path, monkeypatch, 1)
    state, model = torch.load(tmp_path / train.CHECKPOINT), Decoder(Config(**train.CONFIG))
    tokens, weights = batch(0, 0, 8, 64, STAGES["built"][0][2], tasks("train"))

    @torch.no_grad()
    def loss():
        p = model(tokens[:, :-1]).softmax(-1).gather(2, tokens[:, 1:, None])[:, :, 0]
        return -((p.log() * weights[:, 1:]).sum() / weights[:, 1:].sum()).item()

    induction_start(model, 0)
    before = loss()
    moved = max((state["model"][name] - p).abs().max().item() for name, p in model.named_parameters())
    model.load_state_dict(state["model"])
    assert state["losses"] == [pytest.approx(before, abs=1e-4)] and loss() < before - 1e-3
    assert moved == pytest.approx(2e-3 / 50, rel=0.1)  # Adam's first step has the size of the learning rate


@pytest.mark.parametrize("start", STAGES)
def test_documents_begin_with_bos_positions_jump_and_heads_are_left_out(tmp_path, monkeypatch, start):
    read, shares, forward, learned = [], [], Decoder.forward, start == "learned"
    monkeypatch.setattr(Decoder, "forward", lambda model, tokens, pos: read.append((tokens, pos)) or forward(
        model, tokens, pos=pos))
    monkeypatch.setattr(train, "left_out", lambda *sizes: shares.append(sizes[-1]) or left_out(*sizes))
    run(tmp_path, "--start", start, steps=20)
    assert all((tokens[:, 0] == 2047).all() for tokens, _ in read) == learned
    jumps = [bool((pos.diff() > 1).any()) for _, pos in read]
    assert not any(jumps[:2]) and 8 < sum(jumps) < 18  # 70 % of the documents of 256 tokens or more
    assert shares == [0.15 if learned and 0.06 <= step / 20 < 0.85 else 0 for step in range(20)]


# ---- refusals: nothing is lost, and nothing of another's is written over ---

def test_what_is_refused_leaves_all_folders_as_they_were(tmp_path, monkeypatch):
    cut_off(tmp_path / "begun", monkeypatch, 2)
    shutil.copytree(TINY, tmp_path / "tiny")
    before = held(tmp_path)
    for folder, options, message in [
            ("new", "--steps 0", "steps 0"), ("new", "--seed -1", "seed -1"),
            ("new", "--device meta", "device 'meta'"), ("new/../tiny", "", "holds config.json and no run"),
            ("tiny", "", "holds config.json"), ("begun", "--seed 1", "has .*'seed': 0"),
            ("begun", "--start learned", "'start': 'built'"), ("begun", "--steps 6", "'steps': 5")]:
        with pytest.raises(ValueError, match=message) as error:
            run(tmp_path / folder, *options.split())
        assert "\n" not in str(error.value) and held(tmp_path) == before


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(train.F, "cross_entropy", lambda logits, *_, **__: logits.sum(1) * math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        run(tmp_path)
    assert not held(tmp_path)


def test_threads_are_those_asked_for_and_one_for_a_small_model(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", (calls := []).append)
    for asked, parameters in (2, 10), (0, 10 ** 10), (0, 3_000_000):
        set_threads(asked, parameters)
    assert calls == [2, 1]  # of a large model the choice stays
