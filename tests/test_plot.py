"""Figures: what is drawn is what was measured. Read from the artists, by place, words and colour."""
from matplotlib.colors import to_rgb
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from nanollm import plot
from nanollm.cache import LayerCache


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def darkness(color) -> float:
    return 1 - np.mean(to_rgb(color))


# ---- the comparison ---


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A function that draws rows and gives the figure that was saved."""
    def draw(rows):
        plot.comparison(rows, tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 5000
        (figure,) = closed
        return figure

    closed = []
    monkeypatch.setattr(plt, "close", closed.append)
    return draw


@pytest.mark.parametrize("live", [(0, 0), (0, 4096), (-5, 9)])
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_figure_is_marked_as_ours_and_drawn_whatever_a_cache_says_of_its_bytes(tmp_path, kind, live):
    measured = [dict(method=name, live=x, aware=0.5, blind=0.5, kl=1.0) for name, x in zip("ab", live)]
    plot.comparison(measured, tmp_path / f"figure.{kind}")
    assert plot.TITLE.encode() in (tmp_path / f"figure.{kind}").read_bytes()


def rows(methods):
    """No number twice, bytes in no order, and other bytes than live ones."""
    n = iter(range(1000))
    return [dict(method=name, fraction=None if name == "full" else kib / 16, live=1024 * (kib + 0.01 * next(n)), allocated=2 ** 20,
                 peak=2 ** 21, tokens=512, **{key: 0.99 - 0.01 * next(n) for key in ("aware", "blind", "kl")})
            for name in methods for kib in ([16] if name == "full" else [8, 1, 2])]


PANELS = {"aware": "accuracy, question in the prompt", "blind": "accuracy, question after compression",
          "kl": "KL(full ‖ compressed) per token, nats"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("methods", [["full"], ["full", "b", "a", "c"], ["a", "full", "b"], ["a"]])
def test_the_comparison_draws_every_number_of_every_row_and_no_other(drawn, methods):
    measured = rows(methods)
    figure = drawn(measured)
    full = [row for row in measured if row["method"] == "full"]
    styles = []
    for axis, (key, label) in zip(figure.axes, PANELS.items(), strict=True):
        assert axis.get_ylabel() == label and axis.get_xlabel() == "live cache after the text, KiB per sequence"
        level = [line for line in axis.lines if line.get_label().startswith("_")]
        lines = [line for line in axis.lines if line not in level]
        assert [line.get_label() for line in lines] == [name for name in methods if name != "full"]
        for line in lines:
            mine = sorted((row["live"] / 1024, row[key]) for row in measured if row["method"] == line.get_label())
            assert line.get_xydata().tolist() == [list(point) for point in mine]
        assert [list(line.get_ydata()) for line in level] == [[row[key]] * 2 for row in full]
        assert [(text.get_text(), text.get_position()[1]) for text in axis.texts] == [("full cache", row[key]) for row in full]
        (left, right), (low, high) = sorted(axis.get_xlim()), sorted(axis.get_ylim())
        assert all(low < row[key] < high and (left < row["live"] / 1024 < right or row in full) for row in measured)
        ticks, live = axis.get_xticks(), [row["live"] / 1024 for row in measured if row not in full or len(measured) == 1]
        assert ticks[0] <= min(live) and max(live) <= ticks[-1] and (ticks[1:] == 2 * ticks[:-1]).all()
        styles.append([(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines])
    assert styles[0] == styles[1] == styles[2] and len({style[1:] for style in styles[0]}) == len(styles[0])
    legend = [(text.get_text(), handle.get_color(), handle.get_marker(), handle.get_linestyle()) for key in figure.legends
              for text, handle in zip(key.get_texts(), key.get_lines())]
    assert legend == [(name, *style) for name, style in zip([name for name in methods if name != "full"], styles[0])]


def test_every_line_can_be_told_apart_in_grey():
    styles = {(plot.MARKERS[i % len(plot.MARKERS)], plot.DASHES[i % len(plot.DASHES)]) for i in range(12)}
    assert len(styles) == 12


# ---- a text ---

PIECES = ["The", " ", "key", "   of", "\n", "$a_b$", " is", "  42", ".", "end"]
SHOWN = ["The", " ", "key", " of", "↵", "$a_b$", " is", " 42", ".", "end"]
PLACES = [(0, 0), (3, 0), (4, 0), (7, 0), (10, 0), (0, 1), (5, 1), (8, 1), (11, 1), (0, 2)]  # in lines of at most 12 characters


def painted(axis, text):
    """The colour of the ground behind a text, or None; and whether the text is underlined from end to end."""
    (x, y), width = text.get_position(), len(text.get_text())
    ground = [box.get_facecolor() for box in axis.patches if np.allclose((box.get_x(), box.get_y()), (x, y - 0.5))
              and (box.get_width(), box.get_height()) == (width, 1)]
    lines = [line for lines in axis.collections for line in lines.get_segments()
             if np.allclose(line[:, 0], (x, x + width)) and all(abs(line[:, 1] - y - 0.45) < 0.1)]
    assert len(ground) < 2 and len(lines) < 2
    return ground[0] if ground else None, bool(lines)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_text_is_painted_and_underlined_token_by_token(columns):
    panels = {"one": np.linspace(1, 0.1, 10), "two": torch.tensor([0, 0.3, 1, 0, 0.5, 0, 0.7, 0, 0.9, 0])}
    (axis,) = plot.text(PIECES, panels, np.isin(range(10), [2, 7]), "gone", "there", "a fact", columns=columns, width=12).axes
    texts, corners = list(axis.texts), []
    for title, weights in panels.items():
        (heading, *tokens), texts = texts[:11], texts[11:]
        (left, top), (_, first) = heading.get_position(), tokens[0].get_position()
        assert heading.get_text() == title and top + 1 < first
        corners.append((left, top))
        for i, (token, (x, y)) in enumerate(zip(tokens, PLACES, strict=True)):
            assert token.get_text() == SHOWN[i] and not token.get_parse_math()
            assert token.get_position() == pytest.approx((left + x, first + y))
            ground, underlined = painted(axis, token)
            assert underlined == (i in (2, 7)) and token.get_color() == ("black" if weights[i] else "0.45")
            assert ground == pytest.approx(plt.cm.Blues(0.7 * float(weights[i]))) if weights[i] else ground is None
    (x, y), (right, below) = corners
    assert (right, below > y + 4) == (x, True) if columns == 1 else (right > x + 12, below) == (True, y)
    low, *scale, high, fact = texts  # the key, under everything
    assert [text.get_text() for text in texts] == ["gone", "  ", "  ", "  ", "there", "a fact"]
    assert {text.get_position()[1] > below + 4 for text in texts} == {True}
    assert painted(axis, low) == (None, False) and low.get_color() == "0.45" and painted(axis, fact) == (None, True)
    assert [painted(axis, text) for text in (*scale, high)] == [(plt.cm.Blues(0.7 * x), False) for x in (0.25, 0.5, 0.75, 1)]
    assert len(axis.patches) == 10 + 5 + 4 and len(axis.collections) == 2 + 2 + 1


def test_a_text_without_marks_underlines_nothing_and_has_no_word_for_them():
    (axis,) = plot.text(["a", "b"], {"": [0, 1]}).axes
    assert not axis.collections and [text.get_text() for text in axis.texts][-1] == "kept by every head"


def test_kept_tells_which_tokens_each_head_of_the_first_row_still_holds():
    cache = LayerCache()
    cache.write(torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 6, 4), torch.arange(6)[None])
    cache.keep(torch.tensor([[[0, 3, 5], [1, -1, -1]], [[2, 3, 4], [2, 3, 4]]]))
    assert plot.kept([cache], 5).tolist() == [[[True, False, False, True, False], [False, True, False, False, False]]]


# ---- heads and attention ---


@pytest.mark.parametrize("values, options, limit", [
    ([[0.1, 0.2], [0.35, 0.4], [0.5, 0.8]], {}, 0.8), (torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), dict(most=1), 1),
    ([[-3.0, 2.0, 1.0], [0.0, -1.0, 0.5]], dict(diverging=True, form="{:+.1f}"), 3)])
def test_heads_writes_each_number_at_its_layer_and_head(values, options, limit):
    _, axis = plt.subplots()
    plot.heads(axis, values, "title", **options)
    values, (image,) = np.asarray(values), axis.images
    told = {text.get_position(): text.get_text() for text in axis.texts}
    form = options.get("form", "{:.2f}")
    assert told == {(head, layer): form.format(values[layer, head]) for layer, head in np.ndindex(values.shape)}
    assert (image.get_array() == values).all()  # row i of the picture is at y = i, as the first row is on top
    assert tuple(image.get_extent()) == (-0.5, values.shape[1] - 0.5, values.shape[0] - 0.5, -0.5) and image.origin == "upper"
    assert (axis.get_title(), axis.get_xlabel(), axis.get_ylabel()) == ("title", "head", "layer")
    assert [*axis.get_xticks()] == [*range(values.shape[1])] and [*axis.get_yticks()] == [*range(values.shape[0])]
    most, least = (image.cmap(image.norm(x))[:3] for x in (limit, -limit if options.get("diverging") else 0))
    if options.get("diverging"):
        assert most[0] > most[2] and least[0] < least[2]  # orange; purple
    else:
        assert darkness(most) > darkness(image.cmap(image.norm(limit / 2))[:3]) > darkness(least)
    assert darkness(most) < 0.75  # black can be read on it
    assert image.norm.vmax > limit - 1e-6 and image.norm.vmin == (-image.norm.vmax if options.get("diverging") else 0)


def test_attention_is_drawn_as_it_is_a_row_per_query():
    p = torch.tensor([[0.6, 0.4, 0.0], [0.25, 0.65, 0.1]])
    _, axis = plt.subplots()
    plot.attention(axis, p, "title")
    (image,) = axis.images
    assert (image.get_array() == p.numpy()).all()
    assert tuple(image.get_extent()) == (-0.5, 2.5, 1.5, -0.5) and image.origin == "upper"
    assert (axis.get_title(), axis.get_xlabel(), axis.get_ylabel()) == ("title", "key", "query")
    assert image.norm([0, 0.01, 0.25, 1]).tolist() == pytest.approx([0, 0.1, 0.5, 1])
    assert to_rgb(image.cmap(1.0)) == (0, 0, 0) and to_rgb(image.cmap(0.0)) == (1, 1, 1)


@pytest.mark.parametrize("draw, message", [
    (lambda: plot.text(["a", "b"], {"one": [0, 1], "two": [0]}), "'two' has values of shape (1,); 2 pieces need one each"),
    (lambda: plot.text(["a", "b"], {"one": torch.zeros(1, 2)}), "'one' has values of shape (1, 2); 2 pieces need one each"),
    (lambda: plot.text(["a", "b"], {"one": [0, 1]}, [True]), "'marked' has values of shape (1,); 2 pieces need one each"),
    (lambda: plot.heads(None, torch.zeros(2, 2, 3), "map"), "'map' has values of shape (2, 2, 3), which must be (L, heads)"),
    (lambda: plot.attention(None, torch.zeros(4, 4, 3), "map"), "'map' has values of shape (4, 4, 3), which must be (T, S)"),
    (lambda: plot.comparison([], None), "there are no rows to draw")])
def test_what_would_be_drawn_wrong_is_refused(draw, message):
    with pytest.raises(ValueError) as error:
        draw()
    assert str(error.value) == message and not plt.get_fignums()
