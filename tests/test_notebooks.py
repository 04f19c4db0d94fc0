"""The stored notebooks are what `notebooks/build.py` makes of their sources; nothing is run here."""
import base64
from importlib.util import module_from_spec, spec_from_file_location
from io import BytesIO
from pathlib import Path

import jupytext
import nbformat
import numpy as np
from PIL import Image
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))


def test_areas_of_a_picture_keep_their_colour_and_edges_take_the_nearest():
    spec = spec_from_file_location("build", FOLDER / "build.py")
    spec.loader.exec_module(build := module_from_spec(spec))
    # 200 areas of 50 pixels, and 80 of one pixel, each near an area
    areas = np.stack([np.arange(200), 255 - np.arange(200), np.full(200, 128)], -1).repeat(50, 0)
    edges = np.stack([np.arange(80), 255 - np.arange(80), np.full(80, 131)], -1)
    picture, out = np.concatenate([areas, edges]).reshape(-1, 40, 3).astype(np.uint8), BytesIO()
    Image.fromarray(picture).save(out, "png")
    made = build.smaller(base64.b64encode(out.getvalue()).decode())
    small = Image.open(BytesIO(base64.b64decode(made)))
    change = np.abs(np.asarray(small.convert("RGB")).astype(int) - picture).reshape(-1, 3).max(-1)
    assert not change[:len(areas)].any() and change.max() == 3 and len(small.getcolors()) <= 256


def test_each_notebook_has_a_source():
    assert {book.stem for book in FOLDER.rglob("*.ipynb")} == {source.stem for source in SOURCES}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_cell_is_at_most_20_lines_of_100_columns(source):
    for cell in jupytext.read(source).cells:
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            assert len(lines) <= 20 and max(map(len, lines)) <= 100, cell.source[:300]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_notebook_is_its_source_run_once_from_top_to_bottom(source):
    book = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(book)
    cells = lambda notebook: [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells(book) == cells(jupytext.read(source)), f"python notebooks/build.py notebooks/{source.name}"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    kinds = {output.output_type for output in outputs} | {output.get("name") for output in outputs}
    assert outputs and not kinds & {"error", "stderr"}
