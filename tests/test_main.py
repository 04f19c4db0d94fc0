"""The command line: what it prints and writes, and that a mistake costs one line and exit code 2."""
from dataclasses import dataclass
from functools import partial
import inspect
import json
import math
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from test_data import ENCODING, tasks
import torch

from methods.ada_kv import AdaKV
from methods.chunk_kv import ChunkKV, SemanticChunkKV
from methods.critical_kv import Critical
from methods.h2o import H2O
from methods.quantized import Quantized
from methods.residual_entry import Residual
from methods.snap_kv import SnapKV
from nanollm import evaluate
from nanollm.__main__ import (TINY, additions_table, calibrated, chooses, given, has_budget, has_window, header, main, methods,
                              pick, row_of, show)
from nanollm.cache import LayerCache, WindowCache, cache_bytes, make_cache
from nanollm.data import Tasks
from nanollm.generate import generate
from nanollm.model import Config, Decoder
from nanollm.tokenizer import boundaries
from nanollm.weights import from_hf, to_hf

ROOT = Path(__file__).parent.parent
TASKS = "needle", "recall", "few_shot"
SMALL = ["--lengths", "288", "--documents", "4", "--budgets", "50", "12.5"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    model = Decoder(Config(vocab_size=2048, max_len=400, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=32))
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2)
    to_hf(model, folder)
    shutil.copy(TINY / "tokenizer.tiktoken", folder)
    return folder


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path):
    monkeypatch.setattr("nanollm.data.Tasks", lambda encoding, split: tasks(split))
    monkeypatch.chdir(tmp_path)  # where compare.png would land


def compare(checkpoint, *options) -> list[dict]:
    main(["--model", str(checkpoint), "--json", "rows.json", *SMALL, *options])
    return json.loads(Path("rows.json").read_text())


def timeless(rows):
    return [{key: x for key, x in row.items() if key not in ("tokens_per_s", "each")}
            | {f"each {key}": x for key, x in row["each"].items()} for row in rows]


def command(*arguments, **env):
    return subprocess.run([sys.executable, "-m", *map(str, arguments)], cwd=ROOT, env=os.environ | env,
                          capture_output=True, text=True, timeout=300)


# ---- compare ---


NAMES = ["full", "h2o", "random", "streaming_llm"]


@pytest.fixture(scope="module")
def rows(checkpoint, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanollm.data.Tasks", lambda encoding, split: tasks(split))
        patch.chdir(tmp_path_factory.mktemp("rows"))
        return compare(checkpoint, "--methods", *NAMES)


def test_there_is_a_row_for_every_method_and_budget_and_every_number_in_it(rows):
    expected = [("full", None)] + [(name, share) for name in NAMES[1:] for share in (0.5, 0.125)]
    assert [(row["method"], row["fraction"]) for row in rows] == expected
    shares = {f"{task}_{setting}" for task in TASKS for setting in ("aware", "blind")}
    for row in rows:
        assert row.keys() == shares | {f"{key}_se" for key in shares} | {
            "method", "fraction", "tokens", "documents", "seed", "aware", "blind", "perplexity", "kl", "l1", "l1_alone",
            "live", "allocated", "peak", "tokens_per_s", "each", "prompt", "slots", "slots_end", "forgets"}
        assert (row["tokens"], row["documents"], row["seed"]) == (288, 4, 0)
        assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))
        assert np.shape(row["l1"]) == np.shape(row["l1_alone"]) == (2, 4)
        assert {key: len(x) for key, x in row["each"].items()} == dict.fromkeys(shares, 4) | dict(kl=2, nll=2, l1_alone=2)
        assert row["perplexity"] == pytest.approx(math.exp(np.mean(row["each"]["nll"])))
        for key in row["each"].keys() - {"nll"}:
            assert np.mean(row[key]) == pytest.approx(np.mean(row["each"][key]), abs=1e-6), key
        for setting in ("aware", "blind"):
            assert row[setting] == pytest.approx(sum(row[f"{task}_{setting}"] for task in TASKS) / 3)


def test_rows_tell_the_bytes_of_one_sequence(rows):
    slot = 2 * 2 * (2 * 8 * 4 + 4)  # layers, heads, k and v of 8 floats, a position
    cut = 288 - 64 - 1
    assert rows[0]["live"] == slot * 287 and abs(rows[0]["kl"]) < 1e-6
    for row in rows[-2:]:
        assert row["live"] == round(row["fraction"] * cut) * slot + 2 * 2 * 4 * 8 * 4  # StreamingLLM's sinks as stored
        assert row["kl"] > 0.01 and cut * slot <= row["peak"] <= 1.1 * cut * slot


def test_a_table_a_figure_and_the_same_rows_again(rows, checkpoint, capsys):
    again = compare(checkpoint, "--methods", *NAMES, "--figure", "again.png")
    assert timeless(again) == timeless(rows)
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(NAMES))]
    assert [cells[:3] for cells in printed] == [
        [row["method"], *("all" if row["fraction"] is None else f"{100 * row['fraction']:g} %").split(),
         f"{row['live'] / 1024:.0f}"][:3] for row in rows]
    for cells, row in zip(printed, rows):
        assert cells[-4:-1] == [f"{row['perplexity']:.2f}", f"{abs(row['kl']):.3f}", f"{np.mean(row['l1_alone']):.2f}"]
    assert Path("again.png").read_bytes().startswith(b"\x89PNG") and not Path("compare.png").exists()


