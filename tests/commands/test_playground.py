"""The playground says what the page's own functions find, and is moved by its controls, in a browser, too."""
from html import unescape
import re
from shutil import which

import pytest
import torch

from methods.snap_kv import SnapKV
from nanollm import TINY
from nanollm.cache import bytes_in_16_bits, make_cache
from nanollm.commands.demo import PAGE, QUESTION, answer
from nanollm.commands.playground import Playground
from nanollm.commands.registry import load


@pytest.fixture(scope="module")
def shipped():
    return load(TINY, "cpu")


def plain(play) -> str:
    """The text as a browser shows it."""
    return unescape(re.sub("<[^>]+>", "", play.kept.value))


def test_it_says_what_is_answered_held_and_kept(shipped):
    model, encoding = shipped
    play = Playground(model, encoding)
    context, question = map(encoding.encode_ordinary, (PAGE, QUESTION))
    tokens, cut = torch.tensor([context + question]), len(context + question) - 1
    caches = make_cache(model, SnapKV, budget=round(0.08 * len(context)), window_size=8)
    with torch.no_grad():
        kept, written = answer(model, tokens, cut, caches, 4)
        answer(model, tokens, cut, full := make_cache(model), 4)
    held, most = bytes_in_16_bits(caches), bytes_in_16_bits(full)
    gone = int((~kept.any(0).any(0)).sum())
    assert f"It answers <b>{encoding.decode(written).strip()}</b>" in play.said.value
    assert (f"<b>{held / 1024:.0f} KiB</b> in numbers of 16 bits, {100 * held / most:.0f} % of the full "
            f"cache's {most / 1024:.0f}. Of the {cut} tokens compressed, a head has a slot for "
            f"{100 * kept.float().mean():.0f} %") in play.said.value
    assert f"{gone} tokens are gone" in play.said.value
    assert play.kept.value.count("color:#aaa") == gone
    assert plain(play) == PAGE + QUESTION

    play.layer.value = "1"
    assert play.kept.value.count("color:#aaa") == int((~kept[1].any(0)).sum()) > gone


def test_its_controls_move_it(shipped):
    play = Playground(*shipped)
    assert "It answers <b>2356" in play.said.value  # aware
    play.setting.value = "blind"
    assert "It answers <b>2356" not in play.said.value and "the full cache <b>2356" in play.said.value
    play.budget.value = 100
    assert "It answers <b>2356" in play.said.value and "100 % of the full cache" in play.said.value
    play.budget.value, play.question.value = 8, "Q: The code of cookie is "
    assert "the full cache <b>7623" in play.said.value
    play.method.value = "kvzip"
    assert "It answers <b>7623" in play.said.value and play.window.disabled and not play.budget.disabled
    play.method.value = "quantized_2"
    assert play.budget.disabled and "a slot for 100 %; 0 tokens are gone" in play.said.value
    play.text.value = "The code of <b>star</b> is 1234. " * 3 + "é"
    assert plain(play) == play.text.value + "\n" + play.question.value


def test_what_goes_wrong_is_said_and_does_not_stay(shipped, monkeypatch):
    play = Playground(*shipped)
    play.window.value, play.budget.value = 64, 1
    assert play.said.value == "<b>budget 4 must exceed the window 64</b>" and play.kept.value == ""
    play.text.value = " "
    assert "has at least 1 token" in play.said.value
    play.text.value = PAGE * 20
    assert "at most 3072, not" in play.said.value
    play.text.value, play.window.value, play.budget.value = PAGE, 8, 8
    assert "It answers <b>2356" in play.said.value
    monkeypatch.setattr(SnapKV, "end_prefill", lambda cache: 1 / 0)
    play.setting.value = "blind"
    assert "ZeroDivisionError" in play.said.value


@pytest.mark.skipif(not which("chromium"), reason="drives Chromium, which is not installed")
def test_in_a_browser():
    pytest.importorskip("playwright", reason="drives a browser by playwright, which is not installed")
    import browser
    with browser.playground() as page:
        browser.says(page, "It answers 2356")
        browser.choose(page, "snap_kv", "blind")
        browser.says(page, "It answers 7647")
        browser.choose(page, "kvzip", "blind")
        browser.says(page, "It answers 2356")
        page.locator("textarea").last.fill("The code of star is 1234. It rained.")
        page.get_by_label("question").fill("Q: The code of star is ")
        page.get_by_label("question").press("Tab")
        browser.says(page, "the full cache 1234")
