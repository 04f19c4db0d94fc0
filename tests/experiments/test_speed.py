"""The speed tables: what cannot be measured is refused before any work, and noise is no speed."""
import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from common import ENCODING, decoder
from experiments import speed
from methods.h2o import H2O
from nanollm.cache import LayerCache, make_cache

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("wrong, message", [
    (["--new", "0"], "new 0"), (["--repeat", "-1"], "repeat -1"),
    (["--lengths", "256", "0"], "length 0 must be a whole number from 1 to 2943"),
    (["--lengths", "2944"], "length 2944"), (["--lengths", "3041", "--new", "31"], "from 1 to 3040"),
    (["--lengths", "64"], "ada_kv at a quarter of 64 tokens: budget 16 must exceed the window 32"),
])
def test_what_cannot_be_measured_is_refused_before_any_work(wrong, message, monkeypatch):
    for name in ("against_floor", "compression", "against_transformers"):
        monkeypatch.delattr(speed, name)
    with pytest.raises(ValueError, match=message):
        speed.main(wrong)


def test_a_refusal_is_one_line_and_exit_code_2_in_a_clean_shell():
    done = subprocess.run([sys.executable, "-m", "experiments.speed", "--model", "NOWHERE"],
                          capture_output=True, text=True, timeout=100, cwd=ROOT,
                          env={name: os.environ[name] for name in ("PATH", "HOME")})
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "error: NOWHERE/config.json is missing; give the folder of a Hugging Face checkpoint\n")


def test_a_time_that_noise_made_shorter_is_no_speed(monkeypatch):
    monkeypatch.setattr(speed, "best", lambda run, repeat: 1.0)
    assert speed.speeds(str, int, 2, 1).strip() == "too few tokens or repeats to tell"
    monkeypatch.setattr(speed, "best", lambda run, repeat: run())
    assert speed.speeds(lambda n: n, lambda n: 2 * n, 2, 1).split() == "1 t/s 0 t/s 2.00".split()


def test_times_are_shares_of_the_full_cache_s_in_milliseconds(capsys, monkeypatch):
    model = decoder(vocab_size=2048, max_len=1024)
    seconds = iter((0, 10, 11, 20, 40, 43))  # reading 10, ending 1; 20, 3
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=seconds.__next__))
    speed.compression(model, ENCODING, dict(full=LayerCache, other=LayerCache), (16,), 1)
    assert capsys.readouterr().out.splitlines()[-1].split() == "other 3000.0 ms 30.0 % 2.00".split()


def test_a_model_of_transformers_is_timed_by_prompt_and_by_token(monkeypatch, capsys):
    """The clock goes on by a model that takes 1 ms a token, and 3 ms a token with a memory of ours."""
    def theirs(tokens, past_key_values, logits_to_keep=0):
        clock.append(clock[-1] + tokens.shape[1] * (3e-3 if past_key_values == "ours" else 1e-3))

    clock, theirs.config = [0.0], SimpleNamespace(vocab_size=9)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    monkeypatch.setattr("nanollm.hf.bridge.attach", lambda model: "ours")
    monkeypatch.setattr("nanollm.hf.bridge.detach", lambda model: None)
    speed.bridge(theirs, 4, (10,), 2)
    assert capsys.readouterr().out.splitlines()[-1].split() == (
        "10 10.00 ms 30.00 ms 3.00 1.00 ms 3.00 ms 3.00".split())


def test_a_step_is_told_in_units_of_the_full_caches_speed(monkeypatch, capsys):
    seconds = iter([0.004, 0.001, 0.002, 0.003, 0.003, 0.006, 0.005, 0.008])  # full, other, by turns
    rows, made = [], []
    monkeypatch.setattr(speed, "best", lambda run, repeat: rows.append(len(run())) or next(seconds))
    make = lambda *of, **knobs: made.append(knobs) or make_cache(*of, **knobs)
    monkeypatch.setattr(speed, "make_cache", make)
    speed.decoding(decoder(vocab_size=2048, max_len=64), dict(full=LayerCache, h2o=H2O), (1, 3), 20, 2)
    full, other = capsys.readouterr().out.splitlines()[-2:]
    assert full.split() == "full 2.00 ms 1.00 3.00 ms 1.00".split()
    assert other.split() == "h2o 1.00 ms 2.00 6.00 ms 0.50".split()
    assert rows == [1] * 4 + [3] * 4 and made == [{}, dict(budget=5)] * 2


def test_a_step_is_set_beside_its_floor_and_leaves_the_caches_as_they_were(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(speed, "compiled", lambda model: asked.append(model) or model)
    monkeypatch.setattr(speed.shutil, "which", lambda name: name == "g++")
    seconds = iter(range(1, 1000))
    monkeypatch.setattr(speed, "best", lambda run, repeat: run() and float(next(seconds)))
    speed.against_floor(decoder(vocab_size=2048, max_len=64), (60,), 8, 1, compiles=True)  # 60 + 8 > 64
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[2:] == ["floor", "attention", "ours", "compiled", "theirs", "ours/(floor+attention)"]
    for row, dtype, first in zip(rows, ("float32", "bfloat16"), (6, 16)):
        times = [1000 * x / 8 for x in range(first, first + 5)]
        ratio = (first + 2) / (2 * first + 1)
        assert row.split() == [dtype, "60", *(f"{x:.2f}" for x in times), f"{ratio:.2f}"]
    assert len(asked) == len(rows) == 2

    monkeypatch.setattr(speed.shutil, "which", lambda name: None)
    speed.against_floor(decoder(vocab_size=2048, max_len=64), (60,), 1, 1, compiles=True)
    out = capsys.readouterr().out
    assert out.startswith("no C++ compiler is here") and "compiled " not in out and len(asked) == 2


def test_what_is_compiled_is_the_decoder(monkeypatch):
    monkeypatch.setattr(speed.torch, "compile", lambda **how: lambda function: function)
    model = decoder(vocab_size=2048, max_len=64)
    tokens, (ours, theirs) = torch.arange(8)[None], (make_cache(model) for _ in range(2))
    for part in tokens.split((7, 1), 1):
        y, told = model(part, ours), speed.compiled(model)(part, theirs)
    assert torch.equal(y, told)
