"""Methods by name: what the files of methods/ offer, and what is composed of it."""
from functools import partial
import re

import pytest

from methods.ada_kv import AdaKV
from methods.chunk_kv import ChunkKV, Chunks
from methods.critical_kv import Critical
from methods.ours.residual import Residual
from methods.quantized import Quantized
from methods.snap_kv import SnapKV
from nanollm.cache import LayerCache
from nanollm.commands.registry import calibrated, chooses, given, has_budget, has_window, methods, pick


def test_methods_are_the_variants_of_all_files():
    found, additions, broken = methods()
    assert not broken and [*found] == ["full", *sorted(found.keys() - {"full"})]
    assert found["full"] is LayerCache
    assert {"h2o", "random", "streaming_llm", "snap_kv", "ada_kv", "snap_kv+critical"} <= found.keys()
    assert [*additions] == sorted(additions) and {"critical", "chunk", "residual"} <= additions.keys()
    assert pick([]) == found and [*pick(["random", "full"])] == ["random", "full"]
    assert {name for name in found if has_window(found[name])} == {
        "ada_kv", "pyramid_kv", "snap_kv", "chunk_kv", "chunk_kv_semantic"}
    assert {name for name in found if has_window(found[name]) and chooses(found[name])} == {
        "chunk_kv", "chunk_kv_semantic"}


@pytest.mark.parametrize("name, base, chosen", [
    ("ada_kv+critical+residual", AdaKV, Residual(Critical())), ("snap_kv+critical", SnapKV, Critical()),
    ("chunk_kv+residual", ChunkKV, Residual(Chunks())), ("ada_kv+chunk+residual", AdaKV, Residual(Chunks()))])
def test_an_addition_goes_on_top_of_what_stands_left_of_it(name, base, chosen):
    (Method,) = pick([name]).values()
    assert issubclass(Method.func, base)
    cache = Method(budget=40, window_size=3)
    assert isinstance(cache, base) and (cache.budget, cache.window_size, cache.select) == (40, 3, chosen)
    pooled = base is not ChunkKV and "+chunk" not in name
    assert cache.kernel_size == (7 if pooled else 1)  # chunks are not pooled, as in their paper


def test_all_is_every_window_method_with_each_addition_once():
    found, additions, _ = methods()
    windows = [name for name, Method in found.items() if has_window(Method)]
    chosen = pick(["all"])
    assert [*chosen] == ["full", *sorted(chosen.keys() - {"full"})] and chosen.keys() >= found.keys()
    assert chosen.keys() - found.keys() == {f"{name}+{x}" for name in windows for x in additions
                                            if x == "residual" or not name.startswith("chunk")} - found.keys()
    assert [*pick(["all", "h2o"])] == [*chosen]


def test_an_unknown_name_is_answered_by_the_known_ones():
    found, additions, _ = methods()
    for name in "nope", "ada_kv+nope", "ada_kv+critical+nope", "h2o+critical":
        with pytest.raises(ValueError) as error:
            pick(["h2o", name])
        assert str(error.value) == (f"unknown method {name!r}; known are {', '.join(found)}, all; "
                                    f"on window methods, as in ada_kv+critical: {', '.join(additions)}")


@pytest.mark.parametrize("name, message", [
    ("ada_kv+residual+critical", "critical chooses the entries itself and would undo residual; put it first"),
    ("chunk_kv+critical", "critical chooses the entries itself and would undo chunk_kv; put it on another"),
    ("ada_kv+critical+residual+residual", "names an addition twice")])
def test_additions_that_would_undo_each_other_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        pick([name])


def test_what_a_method_is_given_and_finds_out():
    known = dict(window_size=8, floor=0.5)
    found = pick(["full", "h2o", "snap_kv", "ada_kv", "chunk_kv_reuse", "ada_kv+chunk"]).values()
    assert [[*given(Method, **known)] for Method in found] == [
        [], [], ["window_size"], ["window_size", "floor"], ["window_size"], ["window_size", "floor"]]
    assert given(SnapKV) == {} and given(AdaKV, **known) == known
    assert [name for name, Method in pick(["all"]).items() if not has_budget(Method)] == [
        "full", "quantized_2", "quantized_3", "quantized_4"]
    assert not has_budget(Quantized) and has_budget(partial(SnapKV, window_size=3))
    assert calibrated(LayerCache, None, None) == {}


def test_a_broken_file_is_named_and_the_others_are_found(only_h2o, capsys):
    broken = {"empty": "", "leaves": "raise SystemExit(3)", "code": "'é'.encode('ascii')",
              "syntax": "def", "three": "variants = {'three': 3}", "typo": "def f():\n    undefined\nf()",
              "number": "from methods.h2o import H2O\nvariants = {7: H2O}",
              "on_top": "from methods.h2o import H2O\nvariants, additions = {}, {'more': H2O}",
              "zz_again": (only_h2o / "h2o.py").read_text()}
    for name, code in broken.items():
        (only_h2o / f"{name}.py").write_text(code + "\n")
    found, additions, why = methods()
    assert [*found] == ["full", "h2o"] and not additions and why.keys() == {f"{name}.py" for name in broken}
    for name, reason in {
            "empty": "it names no methods; end it with variants = {'name': Class}", "syntax": "SyntaxError: ",
            "three": "'three' stands for 3, which is no LayerCache", "number": "7 is no name; write variants",
            "code": "UnicodeEncodeError, line 1 of code.py: ",
            "typo": "NameError, line 2 of typo.py: name 'undefined' is not defined",
            "on_top": "the addition 'more' goes on top of window methods; write additions",
            "zz_again": "another file has a method 'h2o' already; take another name"}.items():
        assert why[f"{name}.py"].startswith(reason), why
    with pytest.raises(ValueError, match="unknown method 'typo'"):
        pick(["typo"])
    lines = capsys.readouterr().err.splitlines()
    assert [re.match("methods/(.*) is left out: ", line)[1] for line in lines] == sorted(why)
