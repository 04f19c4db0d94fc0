"""Figures: what is drawn is what was measured. Read from the artists, by place, words and colour."""
from matplotlib.colors import to_rgb
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from nanollm.cache import LayerCache
from nanollm.commands import plot


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind, live", [("png", (0, 0)), ("svg", (0, 4096)), ("pdf", (-5, 9))])
def test_any_bytes_are_drawn_and_the_file_is_marked(tmp_path, monkeypatch, kind, live):
    measured = [dict(method=name, live_16=x, aware=0.5, blind=0.5, kl=1.0) for name, x in zip("ab", live)]
    file, other = tmp_path / f"figure.{kind}", tmp_path / f"other.{kind}"
    plot.comparison(measured, file)
    data = file.read_bytes()
    plot.save(plt.figure(), other, f"{plot.TITLE}, changed")
    assert plot.is_ours(data)
    assert not any(map(plot.is_ours, (b"\x89PNG, Matplotlib", b"mine: " + data, other.read_bytes())))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: open(file, "wb"))
    with pytest.raises(TypeError):  # what is written first is no file
        plot.comparison(measured, file)
    assert file.read_bytes() == data


def rows(methods, budgets=(8, 1, 2)):
    """No number twice, bytes in no order, and other bytes than live ones."""
    n = iter(range(1000))
    return [dict(method=name, live_16=1024 * (kib + 0.01 * next(n)), allocated=2 ** 20, peak=2 ** 21,
                 **{key: 0.99 - 0.01 * next(n) for key in ("aware", "blind", "kl")})
            for name in methods for kib in ([16] if name == "full" else budgets)]


PANELS = {"aware": "accuracy, question in the prompt", "blind": "accuracy, question after compression",
          "kl": "KL(full ‖ compressed) per token, nats"}