def test_the_seed_and_the_number_of_documents_reach_the_benchmark(checkpoint, monkeypatch):
    asked, batch = [], Tasks.batch
    monkeypatch.setattr(Tasks, "batch", lambda self, *arguments: asked.append(arguments) or batch(self, *arguments))
    (row,) = compare(checkpoint, "--methods", "h2o", "--budgets", "50", "--seed", "7", "--documents", "2")
    assert asked == [(task, 7, 2, 288) for task in TASKS]
    assert (row["seed"], row["documents"]) == (7, 2) and Path("compare.png").exists()


def test_each_length_has_its_own_documents(checkpoint):
    rows = compare(checkpoint, "--methods", "full", "--lengths", "288", "300")
    assert [row["tokens"] for row in rows] == [288, 300]
    assert rows[0]["live"] * 299 == rows[1]["live"] * 287


def test_two_processes_make_the_rows_of_one(rows, checkpoint, tmp_path):
    file = tmp_path / "rows.json"
    done = command("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "nanollm", "--model", checkpoint,
                   *SMALL, "--methods", *NAMES, "--json", file, "--figure", tmp_path / "two.png")
    assert done.returncode == 0, done.stderr
    for two, one in zip(timeless(json.loads(file.read_text())), timeless(rows), strict=True):
        for key in one:  # torchrun gives each process one thread, and with another number sums round otherwise
            equal = key == "method" or one[key] is None
            assert two[key] == one[key] if equal else np.allclose(two[key], one[key], rtol=1e-3, atol=1e-5), key
    assert len([line for line in done.stdout.splitlines() if line.startswith(tuple(NAMES))]) == len(rows)


# ---- numbers become a table and a figure ---


def measured(**more) -> dict:
    """What a benchmark of 3 documents may have measured: every number another."""
    shares = dict(zip((f"{task}_{setting}" for task in TASKS for setting in ("aware", "blind")),
                      (0.11, 0.22, 0.33, 0.44, 0.55, 0.75)))
    return shares | {f"{key}_se": 0.9 for key in shares} | dict(
        perplexity=12.34, kl=0.567, l1=[[70.0, 80.0]], l1_alone=[[6.0, 7.0], [8.0, 9.5]], live=3 * 1024 * 5,
        allocated=3 * 1024 * 6, peak=3 * 1024 * 7, tokens_per_s=4321.0) | more


def test_every_number_of_a_row_stands_below_its_name():
    row = row_of("h2o", 0.125, 300, 17, 4, measured(), 3)
    assert {key: row[key] for key in ("method", "fraction", "tokens", "documents", "seed", "live", "allocated", "peak")} == dict(
        method="h2o", fraction=0.125, tokens=300, documents=17, seed=4, live=5 * 1024, allocated=6 * 1024, peak=7 * 1024)
    assert row["aware"] == pytest.approx((0.11 + 0.33 + 0.55) / 3)
    assert row["blind"] == pytest.approx((0.22 + 0.44 + 0.75) / 3)
    assert show(row).split() == "h2o 12.5 % 5 0.11 0.22 0.33 0.44 0.55 0.75 12.34 0.567 7.62 4321".split()
    _, first, _, of_tasks, names = header(300, 5, 4).split("\n")
    assert first == "5 documents per task, 300 tokens each; seed 4; standard error of an accuracy: at most 0.25"  # 1/2 / √4
    assert names.split() == ["method", "budget", "KiB", *["aware", "blind"] * 3, "perpl.", "KL", "L1", "tokens/s"]
    assert of_tasks.split() == ["live", *TASKS, "batch"]
    for task, share in zip(TASKS, ("0.22", "0.44", "0.75")):  # a task's name stands above its second number, `blind`
        start, end = of_tasks.index(task), show(row).index(share) + 4
        assert start < end <= start + len(task) and names[:end].endswith("blind")


def test_the_figure_is_of_the_first_length_and_of_each_row_of_it(checkpoint, monkeypatch):
    drawn = []
    monkeypatch.setattr("nanollm.plot.comparison", lambda rows, file: drawn.append((rows, file)))
    rows = compare(checkpoint, "--methods", "full", "h2o", "--lengths", "300", "288", "--budgets", "50", "--documents", "2")
    assert [row["tokens"] for row in rows] == [300, 300, 288, 288]
    ((shown, file),) = drawn
    assert timeless(shown) == timeless(rows[:2]) and file == Path("compare.png")


# ---- a method that is wrong does not look good ---


