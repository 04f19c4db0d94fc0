"""nano.py keeps and answers what the library keeps and answers."""

import os
from pathlib import Path
import re
import runpy
import subprocess
import sys

import pytest
import torch

from lab import one_page
from methods.baselines.h2o import H2O
from methods.baselines.kvzip import KVzip
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import AbsoluteStreamingLLM
from nanollm import TINY
from nanollm.cache import Method, make_cache
from nanollm.checkpoint import from_hf
from nanollm.tokenizer import load
import nano

LIBRARY = {
    nano.Method: (Method, {}),
    nano.StreamingLLM: (AbsoluteStreamingLLM, {}),
    nano.H2O: (H2O, {}),
    nano.SnapKV: (SnapKV, dict(window_size=8)),
    nano.KVzip: (KVzip, {}),
}


def answer_of_library(method, budget, aware):
    """Return which tokens each head of the library's method keeps, (L, H, cut), and its answer."""
    kind, options = LIBRARY[method]
    if kind is not Method:
        options = options | dict(budget=budget)
    model = from_hf(TINY)
    encoding = load(TINY / "tokenizer.tiktoken")
    caches = make_cache(model, kind, **options)

    tokens, cuts = one_page.prompt(model, encoding, nano.PAGE, nano.QUESTION)
    cut = cuts["aware" if aware else "agnostic"]
    kept, written = one_page.answer(model, tokens, cut, caches, 2)
    return kept, encoding.decode(written)


@pytest.mark.parametrize(
    "method, aware, budget",
    [(method, False, 110) for method in LIBRARY]
    + [(nano.SnapKV, True, 16), (nano.KVzip, True, 16)],
)
def test_every_head_keeps_the_same_entries_and_the_answer_is_the_same(
    method, aware, budget
):
    expected, expected_answer = answer_of_library(method, budget, aware)
    answer, positions = nano.answer(method(budget), aware)

    cut = expected.shape[2]
    kept = torch.zeros_like(expected)
    for layer, pos in enumerate(positions):
        for head, row in enumerate(pos.tolist()):
            # an empty slot has a position beyond the prompt
            kept[layer, head, [i for i in row if i < cut]] = True
    assert torch.equal(kept, expected)
    assert answer == expected_answer


def test_its_page_and_question_are_those_of_the_library():
    for name in ("PAGE", "QUESTION", "ANSWER"):
        assert getattr(nano, name) == getattr(one_page, name)
    assert f"The code of table is {nano.ANSWER}." in nano.PAGE


# ---- the file


def test_it_imports_nothing_of_the_library():
    source = Path(nano.__file__).read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.M))
    assert imported - sys.stdlib_module_names == {"safetensors", "tiktoken", "torch"}


# ---- what a user sees


def test_piped_it_prints_no_colour_codes(tmp_path):
    out = subprocess.run(
        [sys.executable, nano.__file__],
        cwd=tmp_path,
        env={name: os.environ[name] for name in ("PATH", "HOME")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.count(nano.ANSWER) >= 4
    assert "tokens in [brackets] are gone" in out.stdout
    assert "\033" not in out.stdout


@pytest.mark.parametrize("dim, marks", [(True, ["\033[2m", "\033[0m"]), (False, "[]")])
def test_evicted_tokens_are_marked_and_the_page_is_unchanged(dim, marks):
    kept = torch.arange(20, 300).view(2, 140)
    page = nano.marked([kept, kept + 10], dim)
    for mark in marks:
        assert page.count(mark) == 2  # one run before the kept tokens, one behind them
        page = page.replace(mark, "")
    assert page == nano.PAGE


def test_bad_input_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nano.py", "SnapKV", "8"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(nano.__file__, run_name="__main__")
    assert "budget 8 must be" in capsys.readouterr().err
