"""nano.py keeps and answers what the library keeps and answers."""

import re
import sys

import pytest
import torch

from lab import example_page
from methods.baselines.h2o import H2O
from methods.baselines.kvzip import KVzip
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from nanollm import TINY
from nanollm.cache import LayerCache, make_cache
from nanollm.checkpoint import from_hf
from nanollm.tokenizer import load
import nano

METHODS = {
    nano.Cache: (LayerCache, {}),
    nano.StreamingLLM: (StreamingLLM, dict(relative=False)),
    nano.H2O: (H2O, {}),
    nano.SnapKV: (SnapKV, dict(window_size=8)),
    nano.KVzip: (KVzip, {}),
}


@pytest.mark.parametrize(
    "method, setting, budget",
    [(method, "agnostic", 110) for method in METHODS]
    + [(nano.SnapKV, "aware", 16), (nano.KVzip, "aware", 16)],
)
def test_every_head_keeps_the_same_entries_and_the_answer_is_the_same(
    method, budget, setting
):
    model, encoding, (Method, options) = (
        from_hf(TINY),
        load(TINY / "tokenizer.tiktoken"),
        METHODS[method],
    )
    tokens, cuts = example_page.prompt(model, encoding, nano.PAGE, nano.QUESTION)
    options = options if Method is LayerCache else options | dict(budget=budget)
    caches = make_cache(model, Method, **options)
    expected, written = example_page.answer(model, tokens, cuts[setting], caches, 2)

    answer, positions = nano.answer(method, budget, setting == "aware")
    kept = torch.zeros_like(expected)
    for layer, pos in enumerate(positions):
        for head, row in enumerate(pos.tolist()):
            kept[layer, head, [i for i in row if i < cuts[setting]]] = True
    assert torch.equal(kept, expected) and answer == encoding.decode(written)


def test_its_page_and_question_are_those_of_the_library():
    for name in ("PAGE", "QUESTION", "ANSWER"):
        assert getattr(nano, name) == getattr(example_page, name)


def test_it_is_one_file_of_200_lines_that_runs_alone(typed, tmp_path):
    source = open(nano.__file__).read()
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.M))
    assert source.count("\n") <= 200
    assert imported - sys.stdlib_module_names == {"safetensors", "tiktoken", "torch"}
    out = typed("python", nano.__file__, cwd=tmp_path)
    assert out.returncode == 0 and out.stdout.count("2356") >= 4


def test_bad_input_is_one_line(typed):
    out = typed("python", nano.__file__, "SnapKV", "8")
    assert (
        out.returncode == 2
        and "budget 8 must be" in out.stderr
        and "Traceback" not in out.stderr
    )
