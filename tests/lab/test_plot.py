"""Figures: files that are ours, one look per method, and what each head still holds."""

from matplotlib.colors import to_rgb
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
        dict(method=name, live_16=1024 * x, aware=0.9, agnostic=0.5, kl=0.1 * i)
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
    assert len(data) > 5000
    assert not plot.is_ours(data.replace(b"Figure", b"figure"))


def test_accuracies_and_kl_are_drawn_over_the_bytes(monkeypatch):
    monkeypatch.setattr(plot, "save", lambda figure, file: None)
    plot.comparison(rows(["random", "h2o"], [4, 1]), None)
    for axis, y in zip(plt.gcf().axes, (0.9, 0.5, 0.1), strict=True):
        lines = {line.get_label(): line for line in axis.lines}
        assert lines["h2o"].get_xdata().tolist() == [1, 4]
        assert lines["h2o"].get_ydata().tolist() == [y, y]


def test_of_many_methods_eight_are_drawn_a_familys_own_first():
    first = "chunk_kv h2o kv_reviver quantized_2 question_gates scissorhands snap_kv"
    first = [*first.split(), "streaming_llm"]
    more = ["chunk_kv_reuse", "full", "quantized_3", "snap_kv+critical"]
    assert sorted(plot.drawn(sorted(first + more) * 2)) == first
    few = plot.drawn(["snap_kv+theta", "full", "mine", "snap_kv+theta"])
    assert sorted(few) == ["mine", "snap_kv+theta"]


def test_families_can_be_told_apart_in_grey():
    colors, markers = zip(*plot.FAMILIES.values())
    assert len({*colors}) == len({*markers}) == len(plot.FAMILIES)
    common = "snap_kv ada_kv pyramid_kv chunk_kv scissorhands kv_reviver h2o"
    names = [*common.split(), "streaming_llm"]
    shades = [to_rgb(plot.style(name)["color"]) for name in names]
    shades = np.sort(np.dot(shades, (0.299, 0.587, 0.114)))
    assert min(np.diff(shades)) > 0.015
    assert shades[-1] < 0.75  # none vanishes on white


@pytest.mark.parametrize(
    "family, names",
    [
        (
            "ada_kv",
            "ada_kv ada_kv+critical ada_kv+critical_code ada_kv+theta ada_kv+residual "
            "ada_kv+chunk ada_kv+semantic",
        ),
        ("chunk_kv", "chunk_kv chunk_kv_reuse chunk_kv_semantic"),
        ("kvzip", "kvzip kvzip@4 kvzip_fast kvzip_recent"),
    ],
)
def test_a_variant_has_its_familys_look_but_for_the_dash(family, names):
    styles = [plot.style(name) for name in names.split()]
    for look in styles:
        assert (look["color"], look["marker"]) == plot.FAMILIES[family]
    assert styles[0]["linestyle"] == "-"
    assert len({look["linestyle"] for look in styles}) == len(styles)


def test_kept_tells_which_tokens_each_head_of_the_first_row_still_holds():
    cache = Slots()
    x = torch.zeros(2, 2, 6, 4)
    cache.write(x, x, torch.arange(6)[None])
    cache.keep(torch.tensor([[[0, 3, 5], [1, -1, -1]], [[2, 3, 4], [2, 3, 4]]]))
    found = plot.kept([cache], 5)
    assert np.argwhere(found).tolist() == [[0, 0, 0], [0, 0, 3], [0, 1, 1]]


def test_texts_and_heads_are_drawn_and_what_does_not_fit_is_refused(tmp_path):
    pieces = ["The", " key", "\n", "$a_b$"]
    text = plot.text(pieces, {"one": [0, 0.3, 1, 0]}, [False, True, False, False])
    plot.save(text, tmp_path / "text.png")
    _, axis = plt.subplots()
    plot.heads(axis, torch.rand(3, 2), "title", diverging=True)
    plot.attention(axis, torch.rand(4, 5), "title")
    with pytest.raises(ValueError):
        plot.text(["a", "b"], {"one": [0, 1], "two": [0]})