WRONG = {
    "hoarder": "@dataclass(eq=False)\nclass C(LayerCache):\n    budget: int\n",
    "grower": """@dataclass(eq=False)
class C(LayerCache):
    budget: int

    def observe(self, q, p): pass  # super().observe(q, p) is forgotten

    def forget(self): self.shrink(self.pos, self.budget)
""",
    "late": """@dataclass(eq=False)
class C(LayerCache):
    budget: int

    def forget(self): self.shrink(self.k[:, :1].norm(dim=-1).expand(1, 3, -1), self.budget)
""",
    "early": "@dataclass(eq=False)\nclass C(LayerCache):\n    budget: int\n    def __post_init__(self): 1 / 0\n",
    "plain": "class C(LayerCache):\n    budget: int = 9\n"}


@pytest.fixture
def wrong(monkeypatch, tmp_path_factory):
    """A folder of methods that are wrong in one way each, beside one that is right."""
    folder = tmp_path_factory.mktemp("wrong") / "methods"
    folder.mkdir()
    monkeypatch.setattr("nanollm.__main__.METHODS", folder)
    monkeypatch.syspath_prepend(folder.parent)
    for name in [name for name in sys.modules if name.split(".")[0] == "methods"]:
        monkeypatch.delitem(sys.modules, name)
    for name, code in WRONG.items():
        (folder / f"{name}.py").write_text("from dataclasses import dataclass\nfrom nanollm.cache import LayerCache\n\n\n"
                                           f"{code}\n\nvariants = {{'{name}': C}}\n")
    shutil.copy(ROOT / "methods" / "h2o.py", folder)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "methods"]:
        del sys.modules[name]  # monkeypatch puts the right ones back


def test_a_row_that_holds_more_than_its_budget_is_marked(checkpoint, wrong, capsys):
    names = "hoarder", "grower", "h2o", "full"
    compare(checkpoint, "--methods", *names, "--budgets", "50", "--documents", "2")
    lines = capsys.readouterr().out.splitlines()
    marks = {line.split()[0]: after for line, after in zip(lines, lines[1:]) if line.startswith(names)}
    assert marks["hoarder"] == "  ! evicts nothing: holds all 223 tokens of a prompt, and its budget is 112"
    assert re.match(r"  ! grows to \d+ slots a head after the prompt, and its budget is 112; does its obs", marks["grower"])
    assert "!" not in marks["h2o"] + marks["full"]


def test_a_row_that_fails_leaves_the_others(checkpoint, wrong, capsys):
    arguments = ["--model", str(checkpoint), "--json", "rows.json", *SMALL, "--budgets", "50", "--methods"]
    out = refused(capsys, [*arguments, "full", "late", "h2o"],
                  r"1 of 3 rows failed: late at 50 %: \w+Error, line 9 of late.py: ")
    assert [row["method"] for row in json.loads(Path("rows.json").read_text())] == ["full", "h2o"]
    assert out.index("\nfull") < out.index("\nlate at 50 %: ") < out.index("\nh2o") and Path("compare.png").exists()
    refused(capsys, [*arguments, "full", "early"], "1 of 2 rows failed: early at 50 %: ZeroDivisionError, line 8 of early.py")
    refused(capsys, [*arguments, "plain"], "plain.*: C declares budget but is no dataclass; put @dataclass")


def test_a_broken_file_is_named_and_the_others_run(checkpoint, wrong, capsys):
    (wrong / "syntax.py").write_text("def\n")
    (wrong / "typo.py").write_text("\nx = undefined\n")
    (wrong / "empty.py").write_text("\n")
    (wrong / "three.py").write_text("variants = {'three': 3}\n")
    (wrong / "number.py").write_text("from methods.h2o import H2O\nvariants = {7: H2O}\n")
    (wrong / "on_top.py").write_text("from methods.h2o import H2O\nvariants, additions = {}, {'more': H2O}\n")
    (wrong / "zz_again.py").write_text((wrong / "h2o.py").read_text())
    found, _, broken = methods()
    assert [*found] == ["full", "early", "grower", "h2o", "hoarder", "late", "plain"]
    assert {file: re.sub(r"\(.*\)", "()", why) for file, why in broken.items()} == {
        "empty.py": "it names no methods; end it with variants = {'name': Class}",
        "number.py": "7 is no name; write variants = {'name': Class}",
        "on_top.py": "the addition 'more' goes on top of window methods; make it a class on WindowCache",
        "syntax.py": "SyntaxError: invalid syntax ()", "three.py": "'three' stands for 3, which is no LayerCache",
        "typo.py": "NameError, line 2 of typo.py: name 'undefined' is not defined",
        "zz_again.py": "another file has a method 'h2o' already; take another name"}
    main(["generate", "--model", str(checkpoint), "--tokens", "2", "x"])
    out, error = capsys.readouterr()
    assert out.startswith("x")
    assert [line.split()[0] for line in error.splitlines()] == [f"methods/{file}" for file in sorted(broken)]
    with pytest.raises(ValueError, match="unknown method 'typo'"):
        pick(["typo"])


# ---- nothing is lost, nothing that is not ours is overwritten ---


def test_rows_are_written_as_they_come(checkpoint, monkeypatch):
    seen, run = [], evaluate.Benchmark.run

    def then_look(self, *arguments):
        file = Path("rows.json")
        seen.append([row["method"] for row in json.loads(file.read_text())] if file.exists() else None)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(evaluate.Benchmark, "run", then_look)
    with pytest.raises(SystemExit):
        compare(checkpoint, "--methods", "full", "random", "h2o", "--budgets", "50", "--documents", "2")
    assert seen == [None, ["full"], ["full", "random"]] and len(json.loads(Path("rows.json").read_text())) == 2


