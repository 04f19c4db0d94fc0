"""The stored notebooks have the cells of their sources, run once from top to bottom."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))


def test_each_notebook_has_a_source():
    assert {book.stem for book in FOLDER.rglob("*.ipynb")} == {
        source.stem for source in SOURCES
    }


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_notebook_is_its_source_run_once_from_top_to_bottom(source):
    # here, as every process reads every file of tests, and this takes seconds
    import jupytext
    import nbformat

    book = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(book)
    cells = lambda notebook: [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells(book) == cells(jupytext.read(source)), (
        f"python notebooks/build.py notebooks/{source.name}"
    )
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    for cell in code:
        lines = cell.source.splitlines()
        assert len(lines) <= 20 and max(map(len, lines)) <= 100, cell.source[:300]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    kinds = {output.output_type for output in outputs} | {
        output.get("name") for output in outputs
    }
    assert outputs and not kinds & {"error", "stderr"}
