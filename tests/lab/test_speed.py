"""The time of each phase: of the right part, the fastest of all rounds, beside the peer's."""

import json
import runpy
import sys
from types import SimpleNamespace

import pytest

from common import ENCODING, decoder
from lab import speed
from lab.methods_by_name import pick


class Clock:
    """A clock that stands still until something that takes time is called."""

    now = 0.0

    def takes(self, *seconds):
        """Return a function that takes these seconds: its first call, its second, …"""
        left = iter(seconds)

        def run(*_):
            self.now += next(left)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(speed, "perf_counter", lambda: clock.now)
    return clock


def test_the_fastest_round_counts_and_short_ones_are_repeated(clock):
    assert speed.fastest(clock.takes(3, 0.25, 2), rounds=3) == 250  # milliseconds
    assert speed.fastest(clock.takes(0.5, 0.75, 0.125, 1), rounds=1, least=2) == 125


def test_each_phase_has_its_own_time_bytes_and_growth(clock, monkeypatch):
    model = decoder(n_layers=1, vocab_size=2048)

    def reads(_, arguments, __):  # 1/64 s a token
        clock.now += arguments[0].shape[1] / 64

    model.register_forward_hook(reads)
    # per method: three rounds, and once more for the memory
    ends = clock.takes(0.5, 0.25, 4, 0.125, 1, 2, 0.75, 0.125)
    compress = speed.compress

    def slow_compress(*arguments):
        ends()
        compress(*arguments)

    monkeypatch.setattr(speed, "compress", slow_compress)
    mib = iter([10, 13, 20, 24])  # before and after each method's caches
    monkeypatch.setattr(speed, "resident", lambda: next(mib) * 2**20)
    monkeypatch.setattr(speed, "cache_bytes", lambda caches: (0, 5 * 2**20))
    peer = SimpleNamespace(
        prompt=clock.takes(0.125, 3, 1, 2),  # the first call warms up
        step=clock.takes(*[0.125] * speed.STEPS, *[0.25] * speed.STEPS),
        ends=lambda tokens, rounds: {"snap_kv": 1500.0},
    )
    full, h2o = pick(["full", "h2o"]).values()
    methods = dict(full=full, snap_kv=h2o)
    rows = speed.measured(model, ENCODING, peer, methods, [(3, 16)], 25, rounds=3)
    table = [line.split() for line in speed.show(rows).splitlines()]
    phases = "prompt peer × end peer × step peer ×".split()
    assert table[0] == ["tokens", "batch", "method", *phases, "MiB", "process"]
    assert table[1] == "16 3 full 250 1000 4.00 250 15.62 125 8.00 5 3".split()
    assert table[2] == "16 3 snap_kv 750 1500 2.00 15.62 250 16.00 5 4".split()


def test_a_row_for_every_batch_and_method(checkpoint, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(speed, "SHORT", 0)
    file = tmp_path / "rows.json"
    options = "--methods snap_kv quantized_2 --lengths 140 --batches 1 2 --rounds 1"
    words = f"--model {checkpoint} {options} --json {file}"
    speed.main(words.split())
    rows = json.loads(file.read_text())
    assert capsys.readouterr().out == speed.show(rows) + "\n"
    measured = [(row["batch"], row["method"]) for row in rows]
    names = "full", "snap_kv", "quantized_2"
    floors = [(B, "floor") for B in (1, 2)]
    assert measured == [(B, name) for B in (1, 2) for name in names] + floors
    rows = rows[:-2]
    assert all(row["end"] > 0 and row["step"] > 0 for row in rows)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--lengths 64", "budget 16 must exceed the window"),
        ("--lengths 800", "length 800 must be a whole number from 1 to 704"),
        ("--json config.json", "config.json holds something"),
    ],
)
def test_what_cannot_be_timed_is_one_line(
    wrong, message, checkpoint, monkeypatch, capsys
):
    monkeypatch.chdir(checkpoint)
    monkeypatch.setattr(sys, "argv", ["speed", "--model", ".", *wrong.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(speed.__file__, run_name="__main__")
    out, error = capsys.readouterr()
    assert error.startswith(f"error: {message}") and out == ""
