"""What a method keeps of a page, and its answer."""

import re

import pytest
import torch

from common import ENCODING
from lab.kept import held
from lab.one_page import PAGE, QUESTION, answer, check_length, marked, pieces, prompt
from methods.baselines.snap_kv import SnapKV
from nanollm import TINY
from nanollm.__main__ import main
from nanollm.cache import compress, crop, make_cache
from nanollm.checkpoint import from_hf


@pytest.fixture(scope="module")
def model():
    return from_hf(TINY)


def test_the_page_is_answered_aware_and_not_agnostic(capsys, tmp_path):
    figure = tmp_path / "page.png"
    main(["generate", "--figure", str(figure)])
    out = capsys.readouterr().out
    line = r"Right answer: (\d+); snap_kv answers (\d+), the full cache (\d+)\n"
    aware, agnostic = re.findall(line, out)
    assert aware == ("2356",) * 3
    assert agnostic[::2] == ("2356",) * 2
    assert agnostic[1] != "2356"

    texts = re.findall(r"Question (?:known|later)\n\n(.*?)\n\n\d+ of", out, re.S)
    aware, agnostic = [re.sub(r"\[.*?\]", "", text, flags=re.S) for text in texts]
    assert "The code of table is 2356" in aware
    assert "The code of table is" not in agnostic.partition("\nQ:")[0]
    assert figure.stat().st_size > 5000


def test_the_last_token_is_fed_after_the_compression(model):
    tokens, cuts = prompt(model, ENCODING, PAGE, QUESTION)
    page, both = map(ENCODING.encode_ordinary, (PAGE, PAGE + QUESTION))
    assert tokens[0].tolist() == both
    assert cuts == dict(aware=len(both) - 1, agnostic=len(page))
    for cut in cuts.values():
        options = dict(budget=40, window_size=3)
        caches = make_cache(model, SnapKV, **options)
        kept, written = answer(model, tokens, cut, caches, 3)
        by_hand = make_cache(model, SnapKV, **options)
        model(tokens[:, : cut + (cut == cuts["aware"])], by_hand)
        crop(by_hand, cut)
        compress(model, tokens[:, :cut], by_hand)
        assert held(by_hand, cut)[0].equal(kept)
        assert len(written) == 3


def test_evicted_tokens_are_marked():
    ids = ENCODING.encode_ordinary("one two three")
    words = [ENCODING.decode([i]) for i in ids]
    gone = [i == 1 for i in range(len(ids))]
    rest = "".join(words[2:])
    assert marked(ENCODING, ids, gone, dim=False) == f"{words[0]}[{words[1]}]{rest}"
    dim = marked(ENCODING, ids, gone, dim=True)
    assert dim == f"{words[0]}\033[2m{words[1]}\033[0m{rest}"


def test_a_character_of_several_tokens_stands_at_its_last():
    ids = ENCODING.encode_ordinary("a ✓ b")
    found = pieces(ENCODING, ids)
    assert "".join(found) == "a ✓ b"
    assert len(found) == len(ids)
    assert "" in found


@pytest.mark.parametrize("text, more", [(" \n", -100), ("x", -3)])
def test_a_text_must_have_words_and_leave_room(model, text, more):
    n = model.config.max_len + more
    tokens = torch.zeros(1, n, dtype=torch.long)
    with pytest.raises(ValueError, match="at least 1 token, and all together at most"):
        check_length(model, text, tokens)
