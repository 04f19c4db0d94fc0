"""Run the notebooks and store them with their outputs: python notebooks/build.py [notebooks/NN_name.py ...]

Each NN_name.py (jupytext, py:percent) becomes the NN_name.ipynb beside it. Two builds on one machine give the
same file, but for the times that a notebook measures.
"""
import base64
from io import BytesIO
import os
from pathlib import Path
import sys

import jupytext
from nbclient import NotebookClient
import nbformat
import numpy as np
from PIL import Image

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"


def build(source: Path):
    book = jupytext.read(source)
    book.metadata = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
    for i, cell in enumerate(book.cells):
        cell.id, cell.metadata = f"{source.stem}-{i}", {}
    NotebookClient(book, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True,
                   resources=dict(metadata=dict(path=source.parent))).execute()
    book.metadata.language_info = dict(name="python")
    for cell in book.cells:
        if "outputs" in cell:  # a stored widget does nothing, and its name differs from build to build
            cell.outputs = [x for x in cell.outputs if WIDGET not in x.get("data", {})
                            and not x.get("text", "").startswith("USDT:")]  # a line of torch's profiler, with its date
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    book.metadata.pop("widgets", None)
    nbformat.validate(book)
    nbformat.write(book, source.with_suffix(".ipynb"))


def smaller(png: str) -> str:
    """The picture (base64) in at most 256 colours. The commonest stay as they are; the others, mostly on the edges of
    letters and lines, take the nearest of them."""
    picture, out = np.asarray(Image.open(BytesIO(base64.b64decode(png))).convert("RGB"), dtype=int), BytesIO()
    colours, place, pixels = np.unique(picture @ [1 << 16, 1 << 8, 1], return_inverse=True, return_counts=True)
    colours = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], -1)
    common = colours[(-pixels).argsort(kind="stable")[:256]]
    nearest = np.array([np.abs(common - colour).sum(-1).argmin() for colour in colours])
    small = Image.fromarray(nearest[place].reshape(picture.shape[:2]).astype(np.uint8), "P")
    small.putpalette(common.astype(np.uint8).tobytes())
    small.save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # figures go into the notebook
    for source in map(Path, sys.argv[1:] or sorted(HERE.glob("[0-9]*.py"))):
        print(source, flush=True)
        build(source)