def check_names(axis, lines, names):
    """Each line is named at the right edge, its name joined to its last point, and no two names overlap."""
    notes = {note.get_text(): note for note in axis.texts if hasattr(note, "xyann")}
    assert [*notes] == [line.get_label() for line in lines] == names
    for line in lines:
        note = notes[line.get_label()]
        assert tuple(note.xy) == tuple(line.get_xydata()[-1]) and note.xyann[0] > 1
        look = dict(color=line.get_color(), marker=line.get_marker(), linestyle=line.get_linestyle())
        assert look == plot.style(line.get_label())
        assert to_rgb(note.arrow_patch.get_edgecolor()) == to_rgb(line.get_color())
    heights = sorted(note.xyann[1] for note in notes.values())
    assert all(b - a > 0.04 for a, b in zip(heights, heights[1:]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("methods", [["cam", "full", "h2o", "ada_kv"]])
def test_several_budgets_are_drawn_over_the_bytes(drawn, methods):
    measured, names = rows(methods), [name for name in methods if name != "full"]
    full, others = ([row for row in measured if (row["method"] == "full") == of] for of in (True, False))
    for axis, (key, label) in zip(drawn(measured).axes, PANELS.items(), strict=True):
        assert axis.get_ylabel() == label
        assert axis.get_xlabel() == "cache after the text, KiB per sequence (numbers of 16 bits)"
        level = [line for line in axis.lines if line.get_label().startswith("_")]
        lines = [line for line in axis.lines if line not in level]
        check_names(axis, lines, names)
        for line in lines:
            mine = [row for row in others if row["method"] == line.get_label()]
            assert line.get_xydata().tolist() == sorted([row["live_16"] / 1024, row[key]] for row in mine)
        assert [list(line.get_ydata()) for line in level] == [[row[key]] * 2 for row in full]
        named = [text for text in axis.texts if not hasattr(text, "xyann")]
        assert [(text.get_text(), text.get_position()[1]) for text in named] == [
            ("full cache", row[key]) for row in full]

        (left, right), (low, high) = sorted(axis.get_xlim()), sorted(axis.get_ylim())
        live = [row["live_16"] / 1024 for row in others]
        assert all(low < row[key] < high for row in measured) and left < min(live) and max(live) < right
        assert low < 0 and axis.xaxis.get_major_formatter()(8192) == "8192"
        assert axis.yaxis.get_major_formatter()(0.01) == "0.01" if key == "kl" else high > 1
        ticks = axis.get_xticks()
        assert ticks[0] <= min(live) and max(live) <= ticks[-1] and (ticks[1:] == 2 * ticks[:-1]).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("methods", [["full"], ["full", "h2o", "mine+critical"], ["cam", "h2o"]])
def test_one_budget_is_drawn_from_aware_to_blind(drawn, methods):
    measured = {row["method"]: row for row in rows(methods, [4])}
    slopes, kl = drawn([*measured.values()]).axes
    assert [text.get_text() for text in slopes.get_xticklabels()] == [
        "aware:\nquestion in the prompt", "blind:\nquestion after compression"]
    low, high = slopes.get_ylim()
    assert slopes.get_ylabel() == "accuracy, mean over the tasks" and low < 0 < 1 < high
    check_names(slopes, slopes.lines, sorted(methods, key=lambda name: name == "full"))
    for line in slopes.lines:
        row = measured[line.get_label()]
        assert line.get_xydata().tolist() == [[0, row["aware"]], [1, row["blind"]]]
    points = {line.get_label(): line.get_xydata().tolist() for line in kl.lines}
    assert {name: at for name, at in points.items() if not name.startswith("_")} == {
        name: [[row["live_16"] / 1024, row["kl"]]] for name, row in measured.items() if name != "full"}


def test_of_many_methods_eight_are_drawn_a_familys_own_first():
    first = ["chunk_kv", "duo_attention", "h2o", "kv_reviver", "quantized_2", "scissorhands", "snap_kv",
             "streaming_llm"]
    more = ["ada_kv", "cam", "chunk_kv_reuse", "full", "mine", "quantized_3", "snap_kv+critical"]
    assert plot.drawn(sorted(first + more) * 2) == first
    assert plot.drawn(["snap_kv+theta", "full", "mine", "snap_kv+theta"]) == ["snap_kv+theta", "mine"]
    assert plot.family_of("camera") is None
    assert len({plot.style(f"mine{more}")["color"] for more in ("", "+critical", "+theta", "+chunk")}) == 1


@pytest.mark.parametrize("heights, moved", [
    ([0.5, 0.1, 0.9], [0.5, 0.1, 0.9]), ([0.5, 0.5, 0.5], [0.5, 0.6, 0.7]), ([], []),
    ([1.2, 0.95, 0.9], [1.0, 0.9, 0.8])])
def test_labels_are_moved_apart_and_stay_inside(heights, moved):
    assert plot.apart(heights, 0.1) == pytest.approx(moved)


def test_families_can_be_told_apart_in_grey():
    common = "snap_kv ada_kv pyramid_kv chunk_kv scissorhands kv_reviver h2o streaming_llm".split()
    assert all(len({*x}) == len(plot.FAMILIES) for x in zip(*plot.FAMILIES.values()))
    shades = sorted(np.dot(to_rgb(plot.style(name)["color"]), (0.299, 0.587, 0.114)) for name in common)
    assert min(np.diff(shades)) > 0.015 and shades[-1] < 0.75  # nor does one vanish on white


@pytest.mark.parametrize("family, variants", [
    ("ada_kv", ["", "+critical", "+critical_code", "+theta", "+residual", "+chunk", "+semantic",
                "+no pool"]),
    ("chunk_kv", ["", "_reuse", "_semantic"]), ("kv_reviver", ["", "_mean", "_shrunk"]),
    ("quantized", ["_2", "_3", "_4"]), ("kvzip", ["", "_4", "_fast", "_recent"]),
    ("duo_attention", ["", "_kvzip"])])
def test_a_variant_has_its_familys_look_but_for_the_dash(family, variants):
    styles = [plot.style(family + variant) for variant in variants]
    assert {(look["color"], look["marker"]) for look in styles} == {plot.FAMILIES[family]}
    assert styles[0]["linestyle"] == "-" and len({look["linestyle"] for look in styles}) == len(styles)


# ---- a text ---

PIECES = ["The", " ", "key", "   of", "\n", "$a_b$", " is", "  42", ".", "end"]
SHOWN = ["The", " ", "key", " of", "↵", "$a_b$", " is", " 42", ".", "end"]
PLACES = [(0, 0), (3, 0), (4, 0), (7, 0), (10, 0), (0, 1), (5, 1), (8, 1), (11, 1), (0, 2)]  # 12 wide


def painted(axis, text):
    """The colour of the ground behind a text, or None; and whether the text is underlined from end to end."""
    (x, y), width = text.get_position(), len(text.get_text())
    ground = [box.get_facecolor() for box in axis.patches
              if np.allclose((*box.get_xy(), box.get_width(), box.get_height()), (x, y - 0.5, width, 1))]
    lines = [line for lines in axis.collections for line in lines.get_segments()
             if np.allclose(line[:, 0], (x, x + width)) and all(abs(line[:, 1] - y - 0.45) < 0.1)]
    assert len(ground) < 2 and len(lines) < 2
    return ground[0] if ground else None, bool(lines)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_text_is_painted_and_underlined_token_by_token(columns):
    panels = {"one": np.linspace(1, 0.1, 10), "two": torch.tensor([0, 0.3, 1, 0, 0.5, 0, 0.7, 0, 0.9, 0])}
    (axis,) = plot.text(PIECES, panels, np.isin(range(10), [2, 7]), "gone", "there", "a fact",
                        columns=columns, width=12).axes
    texts, corners = list(axis.texts), []
    for title, weights in panels.items():
        (heading, *tokens), texts = texts[:11], texts[11:]
        (left, top), (_, first) = heading.get_position(), tokens[0].get_position()
        assert heading.get_text() == title and top + 1 < first
        assert heading.get_fontsize() == pytest.approx(max(1.1 * tokens[0].get_fontsize(), 9))
        corners.append((left, top))
        for i, (token, (x, y)) in enumerate(zip(tokens, PLACES, strict=True)):
            assert token.get_text() == SHOWN[i] and not token.get_parse_math()
            assert token.get_position() == pytest.approx((left + x, first + y))
            ground, underlined = painted(axis, token)
            assert underlined == (i in (2, 7)) and token.get_color() == ("black" if weights[i] else "0.45")
            blue = pytest.approx(plt.cm.Blues(0.7 * float(weights[i])))
            assert ground == (blue if weights[i] else None)
    (x, y), (right, below) = corners
    assert (right, below > y + 4) == (x, True) if columns == 1 else (right > x + 12, below) == (True, y)
    assert [text.get_text() for text in texts] == ["gone", "  ", "  ", "  ", "there", "a fact"]  # the key
    assert all(text.get_position()[1] > below + 4 for text in texts) and texts[0].get_color() == "0.45"
    scale = [(plt.cm.Blues(0.7 * x), False) for x in (0.25, 0.5, 0.75, 1)]
    assert [painted(axis, text) for text in texts] == [(None, False), *scale, (None, True)]
    assert len(axis.patches) == 10 + 5 + 4 and len(axis.collections) == 2 + 2 + 1
    (axis,) = plot.text(["a", "b"], {name: [0, 1] for name in "xyz"}, columns=2).axes
    assert not axis.collections and axis.texts[-1].get_text() == "kept by every head"  # no word for marks
    *tokens, end = [text.get_position()[1] for text in axis.texts[:-4]]  # the key is below all, and inside
    assert max(tokens) + 1 < end <= axis.get_ylim()[0] - 0.5


def test_kept_tells_which_tokens_each_head_of_the_first_row_still_holds():
    cache = LayerCache()
    cache.write(torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 6, 4), torch.arange(6)[None])
    cache.keep(torch.tensor([[[0, 3, 5], [1, -1, -1]], [[2, 3, 4], [2, 3, 4]]]))
    assert plot.kept([cache], 5).tolist() == [[[True, False, False, True, False],
                                               [False, True, False, False, False]]]


# ---- heads and attention ---


@pytest.mark.parametrize("values, options, limit", [
    ([[0.1, 0.2], [0.35, 0.4], [0.5, 0.8]], {}, 0.8),
    (torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), dict(most=1), 1),
    ([[-3.0, 2.0, 1.0], [0.0, -1.0, 0.5]], dict(diverging=True, form="{:+.1f}"), 3)])
