"""docs/index.html in Chromium: its decoder keeps and answers what Python's does, and every control
works."""

from base64 import b64decode
import json
import re
from shutil import which

import numpy as np
import pytest
import torch

from commands import refused
from common import checkpoint_of_two_layers
from lab import corpus, explore
from lab.loading import load
from lab.methods_by_name import pick
from lab.one_page import PAGE, QUESTION, answer, pieces, prompt
from nanollm import TINY
from nanollm.cache import make_cache

FILE = explore.ROOT / "docs/index.html"
WIDE = dict(width=1300, height=900)


@pytest.fixture(scope="module")
def browser():
    play = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if not which("chromium"):
        pytest.skip("no chromium")
    with play.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


def opened(browser, file=FILE, address="", size=WIDE, **options):
    """Open the page; collect what it requests and reports."""
    page = browser.new_page(viewport=size, **options)
    page.complaints, page.requests = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(f"file://{file}{address}")
    page.locator(".verdict").first.wait_for()
    return page


@pytest.fixture(scope="module")
def page(browser):
    """The page, after its decoder has read the text."""
    page = opened(browser)
    page.get_by_text("tokens here in").wait_for()
    yield page
    assert not page.complaints
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "blob"}


def asked(page, **message) -> dict:
    return page.evaluate(
        "async message => { const reply = await ask(message); "
        "if (reply.kept) reply.kept = Array.from(reply.kept); return reply; }",
        message,
    )


@pytest.fixture(scope="module")
def data():
    return json.loads(re.search(r'id="data">(.*?)</script>', FILE.read_text(), re.S)[1])


@pytest.fixture(scope="module")
def shipped():
    model, encoding = load(TINY, "cpu")
    return explore.rounded_model(model), encoding


def test_the_file_is_what_the_command_writes(data):
    text, (model, encoding) = FILE.read_text(), load(TINY, "cpu")
    for part in explore.PARTS.iterdir():
        for piece in re.split(r"/\*[A-Z]+\*/", part.read_text()):
            assert piece in text, (
                f"{part.name} has changed; run python -m nanollm explore --beside smollm2"
            )
    sizes, weights = explore.packed(model, encoding)
    assert (
        b64decode(re.search(r'id="weights">(.*?)</script>', text, re.S)[1]) == weights
    )
    assert data["model"] == json.loads(json.dumps(sizes)) | dict(
        methods=list(explore.LIVE)
    )
    assert data["curve"] == explore.curve() and data["text"] == PAGE
    assert (
        data["beside"]["name"] == "smollm2"
        and data["beside"]["views"].keys() == data["views"].keys()
    )
    assert FILE.stat().st_size < 6e6


def test_an_8_bit_weight_is_off_by_half_a_step():
    weight = torch.randn(5, 64)
    codes, scales = explore.rounded(weight)
    assert codes.dtype == torch.int8
    assert (
        (codes * scales[:, None] - weight).abs() <= scales[:, None] / 2 + 1e-7
    ).all()


def agrees(page, stored, name):
    """Check that the page's decoder keeps and answers what Python stored under a name."""
    method, keep, setting = name.split()
    options = dict(method=method, keep=float(keep), aware=setting == "aware")
    reply = asked(page, do="compress", **options)
    packed = np.frombuffer(b64decode(stored["kept"]), np.uint8)
    kept = np.unpackbits(packed, bitorder="little")
    kept = kept[: len(reply["kept"])].tolist()
    assert reply == stored | dict(kept=kept), name


def test_the_page_keeps_and_answers_what_python_stored(page, data, shipped):
    model, encoding = shipped
    tokens, _ = prompt(model, encoding, PAGE, QUESTION)
    assert data["tokens"] == pieces(encoding, tokens[0].tolist())
    for name, stored in data["views"].items():
        if name.split()[0] in explore.LIVE:
            agrees(page, stored, name)


@pytest.mark.parametrize("number", range(4))
def test_other_texts(page, shipped, number):
    model, encoding = shipped
    source = "".join(corpus.kept()["documents"])[5000 * number :]
    question = "\nQ: The code of moon is"
    text = f"{source[:300]} The code of moon is {4711 + number}. naïve 1, 22, 333 – ✓ "
    text += source[300 : 420 + 40 * number]
    read = asked(page, do="read", text=text, question=question)
    tokens, cuts = prompt(model, encoding, text, question)
    assert read["tokens"] == pieces(encoding, tokens[0].tolist())
    assert read["cut"] == cuts["agnostic"]
    full = answer(model, tokens, cuts["agnostic"], make_cache(model), explore.NEW)[1]
    assert read["full"]["written"] == full
    for i, (name, variant) in enumerate(pick([*explore.LIVE]).items()):
        keep, setting = ((50, "aware"), (25, "agnostic"))[(i + number) % 2]
        stored = explore.view(model, encoding, variant, keep, setting, text, question)
        agrees(page, stored, f"{name} {keep} {setting}")


