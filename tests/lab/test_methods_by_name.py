"""Methods by name: variants of the files of methods/, additions on top, and few bits."""

from functools import partial
import re

import pytest

from common import decoder
from lab import compare
from lab.methods_by_name import Variant, known_names, pick, variant
from methods.baselines.ada_kv import AdaKV
from methods.baselines.h2o import H2O
from methods.baselines.kvzip import KVzip
from methods.baselines.kvzip_fast import FastKVzip
from methods.baselines.snap_kv import SnapKV
from methods.chunk_kv import Chunks
from methods.critical_kv import Critical
from methods.ours.question_gates import QuestionGates
from methods.baselines.rounded import RoundedSlots
from nanollm.cache import Method, make_cache


def one(name) -> Variant:
    return pick([name])[name]


def made(name, **options):
    """Return the caches of a name on a decoder of three layers."""
    found = one(name)
    return make_cache(decoder(), found.kind, found.store, **found.given(**options))


# ---- variants ----


def test_methods_are_the_variants_of_all_files():
    variants, additions, broken = known_names()
    assert not broken
    assert variants["full"] == Variant(Method, {})
    assert {"h2o", "streaming_llm", "snap_kv", "snap_kv+critical"} <= variants.keys()
    assert {"critical", "chunk"} <= additions.keys()


def test_all_are_in_order_and_some_of_them_also_in_few_bits():
    variants, _, _ = known_names()
    names = [*pick([])]
    assert names[0] == "full"
    assert names[1:] == sorted(names[1:])
    few_bits = {"full@2", "full@3", "full@4", "kvzip@4", "question_gates@4"}
    assert {*names} - variants.keys() == few_bits
    assert [*pick(["random", "full"])] == ["random", "full"]
    # --help has a line on each
    told = re.findall(r"^    ([a-z_0-9+]+)  ", compare.__doc__, re.M)
    assert {*told} == {*names} - few_bits


def test_other_variants_are_refused():
    with pytest.raises(ValueError, match="is no variant; write a method, or partial"):
        variant(partial(H2O, 64))


def test_a_variant_s_own_options_win():
    wide = variant(partial(SnapKV, window_size=24))
    assert wide.given(window_size=8, budget=40) == dict(window_size=24, budget=40)
    fixed = variant(partial(H2O, budget=64))
    assert not fixed.takes("budget")
    assert fixed.given(budget=8) == dict(budget=64)


def test_a_method_is_given_the_options_that_it_has():
    known = dict(window_size=8, floor=0.5)
    for name, options in {
        "h2o": set(),
        "ada_kv": {"window_size", "floor"},
        "chunk_kv_reuse": {"window_size", "reuse"},
        "ada_kv+chunk": {"window_size", "floor", "kernel_size", "select"},
    }.items():
        assert one(name).given(**known).keys() == options
    without = [name for name, found in pick([]).items() if not found.takes("budget")]
    assert without == ["full", "full@2", "full@3", "full@4"]


@pytest.mark.parametrize(
    "kind, calibrates",
    [
        (KVzip, None),
        (QuestionGates, QuestionGates),
        (type("Mine", (FastKVzip,), {}), FastKVzip),
        (partial(QuestionGates, recent=16), QuestionGates),
    ],
)
def test_the_class_that_learns_is_found(kind, calibrates):
    assert variant(kind).calibrates is calibrates


# ---- additions ----


@pytest.mark.parametrize(
    "name, chosen, kernel_size",
    [
        ("ada_kv+critical", Critical(), 7),
        ("ada_kv+chunk", Chunks(), 1),  # chunks are not pooled, as in their paper
    ],
)
def test_an_addition_goes_on_top_of_what_stands_left_of_it(name, chosen, kernel_size):
    layer, *_ = made(name, budget=40, window_size=3)
    method = layer.method
    assert isinstance(method, AdaKV)
    assert (method.budget, method.window_size) == (40, 3)
    assert method.select == chosen
    assert method.kernel_size == kernel_size


@pytest.mark.parametrize(
    "name, message",
    [
        ("nope", r"unknown method 'nope'; known are full, .*h2o.*\+critical"),
        ("snapkv", "unknown method 'snapkv'; did you mean 'snap_kv'"),
        ("kvzip_4", "unknown method 'kvzip_4'; did you mean 'kvzip@4'"),
        ("ada_kv+critcal", "addition 'critcal' in .*; did you mean 'critical'"),
        ("ada_kv+nope", "unknown addition 'nope' in 'ada_kv[+]nope'; known are chunk,"),
        ("h2o+critical", "h2o has no selection"),
        ("ada_kv+chunk+critical", "Critical would undo Chunks"),
        ("chunk_kv+critical", "Critical would undo Chunks"),
    ],
)
def test_what_cannot_be_named_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        pick(["h2o", name])


# ---- few bits ----


@pytest.mark.parametrize(
    "name, kind, bits",
    [
        ("ada_kv+critical@3", AdaKV, 3),
        ("h2o@1", H2O, 1),
    ],
)
def test_a_number_of_bits_puts_the_entries_in_a_rounded_store(name, kind, bits):
    layer, *_ = made(name, budget=40, window_size=3)
    assert isinstance(layer.method, kind)
    assert isinstance(layer, RoundedSlots)
    assert layer.bits == bits


@pytest.mark.parametrize(
    "name, message",
    [
        ("snap_kv@9", "snap_kv@9: '9' is no number of bits; give 1 to 8"),
        (
            "kv_reviver@4",
            "kv_reviver keeps its entries in .* SketchSlots; leave out @4",
        ),
    ],
)
def test_bits_that_cannot_be_had_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        pick([name])


# ---- files of a user's own ----


def test_a_broken_file_is_named_and_the_others_are_found(only_h2o, capsys):
    files = {
        "empty": ("", ".* has no attribute 'variants'"),
        "leaves": ("raise SystemExit(3)", "SystemExit, line 1 of leaves.py"),
        "syntax": ("def", r"SyntaxError: .*\(syntax.py, line 1\)"),
        "text": ("variants = {'mine': 'H2O'}", "'H2O' is no variant; write a method"),
        "typo": (
            "def f():\n    undefined\nf()",
            "NameError, line 2 of typo.py: name 'undefined'",
        ),
        "ours/again": (
            "from methods.baselines.h2o import H2O\nvariants = {'h2o': H2O}",
            "another file already has a method 'h2o'",
        ),
    }
    (only_h2o / "ours").mkdir()
    for name, (code, _) in files.items():
        (only_h2o / f"{name}.py").write_text(code + "\n")
    with pytest.raises(ValueError, match="unknown method 'typo'"):
        pick(["typo", "h2o"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(files)
    for line, (name, (_, why)) in zip(lines, files.items()):
        assert re.match(f"methods/{name}.py is left out: {why}", line), line
    assert [*pick([])] == ["full", "full@2", "full@3", "full@4", "h2o"]