@pytest.mark.parametrize("options, message", [
    ("--json config.json", "config.json holds something else than the rows of an earlier run; name another file"),
    ("--figure photo.png", "photo.png holds something else than the figure of an earlier run"),
    ("--json x.png --figure x.png", "rows and figure cannot both go to x.png"),
    ("--json ./x.png --figure x.png", "rows and figure cannot both go to x.png"),
    ("--json folder", "folder is no file; name one for the rows"), ("--json=", "is no file; name one for the rows"),
    ("--json /dev/null", "/dev/null is no file"), ("--json " + 300 * "x", "File name too long"),
    ("--json none.json", "none.json holds something else"), ("--json deep.json", "deep.json holds something else"),
    ("--figure other.png", "other.png holds something else"), ("--figure loop.png", "Too many levels of symbolic links"),
    ("--json loop.png", "Too many levels"), ("--figure table.txt", "must end in .png")])
def test_files_are_looked_at_before_any_work(checkpoint, capsys, options, message):
    Path("folder").mkdir()
    kept = {"config.json": b'{"model_type": "llama"}', "photo.png": b"\x89PNG of somebody else",
            "none.json": b"[]", "deep.json": b"[" * 100_000, "other.png": b"\x89PNG, Software: Matplotlib"}
    Path("loop.png").symlink_to("loop.png")
    for name, data in kept.items():
        Path(name).write_bytes(data)
    out = refused(capsys, ["--model", str(checkpoint), *SMALL, "--methods", "h2o", *options.split()], message)
    assert out == "" and {path.name for path in Path().iterdir()} == {"folder", "loop.png", *kept}
    assert all(Path(name).read_bytes() == data for name, data in kept.items())


def test_a_second_run_replaces_rows_and_figure_of_the_first(checkpoint):
    for seed in "01":
        (row,) = compare(checkpoint, "--methods", "full", "--documents", "2", "--seed", seed)
    assert row["seed"] == 1 and {path.name for path in Path().iterdir()} == {"rows.json", "compare.png"}


