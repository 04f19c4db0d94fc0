"""How cost grows: exponents, the three phases told apart, and what is refused before any work."""
import numpy as np
import pytest
import torch

from common import checkpoint_of_two_layers
from experiments import growth
from nanollm.commands import plot


def test_exponents_are_those_of_powers():
    n = np.array([512, 1024, 4096])
    assert [growth.exponent(n, 3e-6 * n ** e) for e in (0.0, 1.0, 2.0)] == pytest.approx([0, 1, 2], abs=1e-9)


def test_each_phase_has_its_own_seconds_and_the_fastest_step_counts(monkeypatch):
    """The clock goes on only by what the phases take."""
    clock, steps = [0.0], iter([5, 4, 3, 1, 2, 3, 4, 5])
    takes = lambda seconds: clock.append(clock[-1] + seconds)
    for name, does in dict(perf_counter=lambda: clock[-1], prefill=lambda *_: takes(16),
                           end_prompt=lambda *_: takes(8), make_cache=lambda *_: None,
                           random_tokens=lambda *_, seed: torch.zeros(1, 4)).items():
        monkeypatch.setattr(growth, name, does)
    assert growth.measure(lambda *_: takes(next(steps)), None, {}, 4) == [16, 8, 1]


def test_phases_stand_apart_and_long_texts_are_read_once(monkeypatch, capsys, tmp_path):
    asked = []

    def measure(model, Method, knobs, n):
        asked.append((n, knobs.get("budget")))
        return [n ** 2 / 1e6, n / 1e3, 1e-3]

    def saved(figure, file):
        drawn.extend(figure.axes)
        save(figure, file)

    drawn, save = [], plot.save
    monkeypatch.setattr(growth, "measure", measure)
    monkeypatch.setattr(plot, "save", saved)
    file = tmp_path / "growth.png"
    growth.main(["--lengths", "4096", "1024", "--methods", "full", "snap_kv", "--figure", str(file)])
    assert asked == [(1024, None), (1024, 256)] * 4 + [(4096, None), (4096, 1024)]
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("snap_kv")]
    assert rows == [["snap_kv", "1048.58", "16777.22", "2.00"], ["snap_kv", "1024.00", "4096.00", "1.00"],
                    ["snap_kv", "1.00", "1.00", "0.00"]]
    assert plot.is_ours(file.read_bytes()) and [axis.get_title() for axis in drawn] == [*growth.PHASES]
    for axis, (_, *ms, exponent) in zip(drawn, rows):
        line = next(line for line in axis.lines if line.get_label() == f"snap_kv, exponent {exponent}")
        assert line.get_xdata().tolist() == [1024, 4096] and axis.get_ylabel() == "ms"
        assert [f"{y:.2f}" for y in line.get_ydata()] == ms


def test_a_text_longer_than_the_model_was_made_for_is_measured(tmp_path, capsys):
    checkpoint_of_two_layers(tmp_path)  # for 800 tokens; KVzip reads on behind the text
    growth.main(["--lengths", "64", "900", "--methods", "full", "kvzip", "--model", str(tmp_path)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    reading, _, step = (row for row in rows if row[:1] == ["full"])
    assert float(reading[2]) > 2 * float(reading[1]) > 0 and float(step[1]) < float(reading[1])
    _, end, _ = (row for row in rows if row[:1] == ["kvzip"])
    assert float(end[2]) > float(end[1]) > 0


@pytest.mark.parametrize("wrong, message", [
    (["--lengths", "512", "512"], "one length, 512"), (["--lengths", "0", "512"], "length 0 must be"),
    (["--figure", "growth.txt"], "must end in .png"),
    (["--lengths", "64", "512", "--methods", "snap_kv"], "snap_kv at a quarter of 64 tokens: budget 16")])
def test_what_cannot_be_measured_is_refused_before_any_work(wrong, message, monkeypatch):
    monkeypatch.delattr(growth, "measure")
    with pytest.raises(ValueError, match=message):
        growth.main(wrong)
