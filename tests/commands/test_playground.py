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
    numbers = {int(n) for n in re.findall(r"\d+", play.said.value)}
    shares = 100 * held / most, held / 1024, 100 * kept.float().mean().item()
    assert {cut, gone, int(encoding.decode(written[:2])), *map(round, shares)} <= numbers
    assert play.kept.value.count("color:#aaa") == gone and plain(play) == PAGE + QUESTION

    play.layer.value = "1"
    assert play.kept.value.count("color:#aaa") == int((~kept[1].any(0)).sum()) > gone


def test_its_controls_move_it_and_what_goes_wrong_is_said_and_does_not_stay(shipped):
    play = Playground(*shipped)
    answers = lambda: re.findall(r"<b>(\d+)", play.said.value)[:2]
    assert answers() == ["2356", "2356"]  # of the method and of the full cache
    play.setting.value = "agnostic"
    assert answers()[0] != "2356" == answers()[1]
    play.budget.value = 100
    assert answers() == ["2356", "2356"]
    play.budget.value, play.question.value = 8, "Q: The code of cookie is "
    play.method.value = "kvzip"
    assert answers() == ["7623", "7623"] and play.window.disabled and not play.budget.disabled
    play.method.value = "quantized_2"
    assert play.budget.disabled and "#aaa" not in play.kept.value
    play.text.value = "The code of <b>star</b> is 1234. " * 3 + "é"
    assert plain(play) == play.text.value + "\n" + play.question.value
    for text in " ", PAGE * 20:
        play.text.value = text
        assert "at least 1 token" in play.said.value and play.kept.value == ""
    play.text.value, play.method.value, play.window.value, play.budget.value = PAGE, "snap_kv", 64, 1
    assert "budget 4 must exceed the window 64" in play.said.value
    play.window.value, play.budget.value = 8, 100
    assert answers() == ["7623", "7623"]


@pytest.mark.skipif(not which("chromium"), reason="drives Chromium, which is not installed")
def test_in_a_browser():
    pytest.importorskip("playwright", reason="drives a browser by playwright, which is not installed")
    from tests import browser
    with browser.playground() as page:
        browser.wait_for(page, "It answers 2356")
        browser.choose(page, "snap_kv", "agnostic")
        browser.wait_for(page, "It answers 7647")
        browser.choose(page, "kvzip", "agnostic")
        browser.wait_for(page, "It answers 2356")
