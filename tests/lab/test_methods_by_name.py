"""Methods by name: what the files of methods/ offer, and additions on top."""

from functools import partial
import re

import pytest
import torch

from common import ENCODING, decoder
from lab.registry import calibrated, given, has_budget, methods, pick
from methods.baselines.ada_kv import AdaKV
from methods.baselines.kvzip_fast import FastKVzip
from methods.baselines.quantized import Quantized
from methods.baselines.snap_kv import SnapKV
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical
from methods.ours.question_gates import QuestionGates
from methods.ours.residual import Residual
from nanollm import SHIPPED, checkpoint
from nanollm.cache import LayerCache


def test_methods_are_the_variants_of_all_files():
    found, additions, broken = methods()
    assert not broken and [*found] == ["full", *sorted(found.keys() - {"full"})]
    assert found["full"] is LayerCache
    assert {
        "h2o",
        "streaming_llm",
        "snap_kv",
        "ada_kv",
        "snap_kv+critical",
        "kvzip_4",
    } <= found.keys()
    assert {"critical", "chunk", "residual"} <= additions.keys()
    assert pick([]) == found and [*pick(["random", "full"])] == ["random", "full"]


@pytest.mark.parametrize(
    "name, base, chosen",
    [
        ("ada_kv+critical+residual", AdaKV, Residual(Critical())),
        ("snap_kv+critical", SnapKV, Critical()),
        ("chunk_kv+residual", ChunkKV, Residual(Chunks())),
        ("ada_kv+chunk+residual", AdaKV, Residual(Chunks())),
    ],
)
def test_an_addition_goes_on_top_of_what_stands_left_of_it(name, base, chosen):
    (Method,) = pick([name]).values()
    cache = Method(budget=40, window_size=3)
    assert isinstance(cache, base) and (
        cache.budget,
        cache.window_size,
        cache.select,
    ) == (40, 3, chosen)
    pooled = base is not ChunkKV and "+chunk" not in name
    # chunks are not pooled, as in their paper
    assert cache.kernel_size == (7 if pooled else 1)


@pytest.mark.parametrize(
    "name, message",
    [
        *(
            (name, "unknown method .* known are full, .*h2o")
            for name in ("nope", "ada_kv+nope", "ada_kv+critical+nope", "h2o+critical")
        ),
        ("ada_kv+residual+critical", "would undo Residual"),
        ("chunk_kv+critical", "would undo Chunks"),
    ],
)
def test_what_cannot_be_composed_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        pick(["h2o", name])


def test_what_a_method_is_given_and_finds_out():
    known = dict(window_size=8, floor=0.5)
    found = pick(
        ["full", "h2o", "snap_kv", "ada_kv", "chunk_kv_reuse", "ada_kv+chunk"]
    ).values()
    assert [[*given(Method, **known)] for Method in found] == [
        [],
        [],
        ["window_size"],
        ["window_size", "floor"],
        ["window_size"],
        ["window_size", "floor"],
    ]
    assert [name for name, Method in pick([]).items() if not has_budget(Method)] == [
        "full",
        "quantized_2",
        "quantized_3",
        "quantized_4",
    ]
    assert not has_budget(Quantized) and has_budget(partial(SnapKV, window_size=3))
    assert calibrated(LayerCache, None, None) == {}


def test_a_broken_file_is_named_and_the_others_are_found(only_h2o, capsys):
    files = {
        "empty": ("", ".* has no attribute 'variants'"),
        "leaves": ("raise SystemExit(3)", "SystemExit, line 1 of leaves.py"),
        "syntax": ("def", r"SyntaxError: .*\(syntax.py, line 1\)"),
        "typo": (
            "def f():\n    undefined\nf()",
            "NameError, line 2 of typo.py: name 'undefined'",
        ),
        "ours/again": (
            "from methods.baselines.h2o import H2O\nvariants = {'h2o': H2O}",
            "another file already has a method 'h2o'",
        ),
    }
    (only_h2o / "ours").mkdir(exist_ok=True)
    for name, (code, _) in files.items():
        (only_h2o / f"{name}.py").write_text(code + "\n")
    with pytest.raises(ValueError, match="unknown method 'typo'"):
        pick(["typo", "h2o"])
    lines = capsys.readouterr().err.splitlines()
    for line, name in zip(lines, files, strict=True):
        assert re.match(f"methods/{name}.py is left out: {files[name][1]}", line), line
    assert [*pick([])] == ["full", "h2o"]


def test_what_a_method_learns_is_kept_in_a_file_for_its_decoder(tmp_path, monkeypatch):
    class Learner(LayerCache):
        asked = []

        @staticmethod
        def calibrate(model, tasks):
            Learner.asked.append(model)
            return dict(gates=torch.ones(2, 3), shares=torch.zeros(2))

    model = decoder(vocab_size=2048)
    for _ in range(2):
        found = calibrated(Learner, model, ENCODING, tmp_path / "new")
        assert (
            torch.equal(found["gates"], torch.ones(2, 3))
            and found["shares"].eq(0).all()
        )
    assert Learner.asked == [model]
    # what ships: here a folder of one decoder
    monkeypatch.setattr("lab.registry.CALIBRATED", tmp_path)
    assert (
        calibrated(Learner, model, ENCODING).keys() == {"gates", "shares"}
        and len(Learner.asked) == 1
    )
    calibrated(Learner, decoder(vocab_size=2048, n_layers=1), ENCODING)
    assert len(Learner.asked) == 2

    with pytest.raises(
        ValueError, match="Learner.safetensors was calibrated on another decoder"
    ):
        calibrated(
            Learner, decoder(vocab_size=2048, n_layers=1), ENCODING, tmp_path / "new"
        )


@pytest.mark.parametrize("folder", SHIPPED.values())
def test_nothing_is_learned_anew_of_a_decoder_that_ships(folder, monkeypatch):
    model = checkpoint.from_hf(folder)
    for Method in FastKVzip, QuestionGates:
        monkeypatch.setattr(Method, "calibrate", None)  # not to be called
    for name in "kvzip_fast", "question_gates", "question_gates_4":
        assert calibrated(pick([name])[name], model, ENCODING).keys() == {"gates"}
