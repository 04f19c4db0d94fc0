"""Drive the playground in a real browser: `python tests/browser.py` takes the picture of notebook 09.

It needs `pip install playwright` and a Chromium on the PATH, which requirements.txt does not install.
"""
from contextlib import contextmanager
import os
from pathlib import Path
import re
from shutil import which
import subprocess
import sys
import tempfile
import time

import nbformat

ROOT = Path(__file__).parents[1]
CELL = f"""\
import sys; sys.path.insert(0, {str(ROOT)!r})
from nanollm import TINY
from nanollm.commands.playground import Playground
from nanollm.commands.registry import load
Playground(*load(TINY, "cpu"))"""


@contextmanager
def server(folder: Path):
    """Start a Jupyter server; yield the address of a notebook in `folder` whose one cell is CELL."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)], metadata=dict(
        kernelspec=dict(name="python3", display_name="Python 3", language="python")))
    nbformat.write(book, folder / "play.ipynb")
    command = [sys.executable, "-m", "notebook", "--no-browser", "--allow-root", "--port=0",
               "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"]
    output, environment = folder / "log", os.environ | dict(JUPYTER_CONFIG_DIR=str(folder))
    with open(output, "w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        while not (port := re.search(r"http://[^:/]+:(\d+)/", output.read_text())):
            if run.poll() is not None:
                raise RuntimeError(output.read_text())
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port[1]}/notebooks/play.ipynb"
    finally:
        run.terminate()
        run.wait()


@contextmanager
def playground():
    """Yield a browser page on which the playground has answered."""
    from playwright.sync_api import sync_playwright
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=dict(width=1100, height=1100), device_scale_factor=1)
        page.set_default_timeout(90_000)
        page.goto(address)
        page.locator(".jp-Cell .cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        page.get_by_text("It answers").wait_for()
        yield page
        browser.close()


def wait_for(page, text: str):
    """Wait until the playground shows `text`; TimeoutError if it does not."""
    page.locator(".widget-html").filter(has_text=text).first.wait_for()


def choose(page, method: str, setting: str = "agnostic"):
    page.locator(".widget-dropdown select").first.select_option(method)
    page.get_by_role("button", name=setting).click()


def main(file: str | Path = ROOT / "notebooks/playground.png"):
    with playground() as page:
        choose(page, "kvzip")
        wait_for(page, "It answers 2356., the full cache 2356.")
        page.locator(".jp-OutputArea-output .widget-vbox").first.screenshot(path=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
