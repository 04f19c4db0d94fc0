"""Methods by name: what the files of methods/ offer, and additions on top."""
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
from nanollm.commands.registry import calibrated, given, has_budget, has_window, methods, pick


def test_methods_are_the_variants_of_all_files():
    found, additions, broken = methods()
    assert not broken and [*found] == ["full", *sorted(found.keys() - {"full"})]
    assert found["full"] is LayerCache
    assert {"h2o", "random", "streaming_llm", "snap_kv", "ada_kv", "snap_kv+critical"} <= found.keys()
    assert {"critical", "chunk", "residual"} <= additions.keys()
    assert pick([]) == found and [*pick(["random", "full"])] == ["random", "full"]


@pytest.mark.parametrize("name, base, chosen", [
    ("ada_kv+critical+residual", AdaKV, Residual(Critical())), ("snap_kv+critical", SnapKV, Critical()),
    ("chunk_kv+residual", ChunkKV, Residual(Chunks())), ("ada_kv+chunk+residual", AdaKV, Residual(Chunks()))])
def test_an_addition_goes_on_top_of_what_stands_left_of_it(name, base, chosen):
    (Method,) = pick([name]).values()
    cache = Method(budget=40, window_size=3)
    assert isinstance(cache, base) and (cache.budget, cache.window_size, cache.select) == (40, 3, chosen)
    pooled = base is not ChunkKV and "+chunk" not in name
    assert cache.kernel_size == (7 if pooled else 1)  # chunks are not pooled, as in their paper


def test_all_is_every_window_method_with_each_addition_once():
    found, additions, _ = methods()
    windows = [name for name, Method in found.items() if has_window(Method)]
    assert windows == ["ada_kv", "chunk_kv", "chunk_kv_semantic", "pyramid_kv", "r_kv", "snap_kv"]
    chosen = pick(["all"])
    assert [*chosen] == ["full", *sorted(chosen.keys() - {"full"})] and chosen.keys() >= found.keys()
    own = "chunk", "r_kv"  # they choose the entries themselves
    assert chosen.keys() - found.keys() == {f"{name}+{x}" for name in windows for x in additions
                                            if x == "residual" or not name.startswith(own)} - found.keys()
    assert [*pick(["all", "h2o"])] == [*chosen]


@pytest.mark.parametrize("name, message", [
    *((name, "unknown method .* known are full, .*h2o.*, all; on window methods, .*: chunk, critical")
      for name in ("nope", "ada_kv+nope", "ada_kv+critical+nope", "h2o+critical")),
    ("ada_kv+residual+critical", "critical chooses the entries itself, .* undo residual; put it first"),
    ("chunk_kv+critical", "critical chooses the entries itself, .* undo chunk_kv; put it on another"),
    ("ada_kv+critical+residual+residual", "names an addition twice")])
def test_what_cannot_be_composed_is_refused(name, message):
    with pytest.raises(ValueError, match=message) as error:
        pick(["h2o", name])
    assert name in str(error.value) and "\n" not in str(error.value)


def test_what_a_method_is_given_and_finds_out():
    known = dict(window_size=8, floor=0.5)
    found = pick(["full", "h2o", "snap_kv", "ada_kv", "chunk_kv_reuse", "ada_kv+chunk"]).values()
    assert [[*given(Method, **known)] for Method in found] == [
        [], [], ["window_size"], ["window_size", "floor"], ["window_size"], ["window_size", "floor"]]
    assert [name for name, Method in pick(["all"]).items() if not has_budget(Method)] == [
        "full", "quantized_2", "quantized_3", "quantized_4", "turbo_2", "turbo_3"]
    assert not has_budget(Quantized) and has_budget(partial(SnapKV, window_size=3))
    assert calibrated(LayerCache, None, None) == {}


def test_a_broken_file_is_named_and_the_others_are_found(only_h2o, capsys):
    files = {
        "empty": ("", "it defines no variants; end it with variants"),
        "leaves": ("raise SystemExit(3)", "SystemExit, line 1 of leaves.py"),
        "code": ("'é'.encode('ascii')", "UnicodeEncodeError, line 1 of code.py: "),
        "syntax": ("def", r"SyntaxError: .*\(syntax.py, line 1\)"),
        "three": ("variants = {'three': 3}", "'three' is 3; it must be a subclass of LayerCache"),
        "typo": ("def f():\n    undefined\nf()", "NameError, line 2 of typo.py: name 'undefined'"),
        "on_top": ("from methods.h2o import H2O\nvariants, additions = {}, {'more': H2O}",
                   "the addition 'more' is not a dict with a selection; write additions"),
        "zz_again": ((only_h2o / "h2o.py").read_text(), "another file already has a method 'h2o'")}
    for name, (code, _) in files.items():
        (only_h2o / f"{name}.py").write_text(code + "\n")
    with pytest.raises(ValueError, match="unknown method 'typo'"):
        pick(["typo", "h2o"])
    lines = capsys.readouterr().err.splitlines()
    for line, name in zip(lines, sorted(files), strict=True):
        pattern = f"methods/{name}.py is left out: {files[name][1]}"
        assert re.match(pattern, line), line
    assert [*pick([])] == ["full", "h2o"]
