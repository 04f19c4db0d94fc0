"""Figures: what is drawn is what was measured."""
import matplotlib.pyplot as plt
import pytest
import torch

from nanollm import plot
from nanollm.cache import LayerCache


def test_kept_tells_which_tokens_each_head_of_the_first_row_still_holds():
    cache = LayerCache()
    cache.write(torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 6, 4), torch.arange(6)[None])
    cache.keep(torch.tensor([[[0, 3, 5], [1, -1, -1]], [[2, 3, 4], [2, 3, 4]]]))
    assert plot.kept([cache], 5).tolist() == [[[True, False, False, True, False], [False, True, False, False, False]]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("methods", [["full"], ["full", "a", "b"], ["a"]])
def test_the_comparison_has_a_line_per_method_over_its_bytes(tmp_path, monkeypatch, methods):
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    rows = [dict(method=name, live=1024 * kib, aware=0.5, blind=0.25, kl=1 / kib, fraction=None if name == "full" else kib / 16)
            for name in methods for kib in (8, 2)]
    plot.comparison(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    for axis, values in zip(drawn[0].axes, ([0.5, 0.5], [0.25, 0.25], [1 / 2, 1 / 8])):
        lines = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
        assert lines.keys() == set(methods) - {"full"}
        for line in lines.values():
            assert line.get_xdata().tolist() == [2, 8] and line.get_ydata().tolist() == values


def test_every_line_can_be_told_apart_in_grey():
    styles = {(plot.MARKERS[i % len(plot.MARKERS)], plot.DASHES[i % len(plot.DASHES)]) for i in range(12)}
    assert len(styles) == 12
