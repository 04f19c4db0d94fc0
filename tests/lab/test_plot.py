"""Figures: files that are ours, what is drawn in them, and what each head still holds."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from nanollm.cache import Slots
from lab import plot


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def rows(methods, kib=(8, 1, 2)) -> list[dict]:
    return [
        dict(
            method=name,
            live_16=1024 * x,
            aware=0.9,
            agnostic=0.5,
            a_agnostic_se=0.3,
            b_agnostic_se=0.4,
            kl=0.1 * i,
            documents=4,
            tokens=64,
        )
        for i, name in enumerate(methods)
        for x in ([16] if name == "full" else kib)
    ]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
@pytest.mark.parametrize("methods", [["full"], ["mine+critical", *plot.FAMILIES]])
def test_a_comparison_is_drawn_into_a_file_that_is_ours(tmp_path, kind, methods):
    file = tmp_path / f"figure.{kind}"
    plot.comparison(rows(methods), file)
    data = file.read_bytes()
    assert plot.is_ours(data)
    assert not plot.is_ours(data.replace(b"Figure", b"figure"))


def test_values_errors_and_names_are_drawn_over_the_bytes(monkeypatch):
    monkeypatch.setattr(plot, "save", lambda figure, file: None)
    plot.comparison(rows(["full", "random", "mine"], [4, 1]), None)
    expected = dict(agnostic=(0.5, 0.25), aware=(0.9, 0), kl=(0.2, 0))
    for axis, (y, error) in zip(plt.gcf().axes, expected.values()):
        bars = {x.get_label(): x for x in axis.containers}
        line, _, (bar,) = bars["mine"].lines
        assert line.get_xdata().tolist() == [1, 4]
        assert line.get_ydata().tolist() == [y, y]
        (low, high), _ = bar.get_segments()
        assert (high - low).tolist() == [0, 2 * error]
        named = {text.get_text(): text.xy for text in axis.texts}
        assert named.keys() == {"full", "random", "mine"}
        assert named["mine"] == (4, y)


def test_methods_of_ones_own_are_drawn_first_and_what_is_left_out_is_named():
    names = "key_diff snap_kv@3 random kvzip_fast h2o kvzip snap_kv".split()
    own = [f"mine{i}" for i in range(6)]
    shown, left_out = plot.drawn([*names, "full", *own])
    assert shown == [*own, "snap_kv", "kvzip", "h2o", "random"]
    assert left_out == ["key_diff", "snap_kv@3", "kvzip_fast"]


def test_kept_tells_which_tokens_each_head_of_the_first_row_still_holds():
    cache = Slots()
    x = torch.zeros(2, 2, 6, 4)
    cache.write(x, x, torch.arange(6)[None])
    cache.keep(torch.tensor([[[0, 3, 5], [1, -1, -1]], [[2, 3, 4], [2, 3, 4]]]))
    found = plot.kept([cache], 5)
    assert np.argwhere(found).tolist() == [[0, 0, 0], [0, 0, 3], [0, 1, 1]]


def test_texts_and_heads_are_drawn_and_what_does_not_fit_is_refused(tmp_path):
    pieces = ["The k", "ey", "\n", "$a_b$"]
    marked = [False, True, False, False]
    text = plot.text(pieces, {"one": [0, 0.3, 1, 0]}, marked, width=6)
    # a word that does not fit begins a line
    drawn = []
    for words in text.axes[0].texts[1:6]:
        x, _ = words.get_position()
        drawn.append((x, words.get_text()))
    assert drawn == [
        (0, "The "),
        (0, "k"),
        (1, "ey"),
        (3, " "),
        (0, "$a_b$"),
    ]
    plot.save(text, tmp_path / "text.png")
    _, axis = plt.subplots()
    plot.heads(axis, torch.rand(3, 2), "title", diverging=True)
    with pytest.raises(ValueError):
        plot.text(["a", "b"], {"one": [0, 1], "two": [0]})
