"""The speed tables: what cannot be measured is refused before any work, and noise is no speed."""
import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace

import pytest

from common import ENCODING, decoder
from nanollm import speed
from nanollm.cache import LayerCache

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("wrong, message", [
    (["--new", "0"], "new 0"), (["--repeat", "-1"], "repeat -1"),
    (["--lengths", "256", "0"], "length 0 must be a whole number from 1 to 2943"),
    (["--lengths", "2944"], "length 2944"), (["--lengths", "3041", "--new", "31"], "from 1 to 3040"),
    (["--lengths", "64"], "ada_kv at a quarter of 64 tokens: budget 16 must exceed the window 32"),
])
def test_what_cannot_be_measured_is_refused_before_any_work(wrong, message, monkeypatch):
    for name in ("over_length", "compression", "against_transformers"):
        monkeypatch.delattr(speed, name)
    with pytest.raises(ValueError, match=message):
        speed.main(wrong)


def test_a_refusal_is_one_line_and_exit_code_2_in_a_clean_shell():
    done = subprocess.run([sys.executable, "-m", "nanollm.speed", "--model", "NOWHERE"],
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
    speed.over_length(model, (1000,), 2, 1)
    slots, step, _, attention, *_ = capsys.readouterr().out.splitlines()[-1].split()
    assert slots == "1000" and 0.002 < float(attention) / float(step) < 2
    seconds = iter((0, 10, 11, 20, 40, 43))  # reading 10, ending 1; 20, 3
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=seconds.__next__))
    speed.compression(model, ENCODING, dict(full=LayerCache, other=LayerCache), (16,), 1)
    assert capsys.readouterr().out.splitlines()[-1].split() == "other 3000.0 ms 30.0 % 2.00".split()