def verdicts(page) -> list[str]:
    return page.locator(".verdict").all_inner_texts()


def waits(page, condition: str):
    page.wait_for_function(condition, timeout=20_000)


def test_the_tour_and_the_address(browser):
    page = opened(browser)
    page.get_by_text("tokens here in").wait_for()
    seen = []
    for step in range(8):
        assert f"{step + 1} of 8" in page.locator("#tour-count").inner_text()
        seen.append(verdicts(page))
        if step < 7:
            page.get_by_role("button", name="Next").press("Enter")
            waits(page, f"location.hash.includes('step={step + 2}')")
    right = [["right" in verdict for verdict in each] for each in seen]
    assert right == [[1], [1], [1, 0], [0, 1], [0, 1], [0, 1], [1, 1], [0, 1]]
    assert page.get_by_role("button", name="Next").is_disabled()
    again = opened(browser, address=page.evaluate("location.hash"))
    waits(again, "location.hash.includes('step=8')")
    assert verdicts(again) == seen[-1] and again.locator("#left").input_value() == "h2o"
    bad = opened(
        browser, address="#step=99&left=nothing&keep=17&token=-5&head=x&right=kvzip"
    )
    assert (
        len(verdicts(bad)) == 2
        and not bad.complaints + page.complaints + again.complaints
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_it_fits(browser, scheme, width):
    address = "#step=6&left=snap_kv&right=kvzip&keep=25"
    size = dict(width=width, height=800)
    page = opened(browser, address=address, size=size, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.complaints
    sums = []
    for name in "color", "backgroundColor":
        color = page.evaluate(f"getComputedStyle(document.body).{name}")
        sums.append(sum(map(int, re.findall(r"\d+", color))))
    ink, ground = sums
    assert (ink > ground) == (scheme == "dark")


def test_the_decoder_that_does_not_run_in_the_page_is_chosen_and_left(browser):
    page = opened(
        browser, address="#model=smollm2&left=snap_kv&right=kvzip&keep=25&asked=later"
    )
    assert "smollm2, 30 layers with 3" in page.locator("#model").inner_text()
    assert ["right" in verdict for verdict in verdicts(page)] == [False, True]
    assert (
        "model=smollm2" in page.evaluate("location.hash")
        and not page.locator("#tour").is_visible()
    )
    page.locator("#decoder").select_option("")
    page.locator("#tour").wait_for()
    assert "6 layers" in page.locator("#model").inner_text() and not page.complaints


def test_stored_views_of_another_model(browser, tmp_path, monkeypatch):
    checkpoint_of_two_layers(tmp_path)
    text, out = tmp_path / "text", tmp_path / "page.html"
    text.write_text(PAGE[:500])
    monkeypatch.setattr(explore, "KEEPS", (50, 12.5))
    monkeypatch.setattr(
        explore,
        "pick",
        lambda names: pick(["full", "chunk_kv", "kvzip", "quantized_4"]),
    )
    explore.main(["--model", str(tmp_path), "--out", str(out), "--text", str(text)])
    page = opened(browser, out, "#left=full&right=kvzip&keep=12.5")
    names = page.locator("#left option").all_inner_texts()
    assert names == ["Full cache", "chunk_kv", "KVzip", "quantized_4"]
    assert (
        not page.locator("#tour").is_visible() and not page.locator("#own").is_visible()
    )
    page.locator("#left").select_option("chunk_kv")
    page.get_by_role("radio", name="with the text").check()
    waits(
        page,
        "location.hash.includes('left=chunk_kv') && location.hash.includes('known')",
    )
    assert len(verdicts(page)) == 2 and not page.complaints and len(page.requests) == 1


def test_bad_input(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("word " * 9000)
    refused(capsys, ["explore", "--out", str(file)], "holds something else")
    out = tmp_path / "out"
    words = ["explore", "--out", str(out), "--text", str(file)]
    refused(capsys, words, "at most")
    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text() == "word " * 9000