def test_output_that_cannot_be_written_is_one_line(checkpoint):
    arguments = [sys.executable, "-m", "nanollm", "generate", "--model", str(checkpoint), "--tokens", "9", "x"]
    for end in ("| true", "> /dev/full"):
        done = subprocess.run(["bash", "-c", f'set -o pipefail; "$@" {end}', "-", *arguments], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 2 and re.fullmatch("error: (nobody reads|.*No space left).*\n", done.stderr), done.stderr


# ---- which methods ---


def test_methods_are_the_variants_of_all_files():
    found, additions, broken = methods()
    assert not broken and [*found] == ["full", *sorted(found.keys() - {"full"})] and found["full"] is LayerCache
    assert {"h2o", "random", "streaming_llm", "snap_kv", "ada_kv", "snap_kv+critical"} <= found.keys()
    assert [*additions] == sorted(additions) and additions["critical"] is found["snap_kv+critical"] is Critical
    assert pick([]) == found and [*pick(["random", "full"])] == ["random", "full"]
    assert [name for name in NAMES + ["ada_kv", "snap_kv"] if has_window(found[name])] == ["ada_kv", "snap_kv"]


@pytest.mark.parametrize("name, bases", [
    ("ada_kv+critical", [Critical, AdaKV]),
    ("ada_kv+critical+residual", [Residual, Critical, AdaKV]),
    ("snap_kv+critical+residual", [Residual, Critical, SnapKV])])
def test_an_addition_goes_on_top_of_what_stands_left_of_it(name, bases):
    (Method,) = pick([name]).values()
    assert [*Method.__mro__] == [Method, *bases, WindowCache, LayerCache, object] and Method.__name__ == name
    cache = Method(budget=20, window=3, alpha=0.7)
    assert (cache.budget, cache.window, cache.alpha, cache.voters, cache.kernel) == (20, 3, 0.7, 3, 7)
    assert cache != Method(budget=20, window=3, alpha=0.7)  # caches differ by identity, as those of a file


def test_a_knob_keeps_the_default_of_the_uppermost_method_that_names_it():
    names = ["chunk_kv+residual", "ada_kv+chunk+residual", "ada_kv+critical_code+residual", "snap_kv+semantic+residual"]
    found = [{name: x.default for name, x in inspect.signature(Method).parameters.items()} for Method in pick(names).values()]
    assert [x["kernel"] for x in found] == [1, 1, 7, 7] and [x["entries"] for x in found] == [1] * 4
    assert found[1]["floor"] == 0.2 and found[2]["alpha"] == 0.5 and found[3]["chunk"] == 32


def test_all_is_every_window_method_with_each_addition_once():
    found, additions, broken = methods()
    windows = [name for name, Method in found.items() if has_window(Method) and "+" not in name]
    assert {"ada_kv", "pyramid_kv", "snap_kv", "chunk_kv"} <= {*windows} and {"critical", "chunk", "residual"} <= additions.keys()
    chosen = pick(["all"])
    assert [*chosen] == ["full", *sorted(chosen.keys() - {"full"})]
    assert chosen.keys() - found.keys() == {f"{name}+{x}" for name in windows for x in additions
                                            if x == "residual" or not name.startswith("chunk")} - found.keys()
    assert chosen.keys() >= found.keys() and chosen["snap_kv+critical"] is Critical
    assert pick(["all", "h2o"]).keys() == chosen.keys()
    with pytest.raises(ValueError, match="unknown method 'nope'"):
        pick(["all", "nope"])


@pytest.mark.parametrize("name", ["nope", "nope+critical", "ada_kv+nope", "ada_kv+critical+nope", "h2o+critical",
                                  "streaming_llm_absolute+critical", "full+residual",
                                  "ada_kv+", "+critical", ""])
def test_an_unknown_name_is_answered_by_the_known_ones(name):
    known = [*methods()[0], *sorted(pick(["all"]).keys() - methods()[0].keys())]
    with pytest.raises(ValueError) as error:
        pick(["h2o", name])
    assert str(error.value) == f"unknown method {name!r}; known are {', '.join(known)}, all"


@pytest.mark.parametrize("name, message", [
    ("ada_kv+residual+critical", "critical chooses the entries itself and would undo residual; put it first"),
    ("ada_kv+critical+theta", "theta chooses the entries itself and would undo critical"),
    ("chunk_kv+critical", "critical chooses the entries itself and would undo chunk_kv; put it on another method"),
    ("chunk_kv+residual+chunk", "chunk chooses the entries itself and would undo chunk_kv"),
    ("ada_kv+critical+residual+residual", "names an addition twice")])
def test_additions_that_would_undo_each_other_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        pick([name])


@pytest.mark.parametrize("window, options", [(8, []), (5, ["--window", "5"])])
def test_the_window_reaches_the_methods_that_have_one(checkpoint, monkeypatch, capsys, window, options):
    made, maker = [], evaluate.maker
    monkeypatch.setattr(evaluate, "maker", lambda model, Method, fraction, **knobs: made.append((Method, knobs))
                        or maker(model, Method, fraction, **knobs))
    rows = compare(checkpoint, "--methods", "h2o", "ada_kv", "ada_kv+critical", "--budgets", "50", *options)
    assert [(has_window(Method), knobs) for Method, knobs in made] == [  # once to check them all, once to run
        (False, {}), (True, dict(window=window)), (True, dict(window=window))] * 2
    assert f"\n{additions_table(rows)}\n" in capsys.readouterr().out


def test_a_method_is_given_what_it_has_a_knob_for():
    known, names = dict(window=8, ends=torch.zeros(3)), ["snap_kv", "chunk_kv_reuse", "ada_kv+chunk", "ada_kv+semantic"]
    knobs = [given(Method, **known) for Method in (LayerCache, H2O, *pick(names).values())]
    assert [[*row] for row in knobs] == [[], [], ["window"], ["window"], ["window"], ["window", "ends"]]
    assert knobs[-1]["window"] == 8 and knobs[-1]["ends"] is known["ends"] and given(SnapKV) == {}


@dataclass(eq=False)
class Learned(LayerCache):
    """Keeps everything; it finds out three of its knobs itself."""
    budget: int
    window: int = 4
    heads: tuple = ()
    ends: torch.Tensor | str | None = None
    made, asked = [], []

    def __post_init__(self):
        super().__post_init__()
        if self.budget < 5:
            raise ValueError(f"budget {self.budget} must be at least 5")
        self.made.append(self)

    @classmethod
    def calibrate(cls, model, encoding):
        cls.asked.append(len(cls.made))
        return dict(window=model.config.n_layers, heads=(encoding.n_vocab, "from the decoder"), ends="its own")


FOUND_OUT = dict(window=2, heads=(2048, "from the decoder"), ends="its own")


@pytest.fixture
def fresh(monkeypatch):
    for name in ("made", "asked"):
        monkeypatch.setattr(Learned, name, [])
    monkeypatch.setattr("nanollm.__main__.pick", lambda names: {name: dict(learned=Learned, h2o=H2O)[name] for name in names})


def test_some_methods_have_no_budget():
    found = pick(["all"])
    without = [name for name, Method in found.items() if not has_budget(Method)]
    assert without == ["full", "quantized_2", "quantized_3", "quantized_4"]
    assert not has_budget(Quantized) and has_budget(H2O) and has_budget(Learned) and has_budget(partial(Learned, window=3))


def test_a_method_may_find_out_about_the_decoder_itself(checkpoint, fresh):
    model = from_hf(checkpoint)
    assert ENCODING.n_vocab == 2048 and calibrated(Learned, model, ENCODING) == FOUND_OUT
    assert calibrated(LayerCache, model, ENCODING) == calibrated(SnapKV, model, ENCODING) == {}
    assert calibrated(partial(Learned, heads=(3,)), model, ENCODING) == {} and len(Learned.asked) == 1  # a variant is as it is


def as_found_out(cache):
    return all(getattr(cache, name) == x for name, x in FOUND_OUT.items())


def test_what_a_method_has_found_out_wins_over_what_is_known_and_is_asked_for_once(checkpoint, fresh):
    rows = compare(checkpoint, "--methods", "learned", "h2o", "--lengths", "288", "300", "--window", "6")
    assert len(rows) == 8 and Learned.asked == [8]  # two layers at two lengths and two budgets were tried out before
    ends = boundaries(ENCODING, 2048)
    assert all(cache.window == 6 and cache.heads == () and torch.equal(cache.ends, ends) for cache in Learned.made[:8])
    assert len(Learned.made) > 16 and all(map(as_found_out, Learned.made[8:]))


def test_what_a_method_has_found_out_reaches_the_caches_that_generate(checkpoint, fresh):
    main(["generate", "--model", str(checkpoint), *"--method learned --budget 7 --tokens 3 x".split()])
    assert Learned.asked == [0] and len(Learned.made) == 2 and all(map(as_found_out, Learned.made))
    assert {cache.budget for cache in Learned.made} == {7}


def test_a_mistake_is_found_before_a_method_is_asked(checkpoint, fresh, capsys):
    refused(capsys, ["--model", str(checkpoint), *SMALL, "--methods", "learned", "--budgets", "50", "2"],
            "learned at 2 % of 223 tokens: budget 4 must be at least 5")
    assert Learned.asked == [] and len(Learned.made) == 2


def test_a_method_without_a_budget_runs_once_whatever_the_budgets_are(checkpoint, capsys):
    rows = compare(checkpoint, "--methods", "quantized_2", "h2o", "full", "quantized_4", "--budgets", "50", "12.5", "3")
    assert [(row["method"], row["fraction"]) for row in rows] == [
        ("quantized_2", None), ("h2o", 0.5), ("h2o", 0.125), ("h2o", 0.03), ("full", None), ("quantized_4", None)]
    two, *_, full, four = rows
    for row, bits in ((two, 2), (four, 4)):  # of 287 tokens, 256 in groups of 32, and 31 of k and v of 8 floats and a position
        assert row["live"] == 2 * 2 * (31 * (2 * 8 * 4 + 4) + 256 * (2 * bits + 4) + 8 * 8 * 4)
    assert two["kl"] > four["kl"] > full["kl"] and four["kl"] > 1e-5 > abs(full["kl"])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [cells[1] for cells in printed if cells and cells[0] in ("quantized_2", "full", "quantized_4")] == ["all"] * 3


def test_a_mistake_of_a_method_without_a_budget_names_none(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("nanollm.__main__.pick", lambda names: dict(good=Quantized, bad=partial(Quantized, group=3)))
    out = refused(capsys, ["--model", str(checkpoint), *SMALL], "^error: bad: head dim 8 must be .* of the group 3;")
    assert "documents per task" not in out


def test_the_methods_with_a_selection_of_their_own_are_those_on_which_another_is_refused():
    found = {name: Method for name, Method in methods()[0].items() if has_window(Method) and "+" not in name}
    assert {name for name, Method in found.items() if chooses(Method)} == {"chunk_kv", "chunk_kv_semantic"}
    for name, bases in {"chunk_kv+residual": [Residual, ChunkKV], "ada_kv+chunk+residual": [Residual, ChunkKV, AdaKV],
                        "ada_kv+semantic": [SemanticChunkKV, ChunkKV, AdaKV]}.items():
        assert [*pick([name])[name].__mro__][1:-3] == bases


def test_chunk_kv_knows_what_text_its_tokens_are(checkpoint, monkeypatch):
    made, maker, names = [], evaluate.maker, ["chunk_kv", "chunk_kv_reuse", "chunk_kv_semantic"]
    monkeypatch.setattr(evaluate, "maker", lambda model, Method, fraction, **knobs: made.append(knobs)
                        or maker(model, Method, fraction, **knobs))
    rows = compare(checkpoint, "--methods", *names, "--budgets", "12.5", "--window", "5")
    assert [sorted(knobs) for knobs in made] == [["window"], ["window"], ["ends", "window"]] * 2
    assert torch.equal(made[2]["ends"], boundaries(ENCODING, 2048))
    slot, prompt = 2 * 2 * (2 * 8 * 4 + 4), 223
    most = slot * (round(0.125 * prompt) + 64)
    assert [row["method"] for row in rows] == names and len({row["kl"] for row in rows}) == 3
    assert all(most - slot * 20 <= row["live"] <= most + 2 * 2 * 8 for row in rows)  # a table of lengths, if they differ


# ---- what an addition changes ---


def test_an_addition_is_compared_with_the_row_without_it():
    def row(method, fraction, tokens, shift, text):
        shares = {f"{task}_{setting}": [0.25, 0.25 + shift * (setting == "aware")]
                  for task in TASKS for setting in ("aware", "blind")}
        each = shares | dict(kl=[text, 3 * text], nll=[4.0, 2 * text], l1_alone=[9.0, text])
        return dict(method=method, fraction=fraction, tokens=tokens, each=each)

    base = [row("full", None, 288, 0, 0.0), row("h2o", 0.5, 288, 0, 0.0), row("ada_kv", 0.25, 288, 0.5, 8.0),
            row("ada_kv", 0.5, 300, 0.5, 8.0), row("snap_kv+critical", 0.5, 288, 0.5, 8.0), row("ada_kv", 0.5, 288, 0, 1.0)]
    assert additions_table([]) == additions_table(base) == ""
    # aware: half of six differences are 0, the others 0.3, so ± 0.3 · √(1/4 / 5)
    more = row("ada_kv+critical", 0.5, 288, 0.3, 2.0), row("ada_kv+critical+residual", 0.5, 288, 0.3, 1.0)
    assert additions_table([*base, *more]).splitlines() == [
        "", "changes by additions        budget    aware           blind             nll              KL              L1", "",
        "ada_kv                        50 %    0.250           0.250           3.000           2.000           5.000",
        "ada_kv+critical               50 %   +0.150 ±0.067   +0.000 ±0.000   +1.000 ±1.000   +2.000 ±1.000   +0.500 ±0.500", "",
        "ada_kv+critical               50 %    0.400           0.250           4.000           4.000           5.500",
        "ada_kv+critical+residual      50 %   +0.000 ±0.000   +0.000 ±0.000   -1.000 ±1.000   -2.000 ±1.000   -0.500 ±0.500"]


# ---- generate ---


def test_generate_continues_the_prompt(checkpoint, capsys):
    main(["generate", "--model", str(checkpoint), "--tokens", "12", "The import system"])
    expected = generate(from_hf(checkpoint), torch.tensor([ENCODING.encode("The import system")]), 12)
    text, tail = capsys.readouterr().out.split("\n\n[")
    assert text == "The import system" + ENCODING.decode(expected[0].tolist()).removesuffix("\ufffd")
    seen = len(ENCODING.encode("The import system")) + 11
    assert tail.startswith(f"{seen} tokens seen, at most {seen} slots kept per head in layer 0")


def test_generate_samples_as_it_is_told(checkpoint, capsys):
    main(["generate", "--model", str(checkpoint), *"--tokens 12 --temperature 2 --top-k 40 --top-p 0.9 --seed 3 x".split()])
    expected = generate(from_hf(checkpoint), torch.tensor([ENCODING.encode("x")]), 12,
                        temperature=2.0, top_k=40, top_p=0.9, seed=3)
    assert capsys.readouterr().out.startswith("x" + ENCODING.decode(expected[0].tolist()).removesuffix("\ufffd") + "\n\n[")


def test_generate_compresses(checkpoint, capsys):
    main(["generate", "--model", str(checkpoint), *"--method h2o --budget 6 --tokens 9".split(), "A longer prompt " * 9])
    live = 2 * 2 * 6 * (2 * 8 * 4 + 8) / 1024
    assert re.search(rf"6 slots kept per head in layer 0, {live:.0f} KiB live", capsys.readouterr().out)


def test_generate_without_a_budget(checkpoint, capsys):
    prompt = "A longer prompt " * 9
    main(["generate", "--model", str(checkpoint), *"--method quantized_2 --tokens 9".split(), prompt])
    model, tokens = from_hf(checkpoint), torch.tensor([ENCODING.encode(prompt)])
    caches = make_cache(model, Quantized, bits=2, exact=16)
    new, seen = generate(model, tokens, 9, caches), tokens.shape[1] + 8
    left = seen - (seen - 16) // 32 * 32
    live, allocated = (f"{x / 1024:.0f} KiB" for x in cache_bytes(caches))
    text, tail = capsys.readouterr().out.split("\n\n[")
    assert text == prompt + ENCODING.decode(new[0].tolist()).removesuffix("\ufffd")
    assert left < seen and live != allocated
    assert tail == (f"{seen} tokens seen, at most {left} slots kept per head in layer 0, "
                    f"{live} live, {allocated} allocated]\n")


def test_generate_cuts_where_the_text_does(checkpoint, capsys):
    prompt = "".join(f"Line {i} is this. And a longer one, of words: none.\n" for i in range(12))
    main(["generate", "--model", str(checkpoint), *"--method chunk_kv_semantic --budget 60 --tokens 9".split(), prompt])
    model, written = from_hf(checkpoint), []
    for ends in (boundaries(ENCODING, 2048), torch.zeros(2048, dtype=torch.bool)):
        caches = make_cache(model, SemanticChunkKV, budget=60, ends=ends)
        new = generate(model, torch.tensor([ENCODING.encode(prompt)]), 9, caches)
        written.append(prompt + ENCODING.decode(new[0].tolist()).removesuffix("\ufffd") + "\n\n[")
    assert capsys.readouterr().out.startswith(written[0]) and written[0] != written[1]


def test_text_appears_token_by_token_and_characters_whole(checkpoint, capsys, monkeypatch):
    ids, printed = [*ENCODING.encode(" so né😀"), ENCODING.encode("x")[0]], []

    def stream(*_, **__):
        for i in ids:
            printed.append(capsys.readouterr().out)
            yield torch.tensor([i])

    monkeypatch.setattr("nanollm.generate.stream", stream)
    main(["generate", "--model", str(checkpoint), "Say:"])
    assert printed[0] == "Say:" and printed[1] == ENCODING.decode(ids[:1])
    assert "".join(printed) == "Say: so né😀" and "\ufffd" not in "".join(printed)
    assert printed.count("") >= 3  # the emoji's four bytes are four tokens


# ---- mistakes ---


def refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, error = capsys.readouterr()
    error = error.rsplit("\r")[-1]  # perhaps a progress bar was wiped out
    assert stop.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(message, error), error
    return out


@pytest.mark.parametrize("arguments, message", [
    ("--methods h2o nope", "unknown method 'nope'; known are full, .*h2o.*streaming_llm"),
    ("--budgets 50 0", "budget 0 % must lie above 0"),
    ("--budgets 101", "budget 101 % must lie above 0 and up to 100"),
    ("--budgets nan", "budget nan %"),
    ("--methods streaming_llm --budgets 50 1", r"streaming_llm at 1 % of \d+ tokens: budget 2 must be at least 5"),
    ("--methods chunk_kv --budgets 50 6.25", r"chunk_kv at 6.25 % of 223 tokens: budget 14 has no room for a chunk of 10"),
    ("--documents 1", "documents 1 must be a whole number of at least 2"),
    ("--methods kv_reviver --budgets 3 --documents 2 --lengths 256", "1 of 1 rows failed: kv_reviver at 3 %: budget 7 has"),
    ("--documents 0", "documents 0 must be a whole number of at least 2"),
    ("--methods full --lengths 30", r"need \d+ tokens more"),
    ("--lengths 401", "length 401 must be a whole number from 16 to 400"),
    ("--lengths 288 0", "length 0 must be a whole number from 16 to 400"),
    ("--seed -1", "seed -1 must be a whole number from 0"), ("generate --seed 99999999999999999999 x", "seed 9+ must be"),
    ("--threads -1", "threads -1 must be a whole number"), ("generate --threads -1 x", "threads -1 must be a whole number"),
    ("--json nowhere/rows.json", "folder nowhere for rows.json is not there"),
    ("--figure nowhere/compare.png", "folder nowhere for compare.png is not there"),
    ("generate --method nope x", "unknown method 'nope'; known are"),
    ("generate --method h2o x", "h2o needs --budget"),
    ("generate --budget 5 x", "full has no budget; leave --budget out"),
    ("generate --method quantized_2 --budget 5 x", "quantized_2 has no budget; leave --budget out"),
    ("generate --method ada_kv+critical x", r"ada_kv\+critical needs --budget, in slots per key/value head"),
    ("generate --method h2o --budget 1 x", "budget 1 must be at least 2"),
    ("generate --method h2o --budget 0 x", "budget 0 must be at least 2"),
    ("generate --temperature -1 x", "temperature -1"),
    ("generate --device cuda x", "device 'cuda' is not there"),
    ("--device cuda", "device 'cuda' is not there"),
    ("--device foo", "device 'foo' is not there"),
])
def test_a_mistake_is_one_line(checkpoint, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    first, *rest = arguments.split()
    command = [first] if first == "generate" else ["compare", *SMALL, first]
    refused(capsys, [*command, *rest, "--model", str(checkpoint)], message)


@pytest.mark.parametrize("window, budgets, message", [
    (20, "50 12.5 6.25", r"ada_kv\+critical at 6.25 % of 223 tokens: budget 14 must exceed the window 20"),
    (28, "50 12.5", r"ada_kv\+critical at 12.5 % of 223 tokens: budget 28 must exceed the window 28"),
    (0, "50", "window 0 must be at least 1")])
def test_a_window_that_does_not_fit_is_found_before_any_work(checkpoint, capsys, window, budgets, message):
    arguments = ["--methods", "h2o", "ada_kv+critical", "--window", str(window), "--budgets", *budgets.split()]
    assert "documents per task" not in refused(capsys, ["--model", str(checkpoint), *SMALL, *arguments], message)


@pytest.mark.parametrize("prompt, message", [("", "the prompt's tokens are empty"),
                                             ("word " * 300, "prompt tokens and 100 new ones exceed")])
def test_a_prompt_that_cannot_be_read_is_one_line(checkpoint, capsys, prompt, message):
    assert refused(capsys, ["generate", "--model", str(checkpoint), prompt], message) == ""  # nor is the prompt echoed


def test_a_checkpoint_that_cannot_be_read_is_one_line(checkpoint, capsys, tmp_path):
    refused(capsys, ["--model", "nowhere"], "nowhere/config.json is missing")
    shutil.copytree(checkpoint, tmp_path / "nan")
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "nan" / "model.safetensors")
    refused(capsys, ["generate", "--model", "nan", "x"], "model.norm.weight holds inf or nan")
    (tmp_path / "nan" / "tokenizer.tiktoken").unlink()
    save_file(load_file(checkpoint / "model.safetensors"), tmp_path / "nan" / "model.safetensors")
    refused(capsys, ["generate", "--model", "nan", "x"], "nan has no tokenizer")


def test_a_mistake_shows_no_traceback():
    done = command("nanollm", "--methods", "nope")
    assert done.returncode == 2 and done.stderr.startswith("error: unknown method") and done.stderr.count("\n") == 1