def test_heads_writes_each_number_at_its_layer_and_head(values, options, limit):
    _, axis = plt.subplots()
    plot.heads(axis, values, "title", **options)
    values, (image,), form = np.asarray(values), axis.images, options.get("form", "{:.2f}")
    layers, heads = values.shape
    told = {text.get_position(): text.get_text() for text in axis.texts}
    assert told == {(head, layer): form.format(x) for (layer, head), x in np.ndenumerate(values)}
    assert (image.get_array() == values).all()  # row i of the picture is at y = i, as the first row is on top
    assert tuple(image.get_extent()) == (-0.5, heads - 0.5, layers - 0.5, -0.5) and image.origin == "upper"
    assert (axis.get_title(), axis.get_xlabel(), axis.get_ylabel()) == ("title", "head", "layer")
    assert ([*axis.get_xticks()], [*axis.get_yticks()]) == ([*range(heads)], [*range(layers)])

    low = -1 if options.get("diverging") else 0
    colours = [np.array(image.cmap(image.norm(x * limit))[:3]) for x in (low, 0.5, 1)]
    least, half, most = (1 - colour.mean() for colour in colours)
    assert least < 0.75 > most > half  # dark, but the numbers can be read
    if low:
        assert colours[2][0] > colours[2][2] and colours[0][0] < colours[0][2]  # orange; purple
    assert image.norm.vmax > limit - 1e-6 and image.norm.vmin == low * image.norm.vmax


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
    (lambda: plot.text(["a", "b"], {"one": [0, 1], "two": [0]}),
     "'two' has values of shape (1,); 2 pieces need one each"),
    (lambda: plot.heads(None, torch.zeros(2, 2, 3), "map"),
     "'map' has values of shape (2, 2, 3), which must be (L, heads)"),
    (lambda: plot.comparison([], None), "there are no rows to draw")])
def test_what_would_be_drawn_wrong_is_refused(draw, message):
    with pytest.raises(ValueError) as error:
        draw()
    assert str(error.value) == message and not plt.get_fignums()
